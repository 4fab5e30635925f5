"""Counts the elements of a segment that come before the row's label in the order of top-k, as part of its reduction.

The functions are the stages, in order. Each thread has a count of its own:

    add_step     counts the elements of a step while the segment arrives
    overcount    corrects the vector that holds the label, where elements after the label may have been counted
    is_inexact   tells whether `add_step` may be wrong in this row, which is rare: if the label is -inf or -NaN, as
                 masked elements and fillings were -inf; or if a 16-bit row has a NaN, which may have lost its sign when
                 it became float32
    count_again  counts such a segment from shared memory, element by element

`add_step` is inline PTX. The bits of float32 numbers, as signed integers, have this order if they are not negative. If
the label is negative, all bits but the sign are flipped: then negative numbers are in order, and the others are above
them in any case. So an element takes three instructions: it is flipped, compared and counted.

An element that equals the label comes before it if its column is lower. All elements of a vector are compared with one
bound: in vectors that start before the label, it lets equal elements count. So the label's vector may also count equal
elements after the label, unless the label is its first element. `overcount` finds these.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.softmax import states_ptx
from pallas_softmax._src.softmax.formulas import SUM, Label, Located, comes_before

_SUMS = 4  # independent sums, so that no addition waits for the one before


@twin
def add_step(segment: Any, before, terms: list, i, size: int):
    """Adds step i of the segment's middle to the counts `before`. `terms` are its elements."""
    label = _label_from(segment, segment.middle_start + i * segment.walk.step_size)
    numbers = {f"x{i}": x for i, x in enumerate(terms)}
    numbers |= {"count": before, "column": label.column, "key": label.wide_key}
    return insert_ptx(count_program(len(terms), segment.vec), {}, numbers, {"new_count": "f32"})[0]


@twin
def overcount(segment: Any):
    """Returns how many elements were counted wrongly: they follow the label, equal, in its vector."""
    walk = segment.walk
    label = _label_from(segment, segment.middle_start)
    block = jnp.clip(label.column // walk.block_size, 0, walk.padded_length // walk.block_size - 1)
    start = block * walk.block_size
    position, column = segment.positions(), label.column - start
    first = column - (column & segment.vec - 1)  # the first element of the label's vector
    same = _keys(segment, start) == label.key
    # If the label is the first element, its vector does not start before it, and counts no equal elements.
    follows = (position >= column) & (position < first + segment.vec) & (first < column)
    return _sum_of_counted(segment, start, jnp.where(same & follows, 1.0, 0.0))


def is_inexact(segment: Any, total: Located):
    inexact = _label_from(segment, 0).key <= sort_keys.key_of_number(-np.inf, segment.job.dtype)
    if segment.job.dtype.itemsize == 2:
        inexact |= total.moments.m != total.moments.m
    return inexact


def count_again(segment: Any, number) -> None:
    """Counts in segment `number` of the CTA, and writes the count as its record."""
    walk = segment.walk
    before = lax.fori_loop(
        0,
        walk.padded_length // walk.block_size,
        lambda block, before: before + _count_in_block(segment, block * walk.block_size),
        blocks.filled(0.0),
    )
    before = before + in_edges(segment) if segment.edges else before
    states_ptx.write_record(SUM, before, segment.refs.records_smem, number)


def in_edges(segment: Any):
    label, counts = _label_from(segment, 0), []
    for edge in segment.edges:
        keys = sort_keys.key32(edge.arrays[0])
        before = comes_before(keys, blocks.positions() + edge.start, label)
        for condition in (edge.counted, edge.keep):
            before = before if condition is None else jnp.where(condition, before, 0.0)
        counts.append(before)
    return normalizers.tree_sum(counts)


def _count_in_block(segment: Any, start):
    """Counts in the block at position `start` of the middle."""
    label = _label_from(segment, segment.middle_start + start)
    before = comes_before(_keys(segment, start), segment.positions(), label)
    return _sum_of_counted(segment, start, before)


def _keys(segment: Any, start):
    (x_smem,) = segment.refs.x_smem
    return sort_keys.key32(segment.load_at(start, x_smem))


def _sum_of_counted(segment: Any, start, numbers):
    """Returns the sum of `numbers` over each thread's elements of a block that are in the middle and not masked."""
    if segment.parts.middle < segment.walk.padded_length or segment.parts.overlaps:
        numbers = jnp.where(segment.positions() < segment.held - start, numbers, 0.0)
    if segment.job.mask is not None:
        numbers = jnp.where(segment.load_mask_at(start) != 0, numbers, 0.0)
    return normalizers.tree_sum(blocks.split(numbers, segment.vec))


def _label_from(segment: Any, element) -> Label:
    """Returns the label of the row, with its column counted from an element of the segment."""
    column, *keys = (gmem[segment.place.row] for gmem in segment.refs.label_gmem)
    return Label(column - segment.place.start - element, *keys)


# --- Inline PTX


def count_program(elements: int, vec: int) -> Program:
    """Returns the program of `add_step`: it adds to <count> how many elements come before the label, for <new_count>.

    <x0>, <x1>, ...   the elements, float32: `vec` neighbours of each thread, block by block. Fillings are -inf, so they
                      count if the label is -inf or -NaN. A NaN must have the bits that it has in the row
    <column>          the label's column, counted from the start of the step; any int32
    <key>             the sort key of the label's logit in float32, more than the least int32
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
