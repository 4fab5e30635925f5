"""How the rows of top-k lie over the GPU: `plan_topk`, a pure function of V, k, dtype and device.

The number of rows does not count. So a row's sums have the same order in any batch.

A long row lies in the shared memory of a CTA, or is cut into `count` parts with a CTA each: `layout.Window` draws the
array.

A short row lies over some lanes of a warp, as a `Tile`. The winners lie over the same lanes, in order, as another tile
(`merged_tile`). Only its first k elements count. An example with ten elements a to j over 4 lanes, which load two
elements at once:

    row        a b | c d | e f | g h      step 0
               i j |     |     |          step 1
    winners    j d | a i | c . | . .      k = 5, and the order is j, d, a, i, c
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Refusal
from pallas_softmax._src.gpu.hardware import (
    ACCESS_BYTES,
    LANES,
    RESERVED_SMEM_BYTES,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    WARPGROUP,
    smem_of_each,
)
from pallas_softmax._src.gpu.layout import Tile, Window, merged_tile, power_of_two, row_tile
from pallas_softmax._src.sort_keys import INTEGERS_AS_FLOATS

# --- Windows

# "The limits between plans" in benchmarks/results/NOTES.md has the measurements behind these constants, of one H100.

# The lists for 2048 winners take at least 64 KB of shared memory. On compute capability 12, a CTA has 95 KB.
MAX_K = 2_048  # winners

# With many winners, a third CTA costs more search time than it saves. Rows that fill a multiprocessor are faster whole.
MANY_WINNERS = 65  # at least this many winners have parts of MANY_WINNERS_BYTES
MANY_WINNERS_BYTES = 108_000  # with at most this many bytes, two CTAs share a multiprocessor
WHOLE_ROW_BYTES = 160_000  # float32 rows of at least this many bytes are not cut if they fit

# With few winners, shorter parts are as fast for many rows, and faster for few.
FEW_WINNERS = 31  # up to this many winners
# With rows this long, two CTAs with float32 rows or three with 16-bit rows share a multiprocessor. One searches its row
# while the others' rows arrive.
ROW_BYTES = {4: 108_000, 2: 66_000}  # most bytes of a row that is not cut, by bytes of an element
CUT_PART = {4: 8_192, 2: 16_384}  # elements of a part, about, by bytes of an element
CUT_PART_MORE_WINNERS = {4: 17_000, 2: 33_000}  # the same with more winners, up to MANY_WINNERS
MAX_PARTS = 16

# With more winners, merging takes longer than parts save. Beside 100 KB of the row, the memory of the search then
# leaves room for one CTA only, unless the window is compact.
MAX_CUT_K = 256  # up to this many winners, rows are cut, and two CTAs share a multiprocessor

# A compact window is used only if it lets a second CTA share the multiprocessor; otherwise it is no faster.
MAX_COMPACT_SIZE = 2**16  # positions; a compact window numbers positions and groups with 16-bit numbers
MIN_POSITIONS = 1_024  # at least, so that each thread has 16 bytes of its list of candidates, for `clear`
REDUCTION_BYTES = 1_024  # scratch for Mosaic's reductions: half of the default, so that two CTAs fit

# The merging CTA sorts winners in registers: up to 32 winners of 8 bytes in each of its 128 threads.
MERGED_PER_CTA = 4_096  # winners

# In random order, the number of elements that reach a bound varies by a few percent. The margins are estimates.
# "Many winners of longer rows" in benchmarks/results/NOTES.md has the times.
FILLED_ROOM = 0.9  # most candidates to expect, as a share of the list's room
CROWDED_BOUND = 1.4  # candidates to expect for each winner, where the bound is a better maximum than the k-th

STEP_ELEMENTS = 32  # elements of a thread in a step, and most of a group; larger groups make a looser bound


def plan_topk(vocab: int, k: int, dtype, capability: tuple[int, int]) -> Tile | Window:
    itemsize = jnp.dtype(dtype).itemsize
    if tile := plan_tile(vocab, k, itemsize):
        return tile
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    if k > MAX_CUT_K:
        for window in _whole_windows(vocab, k, itemsize):
            if cta_bytes(window, k, itemsize) <= smem_of_each(capability, 2):
                return window
    if k >= MANY_WINNERS and itemsize == 4 and vocab * itemsize >= WHOLE_ROW_BYTES:
        window = _window(vocab, k, itemsize, 1)
        if _fits(window, k, itemsize, smem):
            return window
    room = smem // 2 if k <= MAX_CUT_K else smem  # bytes per CTA, with two CTAs on a multiprocessor or one
    count = _parts(vocab, k, itemsize)
    while not _fits(window := _window(vocab, k, itemsize, count), k, itemsize, room):
        count += 1  # shorter parts take less room
    return window


def _parts(vocab: int, k: int, itemsize: int) -> int:
    if k > MAX_CUT_K:
        return 1  # merging so many winners takes longer than parts save
    if k >= MANY_WINNERS:
        return -(-vocab * itemsize // MANY_WINNERS_BYTES)
    part = CUT_PART if k <= FEW_WINNERS else CUT_PART_MORE_WINNERS
    return min(-(-vocab // part[itemsize]), MAX_PARTS) if vocab * itemsize > ROW_BYTES[itemsize] else 1


def _window(vocab: int, k: int, itemsize: int, count: int) -> Window:
    """Returns the window of a row in `count` parts. It has at least twice as many groups as winners, if possible.

    With fewer groups, the k-th largest of their maxima would be a loose bound.
    """
    vec = ACCESS_BYTES // itemsize
    window = Window(vocab, vec, STEP_ELEMENTS // vec, STEP_ELEMENTS // vec, count)
    while window.group_blocks > 1 and (window.groups < 2 * k or window.group_blocks > window.blocks):
        window = dataclasses.replace(window, group_blocks=window.group_blocks // 2)
    return window


def _whole_windows(vocab: int, k: int, itemsize: int) -> list[Window]:
    """Returns windows of a whole row. Each takes less room than the one before, but more time to search.

    The last one has half as many groups: a looser bound costs less than giving up a second CTA.
    """
    window = _window(vocab, k, itemsize, 1)
    if itemsize != 4 or not sum(ordering_words(k)) <= window.size <= MAX_COMPACT_SIZE:
        return [window]
    compact = dataclasses.replace(window, compact=True)
    fewer = dataclasses.replace(compact, group_blocks=2 * window.group_blocks)
    fits = fewer.group_blocks <= fewer.step_blocks and 2 * fewer.groups >= 3 * k
    return [window, compact, *[fewer] * fits]


def _fits(window: Window, k: int, itemsize: int, room: int) -> bool:
    return window.smem_size * itemsize + sum(selection_bytes(window, k)) <= room


def cta_bytes(window: Window, k: int, itemsize: int) -> int:
    """Returns the bytes of shared memory of a CTA, with Mosaic's padding and scratch for reductions."""
    arrays = [window.smem_size * itemsize, *selection_bytes(window, k), REDUCTION_BYTES]
    return sum(-(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT for size in arrays) + 8 * len(window.copies())


def candidate_capacity(k: int) -> int:
    """Returns the capacity of a window's list of candidates: a power of two, because the sort needs one.

    A normal sample of 25,000 has 67 candidates for k = 64. If there are more candidates than entries, the search is
    repeated.
    """
    return power_of_two(2 * k, 256)


def bound_rank(window: Window, k: int, room: int) -> int:
    """Returns which of the groups' maxima, in descending order, is the bound for candidates: the k-th or a higher one.

    At least k elements reach the k-th maximum, one in each of k groups. If k is large relative to the number of groups,
    too many elements may reach it, even in random order. Then the bound is a maximum that about CROWDED_BOUND k
    elements reach. `room` is the number of candidates that fit into the list.
    """
    elements = window.cut.longest

    def groups_with(number: float) -> float:
        """Returns the expected number of groups with at least one of the `number` best elements."""
        return elements / window.group_size * (1 - (1 - number / elements) ** window.group_size)

    if elements <= room or k <= groups_with(FILLED_ROOM * room):
        return k
    return round(groups_with(CROWDED_BOUND * k))


def lists_per_merge(k: int) -> int:
    """Returns how many lists of k winners a CTA merges: at most one per thread."""
    return max(2, min(WARPGROUP, MERGED_PER_CTA // k))


def padded_winners(k: int) -> int:
    return -(-k // WARPGROUP) * WARPGROUP


def group_words(window: Window, k: int) -> int:
    """Returns the words of the groups' maxima, which hold the ranked winners later, except in a compact window."""
    return window.groups if window.compact else max(window.groups, 2 * padded_winners(k))


def ordering_words(k: int) -> tuple[int, int, int]:
    """Returns the words of candidates, buckets and ranked winners, which replace the row in a compact window."""
    return 2 * candidate_capacity(k), candidate_capacity(k), 2 * padded_winners(k)


def listed_items(window: Window, k: int) -> tuple[int, int]:
    """Returns the lengths of two lists: the candidates, and the groups that reach the bound, which is also scratch.

    An item is a 32-bit word, and a candidate takes two. In a compact window, an item is a 16-bit number, and a
    candidate takes one. In 25,000 numbers, k = 1024 with groups of 16 makes 1,593 candidates, standard deviation 33.
    """
    capacity = candidate_capacity(k)
    if not window.compact:
        return 2 * capacity, capacity
    return max(MIN_POSITIONS, capacity - capacity // 8), padded_winners(k + k // 4)


def selection_bytes(window: Window, k: int) -> tuple[int, int]:
    lists = (2 if window.compact else 4) * sum(listed_items(window, k))
    return 4 * (group_words(window, k) + WARPGROUP), lists


# --- Tiles

# "Elements in a lane" in benchmarks/results/NOTES.md has the measurements behind these constants, of one H100.

# With more elements in fewer lanes, merges sort more within a lane and exchange less. This is faster for rows over many
# lanes, and slower for rows over few lanes. If many winners are at least half as many as the elements of a lane,
# registers run short, and fewer elements are faster again. A float32 merge has one bit of a 32-bit word for each
# element of a lane's list, and with 64 elements in each of 32 lanes a window is faster.
LANE_ELEMENTS = {4: 16, 2: 32}  # most elements of a row in a lane, with few lanes, by bytes of an element
MANY_LANES = 8  # with at least this many lanes per row, a lane may hold more elements
MAX_LANE_ELEMENTS = 32  # most elements of a row in a lane, with many lanes
MAX_PAIRED_LANE_ELEMENTS = 64  # the same for 16-bit elements, if a lane loads 16 bytes at once
MANY_TILE_WINNERS = 128  # with more winners in a row, lanes may hold fewer elements

# The backward's lanes exchange only a few sums, so more elements in a lane mean fewer instructions. With 16 elements in
# a lane, neighbouring lanes still load 64 bytes together from a row of 64 elements.
GRAD_LANE_ELEMENTS = 16  # elements of a row in a lane of the backward, as long as lanes are free

# A lane should hold few elements if most of a row are winners, so that lists hold all elements of a lane. (Longer rows
# need all lanes anyway.)
FEWEST_LANE_ELEMENTS = {4: 8, 2: 16}  # then, most elements of a row in a lane, by bytes of an element
MAX_CROWDED_LANE_ELEMENTS = 16  # the same if most of a row are winners, and it lies over all 32 lanes


def plan_tile(vocab: int, k: int, itemsize: int) -> Tile | None:
    """Returns the tile for the k best of rows of `vocab` elements, or None if a window is faster."""
    vec, fewest = math.gcd(vocab, ACCESS_BYTES // itemsize), FEWEST_LANE_ELEMENTS[itemsize]
    most = MAX_PAIRED_LANE_ELEMENTS if vec == 8 else MAX_LANE_ELEMENTS
    few = LANE_ELEMENTS[itemsize]
    crowded = mostly_winners(vocab, k)
    tile = _tile(vocab, vec, fewest, fewest) if crowded else _tile(vocab, vec, few, most)
    if not crowded and k > MANY_TILE_WINNERS and 2 * merged_tile(tile, k).vec >= tile.steps * vec:
        tile = _tile(vocab, vec, few, few)
    return tile if tile.steps * vec <= most else None


def plan_topk_grad(vocab: int, dtype) -> Tile | None:
    """Returns the tile for the backward, or None if rows are too long for a warp."""
    vec = math.gcd(vocab, ACCESS_BYTES // jnp.dtype(dtype).itemsize)
    tile = _tile(vocab, vec, GRAD_LANE_ELEMENTS, GRAD_LANE_ELEMENTS)
    return tile if tile.steps * tile.vec <= MAX_LANE_ELEMENTS else None


def _tile(vocab: int, vec: int, with_few_lanes: int, with_many_lanes: int) -> Tile:
    """Returns the tile with the fewest lanes per row, from 2 to 32, that can hold the row. If none can: 32 lanes.

    A lane holds at most `with_few_lanes` elements of a row over fewer lanes than MANY_LANES.
    """

    def overflows(lanes: int) -> bool:
        most = with_few_lanes if lanes < MANY_LANES else with_many_lanes
        return -(-vocab // (lanes * vec)) * vec > most

    lanes = 2
    while lanes < LANES and overflows(lanes):
        lanes *= 2
    return row_tile(vocab, vec, lanes)


def mostly_winners(vocab: int, k: int) -> bool:
    return k >= 32 and 2 * k > vocab and vocab <= LANES * MAX_CROWDED_LANE_ELEMENTS


def plan_by(plan: Callable, call: Call, capability: tuple[int, int], of_lengths: Callable | None = None) -> Any:
    """Returns the plan for the operand as floats; for integers with lengths, the plan by `of_lengths`."""
    if call.dtype not in INTEGERS_AS_FLOATS:
        return plan(call, capability)
    chosen = of_lengths if call.lengths else plan
    if call.masked or chosen is None:  # the least integer would count as masked
        return Refusal(f"no kernel for {call.dtype} with {'where' if call.masked else 'lengths'}")
    return chosen(dataclasses.replace(call, dtype=INTEGERS_AS_FLOATS[call.dtype]), capability)
