"""The online normalizer: the pair (m, d), its operator, and merging of top-k candidates.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), section 3. Plain
jax.numpy; every implementation, merge and mesh of this package computes with these definitions, but the Triton
kernels, whose language is not Python's: theirs are in triton/pieces.py.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Elements that XLA reduces directly (by a tree, so accurately) before the operator takes over.
_CHUNK = 2**16


class Normalizer(NamedTuple):
    """Running maximum and sum of exponentials of a set of logits (paper, section 3.1).

    Attributes:
      m: maximum of the logits; -inf for the empty set.
      d: sum of exp(x - m) over the set; 0 where m is -inf, NaN where a logit is +inf or NaN.
    """

    m: jax.Array
    d: jax.Array


class Candidates(NamedTuple):
    """Winners of a part of the row: `values` (..., n) and their int32 `indices` (..., n) in the row."""

    values: jax.Array
    indices: jax.Array


def identity(shape: Sequence[int] = (), dtype=jnp.float32) -> Normalizer:
    """The normalizer of the empty set, neutral under `combine`."""
    return Normalizer(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))


def lift(x: jax.Array) -> Normalizer:
    """The normalizer of each single logit."""
    return Normalizer(x, jnp.exp(x - shift(x)))


def shift(m: jax.Array) -> jax.Array:
    """What to subtract before exp: m, but 0 for m = -inf, so that exp(-inf - shift) is 0 and not NaN."""
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def widen(x: jax.Array) -> jax.Array:
    """`x` in the dtype of the arithmetic: float32, or its own where that is wider or complex."""
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def to_float(
    x: jax.Array, axes: Sequence[int], where: jax.Array | None = None, mesh_axes: Sequence[str] = ()
) -> jax.Array:
    """Logits with the softmax of `x`: of integers, their distance from the row's maximum, taken exactly.

    The row is spread over the mesh axes `mesh_axes`.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    dtype = jax.eval_shape(jnp.exp, x).dtype  # JAX's promotion: int32 gives float32, int64 float64
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")  # in which the difference does not overflow
    m = jnp.max(x, axes, keepdims=True, where=where, initial=jnp.iinfo(x.dtype).min)
    m = lax.pmax(m, tuple(mesh_axes)) if mesh_axes else m
    return -(m.astype(unsigned) - x.astype(unsigned)).astype(dtype)


def combine(a: Normalizer, b: Normalizer) -> Normalizer:
    """The operator ⊕ (paper, equation 4): the normalizer of the union. Associative and commutative."""
    m = jnp.maximum(a.m, b.m)
    s = shift(m)
    return Normalizer(m, a.d * jnp.exp(a.m - s) + b.d * jnp.exp(b.m - s))


def scan(x: jax.Array, axis: int = -1) -> Normalizer:
    """Normalizers of every prefix of `x` along `axis`, by `lax.associative_scan`; fields shaped like `x`."""
    return lax.associative_scan(combine, lift(x), axis=axis % x.ndim)


def reduce(
    x: jax.Array, axis: int | Sequence[int] = -1, where: jax.Array | None = None, *, chunk: int = _CHUNK
) -> Normalizer:
    """Normalizer of `x` over `axis` (one or several), whose dimensions stay with size 1.

    Long rows are cut into chunks; each is reduced directly and `lax.associative_scan` runs over the chunk
    pairs only, never over the elements. 16-bit and 8-bit floats are accumulated in float32.

    Args:
      x: logits of a floating dtype.
      axis: the axis or axes to reduce. An empty axis gives `identity`.
      where: boolean, broadcastable to `x`; False leaves the logit out.
      chunk: the elements of an axis that are reduced directly.
    """
    axes = tuple(a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    x = widen(x)
    if where is not None:
        x = jnp.where(where, x, -jnp.inf)
    split = max(axes, key=lambda a: x.shape[a], default=None)
    if split is None or x.shape[split] <= chunk:
        return _reduce(x, axes)

    chunks, left = divmod(x.shape[split], chunk)
    head = lax.slice_in_dim(x, 0, chunks * chunk, axis=split)
    head = head.reshape(*x.shape[:split], chunks, chunk, *x.shape[split + 1 :])
    within = tuple(a + (a >= split) for a in axes)  # axes of head, the chunk axis left out
    parts = jax.tree.map(lambda f: jnp.squeeze(f, split + 1), _reduce(head, within))
    total = lax.associative_scan(combine, parts, axis=split)
    total = jax.tree.map(lambda f: lax.slice_in_dim(f, chunks - 1, chunks, axis=split), total)
    if not left:
        return total
    return combine(total, _reduce(lax.slice_in_dim(x, chunks * chunk, None, axis=split), axes))


def _reduce(x: jax.Array, axes: tuple[int, ...]) -> Normalizer:
    m = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
    total = jnp.sum(jnp.exp(x - jnp.where(jnp.isinf(m), 0, m)), axes, keepdims=True)
    m = jnp.where(jnp.isnan(total), jnp.nan, m)  # XLA's maximum on the CPU loses the NaNs of long rows
    return Normalizer(m, jnp.where(m == jnp.inf, jnp.nan, total))


def exponentials(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """exp(x - m) for the maximum m over `axes`, and its sum; NaN where m is -inf.

    Nothing else may use m or select in between if XLA is to fuse the maximum with the exponentials.
    """
    e = jnp.exp(x - jnp.max(x, axes, keepdims=True, initial=-jnp.inf))
    return e, jnp.sum(e, axes, keepdims=True)


def sort_key(x: jax.Array) -> jax.Array:
    """Signed integers in lax.top_k's total order of `x`: +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return _turn(lax.bitcast_convert_type(x, jnp.dtype(f"int{x.dtype.itemsize * 8}")))


def of_sort_key(key: jax.Array, dtype) -> jax.Array:
    """The floats with these sort keys."""
    return lax.bitcast_convert_type(_turn(key), dtype)


def _turn(bits: jax.Array) -> jax.Array:
    """Negative floats, as integers, descend: turned round they ascend, and the other way."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def weights(
    logits: jax.Array, normalizer: Normalizer, temperature: jax.Array, log: bool = False
) -> jax.Array:
    """The softmax of some logits of a row, or its log; d is the sum of exp((x - m) / temperature)."""
    scaled = (logits - normalizer.m) / temperature
    return scaled - jnp.log(normalizer.d) if log else jnp.exp(scaled) / normalizer.d


def total(x: jax.Array, axes: Sequence[int], mesh_axes: Sequence[str] = ()) -> jax.Array:
    """The sum over `axes`, whose dimensions stay, and over the mesh axes that the row is spread over."""
    part = jnp.sum(x, axes, keepdims=True)
    return lax.psum(part, tuple(mesh_axes)) if mesh_axes else part


def union(part: Normalizer, mesh_axes: Sequence[str]) -> Normalizer:
    """⊕ over mesh axes: of the normalizers of the parts of a row that is spread over them, that of the row."""
    # as integers, for the maximum of floats may lose a NaN on its way
    keys = sort_key(jnp.where(jnp.isnan(part.m), jnp.nan, part.m))
    m = of_sort_key(lax.pmax(keys, tuple(mesh_axes)), part.m.dtype)
    return Normalizer(m, lax.psum(part.d * jnp.exp(part.m - shift(m)), tuple(mesh_axes)))


def merge_normalizers(parts: Normalizer, temperature: jax.Array) -> Normalizer:
    """⊕ along the last axis, which stays with size 1; d is the sum of exp((x - m) / temperature)."""
    m = jnp.max(parts.m, -1, keepdims=True)
    return Normalizer(m, jnp.sum(parts.d * jnp.exp((parts.m - shift(m)) / temperature), -1, keepdims=True))


def take(where: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
    """The mask, which broadcasts to `x`, at indices of the last axis."""
    return jnp.take_along_axis(jnp.broadcast_to(where, x.shape), indices, -1)


def merge(a: Candidates, b: Candidates, k: int) -> Candidates:
    """The k best of two candidate lists along the last axis: total order, then the lowest index."""
    values, indices = (jnp.concatenate(pair, axis=-1) for pair in zip(a, b, strict=True))
    *_, values, indices = lax.sort((~sort_key(values), indices, values, indices), num_keys=2)
    return Candidates(values[..., :k], indices[..., :k])


def absorb(normalizer: Normalizer, blocks, scale=None) -> Normalizer:
    """Each lane's normalizer with its elements of `blocks` added: ⊕ with one rescaling of d for all.

    With `scale`, d is the sum of exp((x - m) scale).
    """
    m = normalizer.m
    for x in blocks:
        m = jnp.maximum(m, x)
    s = shift(m)
    return Normalizer(
        m, normalizer.d * _exp(normalizer.m - s, scale) + tree_sum(_exp(x - s, scale) for x in blocks)
    )


def tree_sum(terms):
    """The sum of several blocks, with fewer roundings on the way of each term than one by one."""
    return tree(operator.add, list(terms))


def tree(merge, terms):
    """The terms merged in pairs, and pairs of pairs."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return merge(tree(merge, terms[:half]), tree(merge, terms[half:]))


def across(lane: Normalizer, axis=None, spread=None, scale=None) -> Normalizer:
    """⊕ over the lanes of a block, or along an axis of a tile.

    Args:
      lane: the normalizer of each lane.
      axis: None reduces all lanes to scalars.
      spread: with an axis, how its reduction is broadcast back to the tile.
      scale: as for `absorb`.
    """
    m = jnp.max(lane.m, axis)
    s = shift(m) if spread is None else spread(shift(m))
    return Normalizer(m, jnp.sum(lane.d * _exp(lane.m - s, scale), axis))


def _exp(x, scale):
    return jnp.exp(x if scale is None else x * scale)
