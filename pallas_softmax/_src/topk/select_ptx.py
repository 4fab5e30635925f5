"""Inline PTX that selects the k best elements of a row, without putting them in order, in one read of the row.

    sample     about k * m / n of m sampled elements are winners, so a sampled element of a somewhat higher rank is a
               bound for the k best of all n elements: few more than k reach it
    stream     the CTA reads its part of the row block by block, and lists the elements above the `floor`
    compact    if the list is full: keep its k best, and raise the floor to the least of them
    gather     CTA 0 appends the lists of the other CTAs of the cluster, and compacts again
    write      the list is in the order of the indices

    row        3 1 8 2 | 9 7 0 6 | 7 5 7 4      k = 3, blocks of 4, the floor is 5, room for 4 entries
    list       8         8 9 7 6                full
    compacted            8 9 7                  the floor becomes 7: another 7 would lose against the listed one
    list                           8 9 7

If many sampled elements equal the bound, the floor is the bound itself. Then a few of its ties may be missing from the
list: a second sweep adds them, from the start of the row. If the list still has fewer than k entries, the sample
misled, and everything starts again with the lowest floor.

A list is in the order of the row. So among ties at the last key the first ones win, and an element after a compacted
list must exceed its last key. The result is exact for every row; rows in unusual orders take more time.

An entry is a word with the bits of the element, in its upper half if it has 16 bits, and its index. Elements with the
lowest key, a NaN with all bits set, are never listed. Masked elements, and those outside of the row, get this key. If
the list ends with fewer than k entries, the lowest indices that it lacks come last.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements, flip_negative
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sort_keys import lowest_key
from pallas_softmax._src.topk.select_plan import BUCKETS, CHUNK, PREFETCHED, THREAD_ELEMENTS, SelectPlan

_ENTRY = 8  # bytes of an entry
_ENTRIES = 2  # that a thread handles at once
_SECTOR_VECTORS = 4  # neighbouring vectors of the sample: 64 bytes, which device memory reads at once
_TOGGLE = 64  # bytes between the two sets of sums of warps
_SYNC = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"  # also shows writes to other CTAs


class SelectProgram(CtaProgram):
    """The program. Addresses: <x>, <values>, <indices>, <mask> in device memory; <list> and <scratch>.

    Numbers: <row>, <part> (the CTA's number in its cluster), <length>, and with a mask <mask_row>.
    """

    def __init__(self, plan: SelectPlan, dtype, masked: bool, fill: int | None):
        super().__init__(plan.threads // LANES, plan.ctas)
        self.plan, self.element, self.masked, self.fill_bits = plan, Elements(dtype), masked, fill
        itemsize = self.element.itemsize
        self.vec = ACCESS_BYTES // itemsize
        self.loads = THREAD_ELEMENTS // self.vec  # vectors of a thread in a block
        self.block_vectors = plan.threads * self.loads
        self.list, scratch, self.row, self.part = self.operands("u32", "list", "scratch", "row", "part")
        self.scratch, self.sums = scratch, self.var(scratch)
        length = self.max(self.operand("length", "s32"), 0)
        self.length = self.min(length, plan.vocab).bits("u32")
        # A vector is 16 bytes; vector 0 has the start of the row, after `before` other elements.
        start = self.operand("x", "u64") + self.multiply_wide(self.row, plan.vocab * itemsize)
        self.base = start & -ACCESS_BYTES
        self.lead = (self.convert(start, "u32") & (ACCESS_BYTES - 1)) >> _log2(itemsize)
        vectors = (self.length + self.lead + (self.vec - 1)) >> _log2(self.vec)
        self.vectors = vectors
        self.first, end = ((self.part + i) * vectors >> _log2(plan.ctas) for i in range(2))
        self.end = self.var(end)
        # Blocks between these vectors have elements of the row only.
        self.whole_from = (self.lead + (self.vec - 1)) >> _log2(self.vec)
        self.whole_to = self.var(self.min(self.whole_vectors(), end))
        self.own = self.warp * (LANES * self.loads) + self.lane  # the thread's first vector in a block
        self.lowest, self.highest = lowest_key(dtype), ~lowest_key(dtype)
        self.floor, self.n = self.var(self.lowest, "s32"), self.var(0, "u32")
        self.greatest = self.var(self.highest, "s32")  # of the sample

    # --- Elements

    def whole_vectors(self) -> Value:
        """Returns the number of vectors before the first one with elements beyond the row."""
        return (self.length + self.lead) >> _log2(self.vec)

    def take_row(self) -> None:
        """Gives the whole row to this CTA, the first of the cluster."""
        self.set(self.end, self.vectors)
        self.set(self.whole_to, self.whole_vectors())

    def prefetch(self, at: Value, blocks: int) -> None:
        """Starts to copy the whole vectors of some blocks, from vector `at` on, to the L2 cache."""
        address = self.base + self.multiply_wide(at, ACCESS_BYTES)
        number = self.max((self.whole_to - at).bits("s32"), 0)
        size = self.min(number, blocks * self.block_vectors) * ACCESS_BYTES
        self += f"@{self.thread.equals(0) & (size > 0)} cp.async.bulk.prefetch.L2.global [{address}], {size};"

    def read_block(self, words: list[Value], at: Value) -> None:
        """Loads the thread's words of the block that starts at vector `at`."""
        first = at + self.own
        address = self.base + self.multiply_wide(first, ACCESS_BYTES)
        with self.block() as done:
            if not self.masked:
                with self.when((at >= self.whole_from) & (at + self.block_vectors <= self.whole_to)):
                    for j in range(self.loads):
                        vector = words[4 * j : 4 * j + 4]
                        self.load_into(vector, address, offset=ACCESS_BYTES * LANES * j, space="global")
                    done()
            for j in range(self.loads):
                self.read_checked(words[4 * j : 4 * j + 4], first + LANES * j)

    def read_checked(self, words: list[Value], vector: Value) -> None:
        """Loads a vector. Elements outside of the part, and masked ones, become the lowest key."""
        address, inside = self.base + self.multiply_wide(vector, ACCESS_BYTES), vector < self.end
        for word in words:
            self.set(word, -1)
        self.load_into(words, address, when=inside, space="global")
        index = vector * self.vec - self.lead
        for e in range(self.vec):
            bits = self.element.all_ones << 8 * (e * self.element.itemsize % 4)
            word, within = words[e * self.element.itemsize // 4], index + e < self.length
            self.update(word, "or", bits, when=~within)
            if self.masked:
                self.update(word, "or", bits, when=self.is_masked(index + e, within & inside))

    def is_masked(self, index: Value, within: Value) -> Value:
        """Returns whether the mask leaves out an element of the row."""
        at = self.operand("mask", "u64") + self.multiply_wide(
            self.operand("mask_row", "u32"), self.plan.vocab
        )
        keep = self.var(1, "u8")
        self.load_into([keep], at + self.convert(index, "u64"), when=within, space="global")
        return self.convert(keep, "u32").equals(0)

    def key(self, bits: Value) -> Value:
        """Returns the sort key of the bits of an entry."""
        key = flip_negative(bits)
        return key >> 16 if self.element.halves else key

    # --- Sums

    def over_cta(self, upto: Value) -> tuple[Value, Value]:
        """Returns the sum over the lower warps, and over all. The last lane of each warp has the warp's number."""
        self.store(self.at(self.sums, self.warp, 4), upto, when=self.lane.equals(LANES - 1))
        self.barrier()
        own = self.load(self.at(self.sums, self.lane, 4), "u32", when=self.lane < self.warps, default=0)
        self.update(self.sums, "xor", _TOGGLE)  # another warp may still read these
        lower = self.select(self.lane < self.warp, own, 0)
        return self.over_lanes("add", lower), self.over_lanes("add", own)

    # --- Finding a key

    def find(
        self,
        visit: Callable[[Callable[..., None]], None],
        low: Value,
        high: Value,
        rank: Value,
        enough: Value,
    ) -> tuple[KeyRange, Value, Value]:
        """Returns a range that has key number `rank` of some keys from low to high, and two numbers: of keys above the
        range, and of keys that reach it.

        At most `enough` keys reach the range, unless it is a single key. visit(see) calls see(key, when) for each key.
        """
        keys, above, reach = KeyRange(self, high, low), self.var(0, "u32"), self.var(2**32 - 1, "u32")
        histogram, picked = self.scratch + self.plan.histogram, self.scratch + self.plan.picked
        each = BUCKETS // LANES

        def one_round(bucket_of):
            def see(key, when=None):
                bucket, inside = bucket_of(key)
                counts = inside if when is None else inside & when
                self.add_to(self.at(histogram, bucket, 4), 1, when=counts)

            visit(see)
            self.barrier()
            with self.when(self.warp.equals(0)):
                sums = self.load_vector(self.at(histogram, self.lane, 4 * each), "u32", each)
                bucket, rest = bucket_that_reaches(self, sums, rank - above)
                self.set(above, rank - rest)
                self.set(reach, above + self.load(self.at(histogram, bucket, 4), "u32"))
                self.store(picked, bucket, above, reach, self.n, when=self.first_lane)
                self.clear_histogram()
            self.barrier()
            bucket, new_above, new_reach, _ = self.load_vector(picked, "u32", 4)
            self.set(above, new_above)
            self.set(reach, new_reach)
            return bucket

        narrow(self, keys, BUCKETS, one_round, stop=lambda: reach <= enough)
        return keys, above, reach

    def clear_histogram(self) -> None:
        """Clears the histogram, by one warp."""
        at = self.at(self.scratch + self.plan.histogram, self.lane, ACCESS_BYTES)
        for first in range(0, 4 * BUCKETS, LANES * ACCESS_BYTES):
            self.store(at, 0, 0, 0, 0, offset=first)

    def sample(self) -> None:
        """Sets the floor to just below a sampled element that few more than k elements should reach.

        If many sampled elements equal that one, the floor is the element itself.
        """
        plan, words = self.plan, []
        runs = plan.threads * plan.sample_vectors // _SECTOR_VECTORS
        together = self.vectors >> _log2(_SECTOR_VECTORS)
        end, self.end = self.end, self.vectors  # the sample is of the whole row
        for i in range(plan.sample_vectors):
            run = (self.thread >> _log2(_SECTOR_VECTORS)) + i * (plan.threads // _SECTOR_VECTORS)
            first = (run * together >> _log2(runs)) << _log2(_SECTOR_VECTORS)
            vector = [self.fresh("s32") for _ in range(4)]
            self.read_checked(vector, first | self.thread & (_SECTOR_VECTORS - 1))
            words += vector
        self.end = end
        a, b = plan.rank(self.element.itemsize)
        rank = self.divide(self.var(a, "f32"), self.convert(self.length, "f32")) + b
        rank = self.convert(rank, "u32")
        keys = self.element.keys(words)
        largest, least = self.reduce("max", keys), self.reduce("min", keys)
        # Each thread has an element that reaches the least of the threads' largest elements.
        low = self.select(rank <= plan.threads, largest, least)
        of_warp = [self.over_lanes("min", low), self.over_lanes("max", largest)]
        lows, highs = self.of_warps(of_warp, self.scratch + plan.extremes, lane=0)
        low, high = self.reduce("min", lows), self.reduce("max", highs)
        self.set(self.greatest, high)
        enough = rank + (rank >> 3)
        found, _, reach = self.find(lambda see: [see(key) for key in keys], low, high, rank, enough)
        self.set(self.floor, found.high - found.extent.bits("s32"))
        self.increase(self.floor, -1, when=(reach <= enough) & (self.floor > self.lowest))

    # --- The list

    def entry(self, number: Value) -> Value:
        """Returns the address of an entry."""
        return self.at(self.list, number, _ENTRY)

    def stream(self, *, ties: bool = False) -> None:
        """Lists the elements of the part above the floor; or `ties` of the floor, until there are k entries."""
        at, words = self.var(self.first), [self.fresh("s32") for _ in range(4 * self.loads)]
        with self.loop() as leave:
            leave(at >= self.end)
            if ties:
                leave(self.n >= self.plan.k)
            self.read_block(words, at)
            before, upto = self.count(words, ties)
            lower, added = self.over_cta(self.total(upto))
            with self.block() as done:
                if not ties:
                    with self.when(self.n + added > self.plan.room):
                        self.append_by_warps(words, at)
                        done()
                self.append(words, at, self.n + lower, before, upto, ties)
                self.increase(self.n, added)
            self.increase(at, self.block_vectors)
        self.barrier()
        if ties:
            self.update(self.n, "min", self.plan.k)

    def tests(self, words: Sequence[Value], ties: bool) -> list[Callable[[], Value]]:
        """Returns a function for each element, which returns whether it is above the floor, or equal to it.

        If the floor is negative, all bits except the signs are inverted. This turns negative elements into their keys,
        and leaves the others above the floor.
        """
        flip, halves = self.floor.sign() & self.element.flip, self.element.halves
        limit, tests = self.floor << 16 | 0xFFFF if halves else self.floor, []
        for word in words:
            flipped = word ^ flip
            for x in (flipped << 16, flipped) if halves else (flipped,):
                if ties and halves:
                    x = x | 0xFFFF
                tests.append(functools.partial(x.equals if ties else x.__gt__, limit))
        return tests

    def count(self, words: Sequence[Value], ties: bool = False) -> tuple[Value, Value]:
        """Returns how many elements are above the floor in the lower lanes, and up to this lane.

        The numbers have a field for each vector of a thread: 4 of 8 bits, or 2 of 16 bits.
        """
        counts = []
        for j in range(self.loads):
            counts.append(self.var(0, "u32"))
            for test in self.tests(words[4 * j : 4 * j + 4], ties):
                self.increase(counts[-1], 1 << j * (32 // self.loads), when=test())
        return self.scan(self.reduce("add", counts))

    def field(self, counts: Value, j: int) -> Value:
        """Returns the field of vector j."""
        bits = 32 // self.loads
        shifted = counts >> bits * j if j else counts
        return shifted & ((1 << bits) - 1) if j < self.loads - 1 else shifted

    def total(self, counts: Value) -> Value:
        """Returns the sum of all fields."""
        return self.reduce("add", [self.field(counts, j) for j in range(self.loads)])

    def append(self, words, at: Value, n: Value, before: Value, upto: Value, ties: bool = False) -> None:
        """Writes the warp's elements that count to entries n, n + 1, ... Of ties, only up to entry k."""
        of_warp, own = self.shuffle(upto, "idx", LANES - 1), upto - before
        first, end = (at + self.own) * self.vec - self.lead, self.list + _ENTRY * self.plan.k
        for j in range(self.loads):
            entry, index = self.var(self.entry(n + self.field(before, j))), first + LANES * self.vec * j
            with self.when(self.field(own, j).differs(0)):
                vector = words[4 * j : 4 * j + 4]
                elements = [(word, e) for word in vector for e in range(self.vec // 4)]
                for i, ((word, e), test) in enumerate(zip(elements, self.tests(vector, ties))):
                    counts = test()
                    if self.element.halves:
                        word = word & 0xFFFF0000 if e else word << 16
                    self.store(entry, word, index + i, when=counts & (entry < end) if ties else counts)
                    self.increase(entry, _ENTRY, when=counts)
            n = n + self.field(of_warp, j)

    def append_by_warps(self, words, at: Value) -> None:
        """Appends a block whose elements do not all fit: warp by warp, and compacts the list if it is full."""
        with self.each(0, self.warps) as turn:
            of_turn = self.at(self.scratch + self.plan.turns, turn, 4)
            with self.when(self.n > self.plan.room - CHUNK):
                self.compact_list()
            with self.when(self.warp.equals(turn)):
                before, upto = self.count(words)
                self.append(words, at, self.n, before, upto)
                self.store(of_turn, self.total(upto), when=self.lane.equals(LANES - 1))
            self.barrier()
            self.increase(self.n, self.load(of_turn, "u32"))

    def last_key(self) -> tuple[KeyRange, Value]:
        """Returns a range of keys whose greatest ones, and all keys above it, are k entries; and how many are above."""
        rank, high = self.var(self.plan.k, "u32"), self.var(self.greatest)

        def visit(see):
            with self.each(self.thread * 2, self.n, 2 * self.plan.threads) as entry:
                bits, _, other, _ = self.load_vector(self.entry(entry), "s32", 4)
                see(self.min(self.key(bits), high))
                see(self.min(self.key(other), high), entry + 1 < self.n)

        with self.loop() as leave:
            found, above, _ = self.find(visit, self.floor, high, rank, rank)
            # Greater keys than `high` counted as `high`.
            leave((found.high < high) | high.equals(self.highest))
            self.set(high, self.highest)
        return found, above

    def compact(self, put: Callable[..., None]) -> None:
        """Passes the k best of more than k entries to put(number, bits, index, when), in the same order.

        An entry's new number is not greater than its old one, and is passed when the old entry has been read.
        """
        found, above = self.last_key()
        room = self.plan.k - above  # for entries in the range that was found
        wins, ties, lower_lanes = self.var(0, "u32"), self.var(0, "u32"), self.special("lanemask_lt")
        with self.each(0, self.n, _ENTRIES * self.plan.threads) as first:
            number = first + self.warp * (_ENTRIES * LANES) + self.lane
            entries, win_counts, tie_counts = [], [], []
            for i in range(_ENTRIES):
                exists, (bits, index) = number + LANES * i < self.n, (self.fresh("s32") for _ in range(2))
                self.load_into([bits, index], self.entry(number), offset=_ENTRY * LANES * i, when=exists)
                key = self.key(bits)
                wins_i = exists & (key > found.high)
                ties_i = exists & (found.distance(key) <= found.extent)
                of_warp = self.ballot(wins_i), self.ballot(ties_i)
                win_counts.append(self.count_ones(of_warp[0]))
                tie_counts.append(self.count_ones(of_warp[1]))
                entries.append((bits, index, wins_i, ties_i, *of_warp))
            counts = self.reduce("add", win_counts) + (self.reduce("add", tie_counts) << 16)
            lower, all_ = self.over_cta(counts)  # now all have read their entries
            win, tie = wins + (lower & 0xFFFF), ties + (lower >> 16)
            for i, (bits, index, wins_i, ties_i, wins_warp, ties_warp) in enumerate(entries):
                own_tie = tie + self.count_ones(ties_warp & lower_lanes)
                to = win + self.count_ones(wins_warp & lower_lanes) + self.min(own_tie, room)
                put(to, bits, index, when=wins_i | (ties_i & (own_tie < room)))
                win, tie = win + win_counts[i], tie + tie_counts[i]
            self.increase(wins, all_ & 0xFFFF)
            self.increase(ties, all_ >> 16)
        self.set(self.floor, self.max(self.floor, found.high - found.extent.bits("s32")))

    def compact_list(self) -> None:
        """Keeps the k best of more than k entries, and raises the floor."""
        self.compact(lambda to, *entry, when: self.store(self.entry(to), *entry, when=when))
        self.barrier()
        self.set(self.n, self.plan.k)

    # --- The cluster

    def count_lists(self) -> Value:
        """Returns the number of entries in the list of each CTA, in the lane with its number."""
        here, exists = self.scratch + self.plan.counts, self.lane < self.ctas
        gathered = self.at(self.scratch + self.plan.gathered, self.lane, 4)
        self.store(here, self.n, when=self.thread.equals(0))
        self.sync_cluster()
        with self.when(self.warp.equals(0)):
            (count,) = self.of_cta(here, self.lane, "u32", when=exists)
            self.store(gathered, count, when=exists)
        self.barrier()
        return self.load(gathered, "u32", when=exists, default=0)

    def gather(self) -> None:
        """Appends the lists of other CTAs to the list of CTA 0, as many at a time as fit, and keeps the k best."""
        counts = self.count_lists()
        appended, base = self.var(1, "u32"), self.var(self.shuffle(counts, "idx", 0))
        with self.loop() as leave:
            _, upto = self.scan(self.select(self.lane >= appended, counts, 0))
            fitting = self.count_ones(self.ballot(base + upto <= self.plan.capacity))
            last = self.min(fitting, self.ctas)
            start = base + self.shuffle(upto, "idx", self.part) - self.n
            with self.when((self.part >= appended) & (self.part < last)):
                there = self.op("mapa.shared::cluster", "u32", self.entry(start), self.var(0, "u32"))
                with self.each(self.thread, self.n, self.plan.threads) as number:
                    entry = self.load_vector(self.entry(number), "s32", 2)
                    self.store(self.at(there, number, _ENTRY), *entry, space="shared::cluster")
            self += _SYNC
            self.increase(base, self.shuffle(upto, "idx", last - 1))
            leave(last >= self.ctas)
            with self.when(self.part.equals(0)):
                self.set(self.n, base)
                self.compact_list()
            self.set(base, self.plan.k)
            self.set(appended, last)
            self += _SYNC
        self.set(self.n, base, when=self.part.equals(0))

    # --- The results

    def write_results(self) -> None:
        """Writes the values and indices of the k best of the list, and fills the rest."""
        k, itemsize = self.plan.k, self.element.itemsize
        values = self.operand("values", "u64") + self.multiply_wide(self.row, k * itemsize)
        indices = self.operand("indices", "u64") + self.multiply_wide(self.row, k * 4)

        def put(number, bits, index, when=None):
            value = self.convert(bits.bits("u32") >> 16, "u16") if self.element.halves else bits
            self.store(values + self.multiply_wide(number, itemsize), value, space="global", when=when)
            self.store(indices + self.multiply_wide(number, 4), index, space="global", when=when)

        with self.block() as done:
            with self.when(self.n > k):
                self.compact(put)
                done()
            with self.each(self.thread, self.n, self.plan.threads) as number:
                put(number, *self.load_vector(self.entry(number), "s32", 2))
            with self.each(self.n + self.thread, k, self.plan.threads) as number:
                index = self.missing(number - self.n)
                put(number, self.var(-1 if self.fill_bits is None else self.fill_bits, "s32"), index)

    def missing(self, number: Value) -> Value:
        """Returns index `number` of those that the list lacks. Before entry i, it lacks index - i numbers."""
        low, high = self.var(0, "u32"), self.var(self.n)
        with self.loop() as leave:
            leave(low.equals(high))
            middle = low + high >> 1
            lacks = self.load(self.entry(middle), "u32", offset=4) - middle
            beyond = lacks > number
            self.set(high, middle, when=beyond)
            self.set(low, middle + 1, when=~beyond)
        return number + low


@functools.lru_cache(maxsize=16)
def select_program(plan: SelectPlan, dtype: np.dtype, masked: bool, fill: int | None) -> SelectProgram:
    """Returns the program. `fill` has the bits of masked winners, in the upper half for 16 bits; None: all ones."""
    p = SelectProgram(plan, dtype, masked, fill)
    if not masked:
        p.prefetch(p.first, PREFETCHED)
    with p.when(p.warp.equals(0)):
        p.clear_histogram()
    p.barrier()
    with p.when(p.length > plan.capacity):
        p.sample()
    gathered = p.var(False, "pred")
    with p.loop() as leave:
        p.stream()
        if plan.ctas > 1:
            with p.when(~gathered):
                p.gather()
            p.set(gathered, True)
            leave(p.part.differs(0))
            p.take_row()
        leave((p.n >= plan.k) | p.floor.equals(p.lowest))
        p.stream(ties=True)
        leave(p.n >= plan.k)
        p.set(p.floor, p.lowest)  # the sample misled
        p.set(p.n, 0)
    with p.when(p.part.equals(0)):
        p.write_results()
    return p


def _log2(n: int) -> int:
    """Returns the logarithm of a power of two."""
    return n.bit_length() - 1
