"""Plans for softmax along the last axis: how rows are distributed over the GPU.

A plan is a pure function of the operation, shape, dtype and GPU. Its constants were chosen on an H100 by timing shapes
around each threshold. benchmarks/results/launch, made by configs/launch.flags, holds the resulting speeds.

Comments give times, or speeds as a percentage of copy bandwidth. Unless they say otherwise, they are for the float32
softmax of (rows, vocab). Times for `Parts` are device times by CUPTI (NVIDIA H100 80GB HBM3, driver 580.159.04, jax
0.11.2, 2026-11-22 and 23).
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

# --- Rows in registers: the most elements of a row, over all arrays that the operation reads ----------

# 12,288 elements take 96 of a thread's 255 registers. (4000, 8192) reaches 98%, (4000, 10000) 97%.
TILE_ELEMENTS = 12_288
# With few rows. (1, 4096) takes 1.8 us in registers, (1, 16384) 2.4 us in a cluster.
FEW_ROWS_TILE_ELEMENTS = 10_240
# If some rows are not aligned to 16 bytes: they are loaded one or two elements at a time. (4000, 4097) reaches 94%,
# (4000, 4096) 97%.
UNALIGNED_TILE_ELEMENTS = 5_120

FEW_ROWS = 16  # up to this many rows, the latency of a row counts, not the throughput
MANY_ROWS = 2_000  # from this many rows on, multiprocessors that idle at the end cost little

# --- Rows in shared memory: the most elements of a part, unless the cluster is the largest ------------

# With smaller parts, more CTAs share a multiprocessor and overlap loads with arithmetic. Larger parts merge less.
HALF_PART_ELEMENTS = 19_000  # 16-bit rows: their bytes are half as many, and arithmetic also takes time
PART_ELEMENTS = 13_000  # (1024, 16384) in 2 parts: 88%; (1024, 50257) in 4: 95%; (1024, 128256) in 16: 99%
MASKED_PART_ELEMENTS = 6_500  # (1024, 25000) in 4 parts: 95%, in 2: 90%; (1024, 50257) in 8: 97%, in 4: 94%
MANY_ROWS_PART_ELEMENTS = 26_000  # (4000, 16384) in one part: 97%

# Few rows. Only longer rows are worth 8 or 16 parts:
#
#     parts             2        4        8       16
#     (10, 12000)     3.9 us   2.9 us
#     (10, 16128)              3.3 us   3.0 us
#     (10, 100000)                      6.1 us   5.2 us
#     (1, 50257)                        3.7 us   3.2 us
FEW_ROWS_PART_ELEMENTS = 3_100  # in up to 4 parts
FEW_ROWS_PART_ELEMENTS_OF_8 = 6_200  # in 8 or 16 parts

# Rows that are only read. (1024, 128256) takes 170 us in 8 parts, 198 us in 16.
READ_PART_ELEMENTS = 17_000
# 16-bit rows that are only read. (4000, 25000) takes 69 us in 2 parts, 71 us in one. (1024, 128256) takes 88 us in 4
# parts, 104 us in 8.
HALF_READ_ROW_ELEMENTS = 17_000  # in one part
HALF_READ_PART_ELEMENTS = 32_100  # in several parts
# 16-bit rows of token_stats, with times relative to logsumexp. With fewer than MANY_ROWS rows, one part is as long as
# for logsumexp (not measured).
#
#                          1 part    2 parts    4 parts    8 parts    16 parts
#     (4000, 25000)         1.07       1.11
#     (4000, 50257)         1.02      (1.05)      1.18
#     (4096, 128256)                               1.02       1.12
#     (1024, 262144)                                          0.98        1.05
#
# The number in brackets is of a kernel with a test for NaN in each step, which took 1.02 in one part.
HALF_STATS_ROW_ELEMENTS = 52_000  # in one part, so that shared memory holds two rows
HALF_STATS_PART_ELEMENTS = 33_000  # in several parts

# --- Few rows in two launches -------------------------------------------------------------------------

# Most bytes of a part in a cluster, over all arrays. Few rows with larger parts take two launches and more CTAs.
#
#                                 two launches    cluster
#     (16, 400000)                   24.9 us      26.9 us
#     (16, 200000)                   16.7 us      12.7 us
#     (16, 200000), backward         16.0 us      17.1 us
FEW_ROWS_PART_BYTES = 80_000
# The same for a single row that is written, per array.
#
#                                           two launches    cluster
#     (1, 151936)                              3.8 us       4.6 us
#     (1, 50257)                               3.7 us       3.2 us
#     (1, 200000), backward                    3.7 us       6.1 us
#     (1, 200000) bfloat16, backward           3.5 us       3.7 us
#     (1, 128256) bfloat16, backward           3.4 us       3.1 us
#     (1, 200000), logsumexp: only read        5.6 us       4.1 us
LONE_ROW_PART_BYTES = 24_000
SPLIT = 256  # in two launches, the number of parts is a multiple of this: about two per multiprocessor

# --- Steps --------------------------------------------------------------------------------------------

STEP_BLOCKS = 4  # blocks that a CTA waits for together; each has 128 vectors of 16 bytes, so a step has 8 KB
# The same for rows that are only read, for few rows that are written, and for the longest parts. A backward that reads
# steps twice is the exception, and has STEP_BLOCKS.
#
#                                                   8 blocks    4 blocks
#     logsumexp of (64, 128256) bfloat16, 4 parts    7.8 us      8.4 us
#     softmax of (1, 128256), in a cluster           4.1 us      4.3 us
#     softmax of (2000, 516096), without turns       3.01 ms     3.20 ms
#     backward of (2000, 516096), steps read twice   4.61 ms     4.48 ms
LONG_STEP_BLOCKS = 8
LONG_PART_ELEMENTS = 31_000  # longer parts are among the longest

# The same for 16-bit rows with a mask. (1024, 50257) bfloat16 takes 91.6 us, which is 93%; with steps of 4 blocks or 1
# block it takes 93.9 us. With 4 blocks a thread needs 140 registers, so that a multiprocessor holds only 3 CTAs. With 2
# blocks it needs 104.
HALF_MASKED_STEP_BLOCKS = 2
MAX_BARRIERS = 32  # most barriers in an array, a limit of Mosaic

# Registers of each thread for loading the mask ahead; each holds four elements. A step is reduced in about 0.3 us, but
# a load takes 1 to 2 us when device memory is busy.
#
#                       8 registers    32 registers
#     (1024, 50257)       184 us       166 us (92%)
#     (1024, 128256)      399 us       393 us (99%)
#
# 32 registers hold the mask of a whole part of these shapes. In longer parts, the mask of a later step moves to other
# registers one step after its load, and the move waits for the load.
MASK_REGISTERS = 32

# --- Rows in turns ------------------------------------------------------------------------------------

# If each CTA fills a multiprocessor, clusters take rows in turns. The next row is loaded while one is merged and
# written.
#
#                                no turns    4 turns    8 turns    all rows by 7 clusters
#     (512, 500009)               777 us     730 us     715 us            695 us
#     (256, 1000000) bfloat16     454 us     417 us     397 us            384 us
#
# A GPU may have room for more or fewer clusters than FULL_CLUSTERS: the number differs from chip to chip. Short turns
# then leave less of the GPU idle.
TURNS = 8  # most rows of a cluster
# Cost of reading an element a second time, in memory accesses; see `_worth_reading_again`.
#
#                                  read again    turns      two launches
#     (256, 1000000)                   19%       832 us       1010 us
#     (28, 1000000)                    19%       111 us        115 us
#     (256, 2000000)                   58%       1.81 ms       2.02 ms
#     (512, 500009), backward          19%       1.14 ms       1.65 ms
#     (14, 500009), backward           19%        37 us         43 us
#     rejected:
#     (30, 1400000)                    41%       191 us        171 us
#     (28, 1000000), backward          58%       183 us        179 us
READ_AGAIN_COST = 1.25

# --- Alignment ----------------------------------------------------------------------------------------

# A line of device memory; bulk copies start on one. (512, 500009) takes 723 us, with bodies on 16 bytes 874 us.
LINE_BYTES = 128

EDGE = 128  # elements at each end of a part that is not aligned to 16 bytes, one per thread


@dataclasses.dataclass(frozen=True)
class Parts:
    """Long rows in shared memory. Each row is cut into `count` parts, and each part has a CTA.

    The CTAs of a row form a cluster. If `cluster` is False, they are independent, and there are two launches.

    A CTA copies the `body` of its part to shared memory in bulk. A bulk copy must start and end on 16 bytes of device
    memory, and is faster from LINE_BYTES on. If parts are not aligned, the first and the last EDGE elements are also
    held in registers. They cover the elements before and after the body:

        part     |<-------------------------- length -------------------------->|
        edges    |<- EDGE ->|                                        |<- EDGE ->|
        body             |<------------------- body ------------------>|
        owned    |<------------------------- owned ------------------------->|
                                                                             ^ the next part starts here

    All parts have the `length` of the longest part, so that the kernel's shapes are static. A part owns the elements
    up to the start of the next part. Each element is reduced once: in the body that holds it, else in an edge of the
    part that owns it. An element that is held twice is written twice, with the same value.
    """

    vocab: int  # number of elements of a row
    vec: int  # number of elements in 16 bytes
    step_blocks: int  # number of blocks of a step; see `Walk`
    count: int  # number of parts of a row
    cluster: bool  # whether the CTAs of a row form a cluster; True for a single part
    # Number of CTAs or clusters that take the rows in turns. Team i takes rows i, i + teams, and so on. None
    # if each row has its own CTAs.
    teams: int | None = None
    # If rows are taken in turns, the number of steps that shared memory holds. Slots that the part does not
    # need hold steps of the next row. With fewer slots than steps, the first steps are read twice; see
    # `StagedRow`. None if each row has its own CTAs.
    slots: int | None = None

    @property
    def cut(self) -> Cut:
        """How a row is cut: at multiples of 16 bytes if all rows are aligned to 16 bytes, else at any element."""
        return Cut(self.vocab, 1 if self.vocab % self.vec else self.vec, self.count)

    @property
    def has_edges(self) -> bool:
        """Whether a part does not start or end on 16 bytes, or overlaps the next part."""
        return bool(self.vocab % (self.count * self.vec))

    @property
    def length(self) -> int:
        """Number of elements that each part holds."""
        return self.cut.longest

    @property
    def body(self) -> int:
        """Number of elements that each part copies in bulk, a multiple of `vec`."""
        if not self.has_edges:
            return self.length
        return (self.length - EDGE - self.vec) // self.vec * self.vec  # ends in the part, wherever it starts

    def body_start(self, row, start):
        """Returns the element of a part at which its body starts, aligned to LINE_BYTES of device memory.

        `row` is the number of the row, and `start` the element of the row at which the part starts.
        """
        line = LINE_BYTES // ACCESS_BYTES * self.vec
        return EDGE - (row * (self.vocab % line) + start) % line if self.has_edges else 0

    @property
    def walk(self) -> Walk:
        """How the CTA goes over the body."""
        return Walk(self.body, self.vec, self.step_blocks)

    @property
    def again(self) -> int:
        """Number of steps that are read twice, since shared memory does not hold all. They are the first ones."""
        return 0 if self.slots is None else max(0, self.walk.steps - self.slots)

    @property
    def smem_elements(self) -> int:
        """Number of elements of shared memory for the part of one array."""
        return self.walk.padded_length if self.slots is None else self.slots * self.walk.step_size

    @property
    def barriers(self) -> int:
        """Number of barriers for the steps of one array."""
        return self.walk.steps if self.slots is None else self.slots

    @property
    def mask_steps_ahead(self) -> int:
        """Number of steps that loads of the mask run ahead of the reduction."""
        return min(self.walk.steps, max(1, MASK_REGISTERS * 4 // (self.step_blocks * self.vec)))


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The numbers that a plan depends on."""

    rows: int  # number of rows
    vocab: int  # number of elements of a row
    itemsize: int  # bytes of an element
    arrays: int  # number of arrays that the operation reads, the mask not counted
    only_read: bool  # whether the results are per-row numbers, so that no elements are written
    # Whether the operation is token_stats. With its larger state, steps of LONG_STEP_BLOCKS would take so
    # many registers that fewer CTAs share a multiprocessor.
    located: bool
    masked: bool  # whether there is a mask
    hopper: bool  # whether the GPU is a Hopper. FULL_CLUSTERS is known only for these.
    smem: int  # bytes of shared memory of a CTA
    max_cluster: int  # most CTAs of a cluster

    @property
    def vec(self) -> int:
        """Number of elements in 16 bytes."""
        return ACCESS_BYTES // self.itemsize

    @property
    def smem_elements(self) -> int:
        """Number of elements of each array that shared memory holds."""
        return self.smem // (self.itemsize * self.arrays)

    def parts(self, count: int, *, cluster: bool) -> Parts:
        """Returns the plan that cuts each row into `count` parts; it may not fit."""
        if self.rows <= FEW_ROWS:
            long = cluster and not self.only_read
        else:
            long = not self.located and (self.only_read or self.vocab > count * LONG_PART_ELEMENTS)
        steps = HALF_MASKED_STEP_BLOCKS if self.masked and self.itemsize == 2 else STEP_BLOCKS
        return Parts(self.vocab, self.vec, LONG_STEP_BLOCKS if long else steps, count, cluster)

    def fits(self, parts: Parts) -> bool:
        """Returns whether a CTA has the shared memory and the barriers for these parts."""
        smem = parts.smem_elements * self.itemsize * self.arrays
        return smem <= self.smem and parts.barriers <= MAX_BARRIERS


def plan_softmax(
    op: str, rows: int, vocab: int, dtype, capability: tuple[int, int], *, masked: bool = False
) -> Tile | Parts:
    """Returns the plan for the rows of an operation: the first of these that is good enough.

        in registers        no shared memory and no barriers; a CTA may take several rows
        in a cluster        rows in shared memory, each read once, in turns if these pay
        reading again       the same, but shared memory does not hold all steps
        in two launches     any number of CTAs; the second read comes partly from the L2 cache

    `op` is the name of the operation. It reads arrays (rows, vocab).
    """
    major = capability[0]
    problem = _Problem(
        rows=rows,
        vocab=vocab,
        itemsize=jnp.dtype(dtype).itemsize,
        arrays=2 if op.endswith("_grad") else 1,
        only_read=op in ("logsumexp", "token_stats"),
        located=op == "token_stats",
        masked=masked,
        hopper=major == 9,
        smem=SMEM_BYTES[major] - RESERVED_SMEM_BYTES,
        max_cluster=MAX_CLUSTER[major],
    )
    if vocab * problem.arrays <= _tile_elements(problem):
        return short_row_tile(vocab, problem.itemsize)
    clustered = _smallest_cluster(problem)
    if problem.fits(clustered) and not _leaves_idle(problem, clustered):
        return _in_turns_if_alone(problem, clustered)
    return _reading_again(problem, clustered) or _in_two_launches(problem)


def _tile_elements(problem: _Problem) -> int:
    """Returns the most elements of a row, over all arrays, that registers should hold."""
    if problem.vocab % problem.vec:
        return UNALIGNED_TILE_ELEMENTS  # longer rows would need too many loads
    if problem.rows <= FEW_ROWS:
        return FEW_ROWS_TILE_ELEMENTS  # a cluster has more threads for each row
    return TILE_ELEMENTS  # as many as the registers hold


def _smallest_cluster(problem: _Problem) -> Parts:
    """Returns the plan with the smallest cluster that is good enough, else with the largest one, which may not fit."""
    count = 1
    while count < problem.max_cluster and not (
        problem.vocab <= count * _part_elements(problem, count)
        and problem.fits(problem.parts(count, cluster=True))
    ):
        count *= 2
    return problem.parts(count, cluster=True)


def _part_elements(problem: _Problem, count: int) -> int:
    """Returns the most elements of a part, for a row in `count` parts; the largest cluster may exceed it."""
    half = problem.itemsize == 2
    if problem.rows <= FEW_ROWS:  # many CTAs should work on each row
        return FEW_ROWS_PART_ELEMENTS if count < 8 else FEW_ROWS_PART_ELEMENTS_OF_8
    if problem.only_read and half:
        if problem.located and count > 1:
            return HALF_STATS_PART_ELEMENTS
        if problem.located and problem.rows >= MANY_ROWS:
            return HALF_STATS_ROW_ELEMENTS
        return HALF_READ_ROW_ELEMENTS if count == 1 else HALF_READ_PART_ELEMENTS
    if half:
        return HALF_PART_ELEMENTS
    if problem.rows >= MANY_ROWS:
        return MANY_ROWS_PART_ELEMENTS  # to merge as little as possible
    if problem.only_read:
        return READ_PART_ELEMENTS
    return MASKED_PART_ELEMENTS if problem.masked else PART_ELEMENTS  # so that the last CTAs are short


def _leaves_idle(problem: _Problem, clustered: Parts) -> bool:
    """Returns whether a cluster for each row leaves too many multiprocessors idle, because there are few rows."""
    part_bytes = clustered.length * problem.itemsize
    if problem.rows == 1 and not problem.only_read:
        return part_bytes > LONE_ROW_PART_BYTES
    return problem.rows <= FEW_ROWS and part_bytes * problem.arrays > FEW_ROWS_PART_BYTES


def _in_turns_if_alone(problem: _Problem, clustered: Parts) -> Parts:
    """Returns parts that fit. Clusters take rows in turns if each CTA is alone on its multiprocessor."""
    alone = 2 * clustered.smem_elements * problem.itemsize > problem.smem
    # A backward needs no turns: it has little arithmetic, and reaches 94% without them.
    if problem.hopper and alone and problem.arrays == 1 and not problem.only_read:
        in_turns = _in_turns(problem, clustered)
        return clustered if in_turns.again else in_turns
    return clustered


def _reading_again(problem: _Problem, clustered: Parts) -> Parts | None:
    """Returns parts in turns that read some steps twice; None if two launches are better.

    A mask rules this out: the first read makes masked elements neutral in shared memory, and a second one would undo
    that.
    """
    if not problem.hopper or problem.fits(clustered) or problem.masked or problem.only_read:
        return None
    if problem.arrays == 2:
        clustered = dataclasses.replace(clustered, step_blocks=STEP_BLOCKS)
    in_turns = _in_turns(problem, clustered)
    return in_turns if _worth_reading_again(problem, in_turns) else None


def _in_turns(problem: _Problem, parts: Parts) -> Parts:
    """Returns the same parts, with rows in turns.

    FULL_CLUSTERS clusters run at once, so the number of clusters is a multiple. All take about the same number of rows.
    """
    slots = min(problem.smem_elements // parts.walk.step_size, MAX_BARRIERS)
    waves = -(-problem.rows // (FULL_CLUSTERS * TURNS))
    return dataclasses.replace(parts, teams=FULL_CLUSTERS * waves, slots=slots)


def _worth_reading_again(problem: _Problem, parts: Parts) -> bool:
    """Returns whether turns access memory less than two launches, which read everything twice and write it once."""
    turns = -(-problem.rows // FULL_CLUSTERS) + 0.5  # nothing overlaps the first read and the last write
    again = READ_AGAIN_COST * parts.again / parts.walk.steps
    in_turns = FULL_CLUSTERS * turns * (problem.arrays * (1 + again) + 1)
    return in_turns < problem.rows * (problem.arrays * 2 + 1)


def _in_two_launches(problem: _Problem) -> Parts:
    """Returns parts for two launches, as few as fit."""
    count = SPLIT
    while not problem.fits(problem.parts(count, cluster=False)):
        count += SPLIT
    return problem.parts(count, cluster=False)


def approximate(dtype) -> bool:
    """Returns whether exp may be ex2.approx(x log2(e)), with a relative error of |x| eps.

    It may for 16-bit results, since rounding them hides the error. In float32 the kernels wait for memory, so that an
    exp within one or two ulp is free.

    The forward of top-k is different: the accurate exp would cost 8% at (4000, 25000) float32. So it uses the
    approximate one for all dtypes: its winners have a small |x - m|. The backward of top-k follows this function.
    """
    return jnp.dtype(dtype).itemsize == 2
