"""Counts the elements of a part that come before the row's label in the order of top-k, as part of its reduction.

While the part arrives, each thread adds the elements of a step (`before_ptx`). It compares all elements of a vector
with one bound, so the vector that holds the label may count elements after it: `overcount`. Masked elements and other
fillings are -inf then, and 16-bit elements have become float32. In the rare rows where that matters, the part is
counted again from shared memory, element by element: `recounted`.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.softmax import before_ptx
from pallas_softmax._src.softmax.formulas import Label, Located, comes_before


def _add_step_in_jax(part: Any, before, terms: list, i, size: int):
    walk = part.job.parts.walk
    starts = [i * walk.step_size + at for at in range(0, size, walk.block_size)]
    return before + normalizers.tree_sum(_count_in_block(part, start) for start in starts)


@twin(_add_step_in_jax)
def add_step(part: Any, before, terms: list, i, size: int):
    """Returns the counts of all threads, with step i of the part's body added. `terms` are its terms."""
    walk = part.job.parts.walk
    label = _label_from(part, part.body_start + i * walk.step_size)
    return before_ptx.count_before(before, terms, walk.vec, label.column, label.wide_key)


@twin(lambda part: blocks.filled(0.0))
def overcount(part: Any):
    """Returns how many elements each thread has that follow the label in its vector, equal it, and were counted."""
    walk = part.job.parts.walk
    label = _label_from(part, part.body_start)
    block = jnp.clip(label.column // walk.block_size, 0, walk.padded_length // walk.block_size - 1)
    start = block * walk.block_size
    position, column = blocks.positions(walk.vec), label.column - start
    first = column - (
        column & walk.vec - 1
    )  # of the label's vector, which counts equal elements unless it is first
    same = _keys(part, start) == label.key
    follows = (position >= column) & (position < first + walk.vec) & (first < column)
    return _sum_of_counted(part, start, jnp.where(same & follows, 1.0, 0.0))


def recounted(part: Any, total: Located):
    """Returns the count of the part, counted again if -inf may count, or if a 16-bit NaN may have lost its sign."""
    inexact = _label_from(part, 0).key <= sort_keys.key_of_number(-np.inf, part.job.dtype)
    if part.job.dtype.itemsize == 2:
        inexact |= total.moments.m != total.moments.m
    walk = part.job.parts.walk

    def count_again():
        def take_block(block, before):
            return before + _count_in_block(part, block * walk.block_size)

        before = lax.fori_loop(0, walk.padded_length // walk.block_size, take_block, blocks.filled(0.0))
        return jnp.sum(before + in_edges(part) if part.edges else before)

    return lax.cond(inexact, count_again, lambda: total.before)


def in_edges(part: Any):
    """Returns how many elements of the edges each thread has that come before the label."""
    label, counts = _label_from(part, 0), []
    for edge in part.edges:
        keys = sort_keys.key32(edge.arrays[0])
        before = comes_before(keys, blocks.positions() + edge.start, label)
        before = jnp.where(edge.counted, before, 0.0)
        counts.append(before if edge.keep is None else jnp.where(edge.keep, before, 0.0))
    return normalizers.tree_sum(counts)


def _count_in_block(part: Any, start):
    """Returns how many elements each thread has, of the block at element `start` of the body, that come before."""
    label = _label_from(part, part.body_start + start)
    before = comes_before(_keys(part, start), blocks.positions(part.job.parts.vec), label)
    return _sum_of_counted(part, start, before)


def _keys(part: Any, start):
    """Returns the sort keys of the block at element `start` of the body, as they are stored."""
    walk, (x_smem,) = part.job.parts.walk, part.refs.x_smem
    return sort_keys.key32(blocks.load(x_smem.at[pl.ds(start, walk.block_size)], walk.vec))


def _sum_of_counted(part: Any, start, numbers):
    """Returns the sum over each thread's elements of a block, without those masked, or after the end of the body."""
    walk = part.job.parts.walk
    left = walk.length - start
    if walk.length % walk.block_size:
        numbers = jnp.where(blocks.positions(walk.vec) < left, numbers, 0.0)
    if part.job.mask is not None:
        keep = part.load_mask(part.body_start + start, left, walk.vec)
        numbers = jnp.where(keep != 0, numbers, 0.0)
    return normalizers.tree_sum(blocks.split(numbers, walk.vec))


def _label_from(part: Any, element) -> Label:
    """Returns the label of the row, with its column counted from an element of the part."""
    column, *keys = (gmem[part.place.row] for gmem in part.refs.label_gmem)
    return Label(column - part.place.start - element, *keys)
