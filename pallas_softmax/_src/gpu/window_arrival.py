"""How a part of a row arrives in its `Window`: bulk copies, the edges around them, and the mask."""

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
    body: Any  # number of the element in x_gmem where the body starts
    low: Any  # position of the first element in the window
    high: Any  # the position after the last one
    origin: Any  # index in the row that position 0 has; it may be negative
    mask: Any  # None, or (reference to the mask, its row)


def part_of(window: Window, x_gmem, mask: Mask | None, mask_gmem) -> WindowPart:
    place = part_place(window.cut, x_gmem.shape)
    before_body = (-place.first) % window.vec if window.head else 0  # elements
    low = window.head - before_body
    low, high, origin = map(jnp.int32, (low, low + place.owned, place.start - low))
    mask_of_part = None if mask is None else (mask_gmem, mask.row(place.row))
    return WindowPart(place, place.in_view(x_gmem), place.first + before_body, low, high, origin, mask_of_part)


def start_copies(window: Window, part: WindowPart, x_smem, arrived) -> None:
    for i, (position, size) in enumerate(window.copies()):
        plgpu.copy_gmem_to_smem(
            part.x_gmem.at[pl.ds(part.body + (position - window.head), size)],
            x_smem.at[pl.ds(position, size)],
            arrived.at[i],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )


@twin
def fill_head_and_tail(window: Window, part: WindowPart, x_smem, *, infinite: bool = False) -> None:
    """Fills the head and the tail of the window. Each thread fills at most one position of the head, and every 128th of
    the tail: with the element if low <= position < high, otherwise with -inf.

    A masked element becomes the float of the lowest key, or -inf if `infinite`.
    """
    element, p = Elements(x_smem.dtype), Program()
    refs = {"x": part.x_gmem, "smem": x_smem}
    numbers = {"first": part.place.first, "low": part.low, "high": part.high, "origin": part.origin}
    if part.mask is not None:
        refs["mask"], numbers["row"] = part.mask
    thread, first, low, high, origin = p.operands("s32", "thread", "first", "low", "high", "origin")

    def fill(position, end, in_row):
        x, within = p.var(element.neg_inf, f"u{8 * element.itemsize}"), position < end
        if in_row:
            inside = within & (position >= low) & (position < high)
            number = (first + (position - low)).bits("u32")
            x_at = p.operand("x", "u64") + p.multiply_wide(number, element.itemsize)
            p.load_into([x], x_at, when=inside)
            if part.mask is not None:
                columns, keep = refs["mask"].shape[1], p.var(1, "u8")
                mask_at = p.operand("mask", "u64") + p.multiply_wide(p.operand("row", "u32"), columns)
                if columns > 1:
                    mask_at = mask_at + p.convert((position + origin).bits("u32"), "u64")
                p.load_into([keep], mask_at, when=inside)
                masked = p.convert(keep, "u32").equals(0)
                p.set(x, element.neg_inf if infinite else element.all_ones, when=masked)
        p.store(p.at(p.operand("smem", "u32"), position, element.itemsize), x, when=within)

    if window.head:
        fill(thread, window.head, True)
    for position in range(window.head + window.body, window.size, WARPGROUP):
        fill(thread + position, window.size, position < window.head + window.cut.longest)
    insert_ptx(p, refs, numbers)


def mask_of_step(window: Window, part: WindowPart, i) -> tuple:
    """Returns the mask of each block of step i, int8 and 0 outside the body; or () without a mask."""
    if part.mask is None:
        return ()
    mask_gmem, mask_row = part.mask

    def load(b):
        position = (i * window.step_blocks + b) * window.block_size
        start, held = position + part.origin, window.head + window.body - position
        skip = window.head - jnp.minimum(position, window.head)
        return blocks.load_mask(mask_gmem, mask_row, start, held, window.vec, skip=skip)

    return tuple(load(b) for b in range(max(window.step_blocks, window.rest)))


@twin
def mask_step(window: Window, x_smem, step, keep, *, infinite: bool = False) -> None:
    """Masks the positions of a step that lie in the body. (`fill_head_and_tail` masks the head and the tail.)

    `keep` has one block of int8 for each block of the step. An element with keep = 0 gets all bits set, which is the
    float of the lowest key; or it becomes -inf if `infinite`. Example: two words of 16-bit elements, with x0 in the
    lower half, and their mask word, which has byte 1 = 0:

        words  x1 x0 | x3 x2     mask  01 01 00 01     ->  ffff x0 | x3 x2
    """
    element, p = Elements(x_smem.dtype), Program()
    thread_, step_, x = p.operands("u32", "thread", "step", "x")
    block_bytes = window.block_size * element.itemsize
    address = p.at(p.at(x, step_, window.step_blocks * block_bytes), thread_, ACCESS_BYTES)
    first = p.multiply_add(step_, window.step_blocks * window.block_size, thread_ * window.vec)
    for b in range(len(keep)):
        position = first + b * window.block_size
        from_head = position >= window.head
        in_body = from_head & (position < window.head + window.body)
        # Outside the body, another warpgroup may be writing in `fill_head_and_tail`: `sample` has several warpgroups.
        vector = [p.var(0, "s32") for _ in range(ACCESS_BYTES // 4)]
        p.load_into(vector, address, offset=b * block_bytes, when=in_body)
        for j in range(window.vec):
            byte = p.operand(f"keep{b}_{j // _MASK_BYTES}", "u32") & _BYTE << 8 * (j % _MASK_BYTES)
            masked = byte.equals(0)
            at = j * element.itemsize
            word, element_bits = vector[at // 4], element.all_ones << 8 * (at % 4)
            p.update(word, "or", element_bits, when=masked)
            if infinite:  # turns all ones into -inf
                p.update(word, "xor", (element.neg_inf ^ element.all_ones) << 8 * (at % 4), when=masked)
        p.store(address, *vector, offset=b * block_bytes, when=in_body)

    @inline(arg_types=(REF, SCALAR, [blocks.layout(window.vec)] * len(keep)))
    def emit(_, x_smem, step, keep):
        operands = {"x": x_smem, "step": scalar(step), "thread": thread()}
        for b, block in enumerate(keep):
            operands |= {f"keep{b}_{i}": w for i, w in enumerate(words(block.registers.item()))}
        emit_ptx(p, operands)

    emit(x_smem, step, keep)
