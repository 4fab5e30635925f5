"""Checks on eight CPU devices, which tests/benchmarks/test_sharded.py runs; prints {check: "ok" or the error}."""

import collections
import dataclasses
import functools
import json
import re
import sys
import time
import traceback

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import sharded
from benchmarks.support import cases, links, timing
from benchmarks.support.cases import Case

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
ALL = ("a", "b")
X = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
COLLECTIVES = {  # for a part (8, 8): the function, the bytes and the group size to read from its program
    "all-gather": (lambda x: lax.all_gather(x, ALL), 8 * 256, 8),
    "all-gather of a row": (lambda x: lax.all_gather(x, "b"), 4 * 256, 4),
    "all-reduce": (lambda x: lax.psum(x, ALL), 256, 8),
    "all-reduce of a column": (lambda x: lax.pmax(x, "a"), 256, 2),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, ALL), 256, 8),
    "reduce-scatter of a row": (lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True), 256, 4),
    "all-to-all": (lambda x: lax.all_to_all(x, ALL, 0, 1), 256, 8),
    "collective-permute": (lambda x: lax.ppermute(x, "b", [(i, i ^ 1) for i in range(4)]), 256, 8),
}
SHARED = [("none", 1), ("batch", 2), ("vocab", 8)]


def layout_of(sharding, devices):
    case = Case(16, 64, "float32", "softmax", "none", -1, 3, "forward", "normal", 0)
    return sharded.Layout(case, sharding, devices)


def reads(name):
    function, size, group = COLLECTIVES[name]
    mapped = jax.shard_map(function, mesh=MESH, in_specs=P(ALL), out_specs=P(ALL), check_vma=False)
    found = links.collectives(jax.jit(mapped).lower(X).compile().as_text())
    assert found == [links.Collective(name.split()[0], size, group)], found


def reads_several():
    def function(x):
        return lax.psum(x, "a") + 1, lax.psum(x[:3], "a") + 2, lax.pmax(x[:5, :1], ALL)

    mapped = jax.shard_map(function, mesh=MESH, in_specs=P(ALL), out_specs=P(ALL), check_vma=False)
    found = links.collectives(jax.jit(mapped).lower(X).compile().as_text())
    total = collections.Counter()
    for each in found:
        total[each.kind, each.group] += each.bytes
    assert total == {("all-reduce", 2): 4 * (64 + 24), ("all-reduce", 8): 4 * 5}, found


def logits_are_the_same():
    want = np.asarray(cases.logits(layout_of("none", 1).case))
    for (sharding, devices), axis_type in zip(SHARED, (AxisType.Auto, AxisType.Explicit, AxisType.Auto)):
        x = sharded.draw(layout_of(sharding, devices), axis_type)
        assert len(x.addressable_shards) == devices and set(x.sharding.mesh.axis_types) == {axis_type}
        assert x.addressable_shards[0].data.size == want.size // devices
        np.testing.assert_array_equal(np.asarray(x), want)


def rows_are_fetched_from_their_devices():
    rows = np.array([0, 7, 8, 15])
    for sharding, devices in SHARED:
        x = sharded.draw(layout_of(sharding, devices), AxisType.Explicit)
        np.testing.assert_array_equal(sharded._fetch(x, rows), np.asarray(x)[rows])


def repeats(sharding):
    """A program of n calls does n times the work of one call, without extra copies."""
    layout = layout_of(sharding, 4)
    x = sharded.draw(layout, AxisType.Auto)
    functions = sharded.functions(layout.case)
    functions["softmax"] = sharded.functions(dataclasses.replace(layout.case, k=None))[sharded.OURS]

    def count(program):
        text = program.as_text()
        work = re.findall(r" (exponential|custom-call)\(", text)
        return sharded.parts(text) + collections.Counter(work), len(re.findall(r" copy\(", text))

    for name, function in functions.items():
        single = jax.jit(function).lower(x).compile()
        program = sharded.compile_repeated(function, 3, x)
        (one, copies), (three, all_copies) = count(single), count(program)
        assert one["exponential"] and (sharding != "vocab" or one["all-reduce"] + one["all-gather"]), (
            name,
            one,
        )
        assert three == {part: 3 * n for part, n in one.items()}, (name, one, three)
        assert all_copies <= 3 * copies, (name, copies, all_copies)
        assert sharded._not_repeated(single, program, 3, x) == ""


def merged_calls_are_detected():
    layout = layout_of("vocab", 8)
    x = sharded.draw(layout, AxisType.Auto)
    function = sharded.functions(layout.case)[sharded.JAX]
    merged = jax.jit(lambda x: [function(x) for _ in range(3)]).lower(x).compile()
    why = sharded._not_repeated(jax.jit(function).lower(x).compile(), merged, 3, x)
    assert why.startswith("no device time: a call has"), why


def a_result_with_another_sharding_is_detected():
    layout = layout_of("vocab", 8)
    x = sharded.draw(layout, AxisType.Auto)
    gathered = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(x.sharding.mesh, P()))
    program = gathered.lower(x).compile()
    why = sharded._not_repeated(program, program, 1, x)
    assert why.startswith("no device time: the result does not lie"), why


def a_further_call_is_timed_without_a_trace():
    """A CPU's trace has no kernels of a GPU."""
    layout = layout_of("vocab", 8)
    x = sharded.draw(layout, AxisType.Auto)
    function = jax.jit(sharded.functions(layout.case)[sharded.OURS])
    single = function.lower(x).compile()
    found = sharded.device_time(single, sharded.compile_repeated(function, sharded.CALLS, x), x)
    start = time.perf_counter()
    jax.block_until_ready([function(x) for _ in range(sharded.CALLS)])
    seconds = (time.perf_counter() - start) / sharded.CALLS
    assert found["timed_by"] == "host's clock"
    assert 0.02 * seconds < found["device_us"] / 1e6 < 50 * seconds, (found, seconds)


def outcome(check, *args):
    try:
        check(*args)
    except Exception:
        return traceback.format_exc()[-3000:]
    return "ok"


CHECKS = {
    **{f"reads {name}": functools.partial(reads, name) for name in COLLECTIVES},
    **{f"repeats {sharding}": functools.partial(repeats, sharding) for sharding in sharded.SHARDINGS},
    **{
        check.__name__.replace("_", " "): check
        for check in (
            reads_several,
            logits_are_the_same,
            rows_are_fetched_from_their_devices,
            merged_calls_are_detected,
            a_result_with_another_sharding_is_detected,
            a_further_call_is_timed_without_a_trace,
        )
    },
}


def main():
    assert jax.device_count() == 8 and not timing.on_gpu()
    json.dump({name: outcome(check) for name, check in CHECKS.items()}, sys.stdout)


if __name__ == "__main__":
    main()
