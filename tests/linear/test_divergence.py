"""linear_kl_divergence: values, gradients, options, logits that are not finite, and memory."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pallas_softmax as ps
from tests.support.covering import first, pairs, slow
from tests.support.divergence import BETAS, arrays, assert_divergence
from tests.support.linear import of_size, rounded_errors, value_and_grads
from tests.support.oracle import divergence, wide

OPTIONS = {
    "temperature": jnp.linspace(0.5, 2, 101),
    "softcap": 6.0,
    "teacher_softcap": 4.0,
    "where": np.arange(101) % 5 != 1,
    "token_weights": np.linspace(-0.5, 1.5, 101, dtype="float32"),
}
NUMBERS = [
    ("bfloat16", "float32", True, "mean", 0, 4),
    ("float16", "bfloat16", False, None, 1, 4),
    ("float32", "float16", True, "sum", 0.3, 1),
    *pairs(
        ("float32", "bfloat16", "float16"),
        ("float32", "bfloat16"),
        (False, True),
        ("mean", None),
        BETAS,
        (1, 8),
    ),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "teacher_dtype", "options", "reduction", "beta", "peak"), first(3, NUMBERS)
)
def test_values_and_gradients(dtype, teacher_dtype, options, reduction, beta, peak):
    keywords = OPTIONS if options else {}
    assert_divergence(dtype, teacher_dtype, beta, reduction, peak=peak, transpose_w=options, **keywords)


def small(dtype="float32", **sizes):
    student, teacher, bias, teacher_bias = arrays(**{"n": 6, "depth": 8, "vocab": 100} | sizes, dtype=dtype)
    return *student, *teacher, bias, teacher_bias


def losses(x, w, teacher_x, teacher_w, bias=None, teacher_bias=None, **keywords):
    f = functools.partial(ps.linear_kl_divergence, bias=bias, teacher_bias=teacher_bias, **keywords)
    return f(x, w, teacher_x, teacher_w)


# --- Logits that are not finite, and other special numbers ---------------------------------------------


def infinite(columns, value=-np.inf):
    """Returns a bias (100,) that is infinite in these columns."""
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
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_logits_that_are_not_finite(beta):
    """Values agree with the oracle. A result that is not finite has gradients of 0."""
    x, w, teacher_x, teacher_w, *_ = small()

    @jax.jit
    def run(bias, teacher_bias):
        def f(x, w, bias, reduction: Any = "mean"):
            arrays = x, w, teacher_x, teacher_w, bias, teacher_bias
            return losses(*arrays, beta=beta, reduction=reduction)

        each, pull = jax.vjp(functools.partial(f, reduction=None), x, w, bias)
        return each, pull(jnp.ones(6)), jax.grad(f, (0, 1, 2))(x, w, bias)

    for name, (bias, teacher_bias, results) in NOT_FINITE.items():
        each, *gradients = run(bias, teacher_bias)
        want = results[0 if beta == 0 else 2 if beta == 1 else 1]
        z, u = wide(x) @ wide(w) + bias, wide(teacher_x) @ wide(teacher_w) + teacher_bias
        value, dz = divergence(z, u, beta)
        np.testing.assert_allclose(each, value if want is None else np.full(6, want), 1e-5, err_msg=name)
        for share, (dx, dw, dbias) in zip((1, 1 / 6), gradients):
            dz_wanted = share * dz
            close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6, err_msg=name)
            close(dx, dz_wanted @ wide(w).T if want is None else 0 * x)
            close(dw, wide(x).T @ dz_wanted if want is None else 0 * w)
            close(dbias, np.where(np.isfinite(bias), dz_wanted.sum(0), 0) if want is None else np.zeros(100))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", None])
@pytest.mark.parametrize("of", ["x", "teacher_x"])
def test_a_token_that_is_not_finite(of, reduction):
    """A loss of its own has derivatives of 0, even after exp. A mean has them everywhere. `where` removes the token."""
    x, w, teacher_x, teacher_w, *_ = small()
    x = x.at[2].set(jnp.nan) if of == "x" else x
    teacher_x = teacher_x.at[2].set(jnp.nan) if of == "teacher_x" else teacher_x
    kept = np.arange(6) != 2

    def f(x, w, where=None, kept=slice(None)):
        each = losses(x, w, teacher_x[kept], teacher_w, reduction=reduction, where=where)
        return jnp.sum(jnp.where(jnp.isfinite(each), jnp.exp(each), 0))

    dx, dw = jax.grad(f, (0, 1))(x, w)
    without_dx, without_dw = jax.grad(functools.partial(f, kept=kept), (0, 1))(x[kept], w)
    assert not np.asarray(dx[2]).any() and np.isfinite(dw).all()
    np.testing.assert_allclose(dw, without_dw if reduction is None else 0 * w, rtol=1e-5, atol=1e-6)
    dx, dw = jax.grad(functools.partial(f, where=kept), (0, 1))(x, w)
    np.testing.assert_allclose(dx[kept], without_dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, without_dw, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("beta", BETAS)
def test_equal_logits_give_exactly_0(beta, dtype):
    x, w, *_, bias, _ = small(dtype)

    def f(x, w):
        options = {"beta": beta, "softcap": 3.0, "teacher_softcap": 3.0, "temperature": 0.7}
        return losses(x, w, x, w, bias, bias, reduction=None, **options)

    for a in (f(x, w), *jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1))(x, w)):
        np.testing.assert_array_equal(wide(a), 0)
    close = losses(x, w, x * 1.001, w, bias, bias, beta=beta, reduction=None)
    assert (np.asarray(close) > -1e-6).all()


def test_temperature_0():
    arrays = small()
    for temperature in (0, np.array([1, 2, 3, 0, 1, 1])):
        with pytest.raises(ValueError, match="temperature must be from 1e-37 to 1e37, got"):
            losses(*arrays, temperature=temperature)
    traced = jax.jit(lambda t: losses(*arrays, temperature=t, reduction=None))(jnp.arange(6.0))
    np.testing.assert_array_equal(np.isnan(traced), np.arange(6) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("beta", BETAS)
def test_no_intermediate_nan(beta):
    """`jax_debug_nans` and checkify see intermediate values."""
    x, w, teacher_x, teacher_w, *_ = small()
    bias = infinite([3])
    f = jax.jit(jax.value_and_grad(lambda x: losses(x, w, teacher_x, teacher_w, bias, bias, beta=beta)))
    error, _ = checkify.checkify(f, errors=checkify.float_checks)(x)
    assert error.get() is None
    with jax.debug_nans(True):
        f(x)


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


# --- Gradients that do not exist ------------------------------------------------------------------------


def test_gradients_in_other_arguments():
    x, w, teacher_x, teacher_w, bias, teacher_bias = small()

    def of_teacher(teacher_x, teacher_w, teacher_bias):
        return losses(x, w, teacher_x, teacher_w, bias, teacher_bias)

    for g in jax.grad(of_teacher, (0, 1, 2))(teacher_x, teacher_w, teacher_bias):
        np.testing.assert_array_equal(g, 0)
    dots = re.findall("dot_general", str(jax.make_jaxpr(jax.grad(of_teacher))(*small()[2:4], teacher_bias)))
    assert len(dots) <= 2  # the products of the teacher are not differentiated
    with pytest.raises(NotImplementedError, match="no gradient in temperature"):
        jax.grad(lambda t: losses(*small(), temperature=t))(1.5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: losses(x, w, teacher_x, teacher_w), (x,), (x,))


# --- Products and memory --------------------------------------------------------------------------------


def compiled(f, *shapes):
    return jax.jit(f).lower(*shapes).compile()


@pytest.mark.parametrize(
    ("reduction", "gradient", "count"),
    [("mean", False, 2), ("mean", True, 4), slow("sum", True, 4)],
)
def test_products(reduction, gradient, count):
    x, w, _ = of_size(64, 8, 100, "float32")
    teacher_x, teacher_w, weights = of_size(64, 24, 100, "float32")

    def f(x, w, teacher_x, teacher_w, weights):
        each = losses(x, w, teacher_x, teacher_w, token_weights=weights, beta=0.5, reduction=reduction)
        return jnp.sum(each)

    weights = jax.ShapeDtypeStruct(weights.shape, "float32")
    f = jax.grad(f, (0, 1, 4)) if gradient else f
    assert compiled(f, x, w, teacher_x, teacher_w, weights).as_text().count(" dot(") == count


@pytest.mark.parametrize(("beta", "reduction"), first(1, [(0, "mean"), (0.5, "mean"), (1, None)]))
def test_memory_in_addition_to_dw(beta, reduction):
    """The logits of student and teacher stay within the workspace. A loss per token takes six products."""
    x, w, _ = of_size(8192)
    teacher_x, teacher_w, _ = of_size(8192, 8192)
    f = jax.grad(
        lambda *arrays: jnp.sum(ps.linear_kl_divergence(*arrays, beta=beta, reduction=reduction)), (0, 1)
    )
    program = compiled(f, x, w, teacher_x, teacher_w)
    # jax 0.10 drops the barrier between the two passes on a CPU
    limit = 0.6 if jax.__version_info__ >= (0, 11) else 0.8
    assert program.memory_analysis().temp_size_in_bytes - 4 * 4096 * 128256 <= limit * 2**30
    assert program.as_text().count(" dot(") == (8 if reduction else 10)  # first chunk and loop


# --- Tokens that are left out, choice, and bad input ----------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", None])
def test_left_out_tokens_do_not_matter(reduction):
    """With many tokens, the products skip most of those that are left out. Theirs may be NaN."""
    x, w, teacher_x, teacher_w, bias, teacher_bias = small(n=1100)
    where = np.random.default_rng(5).random(1100) < 0.3
    g = np.linspace(-1, 2, 1100).astype("float32")

    def total(x, w, bias, teacher_x, g, where=None):
        each = losses(x, w, teacher_x, teacher_w, bias, teacher_bias, where=where, reduction=reduction)
        return jnp.sum(each * (g if reduction is None else 1))

    bad = (jnp.where(where[:, None], a, jnp.nan) for a in (x, teacher_x))
    gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    bad_x, bad_teacher_x = bad
    got, (dx, *others) = gradients(bad_x, w, bias, bad_teacher_x, g, where)
    want, (want_dx, *want_others) = gradients(x[where], w, bias, teacher_x[where], g[where])
    assert not np.asarray(dx)[~where].any()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip((dx[where], *others), (want_dx, *want_others)):
        assert rounded_errors(a, wide(b)) <= 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_vmap():
    """Over tokens there is one call with more tokens; over teachers, one call after another."""
    x, w, teacher_x, teacher_w, *_ = small()

    def f(x, w, teacher_x, teacher_w):
        return losses(x, w, teacher_x, teacher_w, beta=0.3, reduction=None)

    want = f(x, w, teacher_x, teacher_w)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(jax.vmap(f, (0, None, 0, None))(x, w, teacher_x, teacher_w), want)
    two = jnp.stack([teacher_w, teacher_w[:, ::-1]])
    for got, of in zip(jax.vmap(f, (None, None, None, 0))(x, w, teacher_x, two), two):
        close(got, f(x, w, teacher_x, of))
    grads = jax.vmap(lambda x, t: value_and_grads(lambda x, w: jnp.sum(f(x, w, t, teacher_w)), x, w), (0, 0))
    (values, (dx, dw)) = grads(x[:, None], teacher_x[:, None])
    _, (want_dx, want_dw) = value_and_grads(lambda x, w: jnp.sum(f(x, w, teacher_x, teacher_w)), x, w)
    close(values, want)
    close(dx[:, 0], want_dx)
    close(dw.sum(0), want_dw)


def test_explain():
    shapes = [*of_size(16, 8, 100)[:2], *of_size(16, 24, 100)[:2]]
    forward, gradient = ps.explain(ps.linear_kl_divergence, *shapes)
    assert (forward.call.op, gradient.call.op) == ("projection", "projection_with_grad")
    assert str(forward).startswith("linear_kl_divergence bfloat16[16, 8] @ [8, 100]: xla")


def test_bad_input():
    x, w, teacher_x, teacher_w, bias, _ = small()
    for error, match, keywords in (
        (ValueError, r"teacher_x must be \(..., D\) and teacher_w \(D, V\)", {"teacher_w": w[:5]}),
        (
            ValueError,
            "the teacher must have the tokens and columns of the student",
            {"teacher_x": teacher_x[:5]},
        ),
        (ValueError, r".* \(6,\) and V=100, got \(6,\) and V=99", {"teacher_w": teacher_w[:, 1:]}),
        (ValueError, r"teacher_bias must have the shape \(100,\)", {"teacher_bias": bias[1:]}),
        (TypeError, "teacher_x must be of float16", {"teacher_x": teacher_x.astype(int)}),
        (
            TypeError,
            "teacher_x and teacher_w must have one dtype",
            {"teacher_x": teacher_x.astype("bfloat16")},
        ),
        (ValueError, "beta must be from 0 to 1, got 1.5", {"beta": 1.5}),
        (ValueError, r"beta must be from 0 to 1, got shape \(2,\)", {"beta": np.ones(2)}),
        (ValueError, "beta must be from 0 to 1, got nan", {"beta": np.nan}),
        (ValueError, "teacher_softcap must be None or from 1e-37", {"teacher_softcap": 0}),
        (ValueError, "reduction must be 'mean', 'sum' or None, got 'batchmean'", {"reduction": "batchmean"}),
    ):
        arrays = {"x": x, "w": w, "teacher_x": teacher_x, "teacher_w": teacher_w}
        with pytest.raises(error, match=f"linear_kl_divergence: {match}"):
            ps.linear_kl_divergence(**arrays | keywords)
    with pytest.raises(TypeError, match="beta must be from 0 to 1, got a traced value"):
        jax.jit(lambda beta: losses(x, w, teacher_x, teacher_w, beta=beta))(0.5)
