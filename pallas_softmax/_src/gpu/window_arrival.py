"""How a part of a row arrives in its `Window`: bulk copies, the tail after them, and the mask."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import PartPlace, part_place
from pallas_softmax._src.gpu.layout import Window
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, emit_ptx, inline, insert_ptx, scalar, thread, words
from pallas_softmax._src.gpu.ptx.program import Program

_BYTE = 0xFF
_MASK_BYTES = 4  # mask bytes in a word, one for each element


class WindowPart(NamedTuple):
    place: PartPlace  # the row, and the place of the part in it
    x_gmem: Any  # one-dimensional device memory; the part starts at element `place.first`
    shift: Any  # the element in shared memory where the part starts
    mask: Any  # None, or (reference to the mask, its row)


def part_of(window: Window, x_gmem, mask: Mask | None, mask_gmem) -> WindowPart:
    place = part_place(window.cut, x_gmem.shape)
    mask_of_part = None if mask is None else (mask_gmem, mask.row(place.row))
    shift = place.first % window.vec if window.shifted else 0
    return WindowPart(place, place.in_view(x_gmem), jnp.int32(shift), mask_of_part)


def start_copies(window: Window, part: WindowPart, x_smem, arrived) -> None:
    for i, (at, size) in enumerate(window.copies()):
        plgpu.copy_gmem_to_smem(
            part.x_gmem.at[pl.ds(part.place.first - part.shift + at, size)],
            x_smem.at[pl.ds(at, size)],
            arrived.at[i],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )


@twin
def fill_tail(window: Window, part: WindowPart, x_smem, *, infinite: bool = False) -> None:
    """Fills the tail of the window, with the rest of the part and then -inf. A thread writes every 128th element.

    A masked element becomes the float of the lowest key, or -inf if `infinite`.
    """
    refs = {"x": part.x_gmem, "smem": x_smem}
    numbers = {"first": part.place.first, "owned": part.place.owned, "start": part.place.start, "shift": part.shift}
    if part.mask is not None:
        refs["mask"], numbers["row"] = part.mask
    columns = None if part.mask is None else refs["mask"].shape[1]
    insert_ptx(tail_program(window, x_smem.dtype, columns, infinite=infinite), refs, numbers)


def tail_program(window: Window, dtype, mask_columns: int | None, *, infinite: bool) -> Program:
    """Returns the program of `fill_tail`. A mask (mask rows, mask_columns) has V columns or one; None: no mask."""
    element, p = Elements(dtype), Program()
    thread, first, owned, start, shift = p.operands("s32", "thread", "first", "owned", "start", "shift")
    for tail in range(window.body, window.smem_size, WARPGROUP):
        at = thread + tail
        x, within, position = p.var(element.neg_inf, f"u{8 * element.itemsize}"), at < window.smem_size, at - shift
        if tail < window.cut.longest + window.vec:
            inside = within & (position.bits("u32") < owned.bits("u32"))  # without a body, it may be negative
            x_at = p.operand("x", "u64") + p.multiply_wide((first + position).bits("u32"), element.itemsize)
            p.load_into([x], x_at, when=inside)
            if mask_columns is not None:
                mask_at = p.operand("mask", "u64") + p.multiply_wide(p.operand("row", "u32"), mask_columns)
                if mask_columns > 1:
                    mask_at = mask_at + p.convert((position + start).bits("u32"), "u64")
                keep = p.var(1, "u8")
                p.load_into([keep], mask_at, when=inside)
                masked = p.convert(keep, "u32").equals(0)
                p.set(x, element.neg_inf if infinite else element.all_ones, when=masked)
        p.store(p.at(p.operand("smem", "u32"), at, element.itemsize), x, when=within)
    return p


def mask_of_step(window: Window, part: WindowPart, i) -> tuple:
    """Returns the mask of each block of step i, int8 and 0 outside the body; or () without a mask."""
    if part.mask is None:
        return ()
    mask_gmem, mask_row = part.mask

    def load(b):
        position = (i * window.step_blocks + b) * window.block_size
        start, held = position + part.place.start, window.body - position
        return blocks.load_mask(mask_gmem, mask_row, start, held, window.vec)

    return tuple(load(b) for b in range(window.step_blocks))


@twin
def mask_step(window: Window, part: WindowPart, x_smem, step, keep, *, infinite: bool = False) -> None:
    """Masks the elements of a step. (`fill_tail` masks the tail, which may hold some of them.)

    `keep` has one block of int8 for each block of the step. An element with keep = 0 gets all bits set, which is the
    float of the lowest key; or it becomes -inf if `infinite`. Example: two words of 16-bit elements, with x0 in the
    lower half, and their mask word, which has byte 1 = 0:

        words  x1 x0 | x3 x2     mask  01 01 00 01     ->  ffff x0 | x3 x2

    If the window is shifted, a thread's elements lie across two vectors, and masked ones are written one by one.
    """
    p = mask_program(window, x_smem.dtype, len(keep), infinite=infinite)

    @inline(arg_types=(REF, SCALAR, SCALAR, [blocks.layout(window.vec)] * len(keep)))
    def emit(_, x_smem, step, shift, keep):
        operands = {"x": x_smem, "step": scalar(step), "shift": scalar(shift), "thread": thread()}
        for b, block in enumerate(keep):
            operands |= {f"keep{b}_{i}": w for i, w in enumerate(words(block.registers.item()))}
        emit_ptx(p, operands)

    emit(x_smem, step, part.shift, keep)


def mask_program(window: Window, dtype, count: int, *, infinite: bool) -> Program:
    """Returns the program of `mask_step` for `count` blocks. <keep{b}_{i}> is a word of four bytes of block b."""
    element, p = Elements(dtype), Program()
    thread, step, x = p.operands("u32", "thread", "step", "x")
    block_bytes = window.block_size * element.itemsize
    address = p.at(p.at(x, step, window.step_blocks * block_bytes), thread, ACCESS_BYTES)
    first = p.multiply_add(step, window.step_blocks * window.block_size, thread * window.vec)
    if window.shifted:
        shift, bits = p.operand("shift", "u32"), element.neg_inf if infinite else element.all_ones
        first, address = first + shift, p.at(address, shift, element.itemsize)
        masked_x = p.var(bits, f"u{8 * element.itemsize}")
    # Outside the body, another warpgroup may be writing in `fill_tail`: `sample` has several warpgroups.
    for b in range(count):
        masked = []
        for j in range(window.vec):
            byte = p.operand(f"keep{b}_{j // _MASK_BYTES}", "u32") & _BYTE << 8 * (j % _MASK_BYTES)
            masked.append(byte.equals(0))
        if window.shifted:
            for j, is_masked in enumerate(masked):
                in_body = first + (b * window.block_size + j) < window.body
                p.store(address, masked_x, offset=b * block_bytes + j * element.itemsize, when=is_masked & in_body)
            continue
        in_body = first + b * window.block_size < window.body
        vector = [p.var(0, "s32") for _ in range(ACCESS_BYTES // 4)]
        p.load_into(vector, address, offset=b * block_bytes, when=in_body)
        for j, is_masked in enumerate(masked):
            at = j * element.itemsize
            word, element_bits = vector[at // 4], element.all_ones << 8 * (at % 4)
            p.update(word, "or", element_bits, when=is_masked)
            if infinite:  # turns all ones into -inf
                p.update(word, "xor", (element.neg_inf ^ element.all_ones) << 8 * (at % 4), when=is_masked)
        p.store(address, *vector, offset=b * block_bytes, when=in_body)
    return p
