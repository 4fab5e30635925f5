"""The lists of a selection: each CTA of a cluster has one, in shared memory. CTA 0 gathers them.

An entry is a word with the sort key of an element, in its upper half if it has 16 bits, and the element's index.
After a stream, entries are in the order of the row. So if entries tie at the last key that wins, the first of them win.
An element that comes after a compacted list wins only if its key is greater than the least key of the list.
"""

from collections.abc import Callable
from typing import Any

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import MAGNITUDE, Elements
from pallas_softmax._src.gpu.ptx.narrow import Histogram, KeyRange, find_rank
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.select.plan import SelectPlan
from pallas_softmax._src.sort_keys import lowest_key

ENTRY_BYTES = 8
_LOWEST_WORD = -MAGNITUDE - 1  # has the lowest key of every dtype
_ENTRIES = 2  # that a thread handles at once
_TOGGLE = 64  # bytes between the two sets of `sums`
_SYNC = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"  # also shows writes to other CTAs


class ListProgram(CtaProgram):
    """A program of a CTA with a list. `SelectPlan` has the layout of the scratch.

    Variables: `n` is the number of entries. All entries have keys of at least `floor`. Few elements have keys above
    `greatest`, the greatest key of the sample.
    """

    def __init__(self, plan: SelectPlan, dtype):
        super().__init__(plan.threads // LANES, plan.ctas)
        self.plan, self.element = plan, Elements(dtype)
        self.list, self.scratch, self.part = self.operands("u32", "list", "scratch", "part")
        # The lower half of a 16-bit key is ~(number of the entry * unit), so that ties differ.
        self.unit = 1 << 16 - (plan.capacity - 1).bit_length() if self.element.halves else 1
        self.sums, self.n = self.var(self.scratch), self.var(0, "u32")
        buckets, each = self.scratch + plan.histogram, plan.buckets // plan.threads
        self.histogram = Histogram(self, buckets, each, self.sums, self.scratch + plan.picked)
        self.lowest, self.highest = lowest_key(dtype), ~lowest_key(dtype)
        self.floor, self.greatest = self.var(self.lowest, "s32"), self.var(self.highest, "s32")

    def entry(self, number: Value) -> Value:
        return self.at(self.list, number, ENTRY_BYTES)

    def key(self, word: Value, number: Value) -> Value:
        """Returns the key that decides whether an entry wins, given its number times `unit`.

        For 16-bit dtypes the lower half falls with the number. So all keys differ, and the first of several ties wins.
        """
        if not self.element.halves:
            return word
        return self.bitwise3(lambda a, b, upper: a & upper | ~b & ~upper, word, number, ~0xFFFF)

    def key_at(self, sort_key: Value, lower: int) -> Value:
        """Returns the key of an entry; `lower` is its lower half for 16-bit dtypes."""
        return sort_key << 16 | lower if self.element.halves else sort_key

    def visit(self, see: Callable[[Value, Value], None]) -> None:
        """Calls see(key, number) for each entry, with its number times `unit`, and for others of the lowest key."""
        pairs = 2 * self.plan.threads  # entries that all threads load together
        with self.each(self.thread * 2, self.n, 2 * pairs) as entry:
            number = (entry * self.unit).bits("s32")
            for first in (0, pairs):
                words = [self.var(_LOWEST_WORD, "s32"), *map(self.fresh, ("u32", "s32", "u32"))]
                inside = entry + first < self.n if first else None
                self.load_into(words, self.entry(entry), offset=ENTRY_BYTES * first, when=inside)
                words[2] = self.select(entry + (first + 1) < self.n, words[2], _LOWEST_WORD)
                for i in (0, 1):
                    own = number + (first + i) * self.unit
                    see(self.key(words[2 * i], own), own)

    def scan_warps(self, upto: Value) -> tuple[Value, Value]:
        sums = self.lower_warps(upto, self.sums)
        self.update(self.sums, "xor", _TOGGLE)  # another warp may still read these
        return sums

    def find(
        self, visit: Callable[[Callable], Any], low: Value, high: Value, rank: Value, enough: Value
    ) -> tuple[KeyRange, Value, Value]:
        """Returns a range with the key of a rank among keys from `low` to `high`, and the results of `find_rank`.

        visit(see) calls see(key) for each key, and maybe for lower ones than `low`. Every key is counted, since a
        condition would cost three more instructions.
        """
        keys = KeyRange(self, high, low)

        def count(bucket_of):
            def see(key):
                bucket, _ = bucket_of(key)
                self.histogram.count(self.min(bucket, self.plan.buckets))

            visit(see)

        return keys, *find_rank(self.histogram, keys, rank, enough, count)

    def last_key(self) -> tuple[KeyRange, Value, Value]:
        """Returns a range that exactly k entries reach, or a single key; how many are above it, and reach it."""
        rank, high = self.var(self.plan.k, "u32"), self.var(self.key_at(self.greatest, 0xFFFF))

        def visit(see):
            self.visit(lambda key, _: see(self.min(key, high)))

        with self.loop() as leave:
            found, above, reach = self.find(visit, self.key_at(self.floor, 0), high, rank, rank)
            # Keys above `high` counted as `high`. So if the range contains `high`, it may be wrong.
            leave((found.high < high) | high.equals(MAGNITUDE))
            self.set(high, MAGNITUDE)
        return found, above, reach

    def compact(self, put: Callable[..., None]) -> None:
        """Passes the k best of more than k entries to put(number, word, index, when), in the same order.

        `number` is the entry's new place, not after its old one. All threads have read the entries up to there.
        """
        found, above, reach = self.last_key()
        # Entries of the least key win up to number `last`.
        least, last = found.least(), self.var(self.n.bits("s32"))
        if not self.element.halves:
            with self.when(reach > self.plan.k):  # rare
                ties = self.plan.k - above

                def visit(see):
                    self.visit(lambda own, number: see(self.select(own.equals(least), ~number, _LOWEST_WORD)))

                tied, *_ = self.find(visit, ~self.n.bits("s32"), self.var(-1, "s32"), ties, ties)
                self.set(last, ~tied.least())
        kept, lower_lanes = self.var(0, "u32"), self.special("lanemask_lt")
        with self.each(0, self.n, _ENTRIES * self.plan.threads) as first:
            number, entries = first + self.warp * (_ENTRIES * LANES) + self.lane, []
            of_key = (number * self.unit).bits("s32")
            for i in range(_ENTRIES):
                word, index = self.var(_LOWEST_WORD, "s32"), self.fresh("s32")
                exists, offset = number + LANES * i < self.n, ENTRY_BYTES * LANES * i
                self.load_into([word, index], self.entry(number), offset=offset, when=exists)
                own = of_key + LANES * i * self.unit
                key = self.key(word, own)
                wins = key >= least
                if not self.element.halves:
                    wins = wins & ((key > least) | (own <= last))
                of_warp = self.ballot(wins)
                entries.append((word, index, wins, of_warp, self.count_ones(of_warp)))
            lower, all_ = self.scan_warps(self.reduce("add", [count for *_, count in entries]))
            to = kept + lower
            for word, index, wins, of_warp, count in entries:  # now all have read their entries
                put(to + self.count_ones(of_warp & lower_lanes), word, index, when=wins)
                to = to + count
            self.increase(kept, all_)
        self.set(self.floor, self.max(self.floor, least >> 16 if self.element.halves else least))

    def compact_list(self) -> None:
        self.compact(lambda to, *entry, when: self.store(self.entry(to), *entry, when=when))
        self.barrier()
        self.set(self.n, self.plan.k)

    def gather(self) -> None:
        """Appends the lists of other CTAs to the list of CTA 0, as many at a time as fit, and keeps the k best."""
        here, exists = self.scratch + self.plan.counts, self.lane < self.ctas
        gathered = self.at(self.scratch + self.plan.gathered, self.lane, 4)
        self.store(here, self.n, when=self.thread.equals(0))
        self.sync_cluster()
        with self.when(self.warp.equals(0)):
            (count,) = self.of_cta(here, self.lane, "u32", when=exists)
            self.store(gathered, count, when=exists)
        self.barrier()
        counts = self.load(gathered, "u32", when=exists, default=0)  # of the CTA with the lane's number
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
