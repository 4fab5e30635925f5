"""Tiles of columns: strips of an array (outer, vocab, inner) in registers, and how they are moved.

A `layout.Tile` whose rows are numbers along the middle axis, and whose columns are neighbours in memory.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax.implementations.mosaic_gpu.device import predicated_ptx, tiles
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import REF, SCALAR, array, i32, inline, scalar
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile


def load(ref, tile: Tile, at, fill, *, interpret):
    """The tile at (outer, row, column) of an array (outer, vocab, inner), with `fill` beyond its rows and columns."""
    _, vocab, inner = ref.shape
    outer, row, column = at
    if interpret:
        i, j = row + jnp.arange(tile.shape[0])[:, None], column + jnp.arange(tile.shape[1])[None, :]
        inside = (i < vocab) & (j < inner)
        return jnp.where(inside, ref[outer][jnp.where(inside, i, 0), jnp.where(inside, j, 0)], fill)

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR), return_type=tiles.type_of(tile, ref.dtype))
    def load(_, ref, *at):
        pointer, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
        registers = [
            predicated_ptx.load_vector(pointer, element, tile.vec, offset, inside, fill)
            for offset, inside in _places(tile, vocab, inner, *map(scalar, at))
        ]
        return array(tiles.layout(tile).to_mgpu(), tile.shape, registers)

    return load(ref, *at)


def store(ref, tile: Tile, at, value, *, interpret):
    """Writes a tile to (outer, row, column) of an array (outer, vocab, inner), as far as its rows and columns go."""
    _, vocab, inner = ref.shape
    outer, row, column = at
    value = value.astype(ref.dtype)
    if interpret:
        i, j = row + jnp.arange(tile.shape[0])[:, None], column + jnp.arange(tile.shape[1])[None, :]
        ref[outer] = ref[outer].at[i, j].set(value, mode="drop")
        return

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR, tiles.layout(tile)))
    def store(_, ref, *at_and_value):
        *at, value = at_and_value
        pointer = utils.memref_ptr(ref)
        places = _places(tile, vocab, inner, *map(scalar, at))
        for register, (offset, inside) in zip(value.registers.flat, places, strict=True):
            predicated_ptx.store_vector(pointer, register, tile.vec, offset, inside)

    store(ref, *at, value)


def load_smem(ref, tile: Tile, *, interpret):
    """The tile that `ref`, rows of shared memory, holds."""
    if interpret:
        return ref[...]

    @inline(arg_types=(REF,), return_type=tiles.type_of(tile, ref.dtype))
    def load(_, ref):  # inline, since Mosaic would choose an order of its own for what Pallas loads as a tile
        layout = tiles.layout(tile).to_mgpu()
        return fragmented_array.FragmentedArray.load_untiled(ref, layout=layout, optimized=False)

    return load(ref)


def store_smem(ref, tile: Tile, value, *, interpret) -> None:
    """Writes a tile to `ref`, rows of shared memory, which no thread but that of each element reads before a barrier."""
    value = value.astype(ref.dtype)
    if interpret:
        ref[...] = value
        return

    @inline(arg_types=(REF, tiles.layout(tile)))
    def store(_, ref, value):  # inline, since Pallas puts two barriers around each store
        value.store_untiled(ref, optimized=False)

    store(ref, value)


def load_per_column(ref, tile: Tile):
    """The numbers in `ref`, shared memory, one for each column, as the reduction of a tile along its rows has them."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10 wants the index of the whole
    return plgpu.load(ref, *index, layout=tiles.layout(tile).reduce((0,)), optimized=False)


def _places(tile: Tile, vocab: int, inner: int, outer, row, column):
    """For each register of this thread: the number of its first element in the array, and whether it is in it."""
    first = arith.muli(outer, i32(vocab))
    less = arith.CmpIPredicate.ult
    for of_row, of_column in tiles.places(tile, row):
        of_column = arith.addi(of_column, column)
        inside = arith.andi(
            arith.cmpi(less, of_row, i32(vocab)), arith.cmpi(less, of_column, i32(inner))
        )
        yield predicated_ptx.offset_of(arith.addi(first, of_row), inner, of_column), inside
