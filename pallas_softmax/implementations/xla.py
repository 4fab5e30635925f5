"""Implementation `xla`: plain JAX on `online`, for every device, dtype, shape and mask.

The functions have the names and arguments that every implementation has. `axes` are the reduced axes;
reduced dimensions stay with size 1; arithmetic is in float32, or wider where the input is.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.call import Implementation
from pallas_softmax.online import Candidates, Normalizer, widen


def softmax(x, where, *, axes):
    e, d = online.exponentials(logits_of(x, where), axes)
    return masked(e / d, where, 0).astype(x.dtype)


def softmax_grad(residuals, where, dy, *, axes, mesh_axes=()):
    """The backwards take the mesh axes that the row is spread over, too."""
    (y,) = residuals
    p, g = widen(y), masked(widen(dy), where, 0)
    dx = p * (g - online.total(p * g, axes, mesh_axes))
    return masked(dx, where, 0).astype(y.dtype)


def log_softmax(x, where, *, axes):
    return log_normalized(x, where, online.reduce(logits_of(x, where), axes))


def log_normalized(x, where, normalizer: Normalizer):
    """x less the log of the normalizer: the log of the softmax."""
    m, d = normalizer
    return masked(logits_of(x, where) - m - jnp.log(d), where, -jnp.inf).astype(x.dtype)


def log_softmax_grad(residuals, where, dy, *, axes, mesh_axes=()):
    (y,) = residuals
    g = masked(widen(dy), where, 0)
    dx = g - jnp.exp(widen(y)) * online.total(g, axes, mesh_axes)
    return masked(dx, where, 0).astype(y.dtype)


def logsumexp(x, where, *, axes):
    """log(sum(exp(x))), and the normalizer."""
    normalizer = online.reduce(logits_of(x, where), axes)
    return log_of(normalizer), normalizer


def log_of(normalizer: Normalizer):
    """The log of the sum of exp(x)."""
    m, d = normalizer
    return jnp.where(m == jnp.inf, m, m + jnp.log(d))  # a +inf among numbers: the sum is +inf, not NaN


def logsumexp_grad(residuals, where, cotangents, *, axes, mesh_axes=()):
    """By exp(x - m) / d, since exp(x - lse) has the rounding of lse in it; the derivative of d besides."""
    x, (m, d) = residuals
    dy, (_, dd) = cotangents
    d = jnp.where(m == jnp.inf, 1, d)  # a +inf among numbers has all the weight
    dx = jnp.exp(logits_of(x, where) - online.shift(m)) * (dy / d + dd)
    return masked(dx, where, 0).astype(x.dtype)


def topk(logits, where, temperature, *, k, log, dtype):
    """The winners of the last axis, values and indices, and the normalizer of logits / temperature.

    m is the first winner (a -NaN, which wins last, still makes d NaN); it is not divided by the temperature,
    for (x - m) / temperature neither overflows nor rounds x first.
    """
    x = logits_of(online.to_float(logits, (-1,), where), where)
    indices = _top_k(logits, where, k)
    winners = jnp.take_along_axis(x, indices, -1)
    m = winners[..., :1] if k else jnp.max(x, -1, keepdims=True, initial=-jnp.inf)
    d = jnp.sum(jnp.exp((x - m) / temperature), -1, keepdims=True)
    normalizer = Normalizer(m, jnp.where(m == -jnp.inf, 0, d))
    kept = None if where is None else online.take(where, logits, indices)
    values = masked(online.weights(winners, normalizer, temperature, log), kept, -jnp.inf if log else 0)
    return Candidates(values.astype(dtype), indices), normalizer


def merge(won, kept, indices, parts, temperature, *, k, log, dtype):
    """As topk, of a row whose parts were searched.

    Args:
      won: the winners of each part, best first, part after part.
      kept: which of them are not masked, or None.
      indices: theirs in the row.
      parts: m, or the largest of integers, and d of each part.
      temperature: as for topk.
    """
    tops, d = parts
    normalizer = online.merge_normalizers(Normalizer(online.to_float(tops, (-1,)), d), temperature)
    some = () if kept is None else (kept,)
    won, indices, *some = best_of((won, indices, *some), kept, k)
    kept = some[0] if some else None
    values = online.weights(online.to_float(won, (-1,), kept), normalizer, temperature, log)
    return Candidates(masked(values, kept, -jnp.inf if log else 0).astype(dtype), indices), normalizer


def best_of(arrays, kept, k):
    """The arrays at the k largest of the first, that which is not kept after all other."""
    order = _top_k(arrays[0], kept, k)
    return [jnp.take_along_axis(a, order, -1) for a in arrays]


def topk_grad(residuals, where, cotangents, *, log, mesh_axes=()):
    """dx_j = (g_j p_j [j wins] - p_j sum_i g_i p_i) / T; with log, (g_j [j wins] - p_j sum_i g_i) / T.

    Elementwise but for the winners, which are put in place afterwards: one read and one write. The second
    derivative asks for that of d, too. Of a row that is spread over mesh axes each device knows its own winners.

    Returns:
      dx, and the derivative with respect to the temperature of each row, of which a device has its part.
    """
    logits, temperature, m, d, indices = residuals
    g, g_d = cotangents
    x = logits_of(online.to_float(logits, (-1,), where, mesh_axes), where)
    own = None
    if mesh_axes:
        indices = indices - lax.axis_index(mesh_axes) * logits.shape[-1]
        own = (indices >= 0) & (indices < logits.shape[-1])
        beyond = logits.shape[-1] + lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
        indices = jnp.where(own, indices, beyond)  # where nothing is put

    def won_of(a):
        return jnp.take_along_axis(a, indices, -1, mode="fill", fill_value=0)

    def weigh(x):
        scaled = (x - m) / temperature
        return scaled, jnp.exp(scaled) / d

    scaled, p = weigh(x)
    scaled_won, p_won = weigh(won_of(x))
    g = masked(g, own, 0)
    if where is not None:  # of a fully masked row p is NaN
        kept = won_of(jnp.broadcast_to(where, logits.shape))
        p, g, p_won = masked(p, where, 0), masked(g, kept, 0), masked(p_won, kept, 0)
    direct = widen(g) if log else g * masked(p_won, own, 0)  # what reaches the winners themselves
    rest = g_d * d - online.total(direct, (-1,), mesh_axes)  # times p, what reaches every logit

    everywhere, won = p * rest / temperature, (direct + p_won * rest) / temperature
    dtype = logits.dtype if jnp.issubdtype(logits.dtype, jnp.floating) else x.dtype
    dx = _put(everywhere.astype(dtype), indices, won.astype(dtype))

    def slope(weight, scaled):  # 0 at x = -inf, too
        return jnp.sum(jnp.where(weight == 0, 0, weight * scaled), -1, keepdims=True)

    dt = -(rest * slope(p, scaled) + slope(direct, scaled_won)) / temperature
    return dx, lax.psum(dt, mesh_axes) if mesh_axes else dt


def _put(x, indices, values):
    """x with the values at the indices of its last axis, which differ; what is beyond it is dropped."""

    def put(x, indices, values):
        return x.at[indices].set(values, unique_indices=True, mode="drop")

    arrays = (jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])) for a in (x, indices, values))
    rows = [a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in arrays]
    return jax.vmap(put)(*rows).reshape(x.shape)


def masked(x, where, value):
    """x, and the value where it does not count."""
    return x if where is None else jnp.where(where, x, value)


def logits_of(x, where):
    """x in the dtype of the arithmetic, -inf where it does not count."""
    return masked(widen(x), where, -jnp.inf)


def _top_k(logits, where, k):
    """Indices of lax.top_k, masked positions after all others."""
    if jnp.issubdtype(logits.dtype, jnp.integer):
        if where is None:
            return lax.top_k(logits, k)[1]
        index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        masked = jnp.broadcast_to(~where, logits.shape)
        return lax.sort((masked, jnp.where(masked, 0, ~logits), index), num_keys=3)[2][..., :k]
    x = widen(logits) if logits.dtype.itemsize == 1 else logits
    if where is not None:
        last = lax.bitcast_convert_type(jnp.array(-1, f"int{8 * x.dtype.itemsize}"), x.dtype)
        x = jnp.where(where, x, last)  # the -NaN of all ones is the lowest of the total order

    def by_value(x):
        return lax.top_k(x, k)[1]

    def by_key(x):
        return lax.top_k(online.sort_key(x), k)[1]

    def on_cuda(x):
        if k <= 16:  # XLA's kernel for these is faster for float32, its sort for larger k in 16 bits
            x = widen(x)
        # that kernel misplaces -NaN (openxla/xla issue 48119)
        return lax.cond(jnp.any(jnp.isnan(x) & jnp.signbit(x)), by_key, by_value, x)

    return lax.platform_dependent(x, cuda=on_cuda, default=lambda x: by_value(widen(x)))


functions = {
    "softmax": softmax,
    "softmax_grad": softmax_grad,
    "log_softmax": log_softmax,
    "log_softmax_grad": log_softmax_grad,
    "logsumexp": logsumexp,
    "logsumexp_grad": logsumexp_grad,
    "topk": topk,
    "topk_grad": topk_grad,
    "merge": merge,
}
IMPLEMENTATION = Implementation(
    functions, unsupported=lambda call, capability: None, slower=lambda call: None
)
