"""Layouts of rows over the threads of a CTA, in shared memory and in device memory: frozen data, pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP


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

    Elements beyond a row's end hold a fill value. Rows beyond the array's end hold it too, or repeat the last row.

    With `pieces`, a power of two up to `lanes`, a row is cut into that many pieces. Each piece lies in the same way
    over lanes / pieces neighbouring lanes, and fills them. The columns of such a tile are not in order.

    A kernel may reserve `reserved_bytes` of shared memory, only so that fewer CTAs run at once.
    """

    rows: int
    lanes: int
    vec: int
    steps: int
    pieces: int = 1
    reserved_bytes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of elements of each row with padding."""
        return self.rows, self.lanes * self.vec * self.steps

    @property
    def step_columns(self) -> int:
        """Number of elements of a step, of one piece."""
        return self.lanes // self.pieces * self.vec

    @property
    def piece_columns(self) -> int:
        return self.step_columns * self.steps

    def first_column(self, lane):
        """Returns the column of the first element of a lane; `lane` is an unsigned number of inline code."""
        if self.pieces == 1:
            return lane * self.vec
        piece_lanes = self.lanes // self.pieces  # a power of two
        piece = lane >> log2(piece_lanes)
        return piece * self.piece_columns + (lane & piece_lanes - 1) * self.vec


# Rows up to this many bytes lie over the lanes of one warp, longer rows over all threads. The float32 softmax of
# (50000, 256), 1 KB a row, reaches 95% of a copy's bandwidth in warps. The softmax of (16000, 1024), 4 KB a row,
# reaches 97% over all threads (benchmarks/results/launch).
WARP_ROW_BYTES = 2_048
THREAD_ELEMENTS = 8  # the fewest elements that a thread holds, so that enough loads are in flight


def short_row_tile(vocab: int, itemsize: int) -> Tile:
    vec = math.gcd(vocab, ACCESS_BYTES // itemsize)
    # In a warp: the fewest lanes that have at most one vector each; 32 if a row has more vectors.
    lanes = WARPGROUP if vocab * itemsize > WARP_ROW_BYTES else power_of_two(min(vocab // vec, LANES), 2)
    return row_tile(vocab, vec, lanes)


def row_tile(vocab: int, vec: int, lanes: int) -> Tile:
    steps = -(-vocab // (vec * lanes))
    rows_of_thread = max(1, THREAD_ELEMENTS // (vec * steps))
    return Tile(rows_of_thread * (WARPGROUP // lanes), lanes, vec, steps)


def log2(n: int) -> int:
    """Returns the logarithm of a power of two."""
    return n.bit_length() - 1


def powers_below(n: int) -> list[int]:
    """Returns 1, 2, 4, ... below n, a power of two."""
    return [1 << i for i in range(log2(n))]


def power_of_two(least: float, start: int) -> int:
    """Returns the first of start, 2 start, 4 start, ... that is at least `least`."""
    while start < least:
        start *= 2
    return start


# A longer list takes more comparisons. If a list is too short, its warp searches again, and the other warps of the CTA
# wait. With 16-bit elements the warp lists the next elements. With float32 it merges whole lists, which takes three
# times as long.
TOO_SHORT = {4: 0.002, 2: 0.0065}  # highest share of warps with too short a list, in random order, by bytes


def list_length(tile: Tile, k: int, itemsize: int, lanes: float | None = None) -> int:
    """Returns the length of a lane's list: the shortest that TOO_SHORT allows, at most k + 1 or all elements.

    `lanes` is the number of a row's lanes that may have winners; by default, all.
    """
    most, share = min(k + 1, tile.steps * tile.vec), 1 / (lanes or tile.lanes)

    def too_short(length: int) -> float:
        """Returns an upper bound of the share of warps with a lane that has at least `length` of the k best."""
        fewer = sum(math.comb(k, n) * share**n * (1 - share) ** (k - n) for n in range(length))
        return LANES * (1 - fewer)

    return next((n for n in range(1, most) if too_short(n) < TOO_SHORT[itemsize]), most)


def merged_tile(tile: Tile, k: int) -> Tile:
    """Returns the tile that holds the merged winners of each row of a tile. Neighbours share a lane."""
    return Tile(tile.rows, tile.lanes, max(1, power_of_two(k, 1) // tile.lanes), 1)


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a CTA walks over `length` elements in shared memory: block by block, `step_blocks` blocks a step.

    A block is a vector of `vec` elements for each of the 128 threads. The elements after the last full step, `rest`,
    make one more, shorter step. Its last block may hold fewer elements. With step_blocks = 2:

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
        return WARPGROUP * self.vec

    @property
    def step_size(self) -> int:
        return self.block_size * self.step_blocks

    @property
    def full_steps(self) -> int:
        return self.length // self.step_size

    @property
    def rest(self) -> int:
        return self.length % self.step_size

    @property
    def steps(self) -> int:
        return self.full_steps + (self.rest > 0)

    @property
    def padded_length(self) -> int:
        """Number of elements in shared memory, with the last block padded to its full size."""
        return -(-self.length // self.block_size) * self.block_size


@dataclasses.dataclass(frozen=True)
class Cut:
    """A row of `vocab` elements, cut into `count` parts. Each length is a multiple of `unit`.

    A CTA has one or several parts. The lengths differ by at most one unit, and the longer parts come last. With
    vocab = 11, unit = 1, count = 4:

        elements   |0 1|2 3 4|5 6 7|8 9 10|
        part         0    1     2     3
    """

    vocab: int
    unit: int
    count: int

    @property
    def shortest(self) -> int:
        return self.vocab // (self.unit * self.count) * self.unit

    @property
    def longest(self) -> int:
        return -(-self.vocab // (self.unit * self.count)) * self.unit

    def start(self, part):
        """Returns the first element of the part with this number; for number `count`, the row's end."""
        units, left = divmod(self.vocab // self.unit, self.count)
        # The number of parts before this one that are a unit longer.
        longer_before = jnp.maximum(part - (self.count - left), 0)
        return (part * units + longer_before) * self.unit


@dataclasses.dataclass(frozen=True)
class Window:
    """A row, or a part of a row, in the shared memory of a CTA: `count` parts of a row, each in a CTA of its own.

        elements     x x x x x x x x x x x x x x ... x x x x x x x x x x | x x x x x  | -inf .. -inf
                     '-------------------- body --------------------------'----------- tail ----------'
                     copied in bulk                                        written one element at a time

        blocks    |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |   8   |   vec elements a thread
        steps     |            step 0             |            step 1             | last  |   step_blocks = 4 blocks
        groups    |    group 0    |    group 1    |    group 2    |    group 3    | last  |   group_blocks = 2 blocks

    A position counts from the start of the part. Positions after the part hold -inf.

    Unless the window is shifted, thread t holds positions t * vec to (t + 1) * vec - 1 of each block. One bulk copy
    brings one step. A group is the elements of one thread in `group_blocks` blocks. Once a step has arrived, top-k
    keeps the largest key of each group. Group number g * 128 + t belongs to thread t and to `group_blocks` blocks from
    g * group_blocks on.

    A bulk copy starts at a multiple of 16 bytes. If some part does not, the window is `shifted`: up to vec - 1 elements
    before the part arrive too. Position p is then element p + shift in shared memory, so that a thread has the same
    positions at any address. A thread holds single words of a block, `run` elements each, 128 words apart:

        word of the block   | 0 | 1 | .. |127|128| .. |255|256| .. |383|384| .. |511|
        thread              | 0 | 1 | .. |127| 0 | .. |127| 0 | .. |127| 0 | .. |127|

    In a compact window, candidates are listed by 16-bit positions until the row is no longer needed. Then their list
    takes the place of the row. Only whole float32 rows have compact windows.
    """

    vocab: int  # number of elements of a row
    vec: int  # number of elements that a thread loads at once, 16 bytes
    step_blocks: int  # number of blocks of a step
    group_blocks: int  # number of blocks of a group; it divides step_blocks
    count: int = 1  # number of parts of a row, each in a CTA of its own
    compact: bool = False

    @property
    def block_size(self) -> int:
        return WARPGROUP * self.vec

    @property
    def cut(self) -> Cut:
        """How the row is cut into parts: at multiples of 16 bytes, if rows start there."""
        return Cut(self.vocab, 1 if self.vocab % self.vec else self.vec, self.count)

    @property
    def shifted(self) -> bool:
        return self.cut.unit == 1

    @property
    def run(self) -> int:
        """Number of neighbours that a thread holds: a vector, or if shifted a word."""
        return self.vec // 4 if self.shifted else self.vec

    @property
    def body(self) -> int:
        """Number of elements that are copied in bulk, the same in every part."""
        return self.cut.shortest // self.vec * self.vec

    @property
    def blocks(self) -> int:
        """Number of blocks that hold the longest part."""
        return -(-self.cut.longest // self.block_size)

    @property
    def full(self) -> int:
        """Number of full steps of the body, without the shift."""
        return self.body // (self.block_size * self.step_blocks)

    @property
    def rest(self) -> int:
        """Number of blocks after the full steps, from 0 to step_blocks; they make one last step."""
        return self.blocks - self.full * self.step_blocks

    @property
    def group_size(self) -> int:
        return self.group_blocks * self.vec

    @property
    def groups_per_thread(self) -> int:
        return -(-self.blocks // self.group_blocks)

    @property
    def groups(self) -> int:
        return self.groups_per_thread * WARPGROUP

    @property
    def size(self) -> int:
        return self.blocks * self.block_size

    @property
    def smem_size(self) -> int:
        """Number of elements in shared memory."""
        return self.size + self.vec * self.shifted

    def copies(self) -> list[tuple[int, int]]:
        """Returns the first element and the number of elements of each bulk copy: one per step of the body."""
        step = self.block_size * self.step_blocks
        return [(at, min(step, self.body - at)) for at in range(0, self.body, step)]


def aligned_view(rows: int, vocab: int, vec: int) -> tuple[int, ...]:
    """Returns the shape of a view of an array (rows, vocab) that lets bulk copies start at any 16-byte boundary.

    A bulk copy starts at a multiple of `vec` elements, 16 bytes, from the start of a row of its source. If some rows of
    the array do not start at a 16-byte boundary, a row of the view joins the fewest of them that have a multiple of
    `vec` elements in all. If the rows do not divide into such groups, the view has one dimension.
    """
    joined = vec // math.gcd(vocab, vec)
    return (rows // joined, joined * vocab) if rows % joined == 0 else (rows * vocab,)
