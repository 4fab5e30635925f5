"""How the rows of `sample` lie over the GPU: `plan_sample` and `plan_stream`, pure functions of a shape.

A row's sums have the same order in any batch: `plan_sample` does not depend on the number of rows, and the shares of a
`StreamPlan` do not.

With filters, a row lies in the shared memory of one CTA, or in parts in the CTAs of a cluster. `SamplePlan` shows
a part. Without filters, the warps of a cluster read the row once, as `stream_kernel` shows: a `StreamPlan`.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_softmax._src.gpu import hardware
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, MAX_CLUSTER, WARPGROUP, WARPS
from pallas_softmax._src.gpu.layout import Window, power_of_two

WARP_LOAD_BYTES = LANES * ACCESS_BYTES  # bytes that a warp loads at once
MAX_CTAS = 16  # in a cluster
MAX_WARPS = 16  # in a CTA
MAX_BLOCKS = 32  # in a step; longer ones were not tested
MAX_PART = 2**16  # elements in a CTA: positions have 16 bits, and sums of as many 16-bit numbers have 32 bits
MAX_V = MAX_CTAS * MAX_PART

BUCKETS = 2048  # in the histogram by distance
VALUE_BUCKETS = 4096  # in the histogram by bfloat16 value: at least 31 powers of two with 128 values each, 0
SECTIONS = 64  # in a histogram, two for each lane; the CTAs exchange the sums over sections first
DIGIT = 128  # buckets in a round over the row's keys, four for each lane
RECORD_WORDS = 8  # of a warp in `ScratchSizes.warps`, and of a CTA in `ScratchSizes.gathered`

# Keys that the lists of a row have room for, together. For normal logits and V = 151,936, the zone has 170, 270 and 580
# keys for top_p = 0.5, 0.9 and 0.99, and 1,056 keys for top_k = 1000.
ROW_KEYS = 2_500
# Keys that each list has room for, at least. In a sorted row, one CTA has all keys of a zone: zones of top_p up to 0.9
# fit, and a larger zone is searched digit by digit.
CTA_KEYS = 512

# "Sampling" in benchmarks/results/NOTES.md has times of other plans.
ELEMENTS_AT_ONCE = 16  # elements that a thread holds in registers at once; other numbers were not measured
# Elements that a thread looks at together, to list those that can win. For float32, 16 were not faster. bfloat16 has
# room for more: its histogram is longer. (In a shifted window it would take more than 80 registers.)
LISTED_AT_ONCE, LISTED_AT_ONCE_BFLOAT16 = 12, 16
NOISE_AT_ONCE = 2  # elements: a thread computes their noise at once; 3 and 4 were not faster
# Three CTAs share a multiprocessor: one works while the parts of the others arrive. So each CTA has a third of the
# shared memory, and 256 threads with 80 registers each, which fit three times.
RESIDENT, WARPGROUPS = 3, 2
# Larger clusters leave multiprocessors idle. Longer rows have two larger CTAs on each multiprocessor, with more warps.
# The number of CTAs in a cluster is then even: 7 were slower than 8, and 11 slower than 12.
SMALL_CLUSTER = 8
FEWER_RESIDENT, MORE_WARPGROUPS = 2, 3


class ScratchSizes(NamedTuple):
    """The fields of the scratch memory of a CTA, in order, and their 32-bit words: multiples of 16 bytes."""

    # The largest element of the CTA, and its relative mass. Then a bound for a small top_k; or, without filters, the
    # best sum with noise, its index and its element.
    normalizer: int = 8
    zone: int = 8  # sums over the CTA above the zone and in it, the least and the greatest key in the zone
    best: int = 8  # twice: the best sum with noise in the CTA, its index and its element
    counted: int = 4  # sums over the CTA above a key, or a better bound for a small top_k
    picked: int = 4  # a result of one warp, for all warps to read
    listed: int = 4  # how many keys the list has, or would have if there were room
    threshold: int = 4  # the best sum with noise that the CTA knows of the row
    warps: int = RECORD_WORDS * MAX_WARPS  # numbers of each warp
    sums: int = 2 * LANES  # with `sections`, the sums of a round over listed keys
    sections: int = 2 * SECTIONS  # two sums over each section of the histogram
    gathered: int = RECORD_WORDS * MAX_CTAS  # numbers of each CTA, from one warp, read by all
    # Numbers of elements; later the lists of all CTAs, or two sets of sums of the rounds over the row's keys; at last,
    # if there is room, the list of positions of each warp. `SamplePlan` has its size, and what follows.
    histogram: int = 0


SCRATCH = ScratchSizes(*itertools.accumulate(ScratchSizes()[:-1], initial=0))  # the first word of each field


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """How rows of `sample` lie in the shared memory of clusters of CTAs.

    A part is a `Window`, as drawn there. Each warpgroup has one step of it, and each warp a quarter of the
    step: its span, cut into loads of 512 bytes, 16 bytes for each lane. So CTAs, spans, loads, lanes and a lane's
    elements all follow the order of the row:

        block        |  0  |  1  |  2  |  3  |  4  |  5  |  6  |       2 KB each, step_blocks = 4
        warpgroup    |           0           |        1        |
        warp         |  0  |  1  |  2  |  3  | 4  | 5 | 6 |  7 |       warps 0 to 3 have 4 loads, warps 4 to 7 have 3
    """

    window: Window
    warpgroups: int
    value_buckets: bool  # whether the histogram has a bucket for each value, so that no list is needed

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def buckets(self) -> int:
        return VALUE_BUCKETS if self.value_buckets else BUCKETS

    @property
    def list_size(self) -> int:
        """Number of keys that the list of a CTA has room for, a multiple of its number of threads."""
        each = max(-(-ROW_KEYS // self.window.count), CTA_KEYS)
        return 0 if self.value_buckets else -(-each // self.threads) * self.threads

    @property
    def listed_at_once(self) -> int:
        most = LISTED_AT_ONCE_BFLOAT16 if self.value_buckets and not self.window.shifted else LISTED_AT_ONCE
        return most // self.window.vec * self.window.vec

    @property
    def list_words(self) -> int:
        """Number of words of a warp's list of positions, two in each word."""
        return (self.listed_at_once + NOISE_AT_ONCE) * LANES // 2

    # --- The first words of the fields after the histogram

    @property
    def keys(self) -> int:
        """The list of keys in the zone."""
        return SCRATCH.histogram + self.buckets

    @property
    def key_positions(self) -> int:
        """The positions of the listed keys, two in each word."""
        return self.keys + self.list_size

    @property
    def positions(self) -> int:
        """The warps' lists of positions. They lie over the histogram, if it has room.

        They are never over the keys, which other CTAs may still read.
        """
        has_room = self.warpgroups * WARPS * self.list_words <= self.buckets
        return SCRATCH.histogram if has_room else self.key_positions + self.list_size // 2

    @property
    def words(self) -> int:
        end_of_positions = self.positions + self.warpgroups * WARPS * self.list_words
        return max(self.key_positions + self.list_size // 2, end_of_positions)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA; the barriers come last."""
        scratch = -(-4 * self.words // hardware.SMEM_ALIGNMENT) * hardware.SMEM_ALIGNMENT
        return scratch + self.window.smem_size * (ACCESS_BYTES // self.window.vec) + 8 * self.warpgroups


def plan_of(vocab: int, dtype, count: int, warpgroups: int) -> SamplePlan:
    vec = ACCESS_BYTES // jnp.dtype(dtype).itemsize
    step_blocks = -(-Window(vocab, vec, 1, 1, count).blocks // warpgroups)  # each warpgroup has one step
    window = Window(vocab, vec, step_blocks, step_blocks, count)
    return SamplePlan(window, warpgroups, jnp.dtype(dtype) == jnp.bfloat16)


def plan_sample(vocab: int, dtype, capability: tuple[int, int]) -> SamplePlan | None:
    """Returns the plan for a GPU of this compute capability; None if no cluster can hold a row."""
    smem, most = hardware.SMEM_BYTES[capability[0]], MAX_CLUSTER[capability[0]]

    def first_that_fits(counts: range, warpgroups: int, room: int) -> SamplePlan | None:
        for count in counts:
            plan = plan_of(vocab, dtype, count, warpgroups)
            small = plan.window.size <= MAX_PART and plan.window.step_blocks <= MAX_BLOCKS
            if small and plan.smem_bytes <= room:
                return plan
        return None

    plan = first_that_fits(range(1, most + 1), WARPGROUPS, hardware.smem_of_each(capability, RESIDENT))
    if plan is None or plan.window.count > SMALL_CLUSTER:
        counts = range(2, (SMALL_CLUSTER if plan else most) + 1, 2)
        room = hardware.smem_of_each(capability, FEWER_RESIDENT)
        plan = first_that_fits(counts, MORE_WARPGROUPS, room) or plan
    return plan or first_that_fits(range(most, most + 1), WARPGROUPS, smem)


# --- Without filters

# "Sampling" in benchmarks/results/NOTES.md has times of other numbers. Three CTAs of WARPGROUPS share a multiprocessor
# here too: a thread has up to 80 registers. In clusters of four and more it has 96, so that two CTAs share one.
STEP_ELEMENTS = 16  # elements of a lane in a step
KEPT = 14  # entries that the list of a lane may carry to its next step
LIST_SIZE = NOISE_AT_ONCE + KEPT + STEP_ELEMENTS  # entries that the list of a lane has room for, with padding
# Elements in one step of every warp of two warpgroups. For rows of up to as many, one warpgroup is enough.
SHORT = LANES * STEP_ELEMENTS * WARPS * WARPGROUPS
# How many CTAs an H100 runs at once, if three share a multiprocessor, and if two do.
PLACES, FEWER_PLACES = 396, 256
CLUSTERS = 1, 2, 4, 8, 16
MAX_SHARES = 16
CHAINS = 2  # the normalizers of even shares are combined, then of odd shares, then both
MAX_SLOTS = 4  # with more normalizers of each thread, less shared memory is left for the lists of other CTAs
# The cost of the start, the end and the low first threshold of a CTA, as a number of elements.
OVERHEAD = 2**14


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """How rows lie over clusters of CTAs; `stream_kernel` shows the steps of a row."""

    vocab: int
    itemsize: int
    ctas: int  # in the cluster of a row

    @property
    def warpgroups(self) -> int:
        return 1 if self.vocab <= SHORT else WARPGROUPS

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def shares(self) -> int:
        """Number of shares of a row, a power of two; some of the last may have no step."""
        return min(power_of_two(self.vocab / SHORT, 1), MAX_SHARES)

    @property
    def slots(self) -> int:
        """Number of normalizers of a thread in shared memory: of each chain, or in larger clusters of each share."""
        return (min(CHAINS, self.shares) if self.ctas <= CHAINS else self.shares) // self.ctas

    @property
    def vec(self) -> int:
        """Number of neighbours that a lane loads at once, up to 16 bytes. Each row starts at a multiple of it."""
        return math.gcd(self.vocab, ACCESS_BYTES // self.itemsize)

    @property
    def vectors(self) -> int:
        """Number of vectors of a lane in a step."""
        return STEP_ELEMENTS // self.vec

    @property
    def normalizers(self) -> int:
        """The first word of the normalizers (m, d) of the threads, slot by slot; before them are the lanes' lists."""
        return SCRATCH.histogram + 2 * LIST_SIZE * self.threads

    @property
    def words(self) -> int:
        return self.normalizers + 2 * self.slots * self.threads


def plan_stream(rows: int, vocab: int, dtype, capability: tuple[int, int]) -> StreamPlan:
    itemsize = jnp.dtype(dtype).itemsize

    # All CTAs take about the same time, so they run in waves: the number of waves and the elements of a CTA decide.
    def time(ctas: int) -> float:
        places = PLACES if ctas <= 2 else FEWER_PLACES
        return -(-rows * ctas // places) * (vocab / ctas + OVERHEAD)

    plans = [StreamPlan(vocab, itemsize, ctas) for ctas in CLUSTERS if ctas <= MAX_CLUSTER[capability[0]]]
    return min((plan for plan in plans if 0 < plan.slots <= MAX_SLOTS), key=lambda plan: time(plan.ctas))
