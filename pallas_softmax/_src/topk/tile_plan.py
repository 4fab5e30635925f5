"""How short rows of top-k lie in registers, and their winners: pure functions of V, k and dtype.

A row lies over some lanes of a warp, as a `Tile`: `plan_tile`, and `plan_topk_grad` for the backward. The winners are
found by merges of lists, one of each lane, or by a sort of the row (`sorts`). They lie over the same lanes, in order,
as another tile (`winners_tile`), of which the first k count. Ten elements a to j over 4 lanes, which load two at once:

    row        a b | c d | e f | g h      step 0
               i j |     |     |          step 1
    winners    j d | a i | c . | . .      k = 5, if that is their order
"""

import math

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.layout import Tile, power_of_two, row_tile

# The times are device times of one H100 80GB HBM3 by CUPTI, driver 580.159.04, jax 0.11.2, 2026-11-22 and 23.

# Fewer lanes with more elements sort more in a lane and exchange less. Where a row lies over many lanes that is faster:
# 131072 x 384 float32, k = 8, takes 76.9 us with 32 elements in a lane, 84.9 us with 16; 32768 x 512, k = 64, 42.5 and
# 53.3 us; in bfloat16, with 64 and 32, they take 53.3 and 55.9 us, both 33.1 us. Over few lanes it is slower: 131072 x
# 64 float32, k = 6, took 16.2 and 15.7 us, 131072 x 128 bfloat16, k = 8, 20.7 and 19.6 us. With 64 of float32 in each
# of 32 lanes a window is faster: 16384 x 2048 takes 51.6, 62.4 and 132 us by merges for k = 5, 16 and 128, 49.8, 51.7
# and 84.9 us in a window. In bfloat16 it is not: 29.8, 49.4 and 60.2 us for k = 5, 64 and 128, 43.8, 69.7 and 78.3.
# (Merges of float32 also number the elements of a lane's list by the bits of a word, of which there are 32.)
# Where the winners of a lane are half as many as its elements, many winners need so many registers that fewer elements
# are faster again: 32768 x 512, k = 150, takes 82.4 us with 16 in a lane, 86.9 us with 32, in bfloat16 63.1 with 32,
# 92.4 us with 64; 16384 x 1000 bfloat16, k = 257, 96.6 and 132 us. Of fewer winners it is not so: 65536 x 256 float32,
# k = 100, takes 68.0 us with 16 in a lane, 63.6 us with 32.
LANE_ELEMENTS = {4: 16, 2: 32}  # elements of a row in a lane at most, of few lanes, by bytes of an element
MANY_LANES = 8  # of a row at least, each of which may hold more elements
MAX_LANE_ELEMENTS = 32  # elements of a row in a lane at most, of many lanes
MAX_PAIRED_LANE_ELEMENTS = 64  # the same of 16 bits, if a lane loads 16 bytes at once
MANY_WINNERS = 128  # of a row; of more than these, lanes may hold fewer elements

# The backward's lanes exchange a few sums, so more elements in a lane mean fewer instructions; with 16, neighbouring
# lanes still load 64 bytes of a row together where it has 64 elements. 131072 x 128 bfloat16, k = 8, takes 28.5 us,
# with 8 in a lane 31.5 us; in float32, 51.5 and 51.9 us.
GRAD_LANE_ELEMENTS = 16  # elements of a row in a lane of the backward, as long as lanes are free

# A longer list takes more comparisons. Where one is too short, its warp looks further, in 16 bits by lists of the next
# elements, in float32 by whole lists, which takes three times as long, and the other warps of the CTA wait. 16384 x
# 1000 float32, k = 128, takes 59.9, 57.2 and 56.1 us with lists of 12, 13 and 14, 32768 x 512, k = 64, 45.8, 42.5 and
# 42.6 us with 12, 14 and 15; 100000 x 512 bfloat16, k = 16, takes 58.2, 58.5 and 63.6 us with 8, 9 and 10.
TOO_SHORT = {4: 0.003, 2: 0.01}  # share of warps at most, of rows in any order, by bytes of an element

# Where most of a row are winners, it is sorted: 32768 x 512 takes 101 us by a sort and 112 us by merges for k = 512 in
# float32, 85.7 and 104 us in bfloat16; k = 260 takes 95.6 and 98.4 us, 83.8 and 81.8 us. A sort is faster with fewer
# elements in a lane: 65536 x 256 float32, k = 128, took 109 us with 32 lanes of 8, 136 us with 16 of 16. So longer rows
# are merged whatever k is: 16384 x 1000, k = 600, takes 189 us by merges, 235 us by a sort in float32, 106 and 122 us
# in bfloat16 (k = 900: 127 and 139 us); 16384 x 2048 bfloat16, k = 2048, takes 308 and 327 us, in a window 1,810 us.
SORTED_LANE_ELEMENTS = {4: 8, 2: 16}  # elements of a row in a lane at most, by bytes of an element
MAX_SORTED_LANE_ELEMENTS = 16  # the same where a row lies over all 32 lanes


def plan_tile(vocab: int, k: int, itemsize: int) -> Tile | None:
    """Returns the tile for the k best of rows of `vocab` elements, or None where a window is faster."""
    vec = math.gcd(vocab, ACCESS_BYTES // itemsize)
    if sorts(vocab, k):
        return _tile(vocab, vec, SORTED_LANE_ELEMENTS[itemsize], SORTED_LANE_ELEMENTS[itemsize])
    most = MAX_PAIRED_LANE_ELEMENTS if vec == 8 else MAX_LANE_ELEMENTS
    few = LANE_ELEMENTS[itemsize]
    tile = _tile(vocab, vec, few, most)
    if k > MANY_WINNERS and 2 * merged_tile(tile, k).steps >= tile.steps * tile.vec:
        tile = _tile(vocab, vec, few, few)
    return tile if tile.steps * tile.vec <= most else None


def plan_topk_grad(vocab: int, dtype) -> Tile | None:
    """Returns the tile for the backward of rows of `vocab` elements, or None where they are too long for a warp."""
    vec = math.gcd(vocab, ACCESS_BYTES // jnp.dtype(dtype).itemsize)
    tile = _tile(vocab, vec, GRAD_LANE_ELEMENTS, GRAD_LANE_ELEMENTS)
    return tile if tile.steps * tile.vec <= MAX_LANE_ELEMENTS else None


def _tile(vocab: int, vec: int, of_few: int, of_many: int) -> Tile:
    """Returns the tile with the fewest lanes a row, from 2 to 32, that hold it, or 32 lanes.

    Args:
      vec: number of elements that a lane loads at once.
      of_few, of_many: how many elements each lane holds at most, of fewer lanes than MANY_LANES, and of others.
    """
    lanes = 2
    while lanes < LANES and -(-vocab // (lanes * vec)) * vec > (of_few if lanes < MANY_LANES else of_many):
        lanes *= 2
    return row_tile(vocab, vec, lanes)


def sorts(vocab: int, k: int) -> bool:
    """Returns whether the winners of a row are found by a sort of the row in a tile, and not by merges."""
    return k >= 32 and 2 * k > vocab and vocab <= LANES * MAX_SORTED_LANE_ELEMENTS


def list_length(tile: Tile, k: int, itemsize: int) -> int:
    """Returns how many of its best elements a lane lists: as few as TOO_SHORT allows, k + 1, or all."""
    most = min(k + 1, tile.steps * tile.vec)
    return next((n for n in range(1, most) if _too_short(tile, k, n) < TOO_SHORT[itemsize]), most)


def _too_short(tile: Tile, k: int, length: int) -> float:
    """Returns a bound of the share of warps of which a lane has as many of the k best of a row as a list holds.

    Such a warp has to look further. It is the probability for one lane, of a row in any order, times 32 lanes.
    """
    share = 1 / tile.lanes
    fewer = sum(math.comb(k, n) * share**n * (1 - share) ** (k - n) for n in range(length))
    return LANES * (1 - fewer)


def winners_tile(tile: Tile, vocab: int, k: int) -> Tile:
    """Returns the tile that holds the winners of each row of a tile, in order: neighbours in each lane."""
    return sorted_tile(tile) if sorts(vocab, k) else merged_tile(tile, k)


def sorted_tile(tile: Tile) -> Tile:
    """Returns the tile that holds the sorted rows of a tile: a power of two of neighbours in each lane."""
    return Tile(tile.rows, tile.lanes, 1, power_of_two(tile.steps * tile.vec, 1))


def merged_tile(tile: Tile, k: int) -> Tile:
    """Returns the tile that holds the merged winners of each row of a tile: neighbours in each lane."""
    return Tile(tile.rows, tile.lanes, 1, max(1, power_of_two(k, 1) // tile.lanes))
