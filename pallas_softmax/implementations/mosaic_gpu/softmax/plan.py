"""How the rows of a softmax lie over the GPU. Pure functions."""

import dataclasses

import jax.numpy as jnp

from pallas_softmax import operations
from pallas_softmax.implementations.mosaic_gpu.device.hardware import (
    ACCESS_BYTES,
    MAX_CLUSTER,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Cut, Tile, Walk, short_row_tile

EDGE = 128  # elements, one a thread, at each end of a part that starts anywhere
EDGE_WALK = Walk(EDGE, 1, 1)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Rows in shared memory: each over `count` CTAs, a cluster of them or, in two launches, independent ones.

    A part is `length` elements, of which it owns those that the next part does not hold, too. `body` of them
    lie in shared memory, at a multiple of 16 bytes of device memory as of shared memory. Where that leaves
    some out, the first and the last `EDGE` elements are held in registers besides (`edges`).
    """

    vocab: int
    vec: int
    group: int
    count: int
    cluster: bool

    @property
    def edges(self) -> bool:
        """Whether a part may start off a multiple of 16 bytes, or overlap the next one."""
        return bool(self.vocab % (self.count * self.vec))

    @property
    def cut(self) -> Cut:
        """How the row is cut: at multiples of 16 bytes, if rows start there."""
        return Cut(self.vocab, 1 if self.vocab % self.vec else self.vec, self.count)

    @property
    def unit(self) -> int:
        """Parts start at multiples of it."""
        return self.cut.unit

    @property
    def length(self) -> int:
        """Elements of a part."""
        return self.cut.longest

    @property
    def body(self) -> int:
        """Elements of a part that are copied in bulk."""
        return (self.length - EDGE - self.vec) // self.vec * self.vec if self.edges else self.length

    @property
    def walk(self) -> Walk:
        """Over the body."""
        return Walk(self.body, self.vec, self.group)

    def start(self, part):
        """First element of a part; it owns those up to the start of the next."""
        return self.cut.start(part)


def plan_softmax(op: str, rows: int, vocab: int, dtype, capability: tuple[int, int]) -> Tile | Parts:
    """How the rows of a softmax operation lie over the GPU. Rests on benchmarks/results/launch."""
    itemsize, arrays = jnp.dtype(dtype).itemsize, operations.TABLE[op].row_arrays
    few = rows <= 16
    vec = ACCESS_BYTES // itemsize
    if vocab * arrays <= (5_120 if vocab % vec else 10_240 if few else _TILE_ELEMENTS):
        return short_row_tile(vocab, itemsize)
    most = 6_400 if few else 19_000 if itemsize == 2 else 13_000 if rows < 2_000 else 26_000
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES

    def parts(count, cluster=True):
        return Parts(vocab, vec, 4, count, cluster)

    def fits(choice):
        return choice.walk.padded * itemsize * arrays <= smem

    count = 1
    while count < MAX_CLUSTER[capability[0]] and (vocab > count * most or not fits(parts(count))):
        count *= 2
    if fits(parts(count)) and not (few and parts(count).length > 26_000):
        return parts(count)
    count = _SPLIT
    while not fits(parts(count, cluster=False)):
        count += _SPLIT
    return parts(count, cluster=False)


_TILE_ELEMENTS = 12_288  # of a row's arrays: what the registers of a CTA hold in float32
_SPLIT = 256  # parts of a row beyond any cluster, or a multiple of it


def approximate(dtype) -> bool:
    """Whether exp is ex2.approx(x log2(e)), off by |x| eps, and not the one exact to an ulp or two.

    The exact one is hidden behind the memory for float32 softmax, and lost in the rounding of 16-bit results.
    top-k has no time for it (8% at 4000 x 25000 float32); its winners have small |x - m|.
    """
    return jnp.dtype(dtype).itemsize == 2
