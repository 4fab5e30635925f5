"""The selection of rows of every kind: the program in NumPy (tests/support/ptx.py), and what is around it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.select import kernel as select_kernel
from pallas_softmax._src.select.plan import LEAST_CAPACITY, MAX_SELECTED, SelectPlan, registers_plan
from pallas_softmax._src.sort_keys import INTEGERS_AS_FLOATS
from pallas_softmax._src.topk import mosaic_gpu
from tests.support import cases, oracle
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.gpu import assert_top_k
from tests.topk.select import machine_launch, rows_of

FLOATS = [F32, BF16, F16]
INTEGERS = [*map(np.dtype, ("int32", "uint32", "int16", "uint16", "int8", "uint8"))]
MODES = ["plain", "where", "one mask", "mask of rows", "lengths", "both"]
SEEDS = 36  # every dtype with every mode. benchmarks/results/NOTES.md has the result of 20,000 rows


def random_rows(seed, v, k, dtype):
    if dtype in INTEGERS:
        return np.concatenate([cases.integers(np.random.default_rng([seed, i]), v, dtype) for i in range(5)])
    return np.concatenate([cases.rows(ALL, v, dtype, seed), [*rows_of(v, k, dtype, seed).values()]])


def random_plan(rng, dtype, masked):
    """Returns a plan of any kind; its lists have little room or much. Half of the plans without a mask hold rows."""
    if not masked and rng.random() < 0.5:
        return random_registers_plan(rng, dtype)
    v, ctas = int(np.exp(rng.uniform(5, 9.2))), int(rng.choice([1, 1, 2, 4]))
    warpgroups, sample_vectors = map(int, rng.choice([1, 2, 4], 2))
    most = min(v, MAX_SELECTED)
    k = most if rng.random() < 0.2 else int(np.exp(rng.uniform(0, np.log(most + 1))))
    plan = SelectPlan(v, k, ctas, warpgroups, 0, sample_vectors, int(rng.choice([32, 64, 128])))
    itemsize = jnp.dtype(INTEGERS_AS_FLOATS.get(dtype.name, dtype)).itemsize
    least = k + plan.warp_elements(itemsize) + (k if ctas > 1 else 0)
    capacity = max(least, int(rng.choice([least, 3 * k, LEAST_CAPACITY])))
    return dataclasses.replace(plan, capacity=-(-capacity // 32) * 32)


def random_registers_plan(rng, dtype):
    """Returns a plan of rows in registers, which have room for any address, or just for the row."""
    warpgroups, thread_bytes = int(rng.choice([1, 2, 4])), int(rng.choice([32, 64, 128]))
    most = warpgroups * WARPGROUP * thread_bytes // jnp.dtype(INTEGERS_AS_FLOATS.get(dtype.name, dtype)).itemsize
    v = most if rng.random() < 0.5 else int(rng.integers(8, most - 8))
    k = int(np.exp(rng.uniform(0, np.log(min(v, MAX_SELECTED) + 1))))
    return registers_plan(v, k, warpgroups, thread_bytes)


def spoiled(rng, mode, x):
    """Returns x with NaN and infinities where masked; what is unmasked; `where` and `lengths` as JAX arrays."""
    where = lengths = None
    rows, v = x.shape
    if mode in ("where", "one mask", "mask of rows", "both"):
        shape = (rows if mode in ("where", "mask of rows") else 1, 1 if mode == "mask of rows" else v)
        where = rng.random(shape) < rng.choice([0.01, 0.5, 0.95], (shape[0], 1))
    if mode in ("lengths", "both"):
        lengths = rng.integers(-9, v + 9, rows).astype("int32")
        lengths[: rows // 3] = rng.integers(0, min(v, 40), rows // 3)
    if where is None and lengths is None:
        return x, None, None, None
    kept = oracle.within(x, np.full(rows, v) if lengths is None else lengths, where)
    where = None if where is None else jnp.asarray(where)
    lengths = None if lengths is None else jnp.asarray(lengths)[:, None]
    hidden = np.where(kept, x, np.iinfo(x.dtype).max) if x.dtype in INTEGERS else cases.spoil_masked(x, kept)
    return hidden, kept, where, lengths


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_rows(monkeypatch, seed):
    """The winners as they are, bit by bit; x begins and ends anywhere between multiples of 16 bytes."""
    rng = np.random.default_rng(seed)
    dtype, modes = [*2 * FLOATS, *INTEGERS][seed % 12], MODES
    if dtype in INTEGERS:
        modes = ["plain", "lengths"]
    mode = modes[(seed + seed // 12) % len(modes)]
    plan = random_plan(rng, dtype, mode not in ("plain", "lengths"))
    is_sorted = bool(rng.integers(2))
    plan = dataclasses.replace(plan, sorted=is_sorted)
    x, kept, *masking = spoiled(rng, mode, random_rows(seed, plan.vocab, plan.k, dtype))
    offset = 0 if plan.in_registers and plan.vocab % 8 == 0 else int(rng.integers(16 // dtype.itemsize))

    def launch(*args):
        return machine_launch(*args, offset=offset)[:2]

    monkeypatch.setattr(select_kernel, "_launch", launch)
    got = mosaic_gpu.select(plan, jnp.asarray(x), *masking, k=plan.k, sorted=is_sorted)
    names = [f"row {i} of {plan}, {dtype}, {mode}, sorted: {is_sorted}" for i in range(len(x))]
    assert_top_k(got, x, plan.k, names, kept, is_sorted)
