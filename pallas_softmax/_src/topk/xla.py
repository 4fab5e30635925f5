"""Top-k of a softmax, its derivatives and its merge in plain JAX: the reference for their kernels.

    logits        of any rank, floats or integers; a row is the last axis
    where         None, or a boolean of the rank of the logits that broadcasts to them; False leaves a logit out
    temperature   (1, ..., 1) or (..., 1), at least 0; the logits of a row are divided by it
    scaled        whether the temperature may differ from 1. Derivatives get 1 in place of a temperature of 0
    mesh_axes     the mesh axes that each row is spread over, if any; no kernel has this argument

Arithmetic is in float32, or in the dtype of the logits if that is wider.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.lax import top_k  # as it is at the import, in case a program replaces jax.lax.top_k by ours

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.masks import at, logits_of, mask_at, masked, positions, sum_over
from pallas_softmax._src.normalizers import Normalizer, widen
from pallas_softmax._src.temperatures import Temperature


class TopK(NamedTuple):
    """The winners of each row: best first, or in any order after `top_k(sorted=False)`.

    Attributes:
      values: of `fused_topk` the probabilities of the winners, or their logs; of `top_k` the elements. They have the
        shape of the logits, with k along the row's axis.
      indices: int32, the positions of the winners in the row; the same shape.
    """

    values: jax.Array
    indices: jax.Array


def topk(logits, where, temperature, *, k, log, dtype, scaled=True):
    """Returns the k winners of the last axis, as `TopK`, and the normalizer of logits / temperature.

    m is the largest logit, not divided by the temperature: (x - m) / temperature neither overflows nor rounds x first.
    It is the first winner. If that is -NaN, d is NaN anyway.
    """
    x = logits_of(normalizers.to_float(logits, (-1,), where), where)
    indices = best_order(logits, where, k)
    winners = at(x, indices)
    some = isinstance(k, int) and k > 0  # a symbolic k may be 0
    m = winners[..., :1] if some else jnp.max(x, -1, keepdims=True, initial=-jnp.inf)
    divisor = Temperature.of(temperature) if scaled else None
    d = jnp.sum(jnp.exp(normalizers.below(x, normalizers.shift(m), divisor)), -1, keepdims=True)
    normalizer = Normalizer(m, d)
    kept = mask_at(where, logits, indices)
    return TopK(_values(winners, kept, normalizer, divisor, log, dtype), indices), normalizer


def select(operand, where, lengths, *, k, sorted):
    """Returns the k largest of the last axis as they are, always in order. `lengths` is (1, ..., 1) or (..., 1)."""
    where = within(where, lengths, operand)
    indices = best_order(operand, where, k)
    values = at(operand, indices)
    kept = mask_at(where, operand, indices)
    return TopK(masked(values, kept, lowest_value(operand.dtype)), indices)


def within(where, lengths, x):
    """Returns the mask without the elements from the length of a row on."""
    if lengths is None:
        return where
    inside = positions(x) < lengths
    return inside if where is None else where & inside


def lowest_value(dtype):
    """Returns the value of a masked winner."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min
    infinite = np.array(-np.inf, dtype)
    return infinite if np.isinf(infinite) else jnp.finfo(dtype).min


def select_grad(residuals, where, lengths, g, *, mesh_axes=()):
    """Returns (dx,): the cotangents g at unmasked winners. The residuals are the operand and the winners' indices."""
    operand, _ = residuals
    indices, kept = _winners_in_shard(residuals, where, lengths, mesh_axes)
    return (put(jnp.zeros_like(operand, operand.dtype), indices, masked(g, kept, 0)),)


def select_tangent(residuals, where, lengths, dx, *, mesh_axes=()):
    """The transpose of `select_grad`."""
    indices, kept = _winners_in_shard(residuals, where, lengths, mesh_axes)
    return lax.psum(masked(at_or_zero(dx, indices), kept, 0), mesh_axes)


def _winners_in_shard(residuals, where, lengths, mesh_axes):
    """Returns the winners' indices in this device's shard of each row, and which are not masked; None if all.

    `where` is for the shard, and `lengths` are for the whole rows.
    """
    operand, indices = residuals
    if mesh_axes and lengths is not None:
        lengths = lengths - lax.axis_index(mesh_axes) * operand.shape[-1]
    indices, _ = indices_in_shard(indices, operand.shape[-1], mesh_axes)
    kept = mask_at(where, operand, indices)
    if lengths is not None:
        kept = indices < lengths if kept is None else kept & (indices < lengths)
    return indices, kept


def merge(won, kept, indices, parts, temperature, *, k, log, dtype, scaled=True):
    """Returns the winners of rows, like `topk`, given the n winners of each part of a row.

    `won` and `indices` (..., parts * n) are their logits and their indices in the row, best first, part after part.
    `kept` says which of them are not masked. `parts` are m (of integer logits, the largest one) and d of each part,
    (..., parts) each. Without a temperature, the values are the winners as they are, and `parts` is ().
    """
    order = best_order(won, kept, k)
    won, indices = (jnp.take_along_axis(a, order, -1) for a in (won, indices))
    if temperature is None:
        return TopK(won, indices), None
    tops, d = parts
    divisor = Temperature.of(temperature) if scaled else None
    normalizer = normalizers.combine_parts(Normalizer(normalizers.to_float(tops, (-1,)), d), divisor)
    kept = None if kept is None else jnp.take_along_axis(kept, order, -1)
    values = _values(normalizers.to_float(won, (-1,), kept), kept, normalizer, divisor, log, dtype)
    return TopK(values, indices), normalizer


def _values(winners, kept, normalizer: Normalizer, divisor: Temperature | None, log: bool, dtype):
    scaled = normalizers.below(winners, normalizer.m, divisor)
    p = scaled - jnp.log(normalizer.d) if log else jnp.exp(scaled) / normalizer.d
    return masked(p, kept, -jnp.inf if log else 0).astype(dtype)


def topk_grad(residuals, where, g, g_d, *, log, mesh_axes=()):
    """dx_j = (g_j p_j [j wins] - p_j sum_i g_i p_i) / T; with log, (g_j [j wins] - p_j sum_i g_i) / T.

    Returns dx, and the derivative with respect to the temperature, (..., 1). Only the winners are not elementwise: they
    are written afterwards. So it is one read and one write. The residuals are the logits, T, m, d and the winners'
    indices in the whole row. g and g_d are the cotangents of the winners' values, and of d, for the second derivative.
    """
    logits, temperature, m, d, indices = residuals
    x = logits_of(normalizers.to_float(logits, (-1,), where, mesh_axes), where)
    indices, own = indices_in_shard(indices, logits.shape[-1], mesh_axes)
    kept = mask_at(where, logits, indices)
    scaled, p = _scaled_and_softmax(x, where, m, d, temperature)
    scaled_won, p_won = _scaled_and_softmax(at_or_zero(x, indices), kept, m, d, temperature)
    g = masked(masked(g, own, 0), kept, 0).astype(x.dtype)
    direct = g if log else g * masked(p_won, own, 0)  # what reaches a winner by its own value
    rest = g_d * d - sum_over(direct, (-1,), mesh_axes)  # times p: what reaches every logit by the normalizer

    over = Temperature.of(temperature).over
    everywhere, won = over(p * rest), over(direct + p_won * rest)
    dtype = logits.dtype if jnp.issubdtype(logits.dtype, jnp.floating) else x.dtype
    dx = put(everywhere.astype(dtype), indices, won.astype(dtype))

    def slope(weight, scaled):  # a weight of 0 contributes 0, even where x is -inf
        return jnp.sum(jnp.where(weight == 0, 0, weight * scaled), -1, keepdims=True)

    dt = -over(rest * slope(p, scaled) + slope(direct, scaled_won))
    return dx, lax.psum(dt, mesh_axes)


def topk_tangent(residuals, where, dx, dt, *, log, dtype, mesh_axes=()):
    """Returns the tangents of the winners' values and of d: the transpose of `topk_grad`.

    With s = (x - m) / T and ds = (dx - s dT) / T, the tangent of log p_j is ds_j - sum_i p_i ds_i.
    """
    logits, temperature, m, d, indices = residuals
    x = logits_of(normalizers.to_float(logits, (-1,), where, mesh_axes), where)
    indices, own = indices_in_shard(indices, logits.shape[-1], mesh_axes)
    scaled, p = _scaled_and_softmax(x, where, m, d, temperature)
    # 0 also where x is -inf, if the temperature is constant.
    by_temperature = jnp.where(dt == 0, 0, scaled * dt)
    ds = Temperature.of(temperature).over(masked(widen(dx), where, 0) - by_temperature)
    mean = sum_over(jnp.where(p == 0, 0, p * ds), (-1,), mesh_axes)
    dlog_p = at_or_zero(ds, indices) - mean
    p_won = at_or_zero(p, indices)
    dvalues = dlog_p if log else jnp.where(p_won == 0, 0, p_won * dlog_p)
    dvalues = masked(masked(dvalues, mask_at(where, logits, indices), 0), own, 0)
    return lax.psum(dvalues, mesh_axes).astype(dtype), d * mean


def _scaled_and_softmax(x, where, m, d, temperature):
    """Returns (x - m) / T and its softmax; 0 where derivatives would multiply 0 by -inf, and where masked."""
    divisor = Temperature.of(temperature)
    no_mass = jnp.isneginf(divisor.distance(x, m)) & jnp.isfinite(m)
    left_out = no_mass if where is None else no_mass | ~where
    scaled = divisor.distance(*(jnp.where(left_out, 0, a) for a in (x, m)))
    p = masked(jnp.exp(scaled) / (d if where is None else jnp.where(d == 0, 1, d)), where, 0)
    return scaled, jnp.where(no_mass, 0, p)


def indices_in_shard(indices, vocab: int, mesh_axes):
    """Converts indices of the row to indices of this device's shard of `vocab` elements; returns also which lie in it.

    The others become different indices beyond the shard. Without mesh axes, all lie in it: the second result is None.
    """
    if not mesh_axes:
        return indices, None
    indices = indices - lax.axis_index(mesh_axes) * vocab
    own = (indices >= 0) & (indices < vocab)
    return jnp.where(own, indices, vocab + positions(indices)), own


def at_or_zero(x, indices):
    return at(x, indices, "fill", 0)


def put(x, indices, values):
    """Puts values at indices of the last axis of x, which all differ; indices beyond it are dropped."""

    def put(x, indices, values):
        return x.at[indices].set(values, unique_indices=True, mode="drop")

    arrays = [jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])) for a in (x, indices, values)]
    if any(jax.typeof(x).sharding.spec):  # Explicit mesh axes divide it, and so it cannot be reshaped
        for _ in x.shape[:-1]:
            put = jax.vmap(put)
        return put(*arrays)
    rows = [a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in arrays]
    return jax.vmap(put)(*rows).reshape(x.shape)


def best_order(logits, where, k):
    """Returns the indices of the k best along the last axis, in the order of lax.top_k, masked positions last."""
    if jnp.issubdtype(logits.dtype, jnp.integer):
        if where is None:
            return top_k(logits, k)[1]
        index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        left_out = jnp.broadcast_to(~where, logits.shape)
        return lax.sort((left_out, jnp.where(left_out, 0, ~logits), index), num_keys=3)[2][..., :k]
    x = widen(logits) if logits.dtype.itemsize == 1 else logits
    if logits.dtype.name.endswith("fnuz"):  # the bits of their only NaN have the sign
        x = jnp.where(jnp.isnan(x), -np.array(np.nan, x.dtype), x)
    if where is not None:
        last = lax.bitcast_convert_type(jnp.array(-1, f"int{8 * x.dtype.itemsize}"), x.dtype)
        x = jnp.where(where, x, last)  # the -NaN of all ones is the lowest of the total order

    def by_value(x):
        return top_k(x, k)[1]

    def by_key(x):
        return top_k(sort_keys.key(x), k)[1]

    def on_cuda(x):
        # XLA's kernel for k <= 16 is faster in float32; its sort, for larger k, is faster for 16-bit dtypes
        if not isinstance(k, int) or k <= 16:
            x = widen(x)
        # XLA's kernel misplaces -NaN (openxla/xla issue 48119)
        return lax.cond(jnp.any(jnp.isnan(x) & jnp.signbit(x)), by_key, by_value, x)

    @custom_vmap  # under vmap, lax.cond would sort in both ways
    def order(x):
        return lax.platform_dependent(x, cuda=on_cuda, default=lambda x: by_value(widen(x)))

    order.def_vmap(lambda axis_size, in_batched, x: (order(x), True))
    return order(x)
