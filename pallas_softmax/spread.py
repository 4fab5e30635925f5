"""Rows that are spread over the devices of a mesh: each reduces its part, and what they exchange is small.

Two numbers a row for softmax, those and k candidates for top-k; never the logits. The functions have the names of
those of an implementation. They run where mesh axes are bound, inside `jax.shard_map` or in a partition of
`partition`, on the device's part of the row. `local(op, ...)` is the best implementation of an operation of the part,
`names` are the mesh axes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online, xla
from pallas_softmax.dispatch import tracked
from pallas_softmax.online import Normalizer


def softmax(local, x, where, *, axes, names):
    m, d = _normalizer(local, x, where, axes, names)
    return xla.masked(jnp.exp(xla.logits_of(x, where) - online.shift(m)) / d, where, 0).astype(x.dtype)


def log_softmax(local, x, where, *, axes, names):
    return xla.log_normalized(x, where, _normalizer(local, x, where, axes, names))


def logsumexp(local, x, where, *, axes, names):
    normalizer = _normalizer(local, x, where, axes, names)
    return xla.log_of(normalizer), normalizer


def _normalizer(local, x, where, axes, names) -> Normalizer:
    _, part = local("logsumexp", x, where, axes=axes)
    return online.union(part, names)


def softmax_grad(local, *args, **static):
    return xla.softmax_grad(*args, **static)


def log_softmax_grad(local, *args, **static):
    return xla.log_softmax_grad(*args, **static)


def topk_grad(local, *args, names, **static):
    dx, dt = xla.topk_grad(*args, names=names, **static)
    return dx, lax.psum(dt, names)


def topk(local, logits, where, temperature, *, k, log, dtype, names):
    """Each device's winners, merged over one mesh axis after the other, the last first: a tree of all-gathers.

    The parts lie in the order of their devices, and equal values by their index: so do gathered winners.
    """
    vocab = logits.shape[-1]
    (_, indices), (top, d) = local(
        "topk", logits, where, temperature, k=min(k, vocab), log=False, dtype=jnp.dtype(jnp.float32)
    )
    won = _widen(jnp.take_along_axis(logits, indices, -1))
    if jnp.issubdtype(logits.dtype, jnp.integer):  # whose normalizers count from the largest of the part
        top = _widen(jnp.max(logits, -1, keepdims=True, where=where, initial=jnp.iinfo(logits.dtype).min))
    position = indices + lax.axis_index(names) * vocab
    if where is not None:
        position = jnp.where(online.take(where, logits, indices), position, ~position)  # negative: masked
    for name in names[:0:-1]:
        won, position, tops, d = _gather((won, position, top, d), name)
        _, d = online.merged(Normalizer(online.to_float(tops, (-1,)), d), temperature)
        top = jnp.max(tops, -1, keepdims=True)
        won, position = xla.best_of((won, position), _kept(position, where), min(k, won.shape[-1]))
    part = won.shape[-1]
    won, position, tops, d = _gather((won, position, top, d), names[0])
    lists = won, _kept(position, where), jnp.maximum(position, ~position), (tops, d), temperature
    merge = functools.partial(local, "merge") if part == k else xla.merge  # kernels take whole lists
    return merge(*lists, k=k, log=log, dtype=dtype)


def _kept(position, where):
    return None if where is None else position >= 0


def _widen(x):
    """In 32 bits or more, in the same order: a GPU's conversion of float16 loses the sign of NaN."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    wide = online.widen(x)
    if x.dtype != jnp.float16:
        return wide
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    nan = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13
    return jnp.where(jnp.isnan(x), lax.bitcast_convert_type(nan, jnp.float32), wide)


def _gather(arrays: tuple[jax.Array, ...], name: str) -> list[jax.Array]:
    """The arrays (..., n) of all devices of a mesh axis, as (..., devices * n), by one all-gather of their bits."""
    words = []
    for a in arrays:
        bits = lax.bitcast_convert_type(a, jnp.uint32)  # of 64 bits two words, in a dimension of their own
        words.append(bits.reshape(*a.shape[:-1], a.shape[-1] * (a.dtype.itemsize // 4)))
    to = "invarying" if tracked((name,)) else "varying"
    gathered = jnp.moveaxis(lax.all_gather(jnp.concatenate(words, -1), name, to=to), 0, -2)
    ends = [sum(w.shape[-1] for w in words[: i + 1]) for i in range(len(words))]
    out = []
    for a, part in zip(arrays, jnp.split(gathered, ends[:-1], -1)):
        wide = () if a.dtype.itemsize == 4 else (a.dtype.itemsize // 4,)
        part = part.reshape(*part.shape[:-2], part.shape[-2] * a.shape[-1], *wide)
        out.append(lax.bitcast_convert_type(part, a.dtype))
    return out
