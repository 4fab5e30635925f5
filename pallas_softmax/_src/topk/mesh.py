"""Top-k of rows that are spread over a mesh: devices exchange two numbers and k candidates per row, never logits.

`RowOperation.on_mesh` describes `run_shard`.
"""

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import merge_over
from pallas_softmax._src.masks import at, mask_at
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk.xla import TopK, best_order, lowest_value, within


def topk_on_mesh(run_shard, logits, where, temperature, *, merge, k, log, dtype, scaled=True, mesh_axes):
    """Merges each device's winners over one mesh axis after the other, from the last axis to the first.

    Shards are in the order of their devices, so the first of gathered winners that tie is the best. The arguments are
    as for `xla.topk`, for this device's shard. `merge` is the operation that merges lists of winners.
    """
    lists = winners_of_shard(run_shard, None, logits, where, temperature, k, mesh_axes, scaled=scaled)
    keywords = {"k": k, "log": log, "dtype": dtype, "scaled": scaled}
    return _merged(run_shard, merge, lists, where is not None, temperature, mesh_axes, **keywords)


def winners_of_shard(run_shard, topk, logits, where, temperature, k: int, mesh_axes, *, scaled=True):
    """Returns this device's k winners of each row, their `_positions`, m (of integers, the largest logit) and d."""
    vocab = logits.shape[-1]
    static = {"k": min(k, vocab), "log": False, "dtype": jnp.dtype(jnp.float32), "scaled": scaled}
    (_, indices), (top, d) = run_shard(topk, (logits, where, temperature), static)
    if jnp.issubdtype(logits.dtype, jnp.integer):  # their normalizers count from the largest of the shard
        wide = wide_logits(logits)
        top = jnp.max(wide, -1, keepdims=True, where=where, initial=lowest_value(wide.dtype))
    return wide_logits(at(logits, indices)), _positions(indices, where, logits, mesh_axes), top, d


def select_on_mesh(run_shard, operand, where, lengths, *, merge, k, sorted, mesh_axes):
    vocab = operand.shape[-1]
    lengths = None if lengths is None else lengths - lax.axis_index(mesh_axes) * vocab
    # sorted=False would not order equal winners by their position
    values, indices = run_shard(None, (operand, where, lengths), {"k": min(k, vocab), "sorted": True})
    where, won = within(where, lengths, operand), wide_logits(values)
    lists = won, _positions(indices, where, operand, mesh_axes)
    winners, _ = _merged(run_shard, merge, lists, where is not None, None, mesh_axes, k=k, log=False, dtype=won.dtype)
    return TopK(winners.values.astype(operand.dtype), winners.indices)


def _merged(run_shard, merge, lists, masks: bool, temperature, mesh_axes, **keywords):
    """Returns the results of `merge`, given a device's winners, their `_positions`, and m and d, if it has them."""
    k = keywords["k"]

    def merged(gathered, temperature):
        won, position, *parts = gathered
        kept = position >= 0 if masks else None
        position = jnp.maximum(position, ~position) if masks else position
        arrays = won, kept, position, tuple(parts), temperature
        if won.shape[-1] < k * lax.axis_size(mesh_axes[0]):  # kernels merge lists of k winners only
            return merge.plain(*arrays, **keywords)
        return run_shard(merge, arrays, keywords)

    partly = partial_merge(k, masks, scaled=keywords.get("scaled", True))
    return merge_over(mesh_axes, merged, lists, temperature, partly)


def partial_merge(k: int, masks: bool, *, scaled=True):
    """Returns the function that merges gathered lists to lists of the k best, for `merge_over`."""

    def merge(gathered, temperature):
        won, position, *normalizer = gathered
        if normalizer:
            tops, d = normalizer
            parts = Normalizer(normalizers.to_float(tops, (-1,)), d)
            divisor = Temperature.of(temperature) if scaled else None
            normalizer = normalizers.largest(tops), normalizers.combine_parts(parts, divisor).d
        order = best_order(won, position >= 0 if masks else None, min(k, won.shape[-1]))
        return *(jnp.take_along_axis(a, order, -1) for a in (won, position)), *normalizer

    return merge


def _positions(indices, where, x, mesh_axes):
    """Returns the positions of the shard's winners in the row; of masked ones the complements, which are negative."""
    position = indices + lax.axis_index(mesh_axes) * x.shape[-1]
    return position if where is None else jnp.where(mask_at(where, x, indices), position, ~position)


def wide_logits(x):
    """Returns `x` in 32 bits or more, in the same order; float16 by its bits, since a GPU's cast loses a NaN's sign."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    wide = normalizers.widen(x)
    if x.dtype != jnp.float16:
        return wide
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    nan = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return jnp.where(jnp.isnan(x), lax.bitcast_convert_type(nan, jnp.float32), wide)
