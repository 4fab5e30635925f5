"""The lists of a selection: each CTA of a cluster has one, in shared memory. CTA 0 gathers them.

An entry is a word with the bits of an element, in its upper half if it has 16 bits, and the element's index in the row.
Entries are in the order of the row. So if entries tie at the last key that wins, the first of them win. An element that
comes after a compacted list wins only if its key is greater than the least key of the list.
"""

from collections.abc import Callable
from typing import Any

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements, flip_negative
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sort_keys import lowest_key
from pallas_softmax._src.topk.select_plan import BUCKETS, SelectPlan

ENTRY_BYTES = 8
_ENTRIES = 2  # that a thread handles at once
_TOGGLE = 64  # bytes between the two sets of `sums`
_SYNC = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"  # also shows writes to other CTAs


class ListProgram(CtaProgram):
    """A program of a CTA with a list. `SelectPlan` has the layout of the scratch.

    Variables: `n` is the number of entries, at most `plan.capacity`. All entries have keys of at least `floor`. Few
    elements have keys above `greatest`, the greatest key of the sample.
    """

    def __init__(self, plan: SelectPlan, dtype):
        super().__init__(plan.threads // LANES, plan.ctas)
        self.plan, self.element = plan, Elements(dtype)
        self.list, self.scratch, self.part = self.operands("u32", "list", "scratch", "part")
        self.sums, self.n = self.var(self.scratch), self.var(0, "u32")
        self.lowest, self.highest = lowest_key(dtype), ~lowest_key(dtype)
        self.floor, self.greatest = self.var(self.lowest, "s32"), self.var(self.highest, "s32")

    def entry(self, number: Value) -> Value:
        """Returns the address of an entry."""
        return self.at(self.list, number, ENTRY_BYTES)

    def key(self, bits: Value) -> Value:
        """Returns the sort key of the bits of an entry."""
        key = flip_negative(bits)
        return key >> 16 if self.element.halves else key

    def missing(self, number: Value) -> Value:
        """Returns index `number`, from 0, of the ascending indices that the list lacks.

        Before entry i, which has some index, the list lacks index - i of them.
        """
        low, high = self.var(0, "u32"), self.var(self.n)
        with self.loop() as leave:
            leave(low.equals(high))
            middle = low + high >> 1
            lacks = self.load(self.entry(middle), "u32", offset=4) - middle
            beyond = lacks > number
            self.set(high, middle, when=beyond)
            self.set(low, middle + 1, when=~beyond)
        return number + low

    # --- Sums

    def scan_warps(self, upto: Value) -> tuple[Value, Value]:
        """Returns the sums over the lower warps and over all warps. A warp's summand is `upto` in its last lane."""
        self.store(self.at(self.sums, self.warp, 4), upto, when=self.lane.equals(LANES - 1))
        self.barrier()
        own = self.load(self.at(self.sums, self.lane, 4), "u32", when=self.lane < self.warps, default=0)
        self.update(self.sums, "xor", _TOGGLE)  # another warp may still read these
        lower = self.select(self.lane < self.warp, own, 0)
        return self.over_lanes("add", lower), self.over_lanes("add", own)

    # --- Finding a key

    def find(
        self,
        visit: Callable[[Callable[..., None]], Any],
        low: Value,
        high: Value,
        rank: Value,
        enough: Value,
    ) -> tuple[KeyRange, Value, Value]:
        """Returns a range that contains the key of a rank (1 is the greatest) among keys from `low` to `high`.

        Also returns how many keys are above the range, and how many are above it or in it. The second number is at most
        `enough`, unless the range is a single key. visit(see) calls see(key, when) for each key.
        """
        keys, above, reach = KeyRange(self, high, low), self.var(0, "u32"), self.var(2**32 - 1, "u32")
        histogram, picked = self.scratch + self.plan.histogram, self.scratch + self.plan.picked
        each = BUCKETS // LANES

        def one_round(bucket_of):
            def see(key, when=None):
                bucket, inside = bucket_of(key)
                is_counted = inside if when is None else inside & when
                self.add_to(self.at(histogram, bucket, 4), 1, when=is_counted)

            visit(see)
            self.barrier()
            with self.when(self.warp.equals(0)):
                sums = self.load_vector(self.at(histogram, self.lane, 4 * each), "u32", each)
                bucket, rest = bucket_that_reaches(self, sums, rank - above)
                self.set(above, rank - rest)
                self.set(reach, above + self.load(self.at(histogram, bucket, 4), "u32"))
                self.store(picked, bucket, above, reach, self.n, when=self.first_lane)  # `n` fills the vector
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

    # --- The k best

    def last_key(self) -> tuple[KeyRange, Value]:
        """Returns a range of keys that contains the k-th greatest key, and the number of entries above the range.

        The range is a single key, or exactly k entries are above it or in it.
        """
        rank, high = self.var(self.plan.k, "u32"), self.var(self.greatest)

        def visit(see):
            pairs = 2 * self.plan.threads  # entries that all threads load together
            with self.each(self.thread * 2, self.n, 2 * pairs) as entry:
                beyond = entry + pairs < self.n
                for first, inside in ((0, None), (pairs, beyond)):
                    words = [self.fresh("s32") for _ in range(4)]
                    self.load_into(words, self.entry(entry), offset=ENTRY_BYTES * first, when=inside)
                    see(self.min(self.key(words[0]), high), inside)
                    see(self.min(self.key(words[2]), high), entry + (first + 1) < self.n)

        with self.loop() as leave:
            found, above, _ = self.find(visit, self.floor, high, rank, rank)
            # Keys above `high` counted as `high`. So if the range contains `high`, it may be wrong.
            leave((found.high < high) | high.equals(self.highest))
            self.set(high, self.highest)
        return found, above

    def compact(self, put: Callable[..., None]) -> None:
        """Passes the k best of more than k entries to put(number, bits, index, when), in the same order.

        `number` is the entry's new place, not after its old one. All threads have read the entries up to there.
        """
        found, above = self.last_key()
        room = self.plan.k - above  # for entries in the range that was found
        wins, ties, lower_lanes = self.var(0, "u32"), self.var(0, "u32"), self.special("lanemask_lt")
        with self.each(0, self.n, _ENTRIES * self.plan.threads) as first:
            number = first + self.warp * (_ENTRIES * LANES) + self.lane
            entries, win_counts, tie_counts = [], [], []
            for i in range(_ENTRIES):
                exists, (bits, index) = number + LANES * i < self.n, (self.fresh("s32") for _ in range(2))
                self.load_into([bits, index], self.entry(number), offset=ENTRY_BYTES * LANES * i, when=exists)
                key = self.key(bits)
                wins_i = exists & (key > found.high)
                ties_i = exists & (found.distance(key) <= found.extent)
                of_warp = self.ballot(wins_i), self.ballot(ties_i)
                win_counts.append(self.count_ones(of_warp[0]))
                tie_counts.append(self.count_ones(of_warp[1]))
                entries.append((bits, index, wins_i, ties_i, *of_warp))
            counts = self.reduce("add", win_counts) + (self.reduce("add", tie_counts) << 16)
            lower, all_ = self.scan_warps(counts)  # now all have read their entries
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
        # Lists before `appended` are in the list of CTA 0, which has `base` entries.
        appended, base = self.var(1, "u32"), self.var(self.shuffle(counts, "idx", 0))
        with self.loop() as leave:
            _, upto = self.scan(self.select(self.lane >= appended, counts, 0))
            fitting = self.count_ones(self.ballot(base + upto <= self.plan.capacity))
            end = self.min(fitting, self.ctas)  # lists before this one are appended now
            start = base + self.shuffle(upto, "idx", self.part) - self.n
            with self.when((self.part >= appended) & (self.part < end)):
                there = self.op("mapa.shared::cluster", "u32", self.entry(start), self.var(0, "u32"))
                with self.each(self.thread, self.n, self.plan.threads) as number:
                    entry = self.load_vector(self.entry(number), "s32", 2)
                    self.store(self.at(there, number, ENTRY_BYTES), *entry, space="shared::cluster")
            self += _SYNC
            self.increase(base, self.shuffle(upto, "idx", end - 1))
            leave(end >= self.ctas)
            with self.when(self.part.equals(0)):
                self.set(self.n, base)
                self.compact_list()
            self.set(base, self.plan.k)
            self.set(appended, end)
            self += _SYNC
        self.set(self.n, base, when=self.part.equals(0))
