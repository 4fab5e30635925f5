"""One of two processes, started by tests/dispatch/test_sharded.py: `two_processes.py PROCESS PORT DEVICES`.

DEVICES is "cpu", for four CPU devices per process, or the number of GPUs per process. Each process checks its own parts
of the results. Rows have ties across the processes.
"""

import functools
import itertools
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import pallas_softmax as ps
from tests.programs.sharded_checks import NAMES, TOPK, assert_value, logits, on, ours, split
from tests.support import oracle


def held(array, want):
    """Returns the expected array with this process's parts replaced by the actual ones."""
    whole = np.asarray(want).astype(array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def check(op, layout, how):
    at, x = split(layout, how), logits()
    y, indices = jax.jit(on(at, how, op, functools.partial(ours, op)))(at.place(x))
    if op in TOPK:
        values, best = oracle.fused_topk(x, **TOPK[op])
        got = held(y, values), held(indices, best)
    else:
        got = held(y, oracle.softmax(x)), None
    assert_value(op, got, x, NAMES)


def check_parameters_of_rows():
    """Checks parameters per row outside of jit; a process knows only the parameters of its own rows."""
    rng = np.random.default_rng(0)
    x, t, k = rng.standard_normal((8, 64)), np.linspace(0.5, 2, 8), np.arange(1, 9, dtype=np.int32)
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("rows",)), PartitionSpec("rows"))

    def place(a):
        return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])

    logits, temperature = place(x.astype(np.float32)), place(t.astype(np.float32))
    values = ps.fused_topk(logits, 3, temperature=temperature).values
    want = -np.sort(-oracle.softmax(x / t[:, None]))[:, :3]
    drawn = ps.sample(jax.random.key(0), logits, temperature=temperature, top_k=place(k)).indices
    rank = np.argsort(np.argsort(-x))
    for value, index in zip(values.addressable_shards, drawn.addressable_shards):
        np.testing.assert_allclose(value.data, want[value.index], rtol=1e-5)
        row = np.arange(8)[index.index]
        assert (rank[row, np.asarray(index.data)] < k[row]).all()


def main(process, port, devices):
    number, address = int(process), f"localhost:{port}"
    if devices == "cpu":
        each = 4
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", each)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 2, number)
    else:
        each = int(devices)
        jax.distributed.initialize(address, 2, number, range(number * each, (number + 1) * each))
    assert (jax.device_count(), jax.local_device_count()) == (2 * each, each)
    for case in itertools.product(("softmax", "topk"), ("spread", "batch"), ("auto", "shard_map")):
        print(*case, flush=True)
        check(*case)
    check_parameters_of_rows()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
