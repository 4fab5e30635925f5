"""The steps of a CTA that finds the k best of its row: their contracts, and each step in plain JAX.

On the GPU the steps are inline PTX, because Pallas has no scatter, sort or warp operations there. The interpreter runs
the JAX versions in this file. The steps by file, in the order of execution:

    arrival_ptx.py     clear, add_step                             while a row arrives in shared memory
    bound_ptx.py       bound                                        the search for the candidates in it
    selection_ptx.py   collect, count, collect_ties, expand_positions
                       collect_winners                              the candidates of a merge
    ranking_ptx.py     rank                                         the order of the candidates: by counting, sorting,
    buckets_ptx.py                                                  or buckets
    lists_ptx.py       rank_lists                                   the order of the winners of a few lists
    merging_ptx.py     take, take_words                             the k best of rows in registers

`gpu/window.py` has a drawing of the window, its positions and groups. `candidates.py` has a drawing of the list of
candidates. The steps take references to these arrays in shared memory:

    x_smem      (window.size,): the elements of the part, and -inf around them. A masked element is the float of the
                lowest key.
    group_keys  (>= window.groups,) int32: the largest key of each group. A NaN counts as the highest key.
    candidates  int32, two words for each of candidate_capacity(k): the list of candidates
    hits        int32, scratch: the numbers of the groups that reach the bound
    counts      (128,) int32: the number of candidates, and the number of groups in `hits`. The rest is scratch.

`plan.listed_items` has the lengths of `candidates` and `hits`. In a compact window both are int16, and `candidates` has
one number for each candidate, its position.
"""

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.gpu import sort_keys
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.window import Extent, Window
from pallas_softmax._src.topk import (
    arrival_ptx,
    bound_ptx,
    lists_ptx,
    merging_ptx,
    ranking_ptx,
    selection_ptx,
)
from pallas_softmax._src.topk.candidates import ranked_candidates, write_candidates
from pallas_softmax._src.topk.plan import padded_winners
from pallas_softmax._src.topk.tile_plan import merged_tile
from pallas_softmax.online import Normalizer, shift

# ---- while the row arrives


def clear(candidates, counts, *, interpret):
    """Empties the list of candidates."""
    if interpret:
        candidates[...] = jnp.zeros_like(candidates[...])
        counts[...] = jnp.zeros_like(counts[...])
    else:
        arrival_ptx.clear(candidates, counts)


def add_step(
    window: Window, x_smem, group_keys, step, blocks: int, lane: Normalizer, scale, *, masked: bool, interpret
):
    """Adds each thread's elements of a step to its normalizer (128,), and writes the step's group_keys.

    Args:
      step: number of the step.
      blocks: number of blocks in the step.
      lane: the normalizer of each thread (128,) before the step.
      scale: d is the sum of 2^((x - m) * scale).
      masked: whether there is a mask. Then an element with the lowest key is masked, and counts as -inf.
    """
    if not interpret:
        return arrival_ptx.add_step(window, x_smem, group_keys, step, blocks, lane, scale, masked)
    x = x_smem[pl.ds(step * window.step_blocks * window.block, blocks * window.block)]
    x = x.reshape(blocks, WARPGROUP, window.vec)
    key, lowest = sort_keys.key(x), sort_keys.lowest_key(x.dtype)
    if masked:
        x = jnp.where(key == lowest, -jnp.inf, x)
        key = jnp.where(key == lowest, sort_keys.key_of(-np.inf, x.dtype), key)
    key = jnp.where(jnp.isnan(x), ~lowest, key)
    x = x.astype(jnp.float32)
    m = jnp.maximum(lane.m, jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), (0, 2)))
    groups_per_step = window.step_blocks // window.group_blocks
    for i, start in enumerate(range(0, blocks, window.group_blocks)):
        at = (step * groups_per_step + i) * WARPGROUP
        group_keys[pl.ds(at, WARPGROUP)] = jnp.max(key[start : start + window.group_blocks], (0, 2))
    s = shift(m)
    terms = jnp.exp2((x - s[:, None]) * scale)
    return Normalizer(m, lane.d * jnp.exp2((lane.m - s) * scale) + jnp.sum(terms, (0, 2)))


# ---- the search


def bound(group_keys, candidates, counts, groups: int, k: int, *, interpret):
    """Returns a key that at least k of the first `groups` group_keys reach, and not many more.

    Args:
      candidates: an empty list. Its first 512 words are scratch, and empty again afterwards.
      counts: all words except the two counts are scratch.
    """
    if not interpret:
        return bound_ptx.bound(group_keys, candidates, counts, groups, k)
    return lax.sort(group_keys[:groups])[groups - k]


def collect(
    window: Window, x_smem, group_keys, hits, candidates, counts, bound, extent, *, all_groups, interpret
):
    """Appends the elements with keys that reach the bound to the list, in any order.

    If they do not fit, counts[0], the number of candidates, ends up larger than the capacity.

    Args:
      all_groups: whether to look at every group, in case `hits` is too short for the groups that reach the bound.
    """
    if not interpret:
        return selection_ptx.collect(
            window, x_smem, group_keys, hits, candidates, counts, bound, extent, all_groups=all_groups
        )
    key = sort_keys.key(x_smem[: window.size])
    chosen = _inside(window, extent) & (key >= bound)
    write_candidates(candidates, counts[0] + jnp.cumsum(chosen) - 1, chosen, key, _indices(window, extent))
    counts[0] = counts[0] + jnp.sum(chosen, dtype=jnp.int32)


def count(window: Window, x_smem, group_keys, bound, *, interpret):
    """Returns the number of positions in the window that reach the bound, and the number that exceed it."""
    if interpret:
        key = sort_keys.key(x_smem[: window.size])
        reach, exceed = (key >= bound).astype(jnp.int32), (key > bound).astype(jnp.int32)
    else:
        reach, exceed = selection_ptx.count(window, x_smem, group_keys, bound)
    return jnp.sum(reach, dtype=jnp.int32), jnp.sum(exceed, dtype=jnp.int32)


def collect_ties(window: Window, x_smem, scratch, candidates, bound, extent, first, k: int, *, interpret):
    """Writes the elements that equal the bound to entries `first` to k - 1, in order of index.

    Args:
      scratch: shared memory of at least 8 words.
    """
    if not interpret:
        return selection_ptx.collect_ties(window, x_smem, scratch, candidates, bound, extent, first, k)
    key = sort_keys.key(x_smem[: window.size])
    tied = _inside(window, extent) & (key == bound)
    place = first + jnp.cumsum(tied) - 1
    write_candidates(candidates, place, tied & (place < k), key, _indices(window, extent))


def collect_winners(candidates, counts, keys_gmem, indices_gmem, row, first, n, bound, *, interpret):
    """Lists those among n winners in device memory that reach the bound. counts[0] gets their number.

    Args:
      candidates, counts: an empty list, with room for n.
      keys_gmem, indices_gmem: (rows, winners) int32.
      row, first: the n winners start at [row, first] of these arrays.
    """
    if not interpret:
        return selection_ptx.collect_winners(
            candidates, counts, keys_gmem, indices_gmem, row, first, n, bound
        )
    capacity = candidates.size // 2
    inside = jnp.arange(capacity) < n
    at = jnp.where(inside, first + jnp.arange(capacity), 0)
    chosen = inside & (keys_gmem[row][at] >= bound)
    write_candidates(candidates, jnp.cumsum(chosen) - 1, chosen, keys_gmem[row][at], indices_gmem[row][at])
    counts[0] = jnp.sum(chosen, dtype=jnp.int32)


def _inside(window: Window, extent: Extent):
    position = jnp.arange(window.size)
    return (position >= extent.low) & (position < extent.high)


def _indices(window: Window, extent: Extent):
    return extent.origin + jnp.arange(window.size, dtype=jnp.int32)


def expand_positions(x_smem, positions, candidates, n, origin):
    """Turns a list of n positions into a list of candidates. It overwrites the row in shared memory.

    Only the GPU needs this: the interpreter never lists positions.
    """
    selection_ptx.expand_positions(x_smem, positions, candidates, n, origin)


# ---- the order


def rank(candidates, n, buckets, ranked, k: int, dtype, vocab: int | None, *, interpret):
    """Writes the k best of the first n candidates to `ranked`, in order: keys, then indices from padded_winners(k) on.

    Args:
      buckets: scratch in shared memory, one word for each candidate.
      ranked: shared memory, at least 2 * padded_winners(k) words.
      dtype: dtype of the logits.
      vocab: an exclusive upper bound of the indices, or None.
    """
    padded = padded_winners(k)
    if not interpret:
        return ranking_ptx.rank(candidates, n, buckets, ranked, k, padded, dtype, vocab)
    key, index = ranked_candidates(candidates, n)
    ranked[:k] = key[:k]
    ranked[padded : padded + k] = index[:k]


def rank_lists(candidates, ranked, keys_gmem, indices_gmem, row, lists: int, k: int, *, interpret):
    """Writes the k best winners in the lists of a row to `ranked`, in the format of `rank`.

    Args:
      candidates: scratch in shared memory, with room for lists * k.
      keys_gmem, indices_gmem: (rows, lists * k) int32, device memory. Each list has k winners, in order.
    """
    padded = padded_winners(k)
    if not interpret:
        return lists_ptx.rank_lists(candidates, ranked, keys_gmem, indices_gmem, row, lists, k, padded)
    at = jnp.arange(lists * k)
    write_candidates(candidates, at, at >= 0, keys_gmem[row], indices_gmem[row])
    key, index = ranked_candidates(candidates, lists * k)
    ranked[:k] = key[:k]
    ranked[padded : padded + k] = index[:k]


def take(tile: Tile, vocab: int, k: int, key, per_row, *, interpret):
    """Returns indices of the k best of each row, and per_row, as tiles of `merged_tile`, blocked (see `tiles.store`).

    Args:
      vocab: number of elements of a row. The tile may have more columns.
      key: tile with the keys of the row's elements.
      per_row: tiles that hold one number for each row. They are returned spread over the winners' tile.
    """
    if not interpret:
        return merging_ptx.take(tile, vocab, k, key, per_row)
    out = merged_tile(tile, k)
    columns = lax.broadcasted_iota(jnp.int32, (tile.rows, vocab), 1)
    _, best = lax.sort((~key[:, :vocab], columns), num_keys=2)
    best = jnp.pad(best[:, :k], ((0, 0), (0, out.shape[1] - k)))
    return best, [jnp.broadcast_to(a[:, :1], out.shape) for a in per_row]


def take_words(tile: Tile, vocab: int, k: int, bits, per_row, *, interpret):
    """Returns keys and indices of the k best of each row, and per_row, as tiles of `merged_tile`, blocked.

    Args:
      bits: tile with the bits of the row's 16-bit elements, all ones for masked elements.
      vocab, per_row: as in `take`.
    """
    if not interpret:
        word, per_row = merging_ptx.take_words(tile, vocab, k, bits, per_row)
    else:
        key = sort_keys.key(lax.bitcast_convert_type(bits, jnp.bfloat16))[:, :vocab]  # the same for float16
        words = key << 16 | (0xFFFF - lax.broadcasted_iota(jnp.int32, (tile.rows, vocab), 1))
        out = merged_tile(tile, k)
        best = ~lax.sort(~words)[:, :k]
        word = jnp.pad(best, ((0, 0), (0, out.shape[1] - k)))
        per_row = [jnp.broadcast_to(a[:, :1], out.shape) for a in per_row]
    return word >> 16, ~word & 0xFFFF, per_row
