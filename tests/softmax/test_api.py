"""softmax, log_softmax and logsumexp: values and gradients, against the oracle and jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pallas_softmax as ps
from tests.support import bounds, cases, oracle
from tests.support.cases import BF16, F16, F32, F64
from tests.support.covering import cover, first, first_values, pairs

pytestmark = pytest.mark.usefixtures("quick_compilation")

NAMES = ["softmax", "log_softmax", "logsumexp"]
ELEMENTWISE = NAMES[:2]
FREE = settings(max_examples=25, deadline=None, derandomize=True)


def ours(name):
    return getattr(ps, name)


def jax_nn(name):
    return getattr(jax.nn, name)


def value_and_vjp(f):
    """Returns a function for the values of f and its gradient for a cotangent, in one compilation."""

    def both(x, g):
        y, vjp = jax.vjp(f, x)
        return y, vjp(g)[0]

    return jax.jit(both)


def assert_same(got, want, units=4.0):
    """Asserts that NaN and inf agree, and that other numbers differ by a few float32 units."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    got, want = np.asarray(got, F64), np.asarray(want, F64)
    tolerance = units * float(jnp.finfo(F32).eps) * 10
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def assert_as_accurate(got, reference, value, unit, factor=2.0):
    """Asserts an error of at most four units, or of `factor` times the error of jax.nn."""
    limit = max(4.0, factor * bounds.error_units(reference, value, unit))
    assert bounds.error_units(got, value, unit) <= limit


# --- Accuracy -----------------------------------------------------------------------------------------

EXPECTED = {
    "softmax": (oracle.softmax, bounds.softmax_unit),
    "log_softmax": (oracle.log_softmax, bounds.log_softmax_unit),
    "logsumexp": (oracle.logsumexp, bounds.logsumexp_unit),
}
GRADIENT = {
    "softmax": (oracle.softmax_vjp, bounds.softmax_vjp_unit),
    "log_softmax": (oracle.log_softmax_vjp, bounds.log_softmax_vjp_unit),
    "logsumexp": (oracle.logsumexp_vjp, bounds.logsumexp_vjp_unit),
}


def accurate(name, dtype, v, names):
    """Asserts that the error of each row is at most two units, or twice the error of jax.nn.

    16-bit results are computed in float32 and rounded once, so they are within half a step of the exact result,
    whatever jax.nn does.
    """
    x = cases.rows(names, v, dtype)
    g = cases.cotangent(x.shape if name != "logsumexp" else x.shape[:1], dtype)
    got = value_and_vjp(lambda x: ours(name)(x, -1))(x, g)
    wide_g = g if name != "logsumexp" else g[:, None]
    value, unit = (f(x, -1) for f in EXPECTED[name])
    grad, grad_unit = (f(x, wide_g, -1) for f in GRADIENT[name])
    flushed = (v + 1) * max(1.0, float(np.abs(g).max(initial=0)))
    reference = None
    if dtype in (F32, F64):
        reference = value_and_vjp(lambda x: jax_nn(name)(x, -1))(x, g)
    else:
        unit = bounds.stored_unit(value, unit, dtype)
    bad = []
    for part, want, units, slack_times in [(0, value, unit, 1.0), (1, grad, grad_unit, flushed)]:
        assert got[part].dtype == dtype
        for i, row in enumerate(names):
            args = want[i], units[i]
            error = bounds.error_units(got[part][i], *args, slack_times=slack_times)
            if reference is not None:
                their = bounds.error_units(reference[part][i], *args, slack_times=slack_times)
                limit = max(2.0, 2 * their if np.isfinite(their) else 0)
            else:
                limit = 2.0 if part else 1.0
            if not error <= limit:
                bad.append(f"{('value', 'gradient')[part]} of {row}: {error:.3g} units, limit {limit:.3g}")
    assert not bad, "; ".join(bad)
    if name != "logsumexp" and jnp.dtype(dtype).itemsize == 2:
        bounds.assert_operation(f"{name}_grad", got[1], (got[0], g), names)


@pytest.mark.parametrize(("name", "v"), first(3, pairs(NAMES, [129, 1000, 1, 2, 127, 128, cases.GPT2])))
def test_float32_against_the_oracle(name, v):
    accurate(name, F32, v, list(cases.FINITE))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "v"), pairs(NAMES, cases.LARGE[::-1]))
def test_float32_large_vocabulary(name, v):
    accurate(name, F32, v, ["peaked"])


@pytest.mark.parametrize(("name", "dtype", "v"), cover(NAMES, [BF16, F16], [129, 1000, cases.GPT2]), ids=str)
def test_16_bits_are_accumulated_in_float32(name, dtype, v):
    accurate(name, dtype, v, list(cases.FINITE))


@pytest.mark.parametrize("name", first_values(1, NAMES))
def test_float64(name, x64):
    accurate(name, F64, 129, list(cases.FINITE))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_shifting_a_row_changes_nothing(name):
    x = cases.rows(["integers", "peaked"], 128).round()
    f = jax.jit(ours(name))
    np.testing.assert_array_equal(f(x), f(x + 1024))


# --- Special values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "v", "dtype"), first(2, pairs(NAMES, [1, 9, 129, 5000], [F32, BF16, F16])), ids=str
)
def test_special_values(name, v, dtype):
    """A row of -inf, or with any +inf or NaN, is NaN. logsumexp gives -inf, +inf and NaN.

    V = 5000 is tested because XLA's max over a long row on the CPU drops NaN (seen in jax 0.10.2 to 0.12.0.1).
    """
    names = list(cases.SPECIAL)
    x = cases.rows(names, v, dtype)
    value, unit = (f(x, -1) for f in EXPECTED[name])
    got = jax.jit(lambda x: ours(name)(x, -1))(x)
    bad = [
        f"{row}: {got[i].ravel()[:3]}"
        for i, row in enumerate(names)
        if bounds.error_units(got[i], value[i], unit[i]) > 2
    ]
    assert not bad, bad


@pytest.mark.parametrize("name", first_values(1, NAMES))
def test_gradient_of_special_values_agrees_with_jax(name):
    x = cases.rows(list(cases.SPECIAL), 9)
    g = cases.cotangent(x.shape if name != "logsumexp" else x.shape[:1])
    got = value_and_vjp(lambda x: ours(name)(x, -1))(x, g)[1]
    want = value_and_vjp(lambda x: jax_nn(name)(x, -1))(x, g)[1]
    for i, row in enumerate(cases.SPECIAL):
        np.testing.assert_allclose(got[i], want[i], rtol=1e-5, atol=1e-6, err_msg=row)


# --- axis ---------------------------------------------------------------------------------------------

X3 = cases.rows(list(cases.FINITE)[:6], 20).reshape(6, 4, 5)
AXES = [0, (2, 0), None, -2, (1, 2), (), -1, 1, 2, -3, (0,), (-1, 0), (0, 1, 2)]


@pytest.mark.parametrize(("name", "axis"), first(3, pairs(NAMES, AXES)), ids=str)
def test_axis(name, axis):
    """An axis may be an int, negative, a tuple or None. () gives 1 (softmax), 0 (log_softmax) or x (logsumexp)."""
    g = cases.cotangent(np.shape(jax_nn(name)(X3, axis)))
    (got, dx), (want, want_dx) = (
        value_and_vjp(lambda x, f=f: f(name)(x, axis))(X3, g) for f in (ours, jax_nn)
    )
    assert_same(got, want)
    np.testing.assert_allclose(dx, want_dx, rtol=2e-5, atol=2e-6)
    assert_as_accurate(got, want, *(f(X3, axis) for f in EXPECTED[name]))


@pytest.mark.parametrize("axis", first_values(2, [(0, 2), None, -1, ()]), ids=str)
def test_logsumexp_keepdims(axis):
    assert_same(ps.logsumexp(X3, axis, keepdims=True), jax.nn.logsumexp(X3, axis, keepdims=True))


@pytest.mark.parametrize(
    ("name", "value", "axis"), first(2, pairs(NAMES, [2.0, -np.inf, np.inf, np.nan], [None, ()])), ids=str
)
def test_scalar_needs_no_axis(name, value, axis):
    x = jnp.float32(value)
    assert_same(ours(name)(x, axis), jax_nn(name)(x, axis))


@pytest.mark.parametrize(
    ("name", "shape", "axis"), first(2, pairs(NAMES, [(0,), (3, 0), (0, 5)], [-1, 0, None, ()])), ids=str
)
def test_empty_arrays(name, shape, axis):
    """Empty arrays work, also masked, and with gradients. logsumexp of no elements is -inf."""
    x = jnp.zeros(shape)
    assert_same(ours(name)(x, axis), jax_nn(name)(x, axis))
    where = np.ones(shape, bool)
    assert_same(ours(name)(x, axis, where=where), jax_nn(name)(x, axis, where=where))
    assert jax.grad(lambda x: ours(name)(x, axis).sum())(x).shape == shape


# --- where --------------------------------------------------------------------------------------------

WHERE_X = cases.rows(list(cases.FINITE)[:7], 20)
MASKS = cases.masks(WHERE_X.shape)


@pytest.mark.parametrize(("name", "axis", "mask"), first(2, pairs(NAMES, [-1, 0, None], MASKS)), ids=str)
def test_where(name, axis, mask):
    """Masked elements are 0 (log_softmax: -inf), also in a fully masked row."""
    where = MASKS[mask]
    got = ours(name)(WHERE_X, axis, where=where)
    want = jax_nn(name)(WHERE_X, axis, where=where)
    assert_same(got, want)
    assert_as_accurate(got, want, *(f(WHERE_X, axis, where=where) for f in EXPECTED[name]))


@pytest.mark.parametrize(
    ("name", "poison", "mask"), first(2, pairs(NAMES, [np.nan, 0.0, np.inf], MASKS)), ids=str
)
def test_gradient_with_where(name, mask, poison):
    """Gradients of masked elements are 0 and the others finite, even if masked logits and cotangents are NaN."""
    where = MASKS[mask]
    x, full = np.where(where, WHERE_X, np.float32(poison)), np.broadcast_to(where, WHERE_X.shape)
    g = cases.cotangent(x.shape if name != "logsumexp" else x.shape[:1])
    given = g if name == "logsumexp" else np.where(where, g, np.float32(poison))
    got = np.asarray(value_and_vjp(lambda x: ours(name)(x, -1, where=where))(x, given)[1])
    want = GRADIENT[name][0](x, g if name != "logsumexp" else g[:, None], -1, where=where)
    kept_rows = full.any(-1)
    assert np.isfinite(got).all()
    assert (got[~full] == 0).all()
    assert (got[~kept_rows] == 0).all()
    np.testing.assert_allclose(got[kept_rows], want[kept_rows].astype(F32), rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("name", first_values(1, NAMES))
def test_where_is_a_python_bool(name):
    """The default axis is -1 for softmax and log_softmax, and all axes for logsumexp. `where` may be positional."""
    for where in (True, False):
        assert_same(ours(name)(X3, where=where), jax_nn(name)(X3, where=where))
        if name in ELEMENTWISE:
            assert_same(ours(name)(X3, -1, where), jax_nn(name)(X3, -1, where))


@pytest.mark.parametrize(("name", "axis"), first(2, pairs(NAMES, [-1, None, 0, (0, 2)])), ids=str)
def test_where_of_higher_rank_broadcasts_x(name, axis):
    """One row with many masks. With a negative axis or None, jax.nn.softmax sums along another axis."""
    where = np.random.default_rng(0).random((4, *X3.shape)) < 0.5
    got = ours(name)(X3, axis, where=where)
    x = np.broadcast_to(X3, where.shape)
    assert_same(got, jax_nn(name)(x, axis, where=where))
    assert_same(ours(name)(x, axis, where=where), got)


@pytest.mark.parametrize("name", first_values(1, NAMES))
def test_kept_special_values_with_where(name):
    """If all kept entries are -inf, or any is inf or NaN, the row is NaN where kept and 0 where masked."""
    rows = ["all_neg_inf", "inf_first", "nan_first", "neg_nan_last"]
    x = cases.rows([row for row in rows for _ in range(2)], 9)
    x[:, 4] = 1.0
    where = np.ones(x.shape, bool)
    where[:, 4] = False
    g = cases.cotangent(x.shape if name != "logsumexp" else x.shape[:1])
    got, dx = value_and_vjp(lambda x: ours(name)(x, -1, where=where))(x, g)
    want, want_dx = value_and_vjp(lambda x: jax_nn(name)(x, -1, where=where))(x, g)
    assert_same(got, want)
    value = EXPECTED[name][0](x, -1, where=where)
    assert bounds.error_units(got, value, np.abs(value)) <= 4
    np.testing.assert_allclose(dx, want_dx, atol=1e-6)


# --- dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_large_integers_keep_their_differences(name):
    """2**30 and 2**30 + 1 are the same float32 but different logits; jax.nn subtracts before it converts."""
    x = jnp.asarray([2**30, 2**30 + 1, 2**30 - 5], jnp.int32)
    assert_same(ours(name)(x), jax_nn(name)(x))


@pytest.mark.parametrize("name", NAMES)
def test_bool(name):
    """softmax and log_softmax raise TypeError; logsumexp converts to numbers."""
    x = jnp.asarray([True, False])
    if name == "logsumexp":
        assert_same(ps.logsumexp(x), jax.nn.logsumexp(x))
    else:
        with pytest.raises(TypeError, match="bool"):
            ours(name)(x)


@pytest.mark.parametrize(
    ("name", "where"), first(1, pairs(NAMES, [None, np.array([True, False, True])])), ids=str
)
def test_complex(name, where):
    x = jnp.asarray([[1 + 2j, 0.5, -1j], [3, 3j, 0]], jnp.complex64)
    got, want = ours(name)(x, -1, where=where), jax_nn(name)(x, -1, where=where)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", first_values(1, NAMES))
def test_weak_types_agree_with_jax(name):
    for x in (jnp.asarray(1.0), jnp.broadcast_to(2.0, (3,)), jnp.broadcast_to(2, (3,)), 2.0, 3):
        got, want = ours(name)(x, None), jax_nn(name)(x, None)
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type), x


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_weak_types_of_derivatives_agree_with_jax(name):
    def derivatives(f):
        def total(x):
            return jnp.sum(f(x) ** 2)

        of_total = jax.grad(total)
        return (
            of_total,
            jax.jit(of_total),
            jax.grad(lambda x: jnp.sum(of_total(x))),
            jax.jacrev(f),
            jax.jacfwd(f),
            lambda x: jax.jvp(f, (x,), (x,)),
            lambda x: jax.jvp(f, (x,), (jnp.ones(3, F32),)),
            lambda x: jax.jvp(of_total, (x,), (x,)),
            lambda x: jax.vjp(f, x)[1](jnp.ones_like(f(x))),
        )

    def weak_types(arrays):
        return [(a.dtype, a.weak_type) for a in jax.tree.leaves(arrays)]

    for x in jnp.full(3, 2.0), jnp.ones(3, F32):
        for got, want in zip(derivatives(ours(name)), derivatives(jax_nn(name))):
            assert weak_types(got(x)) == weak_types(want(x))


# --- Random calls -------------------------------------------------------------------------------------

SHAPES = [(7, 5), (2, 3, 4), (3, 1)]
ELEMENTS = st.one_of(
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1e-40, 3e38, -3e38]),
    st.floats(-100, 100, width=32),
    st.floats(width=32),
)


@st.composite
def calls(draw):
    shape = draw(st.sampled_from(SHAPES))
    x = draw(hnp.arrays(F32, shape, elements=ELEMENTS))
    axis = draw(st.sampled_from([-1, 0, (0, 1), None]))
    where = draw(st.none() | hnp.arrays(bool, shape))
    return x, axis, where


@pytest.mark.parametrize("name", first_values(1, NAMES))
@FREE
@given(call=calls())
def test_any_array_axis_and_mask(name, call):
    x, axis, where = call
    value, unit = (f(x, axis, where=where) for f in EXPECTED[name])
    got = _compiled(name, axis, where is None)(x, where)
    assert bounds.error_units(got, value, unit) <= 4


_cache = {}


def _compiled(name, axis, unmasked):
    """Returns one jitted function per (name, axis), so that examples share compilations."""
    key = name, axis, unmasked
    if key not in _cache:
        _cache[key] = jax.jit(lambda x, where: ours(name)(x, axis, where=None if unmasked else where))
    return _cache[key]


# --- Options of JAX's logsumexp -----------------------------------------------------------------------

FACTORS = np.linspace(-1, 2, X3.size).reshape(X3.shape).astype(F32)
BY_JAX = {
    "b": {"b": FACTORS, "axis": -1},
    "b, which is negative": {"b": -1.0},
    "b and sign": {"b": FACTORS, "axis": (0, 2), "return_sign": True},
    "sign": {"return_sign": True, "keepdims": True},
    "b and where": {"b": FACTORS, "axis": 1, "where": FACTORS > 0},
    "b of higher rank": {"b": np.ones((2, *X3.shape), F32) * 3, "axis": -1},
    "where of higher rank": {
        "where": np.arange(2 * X3.size).reshape(2, *X3.shape) % 3 > 0,
        "axis": 0,
        "return_sign": True,
    },
    "no sign": {"return_sign": False},
}


@pytest.mark.parametrize("arguments", first_values(3, BY_JAX))
def test_logsumexp_with_factors_and_sign(arguments):
    arguments = BY_JAX[arguments]
    got, want = ps.logsumexp(X3, **arguments), jax.nn.logsumexp(X3, **arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(assert_same, got, want)


def test_logsumexp_of_complex_numbers():
    """The imaginary part is from -pi to pi, as in numpy."""
    x = jnp.array([2 + 4j, 1 - 1j])
    np.testing.assert_allclose(ps.logsumexp(x), np.log(np.sum(np.exp(np.asarray(x)))), rtol=1e-5)
    np.testing.assert_allclose(ps.logsumexp(x[:1]), 2 + (4 - 2 * np.pi) * 1j, rtol=1e-5)


def test_logsumexp_with_16_bit_factors():
    """The float32 sum is exact and rounded once."""
    x, b = (jnp.linspace(0, 1, 512, dtype=BF16) for _ in range(2))
    got = ps.logsumexp(x, b=b)
    assert got.dtype == BF16
    want = np.log(np.sum(np.asarray(b, "float64") * np.exp(np.asarray(x, "float64"))))
    np.testing.assert_allclose(float(got), want, rtol=2.0**-8)


def test_factors_of_logsumexp_promote_with_the_logits():
    """Promotion agrees with JAX, also under strict promotion."""
    a, b = np.array([1, 2], np.int32), np.array([1, 0], np.int32)
    with jax.numpy_dtype_promotion("strict"):
        got = ps.logsumexp(a, b=b)
    assert_same(got, jax.nn.logsumexp(a, b=b))


def test_monkey_patched_jax_nn_does_not_recurse(monkeypatch):
    monkeypatch.setattr(jax.nn, "logsumexp", ps.logsumexp)
    assert_same(jax.nn.logsumexp(np.zeros(3, F32), b=2.0), np.log(np.float32(6)))


def test_logsumexp_of_a_long_python_int():
    assert_same(ps.logsumexp(2**40), jax.nn.logsumexp(2**40))
