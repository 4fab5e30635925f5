"""The logits at several labels of each row, picked out of the tiles of a product in registers.

The labels of a row are sorted, so each tile has consecutive ones:

    sorted labels of a row     3   90 | 300  310  500 | 1000 ..          tiles of 256 columns
    first[tile]                0        2               5

In turn i, a tile picks label first + i of all its rows at once. The row with the most labels in the tile determines the
number of turns. There are one or two turns per tile for K = 64 random labels of 128,256 columns.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax._src.gpu.blocks import load_as
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.ptx import predicated
from pallas_softmax._src.gpu.ptx.inline import REF, array, elements, inline
from pallas_softmax._src.linear.plan import TILE_N, WARPGROUP_ROWS
from pallas_softmax._src.linear.product import Place
from pallas_softmax._src.masks import is_column

_NO_COLUMN = 2**30  # after all columns; its int32 distance to a column cannot overflow


class SeveralLabels(NamedTuple):
    """The sorted labels of each row, and where the labels in a tile begin: int32 arrays."""

    column: Any  # (rows * K,), row by row; _NO_COLUMN for a label that is no column
    first: Any  # (tiles + 1, rows), the position in `column` of a row's first label in a tile or after it
    turns: Any  # (groups of 64 rows, tiles), the most labels that a row of the group has in the tile


def sorted_labels(labels: jax.Array, columns: int, vocab: int, rows: int) -> SeveralLabels:
    """Returns labels (n, K) for a product with this number of columns and rows.

    The product has at least n rows; the rows after these have no labels. A label outside of [0, vocab) is no column.
    """
    n, k = labels.shape
    column, _ = _sorted(labels, vocab)
    column = jnp.pad(column, ((0, rows - n), (0, 0)), constant_values=_NO_COLUMN)
    tiles = -(-columns // TILE_N)
    before = _count_before(column, jnp.arange(tiles + 1, dtype=jnp.int32) * TILE_N)
    turns = jnp.max(jnp.diff(before, axis=1).reshape(-1, WARPGROUP_ROWS, tiles), 1)
    first = before + k * jnp.arange(rows, dtype=jnp.int32)[:, None]
    return SeveralLabels(column.ravel(), first.T, turns)


def _count_before(labels: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns how many sorted labels of each row are less than each start: int32 (rows, starts), by binary search.

    XLA's GPU compiler did not terminate for a sum of comparisons. jax 0.12 cannot lower `jnp.searchsorted` here.
    """
    k = labels.shape[1]
    steps = k.bit_length()

    def step(i, count):
        more = jnp.minimum(count + (2 ** (steps - 1) >> i).astype(jnp.int32), k)
        last = jnp.take_along_axis(labels, more - 1, 1, mode="promise_in_bounds")
        return jnp.where(last < starts[None], more, count)

    return lax.fori_loop(0, steps, step, jnp.zeros_like(labels, shape=(len(labels), len(starts))))


def in_given_order(picked: jax.Array, labels: jax.Array, vocab: int) -> jax.Array:
    """Returns the logits at labels (n, K), 0 for a label that is no column. `pick_logits` has written `picked`."""
    column, position = _sorted(labels, vocab)
    picked = jnp.where(column < vocab, picked[: labels.size].reshape(labels.shape), 0)
    return lax.sort((position, picked), num_keys=1)[1]


def _sorted(labels: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    labels = jnp.where(is_column(labels, vocab), labels, _NO_COLUMN)
    in_order, positions = lax.sort((labels, lax.broadcasted_iota(jnp.int32, labels.shape, 1)), num_keys=1)
    return in_order, positions


# ---- In the kernel


def pick_logits(z, labels: SeveralLabels, place: Place, column, picked_gmem) -> None:
    """Writes the logits z at all labels that are in this part of the product to `picked_gmem`, like `labels.column`.

    `column` is the column number of each element within the part.
    """
    rows = pl.ds(place.row, WARPGROUP_ROWS)
    turns = labels.turns[place.row // WARPGROUP_ROWS, place.tile]

    @pl.when(turns > 0)
    def _():
        first, end = (load_as(labels.first.at[place.tile + i, rows], ROW_LAYOUT) for i in range(2))

        def turn(i, carry):
            at = first + i
            own = lax.broadcast_in_dim(_labels_at(labels.column, at, end) - place.column, z.shape, (0,))
            _store(picked_gmem, at, end, jnp.sum(jnp.where(column == own, z, 0.0), axis=1))
            return carry

        lax.fori_loop(0, turns, turn, None)


ROW_LAYOUT: Any = plgpu.Layout.WGMMA.reduce(1)  # one number per row


@twin
def _labels_at(gmem, at, end):
    """Returns the labels at these positions, one per row; an arbitrary number if a position is not before `end`."""
    result = plgpu.ShapeDtypeStruct(at.shape, jnp.dtype("int32"), layout=ROW_LAYOUT)

    @inline(arg_types=(REF, ROW_LAYOUT, ROW_LAYOUT), return_type=result)
    def labels_at(_, gmem, at, end):
        pointer, i32 = utils.memref_ptr(gmem), ir.IntegerType.get_signless(32)
        places = zip(at.registers.flat, end.registers.flat)
        found = [predicated.load_vector(pointer, i32, 1, *_offset_and_inside(*place)) for place in places]
        return array(ROW_LAYOUT.to_mgpu(), at.shape, found)

    return labels_at(gmem, at, end)


@twin
def _store(gmem, at, end, values) -> None:
    """Writes one number per row to its position, if that is before `end`."""

    @inline(arg_types=(REF, ROW_LAYOUT, ROW_LAYOUT, ROW_LAYOUT))
    def store(_, gmem, at, end, values):
        for register, *place in zip(values.registers.flat, at.registers.flat, end.registers.flat):
            predicated.store_vector(utils.memref_ptr(gmem), register, *_offset_and_inside(*place))

    store(gmem, at, end, values)


def _offset_and_inside(at, end) -> tuple[Any, Any]:
    """Returns the 64-bit offset of a position, and whether it is before the end."""
    (at,), (end,) = elements(at), elements(end)
    inside = arith.cmpi(arith.CmpIPredicate.slt, at, end)
    return arith.extui(ir.IntegerType.get_signless(64), at), inside
