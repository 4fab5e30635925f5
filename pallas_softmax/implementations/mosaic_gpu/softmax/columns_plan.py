"""How the columns of a softmax lie over the GPU: rows whose elements lie apart in memory, reduced where they are.

An array (outer, vocab, inner) has outer * inner rows, each a column of its `vocab` lines of `inner` neighbours. What
matters is how many neighbours a CTA takes of each line, for device memory gives whole lines of its own only.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax import operations
from pallas_softmax.implementations.mosaic_gpu.device.hardware import (
    ACCESS_BYTES,
    MAX_CLUSTER,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
    WARPGROUP,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile

VEC = 4  # elements of a vector: Mosaic reduces no longer ones over warps

# Float32 registers of a thread for the elements of all arrays, as in `plan.TILE_ELEMENTS`.
TILE_REGISTERS = 96
TILE_LANES = (WARPGROUP, 32, 16, 8, 4, 2)  # threads side by side along a line of a tile, the most that fit
FEWEST_LANES = 8  # where lines have as many vectors
ENOUGH_TILES = 264  # tiles, two for each multiprocessor, for which longer lines are better than more tiles

# Bytes of a line that a strip takes. (1000, 100000) reaches 88% of a copy by 128 bytes, 73% by 64, 60% by 32.
STRIP_BYTES = 128
STEP_BYTES = 14 * 1024  # bytes of a step about, of one array
PART_BYTES = 66 * 1024  # bytes of a part at most, of all arrays, unless the cluster is the largest
SLOTS_BYTES = 108 * 1024  # bytes of all slots at most: two CTAs are on a multiprocessor
# CTAs at a time, of clusters of the largest size: 8 groups of multiprocessors, with 16 or 18 each.
MULTIPROCESSORS = 128

BOX_ROWS = 192  # lines of a step at most, which leaves room for whole blocks in the 256 of a bulk copy
INT32_LIMIT = 2**31  # lines are numbered in int32


@dataclasses.dataclass(frozen=True)
class Strips:
    """Strips of `width` neighbouring columns in shared memory, each over the `count` CTAs of a cluster.

    Each CTA has a part of the lines, and takes it in steps of `step_rows` lines, each of which is one copy in bulk to
    one of its slots. A cluster takes one strip after the other. Here are two clusters of two CTAs, with three steps
    a part:

                    columns   |<- width ->|
                              | strip 0   | strip 1   | strip 2   | strip 3   | ...
        part 0      step 0    | cluster 0 | cluster 1 | cluster 0 | cluster 1 |
                    step 1    |           |           |           |           |
                    step 2    |           |           |           |           |
        part 1      step 0    |           |           |           |           |
                    ...

    As many steps of a part as there are slots stay in shared memory between its reduction and the writing of its
    results. The others, if any, are read twice, and the second time first those that were read last, which the L2
    cache still has. A slot that is needed no more takes the next load, be it of the next strip:

        slots, of 3 that have all steps    | 0  1  2 | 0  1  2 | ...    loads by step, strip after strip
        slots, of 2, and 3 steps           | 0  1  2  0 | 0  1  2  0 | ...

    Attributes:
      vocab: number of lines.
      width: number of columns of a strip. They may reach beyond the array.
      vec: number of elements of a thread in a line.
      count: number of CTAs of a cluster.
      step_rows: number of lines of a step.
      slots: number of steps that shared memory holds; at least two, or all.
      clusters: number of clusters that share the strips.
    """

    vocab: int
    width: int
    vec: int
    count: int
    step_rows: int
    slots: int
    clusters: int

    @property
    def block(self) -> Tile:
        """The lines that the threads of a CTA hold at a time, with a vector each."""
        lanes = self.width // self.vec
        return Tile(WARPGROUP // lanes, lanes, self.vec, 1)

    @property
    def steps(self) -> int:
        """Number of steps of a part."""
        return -(-self.vocab // (self.count * self.step_rows))


def plan_columns(
    op: str, outer: int, vocab: int, inner: int, dtype, capability: tuple[int, int]
) -> Tile | Strips | None:
    """How the columns of an operation lie over a GPU of this compute capability; None if there is no good way.

    Args:
      op: a name in `operations.TABLE`.
      outer, vocab, inner, dtype: shape and dtype of the arrays that it reads along their middle axis.
    """
    if outer * vocab >= INT32_LIMIT or inner >= INT32_LIMIT:
        return None
    itemsize, arrays = jnp.dtype(dtype).itemsize, operations.TABLE[op].row_arrays
    if tile := _tile(outer, vocab, inner, arrays):
        return tile
    if inner * itemsize % ACCESS_BYTES:
        return None  # bulk copies need lines that start on 16 bytes
    return _strips(outer, vocab, inner, itemsize, arrays, capability)


def _tile(outer: int, vocab: int, inner: int, arrays: int) -> Tile | None:
    """The tile that holds whole columns in registers; None if they are too long for the narrowest one."""
    vec = math.gcd(inner, VEC)
    vectors = -(-inner // vec)
    found = None
    for lanes in TILE_LANES:
        if lanes >= max(2 * vectors, 3) or lanes < min(FEWEST_LANES, vectors):
            continue
        at_once = WARPGROUP // lanes
        rows = -(-vocab // at_once) * at_once
        if rows // at_once * vec * arrays > TILE_REGISTERS:
            continue
        found = Tile(rows, lanes, vec, 1)
        if outer * -(-inner // (lanes * vec)) >= ENOUGH_TILES:
            break
    return found


def _strips(
    outer: int, vocab: int, inner: int, itemsize: int, arrays: int, capability: tuple[int, int]
) -> Strips:
    """Strips as wide as device memory likes them, over as many CTAs as hold them, or the most that a cluster has."""
    line = STRIP_BYTES
    while line // 2 >= inner * itemsize and line > 2 * VEC * itemsize:
        line //= 2
    width = line // itemsize
    strips = outer * -(-inner // width)
    block_rows = WARPGROUP * VEC // width
    count, most = 1, MAX_CLUSTER[capability[0]]
    while count < most and (
        -(-vocab // count) * line * arrays > PART_BYTES
        or (strips * count < MULTIPROCESSORS and vocab > count * block_rows)
    ):
        count *= 2
    part = -(-vocab // count)
    steps = max(-(-part * line // STEP_BYTES), -(-part // BOX_ROWS))
    step_rows = -(-part // (steps * block_rows)) * block_rows
    steps = -(-vocab // (count * step_rows))
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    slots = min(steps, min(SLOTS_BYTES, smem) // (step_rows * line * arrays))
    clusters = strips if slots == steps else min(strips, 2 * MULTIPROCESSORS // count)
    return Strips(vocab, width, VEC, count, step_rows, slots, clusters)
