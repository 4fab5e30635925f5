"""How the rows of top-k lie over the GPU. Pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax.implementations.mosaic_gpu.device.hardware import (
    ACCESS_BYTES,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
    WARPGROUP,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile, part_start, short_row_tile

MAX_K = 2048


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows of top-k in shared memory: each in `count` parts, a CTA each.

    A part lies in `blocks` blocks, taken in steps of `group`. What can be copied in bulk, `body` elements,
    lies after the first `head` positions, at a multiple of 16 bytes of device memory as of shared memory;
    the few elements before it end at the body, those after it follow it. A thread's elements of `pool`
    blocks are a group, whose largest is found while the row arrives.
    """

    vocab: int
    vec: int
    group: int
    pool: int
    count: int = 1

    @property
    def block(self) -> int:
        """Elements of a block, a vector a thread."""
        return WARPGROUP * self.vec

    @property
    def unit(self) -> int:
        """Parts start at multiples of it."""
        return 1 if self.vocab % self.vec else self.vec

    @property
    def longest(self) -> int:
        """Elements of a part at most."""
        return -(-self.vocab // (self.unit * self.count)) * self.unit

    @property
    def head(self) -> int:
        """Positions before the body."""
        return self.vec if self.unit == 1 else 0

    @property
    def body(self) -> int:
        """Elements that every part can copy in bulk."""
        shortest = self.vocab // (self.unit * self.count) * self.unit
        return max(0, shortest - (self.vec - 1)) // self.vec * self.vec if self.head else shortest

    @property
    def blocks(self) -> int:
        """That hold the head and the longest part."""
        return -(-(self.head + self.longest) // self.block)

    @property
    def full(self) -> int:
        """Steps of `group` blocks that bulk copies fill."""
        return (self.head + self.body) // (self.block * self.group)

    @property
    def rest(self) -> int:
        """Blocks after the full steps: one more step, of up to group + 1."""
        return self.blocks - self.full * self.group

    @property
    def pools(self) -> int:
        """Groups of a thread."""
        return -(-self.blocks // self.pool)

    @property
    def size(self) -> int:
        """Positions."""
        return self.blocks * self.block

    def start(self, part):
        """First element of a part, which ends where the next one starts."""
        return part_start(part, self.vocab, self.unit, self.count)

    def copies(self):
        """The bulk copies: position and size of each."""
        step, end = self.block * self.group, self.head + self.body if self.body else 0
        return [(max(at, self.head), min(at + step, end) - max(at, self.head)) for at in range(0, end, step)]


def plan_topk(rows: int, vocab: int, k: int, dtype, capability: tuple[int, int]) -> Tile | Window:
    """How the rows of top-k lie over the GPU. Rests on measurements of an H100."""
    itemsize = jnp.dtype(dtype).itemsize
    vec = ACCESS_BYTES // itemsize
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    tile, row = short_row_tile(vocab, itemsize, warp=math.inf), vocab * itemsize
    most = 1_024 // itemsize if row <= 2_048 else 160 if row <= 4_096 else 64
    if k * tile.steps * tile.vec <= most:  # its time is that product
        return tile

    def window(count):
        """With at least twice as many groups as winners, if there are so many elements."""
        pool = group = 32 // vec
        plan = Window(vocab, vec, group, pool, count)
        while pool > 1 and plan.pools * WARPGROUP < 2 * k:
            pool //= 2
            plan = Window(vocab, vec, group, pool, count)
        return plan

    def fits(plan, ctas):
        """As many CTAs in a multiprocessor."""
        return plan.size * itemsize + selection_bytes(plan, k) <= smem // ctas

    whole, part = (66_000, 66_000) if itemsize == 2 else (108_000, 88_000)  # bytes
    count = 1
    if rows <= 128 and vocab > 24_000 and k <= 256:  # merging takes longer, the more winners there are
        count = min(-(-vocab // 8_192), max(8, 512 // k), 16)
    elif k <= 256 and vocab * itemsize > whole:
        count = -(-vocab * itemsize // part)
    while not fits(window(count), 1 if k > 256 else 2):
        count += 1
    return window(count)


def winners_tile(tile: Tile, k: int) -> Tile:
    """The tile of the k best of each row of a tile, over the same lanes."""
    return Tile(tile.rows, tile.lanes, 1, -(-k // tile.lanes))


def power_of_two(least: int, start: int) -> int:
    """The first of start, 2 start, 4 start, ... that is not below `least`."""
    while start < least:
        start *= 2
    return start


def candidate_slots(k: int) -> int:
    """Candidates that a list has room for: a power of two."""
    return power_of_two(2 * k, 256)


def lists_per_merge(k: int) -> int:
    """Lists of k winners that a CTA merges into one."""
    return max(2, min(WARPGROUP, 4096 // k))


def padded_winners(k: int) -> int:
    """Winners, in whole blocks of a vector of one element."""
    return -(-k // WARPGROUP) * WARPGROUP


def group_words(plan: Window, k: int) -> int:
    """Of shared memory for the groups' maxima, and later for the winners."""
    return max(plan.pools * WARPGROUP, 2 * padded_winners(k))


def selection_bytes(plan: Window, k: int) -> int:
    """Of shared memory that top-k takes beside the row."""
    return 4 * group_words(plan, k) + 12 * candidate_slots(k)
