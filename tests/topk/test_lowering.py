"""The Mosaic GPU kernels of top-k lowered for CUDA, without a GPU.

These tests do not see registers, shared memory, alignment and deadlocks; test_gpu.py does.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile
from tests.support.calls import DTYPES, topk
from tests.support.covering import first, first_values, pairs, slow
from tests.support.lowering import CALLS, MASKS, array, kernel_names, kernel_results, lowered
from tests.topk import kernels

# --- Every kernel -------------------------------------------------------------------------------------

# (rows, V, k), with the package's plans. Rows in registers have names of numbers. Other rows have one CTA, or parts,
# merged by one launch or several. If buckets fail, few winners are ranked by comparisons, and more winners by a sort.
SHAPES = {
    "8 of 512": (10_000, 512, 8),
    "parts": (5, 50257, 64),
    "one CTA, unaligned": (251, 20011, 128),
    **{
        f"{k} of {v}": (5, v, k) for v, k in [(1, 1), (2, 2), (7, 7), (8, 1), (15, 5), (129, 3), (1024, 1000)]
    },
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
def test_kernels(kind, dtype, mask, values):
    """One kernel, and one for each merge of parts. Winners as they are need no exponentials."""
    rows, v, k = SHAPES[kind]
    plan = kernels.plan_topk(rows, v, k, dtype)
    assert isinstance(plan, Tile) == kind[0].isdigit()
    if not isinstance(plan, Tile):
        assert (plan.count > 1) == ("parts" in kind)

    def f(x, temperature, where):
        return kernels.topk_rows(x, k, plan, where, temperature, values == "logs", dtype, interpret=None)

    where = None
    if mask is not None:
        where = array(*(n if n == 1 else m for n, m in zip(MASKS[mask](v), (rows, v))), dtype="bool")
    temperature = None if values == "as they are" else array(rows)
    text = lowered(f, array(rows, v, dtype=dtype), temperature, where)
    merges = ["topk_merge"] * kernels.launches_that_merge(plan, k)
    assert kernel_names(text) == ["top_k" if temperature is None else "softmax_topk", *merges]
    assert temperature is not None or "ex2.approx" not in text and "math.exp" not in text


@pytest.mark.parametrize("rows", [slow(10), slow(64), slow(1000), 131_072])
@pytest.mark.parametrize("function", [ps.fused_topk, slow(ps.route)])
def test_tiles_of_short_rows(function, rows):
    """With many short rows, each CTA starts to copy a later tile to the L2 cache, and with few it does not.

    Rows beyond the array repeat the last one: rows of padding would tie, and take twice as long to search. Without such
    rows, no row number is bounded.
    """
    text = lowered(lambda x: function(x, 8, implementation="mosaic_gpu"), array(rows, 256))
    assert ("cp.async.bulk.prefetch.L2.global" in text) == (rows > 1000)
    assert rows == 1000 or ("minui" in text) == (rows == 10)


# --- Public functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", first_values(1, ["int32", "uint8", "bool"]))
def test_integers_as_floats(dtype):
    """The kernels of top_k take integers as floats in the same order. fused_topk has no kernel for integers.

    With a mask, the least integer would count as masked.
    """
    x = array(128, 4096, dtype="int32")
    assert [ps.explain(f, x)[0].cuda for f in (topk, lambda x: ps.top_k(x, 5))] == ["xla", "mosaic_gpu"]
    # plain JAX moves the axis too
    assert ps.explain(lambda x: ps.top_k(x, 5, axis=0), x)[0].cuda == "mosaic_gpu"
    text = lowered(lambda x: ps.top_k(x, 5, implementation="mosaic_gpu"), array(64, 512, dtype=dtype))
    assert kernel_names(text) == ["top_k"]
    for masking, match in ({"where": True}, "no kernel for .* with where"), ({"lengths": 9}, "no selection"):
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
def test_public_topk(call, v, dtype):
    """One kernel, and a second one to merge parts of a long row.

    The gradient of unmasked rows in the registers of a warp has a kernel; other gradients are plain JAX.
    """

    def f(x, where=None):
        return topk(x, where=where, implementation="mosaic_gpu").values

    want = ["softmax_topk"] + ["topk_merge"] * (v == 30000)
    want += ["topk_grad"] * (v <= 1024 and call in ("grad", "vmap of grad"))
    assert kernel_names(lowered(CALLS[call](f), array(5, 3, v, dtype=dtype))) == want


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_values_of_8_bits(dtype):
    """The kernel's values are float32, and rounded afterwards."""
    text = lowered(lambda x: ps.fused_topk(x, 5, dtype=dtype, implementation="mosaic_gpu"), array(128, 16384))
    assert len(kernel_results(text)) == 1


@pytest.mark.slow
def test_the_choice_under_vmap_is_for_all_rows():
    """XLA runs a single row of this length with this k, but a kernel runs three such rows."""
    f, row = functools.partial(ps.fused_topk, k=1025), array(65_600)
    assert ps.explain(f, row)[0].cuda == "xla"
    assert kernel_names(lowered(jax.vmap(f), array(3, *row.shape))) == ["softmax_topk", "topk_merge"]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "shape"), [((0, 0), (3,)), ((0, None), ()), ((0, 0), (3, 128))], ids=str)
def test_vmap_with_temperatures(axes, shape):
    """One kernel runs all rows; its results are the winners, m and d."""
    f = jax.vmap(lambda x, t: topk(x, temperature=t), axes)
    types = ["384x5xf32", "384x5xi32", "384xf32", "384xf32"]
    assert kernel_results(lowered(f, array(3, 128, 16384), array(*shape))) == [types]


@pytest.mark.slow
def test_grad_of_temperature():
    f = jax.grad(lambda t, x: jnp.sum(topk(x, temperature=t).values))
    assert kernel_names(lowered(f, array(128), array(128, 16384))) == ["softmax_topk"]
