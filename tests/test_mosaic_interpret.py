"""Every Mosaic GPU kernel in Pallas's interpreter on the CPU, against the oracle.

What the kernels do by inline PTX has a plain twin here; the GPU runs the PTX itself (test_gpu.py).
"""

import dataclasses

import cases
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, F16, F32

from pallas_softmax.mosaic_gpu import candidates, launch, softmax_kernel, topk_kernel
from pallas_softmax.mosaic_gpu.launch import Parts, Tile

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams()
ALL = [*cases.FINITE, *cases.SPECIAL]  # 31 rows, a prime
FEW = ["normal", "peaked", "integers", "ascending", "everything", "neg_inf_last", "nan_last"]


def assert_topk(x, temperature, k, names):
    """Indices exactly, logits bit for bit, and by the normalizer the probabilities of the winners."""
    winners, (m, d) = topk_kernel.topk_rows(x, jnp.asarray(temperature), k, interpret=INTERPRET)
    want, indices = oracle.fused_topk(x, k, temperature=_scalar(temperature))
    assert winners.indices.dtype == jnp.int32
    for i, name in enumerate(names):
        np.testing.assert_array_equal(winners.indices[i], indices[i], err_msg=name)
    logits = np.take_along_axis(x, indices, -1).astype(F32)
    np.testing.assert_array_equal(np.asarray(winners.values).view(np.int32), logits.view(np.int32))
    assert m.shape == d.shape == (len(x), 1)
    t = np.reshape(temperature, (-1, 1))
    with np.errstate(all="ignore"):
        p = np.exp((logits - np.asarray(m)) / t) / np.asarray(d)
    # 1 / temperature is rounded once, and multiplied: one more unit each way
    unit = 1.5 * oracle.fused_topk_unit(x, k, temperature=_scalar(temperature))
    oracle.assert_close(p.astype(F32), want, unit, names)


def _scalar(temperature):
    return temperature[0] if temperature.size == 1 else temperature


ONE = np.ones(1, F32)


# --- softmax, log_softmax, logsumexp and their backwards ----------------------------------------------

each = pytest.mark.parametrize("name", oracle.OPERATIONS)


def run(name, arrays, where=None, axes=(-1,), plan=None, interpret=INTERPRET):
    """The kernel's result, in the dtype in which the public functions return it."""
    axes = tuple(a % arrays[0].ndim for a in axes)
    arrays = [jnp.asarray(a) for a in arrays]
    where = None if where is None else jnp.asarray(where)
    out = softmax_kernel.rows(name, arrays, where, axes, plan=plan, interpret=interpret)[0]
    return np.asarray(out.astype(arrays[-1].dtype))


def check(name, x, names, where=None, plan=None, interpret=INTERPRET):
    arrays = cases.operands(name, x, where)
    if where is not None:
        arrays = [cases.spoilt(a, where) if a is arrays[-1] else a for a in arrays]
    got = run(name, arrays, where, plan=plan, interpret=interpret)
    oracle.assert_operation(name, got, arrays, names, where)


# Rows over 2 to 128 lanes, and several of them in a CTA; whole vectors and not; several vectors a lane.
TILES = [
    (1, F32, FEW),
    (2, BF16, FEW),
    (7, F16, FEW),
    (127, F32, FEW),
    (128, BF16, FEW),
    (129, F16, FEW),
    (1000, F32, ALL),
    (1000, BF16, ALL),
    (1003, F16, FEW),
    (5000, F32, FEW[:3]),
    (129, F32, FEW[:1]),
]


@pytest.mark.parametrize(("v", "dtype", "names"), TILES, ids=[f"{len(n)}x{v}-{d}" for v, d, n in TILES])
@each
def test_short_rows(name, v, dtype, names):
    plan = launch.plan(name, len(names), v, dtype, (9, 0))
    assert isinstance(plan, Tile)
    if name == "logsumexp" and dtype != F32:  # XLA for CPUs loses the NaN in max(x.astype("float32"), 1)
        names = [n for n in names if n not in ("nan_and_inf", "everything")]
    few = dataclasses.replace(plan, rows=min(plan.rows, 4))  # the interpreter is slow at many, one by one
    check(name, cases.rows(names, v, dtype), names, plan=few)


# One CTA a row: exact blocks; several steps, the last short. Rows and parts off 16 bytes; parts that overlap,
# or are all alike; the rows alone, or as many as together are a multiple of 16 bytes.
PARTS = [
    (Parts(1024, 4, 2, 1, True), F32, ALL),
    (Parts(5000, 8, 2, 1, True), BF16, FEW),
    (Parts(1003, 4, 2, 1, True), F32, ALL),
    (Parts(1003, 8, 1, 2, False), BF16, FEW),
    (Parts(1003, 8, 4, 3, False), F16, FEW + FEW[:1]),
    (Parts(1002, 4, 1, 2, False), F32, FEW[:4]),
    (Parts(1000, 4, 2, 3, False), F32, FEW),
    (Parts(1024, 8, 1, 2, False), BF16, FEW),
]
parts = pytest.mark.parametrize(("plan", "dtype", "names"), PARTS, ids=str)


@parts
@each
def test_long_rows(name, plan, dtype, names):
    check(name, cases.rows(names, plan.vocab, dtype), names, plan=plan)


def test_parts_are_of_every_kind():
    """Aligned to 16 bytes or not; views of one dimension and of two; parts that overlap."""
    views = [launch.aligned_view(len(names), plan.vocab, plan.vec) for plan, _, names in PARTS]
    assert {(len(view), plan.edges) for view, (plan, *_) in zip(views, PARTS)} == {
        (2, False),
        (2, True),
        (1, True),
    }
    assert any(plan.length * plan.count > plan.vocab for plan, *_ in PARTS)


# Every broadcast for short rows; for long ones those that differ along the row.
MASKED = [(None, pattern) for pattern in cases.BROADCASTS] + [
    (Parts(1003, 4, 2, 1, True), "bhqv"),
    (Parts(1003, 4, 2, 2, False), "b11v"),
    (Parts(1003, 4, 2, 2, False), "bhq1"),
    (Parts(1024, 4, 2, 1, True), "1hqv"),
    (Parts(1024, 4, 2, 1, True), "1h11"),
]


@pytest.mark.parametrize(("plan", "pattern"), MASKED, ids=str)
@each
def test_where(name, plan, pattern):
    """NaN and infinities where it masks; the first row of the mask keeps nothing; of one row it keeps -inf."""
    shape = (*cases.BATCH, plan.vocab if plan else 100)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], shape[-1]), shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    check(name, x, names, cases.broadcast_mask(pattern, shape), plan)


@pytest.mark.parametrize("axes", [(0,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["logsumexp", "softmax_grad"])
def test_axes(name, axes):
    """Any: bit for bit as where they are moved to the end, with a mask that one of the axes may lack."""
    rng = np.random.default_rng(4)
    arrays = rng.standard_normal((2 if name in oracle.BACKWARD else 1, 40, 3, 50)).astype(F32)
    where = rng.random((1, 3, 50)) < 0.7

    def folded(a):
        moved = np.moveaxis(a, axes, range(-len(axes), 0))
        return moved.reshape(*moved.shape[: -len(axes)], -1)

    got = run(name, arrays, where, axes)
    rows = [folded(a) for a in arrays]
    want = run(name, rows, folded(np.broadcast_to(where, arrays[0].shape)))
    np.testing.assert_array_equal(folded(got), want)


@pytest.mark.parametrize("plan", [None, Parts(1003, 4, 2, 1, True), Parts(1003, 4, 2, 2, False)], ids=str)
def test_normalizer_of_logsumexp(plan):
    """Its backward needs it; m is exact."""
    x = cases.rows(ALL, 1003)
    _, m, d = softmax_kernel.rows("logsumexp", (jnp.asarray(x),), None, (1,), plan=plan, interpret=INTERPRET)
    want_m, want_d = oracle.normalizer(x)
    oracle.assert_close(m, want_m, np.zeros_like(want_m), ALL)
    oracle.assert_close(d, want_d, oracle.normalizer_unit(x), ALL)


@pytest.mark.parametrize("plan", [None, Parts(128 * 3, 4, 2, 1, True)], ids=str)
@pytest.mark.parametrize("name", oracle.BACKWARD)
def test_special_cotangents(name, plan):
    v = plan.vocab if plan else 128
    names = [n for n in ALL if n != "huge"]  # its sum may overflow in float32
    y, _ = cases.operands(name, cases.rows(["normal"], v).repeat(len(names), 0))
    arrays = y, cases.rows(names, v)
    oracle.assert_operation(name, run(name, arrays, plan=plan), arrays, names)


# --- top-k --------------------------------------------------------------------------------------------

TOPK = [
    (4, F32, 1, FEW),
    (4, F32, 4, ALL),
    (128, F32, 5, ALL),
    (128, F32, 128, FEW),
    (1000, F32, 64, ALL),
    (4096 + 8, F32, 5, FEW),
    (10000, F32, 128, FEW),
    (8, BF16, 5, ALL),
    (1000, BF16, 1, FEW),
    (1000, BF16, 128, ALL),
    (10000, BF16, 5, FEW),
    (8, F16, 8, FEW),
    (1000, F16, 5, FEW),
    (4096 + 8, F16, 64, FEW),
]


@pytest.mark.parametrize(("v", "dtype", "k", "names"), TOPK, ids=[f"{v}-{d}-{k}" for v, d, k, _ in TOPK])
def test_topk(v, dtype, k, names):
    assert_topk(cases.rows(names, v, dtype), ONE, k, names)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_topk_with_a_temperature_per_row(dtype):
    names = list(cases.FINITE)
    assert_topk(cases.rows(names, 1000, dtype), np.geomspace(0.1, 10, len(names)).astype(F32), 5, names)


def test_topk_with_a_temperature_for_all_rows():
    assert_topk(cases.rows(FEW, 128), np.full(1, 0.7, F32), 5, FEW)


@pytest.mark.parametrize("k", [1, 5])
def test_one_row(k):
    x = cases.rows(["peaked"], 128)
    assert_topk(x, ONE, k, ["peaked"])


def crowded(v, k, dtype):
    """Rows, by name, where more keys reach any bound near the k-th best than the list has slots for."""
    at = np.arange(v)
    middle = (at > v // 3) & (at < v - 8)
    few = np.where(middle, 1.0, 0.0)
    few[-(k - 1) :] = 2 + np.arange(k - 1)  # k - 1 winners at the very end, the last among the ties
    late = np.where(at >= v - candidates.CAPACITY - 1, 3.0, 0.0)
    nans = np.where(at % 2, cases.NEG_NAN, np.nan)
    return {
        "constant": np.full(v, 1.5),  # bisection over positions only
        "all_neg_nan": np.full(v, cases.NEG_NAN),  # the lowest key: nothing is below the bound
        "k-1 winners after the ties": few,
        "one tie more than slots, at the end": late,
        "two values": np.where(at % 2, 1.0, -1.0),
        "half NaN, half -NaN": nans,
        "+0 and -0": np.where(at % 3, -0.0, 0.0),
        "-inf after one number": np.where(at == v - 1, 0.0, -np.inf),
        "k - 1 numbers, the rest -NaN": np.where(at < k - 1, 1.0, cases.NEG_NAN),
    }, {
        # distinct, but the best of them are in few lanes: bisection over keys
        "sorted by lane": -(at % 512) * 64.0 - at // 512,
        "sorted by lane, rising": (at % 512) * 64.0 + at // 512,
        "ascending": at - v / 2,
        "descending": v / 2 - at,
    }


@pytest.mark.parametrize(("dtype", "k"), [(F32, 5), (F32, 128), (BF16, 5), (F16, 64)], ids=str)
def test_more_candidates_than_slots(dtype, k):
    v = 4096 + 8
    tied, distinct = crowded(v, k, dtype)
    x = np.stack([*tied.values(), *distinct.values()]).astype(dtype)
    keys = oracle.order_key(x[: len(tied)])
    bound = np.take_along_axis(keys, oracle.topk_indices(x[: len(tied)], k)[:, -1:], -1)
    assert (np.sum(keys >= bound, -1) > candidates.CAPACITY).all()
    assert_topk(x, ONE, k, [*tied, *distinct])


def test_normal_logits_in_16_bits_tie():
    """As language models give them: hundreds of equal values, at a length that a user has."""
    x = np.random.default_rng(0).standard_normal((2, 25000)).astype(BF16)
    assert_topk(x, ONE, 5, ["0", "1"])
