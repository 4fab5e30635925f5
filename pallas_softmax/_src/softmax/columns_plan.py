"""How the columns of a softmax lie over the GPU: rows whose elements lie apart in memory, reduced where they are.

An array (outer, vocab, inner) has outer * inner rows, each a column of `vocab` lines, whose `inner` elements are
neighbours. What matters is how many of these a CTA takes of each line, since device memory is fast at long pieces.

The shares of a copy's bandwidth beside the constants are those of softmax, or of a sum of two arrays for its backward,
on an H100 80GB HBM3, driver 580.159.04, jax 0.11.2, 2026-11-22.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import (
    ACCESS_BYTES,
    FULL_CLUSTERS,
    INT32_LIMIT,
    MAX_CLUSTER,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
    WARPGROUP,
)
from pallas_softmax._src.gpu.layout import Tile

VEC = 4  # elements of a thread in a line: Mosaic reduces no longer vectors over warps

# Float32 elements of a thread in a tile, of all arrays, at most. (64, 128, 4096) reaches 98 to 100%.
TILE_REGISTERS = 96
TILE_LANES = (WARPGROUP, 32, 16, 8, 4, 2)  # threads along a line of a tile: the most that the registers allow
FEWEST_LANES = 8  # where a line has as many vectors; (1, 1000, 100000) float32 reaches 73% by 2 lanes
# Elements of a tile at least: (32768, 21, 32) reaches 64%, XLA 46%, and (131072, 21, 8) 16%, XLA 38%.
TILE_ELEMENTS = 512
ENOUGH_CTAS = 264  # two for each multiprocessor: up to here, more tiles are better than longer lines
# Float32 elements of a thread in a line of an odd number of elements, at most, WARPGROUP apart: (8, 21, 262143)
# reaches 82% by 3, 81% by 2, 77% by 1; bfloat16 74% by 3, 77% by 1. And of a thread in all lines: each has an address,
# and 96 of them would spill.
LINE_STEPS = 3
STEPS_REGISTERS = 64
FEWEST_CTAS = 32  # of strips: (1, 4096, 32) takes 4 us by them, XLA 14

# Bytes of a line that a strip takes: (1, 1000, 100000) float32 reaches 87% by 128, 73% by 64, 60% by 32.
STRIP_BYTES = 128
# Where longer pieces leave room for one CTA: (1, 25000, 4000) reaches 73%, and in bfloat16 by 128 as well. The backward
# of (1, 12000, 8000) float32 reaches 73%, XLA 60%.
NARROW_STRIP_BYTES = 64
# Turns at least in which FULL_CLUSTERS take strips whose CTAs fill their multiprocessors, on Hopper. (1, 25000, 4000)
# float32 reaches 83% so, by shorter pieces 72%, (1, 25000, 8000) bfloat16 80%, 74%; the backward of (1, 12000, 8000)
# 84%, 73%, in bfloat16 79%, 73%. The first read and the last write have nothing beside them: 18 turns of (1, 20000,
# 4000) reach 81%, shorter pieces 73%; 9 of (1, 25000, 4000) bfloat16 70%, shorter pieces 73%; and 5 of the backward of
# (1, 12000, 1024) 73%, shorter pieces 75%.
FEWEST_TURNS = 10
# Bytes of a part, in all arrays, up to which a smaller cluster is better: three CTAs have room. Then 16-bit columns are
# better by shorter pieces than in turns: (1, 14000, 8000) reaches 79% by them, 76% in turns.
PART_BYTES = 72 * 1024
# Bytes of a part up to which two CTAs have room: (1, 4096, 4096) reaches 84%, its backward 84%, in bfloat16 85%, of
# which XLA reaches 59% and 40%; that of (1, 1000, 100000) 89% and 85%, XLA 59% and 57%. One CTA that fills a
# multiprocessor reaches 58% of (2, 50257, 768), and 70% of the backward of (1, 25000, 4000), in bfloat16 68%, XLA 60%
# and 57%.
HALF_SMEM_BYTES = 104 * 1024
EXCHANGE_BYTES = 6 * 1024  # with which a cluster merges (m, d), beside the slots
STEP_BYTES = 14 * 1024  # of a step, about, in each array
STEP_ROWS = 256  # lines of a step at most, those of a bulk copy
MAX_SLOTS = 32
# Slots of columns that are only read: logsumexp of (1, 25000, 4000) reaches 91% of a read, by 7 slots 69%.
READ_SLOTS = 3


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

    A cluster whose CTAs fill their multiprocessors takes several strips in turns, whose steps go through the same
    slots: as soon as a step has been written, its slot takes the next step that is not there yet. With three of each:

        slot 0     | read 0,0 | reduce       write 0,0 | read 1,0            | reduce       write 1,0 | ...
        slot 1     |   read 0,1 | reduce       write 0,1 | read 1,1          |   reduce       write 1,1 | ...
        slot 2     |     read 0,2 | reduce       write 0,2 | read 1,2        |     reduce       write 1,2 | ...
                                           ^ (m, d) merged              (strip, step)

    Attributes:
      vocab: number of lines.
      width: number of columns of a strip, fewer than the array has side by side. Otherwise lines would follow each
        other without a gap, so that a copy would be a flat run, which is not cut off where the array ends.
      vec: number of elements of a thread in a line.
      count: number of CTAs of a cluster.
      step_rows: number of lines of a step.
      slots: number of steps for which there is shared memory.
      turns: number of strips that a cluster takes one after the other.
    """

    vocab: int
    width: int
    vec: int
    count: int
    step_rows: int
    slots: int
    turns: int = 1

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
    """Returns how the columns of an operation lie over a GPU of this capability; None if transposing is better.

    Args:
      op: the name of the operation.
      outer, vocab, inner, dtype: shape and dtype of the arrays that it reads along their middle axis.
    """
    if outer * vocab >= INT32_LIMIT or inner >= INT32_LIMIT:
        return None
    itemsize, arrays = jnp.dtype(dtype).itemsize, 2 if op.endswith("_grad") else 1
    if vocab * inner < TILE_ELEMENTS:
        return None  # most threads of a tile would have nothing
    if tile := _tile(outer, vocab, inner, itemsize, arrays):
        return tile
    if inner * itemsize % ACCESS_BYTES:
        return None  # bulk copies need lines that start on 16 bytes
    only_read = op == "logsumexp"
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES - EXCHANGE_BYTES
    for strip_bytes, most, in_turns in (
        (STRIP_BYTES, min(smem, HALF_SMEM_BYTES), False),  # two CTAs on a multiprocessor, or more
        (STRIP_BYTES, smem, True),  # one of them
        (NARROW_STRIP_BYTES, smem, False),  # one of them, or two
    ):
        plan = _strips(outer, vocab, inner, strip_bytes, itemsize, arrays, MAX_CLUSTER[capability[0]])
        if only_read:
            plan = dataclasses.replace(plan, slots=min(READ_SLOTS, plan.steps))
        held = plan.slots * plan.step_rows * plan.width * itemsize * arrays
        strips = outer * -(-inner // plan.width)
        if held > most or plan.slots > MAX_SLOTS or plan.width >= inner or strips * plan.count < FEWEST_CTAS:
            continue
        if not in_turns:
            return plan
        if (itemsize, arrays) == (2, 1) and held <= PART_BYTES * STRIP_BYTES // NARROW_STRIP_BYTES:
            continue  # by shorter pieces, three CTAs have room
        if turns := _turns(strips, capability):
            slots = smem // (held // plan.slots)  # all that there is room for
            return dataclasses.replace(plan, slots=min(slots, MAX_SLOTS), turns=turns)
    return None


def _turns(strips: int, capability: tuple[int, int]) -> int:
    """Returns how many strips a cluster takes in turns if its CTAs fill their multiprocessors; 0 if none."""
    turns = -(-strips // FULL_CLUSTERS)
    return turns if capability[0] == 9 and turns >= FEWEST_TURNS else 0


def _tile(outer: int, vocab: int, inner: int, itemsize: int, arrays: int) -> Tile | None:
    """Returns the tile that holds whole columns in registers; None if they are too long."""
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
    if found and (found.lanes, vec, itemsize) == (WARPGROUP, 1, 4):
        for steps in range(LINE_STEPS, 1, -1):
            tiles = outer * -(-inner // (WARPGROUP * steps))
            if found.rows * steps <= min(STEPS_REGISTERS, TILE_REGISTERS // arrays) and tiles >= ENOUGH_CTAS:
                return dataclasses.replace(found, steps=steps)
    return found


def _strips(
    outer: int, vocab: int, inner: int, strip_bytes: int, itemsize: int, arrays: int, most: int
) -> Strips:
    """Returns strips of `strip_bytes`, halved until they are narrower than a line, over as few CTAs as have PART_BYTES.

    Where there are few strips, they are over more CTAs, so that more multiprocessors have work.
    """
    while strip_bytes >= inner * itemsize and strip_bytes > 2 * VEC * itemsize:
        strip_bytes //= 2
    width = strip_bytes // itemsize
    strips = outer * -(-inner // width)
    block_rows = WARPGROUP * VEC // width
    count = 1
    while count < most and (
        -(-vocab // count) * strip_bytes * arrays > PART_BYTES
        or (strips * count < ENOUGH_CTAS // 2 and vocab > count * block_rows)
    ):
        count *= 2
    part = -(-vocab // count)
    steps = max(-(-part * strip_bytes // STEP_BYTES), -(-part // STEP_ROWS))
    step_rows = -(-part // (steps * block_rows)) * block_rows
    plan = Strips(vocab, width, VEC, count, step_rows, slots=1)
    return dataclasses.replace(plan, slots=plan.steps)
