"""softmax, log_softmax and logsumexp: values and gradients, against the oracle and jax.nn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pallas_softmax as ps
from tests.support import bounds, cases, oracle
from tests.support.calls import FREE
from tests.support.cases import ALL, BF16, F16, F32, F64
from tests.support.covering import first, first_values, pairs

pytestmark = pytest.mark.usefixtures("quick_compilation")

NAMES = ["softmax", "log_softmax", "logsumexp"]
ELEMENTWISE = NAMES[:2]
FINITE = list(cases.FINITE)


def value_and_vjp(f):
    """Returns a function for the values of f and its gradient for a cotangent, in one compilation."""

    def both(x, g):
        y, vjp = jax.vjp(f, x)
        return y, vjp(g)[0]

    return jax.jit(both)


def cotangent_of(name, x):
    """Returns a cotangent of the results along the last axis."""
    return cases.cotangent(x.shape if name != "logsumexp" else x.shape[:1], x.dtype)


def assert_same(got, want):
    """Asserts that NaN and inf agree, and that other numbers differ by a few float32 units."""
    assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
    assert got.shape == want.shape
    wide = np.complex128 if np.iscomplexobj(got) else F64
    tolerance = 40 * float(jnp.finfo(F32).eps)
    np.testing.assert_allclose(np.asarray(got, wide), np.asarray(want, wide), rtol=tolerance, atol=tolerance)


EXPECTED = {name: (getattr(oracle, name), getattr(bounds, f"{name}_unit")) for name in NAMES}
GRADIENT = {name: (getattr(oracle, f"{name}_vjp"), getattr(bounds, f"{name}_vjp_unit")) for name in NAMES}


def accurate(name, dtype, v, names):
    """Asserts that the error of each row is at most two units. Gradients are judged in finite rows.

    16-bit results are computed in float32 and rounded once, so they are within half a step of the exact result.
    """
    x = cases.rows(names, v, dtype)
    g = cotangent_of(name, x)
    got = value_and_vjp(lambda x: getattr(ps, name)(x, -1))(x, g)
    value, unit = (f(x, -1) for f in EXPECTED[name])
    grad, grad_unit = (f(x, g if name != "logsumexp" else g[:, None], -1) for f in GRADIENT[name])
    flushed = (v + 1) * max(1.0, float(np.abs(g).max(initial=0)))
    narrow = dtype in (BF16, F16)
    unit = bounds.stored_unit(value, unit, dtype) if narrow else unit
    judged = [(value, unit, 1.0, 1.0 if narrow else 2.0, names)]
    finite = [row for row in names if row in FINITE]  # the first rows of ALL
    judged += [(grad, grad_unit, flushed, 2.0, finite)]

    bad = []
    for part, (want, units, slack_times, limit, rows) in enumerate(judged):
        assert got[part].dtype == dtype
        for i, row in enumerate(rows):
            error = bounds.error_units(got[part][i], want[i], units[i], slack_times=slack_times)
            if not error <= limit:
                bad.append(f"{('value', 'gradient')[part]} of {row}: {error:.3g} units, limit {limit:.3g}")
    assert not bad, "; ".join(bad)
    if name != "logsumexp" and narrow:
        of_finite = [np.asarray(a)[: len(rows)] for a in (got[1], got[0], g)]
        bounds.assert_operation(f"{name}_grad", of_finite[0], of_finite[1:], rows)


SHAPES = [(129, F32), (1000, BF16), (129, F16), (129, F64)]
SHAPES += [(v, F32) for v in (1000, 5000, 1, 2, 9, 127, 128, cases.GPT2)]
SHAPES += [(129, BF16), (1000, F16), *((v, dtype) for dtype in (BF16, F16) for v in (9, 5000, cases.GPT2))]
SHAPES += [(v, F32) for v in cases.LARGE]


@pytest.mark.parametrize(("name", "shape"), first(4, pairs(NAMES, SHAPES)), ids=str)
def test_rows(name, shape):
    """A row of -inf, or with any +inf or NaN, is NaN. logsumexp gives -inf, +inf and NaN.

    XLA's max over a long row on the CPU drops NaN (seen in jax 0.10.2 to 0.12.0.1).
    """
    v, dtype = shape
    with jax.enable_x64(dtype == F64):
        accurate(name, dtype, v, ["peaked"] if v > cases.GPT2 else ALL)


@pytest.mark.parametrize("name", first_values(1, ELEMENTWISE))
def test_shifting_a_row_changes_nothing(name):
    x = cases.rows(["integers", "peaked"], 128).round()
    f = jax.jit(getattr(ps, name))
    np.testing.assert_array_equal(f(x), f(x + 1024))


X3 = cases.rows(FINITE[:6], 20).reshape(6, 4, 5)
WHERE_X = cases.rows(FINITE[:7], 20)
MASKS = cases.masks(WHERE_X.shape)
AXES = [(2, 0), (), 0, None, -2, (1, 2), -1, 1, 2, -3, (0,), (-1, 0), (0, 1, 2)]
LARGE_INTEGERS = np.array([2**30, 2**30 + 1, 2**30 - 5], np.int32)  # their float32 is the same
COMPLEX = np.array([[1 + 2j, 0.5, -1j], [3, 3j, 0]], np.complex64)
SPECIAL = cases.rows(list(cases.SPECIAL), 9)
UNMASKED = np.arange(9) != 4  # the mask of rows that keep only -inf, or +inf or NaN
KEPT = np.where(UNMASKED, cases.rows(["all_neg_inf", "inf_first", "nan_first", "neg_nan_last"] * 2, 9), F32.type(1))

EMPTY = [np.zeros(shape, F32) for shape in ((3, 0), (0,), (0, 5))]
FACTORS = np.linspace(-1, 2, X3.size).reshape(X3.shape).astype(F32)
HIGHER = np.arange(2 * X3.size).reshape(2, *X3.shape) % 3 > 0

# (x, the other arguments) of calls that run as one program
CALLS = {
    "some of each": [
        (X3, {"axis": (2, 0)}),
        (X3, {"axis": ()}),  # 1, 0, or x itself
        (WHERE_X, {"axis": -1, "where": MASKS["x_shaped"]}),
        (2.0, {"axis": None}),
        (LARGE_INTEGERS, {"axis": -1}),
    ],
    "axes": [(X3, {"axis": axis}) for axis in AXES],
    "masks": [(WHERE_X, {"axis": axis, "where": MASKS[mask]}) for mask in MASKS for axis in (-1, 0, None)],
    "scalars": [(np.float32(x), {"axis": a}) for x in (2, -np.inf, np.inf, np.nan) for a in (None, ())],
    "empty arrays": [
        (x, {"axis": axis} | ({"where": np.ones(x.shape, bool)} if masked else {}))
        for x in EMPTY
        for axis in (-1, 0, None, ())
        for masked in (False, True)
    ],
    "dtypes": [
        *((x, {"axis": None}) for x in (jnp.asarray(1.0), jnp.full(3, 2.0), jnp.full(3, 2), 3)),
        *((X3, {"where": where}) for where in (True, False)),  # the default axis: -1, for logsumexp all
        (COMPLEX, {"axis": -1}),
        (COMPLEX, {"axis": -1, "where": np.array([True, False, True])}),
    ],
    "special values": [(SPECIAL, {"axis": -1}), (KEPT, {"axis": -1, "where": UNMASKED})],
}
OF_LOGSUMEXP = {
    "some options": [
        (X3, {"b": FACTORS, "axis": (0, 2), "return_sign": True}),
        (X3, {"axis": (0, 2), "keepdims": True}),
    ],
    "options": [
        *((X3, {"axis": axis, "keepdims": True}) for axis in (None, -1, ())),
        (X3, {"b": FACTORS, "axis": -1}),
        (X3, {"b": -1.0}),
        (X3, {"return_sign": True, "keepdims": True}),
        (X3, {"b": FACTORS, "axis": 1, "where": FACTORS > 0}),
        (X3, {"b": np.ones((2, *X3.shape), F32) * 3, "axis": -1}),
        (X3, {"where": HIGHER, "axis": 0, "return_sign": True}),
        (X3, {"return_sign": False}),
        (jnp.asarray([True, False]), {}),  # the other functions raise TypeError
        *((np.array(x, np.complex64), {}) for x in ([2 + 4j, 1 - 1j], [2 + 4j])),  # beyond pi
    ],
}


def run(f, calls, spoiled=False):
    """Returns the results of calls, and their gradients unless they have factors, of one program.

    If `spoiled`, masked logits and cotangents are NaN, infinite or huge.
    """

    def spoil(a, arguments):
        other = {"b", "return_sign"} & set(arguments) or not spoiled or jnp.result_type(a) != F32
        return a if other or "where" not in arguments else cases.spoil_masked(a, arguments["where"])

    def of(x, arguments):
        y = f(x, **arguments)
        if {"b", "return_sign"} & set(arguments) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return y, None
        g = cases.cotangent(y.shape)
        g = spoil(g, arguments) if y.shape == np.shape(x) else g
        return y, jax.vjp(lambda x: f(x, **arguments), x)[1](jnp.asarray(g))[0]

    program = jax.jit(lambda xs: [of(x, arguments) for x, (_, arguments) in zip(xs, calls)])
    return program([spoil(x, arguments) for x, arguments in calls])


TOGETHER = [("softmax", "some of each"), *(("logsumexp", calls) for calls in OF_LOGSUMEXP)]
TOGETHER += [case for case in itertools.product(NAMES, CALLS) if case not in TOGETHER]


@pytest.mark.parametrize(("name", "calls"), first(2, TOGETHER))
def test_calls_agree_with_jax_nn(name, calls):
    """An axis may be an int, negative, a tuple or None. Masked elements are 0 (log_softmax: -inf), whatever they hold.

    Types, weak types and shapes agree too. No result is less accurate than jax.nn's by more than a factor of two.
    """
    calls = (CALLS | OF_LOGSUMEXP)[calls]
    for (x, arguments), (y, dx), (want_y, want_dx) in zip(
        calls, run(getattr(ps, name), calls, spoiled=True), run(getattr(jax.nn, name), calls)
    ):
        assert jax.tree.structure(y) == jax.tree.structure(want_y)
        jax.tree.map(assert_same, y, want_y)
        if dx is not None:
            assert dx.shape == np.shape(x)
            np.testing.assert_allclose(dx, want_dx, rtol=2e-5, atol=2e-6)
        if np.asarray(x).dtype == F32 and not {"b", "return_sign"} & set(arguments):
            axis, where = arguments.get("axis", None if name == "logsumexp" else -1), arguments.get("where")
            value, unit = (np.reshape(f(x, axis, where), y.shape) for f in EXPECTED[name])
            limit = max(4.0, 2 * bounds.error_units(want_y, value, unit))
            assert bounds.error_units(y, value, unit) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), pairs(NAMES, [-1, None, 0, (0, 2)]), ids=str)
def test_where_of_higher_rank_broadcasts_x(name, axis):
    """One row with many masks. With a negative axis or None, jax.nn.softmax sums along another axis."""
    where = np.random.default_rng(0).random((4, *X3.shape)) < 0.5
    got = getattr(ps, name)(X3, axis, where=where)
    x = np.broadcast_to(X3, where.shape)
    assert_same(got, getattr(jax.nn, name)(x, axis, where=where))
    assert_same(getattr(ps, name)(x, axis, where), got) if name in ELEMENTWISE else None


ELEMENTS = st.one_of(
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1e-40, 3e38, -3e38]),
    st.floats(-100, 100, width=32),
    st.floats(width=32),
)
compiled = jax.jit(lambda name, axis, x, where: getattr(ps, name)(x, axis, where=where), static_argnums=(0, 1))


@st.composite
def arrays(draw):
    shape, axis = draw(st.sampled_from([((7, 5), -1), ((2, 3, 4), (0, 1)), ((3, 1), None)]))
    x = draw(hnp.arrays(F32, shape, elements=ELEMENTS))
    return x, axis, draw(st.just(np.ones(shape, bool)) | hnp.arrays(bool, shape))


@pytest.mark.parametrize("name", first_values(1, NAMES))
@settings(FREE, max_examples=25)
@given(call=arrays())
def test_any_array_axis_and_mask(name, call):
    x, axis, where = call
    value, unit = (f(x, axis, where=where) for f in EXPECTED[name])
    assert bounds.error_units(compiled(name, axis, x, where), value, unit) <= 4


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
        for got, want in zip(derivatives(getattr(ps, name)), derivatives(getattr(jax.nn, name))):
            assert weak_types(got(x)) == weak_types(want(x))


def test_logsumexp_with_16_bit_factors():
    """The float32 sum is exact and rounded once."""
    x, b = (jnp.linspace(0, 1, 512, dtype=BF16) for _ in range(2))
    got = ps.logsumexp(x, b=b)
    assert got.dtype == BF16
    want = np.log(np.sum(np.asarray(b, "float64") * np.exp(np.asarray(x, "float64"))))
    np.testing.assert_allclose(float(got), want, rtol=2.0**-8)


@pytest.mark.slow
def test_factors_of_logsumexp_promote_with_the_logits():
    """Promotion agrees with JAX, also under strict promotion."""
    a, b = np.array([1, 2], np.int32), np.array([1, 0], np.int32)
    with jax.numpy_dtype_promotion("strict"):
        got = ps.logsumexp(a, b=b)
    assert_same(got, jax.nn.logsumexp(a, b=b))


def test_monkey_patched_jax_nn_does_not_recurse(monkeypatch):
    monkeypatch.setattr(jax.nn, "logsumexp", ps.logsumexp)
    np.testing.assert_allclose(jax.nn.logsumexp(np.zeros(3, F32), b=2.0), np.log(6), rtol=1e-6)


@pytest.mark.slow
def test_logsumexp_of_a_long_python_int():
    assert_same(ps.logsumexp(2**40), jax.nn.logsumexp(2**40))
