"""The online normalizer: the pair (m, d), its extension for the entropy, their operator ⊕, and merged top-k candidates.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), section 3.

The functions check their arguments. `_src/normalizers.py` has the arithmetic, which the kernels share.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_softmax._src import arguments, normalizers, sort_keys
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.normalizers import Moments, Normalizer, Sums, entropy

__all__ = ["Candidates", "Moments", "Normalizer", "combine", "entropy", "identity", "merge", "reduce", "scan"]


class Candidates(NamedTuple):
    """Winners of a part of the row: `values` (..., n) and their int32 `indices` (..., n) in the row."""

    values: jax.Array
    indices: jax.Array


@at_once("shape", "dtype", "of")
def identity(shape: Sequence[int] = (), dtype: "DTypeLike" = jnp.float32, *, of: type[Sums] = Normalizer) -> Sums:
    """Returns the normalizer of the empty set, neutral under `combine`: m = -inf, and sums of 0.

    Args:
      shape: shape of each field.
      dtype: floating or complex dtype of each field, one that has infinity.
      of: `Normalizer` or `Moments`.

    Raises:
      TypeError: `dtype` is another one, `shape` is not integers of at least 0, or `of` is neither `Normalizer` nor
        `Moments`.

    Examples:
      >>> ps.online.identity()
      Normalizer(m=Array(-inf, dtype=float32), d=Array(0., dtype=float32))
    """
    _check_of("identity", of)
    try:
        has_infinity = dtype is not None and np.isinf(np.array(np.inf, jnp.zeros((), dtype).dtype))
    except (TypeError, OverflowError):  # no dtype of JAX, or one of integers
        has_infinity = False
    if not has_infinity:
        raise TypeError(f"online.identity: dtype must be a floating or complex one with infinity, got {dtype}")
    try:
        m = jnp.full(shape, -jnp.inf, dtype)
    except (TypeError, ValueError):
        raise TypeError(f"online.identity: shape must be integers of at least 0, got {shape!r}") from None
    return of._make((m, *(jnp.zeros_like(m) for _ in of._fields[1:])))


@at_once()
def combine(a: Sums, b: Sums, *, scale: "ArrayLike | None" = None) -> Sums:
    """The operator ⊕ (paper, equation 4): returns the normalizers of the unions of sets of logits.

    It is associative and commutative. t merges as exp(m' - m) (t' + (m' - m) d'), where m' is the part's maximum.

    Args:
      a: `Normalizer`s or `Moments` of sets of logits, one for each element of the fields.
      b: the same of other sets. All fields broadcast to one shape.
      scale: 1 / temperature, if the logits are divided by one: d is then the sum of exp((x - m) scale). It broadcasts
        like the fields, and takes their dtype.

    Raises:
      TypeError: `a` or `b` is neither a `Normalizer` nor `Moments`, or they differ; a field is not a floating or
        complex array; or `scale` is not a real number or an array of real numbers.
      ValueError: the fields and `scale` do not broadcast to one shape.

    Examples:
      >>> a = ps.online.reduce(jnp.ones(3))  # m = 1, d = 3
      >>> ps.online.combine(a, a)
      Normalizer(m=Array([1.], dtype=float32), d=Array([6.], dtype=float32))
    """
    if not isinstance(a, Normalizer | Moments):
        raise TypeError(f"online.combine: a must be a Normalizer or Moments, got {a!r}")
    if type(b) is not type(a):
        wanted = "Moments" if isinstance(a, Moments) else "a Normalizer"
        raise TypeError(f"online.combine: b must be {wanted}, got {b!r}")
    for name, pair in (("a", a), ("b", b)):
        for field, value in zip(pair._fields, pair):
            if isinstance(value, int | float | complex):
                arguments.check_array("online.combine", f"{name}.{field}", value)
            else:
                _floats("combine", f"{name}.{field}", value)
    if scale is not None:
        scale = arguments.real_array("online.combine", "scale", scale, "a real number or an array of real numbers")
        scale = scale.astype(jnp.finfo(normalizers.float_dtype(jnp.result_type(a.m))).dtype)  # float32 for complex64
    shapes = [*map(jnp.shape, jax.tree.leaves((a, b, scale)))]
    try:
        shape = jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"online.combine: the fields of a and b, and scale, must broadcast, got the shapes {shapes}"
        ) from None
    a, b, scale = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), (a, b, scale))
    return normalizers.combine(a, b, scale=scale)


def _floats(function: str, name: str, value) -> jax.Array:
    value = arguments.array(f"online.{function}", name, value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(f"online.{function}: {name} must be a floating or complex array, got {value.dtype}")
    return value


def _check_of(function: str, of) -> None:
    if of is not Normalizer and of is not Moments:
        raise TypeError(f"online.{function}: of must be Normalizer or Moments, got {of!r}")


@at_once("axis", "of")
def scan(x: "ArrayLike", axis: int = -1, *, of: type[Sums] = Normalizer) -> Sums:
    """Returns the normalizer of every prefix of `x` along `axis`, by `lax.associative_scan`.

    Args:
      x: logits of a floating dtype. The sums have the same dtype, so convert 16-bit logits to float32 first.
      axis: the axis of a row.
      of: `Normalizer` or `Moments`.

    Returns:
      Normalizers with the shape and dtype of `x` in each field. Element i along `axis` covers the elements 0 to i.

    Raises:
      TypeError: `x` is not an array of a floating dtype, `axis` is not an int, or `of` is neither `Normalizer` nor
        `Moments`.
      ValueError: `axis` is out of range.

    Examples:
      >>> ps.online.scan(jnp.ones(3))
      Normalizer(m=Array([1., 1., 1.], dtype=float32), d=Array([1., 2., 3.], dtype=float32))
    """
    _check_of("scan", of)
    x, (axis,) = _row_axes("scan", x, arguments.static_int("online.scan", "axis", axis))
    if not jnp.isrealobj(x):
        raise TypeError(f"online.scan: x must be a floating array, got {x.dtype}")
    d = jnp.exp(x - normalizers.shift(x))  # of each logit by itself: 1 if it is finite
    single = of._make((x, d, 0 * d)[: len(of._fields)])
    return lax.associative_scan(normalizers.combine, single, axis=axis)


@at_once("axis", "chunk", "of")
def reduce(
    x: "ArrayLike",
    axis: int | Sequence[int] = -1,
    where: jax.Array | None = None,
    *,
    chunk: int = normalizers.CHUNK,
    of: type[Sums] = Normalizer,
) -> Sums:
    """Returns the normalizer of each row of `x` along `axis`.

    Long rows are cut into chunks. Each chunk is reduced directly. `lax.associative_scan` runs only over the chunks'
    normalizers, never over the elements.

    Args:
      x: logits of a floating or a complex dtype.
      axis: the axis or axes of a row.
      where: boolean, broadcastable to `x`; False leaves the logit out.
      chunk: the largest number of elements along an axis that are reduced directly, at least 1.
      of: `Normalizer` or `Moments`.

    Returns:
      Normalizers with the shape of `x` in each field, except size 1 along `axis`. Their dtype is float32 for 8-bit and
      16-bit floats, else the dtype of `x`. A row without elements gives `identity`.

    Raises:
      TypeError: `x` is not an array of a floating or a complex dtype, `where` is not an array, `axis` or `chunk` is
        not an integer, or `of` is neither `Normalizer` nor `Moments`.
      ValueError: an axis is out of range, or is given twice; `where` is not boolean or does not broadcast to `x`; or
        `chunk` is 0 or negative.

    Examples:
      >>> ps.online.reduce(jnp.ones(3))
      Normalizer(m=Array([1.], dtype=float32), d=Array([3.], dtype=float32))
    """
    _check_of("reduce", of)
    x, axes = _row_axes("reduce", x, axis)
    if arguments.static_int("online.reduce", "chunk", chunk) < 1:
        raise ValueError(f"online.reduce: chunk must be at least 1, got {chunk}")
    x = normalizers.widen(x)
    if where is not None:
        x = jnp.where(arguments.mask("online.reduce", where, x.shape), x, -jnp.inf)
    return normalizers.reduce(x, axes, chunk=chunk, of=of)


def _row_axes(function: str, x: ArrayLike, axis: int | Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
    x = _floats(function, "x", x)
    if axis is None:
        raise TypeError(f"online.{function}: axis must be an int or a sequence of ints, got None")
    return x, arguments.normalized_axes(f"online.{function}", axis, x.ndim)


@at_once("k")
def merge(a: Candidates, b: Candidates, k: int) -> Candidates:
    """Returns the k best of two candidate lists along the last axis, by the total order and then the lowest index.

    Args:
      a: the candidates of a part of the row.
      b: the same of another part, with values of the same dtype. Their shapes differ in the last dimension at most.
      k: number of winners, at most the candidates of both lists.

    Raises:
      TypeError: `a` or `b` is not a pair, values are not real numbers or bools, indices are not integers, or are uint32
        or uint64, the dtypes of the values differ, or `k` is not an integer.
      ValueError: `k` is out of range, or the shapes do not fit.

    Examples:
      >>> a = ps.online.Candidates(jnp.array([9, 7]), jnp.array([1, 2]))
      >>> b = ps.online.Candidates(jnp.array([8, 3]), jnp.array([5, 4]))
      >>> ps.online.merge(a, b, 2)
      Candidates(values=Array([9, 8], dtype=int32), indices=Array([1, 5], dtype=int32))
    """
    lists = [_candidates("a", a), _candidates("b", b)]
    dtypes, shapes = [v.dtype for v, _ in lists], [(v.shape, i.shape) for v, i in lists]
    if dtypes[0] != dtypes[1]:
        raise TypeError(f"online.merge: a.values and b.values must have one dtype, got {dtypes[0]} and {dtypes[1]}")
    if any(not v or v != i or v[:-1] != shapes[0][0][:-1] for v, i in shapes):
        raise ValueError(f"online.merge: values and indices must fit, each (..., n), got the shapes {shapes}")
    k = arguments.winners("online.merge", k, sum(v[-1] for v, _ in shapes))
    is_narrow = jnp.issubdtype(dtypes[0], jnp.integer) and jnp.iinfo(dtypes[0]).bits < 8
    if is_narrow:  # XLA for CPUs cannot join or sort these
        lists = [(v.astype(jnp.int8), i) for v, i in lists]
    values, indices = (jnp.concatenate(pair, axis=-1) for pair in zip(*lists))
    *_, values, indices = lax.sort((~sort_keys.key(values), indices, values, indices), num_keys=2)
    return Candidates(values[..., :k].astype(dtypes[0]), indices[..., :k])


def _candidates(name: str, given) -> tuple[jax.Array, jax.Array]:
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"online.merge: {name} must be Candidates, got {given!r}")
    values, indices = (arguments.array("online.merge", f"{name}.{of}", x) for of, x in zip(Candidates._fields, given))
    if values.dtype != bool:
        arguments.real_array("online.merge", f"{name}.values", values, "an array of real numbers or bools")
    if not jnp.issubdtype(indices.dtype, jnp.integer) or indices.dtype in (jnp.uint32, jnp.uint64):
        raise TypeError(f"online.merge: {name}.indices must be integers, int32 for example, got {indices.dtype.name}")
    return values, indices if indices.dtype.itemsize > 4 else indices.astype(jnp.int32)
