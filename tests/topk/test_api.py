"""fused_topk: indices as in lax.top_k, values of the softmax over the whole row, and both gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_softmax import TopK, fused_topk
from tests.support import bounds, calls, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32, F64
from tests.support.covering import first, first_values, pairs, slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

FREE = settings(calls.FREE, max_examples=25)


@functools.partial(jax.jit, static_argnames=("k", "axis", "log", "dtype", "implementation"))
def topk(logits, k, **kwargs):
    return fused_topk(logits, k, **kwargs)


def assert_right(got, x, k, names=None, limit=2.0, **kwargs):
    """Asserts that the indices are the oracle's, and the values within `limit` units."""
    values, indices = oracle.fused_topk(x, k, **kwargs)
    unit = bounds.fused_topk_unit(x, k, **kwargs)
    if got.values.dtype in (BF16, F16):
        unit, limit = bounds.stored_unit(values, unit, got.values.dtype), 1.0
    assert isinstance(got, TopK) and got.indices.dtype == np.int32
    np.testing.assert_array_equal(got.indices, indices)
    for i in range(len(x)):
        error = bounds.error_units(got.values[i], values[i], unit[i])
        assert error <= limit, f"{names[i] if names else i}: {error} units"


# (V, dtype, k, log, the values' dtype)
SORTED = [(v, dtype, v, False, dtype) for v, dtype in pairs([129, 1, 2, 9], [F32, BF16, F16])]
BEST = [(v, F32, k, log, F32) for v, k, log in pairs([1000, cases.GPT2, 127], [5, 64, 1], [True, False])]
NARROW = [(1000, dtype, 5, log, dtype) for dtype, log in pairs([BF16, F16], [True, False])]
NARROW += [(129, BF16, 5, False, F32), (129, F32, 5, False, BF16)]
LARGE = [(v, F32, 50, False, F32) for v in cases.LARGE[::-1]]


@pytest.mark.parametrize(
    ("v", "dtype", "k", "log", "out"),
    [case for table in (SORTED, BEST, NARROW, LARGE) for case in first(1, table)],
    ids=str,
)
def test_values_and_indices(v, dtype, k, log, out):
    """Every finite and special row. With k = V, softmax rounds to ties, but the row is sorted by the logits.

    16-bit logits are accumulated in float32, and float32 values of such logits are not rounded to 16 bits first.
    """
    names = ["peaked"] if v > cases.GPT2 else ALL
    x = cases.rows(names, v, dtype)
    got = topk(x, k, log=log, dtype=out)
    assert got.values.dtype == out
    assert_right(got, x, k, names, limit=4.0 if k == v else 2.0, log=log)


def test_ties_from_rounding_do_not_change_the_order():
    """These logits differ but their float32 probabilities are equal: sorting p would give other indices."""
    x = np.full((1, 40), -100.0, F32)
    x[0, 30], x[0, 7], x[0, 20] = 2.0, np.nextafter(F32.type(2.0), F32.type(0)), 2.0
    got = topk(x, 3)
    np.testing.assert_array_equal(got.indices, [[20, 30, 7]])
    assert got.values[0, 0] == got.values[0, 1]


@pytest.mark.parametrize("dtype", first_values(1, ["int32", "int8", "uint8"]))
def test_integers(dtype):
    """Values are float32; their order is by the integers. Even the smallest comes before a masked element."""
    low, top = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.array([[top - 1, top, 0, top - 1, 3], [1, 2, 3, 2, 1], [7, low, 9, low, 8]], dtype)
    for where in (None, np.array([False, True, True, True, False])):
        got = topk(x, 5, where=where)
        assert got.values.dtype == np.float32
        assert_right(got, x, 5, where=where)


@pytest.mark.slow
def test_float64(x64):
    """The arithmetic is float64; indices stay int32, and float32 logits have float32 values."""
    names = list(cases.FINITE)
    x = cases.rows(names, 129, F64)
    got = topk(x, 5)
    assert got.values.dtype == np.float64
    assert_right(got, x, 5, names)
    values, indices = jax.eval_shape(lambda: fused_topk(cases.rows(names, 129), 5))
    assert (values.dtype, indices.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("shape", first_values(1, [(3, 9), (3, 0), (0,), (9,), (0, 5)]), ids=str)
def test_k_zero(shape):
    got = fused_topk(jnp.zeros(shape), 0)
    assert got.values.shape == got.indices.shape == (*shape[:-1], 0)
    assert (got.values.dtype, got.indices.dtype) == (np.float32, np.int32)
    dx = jax.grad(lambda x: fused_topk(x, 0).values.sum())(jnp.zeros(shape))
    np.testing.assert_array_equal(dx, np.zeros(shape))


FINITE = list(cases.FINITE)[:7]
SPECIAL = ["everything", "every_third_neg_nan", "neg_inf_first"]
X = cases.rows(FINITE + SPECIAL, 20)
MASKS = cases.masks(X.shape)


@pytest.mark.parametrize(("mask", "log"), first(2, pairs(MASKS, [True, False])))
def test_where(mask, log):
    """Masked positions win only if fewer than k are unmasked, even a -NaN: lowest index first, with p = 0."""
    where = MASKS[mask]
    assert_right(topk(X, 15, where=where, log=log), X, 15, FINITE + SPECIAL, where=where, log=log, limit=4.0)


TEMPERATURES = [np.geomspace(100, 0.01, 14), 0.7, 0.01, 100.0]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "log"), pairs(TEMPERATURES, [False, True]))
def test_temperature(temperature, log):
    """p = softmax(logits / temperature), without overflow for huge logits."""
    names = list(cases.FINITE)
    x, t = cases.rows(names, 129), np.asarray(temperature, F32)
    assert_right(topk(x, 5, temperature=t, log=log), x, 5, names, temperature=t, log=log, limit=4.0)


def test_extreme_temperatures():
    """The indices do not change. At an infinite temperature all probabilities are equal, except at -inf."""
    x = cases.rows(ALL, 129)
    got = {t: topk(x, 129, temperature=t) for t in (1e-30, 1e30, np.inf)}
    for winners in got.values():
        np.testing.assert_array_equal(winners.indices, oracle.topk_indices(x, 129))
    values = np.asarray(got[np.inf].values)
    np.testing.assert_allclose(values[ALL.index("normal")], 1 / 129, rtol=1e-6)
    np.testing.assert_allclose(values[ALL.index("neg_inf_last")], [1 / 128] * 128 + [0], rtol=1e-6)


@pytest.mark.parametrize(("how", "log"), first(1, pairs(["per row", "static", "traced"], [False, True])))
def test_temperature_0_is_the_limit(how, log):
    """The tied largest entries share the probability, all others have 0; ties are equal values, as 0 and -0 are."""
    x = np.array([*cases.AT_0.values(), cases.AT_0["one"]], F32)
    t = np.array([0] * len(cases.AT_0) + [2 if how == "per row" else 0], F32)
    where = np.arange(5) != 4
    if how == "static":
        got = fused_topk(x, 3, where=where, log=log, temperature=0)
    else:
        got = topk(x, 3, where=where, log=log, temperature=t if how == "per row" else 0.0)
    values, indices = oracle.fused_topk(x, 3, where, t, log)
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_allclose(got.values, values, rtol=1e-6)


class Two:
    """An object that JAX converts to an array."""

    def __jax_array__(self):
        return jnp.float32(2)


@pytest.mark.parametrize(
    ("temperature", "same"), [(np.float64(1e-50), 1e-50), slow(Two(), 2.0), slow(2**40, 2.0**40)], ids=type
)
def test_temperatures_that_no_array_has(temperature, same):
    """XLA for CPUs treats numbers below 1.2e-38 as 0. The nearest one with a normal reciprocal replaces them."""
    x = np.array([[0, 3, 1, 2.5]], F32)
    assert_right(fused_topk(x, 2, temperature=temperature), x, 2, temperature=same)


@functools.partial(jax.jit, static_argnames=("log",))
def pullback(x, t, g, where=None, log=False):
    return jax.vjp(lambda x, t: fused_topk(x, 5, where=where, temperature=t, log=log).values, x, t)[1](g)


def assert_pullback(names, v, dtype=F32, where=None, log=False, slack_times=100):
    """Asserts that the gradients of x and of each row's temperature are the formula's, and 0 where masked."""
    x, t = cases.rows(names, v, dtype), np.geomspace(0.5, 4, len(names)).astype(F32)
    g = cases.cotangent((len(names), 5), dtype)
    held = x if where is None else np.where(where, x, x.dtype.type(np.nan))
    dx, dt = map(np.asarray, pullback(held, t, g, where, log=log))
    want = oracle.fused_topk_vjp(x, g, 5, where, t, log)
    unit = bounds.fused_topk_vjp_unit(x, g, 5, where, t, log)
    assert dx.dtype == dtype
    # p is recomputed in float32 from the logits, so the error of a 16-bit dtype is about one step of that dtype
    limit = 4 if dtype == F32 else 2
    assert bounds.error_units(dx, want[0], unit[0], slack_times=slack_times if dtype == F32 else 10) <= limit
    assert bounds.error_units(dt, want[1], unit[1], slack_times=100 * slack_times) <= 4
    assert where is None or not dx[~np.broadcast_to(where, x.shape)].any()


@pytest.mark.parametrize(("mask", "log"), first(1, pairs([*MASKS, None], [False, True])))
def test_gradient_with_where(mask, log):
    """dx_j = g_j p_j [j wins] - p_j sum_i g_i p_i (log: g_j [j wins] - p_j sum_i g_i), over T."""
    where = None if mask is None else cases.masks((len(FINITE), 20))[mask]
    assert_pullback(FINITE, 20, where=where, log=log)


@pytest.mark.slow
@pytest.mark.parametrize(("v", "dtype"), [(129, F32), (129, BF16), (129, F16), (cases.GPT2, F32)], ids=str)
def test_gradient_of_peaked_rows(v, dtype):
    assert_pullback(["normal", "peaked", "one_winner", "alternating", "integers"], v, dtype, slack_times=v)


SPECIALS = [0.0, -0.0, np.inf, -np.inf, np.nan, cases.NEG_NAN, 1e-40, -1e-40, 1.0, 2.0]
ELEMENTS = st.sampled_from([F32.type(s) for s in SPECIALS]) | st.floats(-50, 50, width=32)


@FREE
@given(x=hnp.arrays(F32, (4, 8), elements=ELEMENTS), where=hnp.arrays(bool, (4, 8)) | st.just(np.ones((4, 8), bool)))
def test_any_row_and_mask(x, where):
    assert_right(topk(x, 8, where=where), x, 8, where=where, limit=4.0)
