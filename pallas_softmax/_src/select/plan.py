"""How the rows of a selection lie over the GPU: `plan_selection`."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Refusal
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.hardware import (
    ACCESS_BYTES,
    FULL_CLUSTERS,
    LANES,
    MAX_CLUSTER,
    RESERVED_SMEM_BYTES,
    SMEM_BYTES,
    WARPGROUP,
)
from pallas_softmax._src.gpu.layout import power_of_two

MAX_SELECTED = 4_096  # winners; a list for as many takes 96 KiB
MIN_VOCAB = 2_048  # elements of a row

# With few rows, each CTA has four warpgroups and a multiprocessor to itself. With more rows, a row has one CTA, and
# four CTAs share a multiprocessor: some search while others read. Short 16-bit rows take less time to read than to
# search, so more and smaller CTAs pay off. "Plans of a selection" in benchmarks/results/NOTES.md has the times.
MULTIPROCESSORS = 132  # of an H100
FEW_WARPGROUPS, MANY_WARPGROUPS = 2, 4
SHORT_ROW = 16_384  # elements; up to this length, 16-bit rows with few winners take CTAs of one warpgroup
LONE_ROW = 32_768  # elements; up to this length, a row takes one CTA rather than two
MIN_PART = 8_192  # elements of a CTA, at least, if several CTAs share a row

HELD_BYTES = 32_768  # of a row that a CTA holds in registers
HELD_OF_MANY = 8_192  # elements of such a row, if there are many
LIST_SHARE = 16  # a list is as fast for many 16-bit rows with this many elements for each winner

# Lists that are put in order leave shared memory for few CTAs, and so few warps run. So a CTA gets twice the warpgroups
# if a thread would rank more entries than this.
MOST_RANKED_OF_THREAD = 8

# A CTA reads its part block by block. These are the bytes of a thread in a block. Up to two CTAs have registers for
# LONE_THREAD_BYTES, and four for THREAD_BYTES. Fewer blocks are fewer waits.
LONE_THREAD_BYTES, THREAD_BYTES, LEAST_THREAD_BYTES = 128, 64, 32
MASKED_THREAD_ELEMENTS = 16  # at most; a mask takes registers for each element
LEAST_CAPACITY = 2_048  # entries of a list, at least
PREFETCHED = 4  # blocks that are copied to the L2 cache while the CTA searches its sample

# The sample should have this many of the k best, so that it bounds them well.
SAMPLED_WINNERS = 64
MARGIN = 4.5  # standard deviations between the expected number of sampled winners and the rank of the bound
MAX_SAMPLE_VECTORS = 4  # of a thread


@dataclasses.dataclass(frozen=True)
class SelectPlan:
    """How many CTAs and threads select the winners of a row, and the room of their lists.

    The CTAs of a row are a cluster. Each has a part of the row, and a list of entries of 8 bytes in shared memory. The
    scratch starts at these bytes:

        0      sums        a count of each warp; two sets, used in turn
        128    turns       how many entries each warp appended when the warps took turns
        192    counts      the number of entries of this CTA's list
        256    gathered    the numbers of entries of all CTAs' lists
        320    picked      what one thread found in the histogram, for all to read
        384    extremes    two keys of each warp's part of the sample; two distances, for a row in registers
        512    histogram, and a word for keys that it does not have
    """

    vocab: int
    k: int
    ctas: int  # of a row
    warpgroups: int  # of a CTA
    capacity: int  # entries of a list
    sample_vectors: int  # vectors of 16 bytes of the sample, for each thread
    thread_bytes: int = THREAD_BYTES  # of a block; of the row, if it is in registers
    in_registers: bool = False  # whether a CTA holds the row in registers
    sorted: bool = False  # whether the winners are put in order

    turns, counts, gathered, picked, extremes, histogram = 128, 192, 256, 320, 384, 512

    @property
    def buckets(self) -> int:
        return self.threads * max(4, self.thread_bytes // ACCESS_BYTES if self.in_registers else 0)

    @property
    def scratch_bytes(self) -> int:
        """After the buckets, a word for each lane counts the keys in no bucket."""
        return self.histogram + 4 * self.buckets + 4 * LANES

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    def warp_elements(self, itemsize: int) -> int:
        return LANES * self.thread_bytes // itemsize

    @property
    def room(self) -> int:
        """Number of entries that a CTA lists of its part. CTA 0 of a cluster then has room for k more."""
        return self.capacity - (self.k if self.ctas > 1 else 0)

    @property
    def ranked(self) -> int:
        """Number of entries that are put in order: the winners, rounded up."""
        return max(self.threads, power_of_two(self.k, 1))

    @property
    def list_bytes(self) -> int:
        """To rank its entries, a CTA needs a word for each one after them."""
        return max(8 * self.capacity, 12 * self.ranked if self.sorted else 0)

    @property
    def smem_bytes(self) -> int:
        return self.list_bytes + self.scratch_bytes

    def sampled(self, itemsize: int) -> int:
        return self.threads * self.sample_vectors * (ACCESS_BYTES // itemsize)

    def rank_coefficients(self, itemsize: int) -> tuple[float, float]:
        """Returns (a, b): the bound of a row of n elements has the rank a / n + b in the sample.

        A sample of m elements has about q = k m / n of the winners, with a standard deviation of sqrt(q). So the rank
        should be at least q + MARGIN sqrt(q) + 1. This uses the tangent of sqrt(q) at n = `vocab`, which is linear in
        1 / n and nowhere below sqrt(q).
        """
        product = self.k * self.sampled(itemsize)
        root = math.sqrt(product / self.vocab)
        return product * (1 + MARGIN / (2 * root)), 1 + MARGIN * root / 2


def registers_plan(vocab: int, k: int, warpgroups: int, thread_bytes: int) -> SelectPlan:
    return SelectPlan(vocab, k, 1, warpgroups, -(-k // LANES) * LANES, 1, thread_bytes, in_registers=True)


def plan_in_registers(rows: int, vocab: int, k: int, itemsize: int, has_lengths: bool) -> SelectPlan | None:
    few = rows <= 2 * MULTIPROCESSORS
    cut_vector = ACCESS_BYTES if vocab * itemsize % ACCESS_BYTES else 0  # a row between multiples of 16 bytes
    row_bytes = vocab * itemsize + cut_vector
    is_faster = few or (vocab <= HELD_OF_MANY and (itemsize == 4 or has_lengths or vocab < LIST_SHARE * k))
    if row_bytes > HELD_BYTES or not is_faster:
        return None
    least = MANY_WARPGROUPS if few else 1
    warpgroups = max(least, power_of_two(row_bytes / (WARPGROUP * LONE_THREAD_BYTES), 1))
    thread_bytes = max(LEAST_THREAD_BYTES, power_of_two(row_bytes / (WARPGROUP * warpgroups), 1))
    return registers_plan(vocab, k, warpgroups, thread_bytes)


def plan_selection(call: Call, capability: tuple[int, int]) -> SelectPlan | Refusal:
    """Returns how the rows of a call lie over a GPU.

    Only a selection takes integers with lengths. The least integer has the lowest key, so it counts as masked. It comes
    before the elements beyond the length all the same, since its index is lower.
    """
    if reason := checks.unsupported(call, capability) or checks.not_contiguous(call) or checks.too_large(call):
        return Refusal(reason)
    rows, vocab, k, itemsize = call.rows, call.vocab, call.k or 0, jnp.dtype(call.dtype).itemsize
    limits = f"a selection takes up to {MAX_SELECTED} winners of at least {MIN_VOCAB} elements"
    none = Refusal(f"k={call.k} and V={vocab}: {limits}")
    if not (1 <= k <= min(MAX_SELECTED, vocab) and vocab >= MIN_VOCAB):
        return none
    if not call.masked and (held := plan_in_registers(rows, vocab, k, itemsize, call.lengths)):
        if call.sorted and held.ranked > MOST_RANKED_OF_THREAD * held.threads:
            held = registers_plan(vocab, k, 2 * held.warpgroups, held.thread_bytes // 2)
        return dataclasses.replace(held, sorted=call.sorted)
    cluster = 16 if rows <= FULL_CLUSTERS else 8  # more clusters of 16 CTAs would not run at once
    most_ctas = min(MAX_CLUSTER[capability[0]], cluster, vocab // MIN_PART, MULTIPROCESSORS // rows)
    ctas = 1 << max(most_ctas, 1).bit_length() - 1
    if ctas == 2 and vocab <= LONE_ROW:
        ctas = 1
    few = rows * ctas <= MULTIPROCESSORS
    warpgroups = MANY_WARPGROUPS if few else FEW_WARPGROUPS
    if itemsize == 2 and not few and 3 * k <= LEAST_CAPACITY and vocab <= SHORT_ROW:
        warpgroups = 1
    thread_bytes = LONE_THREAD_BYTES if rows * ctas <= 2 * MULTIPROCESSORS else THREAD_BYTES
    most = vocab * itemsize // (ctas * warpgroups * WARPGROUP)  # more would make a block longer than a part
    while thread_bytes > max(most, LEAST_THREAD_BYTES):
        thread_bytes //= 2
    if call.masked:
        thread_bytes = min(thread_bytes, MASKED_THREAD_ELEMENTS * itemsize)
    # Usually, 1.3 to 2.3 k elements of a row are above the floor. There is always room for the winners and one warp.
    of_warp = LANES * thread_bytes // itemsize
    capacity = max(3 * k, LEAST_CAPACITY, (2 if ctas > 1 else 1) * k + of_warp)
    capacity = -(-capacity // LANES) * LANES
    if ctas == 1:
        capacity = min(capacity, -(-vocab // LANES) * LANES)
    wanted = SAMPLED_WINNERS * vocab / k * itemsize / (ACCESS_BYTES * warpgroups * WARPGROUP)
    vectors = power_of_two(min(wanted, MAX_SAMPLE_VECTORS), 1)
    plan = SelectPlan(vocab, k, ctas, warpgroups, capacity, vectors, thread_bytes, sorted=call.sorted)
    return plan if plan.smem_bytes <= SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES else none
