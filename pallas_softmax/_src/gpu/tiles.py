"""Tiles: short rows in registers (see `layout.Tile`), and their loads and stores.

A tile may reach beyond the array, and Pallas has no loads and stores under a predicate, so these are inline PTX. For
columns of an array (outer, vocab, inner), the rows of a tile are the `vocab` lines of `inner` elements of one outer
index, `ref.at[i]`.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax._src.folding import MaskRows
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
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
    words,
)
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value

# About as many tiles as CTAs run at once. "Prefetching" in benchmarks/results/NOTES.md has the measurements.
PREFETCHED_TILES = 528


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
    return plgpu.Layout.TILED(canonical.tiling, canonical.warp_dims, canonical.lane_dims, canonical.vector_dim)


@twin
def load(
    ref,
    tile: Tile,
    row,
    fill: float = 0,
    *,
    column: Any = 0,
    held: int | None = None,
    ref_row: MaskRows | None = None,
    last_row: int | None = None,
):
    """Returns elements of an array as a tile. Element (i, j) of the tile is element (row + i, column + j) of the array.

    Elements beyond the array are not read. They are `fill`, 0 or -inf. An array (rows,) has one number per row, which
    the tile repeats along its rows. `ref_row` maps each row number, row + i, to the row of the array to use instead.
    Row numbers above `last_row` become `last_row` before that.

    `column` is a multiple of `tile.vec`; or a tile of column numbers, to gather these elements of the array. `held` is
    for such a tile: only its first `held` columns count. Their numbers must be in the array. The others are `fill`.
    """
    shape, width = ref.shape, _width(tile, ref, column)
    dtype = np.dtype("int8" if ref.dtype == jnp.bool_ else ref.dtype)
    column_type = layout(tile) if jnp.ndim(column) else SCALAR

    @inline(arg_types=(REF, SCALAR, column_type), return_type=_type(tile, dtype))
    def load(_, ref, row, column):
        pointer, element = utils.memref_ptr(ref), utils.dtype_to_ir_type(dtype)
        registers = []
        for accesses in _accesses(shape, tile, width, row, column, held, ref_row, last_row):
            found = []
            for offset, step, inside in accesses:
                vector = predicated_ptx.load_vector(pointer, element, width, offset, inside, fill, step=step)
                found += elements(vector)
            registers.append(pack(found * (tile.vec // len(found))))  # repeats a number per row
        return array(layout(tile).to_mgpu(), tile.shape, registers)

    loaded = load(ref, jnp.int32(row), jnp.int32(column))
    return loaded != 0 if ref.dtype == jnp.bool_ else loaded


@twin
def prefetch(ref, tile: Tile, row) -> None:
    """Starts to copy the tile PREFETCHED_TILES after the one at this row to the L2 cache, for the CTA that takes it.

    An array of fewer than twice as many tiles is not prefetched: it would gain nothing. The copy has whole 16 bytes: it
    starts up to 15 bytes before the tile, and may leave out as many at its end. XLA's buffers start at multiples of 256
    bytes, so it stays in them.
    """
    rows, columns = ref.shape
    ahead, itemsize = PREFETCHED_TILES * tile.rows, np.dtype(ref.dtype).itemsize
    if rows < 2 * ahead:
        return
    p, size = Program(), tile.rows * columns * itemsize // ACCESS_BYTES * ACCESS_BYTES
    at, reads = p.operand("at", "u64") & -ACCESS_BYTES, p.operand("inside", "u32").differs(0)
    p += f"@{reads} cp.async.bulk.prefetch.L2.global [{at}], {size};"

    @inline(arg_types=(REF, SCALAR))
    def prefetch(_, ref, row):
        offset = predicated_ptx.offset_of(arith.addi(scalar(row), i32(ahead)), columns, i32(0))
        is_whole = _less(scalar(row), rows - ahead - tile.rows + 1)
        when = arith.andi(is_whole, _less(thread(), 1))
        predicated_ptx.emit_access(p, utils.memref_ptr(ref), offset, itemsize, when, {}, {})

    prefetch(ref, row)


def load_mask(ref, tile: Tile, row, mask_row: MaskRows, *, column: Any = 0, last_row=None):
    """Loads a mask (mask rows, vocab or 1) as a boolean tile. One number per row is repeated beyond its end too."""
    per_row = ref.at[:, 0] if ref.shape[1] == 1 else ref
    return load(per_row, tile, row, column=column, ref_row=mask_row, last_row=last_row)


@twin
def store(ref, tile: Tile, row, value, *, column: Any = 0, held: int | None = None) -> None:
    """Writes a tile to an array (rows, columns), without elements beyond its end. The arguments are as for `load`.

    If `column` is a tile of column numbers, they must differ within a row, and the warp's earlier writes come first.
    """
    value = value.astype(ref.dtype)
    shape, width = ref.shape, _width(tile, ref, column)
    column_type = layout(tile) if jnp.ndim(column) else SCALAR

    @inline(arg_types=(REF, SCALAR, column_type, layout(tile)))
    def store(_, ref, row, column, value):
        pointer = utils.memref_ptr(ref)
        if column.shape:
            barrier = Program()
            barrier.sync_warp()  # orders earlier writes of all lanes before this one
            emit_ptx(barrier, {})
        all_accesses = _accesses(shape, tile, width, row, column, held)
        for register, accesses in zip(value.registers.flat, all_accesses, strict=True):
            found = elements(register)[: shape[1]]
            for start, (offset, step, inside) in zip(range(0, len(found), width), accesses):
                vector = pack(found[start : start + width])
                predicated_ptx.store_vector(pointer, vector, offset, inside, step=step)

    store(ref, jnp.int32(row), jnp.int32(column), value)


@twin
def spread(per_row, tile: Tile, out: Tile):
    """Repeats one number per row of a tile over the tile `out`. The rows of both tiles lie in the same lanes."""

    @inline(arg_types=(layout(tile),), return_type=_type(out, per_row.dtype))
    def spread(_, per_row):
        numbers = [elements(register)[0] for register in per_row.registers.flatten()[:: tile.steps]]
        registers = [pack([number] * out.vec) for number in numbers for _ in range(out.steps)]
        return array(layout(out).to_mgpu(), out.shape, registers)

    return spread(per_row)


def broadcast(numbers, tile: Tile, axis: int = 0):
    """Repeats numbers over a tile: one for each row, or with axis 1 one for each column."""
    return lax.broadcast_in_dim(numbers, tile.shape, (axis,))


def _type(tile: Tile, dtype) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(tile.shape, np.dtype(dtype), layout=layout(tile))


@twin
def load_smem(ref, tile: Tile):
    # Inline, since for a load by Pallas Mosaic would choose another order of the rows in shared memory.
    @inline(arg_types=(REF,), return_type=_type(tile, ref.dtype))
    def load_smem(_, ref):
        return fragmented_array.FragmentedArray.load_untiled(ref, layout=layout(tile).to_mgpu(), optimized=False)

    return load_smem(ref)


def load_from_ctas(ref, tile: Tile, count: int, empty: float):
    """Returns a tile of one step: row i is `ref` of CTA i of the cluster. Rows from `count` on are `empty`, 0 or -inf.

    `ref` is float32 (columns of the tile,) in shared memory, which all of the `count` CTAs have.
    """
    p, names = Program(), [f"x{i}" for i in range(tile.vec)]
    cta, words = p.operand("cta", "u32"), p.operands("f32", *names)
    inside, there = cta < count, p.fresh("u32")
    for word in words:
        p.set(word, empty)
    here = p.at(p.operand("ref", "u32"), p.operand("position", "u32"), 4)
    p += f"@{inside} mapa.shared::cluster.u32 {there}, {here}, {cta};"
    p.load_into(words, there, when=inside, space="shared::cluster")

    @inline(arg_types=(REF,), return_type=_type(tile, "float32"))
    def load_from_ctas(_, ref):
        registers = []
        for row, column, _ in _places(tile, i32(0)):
            operands = {"ref": ref, "position": column, "cta": row}
            registers.append(pack(emit_ptx(p, operands, dict.fromkeys(names, "f32"))))
        return array(layout(tile).to_mgpu(), tile.shape, registers)

    return load_from_ctas(ref)


def _places(tile: Tile, row: ir.Value) -> Iterator[tuple[ir.Value, ir.Value, int]]:
    """Yields (row, column, step) of each register of this thread: its first element is at column + step.

    The registers of a row have the same `column`, so they share the computation of their address.
    """
    own, lanes = thread(), tile.lanes
    row = arith.addi(row, arith.divui(own, i32(lanes)))
    lane = _number(arith.remui(own, i32(lanes)))
    column = tile.first_column(lane).registers.item()
    for i in range(0, tile.rows, WARPGROUP // lanes):
        for step in range(tile.steps):
            yield arith.addi(row, i32(i)), column, step * tile.step_columns


def _width(tile: Tile, ref, column) -> int:
    """Returns how many neighbours in a register one access can move, at an address that is a multiple of their size."""
    if jnp.ndim(column) or len(ref.shape) == 1:
        return 1
    return math.gcd(tile.vec, ref.shape[1], ACCESS_BYTES // np.dtype(ref.dtype).itemsize)


def _accesses(
    shape: tuple[int, ...], tile: Tile, width: int, row, column, held: int | None, ref_row=None, last_row=None
) -> Iterator[list[tuple[ir.Value, int, ir.Value]]]:
    """Yields, for each register of this thread, its accesses to an array of this shape; one to an array (rows,).

    An access is (offset, step, inside): it moves `width` elements, from offset + step on, if `inside`. The other
    arguments are as for `load`.
    """
    per_row = len(shape) == 1
    rows, columns = (*shape, 1)[:2]
    for number, (at, place, place_step) in enumerate(_places(tile, scalar(row))):
        if last_row is not None and (last_row + 1) % tile.rows:
            at = arith.minui(at, i32(last_row))
        if ref_row:
            at = ref_row(_number(at)).registers.item()
        accesses = []
        for start in range(0, 1 if per_row else tile.vec, width):
            if per_row:
                first, step = i32(0), 0
            elif column.shape:
                first, step = elements(column.registers.flat[number])[start], 0
            else:
                first, step = arith.addi(place, scalar(column)), place_step + start
            if held:
                inside = _less(arith.addi(place, i32(place_step + start)), held)
            else:
                inside = _less(arith.addi(first, i32(step)), columns)
            offset = predicated_ptx.offset_of(at, columns, first)
            accesses.append((offset, step, arith.andi(_less(at, rows), inside)))
        yield accesses


def _number(value: ir.Value) -> fragmented_array.FragmentedArray:
    """Returns an unsigned number for Python's operators."""
    return fragmented_array.FragmentedArray.splat(value, (), is_signed=False)


def _less(number: ir.Value, bound: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, number, i32(bound))


# --- Programs over a tile


class TileProgram(Program):
    """A program over the rows of a tile. The operand <x{row}_{i}> is element i of the thread in one of its rows.

    It may stand for two 16-bit elements, 2 i and 2 i + 1. `insert_in_tile` names the results.
    """

    def __init__(self, tile: Tile, vocab: int):
        super().__init__()
        self.tile, self.vocab = tile, vocab
        self.rows = tile.rows // (WARPGROUP // tile.lanes)  # of each thread
        self.lane = self.operand("thread", "u32") & (tile.lanes - 1)  # the thread's lane in its rows
        self.first_column = tile.first_column(self.lane)  # of the thread's first element
        # The columns of the thread's elements, relative to the first one.
        self.columns = [step * tile.step_columns + j for step in range(tile.steps) for j in range(tile.vec)]
        self.ones = (1 << (tile.shape[1] - 1).bit_length()) - 1  # the bits of the column in a packed key

    def keys(self, row: int) -> list[Value]:
        return [self.operand(f"x{row}_{i}", "s32") for i in range(len(self.columns))]

    def winner(self, row: int, i: int) -> Value:
        return self.operand(f"winner{row}_{i}", "s32")


def insert_in_tile(code: TileProgram, held, kind: str, results: dict[str, Tile | None]) -> tuple:
    """Inserts PTX into the kernel. `held` is the tile of its operands: 32-bit elements, or 16-bit integers.

    Returns a tile of "i32" or "f32" (`kind`) for each of the `results`: from <name{row}_{i}>, as the given tile; or
    if it is None, from <name{row}>, repeated over the rows of a tile like `held`.
    """
    dtype = {"i32": "int32", "f32": "float32"}[kind]
    outs = [out or code.tile for out in results.values()]
    names = [
        [f"{name}{row}_{i}" if per_element else f"{name}{row}" for row, i in np.ndindex(code.rows, size)]
        for (name, per_element), size in zip(results.items(), [out.steps * out.vec for out in outs])
    ]

    @inline(arg_types=(layout(code.tile),), return_type=tuple(_type(out, dtype) for out in outs))
    def emit(_, held):
        operands = {"thread": thread()}
        for row, registers in enumerate(np.split(held.registers.flatten(), code.rows)):
            operands |= {f"x{row}_{i}": word for i, word in enumerate(_words(registers))}
        kinds = dict.fromkeys(sum(names, []), kind)
        written = dict(zip(kinds, emit_ptx(code, operands, kinds)))
        tiles = []
        for out, names_of_elements in zip(outs, names):
            found = [written[name] for name in names_of_elements]
            registers = [pack(found[i : i + out.vec]) for i in range(0, len(found), out.vec)]
            tiles.append(array(layout(out).to_mgpu(), out.shape, registers))
        return tuple(tiles)

    return emit(held)


def _words(registers) -> list[ir.Value]:
    """Returns the elements in 32-bit words, two 16-bit elements in one. An unpaired last one fills both halves."""
    if ir.VectorType(registers[0].type) == ir.VectorType.get((1,), ir.IntegerType.get_signless(16)):
        held = [elements(register)[0] for register in registers]
        registers = [pack([a, b]) for a, b in zip(held[::2], [*held[1::2], held[-1]])]
    is_float = isinstance(ir.VectorType(registers[0].type).element_type, ir.F32Type)
    return [word for register in registers for word in (elements if is_float else words)(register)]
