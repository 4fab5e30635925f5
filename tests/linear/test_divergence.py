"""linear_kl_divergence: values, gradients, options, logits that are not finite, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.covering import first, pairs
from tests.support.divergence import BETAS, arrays, assert_divergence
from tests.support.oracle import divergence, wide

OPTIONS = {
    "temperature": np.linspace(0.5, 2, 101, dtype="float32"),
    "softcap": 6.0,
    "teacher_softcap": 4.0,
    "where": np.arange(101) % 5 != 1,
    "token_weights": np.linspace(-0.5, 1.5, 101, dtype="float32"),
}
NUMBERS = [
    ("float32", "float16", True, None, 0.3, 1),
    *pairs(
        *(("float32", "bfloat16", "float16"), ("float32", "bfloat16", "float16"), (False, True)),
        *((None, "sum", "mean"), (1, 0.5, 0, 0.1), (8, 1)),
    ),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("dtype", "teacher_dtype", "options", "reduction", "beta", "peak"), first(1, NUMBERS))
def test_values_and_gradients(dtype, teacher_dtype, options, reduction, beta, peak):
    keywords = OPTIONS if options else {}
    assert_divergence(dtype, teacher_dtype, beta, reduction, peak=peak, transpose_w=options, **keywords)


def small(dtype="float32", **sizes):
    student, teacher, bias, teacher_bias = arrays(**{"n": 6, "depth": 8, "vocab": 100} | sizes, dtype=dtype)
    return *student, *teacher, bias, teacher_bias


def losses(x, w, teacher_x, teacher_w, bias=None, teacher_bias=None, **keywords):
    f = functools.partial(ps.linear_kl_divergence, bias=bias, teacher_bias=teacher_bias, **keywords)
    return f(x, w, teacher_x, teacher_w)


def infinite(columns, value=-np.inf):
    bias = np.zeros(100, "float32")
    bias[columns] = value
    return bias


LOW = infinite([7], -300)  # exp(-300) is 0 in float32
NOT_FINITE = {  # the biases of student and teacher, and the results for beta = 0, between, and 1; None: finite
    "no column of both": (infinite([3, 9]), infinite([3, 9]), (None, None, None)),
    "no column of the teacher": (infinite([]), infinite([3, 9]), (None, None, np.inf)),
    "no column of the student": (infinite([3, 9]), infinite([]), (np.inf, None, None)),
    "tiny in the teacher": (infinite([7]), LOW, (np.inf, None, None)),
    "tiny in the student": (LOW, infinite([7]), (None, None, np.inf)),
    "nothing of the student": (infinite(slice(None)), infinite([]), (np.nan,) * 3),
    "nothing of the teacher": (infinite([]), infinite(slice(None)), (np.nan,) * 3),
    "NaN in the student": (infinite([4], np.nan), infinite([]), (np.nan,) * 3),
    "NaN in the teacher": (infinite([]), infinite([4], np.nan), (np.nan,) * 3),
    "+inf in the student": (infinite([4], np.inf), infinite([]), (np.nan,) * 3),
    "+inf in the teacher": (infinite([]), infinite([4], np.inf), (np.nan,) * 3),
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("beta", "reduction"), first(3, [(0.5, "mean"), (0, None), (1, None), (0.5, None), (0, "mean"), (1, "mean")])
)
def test_logits_that_are_not_finite(beta, reduction):
    """Values agree with the oracle. A result that is not finite has gradients of 0."""
    x, w, teacher_x, teacher_w, *_ = small()

    @jax.jit
    def run(bias, teacher_bias):
        def f(x, w, bias):
            arrays = x, w, teacher_x, teacher_w, bias, teacher_bias
            loss = losses(*arrays, beta=beta, reduction=reduction)
            return jnp.sum(loss), loss

        return jax.grad(f, (0, 1, 2), has_aux=True)(x, w, bias)

    for name, (bias, teacher_bias, results) in NOT_FINITE.items():
        (dx, dw, dbias), loss = run(bias, teacher_bias)
        want = results[0 if beta == 0 else 2 if beta == 1 else 1]
        z, u = wide(x) @ wide(w) + bias, wide(teacher_x) @ wide(teacher_w) + teacher_bias
        value, dz = divergence(z, u, beta)
        value = value if want is None else np.full(6, want)
        mean = reduction == "mean"
        np.testing.assert_allclose(loss, value.mean() if mean else value, 1e-5, err_msg=name)
        dz = dz / 6 if mean else dz
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6, err_msg=name)
        close(dx, dz @ wide(w).T if want is None else 0 * x)
        close(dw, wide(x).T @ dz if want is None else 0 * w)
        close(dbias, np.where(np.isfinite(bias), dz.sum(0), 0) if want is None else np.zeros(100))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("beta", "dtype"), first(1, [(0.5, "float32"), (0, "bfloat16"), (1, "float32"), (0.1, "bfloat16"), (0, "float32")])
)
def test_equal_logits_give_exactly_0(beta, dtype):
    x, w, *_, bias, _ = small(dtype)

    @jax.jit
    def run(x, w, teacher_x):
        options = {"beta": beta, "softcap": 3.0, "teacher_softcap": 3.0, "temperature": 0.7}
        each, pullback = jax.vjp(lambda x, w: losses(x, w, teacher_x, w, bias, bias, reduction=None, **options), x, w)
        return each, pullback(jnp.ones(6))

    for a in jax.tree.leaves(run(x, w, x)):
        np.testing.assert_array_equal(wide(a), 0)
    each, _ = run(x, w, x * 1.001)
    assert (np.asarray(each) > -1e-6).all()


def test_temperature_0():
    arrays = small()
    for temperature in (0, np.array([1, 2, 3, 0, 1, 1])):
        with pytest.raises(ValueError, match="temperature must be from 1e-37 to 1e37, got"):
            losses(*arrays, temperature=temperature)
    traced = jax.jit(lambda t: losses(*arrays, temperature=t, reduction=None))(jnp.arange(6.0))
    np.testing.assert_array_equal(np.isnan(traced), np.arange(6) == 0)


@pytest.mark.slow
def test_float64(x64):
    """As beta tends to an end, the divergence divided by beta, or by 1 - beta, tends to the divergence at the end."""
    for beta in BETAS:
        assert_divergence("float64", "float64", beta, "mean", peak=4, transpose_w=False)
    assert losses(*small("float64"), beta=0).dtype == "float64"
    with jax.numpy_dtype_promotion("strict"):
        for dtypes in (("float64", "float32"), ("float32", "float64")):
            student, teacher = (small(dtype) for dtype in dtypes)
            f = jax.jit(functools.partial(losses, temperature=jnp.full(6, 2.0)))
            assert f(*student[:2], *teacher[2:4]).dtype == dtypes[0]
    arrays = small("float64")
    for beta, end in ((1e-8, 0), (1 - 1e-8, 1)):
        near = losses(*arrays, beta=beta) / min(beta, 1 - beta)
        np.testing.assert_allclose(near, losses(*arrays, beta=end), rtol=1e-4)


def test_gradients_in_other_arguments():
    x, w, teacher_x, teacher_w, bias, teacher_bias = small()

    def of_teacher(teacher_x, teacher_w, teacher_bias):
        return losses(x, w, teacher_x, teacher_w, bias, teacher_bias)

    gradient = jax.jit(jax.grad(of_teacher, (0, 1, 2)))
    for g in gradient(teacher_x, teacher_w, teacher_bias):
        np.testing.assert_array_equal(g, 0)
    # the products of the teacher are not differentiated
    assert str(jax.make_jaxpr(gradient)(teacher_x, teacher_w, teacher_bias)).count("dot_general") <= 2
