"""Inline PTX that counts the elements of a row that come before its label in the order of top-k.

The bits of float32 numbers have this order, up to their sign: as signed integers, larger bits come before a label that
is not negative; as unsigned integers, smaller bits come before a negative one. So an element takes a comparison and an
addition. Equal bits come before the label if their column is lower. All elements of a vector are compared with one
bound: such that equal bits count if the vector starts before the label. The vector that holds the label is corrected.
"""

import jax

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program

_SUMS = 4  # an addition need not wait for the one before


def count_before(count: jax.Array, xs: list[jax.Array], vec: int, column, key) -> jax.Array:
    """Returns the count of each thread, with the elements `xs` of a step added that come before the label.

    Args:
      count: float32 (128,).
      xs: float32 (128,) each: the `vec` neighbours of each block. Fillings are -inf, so they count if the label is -inf
        or -NaN. The bits of a NaN must be those of the row.
      vec: a power of two.
      column: the label's column, counted from the start of the step; any int32.
      key: the sort key of the label's logit in float32, more than the least int32.
    """
    operands = {f"x{i}": x for i, x in enumerate(xs)} | {"count": count}
    scalars = {"column": column, "key": key}
    (count,) = insert_ptx(count_program(len(xs), vec), {}, scalars, operands, {"new_count": "f32"})
    return count


def count_program(elements: int, vec: int) -> Program:
    """Returns the program of `count_before`. It reads <count>, <column>, <key>, <x0>, <x1>, ..., and writes <new_count>."""
    p, stride = Program(), WARPGROUP * vec
    xs = [x.bits("s32") for x in p.operands("f32", *(f"x{i}" for i in range(elements)))]
    key, sums = p.operand("key", "s32"), [p.var(0.0, "f32") for _ in range(_SUMS)]
    # from the start of the thread's first vector to the label
    distance = p.operand("column", "s32") - p.operand("thread", "u32").bits("s32") * vec
    is_negative = key < 0
    label = p.select(is_negative, key ^ 0x7FFFFFFF, key)
    for negative in (False, True):
        with p.when(is_negative if negative else ~is_negative):
            for first in range(0, elements, vec):
                starts_before = distance > first // vec * stride
                bound = p.select(starts_before, label + (1 if negative else -1), label)
                for i in range(first, first + vec):
                    if negative:
                        comes_before = xs[i].bits("u32") < bound.bits("u32")
                    else:
                        comes_before = xs[i] > bound
                    p.increase(sums[i % _SUMS], 1.0, when=comes_before)
    if vec > 1:
        in_vector = (distance - 1 & stride - 1) < vec - 1  # 1 to vec - 1 elements lie before the label
        with p.when(in_vector & (distance > 0) & (distance < elements // vec * stride)):
            for i in range(elements):
                at, offset = i // vec * stride, i % vec
                if offset:
                    is_later = (distance > at) & (distance < at + offset + 1) & xs[i].equals(label)
                    p.increase(sums[i % _SUMS], -1.0, when=is_later)
    p.set(p.operand("new_count", "f32"), p.operand("count", "f32") + p.reduce("add", sums))
    return p
