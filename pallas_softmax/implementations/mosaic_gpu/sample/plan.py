"""How the rows of `sample` lie over the GPU: `plan_sample`, a pure function of shape, dtype and device.

A row lies in the shared memory of one CTA, or in parts in that of the CTAs of a cluster, as the `Window` drawn in
`topk/plan.py`. Beside its part a CTA has words for the search, the `Scratch`.
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
GROUP_ELEMENTS = 16  # elements of a thread whose kept mass is one number; two of them are in the histogram

BUCKETS = 1024  # buckets of the histogram of distances: 64 for each power of two, from 2^-9 to 2^7
KEY_BUCKETS = 256  # buckets of a round over the keys, two for each thread

# What follows rests on device times of one H100 80GB HBM3 (2026-11-22, jax 0.11.2), in us: without a filter, with
# top_k = 50, and with top_p = 0.9, of normal logits. All parts of a row wait for each other several times, so the
# fewer they are the better.

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
    """Which words of 32 bits, of a CTA's shared memory beside the row, hold what:

        word 0      mail         72         1096      1352     2888    ...
        |           |            |          |         |        |
        | mail, scans of sums    | histogram | columns | rounds | best | masses | sums | list |

        mail        what the warps of the cluster tell each other; and numbers of the CTA's own warps
        histogram   numbers of elements by their distance from the maximum, BUCKETS
        columns     sums of these numbers, and of their masses, over the buckets of each thread
        rounds      two sets of numbers and masses by key, of which rounds use one after the other
        best        the largest element of each thread in each group
        masses      the mass of each thread in each group, at last of what is kept
        sums        the kept mass of each group
        list        the elements near the threshold, a byte for each, a column for each thread

    Attributes:
      window: how the part lies in shared memory.
    """

    window: Window

    # Mail: four words, one for each warp, for each number that is told.
    max_mail = 0  # the largest element
    zone_mail = (4, 16)  # three numbers each: in a search by number, and in one by mass
    kept_mail = 28  # the kept mass, a word of the CTA
    total_mail = 32  # the mass
    chosen = 36  # of a round, the bucket that holds the threshold, in the eight words of `buckets_ptx`
    scans = 44  # 24 words, for one sum over threads after another
    beside_scan = zone_ends = scans + 8  # four of them, which a sum of 32 bits leaves free
    second_scan = scans + 12  # eight of them, where a sum of 64 bits has taken the first eight

    histogram = 72
    columns = (histogram + BUCKETS, histogram + BUCKETS + WARPGROUP)  # of numbers, and of masses
    rounds = histogram + BUCKETS + 2 * WARPGROUP
    round_words = (
        3 * KEY_BUCKETS
    )  # words of one of the two sets: a number, and a mass of two words, for each bucket
    best = rounds + 2 * round_words

    @property
    def groups(self) -> int:
        """Number of groups that a thread has."""
        return -(-self.window.blocks // (GROUP_ELEMENTS // self.window.vec))

    @property
    def masses(self) -> int:
        """The first word of the masses."""
        return self.best + self.groups * WARPGROUP

    @property
    def sums(self) -> int:
        """The first word of the kept masses of groups."""
        return self.masses + self.groups * WARPGROUP

    @property
    def listed(self) -> int:
        """The first word of the list, at a multiple of 16 bytes."""
        return self.sums + -(-self.groups // 4) * 4

    @property
    def list_rows(self) -> int:
        """Number of elements for which a thread's list has room: three for each group, and one whole group."""
        return 3 * self.groups + GROUP_ELEMENTS

    @property
    def words(self) -> int:
        """Number of all words."""
        return self.listed + self.list_rows * WARPGROUP // 4


def window_of(vocab: int, itemsize: int, count: int) -> Window:
    """Returns the window of a row in `count` parts."""
    vec = ACCESS_BYTES // itemsize
    blocks = STEP_ELEMENTS // vec
    return Window(vocab, vec, blocks, blocks, count)


def plan_sample(rows: int, vocab: int, dtype, capability: tuple[int, int]) -> Window | None:
    """Returns how the rows of `sample` lie over a GPU of this compute capability; None if no cluster holds a row."""
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
