"""Arrays of any rank as rows, for the kernels: the reduced axes made one, the last; the others the rows."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class MaskRows:
    """Which row of the mask belongs to a row: the sum of (row // after % size) * stride over the terms."""

    terms: tuple[tuple[int, int, int], ...]

    def __call__(self, row):
        """The mask's row."""
        return sum((row // after % size * stride for after, size, stride in self.terms), row * 0)


class Mask(NamedTuple):
    """Which elements of (rows, vocab) count.

    Attributes:
      array: boolean, (mask rows, vocab or 1).
      row: which of its rows belongs to a row.
    """

    array: jax.Array
    row: MaskRows


def mask_rows(mask: tuple[int, ...], batch: tuple[int, ...]) -> MaskRows:
    """For a mask whose dimensions but the row's are `mask`, each 1 or that of `batch`."""
    terms = []
    after = stride = 1
    for size, dimension in zip(mask[::-1], batch[::-1]):
        if size > 1:
            terms.append((after, size, stride))
            stride *= size
        after *= dimension
    if stride == after:  # no dimension is broadcast
        terms = [(1, max(after, 1), 1)]
    return MaskRows(tuple(terms))


def fold_mask(where, shape: tuple[int, ...], batch: int) -> Mask | None:
    """Of an array of this shape, whose first `batch` dimensions are its rows', and which `where` broadcasts to."""
    if where is None:
        return None
    of_batch, of_row = where.shape[:batch], where.shape[batch:]
    if any(n > 1 for n in of_row):  # along the row it is whole, or one
        where = jnp.broadcast_to(where, (*of_batch, *shape[batch:]))
    return Mask(where.reshape(math.prod(of_batch), -1), mask_rows(of_batch, shape[:batch]))


def fold(
    arrays: Sequence[jax.Array], where, axes: tuple[int, ...]
) -> tuple[list[jax.Array], Mask | None, Callable]:
    """The arrays as (rows, vocab), the mask, and what gives a result, of all elements or one a row, their rank.

    Args:
      arrays: of one shape. Where `axes` are not their last ones, they are transposed.
      where: None, or a boolean of their rank that broadcasts to them.
      axes: those of a row.
    """
    shape = arrays[0].shape
    batch = tuple(a for a in range(len(shape)) if a not in axes)
    order = (*batch, *axes)
    turned = tuple(shape[a] for a in order)
    vocab = math.prod(turned[len(batch) :])
    mask = fold_mask(None if where is None else where.transpose(order), turned, len(batch))

    def unfold(out):
        kept = turned[len(batch) :] if out.size == arrays[0].size else (1,) * len(axes)
        return out.reshape(*turned[: len(batch)], *kept).transpose(
            [order.index(a) for a in range(len(shape))]
        )

    return [a.transpose(order).reshape(-1, vocab) for a in arrays], mask, unfold


def fold_topk(logits: jax.Array, where, temperature: jax.Array) -> tuple:
    """As `fold` over the last axis of one array, with the temperatures between: (rows,), or (1,) for one of all."""
    *batch, vocab = logits.shape
    if temperature.size > 1:
        temperature = jnp.broadcast_to(temperature, (*batch, 1))
    mask = fold_mask(where, logits.shape, len(batch))
    return (
        logits.reshape(-1, vocab),
        mask,
        temperature.reshape(-1),
        lambda out: out.reshape(*batch, out.shape[-1]),
    )
