"""fused_topk: indices as in lax.top_k, values of the softmax over the whole row, and both gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

from pallas_softmax import TopK, fused_topk
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32, F64
from tests.support.covering import cover, first, first_values, pairs, slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

FREE = settings(max_examples=25, deadline=None, derandomize=True)


@functools.partial(jax.jit, static_argnames=("k", "axis", "log", "dtype", "implementation"))
def topk(logits, k, **kwargs):
    return fused_topk(logits, k, **kwargs)


def assert_right(got, x, k, names=None, limit=2.0, **kwargs):
    """Asserts that the indices are the oracle's, and the values within `limit` units."""
    values, indices = oracle.fused_topk(x, k, **kwargs)
    unit = bounds.fused_topk_unit(x, k, **kwargs)
    if got.values.dtype in (BF16, F16):
        unit, limit = bounds.stored_unit(values, unit, got.values.dtype), 1.0
    assert got.indices.dtype == np.int32
    np.testing.assert_array_equal(got.indices, indices)
    for i in range(len(x)):
        error = bounds.error_units(got.values[i], values[i], unit[i])
        assert error <= limit, f"{names[i] if names else i}: {error} units"


# --- Indices and values -------------------------------------------------------------------------------


@pytest.mark.parametrize(("v", "dtype"), cover([1, 2, 9, 129], [F32, BF16, F16]), ids=str)
def test_indices_are_in_the_total_order(v, dtype):
    """Indices are right for every finite and special row. k = V sorts the row, although softmax rounds."""
    x = cases.rows(ALL, v, dtype)
    assert_right(topk(x, v), x, v, ALL, limit=4.0)


def test_indices_agree_with_lax_top_k():
    """Only ordinary rows: XLA's kernels may treat denormals as zeros, and some misplace -NaN."""
    x = cases.rows([name for name in cases.FINITE if name != "denormals"], 129)
    np.testing.assert_array_equal(topk(x, 129).indices, lax.top_k(x, 129)[1])


@pytest.mark.parametrize(("k", "v", "log"), cover([1, 5, 64], [127, 1000, cases.GPT2], [False, True]))
def test_values_are_normalised_over_the_whole_row(v, k, log):
    names = list(cases.FINITE)
    x = cases.rows(names, v)
    assert_right(topk(x, k, log=log), x, k, names, log=log)


@pytest.mark.parametrize("v", [slow(cases.LARGE[0]), slow(cases.LARGE[1]), cases.LARGE[2]])
def test_large_vocabulary(v):
    x = cases.rows(["peaked"], v)
    assert_right(topk(x, 50), x, 50)


@pytest.mark.parametrize(("log", "dtype"), cover([False, True], [BF16, F16]), ids=str)
def test_16_bits_are_accumulated_in_float32(dtype, log):
    names = list(cases.FINITE)
    x = cases.rows(names, 1000, dtype)
    assert_right(topk(x, 5, log=log), x, 5, names, log=log)


def test_ties_from_rounding_do_not_change_the_order():
    """These logits differ but their float32 probabilities are equal: sorting p would give other indices."""
    x = np.full((1, 40), -100.0, F32)
    x[0, 30], x[0, 7], x[0, 20] = 2.0, np.nextafter(F32.type(2.0), F32.type(0)), 2.0
    got = topk(x, 3)
    np.testing.assert_array_equal(got.indices, [[20, 30, 7]])
    assert got.values[0, 0] == got.values[0, 1]


def test_negative_nan_comes_last():
    """XLA's CUDA kernel for k <= 16 returns -NaN among the largest (openxla/xla issue 48119)."""
    x = cases.rows(["every_third_neg_nan", "everything", "all_neg_nan"], 129)
    for k in (1, 5, 16, 17):
        np.testing.assert_array_equal(topk(x, k).indices, oracle.topk_indices(x, k))


def test_rows_with_nan_have_nan_values():
    x = cases.rows(["nan_first", "neg_nan_last", "inf_first", "all_neg_inf"], 9)
    assert np.isnan(topk(x, 3).values).all()
    assert np.isnan(topk(x, 3, log=True).values).all()


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_integers(dtype):
    """Values are float32. The order is the integers' order, also for integers with the same float32."""
    top = np.iinfo(dtype).max
    x = np.array([[top - 1, top, 0, top - 1, 3], [1, 2, 3, 2, 1]], dtype)
    got = topk(x, 5)
    assert got.values.dtype == np.float32
    assert_right(got, x, 5)


def test_float64(x64):
    """The arithmetic is float64; indices stay int32."""
    names = list(cases.FINITE)
    x = cases.rows(names, 129, F64)
    got = topk(x, 5)
    assert got.values.dtype == np.float64
    assert_right(got, x, 5, names)
    assert topk(cases.rows(["normal"], 129), 5).indices.dtype == np.int32
    assert topk(cases.rows(["normal"], 129), 5).values.dtype == np.float32


# --- k, axis, shapes ----------------------------------------------------------------------------------


def test_the_result_is_a_named_pair():
    got = fused_topk(cases.rows(["normal"], 9), 2)
    assert isinstance(got, TopK)
    values, indices = got
    assert values is got.values
    assert indices is got.indices
    assert jax.tree.structure(got) == jax.tree.structure(TopK(0, 0))


@pytest.mark.parametrize("shape", first_values(2, [(3, 9), (3, 0), (0,), (9,), (0, 5)]), ids=str)
def test_k_zero(shape):
    got = fused_topk(jnp.zeros(shape), 0)
    assert got.values.shape == got.indices.shape == (*shape[:-1], 0)
    assert (got.values.dtype, got.indices.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(
        jax.grad(lambda x: fused_topk(x, 0).values.sum())(jnp.zeros(shape)), np.zeros(shape)
    )


# --- dtype --------------------------------------------------------------------------------------------


def test_dtype_widens_without_rounding_first():
    """float32 values of bfloat16 logits are as accurate as float32, not widened from bfloat16."""
    names = list(cases.FINITE)
    x = cases.rows(names, 129, BF16)
    assert_right(topk(x, 5, dtype=F32), x, 5, names)
    narrow = topk(x.astype(F32)[:2], 5, dtype=BF16)
    assert narrow.values.dtype == BF16
    assert_right(narrow, x.astype(F32)[:2], 5)


# --- where --------------------------------------------------------------------------------------------

NAMES = list(cases.FINITE)[:7]
X = cases.rows(NAMES, 20)
MASKS = cases.masks(X.shape)


@pytest.mark.parametrize(("mask", "log"), first(2, pairs(MASKS, [False, True])))
def test_where(mask, log):
    """Masked positions win only if fewer than k are unmasked: lowest index first, with value 0 (log: -inf).

    A fully masked row has indices 0 to k-1.
    """
    where = MASKS[mask]
    got = topk(X, 15, where=where, log=log)
    assert_right(got, X, 15, NAMES, where=where, log=log, limit=4.0)
    full = np.broadcast_to(where, X.shape)
    for row in np.flatnonzero(~full.any(-1)):
        np.testing.assert_array_equal(got.indices[row], range(15))
        assert (np.asarray(got.values[row]) == (-np.inf if log else 0)).all()


@pytest.mark.parametrize("log", [False, True])
def test_masked_positions_come_after_neg_inf_and_neg_nan(log):
    x = np.array([[5, -np.inf, 3, cases.NEG_NAN, 9], [5, -np.inf, 3, -np.inf, 9]], F32)
    where = np.array([False, True, False, True, False])
    got = topk(x, 5, where=where, log=log)
    np.testing.assert_array_equal(got.indices, [[1, 3, 0, 2, 4]] * 2)
    masked = -np.inf if log else 0
    np.testing.assert_array_equal(got.values, [[np.nan, np.nan, masked, masked, masked]] * 2)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_where_with_integers(dtype):
    """Even the smallest integer comes before a masked element."""
    low = np.iinfo(dtype).min
    x = np.array([[7, low, 9, low, 8]], dtype)
    where = np.array([False, True, True, True, False])
    np.testing.assert_array_equal(topk(x, 5, where=where).indices, [[2, 1, 3, 0, 4]])


# --- temperature --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "log"), first(2, pairs([0.01, np.geomspace(0.1, 10, 14), 0.7, 2, 100.0], [False, True]))
)
def test_temperature(temperature, log):
    """p = softmax(logits / temperature), without overflow for huge logits."""
    names = list(cases.FINITE)
    x = cases.rows(names, 129)
    t = np.asarray(temperature, F32)
    assert_right(topk(x, 5, temperature=t, log=log), x, 5, names, temperature=t, log=log, limit=4.0)


def test_infinite_temperature():
    """All probabilities are equal, except at -inf."""
    x = cases.rows(["normal", "neg_inf_last"], 100)
    values = np.asarray(topk(x, 100, temperature=np.inf).values)
    np.testing.assert_allclose(values[0], 1 / 100, rtol=1e-6)
    np.testing.assert_allclose(values[1], [1 / 99] * 99 + [0], rtol=1e-6)


def test_temperature_does_not_change_the_indices():
    x = cases.rows(ALL, 129)
    for t in (1e-30, 1e30):
        np.testing.assert_array_equal(topk(x, 129, temperature=t).indices, topk(x, 129).indices)


TINY = 2.0**-130
AT_0 = {  # rows of five
    "ties": [1, 3, 3, 2, -1],
    "zeros": [0, -0.0, -1, 0, -2],
    "negative": [-1, -2, -1, -3, -1],
    "subnormal": [TINY, 2 * TINY, 2 * TINY, 0, -TINY],
    "next to a subnormal": [0, -TINY, -0.0, -1, -1],
    "huge": [3e38, -3e38, 3e38, 0, 1],
    "one": [0, 1, 2, 4, 3],
}


@pytest.mark.parametrize(("how", "log"), cover(["static", "traced", "per row"], [False, True]))
def test_temperature_0_is_the_limit(how, log):
    """The tied largest entries share the probability, all others have 0; ties are equal values, as 0 and -0 are."""
    x = np.array([*AT_0.values(), AT_0["one"]], F32)
    t = np.array([0] * len(AT_0) + [2 if how == "per row" else 0], F32)
    where = np.arange(5) != 4
    f = functools.partial(fused_topk, k=3, where=where, log=log)
    got = (
        f(x, temperature=0)
        if how == "static"
        else jax.jit(lambda t: f(x, temperature=t))(t if how == "per row" else 0.0)
    )
    values, indices = oracle.fused_topk(x, 3, where, t, log)
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_allclose(got.values, values, rtol=1e-6)


# --- Gradients ----------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0,))
def pullback(f, x, t, g):
    return jax.vjp(f, x, t)[1](g)


def _ours(x, t, where, log):
    return fused_topk(x, 5, where=where, temperature=t, log=log).values


@pytest.mark.parametrize(("mask", "log"), first(2, pairs([None, *MASKS], [False, True])))
def test_gradient_against_the_formula(mask, log):
    """dx_j = g_j p_j [j wins] - p_j sum_i g_i p_i (log: g_j [j wins] - p_j sum_i g_i), over T.

    Gradients of masked positions are 0 and the others finite, even if a masked logit is NaN.
    """
    where = None if mask is None else MASKS[mask]
    t = np.geomspace(0.5, 4, len(X)).astype(F32)
    g = cases.cotangent((len(X), 5))
    x = X if where is None else np.where(where, X, F32.type(np.nan))
    dx, dt = map(np.asarray, pullback(lambda x, t: _ours(x, t, where, log), x, t, g))
    want_dx, want_dt = oracle.fused_topk_vjp(X, g, 5, where, t, log)
    unit_dx, unit_dt = bounds.fused_topk_vjp_unit(X, g, 5, where, t, log)
    assert bounds.error_units(dx, want_dx, unit_dx, slack_times=100) <= 4
    assert bounds.error_units(dt, want_dt, unit_dt, slack_times=100) <= 4
    if where is not None:
        assert (dx[~np.broadcast_to(where, X.shape)] == 0).all()


@pytest.mark.parametrize("v", first_values(1, [129, cases.GPT2]))
def test_gradient_of_peaked_rows(v):
    names = ["normal", "peaked", "one_winner", "alternating"]
    x, t, g = cases.rows(names, v), np.ones(4, F32), cases.cotangent((4, 5))
    dx, dt = pullback(lambda x, t: _ours(x, t, None, False), x, t, g)
    args = (x, g, 5, None, t)
    want, units = oracle.fused_topk_vjp(*args), bounds.fused_topk_vjp_unit(*args)
    assert bounds.error_units(dx, want[0], units[0], slack_times=v) <= 4
    assert bounds.error_units(dt, want[1], units[1], slack_times=100 * v) <= 4


@pytest.mark.parametrize("dtype", first_values(1, [BF16, F16]), ids=str)
def test_gradient_of_16_bits(dtype):
    """p is recomputed in float32 from the logits, so the error is about one step of the stored dtype."""
    names = ["normal", "peaked", "integers", "ascending"]
    x, g = cases.rows(names, 129, dtype), cases.cotangent((4, 5), dtype)
    dx = jax.vjp(lambda x: fused_topk(x, 5).values, x)[1](g)[0]
    assert dx.dtype == dtype
    units = bounds.fused_topk_vjp_unit(x, g, 5)[0]
    assert bounds.error_units(dx, oracle.fused_topk_vjp(x, g, 5)[0], units, slack_times=10) <= 2


def test_indices_have_no_gradient():
    x = cases.rows(["normal"], 9)
    dx = jax.grad(lambda x: fused_topk(x, 3).indices.astype(F32).sum())(x)
    np.testing.assert_array_equal(dx, np.zeros_like(x))


# --- Random calls -------------------------------------------------------------------------------------

SPECIALS = [0.0, -0.0, np.inf, -np.inf, np.nan, cases.NEG_NAN, 1e-40, -1e-40, 1.0, 2.0]
ELEMENTS = st.sampled_from([F32.type(s) for s in SPECIALS]) | st.floats(-50, 50, width=32)


@FREE
@given(
    x=hnp.arrays(F32, (4, 8), elements=ELEMENTS),
    where=hnp.arrays(bool, (4, 8)) | st.just(np.ones((4, 8), bool)),
    k=st.sampled_from([1, 5, 8]),
)
def test_any_row_and_mask(x, where, k):
    assert_right(topk(x, k, where=where), x, k, where=where, limit=4.0)
    np.testing.assert_array_equal(topk(x, k).indices, oracle.topk_indices(x, k))


@pytest.mark.parametrize("temperature", [1e-38, np.float64(1e-50)])
def test_the_smallest_temperatures_give_probabilities(temperature):
    """The nearest one with a normal reciprocal replaces them. XLA for CPUs treats numbers below 1.2e-38 as 0."""
    values = fused_topk(jnp.array([3.0, 2.0, 2.5]), 3, temperature=temperature).values
    np.testing.assert_array_equal(values, [1, 0, 0])


class Two:
    """An object that JAX converts to an array."""

    def __jax_array__(self):
        return jnp.float32(2)


@pytest.mark.parametrize(("temperature", "same"), [(2**40, 2.0**40), (Two(), 2.0)], ids=["int", "object"])
def test_temperatures_that_jax_converts_to_an_array(temperature, same):
    x = jnp.arange(4.0)
    got, want = (fused_topk(x, 2, temperature=t).values for t in (temperature, same))
    np.testing.assert_array_equal(got, want)
