"""Loads and stores between device memory and registers: any row length, any alignment.

Pallas has no loads under a predicate; so they are inline PTX, each with a plain twin for the interpreter.
"""

from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    REF,
    SCALAR,
    array,
    asm,
    elements,
    i32,
    inline,
    pack,
    scalar,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile


def tile_layout(tile: Tile) -> Any:
    """The layout of a tile in registers: its rows over warps and groups of lanes, or each over the CTA."""
    group, vec = tile.lanes, tile.vec
    if group > 32:
        tiling, warps, lanes = ((1, group * vec), (32 * vec,), (vec,)), (-3,), (-2,)
    else:
        rows = 32 // group
        tiling, warps, lanes = ((4 * rows, group * vec), (rows, group * vec), (1, vec)), (-6,), (-4, -3)
    canonical = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiling), warps, lanes, -1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        canonical.tiling, canonical.warp_dims, canonical.lane_dims, canonical.vector_dim
    )


def load(ref, tile: Tile, row, fill, *, interpret):
    """The tile's rows from `row` on, with `fill` where the array (rows, vocab) ends."""
    rows, vocab = ref.shape
    if interpret:
        i, j = _window(tile, row)
        inside = (i < rows) & (j < vocab)
        return jnp.where(inside, ref[...][jnp.where(inside, i, 0), jnp.where(inside, j, 0)], fill)

    @inline(
        arg_types=(REF, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, ref.dtype, layout=tile_layout(tile)),
    )
    def load(_, ref, row):
        pointer, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        return array(
            tile_layout(tile).to_mgpu(),
            tile.shape,
            [
                load_vector(
                    pointer, element, tile.vec, _offset(at, vocab, col), _inside(at, rows, col, vocab), fill
                )
                for at, col in _places(tile, scalar(row))
            ],
        )

    return load(ref, row)


def load_per_row(ref, tile: Tile, row, *, interpret):
    """The numbers (rows,) of the tile's rows from `row` on, spread over them."""
    (rows,) = ref.shape
    if interpret:
        i, _ = _window(tile, row)
        return jnp.broadcast_to(ref[...][jnp.where(i < rows, i, 0)], tile.shape)

    @inline(
        arg_types=(REF, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, ref.dtype, layout=tile_layout(tile)),
    )
    def load(_, ref, row):
        pointer, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        registers = []
        for at, _ in _places(tile, scalar(row)):
            inside = _inside(at, rows, i32(0), 1)
            (one,) = elements(load_vector(pointer, element, 1, _offset(at, 1, i32(0)), inside))
            registers.append(pack([one] * tile.vec))
        return array(tile_layout(tile).to_mgpu(), tile.shape, registers)

    return load(ref, row)


def load_mask(ref, tile: Tile, row, shape, mask_row, *, interpret):
    """The mask for the tile's rows from `row` on of an array of this shape; False where the array ends."""
    (rows, vocab), columns = shape, ref.shape[1]
    if interpret:
        i, j = _window(tile, row)
        inside = (i < rows) & (j < vocab)
        return ref[...][jnp.where(inside, mask_row(i), 0), jnp.where(inside & (columns > 1), j, 0)] & inside

    @inline(
        arg_types=(REF, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, np.dtype("int8"), layout=tile_layout(tile)),
    )
    def load(_, ref, row):
        pointer = utils.memref_ptr(ref)
        registers = []
        for at, col in _places(tile, scalar(row)):
            inside = _inside(at, rows, col, vocab)
            registers.append(load_bytes(pointer, tile.vec, mask_row(_Index(at)).value, col, columns, inside))
        return array(tile_layout(tile).to_mgpu(), tile.shape, registers)

    return load(ref, row) != 0


def load_mask_block(ref, row, start, held, vec, *, skip=0, interpret):
    """The mask of `held` positions from `start` on in the mask's row `row`, as a block of 128 * vec int8.

    It is 0 at the first `skip` positions, too (a multiple of vec), which need not be in the row.
    """
    columns, block = ref.shape[1], WARPGROUP * vec
    if interpret:
        inside = (jnp.arange(block) >= skip) & (jnp.arange(block) < held)
        at = jnp.where(inside & (columns > 1), start + jnp.arange(block), 0)
        return (ref[row][at] & inside).astype(jnp.int8)
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=vec)

    @inline(
        arg_types=(REF, SCALAR, SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((block,), np.dtype("int8"), layout=layout),
    )
    def load(_, ref, row, start, held, skip):
        position = arith.muli(thread(), i32(vec))
        inside = arith.cmpi(arith.CmpIPredicate.slt, position, scalar(held))
        inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.sge, position, scalar(skip)))
        col = arith.addi(scalar(start), position)
        register = load_bytes(utils.memref_ptr(ref), vec, scalar(row), col, columns, inside)
        return array(layout.to_mgpu(), (block,), [register])

    return load(ref, row, start, jnp.int32(held), jnp.int32(skip))


def store(ref, tile: Tile, row, value, *, interpret):
    """Writes the tile to the rows from `row` on of the array (rows, vocab), as far as it has them.

    A vocab of 1 takes the tile's first column.
    """
    rows, vocab = ref.shape
    value = value.astype(ref.dtype)
    if interpret:
        for i in range(tile.shape[0]):

            @pl.when(row + i < rows)
            def _(i=i):
                ref[row + i] = value[i, :vocab]

        return

    @inline(arg_types=(REF, SCALAR, tile_layout(tile)))
    def store(_, ref, row, value):
        pointer, vec = utils.memref_ptr(ref), min(tile.vec, vocab)
        for (at, col), register in zip(_places(tile, scalar(row)), value.registers.flat, strict=True):
            _store(pointer, register, vec, _offset(at, vocab, col), _inside(at, rows, col, vocab))

    store(ref, row, value)


def load_block(ref, *, row, start, held, fill, stride=1, interpret):
    """`held` elements of the row, `stride` apart from `start` on, as a block of 128; then `fill` (0 or -inf)."""
    columns = ref.shape[1]
    if interpret:
        inside = jnp.arange(WARPGROUP) < held
        return jnp.where(inside, ref[row][jnp.where(inside, start + stride * jnp.arange(WARPGROUP), 0)], fill)
    layout = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)

    @inline(
        arg_types=(REF, SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP,), ref.dtype, layout=layout),
    )
    def load(_, ref, row, start, held):
        inside = arith.cmpi(arith.CmpIPredicate.slt, thread(), scalar(held))
        column = arith.addi(scalar(start), arith.muli(thread(), i32(stride)))
        element = ir.MemRefType(ref.type).element_type
        pointer = utils.memref_ptr(ref)
        register = load_vector(pointer, element, 1, _offset(scalar(row), columns, column), inside, fill)
        return array(layout.to_mgpu(), (WARPGROUP,), [register])

    return load(ref, row, start, held)


def store_block(ref, *, row, start, block, held, interpret):
    """Writes the first `held` elements of a block of 128 to the row from `start` on."""
    columns = ref.shape[1]
    block = block.astype(ref.dtype)
    if interpret:
        i = jnp.arange(WARPGROUP)
        ref[row] = ref[row].at[jnp.where(i < held, start + i, columns)].set(block, mode="drop")
        return
    layout = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR, layout))
    def store(_, ref, row, start, held, block):
        (register,) = block.registers.flat
        inside = arith.cmpi(arith.CmpIPredicate.slt, thread(), scalar(held))
        offset = _offset(scalar(row), columns, arith.addi(thread(), scalar(start)))
        _store(utils.memref_ptr(ref), register, 1, offset, inside)

    store(ref, row, jnp.int32(start), jnp.int32(held), block)


def _window(tile: Tile, row):
    """The rows and columns that a tile covers."""
    rows, columns = tile.shape
    return row + jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]


# ---- on the GPU


class _Index:
    """A row number of a thread, for the arithmetic of `folding.MaskRows`."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __floordiv__(self, other: int):
        return _Index(arith.divui(self.value, i32(other)))

    def __mod__(self, other: int):
        return _Index(arith.remui(self.value, i32(other)))

    def __mul__(self, other: int):
        return _Index(arith.muli(self.value, i32(other)))

    def __add__(self, other):
        return _Index(arith.addi(self.value, other.value if isinstance(other, _Index) else i32(other)))

    __radd__ = __add__


def _places(tile: Tile, row: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Row and first column of each register of this thread."""
    own, group = thread(), tile.lanes
    rows, columns = tile.shape
    row = arith.addi(row, arith.divui(own, i32(group)))
    col = arith.muli(arith.remui(own, i32(group)), i32(tile.vec))
    for i in range(0, rows, WARPGROUP // group):
        for j in range(0, columns, group * tile.vec):
            yield arith.addi(row, i32(i)), arith.addi(col, i32(j))


def _inside(row: ir.Value, rows: int, col: ir.Value, columns: int) -> ir.Value:
    less = arith.CmpIPredicate.ult
    return arith.andi(arith.cmpi(less, row, i32(rows)), arith.cmpi(less, col, i32(columns)))


def _offset(row: ir.Value, columns: int, col: ir.Value) -> ir.Value:
    """Of an element, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    wide = arith.muli(arith.extui(i64, row), utils.c(columns, i64))
    return arith.addi(wide, arith.extui(i64, col))


def _address(pointer: ir.Value, offset: ir.Value, itemsize: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(i64, pointer), arith.muli(offset, utils.c(itemsize, i64)))


_NEG_INF = {"f32": 0xFF800000, "bf16": 0xFF80, "f16": 0xFC00}


def _words(size: int) -> tuple[int, str, str]:
    """How many PTX registers hold `size` bytes; the access, and the type of each."""
    if size >= 4:
        return size // 4, {4: "b32", 8: "v2.b32", 16: "v4.b32"}[size], "i32"
    return 1, {2: "b16", 1: "u8"}[size], "i16"


def load_vector(pointer, element: ir.Type, vec: int, offset, inside, fill=0.0) -> ir.Value:
    """`vec` elements as a vector, `fill` (0 or -inf) unless `inside`. They must be aligned to their size."""
    itemsize = utils.bytewidth(element)
    count, access, word = _words(vec * itemsize)
    bits = 0 if fill == 0 else _NEG_INF[str(element)]
    if itemsize == 2 and word == "i32":
        bits |= bits << 16
    names = [f"x{i}" for i in range(count)]
    parts = asm(
        ".reg .pred p; setp.ne.b32 p, <inside>, 0;"
        + "".join(f" mov.b{word[1:]} <{name}>, {bits};" for name in names)
        + f" @p ld.global.{access} {_braced(names)}, [<at>];",
        {"at": _address(pointer, offset, itemsize), "inside": _flag(inside)},
        dict.fromkeys(names, word),
    )
    if vec * itemsize == 1:
        parts = [arith.trunci(ir.IntegerType.get_signless(8), parts[0])]
    return vector.bitcast(ir.VectorType.get((vec,), element), pack(parts))


def _braced(names: list[str]) -> str:
    """A PTX register or vector of registers, of operands."""
    return f"<{names[0]}>" if len(names) == 1 else f"{{{', '.join(f'<{name}>' for name in names)}}}"


def _flag(condition: ir.Value) -> ir.Value:
    return arith.extui(ir.IntegerType.get_signless(32), condition)


def load_bytes(pointer, vec: int, row, col, columns: int, inside) -> ir.Value:
    """`vec` bytes of a mask, 0 unless `inside`."""
    i8 = ir.IntegerType.get_signless(8)
    if columns == 1:
        (byte,) = elements(load_vector(pointer, i8, 1, _offset(row, 1, i32(0)), inside))
        return pack([byte] * vec)
    offset = _offset(row, columns, col)
    if columns % vec == 0:  # every row and column is aligned
        return load_vector(pointer, i8, vec, offset, inside)
    # the aligned words around them, shifted; a buffer ends at a multiple of four bytes or later
    count = vec // 4
    words = [f"w{i}" for i in range(count + 1)]
    registers = asm(
        f".reg .pred p, q; .reg .b64 a; .reg .b32 s, {', '.join(words)};"
        " setp.ne.b32 p, <inside>, 0; and.b64 a, <at>, -4; cvt.u32.u64 s, <at>;"
        " and.b32 s, s, 3; shl.b32 s, s, 3; setp.ne.and.b32 q, s, 0, p;"
        + "".join(f" mov.b32 {w}, 0;" for w in words)
        + "".join(f" @{'pq'[i == count]} ld.global.b32 {w}, [a+{4 * i}];" for i, w in enumerate(words))
        + "".join(f" shf.r.wrap.b32 <x{i}>, w{i}, w{i + 1}, s;" for i in range(count)),
        {"at": _address(pointer, offset, 1), "inside": _flag(inside)},
        {f"x{i}": "i32" for i in range(count)},
    )
    return vector.bitcast(ir.VectorType.get((vec,), i8), pack(registers))


def _store(pointer, register: ir.Value, vec: int, offset, inside) -> None:
    """The first `vec` elements of the register, if `inside`."""
    element = ir.VectorType(register.type).element_type
    itemsize = utils.bytewidth(element)
    count, access, word = _words(vec * itemsize)
    packed = pack(elements(register)[:vec])
    words = elements(vector.bitcast(ir.VectorType.get((count,), ir.Type.parse(word)), packed))
    names = [f"x{i}" for i in range(count)]
    asm(
        f".reg .pred p; setp.ne.b32 p, <inside>, 0; @p st.global.{access} [<at>], {_braced(names)};",
        {
            "at": _address(pointer, offset, itemsize),
            "inside": _flag(inside),
            **dict(zip(names, words)),
        },
    )
