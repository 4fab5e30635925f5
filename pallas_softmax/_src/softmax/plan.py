"""Plans for softmax along the last axis: how rows are distributed over the GPU.

A plan is a pure function of the operation, shape, dtype and GPU. Its constants were chosen on an H100 by timing shapes
around each threshold. benchmarks/results/launch, made by configs/launch.flags, holds the resulting speeds.

Comments give times, or speeds as a percentage of copy bandwidth. Unless they say otherwise, they are for the float32
softmax of (rows, vocab). Times for `Parts` are device times by CUPTI (NVIDIA H100 80GB HBM3, driver 580.159.04, jax
0.11.2, 2026-11-22 and 23).
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from pallas_softmax._src.gpu import hardware
from pallas_softmax._src.gpu.layout import Cut, Tile, Walk, aligned_view, short_row_tile

# --- Rows in registers: the most elements of a row, over all arrays that the operation reads ----------

# 12,288 elements take 96 of a thread's 255 registers. (4000, 8192) reaches 98%, (4000, 10000) 97%.
TILE_ELEMENTS = 12_288
# If some rows are not aligned to 16 bytes: they are loaded one or two elements at a time, so longer ones would need too
# many loads. (4000, 4097) reaches 94%, (4000, 4096) 97%.
UNALIGNED_TILE_ELEMENTS = 5_120

MANY_ROWS = 2_000  # from this many rows on, multiprocessors that idle at the end cost little

# --- Rows in shared memory: the most elements of a CTA, unless the cluster is the largest -------------

# With fewer elements, more CTAs share a multiprocessor and overlap loads with arithmetic. With more, they merge less.
HALF_PART_ELEMENTS = 19_000  # 16-bit rows: their bytes are half as many, and arithmetic also takes time
HALF_BACKWARD_PART_ELEMENTS = 16_500  # (1024, 151936) takes 172 us in 16 CTAs, 208 us in 8 (H200)
# Bytes, for rows that are not aligned to 16 bytes: each CTA has one segment, for few rows and for many. The float32
# softmax of (1024, 50257) takes 102 us in 4 CTAs and 103 us in 8, of (1, 50257) 4.7 us and 3.4 us (H200).
UNALIGNED_PART_BYTES, UNALIGNED_READ_PART_BYTES = 26_000, 52_000
PART_ELEMENTS = 13_000  # (1024, 16384) in 2 CTAs: 88%; (1024, 50257) in 4: 95%; (1024, 128256) in 16: 99%
MASKED_PART_ELEMENTS = 6_500  # (1024, 25000) in 4 CTAs: 95%, in 2: 90%; (1024, 50257) in 8: 97%, in 4: 94%
MANY_ROWS_PART_ELEMENTS = 20_000  # (4000, 16384) in one CTA: 97%

# The most elements of a segment. Few rows have a CTA for each segment, and only longer rows are worth 8 or 16 of them:
#
#     segments          2        4        8       16
#     (10, 12000)     3.9 us   2.9 us
#     (10, 16128)              3.3 us   3.0 us
#     (10, 100000)                      6.1 us   5.2 us
SEGMENT_ELEMENTS = {4: 3_100, 2: 6_300}  # in up to 4 segments, by bytes of an element
SEGMENT_ELEMENTS_OF_8 = 6_200  # in 8 or 16 segments
# A 16-bit row has 8 segments and not 16, if the last block of each of 16 would leave more than this share of a segment
# idle. bfloat16, 1,024 rows of 50,304: softmax 55.3 us in 16 segments, 51.7 in 8; token_stats 42.5, 37.3 (H200).
MAX_IDLE = 1 / 8
# With few rows, each has more CTAs, up to this number in all: they have room at once. If rows are written, up to twice
# this number.
CTAS = 256

# Rows that are only read. (1024, 128256) takes 170 us in 8 CTAs, 198 us in 16.
READ_PART_ELEMENTS = 17_000
# 16-bit rows that are only read. (4000, 25000) takes 69 us in 2 CTAs, 71 us in one. (1024, 128256) takes 88 us in 4
# CTAs, 104 us in 8.
HALF_READ_ROW_ELEMENTS = 17_000  # in one CTA
HALF_READ_PART_ELEMENTS = 32_100  # in several CTAs
# 16-bit rows of token_stats. (4096, 128256) takes 1.02 of the time of logsumexp in 4 CTAs, 1.12 in 8.
HALF_STATS_ROW_ELEMENTS = 26_000  # in one CTA
HALF_STATS_PART_ELEMENTS = 33_000  # in several CTAs

SPLIT = 256  # in two launches, the number of segments is a multiple of this: about two per multiprocessor

# --- Steps --------------------------------------------------------------------------------------------

STEP_BLOCKS = 4  # blocks that a CTA waits for together; each has 128 vectors of 16 bytes, 2 KB
# The same for rows that are only read, and for the longest segments. A backward that reads steps twice is the
# exception, and has STEP_BLOCKS.
#
#                                                   8 blocks    4 blocks
#     logsumexp of (64, 128256) bfloat16, 4 parts    7.8 us      8.4 us
#     softmax of (2000, 516096), without turns       3.01 ms     3.20 ms
#     float32 backward of it, steps read twice       4.61 ms     4.48 ms
LONG_STEP_BLOCKS = 8
LONG_SEGMENT_ELEMENTS = 31_000  # longer segments are among the longest

# The same for 16-bit rows with a mask. (1024, 50257) bfloat16 takes 91.6 us, which is 93%; with steps of 4 blocks or 1
# block it takes 93.9 us. With 4 blocks a thread needs 140 registers, so that a multiprocessor holds only 3 CTAs. With 2
# blocks it needs 104. Rows with edges have LONG_STEP_BLOCKS: they wait for the mask in each step, twice.
HALF_MASKED_STEP_BLOCKS = 2
MAX_BARRIERS = 32  # most barriers in an array, a limit of Mosaic

# Registers of each thread for loading the mask ahead: of four elements, or of one if rows have edges. A step is reduced
# in about 0.3 us, but a load takes 1 to 2 us when device memory is busy. (1024, 50257) took 166 us with 32 registers,
# 184 us with 8. In longer segments, the mask of a later step moves to other registers after a step, and waits.
MASK_REGISTERS = 32

# --- Rows in turns ------------------------------------------------------------------------------------

# If each CTA fills a multiprocessor, clusters take rows in turns. The next row is loaded while one is merged and
# written.
#
#                                no turns    4 turns    8 turns    all rows by 7 clusters
#     (512, 500009)               777 us     730 us     715 us            695 us
#     (256, 1000000) bfloat16     454 us     417 us     397 us            384 us
#
#     backward (H200)             two launches    no turns    8 turns
#     (1024, 262144)                1191 us        926 us      794 us
#     (2000, 516096) bfloat16       2290 us       1643 us     1406 us
#
# A GPU may have room for more or fewer clusters than FULL_CLUSTERS: the number differs from chip to chip. Short turns
# then leave less of the GPU idle.
TURNS = 8  # most rows of a cluster
# Cost of reading an element a second time, in memory accesses; see `_reading_again`.
#
#                                  read again    turns      two launches
#     (256, 1000000)                   19%       832 us       1010 us
#     (28, 1000000)                    19%       111 us        115 us
#     (256, 2000000)                   58%       1.81 ms       2.02 ms
#     (512, 500009), backward          19%       1.14 ms       1.65 ms
#     (30, 1400000)                    41%       191 us        171 us (rejected)
READ_AGAIN_COST = 1.25

# --- Alignment ----------------------------------------------------------------------------------------

# A line of device memory; bulk copies start on one. (512, 500009) takes 723 us, with bodies on 16 bytes 874 us.
LINE_BYTES = 128

EDGE = 128  # elements at each end of a segment, one per thread, if rows are not aligned to 16 bytes


@dataclasses.dataclass(frozen=True)
class Parts:
    """Long rows in shared memory. Each row has `count` CTAs, and is cut into segments, `per_cta` for each CTA.

    The CTAs of a row form a cluster. If `cluster` is False, they are independent, and there are two launches.

    A row is reduced segment by segment, and then over its segments. So its sums have the same order for any `count`
    with the same segments:

        segments    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |
        count = 2   |         CTA 0         |         CTA 1         |      many rows
        count = 8   |CTA 0|CTA 1|CTA 2|CTA 3|CTA 4|CTA 5|CTA 6|CTA 7|      few rows

    A CTA copies the `body` of each segment to shared memory in bulk. A bulk copy must start and end on 16 bytes of
    device memory, and is faster from LINE_BYTES on. If rows are not aligned to 16 bytes, a segment starts at any
    element of a line. Its body starts at a line, up to a line before the middle, and ends up to a line after it. Then
    the first and the last EDGE elements of the CTA's only segment are also held in registers:

        segment  |<-------------------------- length -------------------------->|
        edges    |<- EDGE ->|                                        |<- EDGE ->|
        middle              |<--------------- middle --------------->|
        body             |<-------------------- body -------------------->|
                         '--' before_middle
        owned    |<------------------------- owned ------------------------->|
                                                                             ^ the next segment starts here

    All segments have the `length` of the longest one, so that the kernel's shapes are static. A segment owns the
    elements up to the start of the next one. The edges and the middle are reduced, so a thread has the same elements at
    any address. The edges and the body are written. An element in both is written twice, with the same bits.
    """

    vocab: int  # number of elements of a row
    vec: int  # number of elements in 16 bytes
    step_blocks: int  # number of blocks of a step; see `Walk`
    count: int  # number of CTAs of a row
    cluster: bool  # whether the CTAs of a row form a cluster; True for a single CTA
    # Number of CTAs or clusters that take the rows in turns. Team i takes rows i, i + teams, and so on. None
    # if each row has its own CTAs.
    teams: int | None = None
    # If rows are taken in turns, the number of steps that shared memory holds, also of the next row. With fewer
    # slots than steps, the first steps are read twice; see `segment.Segment`.
    slots: int | None = None
    # Number of segments of a CTA; one with a mask, with edges, with turns, and in two launches.
    per_cta: int = 1

    @property
    def cut(self) -> Cut:
        """How a row is cut: at lines of device memory, or multiples of 16 bytes, if all rows start there."""
        line = LINE_BYTES // hardware.ACCESS_BYTES * self.vec
        unit = next(unit for unit in (line, self.vec, 1) if self.vocab % unit == 0)
        return Cut(self.vocab, unit, self.count * self.per_cta)

    def view(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of the arrays of so many rows, and of a result, inside the kernels."""
        return aligned_view(rows, self.vocab, self.vec)

    @property
    def ctas(self) -> int:
        """Number of CTAs that form a cluster, and merge the segments of a row in the kernel."""
        return self.count if self.cluster else 1

    @property
    def has_edges(self) -> bool:
        return bool(self.vocab % self.vec)

    @property
    def overlaps(self) -> bool:
        """Whether the body of a segment may overlap the next segment, in its last block."""
        return not self.has_edges and self.cut.shortest < self.length

    @property
    def length(self) -> int:
        return self.cut.longest

    @property
    def middle(self) -> int:
        return self.length - 2 * EDGE if self.has_edges else self.length

    @property
    def margin(self) -> int:
        """Number of elements that a slot holds after its step: a line, since the middle starts later than the body."""
        return LINE_BYTES // hardware.ACCESS_BYTES * self.vec if self.has_edges else 0

    @property
    def body(self) -> int:
        return -(-self.middle // self.vec) * self.vec + self.margin

    def before_middle(self, row, start):
        """Returns how far before the middle the body starts, at a line. The segment starts at element `start`."""
        return (row * (self.vocab % self.margin) + start) % self.margin if self.has_edges else 0

    @property
    def walk(self) -> Walk:
        return Walk(self.body, self.vec, self.step_blocks)

    @property
    def all_steps(self) -> int:
        """Number of steps of a segment, with the edges as a step."""
        return self.walk.steps + self.has_edges

    @property
    def again(self) -> int:
        """Number of steps that are read twice. They are the first ones."""
        return 0 if self.slots is None else max(0, self.walk.steps - self.slots)

    @property
    def smem_elements(self) -> int:
        """Number of elements of each array that shared memory holds."""
        if self.slots is not None:
            return self.slots * self.slot_size
        return (self.per_cta - 1) * self.length + self.walk.padded_length + self.walk.steps * self.margin

    @property
    def slot_size(self) -> int:
        """Number of elements of a step in shared memory: a full step, and the start of the next one."""
        return self.walk.step_size + self.margin

    @property
    def barriers(self) -> int:
        """Number of barriers for each array."""
        return self.per_cta * self.walk.steps if self.slots is None else self.slots

    @property
    def read_vec(self) -> int:
        """Number of neighbours that a thread reduces together."""
        return 1 if self.has_edges else self.vec

    @property
    def mask_steps_ahead(self) -> int:
        """Number of steps that loads of the mask run ahead of the reduction."""
        return min(self.walk.steps, max(1, MASK_REGISTERS * min(4, self.read_vec) // (self.step_blocks * self.vec)))


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The numbers that a plan depends on."""

    rows: int
    vocab: int  # number of elements of a row
    itemsize: int  # bytes of an element
    arrays: int  # number of arrays that the operation reads, the mask not counted
    only_read: bool  # whether the results are per-row numbers, so that no elements are written
    # Whether the operation is token_stats. With its larger state, steps of LONG_STEP_BLOCKS would take so
    # many registers that fewer CTAs share a multiprocessor.
    located: bool
    masked: bool
    hopper: bool  # whether the GPU is a Hopper. FULL_CLUSTERS is known only for these.
    smem: int  # bytes of shared memory of a CTA
    max_cluster: int  # most CTAs of a cluster

    @property
    def vec(self) -> int:
        return hardware.ACCESS_BYTES // self.itemsize

    @property
    def segmented(self) -> bool:
        """Whether a CTA may hold several segments. Edges and loads of the mask are for one."""
        return not self.masked and self.vocab % self.vec == 0

    def parts(self, count: int, *, per_cta: int = 1, cluster: bool = True) -> Parts:
        """Returns the plan with `count` CTAs for each row, and `per_cta` segments for each; it may not fit.

        A step has up to `most` blocks, but three steps become two longer ones. Two full steps and a rest are slow: the
        softmax of (1024, 151936) bfloat16 takes 177 us with 4, 4 and 2 blocks, and 156 us with 5 and 5 (H200).
        """
        of_half_masked = LONG_STEP_BLOCKS if self.vocab % self.vec else HALF_MASKED_STEP_BLOCKS
        most = of_half_masked if self.masked and self.itemsize == 2 else STEP_BLOCKS
        longest = self.vocab > self.max_cluster * LONG_SEGMENT_ELEMENTS
        if cluster and not self.located and (self.only_read or longest):
            most = LONG_STEP_BLOCKS
        one_step = Parts(self.vocab, self.vec, 1, count, cluster, per_cta=per_cta)
        blocks = one_step.walk.steps
        steps = -(-blocks // most)
        steps = 2 if steps == 3 else steps
        return dataclasses.replace(one_step, step_blocks=-(-blocks // steps) if cluster else most)

    def fits(self, parts: Parts) -> bool:
        """Whether a CTA has the shared memory and the barriers for these parts."""
        return self.smem_bytes(parts) <= self.smem and parts.barriers <= MAX_BARRIERS

    def smem_bytes(self, parts: Parts) -> int:
        return parts.smem_elements * self.itemsize * self.arrays


def plan_softmax(
    op: str, rows: int, vocab: int, dtype, capability: tuple[int, int], *, masked: bool = False
) -> Tile | Parts:
    """Returns the plan for the rows of an operation: the first of these that is good enough.

        in registers        no shared memory and no barriers; a CTA may take several rows
        in a cluster        rows in shared memory, each read once, in turns if these pay
        reading again       the same, but shared memory does not hold all steps
        in two launches     any number of CTAs; the second read comes partly from the L2 cache

    The order of a row's sums follows its segments and their steps. Up to the longest row that a cluster holds, these
    depend on everything but the number of rows. `op` is the name of the operation. It reads arrays (rows, vocab).
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
        smem=hardware.SMEM_BYTES[major] - hardware.RESERVED_SMEM_BYTES,
        max_cluster=hardware.MAX_CLUSTER[major],
    )
    if vocab * problem.arrays <= (UNALIGNED_TILE_ELEMENTS if vocab % problem.vec else TILE_ELEMENTS):
        return short_row_tile(vocab, problem.itemsize)
    clustered = _in_cluster(problem)
    if problem.fits(clustered):
        return _in_turns_if_alone(problem, clustered)
    return _reading_again(problem, clustered) or _in_two_launches(problem)


def _in_cluster(problem: _Problem) -> Parts:
    """Returns the plan with one CTA or a cluster for each row. If the row is too long, it does not fit."""
    if not problem.segmented:
        return problem.parts(_smallest_cluster(problem, _part_elements))
    segments = _smallest_cluster(problem, _segment_elements)
    walk = Parts(problem.vocab, problem.vec, 1, segments, True).walk
    if segments == 16 and problem.itemsize == 2 and walk.padded_length > (1 + MAX_IDLE) * walk.length:
        segments = 8
    count = _smallest_cluster(problem, _part_elements, segments)
    while count < segments and 2 * count * problem.rows <= (CTAS if problem.only_read else 2 * CTAS):
        count *= 2
    return problem.parts(count, per_cta=segments // count)


def _smallest_cluster(problem: _Problem, most: Callable[[_Problem, int], int], segments: int = 1) -> int:
    """Returns the fewest CTAs for a row, each with up to most(problem, number) elements; else the largest cluster."""

    def is_good(count: int) -> bool:
        parts = problem.parts(count, per_cta=max(1, segments // count))
        return -(-problem.vocab // count) <= most(problem, count) and problem.fits(parts)

    count = 1
    while count < problem.max_cluster and not is_good(count):
        count *= 2
    return count


def _segment_elements(problem: _Problem, count: int) -> int:
    """Returns the most elements of a segment, for a row in `count` segments; the largest cluster may exceed it."""
    return SEGMENT_ELEMENTS[problem.itemsize] if count < 8 else SEGMENT_ELEMENTS_OF_8


def _part_elements(problem: _Problem, count: int) -> int:
    """Returns the most elements of a CTA, for a row over `count` CTAs; the largest cluster may exceed it."""
    # The number of rows counts only where a CTA may hold several segments.
    half, many = problem.itemsize == 2, problem.segmented and problem.rows >= MANY_ROWS
    if problem.vocab % problem.vec:
        most = UNALIGNED_READ_PART_BYTES if problem.only_read else UNALIGNED_PART_BYTES
        return most // problem.itemsize
    if problem.only_read and half:
        if problem.located and count > 1:
            return HALF_STATS_PART_ELEMENTS
        if problem.located and many:
            return HALF_STATS_ROW_ELEMENTS
        return HALF_READ_ROW_ELEMENTS if count == 1 else HALF_READ_PART_ELEMENTS
    if half:
        return HALF_PART_ELEMENTS if problem.arrays == 1 else HALF_BACKWARD_PART_ELEMENTS
    if many:
        return MANY_ROWS_PART_ELEMENTS // problem.arrays  # to merge as little as possible
    if problem.only_read:
        return READ_PART_ELEMENTS
    return MASKED_PART_ELEMENTS if problem.masked else PART_ELEMENTS  # so that the last CTAs are short


def _in_turns_if_alone(problem: _Problem, clustered: Parts) -> Parts:
    """Returns parts that fit. Clusters take rows in turns if each CTA is alone on its multiprocessor."""
    alone = 2 * problem.smem_bytes(clustered) > problem.smem and clustered.per_cta == 1
    pays = problem.rows > hardware.FULL_CLUSTERS and not problem.only_read
    if problem.hopper and alone and pays and not (in_turns := _in_turns(problem, clustered)).again:
        return in_turns
    return clustered


def _reading_again(problem: _Problem, clustered: Parts) -> Parts | None:
    """Returns parts in turns that read some steps twice; None if two launches access memory less.

    Two launches read everything twice, and write it once. A mask rules this out: the first read makes masked elements
    neutral in shared memory, and a second one would undo that.
    """
    if not problem.hopper or problem.fits(clustered) or problem.masked or problem.only_read:
        return None
    if problem.arrays == 2:
        clustered = dataclasses.replace(clustered, step_blocks=STEP_BLOCKS)
    in_turns = _in_turns(problem, clustered)
    # nothing overlaps the first read and the last write
    turns = -(-problem.rows // hardware.FULL_CLUSTERS) + 0.5
    reads = 1 + READ_AGAIN_COST * in_turns.again / in_turns.walk.steps
    accesses = hardware.FULL_CLUSTERS * turns * (problem.arrays * reads + 1)
    return in_turns if accesses < problem.rows * (problem.arrays * 2 + 1) else None


def _in_turns(problem: _Problem, parts: Parts) -> Parts:
    # FULL_CLUSTERS clusters run at once, so the number of clusters is a multiple.
    step_bytes = parts.slot_size * problem.itemsize * problem.arrays
    slots = min(problem.smem // step_bytes, MAX_BARRIERS)
    waves = -(-problem.rows // (hardware.FULL_CLUSTERS * TURNS))
    return dataclasses.replace(parts, teams=hardware.FULL_CLUSTERS * waves, slots=slots)


def _in_two_launches(problem: _Problem) -> Parts:
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
