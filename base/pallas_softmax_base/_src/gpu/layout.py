"""Layouts of rows over the threads of a CTA, in shared memory and in device memory: frozen data, pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax_base._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP


@dataclasses.dataclass(frozen=True)
class Tile:
    """Short rows in the registers of a CTA: `rows` of them, each over `lanes` threads.

    `lanes` is 128, or a power of two up to 32. With 128 lanes, a row lies over all threads. With up to 32 lanes, each
    warp has 32 / lanes rows side by side. Each thread has a share of rows / (128 / lanes) rows: `steps` vectors of
    `vec` neighbouring elements of each row. With lanes = 16, vec = 4, steps = 2 and rows = 16:

                   elements 0-3   4-7     ...  60-63     64-67   ...  124-127
        row 0      thread 0       thread 1     thread 15 thread 0     thread 15      (warp 0, lanes 0-15)
        row 1      thread 16      thread 17    thread 31 thread 16    thread 31      (warp 0, lanes 16-31)
        ...
        row 7      thread 112     ...                                 thread 127     (warp 3, lanes 16-31)
        row 8      thread 0       ...                                 thread 15      (warp 0 again)

    Elements beyond the row's end and rows beyond the array's end hold a fill value, or such rows repeat the last row.

    With `pieces`, a power of two up to `lanes`, a row is cut into that many pieces. Each piece lies in the same way
    over lanes / pieces neighbouring lanes, and fills them. The columns of such a tile are not in order.

    A kernel may reserve `reserved_bytes` of shared memory for each CTA, only so that fewer CTAs run at once.
    """

    rows: int
    lanes: int
    vec: int
    steps: int
    pieces: int = 1
    reserved_bytes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tile: number of rows, and number of elements of each row with padding."""
        return self.rows, self.lanes * self.vec * self.steps

    @property
    def step_columns(self) -> int:
        """Number of elements of a step, of one piece."""
        return self.lanes // self.pieces * self.vec

    @property
    def piece_columns(self) -> int:
        """Number of elements of a piece."""
        return self.step_columns * self.steps

    def first_column(self, lane):
        """Returns the column of the first element of a lane; `lane` is an unsigned number of inline code."""
        if self.pieces == 1:
            return lane * self.vec
        piece_lanes = self.lanes // self.pieces  # a power of two
        piece = lane >> piece_lanes.bit_length() - 1
        return piece * self.piece_columns + (lane & piece_lanes - 1) * self.vec


# Rows up to this many bytes lie over the lanes of one warp, longer rows over all threads. The float32 softmax of
# (50000, 256), 1 KB a row, reaches 95% of a copy's bandwidth in warps. The softmax of (16000, 1024), 4 KB a row,
# reaches 97% over all threads (benchmarks/results/launch).
WARP_ROW_BYTES = 2_048
THREAD_ELEMENTS = 8  # the fewest elements that a thread holds, so that enough loads are in flight


def short_row_tile(vocab: int, itemsize: int) -> Tile:
    """Returns the tile for rows of `vocab` elements of `itemsize` bytes: over as many lanes as there are vectors."""
    vec = math.gcd(vocab, ACCESS_BYTES // itemsize)
    # In a warp: the fewest lanes that have at most one vector each; 32 if a row has more vectors.
    lanes = WARPGROUP if vocab * itemsize > WARP_ROW_BYTES else power_of_two(min(vocab // vec, LANES), 2)
    return row_tile(vocab, vec, lanes)


def row_tile(vocab: int, vec: int, lanes: int) -> Tile:
    """Returns the tile for rows of `vocab` elements over `lanes` lanes."""
    steps = -(-vocab // (vec * lanes))
    rows_of_thread = max(1, THREAD_ELEMENTS // (vec * steps))
    return Tile(rows_of_thread * (WARPGROUP // lanes), lanes, vec, steps)


def power_of_two(least: int, start: int) -> int:
    """Returns the first of start, 2 start, 4 start, ... that is at least `least`."""
    while start < least:
        start *= 2
    return start


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a CTA walks over `length` elements in shared memory: block by block, `step_blocks` blocks a step.

    A block is a vector of `vec` elements for each of the 128 threads. The elements after the last full step make one
    more, shorter step. Its last block may hold fewer elements. With step_blocks = 2:

        elements   0                                                       length
                   | block | block | block | block | block | block | bl...    |
                   |    step 0     |    step 1     |    step 2     | step 3   |
                           ^ thread t holds elements t * vec to (t + 1) * vec of each block
    """

    length: int
    vec: int
    step_blocks: int

    @property
    def block_size(self) -> int:
        """Number of elements of a block."""
        return WARPGROUP * self.vec

    @property
    def step_size(self) -> int:
        """Number of elements of a full step."""
        return self.block_size * self.step_blocks

    @property
    def full_steps(self) -> int:
        """Number of full steps."""
        return self.length // self.step_size

    @property
    def rest(self) -> int:
        """Number of elements after the last full step."""
        return self.length % self.step_size

    @property
    def steps(self) -> int:
        """Number of steps, including the step of the rest."""
        return self.full_steps + (self.rest > 0)

    @property
    def padded_length(self) -> int:
        """Number of elements in shared memory, with the last block padded to its full size."""
        return -(-self.length // self.block_size) * self.block_size


@dataclasses.dataclass(frozen=True)
class Cut:
    """A row of `vocab` elements, cut into `count` parts, one for each CTA. Their lengths are multiples of `unit`.

    The lengths differ by at most one unit, and the longer parts come last. With vocab = 11, unit = 1, count = 4:

        elements   |0 1|2 3 4|5 6 7|8 9 10|
        part         0    1     2     3
    """

    vocab: int
    unit: int
    count: int

    @property
    def shortest(self) -> int:
        """Number of elements of the first, shortest part."""
        return self.vocab // (self.unit * self.count) * self.unit

    @property
    def longest(self) -> int:
        """Number of elements of the last, longest part."""
        return -(-self.vocab // (self.unit * self.count)) * self.unit

    def start(self, part):
        """Returns the first element of the part with this number; for number `count`, the row's end."""
        units, left = divmod(self.vocab // self.unit, self.count)
        # The number of parts before this one that are a unit longer.
        longer_before = jnp.maximum(part - (self.count - left), 0)
        return (part * units + longer_before) * self.unit


def aligned_view(rows: int, vocab: int, vec: int) -> tuple[int, ...]:
    """Returns the shape of a view of an array (rows, vocab) that lets bulk copies start at any 16-byte boundary.

    A bulk copy starts at a multiple of `vec` elements, 16 bytes, from the start of a row of its source array. If some
    rows of the array do not start at a 16-byte boundary, a row of the view joins several of them: the fewest that have
    a multiple of `vec` elements in all. If the rows do not divide into such groups, the view has one dimension.
    """
    joined = vec // math.gcd(vocab, vec)
    return (rows // joined, joined * vocab) if rows % joined == 0 else (rows * vocab,)
