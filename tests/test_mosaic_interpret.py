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

from pallas_softmax.implementations import folding, xla
from pallas_softmax.implementations.mosaic_gpu.device import layout
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax import plan as softmax_plan
from pallas_softmax.implementations.mosaic_gpu.softmax import rows as softmax_rows
from pallas_softmax.implementations.mosaic_gpu.softmax.plan import Parts
from pallas_softmax.implementations.mosaic_gpu.topk import merge_kernel, window_kernel
from pallas_softmax.implementations.mosaic_gpu.topk import plan as topk_plan
from pallas_softmax.implementations.mosaic_gpu.topk import tile_kernel as topk_tile_kernel
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window
from pallas_softmax.online import Normalizer

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams()
ALL = [*cases.FINITE, *cases.SPECIAL]  # 31 rows, a prime
FEW = ["normal", "peaked", "integers", "ascending", "everything", "neg_inf_last", "nan_last"]


# --- softmax, log_softmax, logsumexp and their backwards ----------------------------------------------

each = pytest.mark.parametrize("name", oracle.OPERATIONS)


def run(name, arrays, where=None, axes=(-1,), plan=None, interpret=INTERPRET):
    """The kernel's result, in the dtype in which the public functions return it."""
    axes = tuple(a % arrays[0].ndim for a in axes)
    arrays = [jnp.asarray(a) for a in arrays]
    where = None if where is None else jnp.asarray(where)
    out = softmax_rows.rows(name, arrays, where, axes, plan=plan, interpret=interpret)[0]
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
    plan = softmax_plan.plan_softmax(name, len(names), v, dtype, (9, 0))
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
    views = [layout.aligned_view(len(names), plan.vocab, plan.vec) for plan, _, names in PARTS]
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
@pytest.mark.parametrize("name", oracle.OPERATIONS[::2])  # softmax, logsumexp, a backward
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
    _, m, d = softmax_rows.rows("logsumexp", (jnp.asarray(x),), None, (1,), plan=plan, interpret=INTERPRET)
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

ONE = np.ones(1, F32)


def topk_rows(x, k, plan, where=None, temperature=ONE, log=False, dtype=F32, interpret=INTERPRET):
    """The kernel's winners and normalizers of the last axis of x, all other axes in one."""
    *batch, v = x.shape
    mask = None
    if where is not None:
        rows = folding.mask_rows(where.shape[:-1], tuple(batch))
        mask = folding.Mask(jnp.asarray(where.reshape(-1, where.shape[-1])), rows)
    kernel = topk_tile_kernel if isinstance(plan, Tile) else window_kernel
    x, t = jnp.asarray(x.reshape(-1, v)), jnp.asarray(temperature)
    return kernel.topk_rows(x, mask, t, k, plan, log=log, dtype=dtype, interpret=interpret)


def assert_topk(
    x, k, names, plan=None, where=None, temperature=ONE, log=False, dtype=F32, interpret=INTERPRET
):
    """Indices exactly; values and d within the units of float32, m exactly."""
    plan = plan or topk_plan.plan_topk(len(names), x.shape[-1], k, x.dtype, (9, 0))
    got = topk_rows(x, k, plan, where, temperature, log, dtype, interpret)
    judge_topk(got, x, k, names, where, temperature, log, dtype)


def judge_topk(got, x, k, names, where, temperature, log, dtype):
    winners, (m, d) = got
    if where is not None:
        where = np.broadcast_to(where, x.shape).reshape(-1, x.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    t = temperature[0] if len(temperature) == 1 else temperature
    want, indices = oracle.fused_topk(x, k, where, t, log)
    assert winners.indices.dtype == jnp.int32 and winners.values.dtype == dtype
    assert winners.indices.shape == winners.values.shape == (len(x), k)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(winners.indices[i], indices[i], err_msg=name)
    # 1 / temperature is rounded once, and multiplied: one more unit each way
    oracle.assert_close(winners.values, want, 1.5 * oracle.fused_topk_unit(x, k, where, t, log), names)
    assert m.shape == d.shape == (len(x), 1)
    want_m = oracle.normalizer(x, where)[0]
    ordinary = np.isfinite(want_m[:, 0])  # otherwise p is NaN, whatever they are
    np.testing.assert_allclose(np.asarray(m)[ordinary], want_m[ordinary], rtol=0, atol=oracle.slack(F32))
    assert np.isfinite(np.asarray(d)[ordinary]).all()


def short(rows, v, k, dtype):
    """The tile of the choice, with fewer rows: the interpreter is slow at many, one by one."""
    plan = topk_plan.plan_topk(rows, v, k, dtype, (9, 0))
    assert isinstance(plan, Tile)
    return dataclasses.replace(plan, rows=min(plan.rows, 4))


TOPK_SHORT = [
    (1, F32, 1, FEW),
    (2, BF16, 1, FEW),
    (2, F16, 2, FEW),
    (7, F32, 7, ALL),
    (8, BF16, 5, ALL),
    (8, F16, 8, FEW),
    (100, F32, 64, FEW),
    (128, F32, 5, ALL),
    (128, BF16, 64, FEW),
    (129, F16, 33, FEW),
    (512, F32, 1, FEW),
    (512, BF16, 8, FEW),
    (1003, F32, 5, FEW),
    (2047, BF16, 2, FEW),
    (2048, F32, 1, FEW),
]


@pytest.mark.parametrize(("v", "dtype", "k", "names"), TOPK_SHORT, ids=str)
def test_topk_of_short_rows(v, dtype, k, names):
    assert_topk(cases.rows(names, v, dtype), k, names, short(len(names), v, k, dtype))


# One part: whole blocks; several steps; a short rest; a thread's groups smaller than a step; rows off 16 bytes,
# alone and several in a row of the view. Then parts, merged: by one launch, and by two (1400 winners).
WINDOWS = [
    (Window(1024, 4, 2, 2), F32, 64, FEW),
    (Window(2007, 4, 1, 1), F32, 5, FEW),
    (Window(2007, 8, 2, 1), BF16, 300, FEW),
    (Window(1021, 4, 2, 1), F32, 128, ALL),
    (Window(1004, 8, 4, 2), F16, 33, [*FEW, "constant"]),
    (Window(100, 4, 8, 1), F32, 100, FEW),  # fewer groups than winners
    (Window(1003, 4, 1, 1, 2), F32, 5, FEW),
    (Window(1003, 8, 4, 4, 3), BF16, 128, FEW),
    (Window(2048, 8, 2, 2, 5), F16, 1, [*FEW, "constant"]),
    (Window(4203, 4, 8, 4, 3), F32, 1400, ["integers"]),
]


@pytest.mark.parametrize(("plan", "dtype", "k", "names"), WINDOWS, ids=str)
def test_topk_of_long_rows(plan, dtype, k, names):
    assert_topk(cases.rows(names, plan.vocab, dtype), k, names, plan)


def test_topk_windows_are_of_every_kind():
    """Full steps and none; rests of a step and more; views of one dimension and two; merges of merges."""
    plans = [plan for plan, *_ in WINDOWS]
    assert {plan.full > 1 for plan in plans} == {plan.full > 0 for plan in plans} == {True, False}
    assert {plan.rest > 0 for plan in plans} == {True, False}
    assert any(plan.rest > plan.step_blocks for plan in plans)
    views = {len(layout.aligned_view(len(names), plan.vocab, plan.vec)) for plan, *_, names in WINDOWS}
    assert views == {1, 2}
    assert any(plan.count > topk_plan.lists_per_merge(k) for plan, _, k, _ in WINDOWS)


KINDS = {"tile": None, "window": Window(1003, 4, 2, 1), "parts": Window(1003, 4, 1, 1, 3)}


def length(kind):
    return KINDS[kind].vocab if KINDS[kind] else 100


@pytest.mark.parametrize(
    ("kind", "log"), [("tile", False), ("tile", True), ("window", False), ("parts", True)]
)
def test_topk_with_a_temperature_per_row(kind, log):
    names = FEW if log else list(cases.FINITE)
    t = np.geomspace(0.1, 10, len(names)).astype(F32)
    x = cases.rows(names, length(kind))
    assert_topk(x, 5, names, KINDS[kind] or short(len(names), 100, 5, F32), None, t, log)


@pytest.mark.parametrize(("kind", "dtype"), [("tile", F16), ("window", BF16)], ids=str)
def test_topk_values_of_another_dtype(kind, dtype):
    """And one temperature for all rows."""
    x = cases.rows(FEW[:3], length(kind))
    plan = KINDS[kind] or short(3, 100, 5, F32)
    assert_topk(x, 5, FEW[:3], plan, None, np.full(1, 0.7, F32), dtype=dtype)


TOPK_MASKED = [("tile", pattern, F32) for pattern in ("111v", "bhq1", "1h11", "1hqv")]
TOPK_MASKED += [
    ("tile", "bhqv", BF16),
    ("window", "1hqv", F32),
    ("window", "b1q1", F32),
    ("parts", "b11v", F32),
]


@pytest.mark.parametrize(("kind", "pattern", "dtype"), TOPK_MASKED, ids=str)
def test_topk_where(kind, pattern, dtype):
    """NaN and infinities where it masks; the first row of the mask keeps nothing: 0, 1, 2, ... with p = 0."""
    shape = (*cases.BATCH, length(kind))
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], shape[-1]), shape)
    where = cases.broadcast_mask(pattern, shape)
    x = cases.spoilt(x, where).astype(dtype)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    plan = KINDS[kind] or short(len(names), shape[-1], 5, dtype)
    got = topk_rows(x, 5, plan, where)
    judge_topk(got, x, 5, names, where, ONE, False, F32)
    np.testing.assert_array_equal(got[0].indices[0], range(5))
    np.testing.assert_array_equal(got[0].values[0], 0)
    assert (float(got[1].m[0, 0]), float(got[1].d[0, 0])) == (-np.inf, 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("parts", "k", "log"), [(1, 5, False), (4, 7, True), (8, 64, False)])
def test_merge_of_parts_of_other_devices(parts, k, log, masked):
    names, v = ["normal", "peaked", "integers", "everything", "all_neg_inf", "all_neg_nan"], 640
    x = cases.rows(names, v)
    where = np.random.default_rng(0).random((len(x), v)) < 0.5 if masked else None
    if masked:
        where[0, : v // 2] = False  # of a whole part
    lists, t = [], np.full(1, 0.7, F32)
    for part in range(parts):
        own = slice(part * v // parts, (part + 1) * v // parts)
        kept = None if where is None else where[:, own]
        (_, best), normalizer = xla.topk(x[:, own], kept, t, k=k, log=log, dtype=F32)
        won = np.take_along_axis(x[:, own], np.asarray(best), -1)
        kept = np.ones_like(won, bool) if kept is None else np.take_along_axis(kept, np.asarray(best), -1)
        lists.append((won, kept, best + own.start, *normalizer))
    won, kept, indices, m, d = (jnp.concatenate(each, -1) for each in zip(*lists))
    kept = kept if masked else None
    parts = Normalizer(m, d)
    kernel = merge_kernel.merge_rows(
        won, kept, indices, parts, jnp.asarray(t), k, log=log, dtype=F32, interpret=INTERPRET
    )
    plain = xla.merge(won, kept, indices, parts, t, k=k, log=log, dtype=F32)
    for got in kernel, plain:
        judge_topk(got, x, k, names, where, t, log, F32)


@pytest.mark.parametrize(
    ("kind", "log"), [("tile", False), ("tile", True), ("window", False), ("parts", True)]
)
def test_topk_of_fewer_unmasked_than_winners(kind, log):
    """Then -NaN is before what is masked, which comes in order of its indices, with p = 0 also beside NaN."""
    names = ["normal", "everything", "every_third_neg_nan", "all_neg_nan"]
    v, k, dtype = length(kind), 20, F16 if kind == "window" else F32
    plan = (
        dataclasses.replace(KINDS[kind], vec=8) if kind == "window" else KINDS[kind] or short(4, v, k, dtype)
    )
    x = cases.rows(names, v, dtype)
    where = np.zeros((4, v), bool)
    where[:, 2:40:3] = where[:, -1] = True
    assert_topk(x, k, names, plan, where, log=log)


def crowded(v, k, dtype):
    """Rows, by name, where more keys reach any bound near the k-th best than the list has slots for."""
    at = np.arange(v)
    middle = (at > v // 3) & (at < v - 8)
    few = np.where(middle, 1.0, 0.0)
    few[v - (k - 1) :] = 2 + np.arange(k - 1)  # k - 1 winners at the very end, the last among the ties
    late = np.where(at >= v - topk_plan.candidate_slots(k) - 1, 3.0, 0.0)
    lane = at // 4 % 128
    return {
        "constant": np.full(v, 1.5),
        "all_neg_nan": np.full(v, cases.NEG_NAN),  # the lowest key but that of what is masked
        "k-1 winners after the ties": few,
        "one tie more than slots, at the end": late,
        "two values": np.where(at % 2, 1.0, -1.0),
        "a third NaN": np.where(at % 3, 1.0, np.nan),
        "half NaN, half -NaN": np.where(at % 2, cases.NEG_NAN, np.nan),
        "+0 and -0": np.where(at % 3, -0.0, 0.0),
        "-inf after one number": np.where(at == v - 1, 0.0, -np.inf),
        "k - 1 numbers, the rest -NaN": np.where(at < k - 1, 1.0, cases.NEG_NAN),
    }, {
        # distinct, but the best of them are in few groups: bisection over keys
        "sorted by lane": -lane * 64.0 - at // 512,
        "sorted by lane, rising": lane * 64.0 + at // 512,
        "ascending": at - v / 2,
        "descending": v / 2 - at,
    }


CROWDED = [
    (Window(1203, 4, 8, 8), F32, 128),
    (Window(1003, 8, 4, 4), BF16, 5),
    (Window(2007, 4, 8, 4, 2), F32, 64),
]


@pytest.mark.parametrize(("plan", "dtype", "k"), CROWDED, ids=str)
def test_topk_of_more_candidates_than_slots(plan, dtype, k):
    tied, distinct = crowded(plan.vocab, k, dtype)
    x = np.stack([*tied.values(), *distinct.values()]).astype(dtype)
    keys = oracle.order_key(x[: len(tied)])
    bound = np.take_along_axis(keys, oracle.topk_indices(x[: len(tied)], k)[:, -1:], -1)
    assert (np.sum(keys >= bound, -1) > topk_plan.candidate_slots(k)).all()
    assert_topk(x, k, [*tied, *distinct], plan)
