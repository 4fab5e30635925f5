"""Inline PTX that counts the elements of a row that come before its label in the order of top-k.

The bits of float32 numbers, as signed integers, have this order if they are not negative. If the label is negative, all
bits but the sign are flipped: then negative numbers are in order, and the others are above them in any case. So an
element takes three instructions: it is flipped, compared and counted.

An element that equals the label comes before it if its column is lower. All elements of a vector are compared with one
bound: in vectors that start before the label, it lets equal elements count. So the vector that holds the label may also
count equal elements after the label; the caller subtracts these.
"""

import jax

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program

_SUMS = 4  # independent sums, so that no addition waits for the one before


def count_before(count: jax.Array, xs: list[jax.Array], vec: int, column, key) -> jax.Array:
    """Returns each thread's `count` plus the number of its elements `xs` of a step that come before the label.

    In the vector that holds the label, all equal elements count, unless the label is its first element.

    Args:
      count: float32 (128,).
      xs: float32 (128,) each: `vec` neighbours of each thread, block by block. Fillings are
        -inf, so they count if the label is -inf or -NaN. A NaN must have the bits that it has in the row.
      vec: a power of two.
      column: the label's column, counted from the start of the step; any int32.
      key: the sort key of the label's logit in float32, more than the least int32.
    """
    operands = {f"x{i}": x for i, x in enumerate(xs)} | {"count": count}
    scalars = {"column": column, "key": key}
    (count,) = insert_ptx(count_program(len(xs), vec), {}, scalars, operands, {"new_count": "f32"})
    return count


def count_program(elements: int, vec: int) -> Program:
    """Returns the program of `count_before`.

    It reads <count>, <column>, <key>, and the elements <x0>, <x1>, ...; it writes <new_count>.
    """
    p, stride = Program(), WARPGROUP * vec
    xs = [x.bits("s32") for x in p.operands("f32", *(f"x{i}" for i in range(elements)))]
    key, sums = p.operand("key", "s32"), [p.var(0.0, "f32") for _ in range(_SUMS)]
    # from the start of the thread's first vector to the label
    distance = p.operand("column", "s32") - p.operand("thread", "u32").bits("s32") * vec
    flip = p.select(key < 0, 0x7FFFFFFF, 0, "s32")
    for first in range(0, elements, vec):
        starts_before = distance > first // vec * stride  # the vector, before the label
        bound = p.select(starts_before, key - 1, key)
        for i in range(first, first + vec):
            p.increase(sums[i % _SUMS], 1.0, when=(xs[i] ^ flip) > bound)
    p.set(p.operand("new_count", "f32"), p.operand("count", "f32") + p.reduce("add", sums))
    return p
