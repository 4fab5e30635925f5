"""How the rows of a softmax lie over the GPU: a pure function of the operation, shape, dtype and GPU.

The constants were chosen on an H100 by timing shapes around each of them; benchmarks/results/launch, made by
configs/launch.flags, holds what the choice reaches. The figures beside them are time, and share of the bandwidth of a
copy, of the float32 softmax of (rows, vocab). Those of Parts are device times by CUPTI (NVIDIA H100 80GB HBM3, driver
580.159.04, jax 0.11.2, 2026-11-22 and 23).
"""

import dataclasses

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import (
    ACCESS_BYTES,
    FULL_CLUSTERS,
    MAX_CLUSTER,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
)
from pallas_softmax._src.gpu.layout import Cut, Tile, Walk, short_row_tile

# Elements of a row, of all arrays that the operation reads, up to which it is held in registers: 12,288 are 96
# float32 registers of the 255 of a thread. (4000, 8192) reaches 98%, (4000, 10000) 97%.
TILE_ELEMENTS = 12_288
# The same where there are few rows: (1, 4096) takes 1.8 us in registers, (1, 16384) 2.4 us in a cluster.
FEW_ROWS_TILE_ELEMENTS = 10_240
# The same for rows that do not all start on 16 bytes: they are loaded an element or two at a time.
# (4000, 4097) reaches 94%, where (4000, 4096) reaches 97%.
UNALIGNED_TILE_ELEMENTS = 5_120

FEW_ROWS = 16  # rows at most that are few: what counts is how soon each is done, not how many are at once
MANY_ROWS = 2_000  # rows from which the time when the last of them leave multiprocessors idle weighs little

# Elements of a part at most, unless the cluster is the largest. Smaller parts let more CTAs run on each
# multiprocessor, whose loads and arithmetic overlap; larger ones merge less.
HALF_PART_ELEMENTS = 19_000  # of 16-bit rows, half the bytes: these wait for arithmetic, too
PART_ELEMENTS = 13_000  # (1024, 16384) in 2 parts: 88%; (1024, 50257) in 4: 95%; (1024, 128256) in 16: 99%
MASKED_PART_ELEMENTS = 6_500  # (1024, 25000) in 4 parts: 95%, in 2: 90%; (1024, 50257) in 8: 97%, in 4: 94%
MANY_ROWS_PART_ELEMENTS = 26_000  # (4000, 16384) in one part: 97%

# The same for few rows: in up to 4 parts, and in 8 or 16, which only longer rows are worth. (10, 12000) takes 2.9 us in
# 4 parts, 3.9 us in 2; (10, 16128) 3.0 us in 8, 3.3 us in 4; (10, 100000) 5.2 us in 16, 6.1 us in 8; (1, 50257) 3.2 us
# in 16, 3.7 us in 8.
FEW_ROWS_PART_ELEMENTS = 3_100
FEW_ROWS_PART_ELEMENTS_OF_8 = 6_200

# The same for rows that are only read. (1024, 128256) takes 170 us in 8 parts, 198 us in 16.
READ_PART_ELEMENTS = 17_000
# Of 16-bit rows: (4000, 25000) takes 69 us in 2 parts, 71 us in one; (1024, 128256) 88 us in 4, 104 us in 8.
HALF_READ_ROW_ELEMENTS = 17_000  # in one part
HALF_READ_PART_ELEMENTS = 32_100  # in several

# Bytes of a part, of all arrays, above which few rows are split over more CTAs than a cluster has, in two launches.
# (16, 400000) takes 24.9 us so, in clusters 26.9 us, (16, 200000) 16.7 and 12.7 us, its backward 16.0 and 17.1 us.
FEW_ROWS_PART_BYTES = 80_000
# The same of one array, of one row that is written. (1, 151936) takes 3.8 us in two launches, in a cluster 4.6 us,
# (1, 50257) 3.7 and 3.2 us; the backward of (1, 200000) 3.7 and 6.1 us, in bfloat16 3.5 and 3.7 us, of (1, 128256)
# bfloat16 3.4 and 3.1 us. logsumexp of (1, 200000), which is only read, takes 5.6 us in two launches, in a cluster 4.1.
LONE_ROW_PART_BYTES = 24_000
SPLIT = 256  # parts of a row in two launches, or a multiple of it: about two for each multiprocessor

STEP_BLOCKS = 4  # blocks, of 128 vectors of 16 bytes each, that are waited for together: 8 KB
# The same for rows that are only read, for few that are written, and for the longest parts: logsumexp of (64, 128256)
# bfloat16 in 4 parts takes 7.8 us, with steps of 4 blocks 8.4 us; softmax of (1, 128256) in a cluster 4.1 us, with 4
# blocks 4.3 us; of (2000, 516096), without turns, 3.01 ms, with 4 blocks 3.20 ms. But a backward that reads again goes
# by steps of 4 blocks: (2000, 516096) takes 4.48 ms, with 8 blocks 4.61 ms.
LONG_STEP_BLOCKS = 8
LONG_PART_ELEMENTS = 31_000

# The same for 16-bit rows with a mask: with steps of 4 blocks a thread of (1024, 50257) needs 140 registers, so that 3
# CTAs are on a multiprocessor, with steps of 2 it needs 104. It takes 91.6 us in bfloat16, 93%, with 4 or 1 93.9 us.
HALF_MASKED_STEP_BLOCKS = 2
MAX_BARRIERS = 32  # in an array of barriers, as Mosaic has it

# Registers of each thread for the mask of the next steps, four elements in each: those of all steps of a part of
# (1024, 50257), and of (1024, 128256). A step is reduced in about 0.3 us, and a load takes 1 to 2 us when device memory
# is busy: with 8 registers the two take 184 and 399 us, with 32 166 and 393 us, 92% and 99%. In a longer part the mask
# of a later step is moved to other registers one step after it was loaded, which waits for it.
MASK_REGISTERS = 32

# Where one CTA fills a multiprocessor, clusters take rows in turns, so that the next row arrives while one is merged
# and written: (512, 500009) takes 715 us in 8 turns, 730 in 4, 695 if seven clusters take all, and 777 without; (256,
# 1000000) bfloat16 397, 417, 384 and 454 us. But where a GPU has room for more or fewer clusters than FULL_CLUSTERS,
# which differs from chip to chip, short turns leave less of it idle.
TURNS = 8  # rows at most
# What an element costs that turns read again, in accesses; `_worth_reading_again` counts them. The softmax of (256,
# 1000000), of whose rows 19% are read again, takes 832 us, in two launches 1010, of (28, 1000000) 111 and 115 us, of
# (256, 2000000), with 58%, 1.81 and 2.02 ms; the backward of (512, 500009), with 19%, 1.14 and 1.65 ms, of (14, 500009)
# 37 and 43 us. What it leaves out: the softmax of (30, 1400000), with 41%, takes 191 us in turns, in two launches 171;
# the backward of (28, 1000000), with 58%, 183 and 179 us.
READ_AGAIN_COST = 1.25

# Bulk copies are in lines of device memory: (512, 500009) takes 723 us, where bodies start on 16 bytes 874.
LINE_BYTES = 128

EDGE = 128  # elements, one a thread, at each end of a part that does not start and end on 16 bytes


@dataclasses.dataclass(frozen=True)
class Parts:
    """Long rows in shared memory: each cut into `count` parts, a CTA each.

    The CTAs of a row are a cluster, or, where `cluster` is False, independent ones, of two launches.

    A CTA copies the `body` of its part to shared memory in bulk: that must start and end on 16 bytes of device
    memory, and is faster from LINE_BYTES. Where parts do not, the first and the last EDGE elements are held in
    registers as well, which covers what the body leaves out on either side:

        part     |<-------------------------- length -------------------------->|
        edges    |<- EDGE ->|                                        |<- EDGE ->|
        body             |<------------------- body ------------------>|
        owned    |<------------------------- owned ------------------------->|
                                                                             ^ the next part starts here

    All parts have the same `length`, that of the longest, so that the kernel's shapes are static; a part owns
    the elements up to the start of the next one. Each element is reduced once: by the body, or by the edge where
    the body does not hold it and the part owns it. What two hold is written twice, with the same value.

    Attributes:
      vocab: number of elements of a row.
      vec: number of elements in 16 bytes.
      step_blocks: number of blocks of a step; see `Walk`.
      count: number of parts of a row.
      cluster: whether the parts of a row are one cluster of CTAs (one part is, too).
      teams: number of CTAs, or clusters, that take the rows in turns: team i rows i, i + teams, and so on. None where
        each row has its own.
      slots: where rows are taken in turns, the number of steps that shared memory holds: those of a part, and of the
        next row's as many as fit; or fewer than those of a part, whose first steps are then read twice; see
        `StagedRow`. None where each row has its own CTAs.
    """

    vocab: int
    vec: int
    step_blocks: int
    count: int
    cluster: bool
    teams: int | None = None
    slots: int | None = None

    @property
    def cut(self) -> Cut:
        """How a row is cut: on 16 bytes, if all rows start there; anywhere, otherwise."""
        return Cut(self.vocab, self.unit, self.count)

    @property
    def unit(self) -> int:
        """Number of elements whose multiples parts start at."""
        return 1 if self.vocab % self.vec else self.vec

    @property
    def edges(self) -> bool:
        """Whether some part does not start or end on 16 bytes, or shares elements with the next one."""
        return bool(self.vocab % (self.count * self.vec))

    @property
    def length(self) -> int:
        """Number of elements that each part holds."""
        return self.cut.longest

    @property
    def body(self) -> int:
        """Number of elements of a part that are copied in bulk, the same for all parts, a multiple of `vec`."""
        if not self.edges:
            return self.length
        return (self.length - EDGE - self.vec) // self.vec * self.vec  # ends in the part wherever it starts

    def body_start(self, row, start):
        """Returns the element of a part at which its body starts, if the part starts at element `start` of a row.

        The body starts on LINE_BYTES of device memory.
        """
        line = LINE_BYTES // ACCESS_BYTES * self.vec
        return EDGE - (row * (self.vocab % line) + start) % line if self.edges else 0

    @property
    def walk(self) -> Walk:
        """How the CTA goes over the body."""
        return Walk(self.body, self.vec, self.step_blocks)

    @property
    def again(self) -> int:
        """Number of steps, the first ones, that are read twice, since shared memory does not hold all."""
        return 0 if self.slots is None else max(0, self.walk.steps - self.slots)

    @property
    def smem_elements(self) -> int:
        """Number of elements of shared memory that hold an array's part."""
        return self.walk.padded_length if self.slots is None else self.slots * self.walk.step_size

    @property
    def barriers(self) -> int:
        """Number of barriers at which steps of an array arrive."""
        return self.walk.steps if self.slots is None else self.slots

    @property
    def mask_steps_ahead(self) -> int:
        """Number of steps for which the mask is loaded ahead of the step that is reduced."""
        return max(1, MASK_REGISTERS * 4 // (self.step_blocks * self.vec))


def plan_softmax(
    op: str, rows: int, vocab: int, dtype, capability: tuple[int, int], *, masked: bool = False
) -> Tile | Parts:
    """Returns how the rows of an operation lie over a GPU of this compute capability.

    Args:
      op: the name of the operation.
      rows, vocab, dtype: shape and dtype of the arrays whose rows it reads.
      masked: whether there is a mask.
    """
    itemsize, arrays = jnp.dtype(dtype).itemsize, 2 if op.endswith("_grad") else 1
    vec = ACCESS_BYTES // itemsize
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    only_read = op == "logsumexp"

    def parts(count: int, cluster: bool) -> Parts:
        if rows <= FEW_ROWS:
            long = cluster and not only_read
        else:
            long = only_read or vocab > count * LONG_PART_ELEMENTS
        steps = HALF_MASKED_STEP_BLOCKS if masked and itemsize == 2 else STEP_BLOCKS
        return Parts(vocab, vec, LONG_STEP_BLOCKS if long else steps, count, cluster)

    def fits(parts: Parts) -> bool:
        return parts.smem_elements * itemsize * arrays <= smem and parts.barriers <= MAX_BARRIERS

    def leaves_idle(clustered: Parts) -> bool:
        part_bytes = clustered.length * itemsize  # which one CTA works on, while others have none
        if rows == 1 and not only_read:
            return part_bytes > LONE_ROW_PART_BYTES
        return rows <= FEW_ROWS and part_bytes * arrays > FEW_ROWS_PART_BYTES

    # In registers: no shared memory, no barriers, and several rows a CTA.
    if vocab * arrays <= _tile_elements(rows, aligned=vocab % vec == 0):
        return short_row_tile(vocab, itemsize)

    # In the shared memory of one CTA, or of a cluster: the row is read once. The smallest cluster that will do.
    count, most = 1, MAX_CLUSTER[capability[0]]
    while count < most and not (
        vocab <= count * _part_elements(count, rows, itemsize, only_read, masked) and fits(parts(count, True))
    ):
        count *= 2
    clustered = parts(count, cluster=True)
    if fits(clustered) and not leaves_idle(clustered):
        alone = 2 * clustered.smem_elements * itemsize > smem  # no second CTA fits beside it
        # Of Hopper FULL_CLUSTERS is known. A backward has little arithmetic: it reaches 94% without turns.
        if capability[0] == 9 and alone and arrays == 1 and not only_read:
            turned = _in_turns(clustered, rows, smem // (itemsize * arrays))
            return clustered if turned.again else turned
        return clustered

    # In the shared memory of a cluster, too, but for steps that it does not hold, which are read twice. What a mask
    # leaves out is made neutral in shared memory, which would be lost.
    if capability[0] == 9 and not (fits(clustered) or masked or only_read):
        if arrays == 2:
            clustered = dataclasses.replace(clustered, step_blocks=STEP_BLOCKS)
        turned = _in_turns(clustered, rows, smem // (itemsize * arrays))
        if _worth_reading_again(turned, rows, arrays):
            return turned

    # In two launches, over any number of CTAs: the row is read twice, the second time partly from the L2 cache.
    count = SPLIT
    while not fits(parts(count, cluster=False)):
        count += SPLIT
    return parts(count, cluster=False)


def _in_turns(parts: Parts, rows: int, smem_elements: int) -> Parts:
    """Returns the same parts, of several rows in turns.

    As many clusters are launched as are on the device at once, or a multiple, and they take about as many rows each.
    """
    slots = min(smem_elements // parts.walk.step_size, MAX_BARRIERS)
    waves = -(-rows // (FULL_CLUSTERS * TURNS))
    return dataclasses.replace(parts, teams=FULL_CLUSTERS * waves, slots=slots)


def _worth_reading_again(parts: Parts, rows: int, arrays: int) -> bool:
    """Whether turns are faster than two launches, which read all twice and write once, by their accesses to memory."""
    turns = -(-rows // FULL_CLUSTERS) + 0.5  # the first read and the last write have nothing beside them
    again = READ_AGAIN_COST * parts.again / parts.walk.steps
    return FULL_CLUSTERS * turns * (arrays * (1 + again) + 1) < rows * (arrays * 2 + 1)


def _tile_elements(rows: int, aligned: bool) -> int:
    """Returns the number of elements of a row, in all arrays, up to which it is held in registers."""
    if not aligned:
        return UNALIGNED_TILE_ELEMENTS  # more loads would be needed than are fast
    if rows <= FEW_ROWS:
        return FEW_ROWS_TILE_ELEMENTS  # a cluster brings more threads to each row
    return TILE_ELEMENTS  # as many as the registers hold


def _part_elements(count: int, rows: int, itemsize: int, only_read: bool, masked: bool) -> int:
    """Returns the number of elements of each of `count` parts at most, unless the cluster is the largest."""
    if rows <= FEW_ROWS:  # to have many CTAs at work on each row
        return FEW_ROWS_PART_ELEMENTS if count < 8 else FEW_ROWS_PART_ELEMENTS_OF_8
    if only_read and itemsize == 2:
        return HALF_READ_ROW_ELEMENTS if count == 1 else HALF_READ_PART_ELEMENTS
    if itemsize == 2:
        return HALF_PART_ELEMENTS
    if rows >= MANY_ROWS:
        return MANY_ROWS_PART_ELEMENTS  # to merge as little as possible
    if only_read:
        return READ_PART_ELEMENTS
    return MASKED_PART_ELEMENTS if masked else PART_ELEMENTS  # to have shorter CTAs at the end


def approximate(dtype) -> bool:
    """Returns whether exp may be computed as ex2.approx(x log2(e)), whose relative error is |x| eps.

    It is for 16-bit results, in whose rounding the error is lost. The exp that is exact to an ulp or two costs
    nothing in float32, where the kernel waits for memory. (The forward of top-k has no time for it, 8% at 4000 x 25000
    float32, and takes the approximate one for all dtypes: its winners have a small |x - m|. Its backward is as here.)
    """
    return jnp.dtype(dtype).itemsize == 2
