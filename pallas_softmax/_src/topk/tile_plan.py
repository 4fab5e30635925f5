"""How short rows of top-k and their winners lie in registers: pure functions of shape, k and dtype.

A row lies over some lanes of a warp, as a `Tile`: see `plan_tile`, and `plan_topk_grad` for the backward. The winners
are found by merging one list per lane. They lie over the same lanes, in order, as another tile (`merged_tile`). Only
its first k elements count. An example with ten elements a to j over 4 lanes, which load two elements at once:

    row        a b | c d | e f | g h      step 0
               i j |     |     |          step 1
    winners    j d | a i | c . | . .      k = 5, and the order is j, d, a, i, c
"""

import math

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.layout import Tile, power_of_two, row_tile

# "Elements in a lane" in benchmarks/results/NOTES.md has the measurements behind these constants, of one H100.

# With more elements in fewer lanes, merges sort more within a lane and exchange less. This is faster for rows over many
# lanes, and slower for rows over few lanes. If many winners are at least half as many as the elements of a lane,
# registers run short, and fewer elements are faster again. With 64 elements in each of 32 lanes, a window is faster for
# float32. Also, a float32 merge has one bit of a 32-bit word for each element of a lane's list.
LANE_ELEMENTS = {4: 16, 2: 32}  # most elements of a row in a lane, with few lanes, by bytes of an element
MANY_LANES = 8  # with at least this many lanes per row, a lane may hold more elements
MAX_LANE_ELEMENTS = 32  # most elements of a row in a lane, with many lanes
MAX_PAIRED_LANE_ELEMENTS = 64  # the same for 16-bit elements, if a lane loads 16 bytes at once
MANY_WINNERS = 128  # with more winners in a row, lanes may hold fewer elements

# The backward's lanes exchange only a few sums, so more elements in a lane mean fewer instructions. With 16 elements in
# a lane, neighbouring lanes still load 64 bytes together from a row of 64 elements.
GRAD_LANE_ELEMENTS = 16  # elements of a row in a lane of the backward, as long as lanes are free

# A longer list takes more comparisons. If a list is too short, its warp searches again, and the other warps of the CTA
# wait. With 16-bit elements the warp lists the next elements. With float32 it merges whole lists, which takes three
# times as long.
TOO_SHORT = {4: 0.002, 2: 0.0065}  # highest share of warps with too short a list, in random order, by bytes

# A lane should hold few elements in two cases. Either most of a row are winners, so that lists hold all elements of a
# lane. (Longer rows need all lanes anyway.) Or rows are few, so that idle multiprocessors have lanes to spare.
FEWEST_LANE_ELEMENTS = {4: 8, 2: 16}  # then, most elements of a row in a lane, by bytes of an element
MAX_CROWDED_LANE_ELEMENTS = 16  # the same if most of a row are winners, and it lies over all 32 lanes

FEW_CTAS = 66  # so many CTAs may become twice as many: each still has a multiprocessor of an H100 to itself
# A row over 32 lanes takes one merge more than a row over 16. In few 16-bit rows, this pays off only for many winners.
MANY_WINNERS_OF_FEW_ROWS = 33


def plan_tile(rows: int, vocab: int, k: int, itemsize: int) -> Tile | None:
    """Returns the tile for the k best of `rows` rows of `vocab` elements, or None if a window is faster."""
    vec, fewest = math.gcd(vocab, ACCESS_BYTES // itemsize), FEWEST_LANE_ELEMENTS[itemsize]
    most = MAX_PAIRED_LANE_ELEMENTS if vec == 8 else MAX_LANE_ELEMENTS
    few = LANE_ELEMENTS[itemsize]
    crowded = mostly_winners(vocab, k)
    tile = _tile(vocab, vec, fewest, fewest) if crowded else _tile(vocab, vec, few, most)
    if not crowded and k > MANY_WINNERS and 2 * merged_tile(tile, k).vec >= tile.steps * vec:
        tile = _tile(vocab, vec, few, few)
    lanes = LANES if itemsize == 4 or k >= MANY_WINNERS_OF_FEW_ROWS else LANES // 2
    while rows <= FEW_CTAS * tile.rows and tile.lanes < lanes and tile.steps * vec > fewest:
        tile = row_tile(vocab, vec, 2 * tile.lanes)
    return tile if tile.steps * vec <= most else None


def plan_topk_grad(vocab: int, dtype) -> Tile | None:
    """Returns the tile for the backward of rows of `vocab` elements, or None if rows are too long for a warp."""
    vec = math.gcd(vocab, ACCESS_BYTES // jnp.dtype(dtype).itemsize)
    tile = _tile(vocab, vec, GRAD_LANE_ELEMENTS, GRAD_LANE_ELEMENTS)
    return tile if tile.steps * tile.vec <= MAX_LANE_ELEMENTS else None


def _tile(vocab: int, vec: int, of_few: int, of_many: int) -> Tile:
    """Returns the tile with the fewest lanes per row that can hold the row, from 2 to 32. If none can: 32 lanes.

    A lane holds at most `of_few` elements if a row has fewer lanes than MANY_LANES, and at most `of_many` otherwise.
    """
    lanes = 2
    while lanes < LANES and -(-vocab // (lanes * vec)) * vec > (of_few if lanes < MANY_LANES else of_many):
        lanes *= 2
    return row_tile(vocab, vec, lanes)


def mostly_winners(vocab: int, k: int) -> bool:
    """Returns whether most of a row are winners, and the row is short enough for few elements in each lane."""
    return k >= 32 and 2 * k > vocab and vocab <= LANES * MAX_CROWDED_LANE_ELEMENTS


def list_length(tile: Tile, k: int, itemsize: int, lanes: float | None = None) -> int:
    """Returns the length of a lane's list: the shortest that TOO_SHORT allows, at most k + 1 or all elements.

    `lanes` is the number of a row's lanes that may have winners; by default, all.
    """
    most = min(k + 1, tile.steps * tile.vec)
    share = 1 / (lanes or tile.lanes)
    return next((n for n in range(1, most) if _too_short(share, k, n) < TOO_SHORT[itemsize]), most)


def _too_short(share: float, k: int, length: int) -> float:
    """Returns an upper bound of the share of warps with a list that is too short.

    A list of `length` is too short if its lane has at least `length` of the k best of a row, each with the probability
    `share`. The bound is the probability of this in one lane, for a row in random order, times 32 lanes.
    """
    fewer = sum(math.comb(k, n) * share**n * (1 - share) ** (k - n) for n in range(length))
    return LANES * (1 - fewer)


def merged_tile(tile: Tile, k: int) -> Tile:
    """Returns the tile that holds the merged winners of each row of a tile. Neighbours share a lane."""
    return Tile(tile.rows, tile.lanes, max(1, power_of_two(k, 1) // tile.lanes), 1)
