"""Students and teachers for linear_kl_divergence, and its comparison with the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_softmax as ps
from pallas_softmax._src.linear.losses import Columns, Head, Tokens
from tests.support import linear, oracle
from tests.support.oracle import wide

BETAS = (0, 0.1, 0.5, 1)


def arrays(n, depth, vocab, dtype, *, teacher_dtype=None, peak=2.0, transpose_w=False):
    """Returns (x, w), (teacher_x, teacher_w), and biases of both; the teacher is deeper than the student."""
    options = {"peak": peak, "transpose_w": transpose_w, "bias": True}
    x, w, _, bias = linear.arrays(n, depth, vocab, dtype, **options)
    teacher = linear.arrays(n, depth + 16, vocab, teacher_dtype or dtype, seed=1, **options)
    return (x, w), teacher[:2], bias, teacher[3]


def expected(student, teacher, biases, beta, weights, *, temperature, softcaps, transpose_w, eps=2.0**-23):
    """Returns what losses and gradients in x, w and bias must be, for sum(weights * losses).

    The logits and the normalizers are rounded. A divergence weights the differences by probabilities.
    """
    options = {"temperature": temperature, "transpose_w": transpose_w}
    (z, slope), (u, _) = (
        linear.logits(*arrays, bias=bias, softcap=softcap, **options)
        for arrays, bias, softcap in zip((student, teacher), biases, softcaps)
    )
    values, dz = oracle.divergence(z, u, beta)
    values = np.where(weights == 0, 0, values)
    size = np.maximum(np.abs(z), np.abs(u)).max(1)
    gradients = linear.gradients_of(dz * slope * wide(weights)[:, None], *student, transpose_w)
    return linear.Expected(
        weights=weights,
        losses=values,
        errors=8 * eps * (1 + size + np.abs(values)),
        gradients=dict(zip(("x", "w", "bias"), gradients)),
        distances=linear.rounded_to(str(student[0].dtype)),
    )


def assert_operations(operations, n, depth, vocab, dtype, teacher_dtype, beta, transpose_w, workspace_bytes, options):
    """Asserts that the three operations of an implementation are right for a divergence.

    Args:
      options: the student's softcap, and the temperature of the first token; the one of the last token is 2.
    """
    softcap, temperature = options.get("softcap"), options.get("temperature")
    sizes = {"teacher_dtype": teacher_dtype, "transpose_w": transpose_w}
    (x, w), teacher, bias, teacher_bias = arrays(n, depth, vocab, dtype, **sizes)
    head = Head(transpose_w, softcap, beta=beta, teacher=Head(transpose_w, None, "highest"))
    static = {"head": head, "workspace_bytes": workspace_bytes}
    weights = np.linspace(-1, 2, n, dtype="float32") * (np.arange(n) % 5 != 1)
    t = None if temperature is None else jnp.linspace(temperature, 2, n)
    tokens = Tokens(None, t, teacher_x=teacher[0])
    columns = Columns(bias, teacher[1], teacher_bias)
    found, gradients = linear.run_all(operations, static, x, w, columns, tokens, weights)
    of_oracle = {"temperature": 1.0 if t is None else t, "softcaps": (softcap, None)}
    want = expected((x, w), teacher, (bias, teacher_bias), beta, weights, transpose_w=transpose_w, **of_oracle)
    for statistics, of_operation in zip(found, gradients):
        want.check_losses(statistics.divergence.value)
        want.check_gradients(dict(zip(want.gradients, of_operation)), {"x": x, "w": w, "bias": bias})


def assert_divergence(
    dtype, teacher_dtype, beta, reduction, *, peak=2.0, transpose_w=False, where=None, token_weights=None, **options
):
    """Asserts that losses and gradients are right, in chunks of up to 16 rows. The options are of both models."""
    n, vocab = 101, 1003
    sizes = {"teacher_dtype": teacher_dtype, "peak": peak, "transpose_w": transpose_w}
    student, teacher, *biases = arrays(n, 24, vocab, dtype, **sizes)
    factors = np.ones(n) if token_weights is None else wide(token_weights)
    weights = factors if where is None else np.where(where, factors, 0)
    divisor = weights.sum() if reduction == "mean" else 1
    g = np.linspace(-1, 2, n) if reduction is None else 1.0
    static = {"beta": beta, "transpose_w": transpose_w, "workspace_bytes": 10 * vocab * 16}

    def ours(held):
        of_teacher = {"teacher_x": teacher[0], "teacher_w": teacher[1], "teacher_bias": biases[1]}
        f = functools.partial(ps.linear_kl_divergence, where=where, reduction=reduction, **options, **static)
        loss = f(**of_teacher, **held)
        return jnp.sum(loss * jnp.asarray(g, loss.dtype)), loss

    held = {"x": student[0], "w": student[1], "bias": biases[0]}
    held |= {} if token_weights is None else {"token_weights": token_weights}
    (total, losses), gradients = linear.jit(jax.value_and_grad(ours, has_aux=True))(held)
    assert losses.dtype == ("float64" if dtype == "float64" else "float32")
    eps = np.finfo(losses.dtype).eps
    want = expected(
        *(student, teacher, biases, beta, weights / divisor * g),
        temperature=options.get("temperature", 1.0),
        softcaps=(options.get("softcap"), options.get("teacher_softcap")),
        transpose_w=transpose_w,
        eps=eps,
    )
    if reduction is None:
        want.check_losses(losses, weights)
    np.testing.assert_allclose(wide(total), np.sum(want.weights * want.losses), rtol=40 * eps, atol=40 * eps)
    if token_weights is not None:
        mean = np.sum(weights * want.losses) / divisor if reduction == "mean" else 0
        want.gradients["token_weights"] = (weights != 0) * g * (want.losses - mean) / divisor
    want.check_gradients(gradients, held)
