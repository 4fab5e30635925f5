"""Inline PTX that fills the edges of a window and masks its steps: `gpu.window_arrival`."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import (
    REF,
    SCALAR,
    elements,
    emit_ptx,
    inline,
    insert_ptx,
    scalar,
    thread,
)
from pallas_softmax._src.gpu.ptx.values import Program
from pallas_softmax._src.gpu.window import Window

_BYTE = 0xFF
_MASK_BYTES = 4  # mask bytes in a word, one for each element


def fill_edges(window: Window, part: Any, x_smem, infinite: bool) -> None:
    """Each thread fills at most one position of the head, and every 128th position of the tail:

    if low <= position < high:  x = the element; if masked, the float of the lowest key, or -inf if `infinite`
    else:                       x = -inf
    x_smem[position] = x

    Args:
      part: the `window_arrival.Part` that the CTA holds.
    """
    element, p = Elements(x_smem.dtype), Program()
    refs = {"x": part.x_gmem, "smem": x_smem}
    numbers = {"first": part.place.first, "low": part.low, "high": part.high, "origin": part.origin}
    if part.mask is not None:
        refs["mask"], numbers["row"] = part.mask
    thread, first, low, high, origin = p.operands("s32", "thread", "first", "low", "high", "origin")

    def fill(position, end, in_row):
        """Fills a position below `end`. `in_row` says whether the row may have an element there."""
        x, within = p.var(element.neg_inf, f"u{8 * element.itemsize}"), position < end
        if in_row:
            inside = within & (position >= low) & (position < high)
            number = (first + (position - low)).bits("u32")
            x_at = p.operand("x", "u64") + p.multiply_wide(number, element.itemsize)
            p.load_into([x], x_at, when=inside, space="global")
            if part.mask is not None:
                columns, keep = refs["mask"].shape[1], p.var(1, "u8")
                mask_at = p.operand("mask", "u64") + p.multiply_wide(p.operand("row", "u32"), columns)
                if columns > 1:
                    mask_at = mask_at + p.convert((position + origin).bits("u32"), "u64")
                p.load_into([keep], mask_at, when=inside, space="global")
                masked = p.convert(keep, "u32").equals(0)
                p.set(x, element.neg_inf if infinite else element.all_ones, when=masked)
        p.store(p.at(p.operand("smem", "u32"), position, element.itemsize), x, when=within)

    if window.head:
        fill(thread, window.head, True)
    for position in range(window.head + window.body, window.size, WARPGROUP):
        fill(thread + position, window.size, position < window.head + window.cut.longest)
    insert_ptx(p, refs, numbers)


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
