"""The Mosaic GPU kernels of top-k: in Pallas's interpreter, against the oracle, and lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile, Window
from pallas_softmax._src.topk import plan as topk_plan
from pallas_softmax._src.topk import xla
from pallas_softmax.online import Normalizer
from tests.support import bounds, cases, oracle
from tests.support.calls import DTYPES, topk
from tests.support.cases import BF16, F16, F32, FEW
from tests.support.covering import first, first_values, pairs, parameter_id, slow
from tests.support.lowering import CALLS, MASKS, array, kernel_names, kernel_results, lowered, mask_of
from tests.support.twins import fewer_rows
from tests.topk import kernels
from tests.topk.kernels import CROWDED, ONE, TOPK_SHORT, WINDOWS

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = {"tile": None, "window": Window(1003, 4, 2, 1), "parts": Window(1003, 4, 1, 1, 3)}


def length(kind):
    return KINDS[kind].vocab if KINDS[kind] else 100


def short(rows, v, k, dtype):
    plan = kernels.plan_topk(v, k, dtype)
    assert isinstance(plan, Tile)
    return fewer_rows(plan)


@pytest.mark.parametrize("check", [kernels.assert_topk, slow(kernels.assert_top_k)])
@pytest.mark.parametrize(("plan", "dtype", "k", "names"), first(1, WINDOWS + TOPK_SHORT), ids=parameter_id)
def test_rows_interpreted(plan, dtype, k, names, check):
    """Short rows have the package's plan. Winners have their probabilities, or are as they are."""
    v = plan.vocab if isinstance(plan, Window) else plan
    x = cases.rows(names, v, dtype)
    check(x, k, names, plan if isinstance(plan, Window) else short(len(names), v, k, dtype))


@pytest.mark.parametrize(("dtype", "masked"), first(1, pairs([F32, BF16], [False, True])), ids=str)
def test_a_row_has_the_same_bits_at_any_place_interpreted(dtype, masked):
    """Equal rows start at each element of 16 bytes."""
    vec, rng = 16 // dtype.itemsize, np.random.default_rng(0)
    x, where = rng.standard_normal((1, 1003)).astype(dtype).repeat(vec, 0), rng.random((1, 1003)) < 0.7
    results = kernels.topk_rows(x, 5, Window(1003, vec, 2, 1), where if masked else None)
    for leaf in jax.tree.leaves(results):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_windows_are_merged_and_crowded_rows_overflow():
    """WINDOWS have no merge, one, and merges of merges. The rows of CROWDED overflow the list.

    Rows of CROWDED run on a GPU only, because the twins sort all elements.
    """
    assert {kernels.launches_that_merge(plan, k) for plan, _, k, _ in WINDOWS} == {0, 1, 2}
    for plan, dtype, k in CROWDED:
        keys = oracle.order_key(np.stack([*kernels.crowded(plan.vocab, k, dtype)[0].values()]).astype(dtype))
        reach = np.sum(keys >= -np.sort(-keys)[:, k - 1 : k], -1)  # elements that reach the k-th best
        assert (reach > topk_plan.candidate_capacity(k)).all()


GRADIENTS = [(7, F32, 5, True), (100, F32, 5, False), (127, BF16, 40, False), (2, F16, 2, True)]


@pytest.mark.parametrize(("v", "dtype", "k", "log"), first(1, [*GRADIENTS, (512, F32, 16, False)]))
def test_gradient_of_short_rows_interpreted(v, dtype, k, log):
    """The cotangents are of the values and, for second derivatives, of d. p is recomputed from x, m and d."""
    names = ["normal", "peaked", "integers", "one_winner"]
    x = cases.rows(names, v, dtype)
    t, g, g_d = np.array([0.5, 1, 2, 3], F32), cases.cotangent((4, k)), np.array([0, 0, 1, -1], F32)
    z = oracle.tempered(x, t)
    m, d = oracle.normalizer(x)[0][:, 0], np.sum(np.exp(z - z.max(-1, keepdims=True)), -1)
    indices = oracle.topk_indices(x, k)
    dx, dt = kernels.topk_grad_rows(x, t, indices, m.astype(F32), d.astype(F32), g, g_d, log=log)
    want_dx, want_dt = oracle.fused_topk_vjp(x, g, k, None, t, log)
    unit_dx, unit_dt = bounds.fused_topk_vjp_unit(x, g, k, None, t, log)
    of_d = g_d[:, None] * np.exp(z - z.max(-1, keepdims=True)) / t[:, None]
    slope = -np.sum(of_d * (z - z.max(-1, keepdims=True)), -1)
    if dtype == F32:
        flushed, unit = 1 + np.sum(np.abs(g), -1, keepdims=True) / t[:, None], unit_dx + np.abs(of_d)
        assert bounds.error_units(dx, want_dx + of_d, unit, slack_times=flushed) <= 4 * bounds.UNITS
    else:
        np.testing.assert_allclose(np.asarray(dx, F32), want_dx + of_d, rtol=0.01, atol=1e-5)
    assert bounds.error_units(dt[:, 0], want_dt + slope, unit_dt + np.abs(slope)) <= 4 * bounds.UNITS


@pytest.mark.slow
def test_nan_gradients_stay_in_their_rows_interpreted():
    """Rows with NaN, with inf or of -inf only have NaN gradients, as in plain JAX. A -inf in a row has gradient 0."""
    x = cases.rows(["nan_first", "normal", "inf_last", "all_neg_inf"], 9)
    x[1, 3] = -np.inf
    (winners, (m, d)), g = kernels.topk_rows(x, 3, short(4, 9, 3, F32)), cases.cotangent((4, 3))
    dx, dt = kernels.topk_grad_rows(x, ONE, winners.indices, m[:, 0], d[:, 0], g, np.zeros(4, F32), log=False)
    np.testing.assert_allclose(dx[1], oracle.fused_topk_vjp(x[1:2], g[1:2], 3)[0][0], rtol=1e-5, atol=1e-7)
    assert dx[1, 3] == 0 and np.isfinite(dt[1, 0])
    assert np.isnan(np.asarray(dx)[[0, 2, 3]]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "log", "dtype"),
    [("tile", False, F32), ("tile", True, F32), ("window", False, F32), ("parts", True, F32)]
    + [slow("tile", False, F16), slow("window", False, BF16)],
    ids=str,
)
def test_temperatures_interpreted(kind, log, dtype):
    """One temperature per row, or one for all rows if the values have another dtype than float32."""
    x = cases.rows(FEW, length(kind))
    plan = KINDS[kind] or short(len(FEW), 100, 5, F32)
    kernels.assert_topk(x, 5, FEW, plan, None, kernels.temperatures(dtype), log, dtype)


TOPK_MASKED = [("tile", "bhqv", BF16), ("parts", "b11v", F32), ("window", "1hqv", F32), ("window", "b1q1", F32)]
TOPK_MASKED += [("tile", pattern, F32) for pattern in ("1h11", "111v", "bhq1", "1hqv")]


@pytest.mark.parametrize("as_they_are", [False, slow(True)])
@pytest.mark.parametrize(("kind", "pattern", "dtype"), first(1, TOPK_MASKED), ids=str)
def test_where_interpreted(kind, pattern, dtype, as_they_are):
    """Masked elements are NaN or infinite. The first row of the mask keeps nothing, so 0, 1, 2, ... win with p = 0."""
    x, where, names = cases.broadcast_rows(pattern, length(kind), dtype)
    plan = KINDS[kind] or short(len(names), x.shape[-1], 5, dtype)
    if as_they_are:
        kernels.assert_top_k(x, 5, names, plan, where)
        return
    t = np.geomspace(0.1, 10, len(names)).astype(F32)
    t[::3] = 0
    got = kernels.topk_rows(x, 5, plan, where, t)
    kernels.judge_topk(got, x, 5, names, where, t, False, F32)
    np.testing.assert_array_equal(got[0].indices[0], range(5))
    np.testing.assert_array_equal(got[0].values[0], 0)
    assert (float(got[1].m[0, 0]), float(got[1].d[0, 0])) == (-np.inf, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "k", "log", "masked"),
    [(4, 7, True, True), (1, 5, False, True), (8, 64, False, True), (8, 64, False, False)],
)
def test_merge_of_parts_of_other_devices_interpreted(parts, k, log, masked):
    names, v = ["normal", "peaked", "integers", "everything", "all_neg_inf", "all_neg_nan"], 640
    x = cases.rows(names, v)
    where = np.random.default_rng(0).random((len(x), v)) < 0.5 if masked else None
    if masked:
        where[0, : v // 2] = False  # masks a whole part
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
    kernel = kernels.topk_merge(won, kept, indices, Normalizer(m, d), t, k, log)
    plain = xla.merge(won, kept, indices, Normalizer(m, d), t, k=k, log=log, dtype=F32)
    for got in kernel, plain:
        kernels.judge_topk(got, x, k, names, where, t, log, F32)
    won = won if kept is None else jnp.where(kept, won, -jnp.inf)  # as each part of `select_on_mesh`
    as_they_are = kernels.topk_merge(won, kept, indices, None, None, k, log)
    for got, normalizer in as_they_are, xla.merge(won, kept, indices, (), None, k=k, log=log, dtype=F32):
        assert normalizer is None
        jax.tree.map(np.testing.assert_array_equal, tuple(got), oracle.top_k(x, k, where))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "log"), [("window", False), ("tile", False), ("tile", True), ("parts", True)])
def test_fewer_unmasked_elements_than_winners_interpreted(kind, log):
    """A -NaN comes before masked elements. These come in the order of their indices, with p = 0 even in a NaN row."""
    v, k, dtype = length(kind), 20, F16 if kind == "window" else F32
    plan = KINDS[kind] or short(4, v, k, dtype)
    plan = dataclasses.replace(plan, vec=8) if kind == "window" else plan
    x, where, names = cases.few_unmasked(v, dtype)
    kernels.assert_topk(x, k, names, plan, where, log=log)


# (rows, V, k), with the package's plans. Rows in registers have names of numbers. Other rows have one CTA, or parts,
# merged by one launch or several. If buckets fail, few winners are ranked by comparisons, and more winners by a sort.
SHAPES = {
    "8 of 512": (10_000, 512, 8),
    "parts": (5, 50257, 64),
    "one CTA, unaligned": (251, 20011, 128),
    **{f"{k} of {v}": (5, v, k) for v, k in [(1, 1), (2, 2), (7, 7), (8, 1), (15, 5), (129, 3), (1024, 1000)]},
    "17 of 100": (10_000, 100, 17),
    "fewer groups than winners": (5, 2003, 2003),
    "aligned parts": (8, 131072, 1),
    "more than are compared": (256, 10000, 300),
    "listed by position": (256, 25000, 512),
    "one CTA": (256, 25000, 5),
    "most winners of the shortest row": (5, 2056, 2048),
    "parts merged twice": (5, 262144, 2048),
    "hundreds of parts": (5, 20_000_003, 5),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "mask", "values"),
    first(2, pairs(SHAPES, DTYPES, [None, *MASKS], ["probabilities", "as they are", "logs"])),
)
def test_lowered_kernels(kind, dtype, mask, values):
    """One kernel, and one for each merge of parts. Winners as they are need no exponentials."""
    rows, v, k = SHAPES[kind]
    plan = kernels.plan_topk(v, k, dtype)
    assert isinstance(plan, Tile) == kind[0].isdigit()
    if not isinstance(plan, Tile):
        assert (plan.count > 1) == ("parts" in kind)

    def f(x, temperature, where):
        return kernels.topk_rows(x, k, plan, where, temperature, values == "logs", dtype, interpret=None)

    temperature = None if values == "as they are" else array(rows)
    text = lowered(f, array(rows, v, dtype=dtype), temperature, mask_of(mask, rows, v))
    merges = ["topk_merge"] * kernels.launches_that_merge(plan, k)
    assert kernel_names(text) == ["top_k" if temperature is None else "softmax_topk", *merges]
    assert temperature is not None or "ex2.approx" not in text and "math.exp" not in text


@pytest.mark.parametrize("rows", [slow(10), slow(64), slow(1000), 131_072])
@pytest.mark.parametrize("function", [ps.fused_topk, slow(ps.route)])
def test_lowered_tiles_of_short_rows(function, rows):
    """With many short rows, each CTA starts to copy a later tile to the L2 cache, and with few it does not.

    Rows beyond the array repeat the last one: rows of padding would tie, and take twice as long to search. Without such
    rows, no row number is bounded.
    """
    text = lowered(lambda x: function(x, 8, implementation="mosaic_gpu"), array(rows, 256))
    assert ("cp.async.bulk.prefetch.L2.global" in text) == (rows > 1000)
    assert rows == 1000 or ("minui" in text) == (rows == 10)


@pytest.mark.parametrize("dtype", first_values(1, ["int32", "uint8", "bool"]))
def test_lowered_integers_as_floats(dtype):
    """The kernels of top_k take integers as floats in the same order. fused_topk has no kernel for integers.

    With a mask, the least integer would count as masked.
    """
    x = array(128, 4096, dtype="int32")
    assert [ps.explain(f, x)[0].cuda for f in (topk, lambda x: ps.top_k(x, 5))] == ["xla", "mosaic_gpu"]
    # plain JAX moves the axis too
    assert ps.explain(lambda x: ps.top_k(x, 5, axis=0), x)[0].cuda == "mosaic_gpu"
    text = lowered(lambda x: ps.top_k(x, 5, implementation="mosaic_gpu"), array(64, 512, dtype=dtype))
    assert kernel_names(text) == ["top_k"]
    for masking, match in ({"where": True}, "no kernel for .* with where"), ({"lengths": 9}, "a selection takes"):
        of_masked = functools.partial(ps.top_k, k=5, implementation="mosaic_gpu", **masking)
        with pytest.raises(NotImplementedError, match=match):
            lowered(of_masked, array(64, 512, dtype="int16"))
    text = lowered(lambda x: ps.top_k(x, 5, lengths=9), array(64, 4096, dtype=dtype))
    assert kernel_names(text) == ["top_k_select"]


@pytest.mark.parametrize(
    ("call", "v", "dtype"),
    first(
        1,
        pairs(
            ["grad", "vmap with one mask", "call", "where", "vmap", "grad with where", "vmap of grad"],
            [1000, 30000, 20011, 1028, 100],
            DTYPES,
        ),
    ),
)
def test_lowered_public_topk(call, v, dtype):
    """One kernel, and a second one to merge parts of a long row.

    The gradient of unmasked rows in the registers of a warp has a kernel; other gradients are plain JAX.
    """

    def f(x, where=None):
        return topk(x, where=where, implementation="mosaic_gpu").values

    want = ["softmax_topk"] + ["topk_merge"] * (v == 30000 and dtype == "float32")
    want += ["topk_grad"] * (v <= 1024 and call in ("grad", "vmap of grad"))
    assert kernel_names(lowered(CALLS[call](f), array(5, 3, v, dtype=dtype))) == want


@pytest.mark.slow
def test_lowered_the_choice_under_vmap_is_for_all_rows():
    """XLA runs a single row of this length with this k, but a kernel runs three such rows."""
    f, row = functools.partial(ps.fused_topk, k=1025), array(65_600)
    assert ps.explain(f, row)[0].cuda == "xla"
    assert kernel_names(lowered(jax.vmap(f), array(3, *row.shape))) == ["softmax_topk", "topk_merge"]


def tempered(x, t):
    return topk(x, temperature=t)


# Calls of 384 rows
ONE_KERNEL = {
    **{
        dtype: (functools.partial(topk, dtype=dtype, implementation="mosaic_gpu"), array(384, 16384))
        for dtype in ("float8_e4m3fn", "float8_e5m2")
    },
    "vmap with temperatures": (jax.vmap(tempered), array(3, 128, 16384), array(3)),
    "vmap with one temperature": (jax.vmap(tempered, (0, None)), array(3, 128, 16384), array()),
    "vmap with temperatures of rows": (jax.vmap(tempered), array(3, 128, 16384), array(3, 128)),
    "gradient": (jax.grad(lambda t, x: jnp.sum(tempered(x, t).values)), array(384), array(384, 16384)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_lowered_as_one_kernel(name):
    """Its results are the winners, m and d. Its values are float32, and rounded to 8 bits afterwards."""
    f, *arrays = ONE_KERNEL[name]
    text = lowered(f, *arrays)
    assert kernel_names(text) == ["softmax_topk"]
    assert kernel_results(text) == [["384x5xf32", "384x5xi32", "384xf32", "384xf32"]]
