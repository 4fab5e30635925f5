"""Implementation `xla`: plain JAX on `online`, for every device, dtype, shape and mask.

The functions have the names and arguments that every implementation has. `axes` are the reduced axes;
reduced dimensions stay with size 1; arithmetic is in float32, or wider where the input is.
"""

import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.dispatch import Call
from pallas_softmax.online import Candidates, Normalizer, widen

_FUSED_ROW = 8_192  # elements of a row that XLA keeps on chip


def preferred(call: Call) -> str | None:
    """Why XLA is better at a call than any kernel, however fast; None if it is not.

    A float32 softmax of short, aligned rows takes those of `mosaic_gpu` from 17% less time than XLA (few rows) to
    11% more (in the L2 cache), those of `triton` as long; in a program XLA fuses it with what makes its logits,
    which a kernel cannot.
    """
    if not call.trailing:
        return "slower than xla where the row is not the last axes: it is transposed, twice"
    if call.op == "softmax" and call.dtype == "float32" and not call.masked and call.vocab % 4 == 0:
        if call.vocab <= _FUSED_ROW:
            return f"no faster than xla for aligned float32 rows of up to {_FUSED_ROW} without where"
    return None


def softmax(x, where, *, axes):
    e, d = online.exponentials(_logits(x, where), axes)
    return _masked(e / d, where, 0).astype(x.dtype)


def softmax_grad(residuals, where, dy, *, axes):
    (y,) = residuals
    p, g = widen(y), _masked(widen(dy), where, 0)
    dx = p * (g - jnp.sum(p * g, axes, keepdims=True))
    return _masked(dx, where, 0).astype(y.dtype)


def log_softmax(x, where, *, axes):
    logits = _logits(x, where)
    m, d = online.reduce(logits, axes)
    return _masked(logits - m - jnp.log(d), where, -jnp.inf).astype(x.dtype)


def log_softmax_grad(residuals, where, dy, *, axes):
    (y,) = residuals
    g = _masked(widen(dy), where, 0)
    dx = g - jnp.exp(widen(y)) * jnp.sum(g, axes, keepdims=True)
    return _masked(dx, where, 0).astype(y.dtype)


def logsumexp(x, where, *, axes):
    """log(sum(exp(x))), and the normalizer."""
    m, d = online.reduce(_logits(x, where), axes)
    lse = jnp.where(m == jnp.inf, m, m + jnp.log(d))  # a +inf among numbers: the sum is +inf, not NaN
    return lse, Normalizer(m, d)


def logsumexp_grad(residuals, where, cotangents, *, axes):
    """By exp(x - m) / d, since exp(x - lse) has the rounding of lse in it; the derivative of d besides."""
    x, (m, d) = residuals
    dy, (_, dd) = cotangents
    d = jnp.where(m == jnp.inf, 1, d)  # a +inf among numbers has all the weight
    dx = jnp.exp(_logits(x, where) - online.shift(m)) * (dy / d + dd)
    return _masked(dx, where, 0).astype(x.dtype)


def topk(logits, where, temperature, *, k, log, dtype):
    """The winners of the last axis, values and indices, and the normalizer of logits / temperature.

    m is the first winner (a -NaN, which wins last, still makes d NaN); it is not divided by the temperature,
    for (x - m) / temperature neither overflows nor rounds x first.
    """
    x = _logits(online.to_float(logits, (-1,), where), where)
    indices = _top_k(logits, where, k)
    winners = jnp.take_along_axis(x, indices, -1)
    m = winners[..., :1] if k else jnp.max(x, -1, keepdims=True, initial=-jnp.inf)
    d = jnp.sum(jnp.exp((x - m) / temperature), -1, keepdims=True)
    normalizer = Normalizer(m, jnp.where(m == -jnp.inf, 0, d))
    kept = None if where is None else online.take(where, logits, indices)
    values = _masked(online.weights(winners, normalizer, temperature, log), kept, -jnp.inf if log else 0)
    return Candidates(values.astype(dtype), indices), normalizer


def _masked(x, where, value):
    return x if where is None else jnp.where(where, x, value)


def _logits(x, where):
    return _masked(widen(x), where, -jnp.inf)


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
