"""Inline PTX that fills the edges of a window and masks its steps: `gpu.window_arrival`."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, elements, emit_ptx, i32, inline, scalar, thread
from pallas_softmax._src.gpu.ptx.predicated import load_mask, load_vector
from pallas_softmax._src.gpu.ptx.values import Program
from pallas_softmax._src.gpu.window import Window

_SLT, _SGE = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge
_BYTE = 0xFF
_MASK_BYTES = 4  # mask bytes in a word, one for each element


def fill_edges(window: Window, part: Any, x_smem, infinite: bool) -> None:
    """Each thread fills at most one position of the head, and every 128th position of the tail:

    if low <= position < high:  x = the element; if masked, the float of the lowest key, or -inf if `infinite`
    else:                       x = -inf
    x_smem[position] = x
    """
    element = Elements(x_smem.dtype)
    tail, last = window.head + window.body, window.head + window.cut.longest

    @inline(arg_types=(REF, REF) + (SCALAR,) * 4 + (() if part.mask is None else (REF, SCALAR)))
    def emit(_, x_gmem, x_smem, first, low, high, origin, *mask):
        first, low, high, origin = map(scalar, (first, low, high, origin))
        bits = ir.IntegerType.get_signless(8 * element.itemsize)

        def place(position, end, in_row):
            """Fills a position below `end`. `in_row` says whether the row may have an element there."""
            within = arith.cmpi(_SLT, position, i32(end))
            inside = arith.andi(arith.cmpi(_SGE, position, low), arith.cmpi(_SLT, position, high))
            x = utils.c(element.neg_inf, bits)
            if in_row:
                inside = arith.andi(inside, within)
                x = _element(x_gmem, arith.addi(first, arith.subi(position, low)), inside, bits)
            if in_row and mask:
                mask_gmem, row = mask
                of_masked = element.neg_inf if infinite else element.all_ones
                x = _masked(x, mask_gmem, row, arith.addi(position, origin), inside, of_masked)
            _store_if(within, x_smem, position, x, element.itemsize)

        if window.head:
            place(thread(), window.head, True)
        for position in range(tail, window.size, WARPGROUP):
            place(arith.addi(thread(), i32(position)), window.size, position < last)

    emit(part.x_gmem, x_smem, part.place.first, part.low, part.high, part.origin, *(part.mask or ()))


def _element(x_gmem, at, inside, bits) -> ir.Value:
    """Returns the bits of element number `at` (i32) of x_gmem if `inside`, else the bits of -inf."""
    offset = arith.extui(ir.IntegerType.get_signless(64), at)
    dtype = ir.MemRefType(x_gmem.type).element_type
    x = load_vector(utils.memref_ptr(x_gmem), dtype, 1, offset, inside, -float("inf"))
    (x,) = elements(vector.bitcast(ir.VectorType.get((1,), bits), x))
    return x


def _masked(x, mask_gmem, row, column, inside, of_masked: int) -> ir.Value:
    """Returns `of_masked` if the position is `inside` and its mask byte is 0, else the bits x."""
    columns = ir.MemRefType(mask_gmem.type).shape[1]
    keep = load_mask(utils.memref_ptr(mask_gmem), 1, scalar(row), column, columns, inside)
    (keep,) = elements(keep)
    masked = arith.cmpi(arith.CmpIPredicate.eq, keep, utils.c(0, keep.type))
    return arith.select(arith.andi(inside, masked), utils.c(of_masked, x.type), x)


def _store_if(condition, x_smem, position, x, itemsize: int) -> None:
    """Writes the bits x to a position of shared memory, if the condition holds."""
    p = Program()
    smem, number = p.operands("u32", "smem", "position")
    writes = p.operand("condition", "u32").differs(0)
    p.store(p.at(smem, number, itemsize), p.operand("x", f"u{8 * itemsize}"), when=writes)
    condition = arith.extui(ir.IntegerType.get_signless(32), condition)
    emit_ptx(p, {"smem": x_smem, "position": position, "x": x, "condition": condition})


# ---- a step


def mask_step(window: Window, x_smem, step, keep, infinite: bool) -> None:
    """For each block of the step, a thread loads its vector and the vector's mask bytes, which are 0 or 1:

    x[j] |= all ones, where keep[j] == 0      (all ones are the float of the lowest key; -inf if `infinite`)
    store x, if the vector is in the body     (`fill_edges` masks the head and the tail)
    """
    layout = plgpu.Layout.WG_STRIDED((window.block,), vec_size=window.vec)
    code = _mask_vectors(window, Elements(x_smem.dtype), len(keep), infinite)

    @inline(arg_types=(REF, SCALAR, [layout] * len(keep)))
    def emit(_, x_smem, step, keep):
        operands = {"x": x_smem, "step": scalar(step), "thread": thread()}
        for b, of_block in enumerate(keep):
            operands |= {f"keep{b}_{i}": word for i, word in enumerate(_words(of_block, window.vec // 4))}
        emit_ptx(code, operands)

    emit(x_smem, step, keep)


def _words(of_block, count: int) -> list[ir.Value]:
    """Returns the bytes of this thread in a block of int8, as `count` 32-bit numbers."""
    (register,) = of_block.registers.flat
    return elements(vector.bitcast(ir.VectorType.get((count,), ir.IntegerType.get_signless(32)), register))


def _mask_vectors(window: Window, element: Elements, blocks: int, infinite: bool) -> Program:
    """Returns the program of `mask_step`. <keep{b}_{i}> has the mask of elements 4 i to 4 i + 3 of block b.

    Example: two words of 16-bit elements, with x0 in the lower half, and their mask word, which has byte 1 = 0:

        words  x1 x0 | x3 x2     mask  01 01 00 01     ->  ffff x0 | x3 x2
    """
    p = Program()
    thread, step, x = p.operands("u32", "thread", "step", "x")
    block_bytes = window.block * element.itemsize
    address = p.at(p.at(x, step, window.step_blocks * block_bytes), thread, ACCESS_BYTES)
    first = p.multiply_add(step, window.step_blocks * window.block, thread * window.vec)
    for b in range(blocks):
        position = first + b * window.block
        from_head = position >= window.head
        in_body = from_head & (position < window.head + window.body)
        # Outside the body, another warpgroup may be writing in `fill_edges`: `sample` has several warpgroups.
        words = [p.var(0, "s32") for _ in range(ACCESS_BYTES // 4)]
        p.load_into(words, address, offset=b * block_bytes, when=in_body)
        for j in range(window.vec):
            keep = p.operand(f"keep{b}_{j // _MASK_BYTES}", "u32") & _BYTE << 8 * (j % _MASK_BYTES)
            masked = keep.equals(0)
            at = j * element.itemsize
            word, element_bits = words[at // 4], element.all_ones << 8 * (at % 4)
            p.update(word, "or", element_bits, when=masked)
            if infinite:  # turns all ones into -inf
                p.update(word, "xor", (element.neg_inf ^ element.all_ones) << 8 * (at % 4), when=masked)
        p.store(address, *words, offset=b * block_bytes, when=in_body)
    return p
