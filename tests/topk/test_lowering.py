"""The Mosaic GPU kernels of top-k lowered for CUDA, without a GPU.

These tests do not see registers, shared memory, alignment and deadlocks; test_gpu.py does.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.window import Window
from tests.support.calls import DTYPES, topk
from tests.support.covering import first, first_values, pairs
from tests.support.lowering import CALLS, MASKS, array, kernel_names, kernel_results, lowered, square_sum
from tests.topk import kernels

ROWS, V = 128, 16384  # enough for the automatic choice of a kernel, in every dtype
X = array(ROWS, V)


def values(x):
    return topk(x).values


def results(rows):
    """Returns the types of the kernel's results: the winners, m and d."""
    return [f"{rows}x5xf32", f"{rows}x5xi32", f"{rows}xf32", f"{rows}xf32"]


# --- Every kernel -------------------------------------------------------------------------------------


def lowered_rows(rows, v, k, dtype, plan, mask=None, temperatures=1, log=False):
    """Returns the lowered kernels of top-k on `rows` rows, with a mask of this shape; None: without temperatures."""

    def f(x, temperature, where):
        return kernels.topk_rows(x, k, plan, where, temperature, log, dtype, interpret=None)

    where = None if mask is None else array(*mask, dtype="bool")
    return lowered(
        f, array(rows, v, dtype=dtype), None if temperatures is None else array(temperatures), where
    )


def names_of(plan, k):
    """Returns the names of the kernels that top-k runs as."""
    return ["softmax_topk"] + ["topk_merge"] * kernels.launches_that_merge(plan, k)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    first(3, pairs([(1, 1), (2, 2), (7, 7), (8, 1), (100, 17), (129, 3), (512, 8), (1024, 1000)], DTYPES)),
    ids=str,
)
def test_short_rows(shape, dtype):
    v, k = shape
    for rows in (5, 10_000):
        plan = kernels.plan_topk(rows, v, k, dtype)
        assert isinstance(plan, Tile)
        assert kernel_names(lowered_rows(rows, v, k, dtype, plan)) == ["softmax_topk"]


@pytest.mark.parametrize(
    ("shape", "mask", "log"),
    first(1, pairs([(15, "float16"), (512, "bfloat16"), (129, "float32")], MASKS, [False, True])),
    ids=str,
)
def test_short_rows_with_masks(shape, mask, log):
    v, dtype = shape
    plan = kernels.plan_topk(5, v, 5, dtype)
    assert isinstance(plan, Tile)
    assert kernel_names(lowered_rows(5, v, 5, dtype, plan, MASKS[mask](v), 5, log)) == ["softmax_topk"]


# (rows, V, k), with the package's plans: one CTA per row; parts, merged by one launch or several. If buckets fail, few
# winners are ranked by comparisons, and more winners by a sort.
WINDOWS = {
    "one CTA, unaligned": (251, 20011, 128),
    "parts": (5, 50257, 64),
    "fewer groups than winners": (5, 2003, 2003),
    "aligned parts": (8, 131072, 1),
    "more than are compared": (256, 10000, 300),
    "listed by position": (256, 25000, 512),
    "one CTA": (256, 25000, 5),
    "most winners of the shortest row": (5, 2056, 2048),
    "parts merged twice": (5, 262144, 2048),
    "hundreds of parts": (5, 20_000_003, 5),
}


@pytest.mark.parametrize(("kind", "dtype"), first(2, pairs(list(WINDOWS), ["float32", "bfloat16"])))
def test_long_rows(kind, dtype):
    rows, v, k = WINDOWS[kind]
    plan = kernels.plan_topk(rows, v, k, dtype)
    assert isinstance(plan, Window)
    assert (plan.count > 1) == ("parts" in kind)
    assert kernel_names(lowered_rows(rows, v, k, dtype, plan, temperatures=rows)) == names_of(plan, k)


@pytest.mark.parametrize("rows", [1000, 131_072])
@pytest.mark.parametrize("function", [ps.fused_topk, ps.route])
def test_prefetches(function, rows):
    """With many short rows, each CTA starts to copy a later tile to the L2 cache, and with few it does not."""
    text = lowered(lambda x: function(x, 8, implementation="mosaic_gpu"), array(rows, 256))
    assert ("cp.async.bulk.prefetch.L2.global" in text) == (rows > 1000)


@pytest.mark.parametrize(("rows", "repeats"), [(10, True), (64, False)])
@pytest.mark.parametrize("function", [ps.fused_topk, ps.route])
def test_rows_beyond_the_array_repeat_the_last_one(function, rows, repeats):
    """Rows of padding would tie, and take twice as long to search. Without such rows, no row number is bounded."""
    text = lowered(lambda x: function(x, 8, implementation="mosaic_gpu"), array(rows, 256))
    assert ("minui" in text) == repeats


@pytest.mark.parametrize(
    ("shape", "dtype", "masked"),
    first(
        2,
        pairs(
            [(5, 8, 8), (9, 1000, 5), (251, 20011, 128), (5, 50257, 64), (256, 25000, 512)],
            DTYPES,
            [False, True],
        ),
    ),
    ids=str,
)
def test_winners_as_they_are(shape, dtype, masked):
    """The same kernels without a normalizer, by other names: no exponentials, and two results."""
    rows, v, k = shape
    plan = kernels.plan_topk(rows, v, k, dtype)
    text = lowered_rows(rows, v, k, dtype, plan, (rows, v) if masked else None, temperatures=None)
    assert kernel_names(text) == ["top_k", *names_of(plan, k)[1:]]
    assert "ex2.approx" not in text and "math.exp" not in text


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_as_floats(dtype):
    """The kernels take integers as floats in the same order."""
    text = lowered(lambda x: ps.top_k(x, 5, implementation="mosaic_gpu"), array(64, 512, dtype=dtype))
    assert kernel_names(text) == ["top_k"]
    for masking, match in ({"where": True}, "no kernel for .* with where"), ({"lengths": 9}, "no selection"):
        of_masked = functools.partial(ps.top_k, k=5, implementation="mosaic_gpu", **masking)
        with pytest.raises(NotImplementedError, match=match):
            lowered(of_masked, array(64, 512, dtype="int16"))
    text = lowered(lambda x: ps.top_k(x, 5, lengths=9), array(64, 4096, dtype=dtype))
    assert kernel_names(text) == ["top_k_select"]


def test_merges_in_one_launch_or_in_several():
    merges = {
        kernels.launches_that_merge(kernels.plan_topk(rows, v, k, "float32"), k)
        for rows, v, k in WINDOWS.values()
    }
    assert merges >= {0, 1, 2}


@pytest.mark.parametrize(
    ("kind", "mask"), first(1, pairs(["one CTA, unaligned", "parts", "aligned parts"], MASKS))
)
def test_long_rows_with_masks(kind, mask):
    _, v, k = WINDOWS[kind]
    plan = kernels.plan_topk(5, v, k, "float16")
    text = lowered_rows(5, v, k, "float16", plan, MASKS[mask](v), log=True)
    assert kernel_names(text) == names_of(plan, k)


@pytest.mark.parametrize(
    ("shape", "masked"), first(1, pairs([(5, 128), (256, 10003), (5, 30000)], [True, False])), ids=str
)
def test_under_x64(shape, masked, x64):
    """No number becomes a 64-bit number."""
    rows, v = shape
    plan = kernels.plan_topk(rows, v, 5, "float32")
    text = lowered_rows(rows, v, 5, "float32", plan, (rows, v) if masked else None)
    assert kernel_names(text) == names_of(plan, 5)


# --- Public functions ---------------------------------------------------------------------------------


def test_no_kernel_for_integers():
    x = array(ROWS, V, dtype="int32")
    assert ps.explain(topk, x)[0].cuda == "xla"
    assert kernel_results(lowered(topk, x)) == []


@pytest.mark.parametrize(
    ("call", "v"), first(3, pairs([name for name in CALLS if not name.startswith("ax")], [100, 20011, 30000]))
)
def test_public_topk(call, v):
    """One kernel, and a second one to merge parts of a long row. The gradient of short unmasked rows has a kernel."""

    def f(x, where=None):
        return topk(x, where=where, implementation="mosaic_gpu").values

    want = ["softmax_topk"] + ["topk_merge"] * (v == 30000)
    want += ["topk_grad"] * (v == 100 and call in ("grad", "vmap of grad"))
    assert kernel_names(lowered(CALLS[call](f), array(5, 3, v))) == want


@pytest.mark.parametrize("dtype", first_values(1, ["float8_e4m3fn", "float8_e5m2"]))
def test_values_of_8_bits(dtype):
    """The kernel's values are float32, and rounded afterwards."""
    text = lowered(lambda x: ps.fused_topk(x, 5, dtype=dtype, implementation="mosaic_gpu"), X)
    assert len(kernel_results(text)) == 1


# --- Transformations ----------------------------------------------------------------------------------


def test_grad():
    assert kernel_results(lowered(jax.grad(square_sum(values)), X)) == [results(ROWS)]


@pytest.mark.parametrize(
    ("v", "dtype", "masked", "own"),
    first(
        2,
        [
            (128, "bfloat16", False, True),
            (1028, "float32", False, False),
            (1000, "float16", False, True),
            (128, "float32", True, False),
            (7, "float32", False, True),
        ],
    ),
)
def test_which_gradients_have_a_kernel(v, dtype, masked, own):
    """Rows in the registers of a warp have a kernel; the gradient of longer and masked rows is plain JAX."""
    where = jnp.ones((ROWS, v), bool) if masked else None
    names = kernel_names(
        lowered(jax.grad(square_sum(lambda x: topk(x, where=where).values)), array(ROWS, v, dtype=dtype))
    )
    assert ("topk_grad" in names) == own and len(names) == 1 + own


def test_grad_of_temperature():
    f = jax.grad(lambda t, x: jnp.sum(topk(x, temperature=t).values))
    assert len(kernel_results(lowered(f, array(ROWS), X))) == 1


def test_the_choice_under_vmap_is_for_all_rows():
    """XLA runs a single row of this length with this k, but a kernel runs three such rows."""
    f, row = functools.partial(ps.fused_topk, k=1025), array(65_600)
    assert not kernel_results(lowered(f, row))
    assert kernel_results(lowered(jax.vmap(f), array(3, *row.shape)))


@pytest.mark.parametrize(
    ("axes", "shape"), first(1, [((0, 0), (3,)), ((0, None), ()), ((0, 0), (3, ROWS))]), ids=str
)
def test_vmap_with_temperatures(axes, shape):
    f = jax.vmap(lambda x, t: topk(x, temperature=t), axes)
    assert kernel_results(lowered(f, array(3, ROWS, V), array(*shape))) == [results(3 * ROWS)]
