"""Top-k of rows that are spread over a mesh: devices exchange two numbers and k candidates per row, never logits."""

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import gather, merge_over
from pallas_softmax._src.masks import at, mask_at
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk.xla import TopK, best_order, within


def topk_on_mesh(run_shard, logits, where, temperature, *, merge, k, log, dtype, scaled=True, mesh_axes):
    """Merges each device's winners over one mesh axis after the other, from the last axis to the first.

    Shards are in the order of their devices, so the first of gathered winners that tie is the best. `xla.topk`
    documents most arguments, here for this device's shard. `merge` is the operation that merges lists of winners.
    run_shard(operation, arrays, static) returns the operation's results on this device's shard; None stands for top-k
    itself.
    """
    won, position, *normalizer = winners_of_shard(
        run_shard, None, logits, where, temperature, k, mesh_axes, scaled
    )
    lists = won, position, tuple(normalizer)
    keywords = {"k": k, "log": log, "dtype": dtype, "scaled": scaled}
    return _merged(run_shard, merge, lists, where is not None, temperature, mesh_axes, **keywords)


def winners_of_shard(run_shard, topk, logits, where, temperature, k, mesh_axes, scaled=True):
    """Returns the winners of a shard, their positions in the whole row, `_marked`, and the shard's largest logit and d.

    `topk` is the operation that `run_shard` runs. Logits are `wide_logits`.
    """
    vocab = logits.shape[-1]
    keywords = {"k": min(k, vocab), "log": False, "dtype": jnp.dtype(jnp.float32), "scaled": scaled}
    (_, indices), (top, d) = run_shard(topk, (logits, where, temperature), keywords)
    if jnp.issubdtype(logits.dtype, jnp.integer):  # their normalizers count from the largest of the shard
        top = jnp.max(logits, -1, keepdims=True, where=where, initial=jnp.iinfo(logits.dtype).min)
    position = indices + lax.axis_index(mesh_axes) * vocab
    if where is not None:
        position = _marked(position, mask_at(where, logits, indices))
    return wide_logits(at(logits, indices)), position, wide_logits(top), d


def select_on_mesh(run_shard, operand, where, lengths, *, merge, k, sorted, mesh_axes):
    """Merges each device's winners like `topk_on_mesh`, without normalizers. `xla.select` documents most arguments."""
    vocab = operand.shape[-1]
    first = lax.axis_index(mesh_axes) * vocab
    lengths = None if lengths is None else lengths - first
    # sorted=False would not order equal winners by their position
    values, indices = run_shard(None, (operand, where, lengths), {"k": min(k, vocab), "sorted": True})
    masks = where is not None or lengths is not None
    position = indices + first
    if masks:
        position = _marked(position, mask_at(within(where, lengths, operand), operand, indices))
    won = wide_logits(values)
    winners, _ = _merged(
        run_shard, merge, (won, position, ()), masks, None, mesh_axes, k=k, log=False, dtype=won.dtype
    )
    return TopK(winners.values.astype(operand.dtype), winners.indices)


def _merged(run_shard, merge, lists, masks: bool, temperature, mesh_axes, **keywords):
    """Returns the results of `merge`, the operation, for the lists of all devices.

    A list is a device's winners, their positions in the row, `_marked` if there are `masks`, and the numbers of its
    normalizer, or (). `keywords` are the static arguments of `merge`.
    """
    won, position, normalizer = lists
    divisor = Temperature.of(temperature) if normalizer and keywords["scaled"] else None
    for mesh_axis in mesh_axes[:0:-1]:
        won, position, *parts = gather((won, position, *normalizer), mesh_axis)
        if normalizer:
            tops, d = parts
            _, d = normalizers.combine_parts(Normalizer(normalizers.to_float(tops, (-1,)), d), divisor)
            normalizer = normalizers.largest(tops), d
        order = best_order(won, _kept(position, masks), min(keywords["k"], won.shape[-1]))
        won, position = (jnp.take_along_axis(a, order, -1) for a in (won, position))
    list_length = won.shape[-1]

    def merged(gathered, temperature):
        won, position, *parts = gathered
        kept, position = _kept(position, masks), jnp.maximum(position, ~position) if masks else position
        lists = won, kept, position, tuple(parts), temperature
        if list_length < keywords["k"]:  # kernels merge lists of k winners only
            return merge.plain(*lists, **keywords)
        return run_shard(merge, lists, keywords)

    return merge_over(mesh_axes[:1], merged, (won, position, *normalizer), temperature)


def _marked(position, kept):
    """Returns the positions, and the complements of masked ones, which are negative."""
    return jnp.where(kept, position, ~position)


def _kept(position, masks: bool):
    """Returns which gathered winners are not masked; None without a mask."""
    return position >= 0 if masks else None


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
