"""How rows lie over the threads of a CTA, in shared memory and in device memory: frozen data, pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP


@dataclasses.dataclass(frozen=True)
class Tile:
    """Short rows in the registers of a CTA: `rows` of them, each over `lanes` threads.

    `lanes` is a power of two up to 32, so that each warp has 32 / lanes rows side by side, or 128: one row over
    all threads. A thread holds `steps` vectors of `vec` neighbouring elements of each of its rows, of which it
    has rows / (128 / lanes). With lanes = 16, vec = 4, steps = 2 and rows = 16:

                   elements 0-3   4-7     ...  60-63     64-67   ...  124-127
        row 0      thread 0       thread 1     thread 15 thread 0     thread 15      (warp 0, lanes 0-15)
        row 1      thread 16      thread 17    thread 31 thread 16    thread 31      (warp 0, lanes 16-31)
        ...
        row 7      thread 112     ...                                 thread 127     (warp 3, lanes 16-31)
        row 8      thread 0       ...                                 thread 15      (warp 0 again)

    Elements beyond the row's end, and rows beyond the array's, hold a fill value.
    """

    rows: int
    lanes: int
    vec: int
    steps: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tile: its rows, and the elements that it has for each, padding included."""
        return self.rows, self.lanes * self.vec * self.steps


# Bytes of a row up to which the lanes of one warp hold it. The float32 softmax of (50000, 256), 1 KB a row, reaches
# 95% of a copy's bandwidth in warps, that of (16000, 1024), 4 KB, 97% over all threads (benchmarks/results/launch).
WARP_ROW_BYTES = 2_048
THREAD_ELEMENTS = 8  # elements that a thread holds at least, so that enough loads are on their way


def short_row_tile(vocab: int, itemsize: int) -> Tile:
    """Returns the tile for rows of `vocab` elements of `itemsize` bytes: over as many lanes as have one to load."""
    vec = math.gcd(vocab, ACCESS_BYTES // itemsize)
    vectors = vocab // vec
    if vocab * itemsize > WARP_ROW_BYTES:
        lanes = WARPGROUP
    else:  # the power of two, from 2 to 32, with which a lane has one vector, or more where 32 are too few
        lanes = 2
        while lanes < min(vectors, LANES):
            lanes *= 2
    return row_tile(vocab, vec, lanes)


def row_tile(vocab: int, vec: int, lanes: int) -> Tile:
    """Returns the tile whose rows, of `vocab` elements, lie over so many lanes."""
    steps = -(-vocab // (vec * lanes))
    rows_of_thread = max(1, THREAD_ELEMENTS // (vec * steps))
    return Tile(rows_of_thread * (WARPGROUP // lanes), lanes, vec, steps)


def power_of_two(least: int, start: int) -> int:
    """Returns the first of start, 2 start, 4 start, ... that is not below `least`."""
    while start < least:
        start *= 2
    return start


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a CTA goes over `length` elements in shared memory: block by block, `step_blocks` blocks a step.

    A block is a vector of `vec` elements for each of the 128 threads. The elements after the last full step
    make one more, shorter step, whose last block may hold fewer elements. With step_blocks = 2:

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
        """Number of steps, that of the rest included."""
        return self.full_steps + (self.rest > 0)

    @property
    def padded_length(self) -> int:
        """Number of elements of shared memory, in which the last block is whole."""
        return -(-self.length // self.block_size) * self.block_size


@dataclasses.dataclass(frozen=True)
class Cut:
    """A row of `vocab` elements, cut into `count` parts, a CTA each, whose lengths are multiples of `unit`.

    The lengths differ by one unit at most, and the longer parts come last. With vocab = 11, unit = 1, count = 4:

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
        """Returns the first element of the part with this number; that of number `count` is the row's end."""
        units, left = divmod(self.vocab // self.unit, self.count)
        # Parts before this one that have a unit more.
        longer_before = jnp.maximum(part - (self.count - left), 0)
        return (part * units + longer_before) * self.unit


def aligned_view(rows: int, vocab: int, vec: int) -> tuple[int, ...]:
    """Returns a shape in which to see an array (rows, vocab) so that bulk copies may start anywhere on 16 bytes.

    Bulk copies start at multiples of `vec` elements, 16 bytes, of a row of the array that they copy from. Where
    not every row starts on 16 bytes, as many rows as make a multiple of `vec` elements are taken for one row of
    the view; and where the number of rows is not a multiple of that, all rows for a view of one dimension.
    """
    together = vec // math.gcd(vocab, vec)
    return (rows // together, together * vocab) if rows % together == 0 else (rows * vocab,)
