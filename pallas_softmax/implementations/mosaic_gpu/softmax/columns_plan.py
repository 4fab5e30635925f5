"""How the columns of a softmax lie over the GPU: rows whose elements lie apart in memory, reduced where they are.

An array (outer, vocab, inner) has outer * inner rows, each a column of `vocab` lines, whose `inner` elements are
neighbours. What matters is how many of these a CTA takes of each line, since device memory is fast at long pieces.

The shares of a copy's bandwidth beside the constants are those of softmax on an H100, jax 0.11.2, 2026-11-22.
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

VEC = 4  # elements of a thread in a line: Mosaic reduces no longer vectors over warps

# Float32 elements of a thread in a tile, of all arrays, at most. (64, 128, 4096) reaches 98 to 100%.
TILE_REGISTERS = 96
TILE_LANES = (WARPGROUP, 32, 16, 8, 4, 2)  # threads along a line of a tile: the most that the registers allow
FEWEST_LANES = 8  # where a line has as many vectors; (1, 1000, 100000) float32 reaches 73% by 2 lanes
# Elements of a tile at least: (32768, 21, 32) reaches 64%, XLA 46%, and (131072, 21, 8) 16%, XLA 38%.
TILE_ELEMENTS = 512
ENOUGH_CTAS = 264  # two for each multiprocessor: up to here, more tiles are better than longer lines
FEWEST_CTAS = 64  # of strips: with fewer, most multiprocessors idle (not measured)

# Bytes of a line that a strip takes: (1, 1000, 100000) float32 reaches 88% by 128, 73% by 64, 60% by 32.
LINE_BYTES = 128
SHORT_LINE_BYTES = 64  # where longer pieces leave room for one CTA: (1, 25000, 4000) reaches 71%, by 128 68%
# Bytes of a part, in all arrays, up to which a smaller cluster is better: three CTAs have room.
PART_BYTES = 72 * 1024
# Bytes of a part up to which two CTAs have room. One that fills a multiprocessor reaches 58% of (2, 50257, 768); so in
# a backward, of which XLA reaches 60% of a sum of two arrays, there are two. Of those (1, 4096, 4096) reaches 84%, in
# bfloat16 85%, XLA 59% and 40%; (1, 1000, 100000) 89%, 85%, XLA 59%, 58% (driver 580.159.04).
HALF_SMEM_BYTES = 104 * 1024
EXCHANGE_BYTES = 6 * 1024  # with which a cluster merges (m, d), beside the slots
STEP_BYTES = 14 * 1024  # of a step, about, in each array
STEP_ROWS = 256  # lines of a step at most, those of a bulk copy
# Slots of columns that are only read: logsumexp of (1, 25000, 4000) reaches 88% of a read, by 7 slots 69%.
READ_SLOTS = 3

INT32_LIMIT = 2**31  # lines are numbered in int32


@dataclasses.dataclass(frozen=True)
class Strips:
    """Strips of `width` neighbouring columns in shared memory, each over a cluster of `count` CTAs.

    Each CTA has a part of the lines, and takes it in steps of `step_rows` lines, each a bulk copy into a slot of its
    shared memory. Here are two CTAs for each strip, and three steps in each part:

                   columns   |<- width ->|
                             | strip 0   | strip 1   | strip 2   | ...
        part 0     step 0    |           |           |           |
                   step 1    |           |           |           |
                   step 2    |           |           |           |
        part 1     step 0    |           |           |           |
                   step 1    |           |           |           |
                   step 2    |           |           |           |      its last lines may be beyond the array

    Columns that are written have a slot for each step. Those that are only read need a few, which are taken in turn.

    Attributes:
      vocab: number of lines.
      width: number of columns of a strip, fewer than the array has side by side: a copy of whole lines would be one
        of bytes in a row, which does not end where the lines end.
      vec: number of elements of a thread in a line.
      count: number of CTAs of a cluster.
      step_rows: number of lines of a step.
      slots: number of steps for which there is shared memory.
    """

    vocab: int
    width: int
    vec: int
    count: int
    step_rows: int
    slots: int

    @property
    def block(self) -> Tile:
        """The lines that the threads of a CTA hold at a time, with a vector each."""
        lanes = self.width // self.vec
        return Tile(WARPGROUP // lanes, lanes, self.vec, 1)

    @property
    def steps(self) -> int:
        """Number of steps of a part."""
        return -(-self.vocab // (self.count * self.step_rows))

    @property
    def lines_beyond(self) -> bool:
        """Whether the last steps reach beyond the array."""
        return self.count * self.steps * self.step_rows != self.vocab


def plan_columns(
    op: str, outer: int, vocab: int, inner: int, dtype, capability: tuple[int, int]
) -> Tile | Strips | None:
    """How the columns of an operation lie over a GPU of this compute capability; None if transposing them is better.

    Args:
      op: a name in `operations.TABLE`.
      outer, vocab, inner, dtype: shape and dtype of the arrays that it reads along their middle axis.
    """
    if outer * vocab >= INT32_LIMIT or inner >= INT32_LIMIT:
        return None
    itemsize, arrays = jnp.dtype(dtype).itemsize, operations.TABLE[op].row_arrays
    if vocab * inner < TILE_ELEMENTS:
        return None  # most threads of a tile would have nothing
    if tile := _tile(outer, vocab, inner, arrays):
        return tile
    if inner * itemsize % ACCESS_BYTES:
        return None  # bulk copies need lines that start on 16 bytes
    only_read = operations.TABLE[op].results == operations.PER_ROW
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES - EXCHANGE_BYTES
    half = min(smem, HALF_SMEM_BYTES)
    for line, most in (
        (LINE_BYTES, half),  # two CTAs on a multiprocessor, or more
        (SHORT_LINE_BYTES, smem if arrays == 1 else half),  # one of them, too
    ):
        strips = _strips(outer, vocab, inner, line, itemsize, arrays, MAX_CLUSTER[capability[0]])
        if only_read:
            strips = dataclasses.replace(strips, slots=min(READ_SLOTS, strips.steps))
        held = strips.slots * strips.step_rows * strips.width * itemsize * arrays
        ctas = outer * -(-inner // strips.width) * strips.count
        if held <= most and strips.slots <= 32 and strips.width < inner and ctas >= FEWEST_CTAS:
            return strips
    return None


def _tile(outer: int, vocab: int, inner: int, arrays: int) -> Tile | None:
    """The tile that holds whole columns in registers; None if they are too long."""
    vec = math.gcd(inner, VEC)
    vectors = -(-inner // vec)
    found = None
    for lanes in TILE_LANES:
        if lanes >= max(2 * vectors, 3) or lanes < min(FEWEST_LANES, vectors):
            continue
        if found and vocab * lanes * vec < TILE_ELEMENTS:
            break
        at_once = WARPGROUP // lanes
        rows = -(-vocab // at_once) * at_once
        if rows // at_once * vec * arrays > TILE_REGISTERS:
            continue
        found = Tile(rows, lanes, vec, 1)
        if outer * -(-inner // (lanes * vec)) >= ENOUGH_CTAS:
            break
    return found


def _strips(outer: int, vocab: int, inner: int, line: int, itemsize: int, arrays: int, most: int) -> Strips:
    """Strips of `line` bytes, or of half an array's line, over as few CTAs as have a part of PART_BYTES, up to `most`.

    Where there are few strips, they are over more CTAs, so that more multiprocessors have work.
    """
    while line >= inner * itemsize and line > 2 * VEC * itemsize:
        line //= 2
    width = line // itemsize
    strips = outer * -(-inner // width)
    block_rows = WARPGROUP * VEC // width
    count = 1
    while count < most and (
        -(-vocab // count) * line * arrays > PART_BYTES
        or (strips * count < ENOUGH_CTAS // 2 and vocab > count * block_rows)
    ):
        count *= 2
    part = -(-vocab // count)
    steps = max(-(-part * line // STEP_BYTES), -(-part // STEP_ROWS))
    step_rows = -(-part // (steps * block_rows)) * block_rows
    plan = Strips(vocab, width, VEC, count, step_rows, slots=1)
    return dataclasses.replace(plan, slots=plan.steps)
