"""The divergence of a student from a teacher, and its gradient: the formulas of `linear_kl_divergence`.

A token has the student's logits z and the teacher's u. With q = softmax(z), p = softmax(u), r = log p - log q and
m = beta p + (1 - beta) q:

    beta      divergence                                              gradient in z
    0         KL(p || q) = sum of p r                                 q - p
    1         KL(q || p) = sum of -q r                                q (-r - KL(q || p))
    between   sum of beta p log(p / m) + (1 - beta) q log(q / m)      (1 - beta) q (log(q / m) - KL(q || m))

A chunk of tokens goes through memory in these passes. The first is two products, the others are plain JAX:

    x @ w, teacher_x @ teacher_w ──► z, u, and the normalizers of both
    z, u ──► the sums of each row
    z, u ──► dz, in the dtype of x; its products give dx and dw
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.losses import Divergence, Statistics, Tokens
from pallas_softmax._src.linear.projection import Projection
from pallas_softmax._src.normalizers import Normalizer, widen
from pallas_softmax._src.softmax.mesh import combine_shards

# ---- Formulas. log_p and log_q are arrays of one shape. A logit of -inf has the log-probability -inf.


def terms(log_p, log_q, beta: float) -> tuple[jax.Array, ...]:
    """Returns the arrays that are summed over each row: the divergence, and for 0 < beta < 1 also KL(q || m)."""
    if beta == 0:
        return (_kl_terms(log_p, log_q),)
    if beta == 1:
        return (_kl_terms(log_q, log_p),)
    of_p, of_q = log_ratios_to_mixture(log_p, log_q, beta)
    of_p, of_q = _times_exp(log_p, of_p), _times_exp(log_q, of_q)
    return beta * of_p + (1 - beta) * of_q, of_q


def _kl_terms(log_a, log_b):
    """Returns arrays with the sum KL(a || b).

    The sum of b - a is 0. It is added because rounded normalizers make an error of the first order in the sum of
    a log(a / b). An error of the second order is left.
    """
    a, b = jnp.exp(log_a), jnp.exp(log_b)
    infinite = (log_b == -jnp.inf) & (log_a > -jnp.inf)  # also where a underflows
    return jnp.where(infinite, jnp.inf, _times_exp(log_a, _difference(log_a, log_b)) + (b - a))


def log_ratios_to_mixture(log_p, log_q, beta: float) -> tuple[jax.Array, jax.Array]:
    """Returns log(p / m) and log(q / m) for m = beta p + (1 - beta) q; both are exactly 0 where p = q."""
    r = _difference(log_p, log_q)
    # With c = log(larger / m), where "larger" is the larger one of p and q, c = -log(1 - other (1 - exp(-|r|))).
    other = jnp.where(r >= 0, 1 - beta, beta).astype(r.dtype)
    c = -jnp.log1p(other * jnp.expm1(-jnp.abs(r)))
    most = jnp.where(r >= 0, -math.log(beta), -math.log(1 - beta)).astype(r.dtype)
    c = jnp.minimum(c, most)  # `other` may be rounded to 1
    return c + jnp.minimum(r, 0), c - jnp.maximum(r, 0)


def slopes(log_p, log_q, student, beta: float):
    """Returns the gradient of the divergence in z; `student` is KL(q || m) of each row; for beta 1, KL(q || p)."""
    q = jnp.exp(log_q)
    if beta == 0:
        return q - jnp.exp(log_p)
    if beta == 1:
        return _times_exp(log_q, _difference(log_q, log_p) - student)
    return (1 - beta) * _times_exp(log_q, log_ratios_to_mixture(log_p, log_q, beta)[1] - student)


def _difference(log_a, log_b):
    """Returns log_a - log_b; 0 where both are -inf."""
    return jnp.where((log_a == -jnp.inf) & (log_b == -jnp.inf), 0, log_a - log_b)


def _times_exp(log_a, factor):
    """Returns exp(log_a) * factor; 0 where log_a is -inf."""
    return jnp.where(log_a == -jnp.inf, 0, jnp.exp(log_a) * factor)


# ---- Chunks of tokens


def bytes_per_logit(layer: Projection, x) -> int:
    """Returns the bytes of one z and one u. For 0 < beta < 1, plain JAX stores three more arrays."""
    return (5 if layer.functions.are_plain and 0 < layer.head.beta < 1 else 2) * widen(x).dtype.itemsize


def gradient(layer: Projection, x, tokens: Tokens, weights, known: Statistics | None):
    """Returns the statistics of whole rows, known or computed, and dz (rows, columns of w), in the dtype of x.

    dz is the gradient of sum(weights * divergences) in the raw logits. It is stored for all rows, but z and u only for
    as many as fit the workspace.
    """

    def step(x, tokens: Tokens, weights, known):
        logits, statistics = logits_and_statistics(layer, x, tokens, known)
        # Otherwise XLA may store arrays that the sums and dz share, such as exponentials in float32.
        z, u = lax.optimization_barrier(logits)
        of_rows = statistics.divergence
        assert of_rows is not None
        log_p, log_q = _log_softmax(u, of_rows.teacher), _log_softmax(z, statistics.normalizer)
        dz = slopes(log_p, log_q, of_rows.student[:, None], layer.head.beta)
        factor = weights if tokens.temperature is None else weights / tokens.divisor
        dz = formulas.times_softcap_slope(dz * factor[:, None], z, tokens, layer.head)
        return statistics, jnp.where(formulas.is_weightless(weights)[:, None], 0, dz).astype(x.dtype)

    return layer.in_chunks(step, (x, tokens, weights, known), bytes_per_logit(layer, x))


def logits_and_statistics(layer: Projection, x, tokens: Tokens, known: Statistics | None) -> tuple[tuple, Statistics]:
    """Returns z and u of some rows, and the statistics of whole rows, known or computed."""
    head, columns, mesh_axes = layer.head, layer.columns, layer.mesh_axes
    of_teacher = tokens.teacher_x, columns.teacher_w, columns.teacher_bias
    z, student = layer.functions.logits(x, layer.w, columns.bias, tokens, head=head)
    u, teacher = layer.functions.logits(*of_teacher, tokens, head=head.teacher)
    u, teacher = jax.tree.map(lambda a: a.astype(z.dtype), (u, teacher))
    if known is not None:
        return (z, u), known
    if mesh_axes:
        pairs = Normalizer(*map(jnp.stack, zip(student, teacher)))
        merged = combine_shards(pairs, mesh_axes)[0]
        student, teacher = (jax.tree.map(lambda a, i=i: a[i], merged) for i in range(2))
    arrays = terms(_log_softmax(u, teacher), _log_softmax(z, student), head.beta)
    sums = tuple(jnp.sum(a, 1) for a in arrays)
    sums = lax.psum(sums, mesh_axes)
    divergence = Divergence(teacher, sums[0], sums[-1])
    return (z, u), Statistics(student, jnp.zeros_like(sums[0]), None, divergence=divergence)


def _log_softmax(z, normalizer: Normalizer):
    m, d = normalizer
    return (z - normalizers.shift(m)[:, None]) - jnp.log(d)[:, None]
