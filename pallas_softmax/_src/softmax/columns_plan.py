"""Plans for softmax along an axis that is not the last one: how columns are distributed over the GPU.

An array (outer, vocab, inner) has `vocab` lines of `inner` contiguous elements; each softmax runs down a column. A plan
mainly sets how many elements of a line each CTA takes, since device memory is fastest for long pieces.

Comments give measured speeds as a percentage of copy bandwidth: for softmax, against a copy; for its backward, against
a sum of two arrays. All were measured on an H100 80GB HBM3, driver 580.159.04, jax 0.11.2, 2026-11-22.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.gpu import hardware
from pallas_softmax._src.gpu.layout import Tile

VEC = 4  # elements of a thread in a line: Mosaic reduces no longer vectors over warps

# Most float32 elements of a thread in a tile, over all arrays. (64, 128, 4096) reaches 98 to 100%.
TILE_REGISTERS = 96
TILE_LANES = (hardware.WARPGROUP, 32, 16, 8, 4, 2)  # threads along a line of a tile, in order of preference
# Fewest threads along a line, if it has enough vectors. With 2 lanes, (1, 1000, 100000) float32 reaches only 73%.
FEWEST_LANES = 8
# Fewest elements of a tile. With 672 elements, (32768, 21, 32) reaches 64%, XLA 46%. With 168, (131072, 21, 8) reaches
# only 16%, XLA 38%.
TILE_ELEMENTS = 512
ENOUGH_CTAS = 264  # two per multiprocessor; with fewer, more tiles are better than longer lines
# Lines with an odd number of elements: most elements of a thread in one line, WARPGROUP apart. (8, 21, 262143) reaches
# 82% with 3, 81% with 2, 77% with 1; in bfloat16, 74% with 3, 77% with 1.
LINE_STEPS = 3
STEPS_REGISTERS = 64  # most elements of such a thread in all lines
# If results are written too, such tiles are fastest if only as many CTAs share a multiprocessor as hold this many
# elements. Relative to no bound, (8, 21, 262143) takes 0.88 of the time with two CTAs, and in bfloat16 0.81 with four.
RESIDENT_ELEMENTS = 10_752
FEWEST_CTAS = 32  # fewest CTAs of a launch with strips: (1, 4096, 32) takes 4 us, XLA 14 us

# Bytes of a line in a strip. (1, 1000, 100000) float32 reaches 87% with 128 bytes, 73% with 64, 60% with 32.
STRIP_BYTES = 128
# The same if wider strips would leave room for only one CTA per multiprocessor. (1, 25000, 4000) reaches 73%, and in
# bfloat16 also with 128 bytes. The backward of (1, 12000, 8000) float32 reaches 73%, XLA 60%.
NARROW_STRIP_BYTES = 64
# Fewest turns that are worthwhile. In turns, FULL_CLUSTERS clusters take one wide strip after the other, and each CTA
# fills a multiprocessor. Hopper only.
#
#                                           turns   in turns   narrow strips
#     (1, 25000, 4000) float32                 18      83%          72%
#     (1, 25000, 8000) bfloat16                18      80%          74%
#     (1, 12000, 8000) float32, backward       36      84%          73%
#     (1, 12000, 8000) bfloat16, backward      18      79%          73%
#     (1, 20000, 4000) float32                 18      81%          73%
#     (1, 25000, 4000) bfloat16                 9      70%          73%
#     (1, 12000, 1024) float32, backward        5      73%          75%
#
# Few turns lose because nothing overlaps the first read and the last write.
FEWEST_TURNS = 10
# Most bytes of a part, over all arrays, for three CTAs per multiprocessor; clusters grow until parts are as small. For
# 16-bit columns, narrow strips then beat turns: (1, 14000, 8000) reaches 79% with narrow strips, 76% in turns.
PART_BYTES = 72 * 1024
# Most bytes of a part for two CTAs per multiprocessor.
#
#                                              two CTAs    XLA
#     (1, 4096, 4096)                             84%
#     (1, 4096, 4096), backward                   84%       59%
#     (1, 4096, 4096) bfloat16, backward          85%       40%
#     (1, 1000, 100000), backward                 89%       59%
#     (1, 1000, 100000) bfloat16, backward        85%       57%
#                                              one CTA
#     (2, 50257, 768)                             58%
#     (1, 25000, 4000), backward                  70%       60%
#     (1, 25000, 4000) bfloat16, backward         68%       57%
HALF_SMEM_BYTES = 104 * 1024
EXCHANGE_BYTES = 6 * 1024  # shared memory for merging (m, d) over a cluster, in addition to the slots
STEP_BYTES = 14 * 1024  # approximate size of a step in each array
STEP_ROWS = 256  # most lines of a step, which is one bulk copy
MAX_SLOTS = 32
# Slots for columns that are only read. logsumexp of (1, 25000, 4000) reaches 91% of read bandwidth, with 7 slots 69%.
READ_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Strips:
    """Strips of `width` adjacent columns in shared memory. A cluster of `count` CTAs takes each strip.

    Each CTA has a part of the lines, which it takes in steps of `step_rows` lines. A step is one bulk copy into a slot
    of shared memory. With two CTAs per strip, and three steps per part:

                   columns   |<- width ->|
                             | strip 0   | strip 1   | strip 2   | ...
        part 0     step 0    |           |           |           |
                   step 1    |           |           |           |
                   step 2    |           |           |           |
        part 1     step 0    |           |           |           |
                   step 1    |           |           |           |
                   step 2    |           |           |           |      its last lines may be out of bounds

    If columns are written, each step has its own slot. If they are only read, a few slots are enough: once a step is
    reduced, a later one takes its slot.

    If a CTA fills its multiprocessor, its cluster takes several strips in turns. The steps of all strips go through
    the same slots: once a step is written, its slot is filled with the next step. With three slots and three steps:

        slot 0     | read 0,0 | reduce       write 0,0 | read 1,0            | reduce       write 1,0 | ...
        slot 1     |   read 0,1 | reduce       write 0,1 | read 1,1          |   reduce       write 1,1 | ...
        slot 2     |     read 0,2 | reduce       write 0,2 | read 1,2        |     reduce       write 1,2 | ...
                                           ^ (m, d) merged              (strip, step)
    """

    vocab: int  # number of lines
    # Number of columns of a strip, less than `inner`. A strip as wide as the array would be copied as one
    # contiguous run, and such a copy is not cut off where the array ends.
    width: int
    count: int
    step_rows: int
    slots: int  # number of steps that shared memory holds
    turns: int = 1  # most strips that a cluster takes, one after the other

    @property
    def block_tile(self) -> Tile:
        """The lines that a CTA holds at a time, one vector per thread."""
        lanes = self.width // VEC
        return Tile(hardware.WARPGROUP // lanes, lanes, VEC, 1)

    @property
    def steps(self) -> int:
        return -(-self.vocab // (self.count * self.step_rows))

    @property
    def lines_beyond(self) -> bool:
        return self.count * self.steps * self.step_rows != self.vocab


def plan_columns(
    op: str, outer: int, vocab: int, inner: int, dtype, capability: tuple[int, int]
) -> Tile | Strips | None:
    """Returns the plan for an operation along the middle axis of arrays (outer, vocab, inner); None to transpose."""
    if outer * vocab >= hardware.INT32_LIMIT or inner >= hardware.INT32_LIMIT:
        return None
    itemsize, arrays = jnp.dtype(dtype).itemsize, 2 if op.endswith("_grad") else 1
    if vocab * inner < TILE_ELEMENTS:
        return None  # most threads of a tile would be idle
    if tile := _tile(outer, vocab, inner, itemsize, arrays):
        if (tile.lanes, tile.vec) != (hardware.WARPGROUP, 1) or op == "logsumexp":
            return tile
        ctas = -(-RESIDENT_ELEMENTS // math.prod(tile.shape))
        spare = hardware.smem_of_each(capability, ctas) - hardware.RESERVED_SMEM_BYTES
        return dataclasses.replace(tile, reserved_bytes=max(0, spare))
    if inner * itemsize % hardware.ACCESS_BYTES:
        return None  # bulk copies need lines that are aligned to 16 bytes
    only_read = op == "logsumexp"
    smem = hardware.SMEM_BYTES[capability[0]] - hardware.RESERVED_SMEM_BYTES - EXCHANGE_BYTES
    for strip_bytes, most, in_turns in (
        (STRIP_BYTES, min(smem, HALF_SMEM_BYTES), False),  # at least two CTAs per multiprocessor
        (STRIP_BYTES, smem, True),  # one CTA
        (NARROW_STRIP_BYTES, smem, False),  # one or two CTAs
    ):
        plan = _strips(outer, vocab, inner, strip_bytes, itemsize, arrays, hardware.MAX_CLUSTER[capability[0]])
        if only_read:
            plan = dataclasses.replace(plan, slots=min(READ_SLOTS, plan.steps))
        held = plan.slots * plan.step_rows * plan.width * itemsize * arrays
        strips = outer * -(-inner // plan.width)
        if held > most or plan.slots > MAX_SLOTS or plan.width >= inner or strips * plan.count < FEWEST_CTAS:
            continue
        if not in_turns:
            return plan
        if (itemsize, arrays) == (2, 1) and held <= PART_BYTES * STRIP_BYTES // NARROW_STRIP_BYTES:
            continue  # with narrow strips, three CTAs fit
        turns = -(-strips // hardware.FULL_CLUSTERS)  # of each cluster, if each CTA fills a multiprocessor
        if capability[0] == 9 and turns >= FEWEST_TURNS:
            slots = smem // (held // plan.slots)  # as many as fit
            return dataclasses.replace(plan, slots=min(slots, MAX_SLOTS), turns=turns)
    return None


def _tile(outer: int, vocab: int, inner: int, itemsize: int, arrays: int) -> Tile | None:
    """Returns the tile that holds whole columns in registers, if they fit."""
    vec = math.gcd(inner, VEC)
    vectors = -(-inner // vec)
    found = None
    for lanes in TILE_LANES:
        if lanes >= max(2 * vectors, 3) or lanes < min(FEWEST_LANES, vectors):
            continue
        if found and vocab * lanes * vec < TILE_ELEMENTS:
            break
        at_once = hardware.WARPGROUP // lanes
        rows = -(-vocab // at_once) * at_once
        if rows // at_once * vec * arrays > TILE_REGISTERS:
            continue
        found = Tile(rows, lanes, vec, 1)
        if outer * -(-inner // (lanes * vec)) >= ENOUGH_CTAS:
            break
    if found and (found.lanes, vec, itemsize) == (hardware.WARPGROUP, 1, 4):
        for steps in range(LINE_STEPS, 1, -1):
            tiles = outer * -(-inner // (hardware.WARPGROUP * steps))
            if found.rows * steps <= min(STEPS_REGISTERS, TILE_REGISTERS // arrays) and tiles >= ENOUGH_CTAS:
                return dataclasses.replace(found, steps=steps)
    return found


def _strips(outer: int, vocab: int, inner: int, strip_bytes: int, itemsize: int, arrays: int, most: int) -> Strips:
    """Returns strips with the smallest cluster of up to `most` CTAs that keeps parts within PART_BYTES.

    The width is `strip_bytes`, halved until it is less than a line. Few strips get larger clusters, so that more
    multiprocessors have work.
    """
    while strip_bytes >= inner * itemsize and strip_bytes > 2 * VEC * itemsize:
        strip_bytes //= 2
    width = strip_bytes // itemsize
    strips = outer * -(-inner // width)
    block_rows = hardware.WARPGROUP * VEC // width
    count = 1
    while count < most and (
        -(-vocab // count) * strip_bytes * arrays > PART_BYTES
        or (strips * count < ENOUGH_CTAS // 2 and vocab > count * block_rows)
    ):
        count *= 2
    part = -(-vocab // count)
    steps = max(-(-part * strip_bytes // STEP_BYTES), -(-part // STEP_ROWS))
    step_rows = -(-part // (steps * block_rows)) * block_rows
    plan = Strips(vocab, width, count, step_rows, slots=1)
    return dataclasses.replace(plan, slots=plan.steps)
