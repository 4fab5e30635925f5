"""How the rows of `sample` lie over the GPU: `plan_sample`, a pure function of shape, dtype and device.

A row lies in the shared memory of one CTA, or in parts in that of the CTAs of a cluster, as the `Window` drawn in
`topk/plan.py`. A CTA has several warpgroups, each with a step of the window, and beside its part some words for the
search: the `Layout`.
"""

import dataclasses

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import (
    ACCESS_BYTES,
    LANES,
    MAX_CLUSTER,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    WARPGROUP,
    smem_of_each,
)
from pallas_softmax._src.topk.plan import Window

CHUNK_BYTES = LANES * ACCESS_BYTES  # what a warp loads at once
MAX_CTAS = 16  # of a cluster
MAX_WARPS = 16  # of a CTA
MAX_BLOCKS = LANES  # of a warpgroup: a lane knows the mass of one chunk of a warp
MAX_PART = 2**16  # elements of a CTA, so that sums of as many numbers of 16 bits have 32
MAX_V = MAX_CTAS * MAX_PART

BUCKETS = 2048  # of the histogram by distance
VALUE_BUCKETS = 4096  # of that of the values of bfloat16: for 31 powers of two with 128 values each, and 0
SECTIONS = 64  # of a histogram: their sums are what the CTAs exchange first, two for each lane
DIGIT = 128  # buckets of a round over the keys, four for each lane

# Normal logits, V = 151,936: 170, 270 and 580 keys in the zone of top_p = 0.5, 0.9, 0.99, and 1,056 for top_k = 1000.
ROW_KEYS = 2_500  # for which there is room in the lists of a row
CTA_KEYS = 768  # at least in that of a CTA, where all keys of a zone lie if the row is sorted

# One H100, jax 0.11.2, 2026-11-22, device us without a filter, with top_k = 50, with top_p = 0.9; c10w2: 10 CTAs of two
# warpgroups. 1024 x 151,936 float32: c10w2 213, 401, 619; c7w3 218, 402, 611; c8w3 219, 423, 631; c12w2 222, 466, 671;
# c16w1 215, 546, 699. bfloat16: c6w2 117, 250, 257; c4w3 122, 263, 274; c8w2 126, 287, 293; c8w1 131, 294, 299.
# 1 x 128,256 float32: c16w4 4.5, 10.0, 13.6; c8w4 4.9, 11.8, 14.8.
ELEMENTS_AT_ONCE = 16  # elements that a thread has in registers at once; others are not measured
# Of few rows the parts are shorter and the warpgroups more, so that more warps work on each.
FEW_ROWS, FEW_ROWS_PART_BYTES, FEW_ROWS_WARPGROUPS = 16, 32_768, 4
# Of many rows three CTAs share a multiprocessor, so that one works while the parts of others arrive: of 256 threads,
# whose 80 registers fit three times, and of a third of its shared memory.
RESIDENT, WARPGROUPS = 3, 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of `sample` in the shared memory of clusters of CTAs, and the words of 32 bits that a CTA has beside them.

    A part lies in a CTA as a `Window` has it. A warpgroup has a step, window.step_blocks neighbouring blocks (the last
    warpgroups fewer), and each of its four warps a quarter of those, its span of chunks of 512 bytes. A chunk has 16
    bytes for each lane. So CTAs, spans, chunks, lanes and a lane's elements follow each other as elements do in a row:

        block        |  0  |  1  |  2  |  3  |  4  |  5  |  6  |       of 2 KB, step_blocks = 4
        warpgroup    |           0           |        1        |
        warp         |  0  |  1  |  2  |  3  | 4  | 5 | 6 |  7 |       of 4 and of 3 chunks

    The words, by the number of the first:

        total        the largest element of the CTA, its mass relative to that, and a bound for a small top_k
        zone         sums over the CTA above the zone and in it, and the least and the greatest key in it
        kept, least  what the CTA keeps of the row, by a key, or by a least mass
        picked       what one warp has found for all
        listed       how many keys are in the list, or would be if there were room
        warps        eight numbers of each warp
        drawn        the mass of each warp, and of each chunk of one; before that, with `sections`, the sums of
                     `lists_ptx` over the buckets of a range
        sections     two sums over each section of the histogram
        counters     four numbers for each CTA
        gathered     eight numbers of each CTA, as all warps read them that one has got
        histogram    numbers of elements; later the lists of all CTAs, or two sets of sums of the rounds over keys
        keys         the list of keys in the zone

    Attributes:
      window: how the part lies in shared memory.
      warpgroups: number of them in a CTA.
      by_value: whether the histogram has a bucket for each value, and no list is needed.
    """

    window: Window
    warpgroups: int
    by_value: bool

    total, zone, kept, least, picked, listed, warps = 0, 4, 12, 14, 16, 20, 24
    warp_words = 8
    drawn = warps + MAX_WARPS * warp_words
    sections = drawn + 2 * LANES
    counters = sections + 2 * SECTIONS
    gathered = counters + 4 * MAX_CTAS
    gathered_words = 8
    histogram = gathered + gathered_words * MAX_CTAS

    @property
    def buckets(self) -> int:
        """Number of buckets of the histogram."""
        return VALUE_BUCKETS if self.by_value else BUCKETS

    @property
    def keys(self) -> int:
        """The first word of the list of keys."""
        return self.histogram + self.buckets

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.warpgroups * WARPGROUP

    @property
    def list_size(self) -> int:
        """Number of keys for which a CTA has room, as many for each thread."""
        each = max(-(-ROW_KEYS // self.window.count), CTA_KEYS)
        return 0 if self.by_value else -(-each // self.threads) * self.threads

    @property
    def words(self) -> int:
        """Number of all words."""
        return self.keys + self.list_size

    @property
    def chunks_at_once(self) -> int:
        """Number of chunks of a warp that its lanes have in registers at once."""
        return ELEMENTS_AT_ONCE // self.window.vec

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA, in which the barriers come last."""
        scratch = -(-4 * self.words // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
        return scratch + self.window.size * (ACCESS_BYTES // self.window.vec) + 8 * self.warpgroups


def layout_of(vocab: int, dtype, count: int, warpgroups: int) -> Layout:
    """Returns the layout of rows in `count` parts, in CTAs of so many warpgroups."""
    vec = ACCESS_BYTES // jnp.dtype(dtype).itemsize
    blocks = -(-Window(vocab, vec, 1, 1, count).blocks // warpgroups)
    return Layout(Window(vocab, vec, blocks, blocks, count), warpgroups, jnp.dtype(dtype) == jnp.bfloat16)


def plan_sample(rows: int, vocab: int, dtype, capability: tuple[int, int]) -> Layout | None:
    """Returns how the rows of `sample` lie over a GPU of this compute capability; None if no cluster holds a row."""
    smem, most = SMEM_BYTES[capability[0]], MAX_CLUSTER[capability[0]]

    def layout(count):
        return layout_of(vocab, dtype, count, FEW_ROWS_WARPGROUPS if rows <= FEW_ROWS else WARPGROUPS)

    def fits(count, room):
        window = layout(count).window
        small = window.size <= MAX_PART and window.step_blocks <= MAX_BLOCKS
        return small and layout(count).smem_bytes <= room

    if rows <= FEW_ROWS:
        count, room = min(most, -(-vocab * jnp.dtype(dtype).itemsize // FEW_ROWS_PART_BYTES)), smem
    else:
        count, room = 1, smem_of_each(capability, RESIDENT)
    while count < most and not fits(count, room):
        count += 1
    return layout(count) if fits(count, smem) else None
