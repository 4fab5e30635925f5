"""Checks of benchmarks.sharded on eight CPU devices, which tests/benchmarks/test_sharded.py runs.

Then it runs the benchmark, which writes to the folder named on the command line.
"""

import collections
import re
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import sharded
from benchmarks.support import cases, timing
from benchmarks.support.cases import Case
from tests.benchmarks.conftest import flags_of

CASE = Case(16, 64, "float32", "softmax", "none", -1, 3, "forward", "normal", 0)


def drawn(sharding, devices):
    return sharded.draw(sharded.Layout(CASE, sharding, devices))


def every_layout_has_the_same_logits():
    want = np.asarray(cases.logits(CASE))
    for sharding, devices in (("none", 1), ("batch", 2), ("vocab", 8)):
        x = drawn(sharding, devices)
        assert len(x.addressable_shards) == devices
        assert x.addressable_shards[0].data.size == want.size // devices
        np.testing.assert_array_equal(np.asarray(x), want)


def a_program_of_three_calls_does_three_times_the_work():
    """Merged calls, extra copies and a result with another sharding are detected."""
    x = drawn("vocab", 4)

    def count(program):
        text = program.as_text()
        work = re.findall(r" (exponential|custom-call)\(", text)
        return sharded.parts(text) + collections.Counter(work), len(re.findall(r" copy\(", text))

    functions = sharded.functions(CASE)
    for name in (sharded.OURS, sharded.SOFTMAX):  # the first returns other shapes, the second the shape of x
        function = functions[name]
        single = jax.jit(function).lower(x).compile()
        program = sharded.compile_repeated(function, 3, x)
        (one, copies), (three, all_copies) = count(single), count(program)
        assert one["exponential"] and one["all-reduce"] + one["all-gather"], (name, one)
        assert three == {part: 3 * n for part, n in one.items()}, (name, one, three)
        assert all_copies <= 3 * copies, (name, copies, all_copies)
        assert sharded._not_repeated(single, program, 3, x) == ""

    merged = jax.jit(lambda x: [function(x) for _ in range(3)]).lower(x).compile()
    why = sharded._not_repeated(single, merged, 3, x)
    assert why.startswith("no device time: a call has"), why
    gathered = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(x.sharding.mesh, P())).lower(x).compile()
    why = sharded._not_repeated(gathered, gathered, 1, x)
    assert why.startswith("no device time: the result does not lie"), why


def main(folder):
    assert jax.device_count() == 8 and not timing.on_gpu()
    every_layout_has_the_same_logits()
    a_program_of_three_calls_does_three_times_the_work()
    command = ["--flagfile=configs/sharded.flags", "--shapes=16x64x3,16x64", "--devices=2,16"]
    command += ["--sharding=vocab", f"--output_dir={folder}", "--seconds=0", "--repeats=3"]
    with flags_of(sharded, *command):
        return sharded.main(["sharded"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
