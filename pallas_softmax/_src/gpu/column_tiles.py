"""Tiles of columns: pieces of an array (outer, vocab, inner) in registers, and their loads and stores.

A piece is a `layout.Tile`. Its rows are lines, which are indices along the middle axis. Its columns are neighbours in
memory. A piece may reach beyond the array, so inline PTX moves it under a predicate, as in `tiles`.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.ptx import predicated as predicated_ptx
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, array, emit_ptx, i32, inline, pack, scalar
from pallas_softmax._src.gpu.ptx.values import Program


def laid_out(value, tile: Tile, *, interpret):
    """Returns an array in the layout of a tile of its shape; unchanged for the interpreter, which has no layouts."""
    return value if interpret else plgpu.layout_cast(value, tiles.layout(tile))


def load(ref, tile: Tile, at, fill, *, interpret):
    """Returns the tile at (outer, line, column) of an array (outer, vocab, inner), with `fill` beyond its end."""
    _, vocab, inner = ref.shape
    if interpret:
        outer, lines, columns = _indices(tile, at)
        inside = (lines < vocab) & (columns < inner)
        return jnp.where(inside, ref[outer][jnp.where(inside, lines, 0), jnp.where(inside, columns, 0)], fill)

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR), return_type=tiles.type_of(tile, ref.dtype))
    def load(_, ref, *at):
        pointer, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        registers = [
            predicated_ptx.load_vector(pointer, element, tile.vec, offset, inside, fill)
            for offset, inside in _places(tile, vocab, inner, *map(scalar, at))
        ]
        return array(tiles.layout(tile).to_mgpu(), tile.shape, registers)

    return load(ref, *at)


def store(ref, tile: Tile, at, value, *, interpret) -> None:
    """Writes a tile at (outer, line, column) of an array (outer, vocab, inner), without elements beyond its end."""
    _, vocab, inner = ref.shape
    value = value.astype(ref.dtype)
    if interpret:
        outer, lines, columns = _indices(tile, at)
        ref[outer] = ref[outer].at[lines, columns].set(value, mode="drop")
        return

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR, tiles.layout(tile)))
    def store(_, ref, outer, line, column, value):
        pointer = utils.memref_ptr(ref)
        places = _places(tile, vocab, inner, scalar(outer), scalar(line), scalar(column))
        for register, (offset, inside) in zip(value.registers.flat, places, strict=True):
            predicated_ptx.store_vector(pointer, register, tile.vec, offset, inside)

    store(ref, *at, value)


def load_smem(ref, tile: Tile, *, interpret):
    """Returns the tile in `ref`, lines in shared memory."""
    if interpret:
        return ref[...]

    # Inline, since for a load by Pallas Mosaic would choose another order of the lines in shared memory.
    @inline(arg_types=(REF,), return_type=tiles.type_of(tile, ref.dtype))
    def load(_, ref):
        return fragmented_array.FragmentedArray.load_untiled(
            ref, layout=tiles.layout(tile).to_mgpu(), optimized=False
        )

    return load(ref)


def load_from_ctas(ref, tile: Tile, count: int, empty: float):
    """Returns a tile: line i is `ref` of CTA i of the cluster, and lines from `count` on are `empty`.

    Args:
      ref: float32 (columns of the tile,) in shared memory, which all CTAs have.
      tile: the layout in registers.
      count: number of CTAs of the cluster.
      empty: 0 or -inf.
    """

    @inline(arg_types=(REF,), return_type=tiles.type_of(tile, "float32"))
    def load_from_ctas(_, ref):
        registers = []
        for cta, column, *_ in tiles.places(tile, i32(0)):
            p = Program()
            number, words = p.operand("cta", "u32"), p.operands("f32", *(f"x{i}" for i in range(tile.vec)))
            inside, there = number < count, p.fresh("u32")
            for word in words:
                p.set(word, empty)
            here = p.at(p.operand("ref", "u32"), p.operand("column", "u32"), 4)
            p += f"@{inside} mapa.shared::cluster.u32 {there}, {here}, {number};"
            p.load_into(words, there, when=inside, space="shared::cluster")
            types = {str(word)[1:-1]: "f32" for word in words}
            out = emit_ptx(p, {"ref": ref, "column": column, "cta": cta}, types)
            registers.append(pack(out))
        return array(tiles.layout(tile).to_mgpu(), tile.shape, registers)

    return load_from_ctas(ref)


def _indices(tile: Tile, at):
    """Returns the outer index, lines (lines, 1) and columns (1, columns) of a tile, for the interpreter."""
    outer, line, column = at
    lines, columns = tile.shape
    return outer, line + jnp.arange(lines)[:, None], column + jnp.arange(columns)[None, :]


def _places(tile: Tile, vocab: int, inner: int, outer, line, column):
    """Yields for each register of this thread the offset of its first element, and whether that is in the array."""
    first, less = arith.muli(outer, i32(vocab)), arith.CmpIPredicate.ult
    for own_line, own_column, *_ in tiles.places(tile, line):
        own_column = arith.addi(own_column, column)
        inside = arith.andi(arith.cmpi(less, own_line, i32(vocab)), arith.cmpi(less, own_column, i32(inner)))
        yield predicated_ptx.offset_of(arith.addi(first, own_line), inner, own_column), inside
