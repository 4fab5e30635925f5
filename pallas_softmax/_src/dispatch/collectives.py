"""Rows that are spread over the devices of a mesh: each device reduces its shard, and what they exchange is small.

Of each row the devices send two numbers for softmax, two numbers and k candidates for top-k, and sums of counts and
masses for a draw; never the logits. The functions run on a device's shard of each array, where mesh axes are bound:
inside `jax.shard_map`, or in a partition of `sharding.partition`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.dispatch import platform as platforms
from pallas_softmax._src.dispatch import xla
from pallas_softmax._src.dispatch.mesh_types import is_tracked
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax.online import Normalizer


def run(choice: Choice, arrays: tuple, keywords: dict[str, Any], mesh_axes: tuple[str, ...]) -> Any:
    """Runs a call on one device's shard of the arrays, whose rows are spread over `mesh_axes`, or whole if it is ().

    Args:
      choice: that for the user's whole call.
      arrays: the positional arguments of the operation; see `operations.TABLE`.
      keywords: its static arguments.
      mesh_axes: names of the mesh axes; a row's shards lie in the order of `lax.axis_index`.
    """
    if not mesh_axes:
        return platforms.run_shard(choice, choice.call.op, arrays, keywords)
    match choice.call.op:
        case "softmax":
            return _softmax(choice, *arrays, **keywords, mesh_axes=mesh_axes)
        case "log_softmax":
            return _log_softmax(choice, *arrays, **keywords, mesh_axes=mesh_axes)
        case "logsumexp":
            return _logsumexp(choice, *arrays, **keywords, mesh_axes=mesh_axes)
        case "topk":
            return _topk(choice, *arrays, **keywords, mesh_axes=mesh_axes)
        case plain:  # gradients, and sample
            return xla.functions[plain](*arrays, **keywords, mesh_axes=mesh_axes)


def _softmax(choice, x, where, *, axes, mesh_axes):
    m, d = _normalizer(choice, x, where, axes, mesh_axes)
    return xla.masked(jnp.exp(xla.logits_of(x, where) - online.shift(m)) / d, where, 0).astype(x.dtype)


def _log_softmax(choice, x, where, *, axes, mesh_axes):
    return xla.log_normalized(x, where, _normalizer(choice, x, where, axes, mesh_axes))


def _logsumexp(choice, x, where, *, axes, mesh_axes):
    normalizer = _normalizer(choice, x, where, axes, mesh_axes)
    return online.log_of(normalizer).astype(x.dtype), normalizer


def _normalizer(choice, x, where, axes, mesh_axes) -> Normalizer:
    """Returns the normalizer of each whole row: that of the shard, by the best kernel for it, merged by ⊕."""
    _, of_shard = platforms.run_shard(choice, "logsumexp", (x, where), {"axes": axes})
    return online.union(of_shard, mesh_axes)


def _topk(choice, logits, where, temperature, *, k, log, dtype, mesh_axes):
    """Merges each device's winners over one mesh axis after the other, the last first: a tree of all-gathers.

    The shards of a row lie in the order of their devices, and equal values are ordered by their index: so gathered
    winners, which lie in the order of the devices too, are merged by position.
    """
    vocab = logits.shape[-1]
    of_shard = {"k": min(k, vocab), "log": False, "dtype": jnp.dtype(jnp.float32)}
    (_, indices), (top, d) = platforms.run_shard(choice, "topk", (logits, where, temperature), of_shard)
    won = _widen(jnp.take_along_axis(logits, indices, -1))
    if jnp.issubdtype(logits.dtype, jnp.integer):  # their normalizers count from the largest of the shard
        top = _widen(jnp.max(logits, -1, keepdims=True, where=where, initial=jnp.iinfo(logits.dtype).min))
    position = indices + lax.axis_index(mesh_axes) * vocab
    if where is not None:  # the complement, which is negative, says that the position is masked
        position = jnp.where(xla.mask_at(where, logits, indices), position, ~position)
    for mesh_axis in mesh_axes[:0:-1]:
        won, position, tops, d = _gather((won, position, top, d), mesh_axis)
        _, d = online.merge_normalizers(Normalizer(online.to_float(tops, (-1,)), d), temperature)
        top = jnp.max(tops, -1, keepdims=True)
        order = xla.best_order(won, _kept(position, where), min(k, won.shape[-1]))
        won, position = (jnp.take_along_axis(a, order, -1) for a in (won, position))
    list_length = won.shape[-1]
    won, position, tops, d = _gather((won, position, top, d), mesh_axes[0])
    lists = won, _kept(position, where), jnp.maximum(position, ~position), (tops, d), temperature
    keywords = {"k": k, "log": log, "dtype": dtype}
    if list_length < k:  # kernels merge lists of k winners only
        return xla.merge(*lists, **keywords)
    return platforms.run_shard(choice, "merge", lists, keywords)


def _kept(position, where):
    """Returns which of the gathered winners are not masked; None without a mask."""
    return None if where is None else position >= 0


def _widen(x):
    """Returns `x` in 32 bits or more, in the same order; float16 by its bits, since a GPU's cast loses a NaN's sign."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    wide = online.widen(x)
    if x.dtype != jnp.float16:
        return wide
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    nan = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return jnp.where(jnp.isnan(x), lax.bitcast_convert_type(nan, jnp.float32), wide)


def _gather(arrays: tuple[jax.Array, ...], mesh_axis: str) -> list[jax.Array]:
    """Gathers arrays (..., n) over a mesh axis, to (..., devices * n) each, by one all-gather of their bits."""
    words = []
    for a in arrays:
        bits = lax.bitcast_convert_type(a, jnp.uint32)  # of 64 bits: two words, in a dimension of their own
        words.append(bits.reshape(*a.shape[:-1], a.shape[-1] * (a.dtype.itemsize // 4)))
    to = "invarying" if is_tracked((mesh_axis,)) else "varying"
    gathered = jnp.moveaxis(lax.all_gather(jnp.concatenate(words, -1), mesh_axis, to=to), 0, -2)
    ends = [sum(w.shape[-1] for w in words[: i + 1]) for i in range(len(words))]
    out = []
    for a, bits in zip(arrays, jnp.split(gathered, ends[:-1], -1)):
        two_words = () if a.dtype.itemsize == 4 else (a.dtype.itemsize // 4,)
        bits = bits.reshape(*bits.shape[:-2], bits.shape[-2] * a.shape[-1], *two_words)
        out.append(lax.bitcast_convert_type(bits, a.dtype))
    return out
