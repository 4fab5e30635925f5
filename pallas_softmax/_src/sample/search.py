"""The search for the cutoff of each row, without a sort of the row.

Entries have weights: 1 for top_k, their masses for top_p. The last kept entry is the first one, in the row's order, at
which the sum of the weights reaches a target. Two steps find this entry:

    its key     by bisection on the bits of the sort keys: `_key_reaching`
    its index   among the entries with that key: `_index_reaching`

A row that is spread over a mesh is searched in the same way, with sums over its devices: a round finds 4 bits instead
of one. If there are many short rows, sorting each of them is slower than searching it ("On a CPU" in
benchmarks/results/NOTES.md).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.dispatch.mesh_types import is_tracked, vary_together
from pallas_softmax._src.sample.rows import (
    NOWHERE,
    Cutoff,
    Row,
    cutoff_of,
    elements,
    keys,
    mass_wanted,
    totals_of_rows,
)

# Elements of a block. The search takes the sums of blocks first, so a block has about the square root of a vocabulary.
_BLOCK = 256


def search(logits, where, temperature, top_k, top_p, min_p, row: Row) -> Cutoff:
    """Returns the `Cutoff` of each row, by bisection."""
    key, totals = keys(logits, where), totals_of_rows(logits, where, temperature, row)
    mass = jnp.exp((elements(logits, where, row) - totals.m) / totals.divisor)
    indices = row.indices(key.ndim)
    last: Any = (
        jnp.full((*key.shape[:-1], 1), jnp.iinfo(key.dtype).min, key.dtype),
        NOWHERE,
    )  # keeps everything

    def kept(value):  # by the filters so far; 0 for other entries
        return jnp.where((key > last[0]) | (key == last[0]) & (indices <= last[1]), value, 0)

    if top_k is not None:
        one = jnp.ones((), jnp.int32) if where is None else where.astype(jnp.int32)
        last = _last_entry(key, one, jnp.where(top_k < row.length, top_k, NOWHERE), row)
    if top_p is not None:
        wanted = mass_wanted(top_p, row.sum(kept(mass)))
        last = _first_of(last, _last_entry(key, kept(mass), wanted, row))
    if min_p is not None:
        least = row.min(jnp.where(mass >= min_p, key, jnp.iinfo(key.dtype).max))
        last = _first_of(last, (least, NOWHERE))
    kept_total = row.sum(kept(mass))
    best = row.max(key)
    first = row.min(jnp.where((key == best) & (mass == 1), indices, NOWHERE))  # masked elements have mass 0
    last = (jnp.where(totals.greedy, *both) for both in zip((best, first), last))
    key, index = (a if a.dtype.itemsize >= 4 else a.astype(jnp.int32) for a in last)
    return cutoff_of(key, index, kept_total, totals, temperature)


def _first_of(a, b):
    """Returns the one of two pairs (key, index) that comes first in the order of the row."""
    is_a = (a[0] > b[0]) | (a[0] == b[0]) & (a[1] < b[1])
    return tuple(jnp.where(is_a, *both) for both in zip(a, b))


def _last_entry(key, weight, target, row: Row):
    """Returns key and index of the first entry, by key and then index, at which the weights reach a target.

    Args:
      key: signed integers.
      weight: not negative; of the shape of the keys, or one scalar for all of them.
      target: positive. If the weights do not reach it, the result keeps all entries with a weight.
      row: the row that the keys belong to.
    """
    bound = _key_reaching(key, weight, target, row)
    above = row.sum(jnp.where(key > bound, weight, 0))
    return bound, _index_reaching(jnp.where(key == bound, weight, 0), target - above, row)


def _key_reaching(key, weight, target, row: Row):
    """Returns the highest key such that the entries with at least this key reach the target; else the least key."""
    bits = 4 if row.mesh_axes else 1
    rounds = 8 * key.dtype.itemsize // bits
    digits = jnp.arange(1, 2**bits, dtype=key.dtype).reshape((1,) * (key.ndim - 1) + (-1,))

    def find_digit(i, bound):
        """Finds the bits of one round, from the weights at and above each bound that the bits can give."""
        shift = jnp.asarray(bits * (rounds - 1 - i), key.dtype)
        higher = bound + lax.shift_left(digits, shift)
        at_least = key[..., None, :] >= higher[..., None]  # fused with the sum, so it takes no memory
        each = jnp.where(at_least, jnp.expand_dims(weight, -2) if weight.ndim else weight, 0)
        weights = jnp.sum(each, -1, dtype=weight.dtype)
        weights = lax.psum(weights, row.mesh_axes) if row.mesh_axes else weights
        digit = jnp.sum(weights >= target, -1, keepdims=True, dtype=key.dtype)
        return bound + lax.shift_left(digit, shift)

    least = jnp.full((*key.shape[:-1], 1), jnp.iinfo(key.dtype).min, key.dtype)
    least, *_ = vary_together(least, target, key, but=row.mesh_axes)
    return lax.fori_loop(0, rounds, find_digit, least)


def _index_reaching(weight, target, row: Row):
    """Returns the index of the first positive weight at which the sum, in the order of the row, reaches the target.

    If rounding keeps the sum below the target, the result is the index of the last positive weight. The search goes
    over the sums of the devices, then over the blocks of one device, and then over the elements of one block.

    Args:
      weight: not negative.
      target: a number for each row.
      row: the row that the weights belong to.
    """
    own = True
    if row.mesh_axes:
        sums = jnp.sum(weight, -1, keepdims=True, dtype=weight.dtype)
        to = "invarying" if is_tracked(row.mesh_axes) else "varying"
        sums = jnp.concatenate(list(lax.all_gather(sums, row.mesh_axes, to=to)), -1)
        device, target = _position_reaching(sums, target)
        own = device == lax.axis_index(row.mesh_axes)

    first = 0
    if isinstance(row.vocab, int) and row.vocab > _BLOCK:  # other rows are one block
        count = -(-row.vocab // _BLOCK)
        padding = [(0, 0)] * (weight.ndim - 1) + [(0, count * _BLOCK - row.vocab)]
        blocks = jnp.pad(weight, padding).reshape(*weight.shape[:-1], count, _BLOCK)
        block, target = _position_reaching(jnp.sum(blocks, -1, dtype=blocks.dtype), target)
        weight, first = jnp.take_along_axis(blocks, block[..., None], -2)[..., 0, :], block * _BLOCK
    position, _ = _position_reaching(weight, target)
    index = first + position
    return lax.pmin(jnp.where(own, row.start + index, NOWHERE), row.mesh_axes) if row.mesh_axes else index


def _position_reaching(weight, target):
    """Like `_index_reaching`, by one cumulative sum. Also returns the rest of the target before that position."""
    n = weight.shape[-1]
    position = lax.broadcasted_iota(jnp.int32, (1,) * (weight.ndim - 1) + (n,), weight.ndim - 1)
    there = jnp.where((jnp.cumsum(weight, -1, dtype=weight.dtype) >= target) & (weight > 0), position, n)
    last = jnp.where(weight > 0, position, 0)
    found = jnp.minimum(jnp.min(there, -1, keepdims=True), jnp.max(last, -1, keepdims=True))
    before = jnp.sum(jnp.where(position < found, weight, 0), -1, keepdims=True, dtype=weight.dtype)
    return found, target - before
