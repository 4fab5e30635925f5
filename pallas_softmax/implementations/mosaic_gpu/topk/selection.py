"""The steps by which a CTA finds the best of its row in shared memory: each in plain JAX, for the interpreter.

On the GPU each is inline PTX (`selection_ptx`): Pallas has no scatter, sort or warp operations there.

Positions are those of the window (`plan.Window`), of which the row has those of an `Extent`; elsewhere
there is -inf. A key is an integer in lax.top_k's order of the elements. A candidate is a slot of 8 bytes,
the complement of the element's index below, its key as an unsigned number above: as a number of 64 bits,
larger is better, and of equal keys the lower index. An empty slot is 0.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.device import sort_keys
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.topk import ranking_ptx, selection_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window, padded_winners, winners_tile
from pallas_softmax.online import Normalizer, shift

_SIGN = np.int32(-(2**31))


class Extent(NamedTuple):
    """Of the row in the window: first position, one after the last, and the index of position 0."""

    low: Any
    high: Any
    origin: Any


def fill(window: Window, gmem, first, smem, extent: Extent, mask, *, interpret):
    """Writes what the bulk copies leave out: the few elements around the body, and -inf around those.

    Args:
      gmem: in which the row starts at `first`.
      mask: None, or (the mask, its row): masked elements become the lowest key.
    """
    if not interpret:
        return selection_ptx.fill(window, gmem, first, smem, extent, mask)
    for start, end in ((0, window.head), (window.head + window.body, window.size)):
        if start == end:
            continue
        at = jnp.arange(start, end)
        inside = (at >= extent.low) & (at < extent.high)
        x = jnp.where(inside, gmem[...][jnp.where(inside, first + at - extent.low, 0)], -jnp.inf)
        if mask is not None:
            ref, row = mask
            column = jnp.where(inside & (ref.shape[1] > 1), at + extent.origin, 0)
            x = jnp.where(inside & ~ref[row][column], sort_keys.lowest(smem.dtype), x)
        smem[start:end] = x.astype(smem.dtype)


def clear(slots, counts, *, interpret):
    """Empties the list."""
    if interpret:
        slots[...] = jnp.zeros_like(slots[...])
        counts[...] = jnp.zeros_like(counts[...])
    else:
        selection_ptx.clear(slots, counts)


def mark(window: Window, smem, step, blocks, *, interpret):
    """Writes the lowest key where the mask, a block of int8 for each block of the step, is 0."""
    if not interpret:
        return selection_ptx.mark(window, smem, step, blocks)
    start, size = step * window.group * window.block, len(blocks) * window.block
    at = start + jnp.arange(size)
    body = (at >= window.head) & (at < window.head + window.body)
    x = smem[pl.ds(start, size)]
    smem[pl.ds(start, size)] = jnp.where(body & (jnp.concatenate(blocks) == 0), sort_keys.lowest(x.dtype), x)


def absorb(window: Window, smem, groups, step, blocks: int, lane: Normalizer, scale, *, marked, interpret):
    """Each thread's normalizer with its elements of a step added: ⊕ with one rescaling of d for all.

    The largest element of each group goes to `groups` as a key, the highest key if there is a NaN.

    Args:
      scale: d is the sum of 2^((x - m) scale).
      marked: take the lowest key for a masked element.
    """
    if not interpret:
        return Normalizer(
            *selection_ptx.absorb(window, smem, groups, step, blocks, lane.m, lane.d, scale, marked)
        )
    x = smem[pl.ds(step * window.group * window.block, blocks * window.block)]
    x = x.reshape(blocks, WARPGROUP, window.vec)
    key, lowest = sort_keys.key(x), sort_keys.lowest_key(x.dtype)
    if marked:
        x = jnp.where(key == lowest, -jnp.inf, x)
        key = jnp.where(key == lowest, sort_keys.key_of(-np.inf, x.dtype), key)
    key = jnp.where(jnp.isnan(x), ~lowest, key)
    x = x.astype(jnp.float32)
    m = jnp.maximum(lane.m, jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), (0, 2)))
    for i in range(0, blocks, window.pool):
        at = (step * (window.group // window.pool) + i // window.pool) * WARPGROUP
        groups[pl.ds(at, WARPGROUP)] = jnp.max(key[i : i + window.pool], (0, 2))
    s = shift(m)
    terms = jnp.exp2((x - s[:, None]) * scale)
    return Normalizer(m, lane.d * jnp.exp2((lane.m - s) * scale) + jnp.sum(terms, (0, 2)))


def threshold(groups, scratch, size: int, k: int, *, interpret):
    """A key that at least k of the first `size` groups reach, and not many more."""
    if not interpret:
        return selection_ptx.threshold(groups, scratch, size, k)
    return lax.sort(groups[:size])[size - k]


def collect(window: Window, smem, groups, hits, slots, counts, bound, extent, *, all_groups, interpret):
    """Appends the elements whose key reaches the bound, and counts them: beyond the slots, only that they are.

    Args:
      hits: scratch, for the groups that reach the bound.
      counts: of candidates, and of groups.
      all_groups: whether `hits` may be too short for the groups; slower.
    """
    if not interpret:
        return selection_ptx.collect(
            window, smem, groups, hits, slots, counts, bound, extent, all_groups=all_groups
        )
    chosen = _inside(window, extent) & (sort_keys.key(smem[: window.size]) >= bound)
    _append(slots, counts[0] + jnp.cumsum(chosen) - 1, chosen, smem, window, extent)
    counts[0] = counts[0] + jnp.sum(chosen, dtype=jnp.int32)


def reaching(window: Window, smem, groups, bound, *, interpret):
    """How many positions hold a key that reaches the bound, and that exceeds it; of groups that reach it."""
    if not interpret:
        least, more = selection_ptx.reaching(window, smem, groups, bound)
    else:
        key = sort_keys.key(smem[: window.size])
        least, more = (key >= bound).astype(jnp.int32), (key > bound).astype(jnp.int32)
    return jnp.sum(least, dtype=jnp.int32), jnp.sum(more, dtype=jnp.int32)


def ties(window: Window, smem, hits, slots, bound, extent, first, k: int, *, interpret):
    """Writes the elements with this key to the slots from `first` to k - 1, those of lowest index first."""
    if not interpret:
        return selection_ptx.ties(window, smem, hits, slots, bound, extent, first, k)
    tied = _inside(window, extent) & (sort_keys.key(smem[: window.size]) == bound)
    slot = first + jnp.cumsum(tied) - 1
    _append(slots, slot, tied & (slot < k), smem, window, extent)


def enlist(slots, counts, keys, indices, row, first, n, bound, *, interpret):
    """Appends those of n keys, from `first` on in a row of device memory, that reach the bound."""
    if not interpret:
        return ranking_ptx.enlist(slots, counts, keys, indices, row, first, n, bound)
    capacity = slots.size // 2
    inside = jnp.arange(capacity) < n
    at = jnp.where(inside, first + jnp.arange(capacity), 0)
    chosen = inside & (keys[row][at] >= bound)
    pairs = jnp.stack([~indices[row][at], keys[row][at] ^ _SIGN], axis=1)
    slot = jnp.where(chosen, jnp.cumsum(chosen) - 1, capacity)
    slots[...] = slots[...].reshape(capacity, 2).at[slot].set(pairs, mode="drop").reshape(-1)
    counts[0] = jnp.sum(chosen, dtype=jnp.int32)


def rank(slots, n, best, k: int, *, interpret):
    """The k best of the first n slots, best first: their keys, then from `padded_winners(k)` on their indices."""
    padded = padded_winners(k)
    if not interpret:
        return ranking_ptx.rank(slots, n, best, k, padded)
    index, key = slots[...].reshape(-1, 2).T
    empty = jnp.arange(index.size) >= n
    _, key, index = lax.sort((empty, ~(key ^ _SIGN), ~index), num_keys=3)
    best[:k] = ~key[:k]
    best[padded : padded + k] = index[:k]


def _inside(window, extent):
    at = jnp.arange(window.size)
    return (at >= extent.low) & (at < extent.high)


def _append(slots, slot, chosen, smem, window, extent):
    index = extent.origin + jnp.arange(window.size, dtype=jnp.int32)
    pairs = jnp.stack([~index, sort_keys.key(smem[: window.size]) ^ _SIGN], axis=1)
    capacity = slots.size // 2
    slot = jnp.where(chosen, slot, capacity)
    slots[...] = slots[...].reshape(capacity, 2).at[slot].set(pairs, mode="drop").reshape(-1)


def take(tile: Tile, vocab: int, k: int, key, per_row, *, narrow, interpret):
    """The k best of each row of a tile of keys, as tiles `winners_tile`: keys and indices; and `per_row`.

    Args:
      per_row: tiles, each of one number a row.
      narrow: the keys are those of 16 bits.
    """
    if not interpret:
        return ranking_ptx.take(tile, vocab, k, key, per_row, narrow)
    out = winners_tile(tile, k)
    _, best = lax.sort((~key[:, :vocab], lax.broadcasted_iota(jnp.int32, (tile.rows, vocab), 1)), num_keys=2)
    best = jnp.pad(best[:, :k], ((0, 0), (0, out.shape[1] - k)))
    return (jnp.take_along_axis(key, best, 1), best), [jnp.broadcast_to(a[:, :1], out.shape) for a in per_row]
