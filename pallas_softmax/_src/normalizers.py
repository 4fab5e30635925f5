"""Normalizers of softmax: the pairs (m, d), the triples (m, d, t) with the entropy's sum, and their operator ⊕.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), section 3.

This file defines ⊕ in jax.numpy, also for the JAX parts of the Mosaic GPU kernels: once for two normalizers
(`combine`), and in forms that merge many at a time. Other languages restate ⊕; a change must be repeated there:

    inline PTX   softmax/states_ptx.py        the logits of a thread in token statistics; threads and segments of a row
                 topk/window_kernel.py        `_add_step`: the logits of a thread
                 sample/row_ptx.py            the logits of a thread, and the threads of a part
    Triton       triton/language.py           `combine`
                 softmax/triton_kernels.py    `_absorb`: the logits of a step
                 topk/triton_kernels.py       `topk_kernel`: the logits of a step; `_combine_lanes`: all lanes
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from pallas_softmax._src import sort_keys
from pallas_softmax._src.temperatures import Temperature

LOG2_E = float(1 / np.log(2))  # the logarithm of e to base 2

# Number of elements of a chunk of a long row. XLA sums a chunk by a tree, which is accurate; ⊕ merges the chunks.
CHUNK = 2**16

# Up to so many numbers of a row, such as one of each device, are reduced by elementwise operations, which XLA fuses
# with those around them. On a GPU, each reduction would be a kernel of its own.
_FEW = 8

# exp of this is 0, and its product with a sum of exponentials is finite. Some 8-bit floats end earlier.
FAR = -1e4


class Normalizer(NamedTuple):
    """Running maximum and sum of exponentials of a set of logits (paper, section 3.1).

    Attributes:
      m: maximum of the logits; -inf for the empty set.
      d: sum of exp(x - m) over the set; 0 where m is -inf, NaN where a logit is +inf or NaN.
    """

    m: jax.Array
    d: jax.Array


class Moments(NamedTuple):
    """A normalizer extended for the entropy, which is log(d) - t / d: neither term cancels in a peaked row.

    Attributes:
      m, d: as in `Normalizer`.
      t: sum of (x - m) exp(x - m) over the set. A logit of -inf adds 0. NaN where d is NaN.
    """

    m: jax.Array
    d: jax.Array
    t: jax.Array


Sums = TypeVar("Sums", Normalizer, Moments)
"""What ⊕ merges: a `Normalizer`, or `Moments`."""


# ---- ⊕ of two normalizers, and of rows


def shift(m: jax.Array) -> jax.Array:
    """Returns the number to subtract before exp: m, but 0 for m = -inf, so that exp(-inf - shift) is 0, not NaN."""
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


class Scale(NamedTuple):
    """1 / temperature in a kernel, as the factors of (x first - m first) factor again.

    At temperature 0, the result is 0 or far below the exponents of float32.
    """

    first: Any  # 1, or less for huge temperatures: x - m might overflow
    factor: Any
    again: Any  # 1, or more for tiny temperatures: the factor might overflow

    @property
    def is_limit(self):
        """Whether the temperature is 0."""
        return self.factor == _LIMIT

    def distance(self, x, m):
        return (x * self.first - m * self.first) * self.factor * self.again


_LIMIT = 2.0**100  # the factor at temperature 0


def encoded_scale(temperature: jax.Array) -> jax.Array:
    """Returns the number that tells a kernel the `Scale`: 1 / temperature, or -1 / divisor with another factor."""
    t = Temperature.of(temperature)
    return jnp.where(t.factor == 1, 1, -1) / t.divisor


def scale_of(encoded) -> Scale:
    size = jnp.abs(encoded)
    is_huge, is_tiny = (encoded < 0) & (size < 0.5), (encoded < 0) & (size > 0.5)
    return Scale(jnp.where(is_huge, 0.25, 1.0), jnp.minimum(size, _LIMIT), jnp.where(is_tiny, _LIMIT, 1.0))


def below(x, m, scale: "ArrayLike | Scale | Temperature | None" = None):
    """Returns x - m, divided by the temperature."""
    if isinstance(scale, Scale | Temperature):
        return scale.distance(x, m)
    return x - m if scale is None else (x - m) * scale


def distance(x: jax.Array, shift: jax.Array, scale: Any = None) -> jax.Array:
    """Returns `below`, but at least -10,000, or the lowest number of a dtype that ends before it.

    Its product with its exponential is then 0 for x = -inf.
    """
    return jnp.maximum(below(x, shift, scale), max(FAR, float(jnp.finfo(x.dtype).min)))


def combine(a: Sums, b: Sums, *, scale: "ArrayLike | Scale | None" = None) -> Sums:
    """Returns a ⊕ b, as the public `online.combine` documents."""
    m = jnp.maximum(a.m, b.m)
    s = shift(m)
    return type(a)(m, *map(operator.add, _sums_from(a, s, scale), _sums_from(b, s, scale)))


def _sums_from(part: Sums, shift: jax.Array, scale: Any = None) -> tuple[jax.Array, ...]:
    """Returns the sums of a set, d or (d, t), relative to `shift` instead of to its own m."""
    if isinstance(part, Moments):
        u = distance(part.m, shift, scale)
        e = jnp.exp(u)
        return part.d * e, (part.t + u * part.d) * e
    if scale is None or isinstance(scale, Temperature):
        return (part.d * jnp.exp(below(part.m, shift, scale)),)
    # GPUs compute exponentials of base 2. exp2 needs one multiplication per element; exp would need two.
    scale = scale._replace(factor=scale.factor * LOG2_E) if isinstance(scale, Scale) else scale * LOG2_E
    return (part.d * jnp.exp2(below(part.m, shift, scale)),)


def log_of(normalizer: Normalizer | Moments) -> jax.Array:
    """Returns the log of the sum of exp(x)."""
    m, d = normalizer[:2]
    return jnp.where(m == jnp.inf, m, m + jnp.log(d))  # if a logit is +inf, d is NaN, but the sum is +inf


def entropy(moments: Moments) -> jax.Array:
    """Returns the entropy of the softmax of a set of logits, in nats: log(d) - t / d. NaN for the empty set.

    Examples:
      >>> moments = ps.online.reduce(jnp.ones(3), of=ps.online.Moments)
      >>> ps.online.entropy(moments)  # log 3
      Array([1.099], dtype=float32)
    """
    if not isinstance(moments, Moments):
        raise TypeError(f"online.entropy: moments must be Moments, got {moments!r}")
    return jnp.log(moments.d) - moments.t / moments.d


def reduce(x: jax.Array, axes: tuple[int, ...] = (-1,), *, chunk: int = CHUNK, of: type[Sums] = Normalizer) -> Sums:
    """Returns what the public `online.reduce` documents."""
    axes, x = tuple(axis % x.ndim for axis in axes), widen(x)
    is_known = all(isinstance(n, int) for n in x.shape)  # not a symbolic shape of jax.export
    split = max(axes, key=lambda a: x.shape[a], default=None) if is_known else None
    if split is None or x.shape[split] <= chunk:
        return _reduce_directly(x, axes, of)

    chunks, remainder = divmod(x.shape[split], chunk)
    head = lax.slice_in_dim(x, 0, chunks * chunk, axis=split)
    head = head.reshape(*x.shape[:split], chunks, chunk, *x.shape[split + 1 :])
    within = tuple(a + (a >= split) for a in axes)  # the reduced axes of `head`, except the chunks' axis
    parts = jax.tree.map(lambda f: jnp.squeeze(f, split + 1), _reduce_directly(head, within, of))
    total = lax.associative_scan(combine, parts, axis=split)
    total = jax.tree.map(lambda f: lax.slice_in_dim(f, chunks - 1, chunks, axis=split), total)
    if not remainder:
        return total
    return combine(total, _reduce_directly(lax.slice_in_dim(x, chunks * chunk, None, axis=split), axes, of))


def _reduce_directly(x: jax.Array, axes: tuple[int, ...], of: type[Sums]) -> Sums:
    m, d = mended(*max_and_sum(x, axes))
    if of is Normalizer:
        return of._make((m, d))
    below = distance(x, shift(m))
    return of._make((m, d, jnp.sum(below * jnp.exp(below), axes, keepdims=True)))


def max_and_sum(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns each row's maximum m and a sum, so that m + log(sum) is right: +inf if m is +inf, NaN for any NaN.

    x is widened after the maximum. Otherwise, XLA for CPUs would store all of x in float32.
    """
    m = widen(jnp.max(x, axes, keepdims=True, initial=-jnp.inf))
    return m, jnp.sum(jnp.exp(widen(x) - jnp.where(jnp.isinf(m), 0, m)), axes, keepdims=True)


def mended(m: jax.Array, total: jax.Array) -> Normalizer:
    m = jnp.where(jnp.isnan(total), jnp.nan, m)  # on the CPU, XLA's maximum loses NaNs in long rows
    return Normalizer(m, jnp.where(m == jnp.inf, jnp.nan, total))


# ---- ⊕ of many normalizers at a time


def log_of_sum(d):
    """Returns log(d) of a sum d >= 1 of exponentials. It is accurate near 1, unlike the GPU's fast logarithm.

    d is 1 plus the terms of all logits except the largest. If these terms are small, the Taylor series of log(1 + u)
    keeps the digits of u = d - 1. Up to |u| = 2^-6 its four terms are exact to float32.
    """
    u = d - 1
    return jnp.where(jnp.abs(u) < 2**-6, u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4))), jnp.log(d))


def add_logits(normalizer: Normalizer, blocks: Sequence[jax.Array]) -> Normalizer:
    """Adds the logits `blocks` to the normalizers of the lanes of a kernel: ⊕ with one rescaling of d."""
    m = functools.reduce(jnp.maximum, blocks, normalizer.m)
    s = shift(m)
    (kept,) = _sums_from(normalizer, s)
    return Normalizer(m, kept + tree_sum(jnp.exp(x - s) for x in blocks))


def combine_lanes(lane: Sums, axis: int | None = None, broadcast: Callable | None = None, scale=None, m=None) -> Sums:
    """Merges the normalizers of the lanes of a kernel: all to scalars, or along an axis.

    With an axis, `broadcast` expands one number per row to the shape of `lane`. `m` is the largest m, if it is known.
    """
    m = jnp.max(lane.m, axis) if m is None else m
    s = shift(m) if broadcast is None else broadcast(shift(m))
    return of_magnitudes(type(lane), m, *(jnp.sum(a, axis) for a in magnitudes_from(lane, s, scale)))


def magnitudes_from(part: Sums, shift: jax.Array, scale: Any = None) -> list[jax.Array]:
    """Returns the terms d or (d, -t) of a sum over parts, relative to `shift`; each is rounded before it is added.

    A fused multiply-add would leave one of two terms unrounded, and the code around it decides which one. Lanes, or two
    kernels, would then get different sums. The absolute value prevents that. No t is positive.
    """
    return [jnp.abs(a) for a in _sums_from(part, shift, scale)]


def of_magnitudes(kind: type[Sums], m: jax.Array, d: jax.Array, *minus_t: jax.Array) -> Sums:
    return kind(m, d, *(-a for a in minus_t))


def if_largest(position: jax.Array, x: jax.Array, m: jax.Array) -> jax.Array:
    """Returns the position where x equals its maximum m, or is NaN; elsewhere the last position there is.

    So the minimum is the first position of the maximum.
    """
    is_float = jnp.issubdtype(position.dtype, jnp.floating)
    last = jnp.asarray(jnp.inf if is_float else jnp.iinfo(position.dtype).max, position.dtype)
    return jnp.where((x == m) | (x != x), position, last)


def combine_parts(parts: Sums, temperature: Temperature | None = None) -> Sums:
    """Merges normalizers along the last axis, which stays with size 1. A temperature of None is 1."""
    m = largest(parts.m)
    sums = [_sums_from(part, shift(m), temperature) for part in split_if_few(parts)]
    return type(parts)(m, *(reduce_split(operator.add, terms) for terms in zip(*sums)))


def largest(x: jax.Array) -> jax.Array:
    """Returns the maximum along the last axis, (..., 1), of subnormal numbers too: XLA for CPUs takes them for 0."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return reduce_split(jnp.maximum, split_if_few(x))
    keys = (sort_keys.key(jnp.where(jnp.isnan(part), jnp.nan, part)) for part in split_if_few(x))
    return sort_keys.from_key(reduce_split(jnp.maximum, keys), x.dtype)


_REDUCTIONS = {operator.add: jnp.sum, jnp.maximum: jnp.max, jnp.minimum: jnp.min}


def split_if_few(arrays: Any) -> list:
    """Splits a tree of arrays (..., n) into n trees of arrays (..., 1); into one if n is above `_FEW` or symbolic."""
    n = jax.tree.leaves(arrays)[0].shape[-1]
    if not isinstance(n, int) or not 0 < n <= _FEW:
        return [arrays]
    leaves, tree = jax.tree.flatten(arrays)
    return [tree.unflatten([a[..., i : i + 1] for a in leaves]) for i in range(n)]


def reduce_split(join: Callable, parts: Iterable[jax.Array]) -> jax.Array:
    """Returns the sum, maximum or minimum of what `split_if_few` returned, (..., 1). `join` takes two elements."""
    joined = functools.reduce(join, parts)
    return joined if joined.shape[-1] == 1 else _REDUCTIONS[join](joined, -1, keepdims=True)


def tree_sum(terms: Iterable[jax.Array]) -> jax.Array:
    """Returns the sum of several arrays. Added in pairs, each is rounded fewer times than one after another."""
    return tree(operator.add, list(terms))


def tree(join: Callable, terms: Sequence[Any]) -> Any:
    """Joins the terms in pairs, and the pairs in pairs."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return join(tree(join, terms[:half]), tree(join, terms[half:]))


# ---- The dtype of the arithmetic


def float_dtype(dtype: Any) -> Any:
    """Returns the dtype of jnp.exp(x) for x of this dtype. JAX promotes int32 to float32, and int64 to float64."""
    return jax.eval_shape(jnp.exp, jax.ShapeDtypeStruct((), dtype)).dtype


def widen(x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype of the arithmetic: float32, or its own dtype if that is wider or complex."""
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def to_float(
    x: jax.Array, axes: Sequence[int], where: jax.Array | None = None, mesh_axes: Sequence[str] = ()
) -> jax.Array:
    """Returns floats with the same softmax as `x` along `axes`. Integers become exact distances from their maximum."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    dtype = float_dtype(x.dtype)
    m = jnp.max(x, axes, keepdims=True, where=where, initial=jnp.iinfo(x.dtype).min)
    m = lax.pmax(m, tuple(mesh_axes)) if mesh_axes else m
    # The difference does not overflow in this dtype. int8 does not use uint8, since XLA for CPUs may convert negative
    # numbers to 0 there.
    wide = jnp.int32 if x.dtype.itemsize < 4 else jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return -(m.astype(wide) - x.astype(wide)).astype(dtype)
