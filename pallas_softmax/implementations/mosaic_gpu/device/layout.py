"""How rows lie over the threads of a CTA and in shared memory: frozen data and pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax.implementations.mosaic_gpu.device.hardware import ACCESS_BYTES, WARPGROUP


@dataclasses.dataclass(frozen=True)
class Walk:
    """A row in shared memory, taken in steps of `group` blocks of `block` elements.

    Thread t holds elements t * vec to (t + 1) * vec of a block.
    """

    vocab: int
    vec: int
    group: int

    @property
    def block(self) -> int:
        """Elements of a block."""
        return WARPGROUP * self.vec

    @property
    def step(self) -> int:
        """Elements of a full step."""
        return self.block * self.group

    @property
    def full(self) -> int:
        """Number of full steps."""
        return self.vocab // self.step

    @property
    def left(self) -> int:
        """Elements after the last full step; they make one more, shorter step."""
        return self.vocab % self.step

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.full + (self.left > 0)

    @property
    def padded(self) -> int:
        """Elements of shared memory: the last block is whole."""
        return -(-self.vocab // self.block) * self.block


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows in registers: `rows` of them in a CTA, each over `lanes` threads (a power of two up to 32, or 128).

    A thread holds `steps` vectors of `vec` elements of a row, and rows / (128 / lanes) rows.
    """

    rows: int
    lanes: int
    vec: int
    steps: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and elements of a row, with those that stand for nothing."""
        return self.rows, self.lanes * self.vec * self.steps


@dataclasses.dataclass(frozen=True)
class Cut:
    """A row of `vocab` elements, cut into `count` parts, a CTA each, whose lengths are multiples of `unit`.

    The lengths differ by one unit at most, and the longer parts come last:

        vocab = 11, unit = 1, count = 4:    |0 1|2 3 4|5 6 7|8 9 10|
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
        """First element of the part with this number, 0 to `count`: the end of one is the start of the next."""
        return part_start(part, self.vocab, self.unit, self.count)


def part_start(part, vocab: int, unit: int, count: int):
    """`Cut(vocab, unit, count).start(part)`."""
    units, left = divmod(vocab // unit, count)
    later = part - (count - left)  # the number of longer parts before this one, if positive
    return (part * units + jnp.maximum(later, 0)) * unit


def aligned_view(rows: int, vocab: int, vec: int) -> tuple[int, ...]:
    """A shape of the rows' array in which bulk copies may start at a row's aligned element.

    Rows that do not all start at 16 bytes are taken `vec` together, or all, in one dimension.
    """
    together = vec // math.gcd(vocab, vec)
    return (rows // together, together * vocab) if rows % together == 0 else (rows * vocab,)


def short_row_tile(vocab: int, itemsize: int, warp: float = 2_048) -> Tile:
    """Short rows: a thread has at least 8 elements, of several rows where they are very short.

    Rows of up to `warp` bytes have a warp each, or a part of one; longer ones the CTA.
    """
    vec = math.gcd(vocab, ACCESS_BYTES // itemsize)
    vectors = -(-vocab // vec)
    lanes = 2
    while lanes < min(vectors, 32):
        lanes *= 2
    if vocab * itemsize > warp:
        lanes = WARPGROUP
    steps = -(-vectors // lanes)
    return Tile(max(1, 8 // (vec * steps)) * (WARPGROUP // lanes), lanes, vec, steps)
