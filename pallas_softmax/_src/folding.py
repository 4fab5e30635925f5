"""Folds arrays of any rank, and their masks, into rows (rows, vocab) for the kernels.

The reduced axes become the last axis. All other axes together become the rows. With axes = (1, 3):

    array       (b, s, h, v)   --transpose-->  (b, h, s, v)   --reshape-->  (b * h, s * v)
    axes             s     v                    batch  axes                 rows    vocab
    mask        (1, s, h, v)   --transpose-->  (1, h, s, v)   --reshape-->  (h,     s * v)
    result      (b, 1, h, 1)  <--transpose--   (b, h, 1, 1)  <--reshape--   (b * h, 1)

A mask that is broadcast along batch dimensions stays small: it has fewer rows than the array.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Why the kernels of rows are not chosen for rows that are not contiguous in memory.
TRANSPOSED = "slower than xla where the row is not the last axes: it is transposed, twice"


@dataclasses.dataclass(frozen=True)
class MaskRows:
    """Maps a row to its row of the mask: the sum of (row // after % size) * stride over the terms.

    Row number `row` has the index row // after % size in each batch dimension. `after` is the product of the batch
    dimensions that follow. Only dimensions that the mask does not broadcast have a term. For an array with batch
    dimensions (4, 2, 3) and a mask with batch dimensions (4, 1, 3):

        batch dimension     4                    2            3
        after               6                    3            1
        term                (row // 6 % 4) * 3   broadcast    (row // 1 % 3) * 1
    """

    terms: tuple[tuple[int, int, int], ...]  # (after, size, stride) for each dimension that is not broadcast

    def __call__(self, row) -> Any:
        return sum((row // after % size * stride for after, size, stride in self.terms), row * 0)


class Mask(NamedTuple):
    """A mask of an array (rows, vocab): it says which elements count."""

    array: jax.Array  # (mask rows, vocab), or (mask rows, 1) if each row counts as a whole or not at all
    row: MaskRows  # maps a row to its row of `array`


def mask_rows(mask: tuple[int, ...], batch: tuple[int, ...]) -> MaskRows:
    """Returns the map from a row of an array to its row of the mask, given the batch dimensions of both."""
    terms = []
    after = stride = 1
    for size, dimension in zip(mask[::-1], batch[::-1]):
        if size > 1:
            terms.append((after, size, stride))
            stride *= size
        after *= dimension
    if stride == after:  # no dimension is broadcast: row i has row i of the mask
        terms = [(1, max(after, 1), 1)]
    return MaskRows(tuple(terms))


def fold_mask(where, shape: tuple[int, ...], batch: int) -> Mask | None:
    """Returns the mask of an array of this shape, or None. The first `batch` dimensions become the rows.

    Each dimension of `where` is 1 or the array's dimension.
    """
    if where is None:
        return None
    batch_shape, row_shape = where.shape[:batch], where.shape[batch:]
    if any(size > 1 for size in row_shape):  # a row of the mask must be whole, or one element
        where = jnp.broadcast_to(where, (*batch_shape, *shape[batch:]))
    return Mask(where.reshape(math.prod(batch_shape), -1), mask_rows(batch_shape, shape[:batch]))


def fold(
    arrays: Sequence[jax.Array], where, axes: tuple[int, ...]
) -> tuple[list[jax.Array], Mask | None, Callable[[jax.Array], jax.Array]]:
    """Returns arrays of one shape as arrays of rows (rows, vocab); their mask; and a function that unfolds a result.

    `where` is None, or a boolean of their rank that broadcasts to them. The function restores the rank of a result, of
    any shape, that has all elements, or n numbers for each row. With n numbers, the last reduced axis gets size n, and
    the others size 1.
    """
    shape = arrays[0].shape
    batch = tuple(a for a in range(len(shape)) if a not in axes)
    order = (*batch, *axes)
    transposed = tuple(shape[a] for a in order)
    batch_shape, row_shape = transposed[: len(batch)], transposed[len(batch) :]
    vocab = math.prod(row_shape)
    mask = fold_mask(None if where is None else where.transpose(order), transposed, len(batch))

    def unfold(result):
        n = result.size // max(1, math.prod(batch_shape))
        kept = row_shape if n == vocab else (*(1,) * (len(axes) - 1), n)
        back = [order.index(a) for a in range(len(shape))]
        return result.reshape(*batch_shape, *kept).transpose(back)

    return [a.transpose(order).reshape(-1, vocab) for a in arrays], mask, unfold


def fold_numbers(a: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns numbers per row (..., n) as (rows, n). Where all slices of a vmap share them, they have size 1."""
    return jnp.broadcast_to(a, (*batch, a.shape[-1])).reshape(math.prod(batch), -1)


def one_per_row(a: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns one number for each row of the batch, (rows,), or one for all, (1,)."""
    return (fold_numbers(a, batch) if a.size > 1 else a).reshape(-1)


def fold_topk(logits: jax.Array, where, temperature: jax.Array | None) -> tuple:
    """Returns the results of `fold` along the last axis, with the temperatures, (1,) or (rows,), in the third place.

    `temperature` has one element, or one for each row (..., 1), or is None.
    """
    (x,), mask, unfold = fold([logits], where, (logits.ndim - 1,))
    return x, mask, None if temperature is None else one_per_row(temperature, logits.shape[:-1]), unfold
