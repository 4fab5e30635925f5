"""Blocks: arrays in registers, with equal numbers of elements for each of the 128 threads of a CTA.

A block has one or more sections of 128 * vec elements. Thread t holds elements t * vec to (t + 1) * vec of each
section. Pallas moves only whole blocks. If a row ends within a block, inline PTX moves the row's elements under a
predicate.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import laid_out, twin
from pallas_softmax._src.gpu.ptx import predicated as predicated_ptx
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, array, elements, i32, inline, pack, scalar, thread


def layout(vec: int, size: int | None = None) -> Any:
    """Returns the layout of a block of `size` elements, by default of one section."""
    return plgpu.Layout.WG_STRIDED((size or WARPGROUP * vec,), vec_size=vec)


def _type(dtype, vec: int = 1, size: int | None = None) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((size or WARPGROUP * vec,), np.dtype(dtype), layout=layout(vec, size))


def filled(value, dtype=jnp.float32):
    """Returns a block with one element for each thread."""
    return laid_out(jnp.full((WARPGROUP,), value, dtype), layout(1))


def positions(vec: int = 1, size: int | None = None):
    """Returns an int32 block: element i is i."""
    return laid_out(lax.broadcasted_iota(jnp.int32, (size or WARPGROUP * vec,), 0), layout(vec, size))


@twin
def split(block, vec: int) -> list:
    """Returns the elements of a block of 32 bits as blocks with one element for each thread, section by section."""
    (size,) = block.shape

    @inline(arg_types=(layout(vec, size),), return_type=[_type(block.dtype)] * (size // WARPGROUP))
    def split(_, block):
        found = [x for register in block.registers.flat for x in elements(register)]
        return [array(layout(1).to_mgpu(), (WARPGROUP,), [pack([x])]) for x in found]

    return split(block)


def load(ref, vec: int = 1):
    """Returns the block in `ref`, a one-dimensional reference to shared or device memory of the block's size."""
    return load_as(ref, layout(vec, *ref.shape))


@twin
def load_as(ref, layout: Any):
    """Returns the array in `ref`, a reference to shared or device memory, in this layout."""
    whole: Any = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10 requires an index
    return plgpu.load(ref, *whole, layout=layout, optimized=False)


@twin
def store(ref, block):
    """Writes a block to `ref`, a one-dimensional reference to device memory of the block's size."""
    if hasattr(plgpu, "store"):  # the only way to write small blocks in jax 0.12
        plgpu.store(ref, block, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = block


@twin
def store_in_place(ref, block, layout: Any):
    """Writes an array with this layout to `ref`, shared memory of the same shape.

    Each thread writes its own elements without a barrier. A store by Pallas synchronizes all threads before and
    after it, which is needed only if threads read each other's elements.
    """

    @inline(arg_types=(REF, layout))
    def store_in_place(_, ref, block):
        block.store_untiled(ref, optimized=False)

    store_in_place(ref, block)


@twin
def load_from_row(ref, row, *, start, held, fill, stride=1):
    """Returns a block of 128 elements of a row of `ref` (rows, vocab): element i is at column start + stride * i.

    Elements from `held` on are `fill`, which is 0 or -inf; they are not read.
    """
    vocab = ref.shape[1]

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR), return_type=_type(ref.dtype))
    def load_from_row(_, ref, row, start, held):
        inside = arith.cmpi(arith.CmpIPredicate.slt, thread(), scalar(held))
        column = arith.addi(scalar(start), arith.muli(thread(), i32(stride)))
        element = ir.MemRefType(ref.type).element_type
        pointer = utils.memref_ptr(ref)
        offset = predicated_ptx.offset_of(scalar(row), vocab, column)
        register = predicated_ptx.load_vector(pointer, element, 1, offset, inside, fill)
        return array(layout(1).to_mgpu(), (WARPGROUP,), [register])

    return load_from_row(ref, row, jnp.int32(start), jnp.int32(held))


@twin
def store_to_row(ref, row, *, start, held, block):
    """Writes the first `held` elements of a block of 128 to a row of `ref` (rows, vocab), from column `start` on."""
    vocab = ref.shape[1]
    block = block.astype(ref.dtype)

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR, layout(1)))
    def store_to_row(_, ref, row, start, held, block):
        inside = arith.cmpi(arith.CmpIPredicate.slt, thread(), scalar(held))
        offset = predicated_ptx.offset_of(scalar(row), vocab, arith.addi(thread(), scalar(start)))
        predicated_ptx.store_vector(utils.memref_ptr(ref), block.registers.item(), offset, inside)

    store_to_row(ref, row, jnp.int32(start), jnp.int32(held), block)


@twin
def load_mask(ref, row, start, held, vec: int, *, size: int | None = None, aligned: bool = False):
    """Returns an int8 block of 0 and 1 from a row of a mask (mask rows, vocab or 1): element i is at start + i.

    Elements from `held` on are 0; they are not read.
    `aligned` promises that element `start` is a multiple of vec bytes from the start of the mask, for any `vocab`.
    """
    columns, size = ref.shape[1], size or WARPGROUP * vec

    @inline(arg_types=(REF, SCALAR, SCALAR, SCALAR), return_type=_type("int8", vec, size))
    def load_mask(_, ref, row, start, held):
        pointer, i8, registers = utils.memref_ptr(ref), ir.IntegerType.get_signless(8), []
        for section in range(0, size, WARPGROUP * vec):
            position = arith.addi(arith.muli(thread(), i32(vec)), i32(section))
            inside = arith.cmpi(arith.CmpIPredicate.slt, position, scalar(held))
            column = arith.addi(scalar(start), position)
            offset = predicated_ptx.offset_of(scalar(row), columns, i32(0) if columns == 1 else column)
            if columns == 1:
                (byte,) = elements(predicated_ptx.load_vector(pointer, i8, 1, offset, inside))
                registers.append(pack([byte] * vec))
            elif aligned or columns % vec == 0:  # all vectors start at a multiple of their size
                registers.append(predicated_ptx.load_vector(pointer, i8, vec, offset, inside))
            else:
                registers.append(predicated_ptx.load_unaligned_bytes(pointer, vec, offset, inside))
        return array(layout(vec, size).to_mgpu(), (size,), registers)

    return load_mask(ref, row, start, jnp.int32(held))
