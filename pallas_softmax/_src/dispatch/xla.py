"""Implementation `xla`: plain JAX, for every device, dtype, shape and mask.

It is the reference for what each operation takes and returns; the kernels of other implementations have functions
with the same names and arguments:

    x, logits     the logits, of any rank; integers for top-k only
    where         None, or a boolean of the rank of the logits that broadcasts to them; False leaves a logit out
    axes          the reduced axes, whose dimensions stay with size 1; top-k reduces the last one
    temperature   (1, ..., 1) or (..., 1), positive; the logits of a row are divided by it
    mesh_axes     here only, where no kernel has rows that are spread over a mesh: the mesh axes, if any

Arithmetic is in float32, or wider where the logits are.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.lax import top_k  # as it is at the import, in case a program puts ours in its place

from pallas_softmax import online
from pallas_softmax._src.dispatch.operation import Implementation
from pallas_softmax._src.linear import xla as xla_projection
from pallas_softmax._src.sample.xla import sample
from pallas_softmax.online import Candidates, Normalizer, widen


def softmax(x, where, *, axes):
    """Returns exp(x - m) / d; 0 where masked.

    Nothing but the exponentials may use m here, and no select may lie between, if XLA is to fuse the maximum with them.
    So a row of nothing but -inf is NaN by itself, and a fully masked one is put right by the mask.
    """
    logits = logits_of(x, where)
    e = jnp.exp(logits - jnp.max(logits, axes, keepdims=True, initial=-jnp.inf))
    return masked(e / jnp.sum(e, axes, keepdims=True), where, 0).astype(x.dtype)


def softmax_grad(residuals, where, dy, *, axes, mesh_axes=()):
    """Returns dx = y (dy - sum(y dy)) for the result y of `softmax`."""
    (y,) = residuals
    p, g = widen(y), masked(widen(dy), where, 0)
    dx = p * (g - _sum(p * g, axes, mesh_axes))
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


def log_normalized(x, where, normalizer: Normalizer):
    """Returns the log of the softmax, given the normalizer of each row."""
    m, d = normalizer
    return masked(logits_of(x, where) - m - jnp.log(d), where, -jnp.inf).astype(x.dtype)


def log_softmax_grad(residuals, where, dy, *, axes, mesh_axes=()):
    """Returns dx = dy - exp(y) sum(dy) for the result y of `log_softmax`."""
    (y,) = residuals
    g = masked(widen(dy), where, 0)
    dx = g - jnp.exp(widen(y)) * _sum(g, axes, mesh_axes)
    return masked(dx, where, 0).astype(y.dtype)


def log_softmax_tangent(residuals, where, dx, *, axes, mesh_axes=()):
    """Returns dx - sum(exp(y) dx) for the result y of `log_softmax`: the transpose of its gradient."""
    (y,) = residuals
    g = masked(widen(dx), where, 0)
    dy = g - _sum(jnp.exp(widen(y)) * g, axes, mesh_axes)
    return masked(dy, where, 0).astype(y.dtype)


def logsumexp(x, where, *, axes):
    """Returns m + log(d), in the dtype of x, and the normalizer (m, d).

    The logarithm needs no mended sum, and without it XLA fuses a chain of calls better. Derivatives use (m, d).
    """
    m, total = online.max_and_sum(logits_of(x, where), axes)
    return (m + jnp.log(total)).astype(x.dtype), online.mended(m, total)


def logsumexp_grad(residuals, where, dy, dd, *, axes, mesh_axes=()):
    """Returns dx = exp(x - m) (dy / d + dd), where dy and dd are the cotangents of the result and of d.

    It is not exp(x - lse) dy + ..., which would have the rounding of lse in it.
    The normalizer is that of the whole row, so devices that a row is spread over (`mesh_axes`) exchange nothing.
    """
    x, m, d = residuals
    dx = _exponentials(x, where, m) * (widen(dy) / _finite_d(m, d) + dd)
    return masked(dx, where, 0).astype(x.dtype)


def logsumexp_tangent(residuals, where, dx, *, axes, mesh_axes=()):
    """Returns sum(exp(x - m) dx) / d, and for d the same without the division: the transpose of `logsumexp_grad`."""
    x, m, d = residuals
    weighted = _sum(_exponentials(x, where, m) * masked(widen(dx), where, 0), axes, mesh_axes)
    return (weighted / _finite_d(m, d)).astype(x.dtype), weighted


def _exponentials(x, where, m):
    return jnp.exp(logits_of(x, where) - online.shift(m))


def _finite_d(m, d):
    """Returns d, but 1 where m is +inf, so that numbers beside a +inf get 0; the +inf itself gets NaN."""
    return jnp.where(m == jnp.inf, 1, d)


def topk(logits, where, temperature, *, k, log, dtype):
    """Returns the k winners of the last axis, as `Candidates`, and the normalizer of logits / temperature.

    The normalizer's m is that of the logits, not divided by the temperature: (x - m) / temperature neither
    overflows nor rounds x first. It is the first winner, unless that is a -NaN, which makes d NaN all the same.

    Args:
      k: the number of winners.
      log: whether the values are logs of probabilities.
      dtype: that of the values.
    """
    x = logits_of(online.to_float(logits, (-1,), where), where)
    indices = best_order(logits, where, k)
    winners = jnp.take_along_axis(x, indices, -1)
    some = isinstance(k, int) and k > 0  # a symbolic k may be 0
    m = winners[..., :1] if some else jnp.max(x, -1, keepdims=True, initial=-jnp.inf)
    d = jnp.sum(jnp.exp((x - m) / temperature), -1, keepdims=True)
    normalizer = Normalizer(m, jnp.where(m == -jnp.inf, 0, d))
    kept = None if where is None else mask_at(where, logits, indices)
    return Candidates(_values(winners, kept, normalizer, temperature, log, dtype), indices), normalizer


def merge(won, kept, indices, parts, temperature, *, k, log, dtype):
    """As `topk`, for rows whose parts were searched one by one.

    Args:
      won: (..., parts * n), the logits of the n winners of each part, best first, part after part.
      kept: which of them are not masked, or None.
      indices: (..., parts * n), their indices in the row.
      parts: m (of integer logits, the largest one) and d of each part, (..., parts) each.
      temperature, k, log, dtype: as for `topk`.
    """
    tops, d = parts
    normalizer = online.merge_normalizers(Normalizer(online.to_float(tops, (-1,)), d), temperature)
    order = best_order(won, kept, k)
    kept = None if kept is None else jnp.take_along_axis(kept, order, -1)
    winners = online.to_float(jnp.take_along_axis(won, order, -1), (-1,), kept)
    values = _values(winners, kept, normalizer, temperature, log, dtype)
    return Candidates(values, jnp.take_along_axis(indices, order, -1)), normalizer


def _values(winners, kept, normalizer: Normalizer, temperature, log: bool, dtype):
    """Returns the softmax of the winners, or its log; d is the sum of exp((x - m) / temperature) over the row."""
    scaled = (winners - normalizer.m) / temperature
    p = scaled - jnp.log(normalizer.d) if log else jnp.exp(scaled) / normalizer.d
    return masked(p, kept, -jnp.inf if log else 0).astype(dtype)


def topk_grad(residuals, where, g, g_d, *, log, mesh_axes=()):
    """dx_j = (g_j p_j [j wins] - p_j sum_i g_i p_i) / T; with log, (g_j [j wins] - p_j sum_i g_i) / T.

    It is elementwise but for the winners, which are put in place afterwards: one read and one write.

    Args:
      residuals: logits, temperature T, m, d and the winners' indices, of which a device of a mesh that the row is
        spread over has those of the whole row.
      g, g_d: the cotangents of the winners' values, and of d, which the second derivative asks for.
      log: whether the values are logs.

    Returns:
      dx, and the derivative with respect to the temperature, (..., 1).
    """
    logits, temperature, m, d, indices = residuals
    x = logits_of(online.to_float(logits, (-1,), where, mesh_axes), where)
    own = None  # which winners lie in this device's shard of the row
    if mesh_axes:
        indices, own = _indices_in_shard(indices, logits.shape[-1], mesh_axes)

    def at_winners(a):
        return jnp.take_along_axis(a, indices, -1, mode="fill", fill_value=0)

    kept = None if where is None else at_winners(jnp.broadcast_to(where, logits.shape))
    scaled, p = _scaled_and_softmax(x, where, m, d, temperature)
    scaled_won, p_won = _scaled_and_softmax(at_winners(x), kept, m, d, temperature)
    g = masked(masked(g, own, 0), kept, 0)
    direct = widen(g) if log else widen(g) * masked(p_won, own, 0)  # what reaches a winner by its own value
    rest = g_d * d - _sum(direct, (-1,), mesh_axes)  # times p: what reaches every logit by the normalizer

    everywhere, won = p * rest / temperature, (direct + p_won * rest) / temperature
    dtype = logits.dtype if jnp.issubdtype(logits.dtype, jnp.floating) else x.dtype
    dx = _put(everywhere.astype(dtype), indices, won.astype(dtype))

    def slope(weight, scaled):
        """Returns the sum of weight * scaled, in which a weight of 0 counts as 0 also where x is -inf."""
        return jnp.sum(jnp.where(weight == 0, 0, weight * scaled), -1, keepdims=True)

    dt = -(rest * slope(p, scaled) + slope(direct, scaled_won)) / temperature
    return dx, lax.psum(dt, mesh_axes) if mesh_axes else dt


def topk_tangent(residuals, where, dx, dt, *, log, mesh_axes=()):
    """Returns the tangents of the winners' values and of d, given those of logits and temperature.

    It is the transpose of `topk_grad`, and its arguments are as there.

    With s = (x - m) / T and ds = (dx - s dT) / T, the tangent of log p_j is ds_j - sum_i p_i ds_i.
    """
    logits, temperature, m, d, indices = residuals
    x = logits_of(online.to_float(logits, (-1,), where, mesh_axes), where)
    own = None
    if mesh_axes:
        indices, own = _indices_in_shard(indices, logits.shape[-1], mesh_axes)

    def at_winners(a):
        return jnp.take_along_axis(a, indices, -1, mode="fill", fill_value=0)

    scaled, p = _scaled_and_softmax(x, where, m, d, temperature)
    # 0 also where x is -inf, if the temperature is constant.
    by_temperature = jnp.where(dt == 0, 0, scaled * dt)
    ds = (masked(widen(dx), where, 0) - by_temperature) / temperature
    mean = _sum(jnp.where(p == 0, 0, p * ds), (-1,), mesh_axes)
    dlog_p = at_winners(ds) - mean
    p_won = at_winners(p)
    dvalues = dlog_p if log else jnp.where(p_won == 0, 0, p_won * dlog_p)
    if where is not None:
        dvalues = masked(dvalues, at_winners(jnp.broadcast_to(where, logits.shape)), 0)
    dvalues = masked(dvalues, own, 0)
    return lax.psum(dvalues, mesh_axes) if mesh_axes else dvalues, d * mean


def sample_grad(residuals, where, g, *, mesh_axes=()):
    """Returns the gradients of log_probs of a draw: those of `topk` with log=True and the drawn index as its winner.

    Args:
      residuals: logits, temperature, the drawn index in the whole row, and its log-probability.
      where: the mask.
      g: the cotangent of log_probs.
      mesh_axes: the mesh axes that a row is spread over.

    Returns:
      The derivatives in the logits and in the temperature; 0 where the temperature is 0.
    """
    g = jnp.where(residuals[1] == 0, 0, g)
    residuals = _drawn_as_winner(residuals, where, mesh_axes)
    return topk_grad(residuals, where, g, jnp.zeros_like(g), log=True, mesh_axes=mesh_axes)


def sample_tangent(residuals, where, dx, dt, *, mesh_axes=()):
    """Returns the tangent of log_probs of a draw: the transpose of `sample_grad`."""
    winner = _drawn_as_winner(residuals, where, mesh_axes)
    dlog_probs, _ = topk_tangent(winner, where, dx, dt, log=True, mesh_axes=mesh_axes)
    return jnp.where(residuals[1] == 0, 0, dlog_probs)


def _drawn_as_winner(residuals, where, mesh_axes):
    """Returns the residuals of `topk_grad` for a draw; m is the drawn logit, so that d is exp(-log_probs).

    Below e^-60 m is larger, so that neither d nor exp((x - m) / temperature) overflows.
    """
    logits, temperature, index, log_probs = residuals
    x = logits_of(online.to_float(logits, (-1,), where, mesh_axes), where)
    temperature = jnp.where(temperature == 0, 1, temperature)
    if mesh_axes:
        in_shard, own = _indices_in_shard(index, logits.shape[-1], mesh_axes)
        at_index = jnp.take_along_axis(x, in_shard, -1, mode="fill", fill_value=0)
        drawn = lax.psum(jnp.where(own, at_index, 0), mesh_axes)
    else:
        drawn = jnp.take_along_axis(x, jnp.maximum(index, 0), -1)  # -1: no draw, and log_probs is NaN
    excess = jnp.maximum(-log_probs - 60, 0)
    return logits, temperature, drawn + temperature * excess, jnp.exp(-log_probs - excess), index


def _scaled_and_softmax(x, where, m, d, temperature):
    """Returns (x - m) / T and its softmax; they and their derivatives are 0 where masked, in fully masked rows, too.

    So they are where x is -inf, below a finite m: the first in place of -inf, by which derivatives would multiply 0.
    """
    no_mass = jnp.isneginf(x) & jnp.isfinite(m)
    scaled = jnp.where(no_mass, 0, masked(x - m, where, 0)) / temperature
    p = masked(jnp.exp(scaled) / (d if where is None else jnp.where(d == 0, 1, d)), where, 0)
    return scaled, jnp.where(no_mass, 0, p)


def _indices_in_shard(indices, vocab: int, mesh_axes):
    """Returns indices of the row as those of this device's shard of `vocab` elements, and which of them lie in it.

    The others become different indices beyond the shard, where `_put` puts nothing.
    """
    indices = indices - lax.axis_index(mesh_axes) * vocab
    own = (indices >= 0) & (indices < vocab)
    beyond = vocab + lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
    return jnp.where(own, indices, beyond), own


def _put(x, indices, values):
    """Puts the values at the indices of the last axis of x, which all differ; indices beyond it are dropped."""

    def put(x, indices, values):
        return x.at[indices].set(values, unique_indices=True, mode="drop")

    arrays = [jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])) for a in (x, indices, values)]
    if any(jax.typeof(x).sharding.spec):  # Explicit mesh axes divide it, and so it cannot be reshaped
        for _ in x.shape[:-1]:
            put = jax.vmap(put)
        return put(*arrays)
    rows = [a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in arrays]
    return jax.vmap(put)(*rows).reshape(x.shape)


def _sum(x, axes, mesh_axes):
    """Returns the sum over `axes`, whose dimensions stay, and over the mesh axes that the row is spread over."""
    part = jnp.sum(x, axes, keepdims=True)
    return lax.psum(part, tuple(mesh_axes)) if mesh_axes else part


def mask_at(where, x, indices):
    """Returns the elements of the mask, which broadcasts to `x`, at indices of the last axis."""
    return jnp.take_along_axis(jnp.broadcast_to(where, x.shape), indices, -1)


def masked(x, where, value):
    """Returns x, with `value` where the mask is False."""
    return x if where is None else jnp.where(where, x, value)


def logits_of(x, where):
    """Returns x in the dtype of the arithmetic, with -inf where the mask is False."""
    return masked(widen(x), where, -jnp.inf)


def best_order(logits, where, k):
    """Returns the indices of the k best along the last axis, in the order of lax.top_k, masked positions last."""
    if jnp.issubdtype(logits.dtype, jnp.integer):
        if where is None:
            return top_k(logits, k)[1]
        index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        left_out = jnp.broadcast_to(~where, logits.shape)
        return lax.sort((left_out, jnp.where(left_out, 0, ~logits), index), num_keys=3)[2][..., :k]
    x = widen(logits) if logits.dtype.itemsize == 1 else logits
    if where is not None:
        last = lax.bitcast_convert_type(jnp.array(-1, f"int{8 * x.dtype.itemsize}"), x.dtype)
        x = jnp.where(where, x, last)  # the -NaN of all ones is the lowest of the total order

    def by_value(x):
        return top_k(x, k)[1]

    def by_key(x):
        return top_k(online.sort_key(x), k)[1]

    def on_cuda(x):
        # XLA's kernel for k <= 16 is faster in float32, its sort for larger k in 16 bits
        if not isinstance(k, int) or k <= 16:
            x = widen(x)
        # XLA's kernel misplaces -NaN (openxla/xla issue 48119)
        return lax.cond(jnp.any(jnp.isnan(x) & jnp.signbit(x)), by_key, by_value, x)

    @custom_vmap  # under vmap, lax.cond would sort in both ways
    def order(x):
        return lax.platform_dependent(x, cuda=on_cuda, default=lambda x: by_value(widen(x)))

    order.def_vmap(lambda axis_size, in_batched, x: (order(x), True))
    return order(x)


functions = {
    "softmax": softmax,
    "softmax_grad": softmax_grad,
    "log_softmax": log_softmax,
    "log_softmax_grad": log_softmax_grad,
    "log_softmax_tangent": log_softmax_tangent,
    "logsumexp": logsumexp,
    "logsumexp_grad": logsumexp_grad,
    "logsumexp_tangent": logsumexp_tangent,
    "topk": topk,
    "topk_grad": topk_grad,
    "topk_tangent": topk_tangent,
    "merge": merge,
    **xla_projection.functions,
    "sample": sample,
    "sample_grad": sample_grad,
    "sample_tangent": sample_tangent,
}
IMPLEMENTATION = Implementation(
    functions, unsupported=lambda call, capability: None, slower=lambda call: None
)
