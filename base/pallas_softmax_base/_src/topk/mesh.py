"""Top-k of rows that are spread over a mesh: devices exchange two numbers and k candidates per row, never logits."""

import jax.numpy as jnp
from jax import lax

from pallas_softmax_base._src import normalizers
from pallas_softmax_base._src.dispatch.mesh_types import gather, merge_over
from pallas_softmax_base._src.masks import mask_at
from pallas_softmax_base._src.normalizers import Normalizer
from pallas_softmax_base._src.topk.xla import best_order


def topk_on_mesh(run_shard, logits, where, temperature, *, merge, k, log, dtype, mesh_axes):
    """Merges each device's winners over one mesh axis after the other, the last first: a tree.

    The shards of a row lie in the order of their devices, and equal values are ordered by their index. So gathered
    winners, which lie in the order of the devices, can be merged by position. `xla.topk` documents most arguments, here
    for this device's shard. `merge` is the operation that merges lists of winners. run_shard(operation, arrays, static)
    returns the operation's results on this device's shard; None stands for top-k itself.
    """
    vocab = logits.shape[-1]
    keywords_of_shard = {"k": min(k, vocab), "log": False, "dtype": jnp.dtype(jnp.float32)}
    (_, indices), (top, d) = run_shard(None, (logits, where, temperature), keywords_of_shard)
    won = _widen(jnp.take_along_axis(logits, indices, -1))
    if jnp.issubdtype(logits.dtype, jnp.integer):  # their normalizers count from the largest of the shard
        top = _widen(jnp.max(logits, -1, keepdims=True, where=where, initial=jnp.iinfo(logits.dtype).min))
    position = indices + lax.axis_index(mesh_axes) * vocab
    if where is not None:  # the complement, which is negative, says that the position is masked
        position = jnp.where(mask_at(where, logits, indices), position, ~position)
    for mesh_axis in mesh_axes[:0:-1]:
        won, position, tops, d = gather((won, position, top, d), mesh_axis)
        _, d = normalizers.combine_parts(Normalizer(normalizers.to_float(tops, (-1,)), d), temperature)
        top = jnp.max(tops, -1, keepdims=True)
        order = best_order(won, _kept(position, where), min(k, won.shape[-1]))
        won, position = (jnp.take_along_axis(a, order, -1) for a in (won, position))
    list_length = won.shape[-1]

    def merged(gathered, temperature):
        won, position, tops, d = gathered
        lists = won, _kept(position, where), jnp.maximum(position, ~position), (tops, d), temperature
        keywords = {"k": k, "log": log, "dtype": dtype}
        if list_length < k:  # kernels merge lists of k winners only
            return merge.plain(*lists, **keywords)
        return run_shard(merge, lists, keywords)

    return merge_over(mesh_axes[:1], merged, (won, position, top, d), temperature)


def _kept(position, where):
    """Returns which gathered winners are not masked; None without a mask."""
    return None if where is None else position >= 0


def _widen(x):
    """Returns `x` in 32 bits or more, in the same order; float16 by its bits, since a GPU's cast loses a NaN's sign."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    wide = normalizers.widen(x)
    if x.dtype != jnp.float16:
        return wide
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    nan = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return jnp.where(jnp.isnan(x), lax.bitcast_convert_type(nan, jnp.float32), wide)
