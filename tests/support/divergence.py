"""Students and teachers for linear_kl_divergence, and its comparison with the float64 oracle."""

import functools

import jax.numpy as jnp
import numpy as np

import pallas_softmax as ps
from pallas_softmax._src.linear.losses import Columns, Head, Tokens
from tests.support import linear, oracle
from tests.support.oracle import wide

BETAS = (0, 0.1, 0.5, 1)
# Allowed distances of gradients, relative to their norms: dz and the results are rounded to the dtype.
BOUND = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3}


def arrays(n, depth, vocab, dtype, *, teacher_dtype=None, peak=2.0, transpose_w=False):
    """Returns (x, w), (teacher_x, teacher_w), and biases of both; the teacher is deeper than the student."""
    options = {"peak": peak, "transpose_w": transpose_w, "bias": True}
    x, w, _, bias = linear.arrays(n, depth, vocab, dtype, **options)
    teacher = linear.arrays(n, depth + 16, vocab, teacher_dtype or dtype, seed=1, **options)
    return (x, w), teacher[:2], bias, teacher[3]


def losses_and_gradients(student, teacher, biases, beta, weights, *, temperature, softcaps, transpose_w):
    """Returns the oracle's losses, the largest |logit| of each row, and dx, dw, dbias of sum(weights * losses)."""
    options = {"temperature": np.reshape(wide(temperature), (-1, 1)), "transpose_w": transpose_w}
    (z, slope), (u, _) = (
        linear.logits(*arrays, bias=bias, softcap=softcap, **options)
        for arrays, bias, softcap in zip((student, teacher), biases, softcaps)
    )
    values, dz = oracle.divergence(z, u, beta)
    dz = dz * slope * wide(weights)[:, None]
    (x, w), x_wide = student, wide(student[0])
    dx, dw = dz @ (wide(w) if transpose_w else wide(w).T), dz.T @ x_wide if transpose_w else x_wide.T @ dz
    assert dx.shape == x.shape and dw.shape == w.shape
    return values, np.maximum(np.abs(z), np.abs(u)).max(1), dx, dw, dz.sum(0)


def assert_operations(
    operations,
    n,
    depth,
    vocab,
    dtype,
    teacher_dtype,
    beta,
    transpose_w,
    workspace_bytes,
    *,
    softcap=None,
    temperature=None,
):
    """Asserts that the three operations of an implementation are right for a divergence."""
    (x, w), teacher, bias, teacher_bias = arrays(
        n, depth, vocab, dtype, teacher_dtype=teacher_dtype, transpose_w=transpose_w
    )
    head = Head(transpose_w, softcap, beta=beta, teacher=Head(transpose_w, None, "highest"))
    static = {"head": head, "workspace_bytes": workspace_bytes}
    weights = np.linspace(-1, 2, n, dtype="float32") * (np.arange(n) % 5 != 1)
    t = None if temperature is None else jnp.linspace(temperature, 2, n)
    tokens = Tokens(None, t, teacher_x=teacher[0])
    found, known, (with_grad, *together) = linear.run_all(
        operations, static, x, w, Columns(bias, teacher[1], teacher_bias), tokens, weights
    )
    of_oracle = {"temperature": 1.0 if t is None else t, "softcaps": (softcap, None)}
    values, size, *want = losses_and_gradients(
        (x, w), teacher, (bias, teacher_bias), beta, weights, transpose_w=transpose_w, **of_oracle
    )
    kept = weights != 0
    for statistics in (found, with_grad):
        error = np.abs(wide(statistics.divergence.value) - values)
        assert (error <= 2**-20 * (1 + size + np.abs(values)))[kept].all(), error.max()
    for got, of in zip((*known, *together), 2 * want):
        assert linear.rounded_errors(got, of) <= BOUND[dtype]


def assert_divergence(
    dtype,
    teacher_dtype,
    beta,
    reduction,
    *,
    peak=2.0,
    transpose_w=False,
    n=101,
    depth=24,
    vocab=1003,
    rows=16,
    implementation=None,
    where=None,
    token_weights=None,
    temperature=1.0,
    softcap=None,
    teacher_softcap=None,
):
    """Asserts that losses and gradients are right, in chunks of up to `rows` rows."""
    sizes = {"teacher_dtype": teacher_dtype, "peak": peak, "transpose_w": transpose_w}
    student, teacher, *biases = arrays(n, depth, vocab, dtype, **sizes)
    weights = np.ones(n) if token_weights is None else wide(token_weights)
    weights = weights if where is None else np.where(where, weights, 0)
    mean = weights / (weights.sum() if reduction == "mean" else 1)
    g = np.linspace(-1, 2, n) if reduction is None else np.ones(n)
    static = {"beta": beta, "transpose_w": transpose_w, "workspace_bytes": 10 * vocab * rows}
    static |= {"softcap": softcap, "teacher_softcap": teacher_softcap, "implementation": implementation}
    f = functools.partial(
        ps.linear_kl_divergence, where=where, temperature=temperature, teacher_bias=biases[1], **static
    )

    def total(x, w, bias, token_weights=None, reduction=reduction):
        loss = f(x, w, *teacher, bias=bias, token_weights=token_weights, reduction=reduction)
        return jnp.sum(loss * jnp.asarray(g, loss.dtype)) if reduction is None else loss

    of_oracle = {
        "temperature": temperature,
        "softcaps": (softcap, teacher_softcap),
        "transpose_w": transpose_w,
    }
    values, size, *want = losses_and_gradients(student, teacher, biases, beta, mean * g, **of_oracle)
    each = linear.jit(lambda x, w, bias: f(x, w, *teacher, bias=bias, reduction=None))(*student, biases[0])
    kept = np.ones(n, bool) if where is None else where
    eps = np.finfo("float64" if dtype == "float64" else "float32").eps
    # the logits and the normalizers are rounded; a divergence weights the differences by probabilities
    allowed = 8 * eps * (1 + size) + 8 * eps * np.abs(values)
    assert each.dtype == ("float64" if dtype == "float64" else "float32")
    assert (np.abs(wide(each) - values) <= allowed)[kept].all(), np.max(np.abs(wide(each) - values) / allowed)
    np.testing.assert_array_equal(wide(each)[~kept], 0)
    held = *student, biases[0], *(() if token_weights is None else (token_weights,))
    value, gradients = linear.value_and_grads(total, *held)
    np.testing.assert_allclose(
        wide(value), np.sum(mean * g * np.where(kept, values, 0)), rtol=40 * eps, atol=40 * eps
    )
    if token_weights is not None:
        of_mean = np.sum(mean * values) if reduction == "mean" else 0
        of_weights = g * (values - of_mean) / (weights.sum() if reduction == "mean" else 1)
        want = *want, np.where(weights == 0, 0, of_weights)
    for name, got, of, array in zip(("x", "w", "b", "token_weights"), gradients, want, held):
        assert got.dtype == array.dtype and got.shape == array.shape
        bound = max(BOUND[dtype], 1e-6 if got.dtype == "float32" else 0)
        assert linear.rounded_errors(got, of) <= bound, (name, linear.rounded_errors(got, of))
