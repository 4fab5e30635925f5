"""How the rows of `sample` lie over the GPU: `plan_sample`, a pure function of shape, dtype and device.

A row lies in the shared memory of one CTA, or of the CTAs of a cluster, as the `Window` of top-k has it.
"""

import dataclasses

import jax.numpy as jnp

from pallas_softmax.implementations.mosaic_gpu.device.hardware import (
    ACCESS_BYTES,
    MAX_CLUSTER,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
    WARPGROUP,
)
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window

STEP_ELEMENTS = 32  # elements of a thread that arrive together
GROUP_ELEMENTS = 16  # elements of a thread whose kept mass is one number; of them two are in the histogram

BUCKETS = 1024  # of the histogram of distances: 64 for each power of two, from 2^-9 to 2^7
KEY_BUCKETS = 256  # of a round over the keys, two for each thread

# The times are those of one H100 80GB HBM3 (2026-11-22, jax 0.11.2), device us without a filter, with top_k = 50 and
# with top_p = 0.9 of normal logits. Few parts are better, since all parts of a row wait for each other several times.

# Two CTAs share a multiprocessor, so that one works while the part of the other arrives: (1024, 151936) bfloat16 takes
# 160, 409 and 838 in 5 parts, of which two fit, and 227, 666 and 1396 in 4.
HALF_SMEM_BYTES = 112 * 1024  # of a CTA's shared memory, where a multiprocessor has 228 KB
# Of few rows the parts are shorter, so that more multiprocessors work on each: (1, 128256) float32 takes 5.3, 22.8 and
# 37.3 in 8 parts, 5.5, 28.0 and 32.6 in 16; (64, 128256) bfloat16 11.7, 30.9 and 61.9 in 6 parts, 13.3, 38.7 and 75.4
# in 4.
FEW_ROWS, FEW_ROWS_PART = 16, 16_384  # rows at most, elements of a part
SOME_ROWS, SOME_ROWS_PART = 128, 22_000

MAX_POSITIONS = 256 * WARPGROUP  # of a part: the elements of a thread are listed by numbers of 8 bits


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Where the words of 32 bits lie in a CTA's shared memory beside the row.

        mail        what the warps of the cluster tell each other; then numbers of the CTA's own warps
        histogram   counts of elements by their distance from the maximum
        columns     sums of the counts, and of the masses, of the buckets of each thread
        rounds      two sets of counts and masses by key, used by turns
        best        the largest element of each thread in each group
        masses      the mass of each thread in each group, at last of what is kept
        sums        the kept mass of each group
        listed      the elements near the threshold, by a byte each, a column for each thread

    Attributes:
      window: how the part lies in shared memory.
    """

    window: Window

    max_mail = 0
    zone_mail = (4, 16)  # of the search by count, and of that by mass
    kept_mail = 28
    total_mail = 32
    chosen = 36  # the bucket of a round that holds the threshold: its number, counts and masses
    scans = 44  # of 24 words, for one scan after another
    beside_scan = zone_ends = scans + 8  # four words that a scan of 32 bits, which takes four, leaves free
    second_scan = scans + 12
    histogram = 72
    columns = (histogram + BUCKETS, histogram + BUCKETS + WARPGROUP)  # of counts, and of masses
    rounds = histogram + BUCKETS + 2 * WARPGROUP
    round_words = 3 * KEY_BUCKETS
    best = rounds + 2 * round_words

    @property
    def groups(self) -> int:
        """Number of groups of blocks of a part."""
        return -(-self.window.blocks // (GROUP_ELEMENTS // self.window.vec))

    @property
    def masses(self) -> int:
        """Where the masses lie."""
        return self.best + self.groups * WARPGROUP

    @property
    def sums(self) -> int:
        """Where the kept masses of groups lie."""
        return self.masses + self.groups * WARPGROUP

    @property
    def listed(self) -> int:
        """Where the list lies."""
        return self.sums + -(-self.groups // 4) * 4

    @property
    def list_rows(self) -> int:
        """Number of elements that a thread has room for: two of each group, and a group."""
        return 3 * self.groups + GROUP_ELEMENTS

    @property
    def words(self) -> int:
        """Number of words."""
        return self.listed + self.list_rows * WARPGROUP // 4


def window_of(vocab: int, itemsize: int, count: int) -> Window:
    """The window of a row in `count` parts."""
    vec = ACCESS_BYTES // itemsize
    blocks = STEP_ELEMENTS // vec
    return Window(vocab, vec, blocks, blocks, count)


def plan_sample(rows: int, vocab: int, dtype, capability: tuple[int, int]) -> Window | None:
    """How the rows of `sample` lie over a GPU of this compute capability; None if no cluster holds a row."""
    itemsize = jnp.dtype(dtype).itemsize
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    most = MAX_CLUSTER[capability[0]]

    def fits(count, room):
        window = window_of(vocab, itemsize, count)
        return window.size <= MAX_POSITIONS and window.size * itemsize + 4 * Scratch(window).words <= room

    count = 1
    if rows <= FEW_ROWS:
        count = min(-(-vocab // FEW_ROWS_PART), most)
    elif rows <= SOME_ROWS:
        count = min(-(-vocab // SOME_ROWS_PART), most)
    while count < most and not fits(count, min(smem, HALF_SMEM_BYTES)):
        count += 1
    return window_of(vocab, itemsize, count) if fits(count, smem) else None
