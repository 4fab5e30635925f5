"""Tiles: short rows in registers (see `layout.Tile`), and their loads and stores in device memory.

A tile may reach beyond the array, and Pallas has no loads and stores under a predicate, so these are inline PTX. Each
function also has a plain JAX version for the interpreter.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax._src.folding import MaskRows
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.ptx import predicated as predicated_ptx
from pallas_softmax._src.gpu.ptx.inline import (
    REF,
    SCALAR,
    array,
    elements,
    emit_ptx,
    i32,
    inline,
    pack,
    scalar,
    thread,
)
from pallas_softmax._src.gpu.ptx.values import WHOLE_WARP, Program


def layout(tile: Tile) -> Any:
    """Returns the layout of a tile in registers, as drawn in `layout.Tile`."""
    lanes, vec = tile.lanes, tile.vec
    if lanes > 32:  # a step of a row is cut into a piece for each warp, and a vector for each lane
        tiling, warp_dims, lane_dims = ((1, lanes * vec), (LANES * vec,), (vec,)), (-3,), (-2,)
    else:  # each of four warps takes 32 / lanes rows; a lane has one row, and a vector of each step
        rows = LANES // lanes
        tiling = ((4 * rows, lanes * vec), (rows, lanes * vec), (1, vec))
        warp_dims, lane_dims = (-6,), (-4, -3)
    canonical = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiling), warp_dims, lane_dims, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        canonical.tiling, canonical.warp_dims, canonical.lane_dims, canonical.vector_dim
    )


def load(ref, tile: Tile, row, fill, *, ref_row=lambda row: row, interpret):
    """Returns the rows of an array (rows, vocab) from `row` on as a tile, with `fill` beyond its end.

    `ref_row` maps a row of the tile to its row of the array.
    """
    rows, vocab = ref.shape
    if interpret:
        i, j = _indices(tile, row)
        i = ref_row(i)
        inside = (i < rows) & (j < vocab)
        return jnp.where(inside, ref[...][jnp.where(inside, i, 0), jnp.where(inside, j, 0)], fill)

    @inline(arg_types=(REF, SCALAR), return_type=type_of(tile, ref.dtype))
    def load(_, ref, row):
        pointer, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        registers = []
        for place in places(tile, scalar(row)):
            at = ref_row(_RowNumber(place.row)).value
            offset = predicated_ptx.offset_of(at, vocab, place.first_column)
            inside = _inside(at, rows, place.column, vocab)
            registers.append(
                predicated_ptx.load_vector(pointer, element, tile.vec, offset, inside, fill, step=place.step)
            )
        return array(layout(tile).to_mgpu(), tile.shape, registers)

    return load(ref, row)


def gather(ref, tile: Tile, row, column, *, rows: int, ref_row=lambda row: row, blocked=False, interpret):
    """Returns the elements of an array in device memory at the columns in a tile of `vec` 1.

    Args:
      ref: the array (its rows, columns). An array of a single column gives that column everywhere.
      row: number of the tile's first row.
      column: the tile of column numbers.
      rows: number of rows. Beyond them, and beyond the array's columns, the result is 0.
      ref_row: the function that maps a row to its row of the array.
      blocked: see `store`.
    """
    columns = ref.shape[1]
    if interpret:
        i, _ = _indices(tile, row)
        found = ref[...][jnp.where(i < rows, ref_row(i), 0), column if columns > 1 else 0]
        return jnp.where(i < rows, found, jnp.zeros_like(found))

    dtype = np.dtype("int8" if ref.dtype == jnp.bool_ else ref.dtype)

    @inline(arg_types=(REF, SCALAR, layout(tile)), return_type=type_of(tile, dtype))
    def gather(_, ref, row, column):
        pointer = utils.memref_ptr(ref)
        element = ir.IntegerType.get_signless(8) if dtype == "int8" else ir.MemRefType(ref.type).element_type
        registers = []
        spots = places(tile, scalar(row), blocked)
        for (at, *_), register in zip(spots, column.registers.flat, strict=True):
            of_column = elements(register)[0] if columns > 1 else i32(0)
            offset = predicated_ptx.offset_of(ref_row(_RowNumber(at)).value, columns, of_column)
            inside = _inside(at, rows, of_column, columns)
            registers.append(predicated_ptx.load_vector(pointer, element, 1, offset, inside))
        return array(layout(tile).to_mgpu(), tile.shape, registers)

    return gather(ref, row, column)


def load_per_row(ref, tile: Tile, row, *, interpret):
    """Loads one number per row, from `row` on, of an array (rows,); returns them broadcast along the rows of a tile."""
    (rows,) = ref.shape
    if interpret:
        i, _ = _indices(tile, row)
        return jnp.broadcast_to(ref[...][jnp.where(i < rows, i, 0)], tile.shape)

    @inline(arg_types=(REF, SCALAR), return_type=type_of(tile, ref.dtype))
    def load_per_row(_, ref, row):
        pointer, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        registers = []
        for at, *_ in places(tile, scalar(row)):
            inside = _inside(at, rows, i32(0), 1)
            offset = predicated_ptx.offset_of(at, 1, i32(0))
            (number,) = elements(predicated_ptx.load_vector(pointer, element, 1, offset, inside))
            registers.append(pack([number] * tile.vec))
        return array(layout(tile).to_mgpu(), tile.shape, registers)

    return load_per_row(ref, row)


def load_mask(ref, tile: Tile, row, shape: tuple[int, int], mask_row: MaskRows, *, interpret):
    """Returns the mask as a boolean tile for the rows from `row` on of an array of this shape; False beyond its end.

    Args:
      ref: the mask, boolean (mask rows, vocab or 1).
      mask_row: the map from a row to its row of the mask.
    """
    (rows, vocab), columns = shape, ref.shape[1]
    if interpret:
        i, j = _indices(tile, row)
        inside = (i < rows) & (j < vocab)
        return ref[...][jnp.where(inside, mask_row(i), 0), jnp.where(inside & (columns > 1), j, 0)] & inside

    @inline(arg_types=(REF, SCALAR), return_type=type_of(tile, "int8"))
    def load_mask(_, ref, row):
        pointer = utils.memref_ptr(ref)
        registers = []
        for at, column, *_ in places(tile, scalar(row)):
            inside = _inside(at, rows, column, vocab)
            of_mask = mask_row(_RowNumber(at)).value
            registers.append(predicated_ptx.load_mask(pointer, tile.vec, of_mask, column, columns, inside))
        return array(layout(tile).to_mgpu(), tile.shape, registers)

    return load_mask(ref, row) != 0


def store(ref, tile: Tile, row, value, *, blocked=False, interpret):
    """Writes a tile to the rows of an array (rows, vocab) from `row` on, without elements beyond its end.

    An array (rows, 1) gets the tile's first column.

    Args:
      blocked: whether the registers of a lane are neighbours in the row: lane 0 has columns 0 to steps - 1. The tile
        then has `vec` 1. Neighbours are written together as far as alignment allows.
    """
    (rows, vocab), itemsize = ref.shape, np.dtype(ref.dtype).itemsize
    value = value.astype(ref.dtype)
    if interpret:
        for i in range(tile.rows):

            @pl.when(row + i < rows)
            def _(i=i):
                ref[row + i] = value[i, :vocab]

        return

    @inline(arg_types=(REF, SCALAR, layout(tile)))
    def store(_, ref, row, value):
        pointer, vec = utils.memref_ptr(ref), min(tile.vec, vocab)
        spots, registers = list(places(tile, scalar(row), blocked)), list(value.registers.flat)
        if blocked:
            vec = math.gcd(vocab, tile.steps, ACCESS_BYTES // itemsize)
            together = [registers[i : i + vec] for i in range(0, len(registers), vec)]
            registers = [pack([elements(register)[0] for register in each]) for each in together]
            spots = spots[::vec]
        for place, register in zip(spots, registers, strict=True):
            offset = predicated_ptx.offset_of(place.row, vocab, place.first_column)
            inside = _inside(place.row, rows, place.column, vocab)
            predicated_ptx.store_vector(pointer, register, vec, offset, inside, step=place.step)

    store(ref, row, value)


def scatter(ref, tile: Tile, row, column, value, *, held: int, interpret):
    """Writes the values of a tile to given columns of an array (rows, vocab), after all earlier writes of the warp.

    Both tiles have `vec` 1.

    Args:
      row: number of the tile's first row.
      column: tile of column numbers, which must differ within a row.
      value: tile of the values to write there.
      held: number of columns of the tile to write, from the first one on.
    """
    rows, vocab = ref.shape
    value = value.astype(ref.dtype)
    if interpret:
        for i in range(tile.rows):

            @pl.when(row + i < rows)
            def _(i=i):
                ref[row + i] = ref[row + i].at[column[i, :held]].set(value[i, :held])

        return

    @inline(arg_types=(REF, SCALAR, layout(tile), layout(tile)))
    def scatter(_, ref, row, column, value):
        pointer = utils.memref_ptr(ref)
        emit_ptx(_warp_barrier(), {})
        registers = zip(column.registers.flat, value.registers.flat, strict=True)
        for (at, place, *_), (of_column, register) in zip(places(tile, scalar(row)), registers, strict=True):
            offset = predicated_ptx.offset_of(at, vocab, elements(of_column)[0])
            predicated_ptx.store_vector(pointer, register, 1, offset, _inside(at, rows, place, held))

    scatter(ref, row, column, value)


def _warp_barrier() -> Program:
    """Returns a barrier of the warp, which orders earlier writes of all lanes before later writes."""
    p = Program()
    p += f"bar.warp.sync {WHOLE_WARP};"
    return p


def spread(of_row, tile: Tile, out: Tile, *, interpret):
    """Broadcasts a tile with one number per row to the tile `out`. The rows of both tiles lie in the same lanes."""
    if interpret:
        return jnp.broadcast_to(of_row[:, :1], out.shape)

    @inline(arg_types=(layout(tile),), return_type=type_of(out, of_row.dtype))
    def spread(_, of_row):
        numbers = [elements(register)[0] for register in of_row.registers.flatten()[:: tile.steps]]
        registers = [pack([number] * out.vec) for number in numbers for _ in range(out.steps)]
        return array(layout(out).to_mgpu(), out.shape, registers)

    return spread(of_row)


def _indices(tile: Tile, row):
    """Returns row numbers (tile rows, 1) and column numbers (1, tile columns) of a tile, for the interpreter."""
    rows, columns = tile.shape
    return row + jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]


def type_of(tile: Tile, dtype) -> plgpu.ShapeDtypeStruct:
    """Returns the type of a tile, for inline code to return."""
    return plgpu.ShapeDtypeStruct(tile.shape, np.dtype(dtype), layout=layout(tile))


class Place(NamedTuple):
    """The place of a register in an array. Its column is `first_column`, which all steps share, plus `step`."""

    row: ir.Value
    column: ir.Value
    first_column: ir.Value
    step: int


def places(tile: Tile, row: ir.Value, blocked: bool = False) -> Iterator[Place]:
    """Yields the place of the first element of each register of this thread, in the layout's order of registers."""
    own, lanes = thread(), tile.lanes
    row = arith.addi(row, arith.divui(own, i32(lanes)))
    lane, of_step = arith.remui(own, i32(lanes)), 1 if blocked else tile.step_columns
    if tile.pieces > 1:
        column = arith.addi(
            arith.muli(arith.divui(lane, i32(lanes // tile.pieces)), i32(tile.piece_columns)),
            arith.muli(arith.remui(lane, i32(lanes // tile.pieces)), i32(tile.vec)),
        )
    else:
        column = arith.muli(lane, i32(tile.steps if blocked else tile.vec))
    for i in range(0, tile.rows, WARPGROUP // lanes):
        for step in range(0, tile.steps * of_step, of_step):
            yield Place(arith.addi(row, i32(i)), arith.addi(column, i32(step)), column, step)


def _inside(row: ir.Value, rows: int, column: ir.Value, columns: int) -> ir.Value:
    """Returns whether a row and a column are inside an array (rows, columns)."""
    less = arith.CmpIPredicate.ult
    return arith.andi(arith.cmpi(less, row, i32(rows)), arith.cmpi(less, column, i32(columns)))


class _RowNumber:
    """A row number in a register, with the operators that `folding.MaskRows` uses."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __floordiv__(self, other: int):
        return _RowNumber(arith.divui(self.value, i32(other)))

    def __mod__(self, other: int):
        return _RowNumber(arith.remui(self.value, i32(other)))

    def __mul__(self, other: int):
        return _RowNumber(arith.muli(self.value, i32(other)))

    def __add__(self, other: "_RowNumber"):
        return _RowNumber(arith.addi(self.value, other.value))
