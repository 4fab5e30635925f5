"""softmax, log_softmax, logsumexp and their derivatives in plain JAX: the reference for their kernels.

`masks.py` explains x, where and mesh_axes; no kernel has mesh_axes. `axes` are the reduced axes; their dimensions stay,
with size 1. Arithmetic is in float32, or in the dtype of the logits if that is wider.
"""

import jax.numpy as jnp

from pallas_softmax._src import normalizers
from pallas_softmax._src.masks import logits_of, masked, stored_on_cpu, sum_over
from pallas_softmax._src.normalizers import widen


def softmax(x, where, *, axes):
    """Returns exp(x - m) / d; 0 where masked.

    XLA fuses the maximum with the exponentials only if nothing else uses m and no select lies between. So a row of -inf
    becomes NaN by itself, and the mask corrects a fully masked row.
    """
    logits = logits_of(x, where)
    e = jnp.exp(logits - jnp.max(logits, axes, keepdims=True, initial=-jnp.inf))
    return masked(e / jnp.sum(e, axes, keepdims=True), where, 0).astype(x.dtype)


def softmax_grad(residuals, where, dy, *, axes, mesh_axes=()):
    """Returns dx = y (dy - sum(y dy)) for the result y of `softmax`."""
    (y,) = residuals
    p, g = stored_on_cpu(widen(y)), masked(widen(dy), where, 0)
    dx = p * (g - stored_on_cpu(sum_over(p * g, axes, mesh_axes)))
    return masked(dx, where, 0).astype(y.dtype)


def log_softmax(x, where, *, axes):
    """Returns x - m - log(d); -inf where masked.

    As in `softmax`, only x - m uses m. XLA repeats a select on m in each user, and those repeat it again in a chain of
    calls. A row of nothing but -inf, or with +inf or NaN, is NaN by itself.
    """
    logits = logits_of(x, where)
    shifted = logits - jnp.max(logits, axes, keepdims=True, initial=-jnp.inf)
    d = jnp.sum(jnp.exp(shifted), axes, keepdims=True)
    return masked(shifted - jnp.log(d), where, -jnp.inf).astype(x.dtype)


def log_softmax_grad(residuals, where, dy, *, axes, mesh_axes=()):
    """Returns dx = dy - exp(y) sum(dy) for the result y of `log_softmax`."""
    (y,) = residuals
    g = masked(widen(dy), where, 0)
    dx = g - jnp.exp(widen(y)) * stored_on_cpu(sum_over(g, axes, mesh_axes))
    return masked(dx, where, 0).astype(y.dtype)


def log_softmax_tangent(residuals, where, dx, *, axes, mesh_axes=()):
    """Returns dx - sum(exp(y) dx) for the result y of `log_softmax`: the transpose of its gradient."""
    (y,) = residuals
    g = masked(widen(dx), where, 0)
    dy = g - sum_over(jnp.exp(widen(y)) * g, axes, mesh_axes)
    return masked(dy, where, 0).astype(y.dtype)


def logsumexp(x, where, *, axes):
    """Returns m + log(d), in the dtype of x, and the normalizer (m, d), for derivatives.

    The logarithm needs no mended sum, and without it XLA fuses a chain of calls better.
    """
    logits = widen(x) if x.dtype.itemsize == 1 else x  # an 8-bit float may have no -inf
    m, total = normalizers.max_and_sum(masked(logits, where, -jnp.inf), axes)
    return (m + jnp.log(total)).astype(x.dtype), normalizers.mended(m, total)


def logsumexp_grad(residuals, where, dy, dd, *, axes, mesh_axes=()):
    """Returns dx = exp(x - m) (dy / d + dd), where dy and dd are the cotangents of the result and of d.

    exp(x - lse) would have the rounding of lse in it. The normalizer is of the whole row: devices exchange nothing.
    """
    x, m, d = residuals
    dx = _exponentials(x, where, m) * (widen(dy) / _finite_d(m, d) + dd)
    return masked(dx, where, 0).astype(x.dtype)


def logsumexp_tangent(residuals, where, dx, *, axes, mesh_axes=()):
    """Returns sum(exp(x - m) dx) / d, and for d the same without the division: the transpose of `logsumexp_grad`."""
    x, m, d = residuals
    weighted = sum_over(_exponentials(x, where, m) * masked(widen(dx), where, 0), axes, mesh_axes)
    return (weighted / _finite_d(m, d)).astype(x.dtype), weighted


def _exponentials(x, where, m):
    return jnp.exp(logits_of(x, where) - normalizers.shift(m))


def _finite_d(m, d):
    """Returns d, or 1 where m is +inf. So finite logits in a row with +inf get 0, and the +inf itself gets NaN."""
    return jnp.where(m == jnp.inf, 1, d)
