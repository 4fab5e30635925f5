"""Inline PTX that selects the k best elements of a row in one read of the row, and may put them in order.

    sample     of m sampled elements, about k * m / n are winners. So a sampled element of a somewhat greater rank
               (1 is the largest) bounds the winners from below, and few more than k of all n elements reach it
    stream     the CTA reads its part of the row block by block, and lists the elements above the `floor`, a key that
               is at first just below the bound
    compact    if the list is full: keep its k best (by `find_rank`), and raise the floor to the least of them
    gather     the other CTAs of the cluster append their lists to the list of CTA 0, and end. CTA 0 compacts if needed
    write      CTA 0 writes the k best of the list, as they are listed, or in the order of top-k (`plan.sorted`)

    row        3 1 8 2 | 9 7 0 6 | 7 5 7 4      k = 3, blocks of 4, the floor is 5, room for 4 entries
    list       8         8 9 7 6                full
    compacted            8 9 7                  the floor becomes 7: another 7 would lose against the listed one
    list                           8 9 7

Every CTA samples the whole row, so that all have the same bound. A row that fits in the list needs no sample.

If many sampled elements equal the bound, the floor is the bound itself. Then none of its ties are listed. If fewer than
k entries result, a second sweep over the whole row adds ties. If the list still has fewer than k entries, the sample
misled, and the row is streamed again with the lowest floor. CTA 0 does both alone.

Elements with the lowest key, a NaN with all bits set, are never listed. Masked elements, and elements outside of the
row, get this key. If the final list has fewer than k entries, the lowest indices that it lacks fill the results. The
result is exact for every row; rows in unusual orders take more time.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.elements import MAGNITUDE
from pallas_softmax._src.gpu.ptx.ranking import CandidateList, candidate_of
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.select.list_ptx import ENTRY_BYTES, ListProgram
from pallas_softmax._src.select.plan import SelectPlan

# Bytes of `prmt`: the lower half of a word above zeros; the upper halves of two words.
_LOWER_TO_UPPER, _UPPER_HALVES = 0x1044, 0x7632
_SECTOR_VECTORS = 4  # neighbouring vectors of the sample: 64 bytes, which device memory reads at once


class SelectProgram(ListProgram):
    """The program. <part> is the CTA's number in its cluster, and <mask_row> the row of the mask."""

    def __init__(self, plan: SelectPlan, dtype, masked: bool, fill: int):
        super().__init__(plan, dtype)
        self.masked, self.row = masked, self.operand("row", "u32")
        self.fill_word = fill ^ (fill >> 31 & MAGNITUDE)  # the word of an entry that fills
        itemsize = self.element.itemsize
        self.vec = ACCESS_BYTES // itemsize
        self.fields = 2 if self.element.halves else 4  # see `count`
        self.loads = plan.thread_bytes // ACCESS_BYTES  # vectors of a thread in a block
        self.block_vectors = plan.threads * self.loads
        length = self.max(self.operand("length", "s32"), 0)
        self.length = self.min(length, plan.vocab).bits("u32")
        # A vector is 16 bytes. Vector 0 has the start of the row, after `lead` elements of the row before.
        start = self.operand("x", "u64") + self.multiply_wide(self.row, plan.vocab * itemsize)
        self.base = start & -ACCESS_BYTES
        self.lead = (self.convert(start, "u32") & (ACCESS_BYTES - 1)) >> log2(itemsize)
        vectors = (self.length + self.lead + (self.vec - 1)) >> log2(self.vec)
        self.vectors = vectors  # of the row; this CTA has those from `first` to `end`
        self.first, end = ((self.part + i) * vectors >> log2(plan.ctas) for i in range(2))
        self.end = self.var(end)
        # The vectors from `whole_from` to `whole_to` have elements of the row only.
        self.whole_from = (self.lead + (self.vec - 1)) >> log2(self.vec)
        self.whole_to = self.var(self.min(self.whole_vectors(), end))
        # The thread's first vector in a block.
        self.thread_first = self.warp * (LANES * self.loads) + self.lane

    def whole_vectors(self) -> Value:  # before the first one with elements beyond the row
        return (self.length + self.lead) >> log2(self.vec)

    def vector(self, number: Value) -> Value:
        return self.base + self.multiply_wide(number, ACCESS_BYTES)

    def index(self, vector: Value) -> Value:  # of its first element, in the row
        return vector * self.vec - self.lead

    def prefetch(self, at: Value, blocks: int) -> None:
        number = self.max((self.whole_to - at).bits("s32"), 0)
        size = self.min(number, blocks * self.block_vectors) * ACCESS_BYTES
        self += f"@{self.thread.equals(0) & (size > 0)} cp.async.bulk.prefetch.L2.global [{self.vector(at)}], {size};"

    def read_keys(self, words: list[Value], at: Value) -> None:
        """Loads the thread's words of the block at vector `at`, and turns them into sort keys if the floor is negative.

        Otherwise this is not needed: the sort keys of positive elements are their bits, and the bits of negative ones
        are below the floor, like their sort keys.
        """
        first = at + self.thread_first
        address = self.vector(first)
        with self.block() as done:
            if not self.masked:
                with self.when((at >= self.whole_from) & (at + self.block_vectors <= self.whole_to)):
                    for j in range(self.loads):
                        vector = words[4 * j : 4 * j + 4]
                        self.load_into(vector, address, offset=ACCESS_BYTES * LANES * j)
                    done()
            self.read_checked(words, [first + LANES * j for j in range(self.loads)])
        kind = "s16x2" if self.element.halves else "s32"
        with self.when(self.floor < 0):
            for word in words:
                self.update(word, "xor", word.bits(kind).sign().bits("s32") & self.element.flip)

    def read_checked(self, words: list[Value], vectors: list[Value]) -> None:
        """Loads vectors. Elements outside of the part, and masked ones, become the lowest key.

        A vector with elements outside of the row is read element by element, since the array may end there.
        """
        parts = []
        for word in words:
            self.set(word, -1)
        for j, vector in enumerate(vectors):
            own, address = words[4 * j : 4 * j + 4], self.vector(vector)
            inside, index = vector < self.end, self.index(vector)
            is_whole = inside & (index < self.length) & (index + (self.vec - 1) < self.length)
            self.load_into(own, address, when=is_whole)
            parts.append((own, address, index, inside, inside & ~is_whole))
        for own, address, index, _, is_cut in parts:  # after all whole ones, which arrive meanwhile
            with self.when(is_cut):
                self.read_elements(own, address, index)
        if self.masked:
            for own, _, index, inside, _ in parts:
                self.mask_elements(own, index, inside)

    def read_elements(self, words: list[Value], address: Value, index: Value) -> None:
        element, kind = self.element, "u16" if self.element.halves else "s32"
        lowest = element.all_ones if element.halves else -1
        found = []
        for e in range(self.vec):
            byte, within = e * element.itemsize, index + e < self.length
            found.append(self.load(address, kind, offset=byte, when=within, default=lowest))
        if element.halves:
            found = [self.join(found[e], found[e + 1], "s32") for e in range(0, self.vec, 2)]
        for word, bits in zip(words, found):
            self.set(word, bits)

    def mask_elements(self, words: list[Value], index: Value, inside: Value) -> None:
        mask, mask_row = self.operand("mask", "u64"), self.operand("mask_row", "u32")
        for e in range(self.vec):
            byte, column = e * self.element.itemsize, index + e
            within = inside & (index + e < self.length)
            at, keep = mask + self.multiply_wide(mask_row, self.plan.vocab), self.var(1, "u8")
            self.load_into([keep], at + self.convert(column, "u64"), when=within)
            masked = self.convert(keep, "u32").equals(0)
            self.update(words[byte // 4], "or", self.element.all_ones << 8 * (byte % 4), when=masked)

    def element_words(self, words: list[Value]) -> Iterator[Value]:
        """Yields a word for each element. The upper half is a 16-bit element, and the lower half anything."""
        for word in words:
            if self.element.halves:
                yield word << 16
            yield word

    def sample(self) -> None:
        """Sets the floor to just below a sampled element that few more than k elements should reach."""
        plan, vectors = self.plan, []
        sampled_sectors = plan.threads * plan.sample_vectors // _SECTOR_VECTORS
        # Sampled sectors have equal distances. They are of the whole row, and have elements of the row only.
        sectors = self.whole_vectors() - self.whole_from >> log2(_SECTOR_VECTORS)
        words = [self.fresh("s32") for _ in range(4 * plan.sample_vectors)]
        for i in range(plan.sample_vectors):
            number = (self.thread >> log2(_SECTOR_VECTORS)) + i * (plan.threads // _SECTOR_VECTORS)
            first = (number * sectors >> log2(sampled_sectors)) << log2(_SECTOR_VECTORS)
            vectors.append((first | self.thread & (_SECTOR_VECTORS - 1)) + self.whole_from)
            self.load_into(words[4 * i : 4 * i + 4], self.vector(vectors[i]))
        if self.masked:
            for i, vector in enumerate(vectors):
                self.mask_elements(words[4 * i : 4 * i + 4], self.index(vector), self.var(True, "pred"))
        a, b = plan.rank_coefficients(self.element.itemsize)
        rank = self.convert(self.divide(self.var(a, "f32"), self.convert(self.length, "f32")) + b, "u32")
        rank = self.min(rank, plan.sampled(self.element.itemsize))  # a length far below `vocab` may ask for more
        keys = self.element.keys(words)
        largest, least = self.reduce("max", keys), self.reduce("min", keys)
        # Sets `low` to a high key that at least `rank` sampled elements reach. Each group of threads has an element
        # that reaches the least of the groups' largest elements. So `rank` groups are enough, and larger groups give
        # a higher key.
        low = self.var(self.select(rank <= plan.threads, largest, least))
        for bit in range(log2(LANES)):
            self.update(low, "max", self.shuffle(low, "bfly", 1 << bit), when=rank <= plan.threads >> bit + 1)
        of_warp = [self.over_lanes("min", low), self.over_lanes("max", largest)]
        lows, highs = self.of_warps(of_warp, self.scratch + plan.extremes, lane=0)
        low, high = self.reduce("min", lows), self.reduce("max", highs)
        self.set(self.greatest, high)
        enough = rank + (rank >> 3)  # up to an eighth more, so that fewer rounds are needed
        found, _, reach = self.find(lambda see: [see(key) for key in keys], low, high, rank, enough)
        self.set(self.floor, found.least())
        self.increase(self.floor, -1, when=(reach <= enough) & (self.floor > self.lowest))

    def stream(self, *, ties: bool = False) -> None:
        """Lists the elements of the part above the floor; or `ties` of the floor, until there are k entries."""
        at, words = self.var(self.first), [self.fresh("s32") for _ in range(4 * self.loads)]
        with self.loop() as leave:
            leave(at >= self.end)
            if ties:
                leave(self.n >= self.plan.k)
            self.read_keys(words, at)
            before, upto = self.count(words, ties)
            lower, added = self.scan_warps(self.total(upto))
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

    def comparisons(self, words: Sequence[Value], ties: bool, *, again: bool) -> list[Callable[[], Value]]:
        """Returns a function for each element: whether it is above the floor, or equal to it if `ties`.

        `again` compares by other instructions. Otherwise ptxas keeps the results of the first time in registers.
        """
        halves, comparisons = self.element.halves, []
        limit = self.floor << 16 | 0xFFFF if halves else self.floor
        if again and not ties:
            limit = limit + 1  # does not overflow if any element is above the limit
        for word in words:
            elements = [word]
            if halves:
                low = word << 16 if again else self.write("prmt.b32", "s32", word, 0, _LOWER_TO_UPPER)
                elements = [x | 0xFFFF if ties else x for x in (low, word)]
            for x in elements:
                compare = x.equals if ties else x.__ge__ if again else x.__gt__
                comparisons.append(functools.partial(compare, limit))
        return comparisons

    def count(self, words: Sequence[Value], ties: bool = False) -> tuple[list[Value], list[Value]]:
        """Returns how many elements are above the floor, or equal to it if `ties`: in lower lanes, and up to this lane.

        The numbers have `fields` fields for as many vectors of a thread: 4 with 8 bits, or 2 with 16 bits.
        """
        counts = [self.var(0, "u32") for _ in range(-(-self.loads // self.fields))]
        for j in range(self.loads):
            one = 1 << j % self.fields * (32 // self.fields)
            for compare in self.comparisons(words[4 * j : 4 * j + 4], ties, again=False):
                self.increase(counts[j // self.fields], one, when=compare())
        before, upto = zip(*map(self.scan, counts))
        return [*before], [*upto]

    def field(self, counts: list[Value], j: int) -> Value:
        number, (i, j) = self.fields, divmod(j, self.fields)
        bits = 32 // number
        shifted = counts[i] >> bits * j if j else counts[i]
        return shifted & ((1 << bits) - 1) if j < number - 1 else shifted

    def total(self, counts: list[Value]) -> Value:
        return self.reduce("add", [self.field(counts, j) for j in range(self.loads)])

    def append(self, words, at: Value, n: Value, before, upto, ties: bool = False) -> None:
        """Writes the warp's elements above the floor, or its `ties`, to entries n, n + 1, ... Ties end at entry k."""
        of_warp = [self.shuffle(counts, "idx", LANES - 1) for counts in upto]
        own = [a - b for a, b in zip(upto, before)]
        first, end = self.index(at + self.thread_first), self.list + ENTRY_BYTES * self.plan.k
        for j in range(self.loads):
            entry, index = self.var(self.entry(n + self.field(before, j))), first + LANES * self.vec * j
            with self.when(self.field(own, j).differs(0)):
                vector = words[4 * j : 4 * j + 4]
                elements = [*self.element_words(vector)]
                comparisons = self.comparisons(vector, ties, again=True)
                for i, (word, compare) in enumerate(zip(elements, comparisons)):
                    is_listed = compare()
                    self.store(entry, word, index + i, when=is_listed & (entry < end) if ties else is_listed)
                    self.increase(entry, ENTRY_BYTES, when=is_listed)
            n = n + self.field(of_warp, j)

    def append_by_warps(self, words, at: Value) -> None:
        """Appends a block warp by warp, because the list has no room for all. Compacts a full list."""
        with self.each(0, self.warps) as turn:
            of_turn = self.at(self.scratch + self.plan.turns, turn, 4)
            with self.when(self.n > self.plan.room - self.plan.warp_elements(self.element.itemsize)):
                self.compact_list()
                self.read_keys(words, at)  # again, since registers are few
            with self.when(self.warp.equals(turn)):
                before, upto = self.count(words)
                self.append(words, at, self.n, before, upto)
                self.store(of_turn, self.total(upto), when=self.lane.equals(LANES - 1))
            self.barrier()
            self.increase(self.n, self.load(of_turn, "u32"))

    # --- The results

    def result_writer(self) -> Callable[..., None]:
        """Returns put(number, key, index, when), which writes a result; a 16-bit key is a word's lower half."""
        k, itemsize = self.plan.k, self.element.itemsize
        values = self.operand("values", "u64") + self.multiply_wide(self.row, k * itemsize)
        indices = self.operand("indices", "u64") + self.multiply_wide(self.row, k * 4)

        def put(number, key, index, when=None):
            bits = self.element.key(key.bits("s32"))  # the key of a key has the bits of the element
            value = self.convert(bits.bits("u32"), "u16") if self.element.halves else bits
            self.store(values + self.multiply_wide(number, itemsize), value, when=when)
            self.store(indices + self.multiply_wide(number, 4), index, when=when)

        return put

    def key_of(self, word: Value) -> Value:
        return word >> 16 if self.element.halves else word

    def write_results(self) -> None:
        """Writes the k best of the list. Fillings follow if the list has fewer entries."""
        k, put = self.plan.k, self.result_writer()
        with self.block() as done:
            if not self.plan.in_registers:  # those are at most k
                with self.when(self.n > k):
                    if self.plan.sorted:
                        self.compact_list()
                    else:
                        self.compact(lambda to, word, index, when: put(to, self.key_of(word), index, when))
                        done()
            listed = self.var(self.n)
            with self.when(self.n < k):
                self.fill_list()
            if not self.plan.sorted:
                self.write_list()
                done()
            with self.each(listed + self.thread, k, self.plan.threads) as number:
                word, index = self.load_vector(self.entry(number), "s32", 2)
                put(number, self.key_of(word), index)
            self.set(self.n, listed)
            self.rank(put)

    def fill_list(self) -> None:
        """Fills the list up to k entries with the lowest indices that it lacks."""
        k = self.plan.k
        with self.each(self.n + self.thread, k, self.plan.threads) as number:
            self.store(self.entry(number), self.var(self.fill_word, "s32"), number)  # right if all are listed
        with self.when(self.n.differs(self.length)):
            with self.each(self.thread, self.n, self.plan.threads) as number:
                index = self.load(self.entry(number), "u32", offset=4)
                bit = self.var(1, "u32") << (index & (LANES - 1))
                self.add_to(self.at(self.histogram.address, index >> 5, 4), bit, when=index < k)
            self.barrier()  # now the histogram has a bit for each listed index below k
            words = self.histogram.own()
            before, upto = self.scan(self.reduce("add", [LANES - self.count_ones(word) for word in words]))
            lower, _ = self.scan_warps(upto)
            number = self.var(self.n + lower + before)
            index = self.var(self.thread * (LANES * self.histogram.each))
            for word in words:
                with self.each(0, LANES) as bit:
                    lacks = (word >> bit & 1).equals(0) & (number < k)
                    self.store(self.entry(number), index, offset=4, when=lacks)
                    self.increase(number, 1, when=lacks)
                    self.increase(index, 1)
        self.set(self.n, k)
        self.barrier()

    def write_list(self) -> None:
        """Writes the list, four entries of a thread at once."""
        k, itemsize = self.plan.k, self.element.itemsize
        values = self.operand("values", "u64") + self.multiply_wide(self.row, k * itemsize)
        indices = self.operand("indices", "u64") + self.multiply_wide(self.row, k * 4)
        width = math.gcd(k, 4)
        with self.each(self.thread * width, k, self.plan.threads * width) as number:
            entries = self.load_vector(self.entry(number), "s32", 2 * width)
            words = entries[::2]
            if self.element.halves and width > 1:
                pairs = zip(words[::2], words[1::2])
                words = [self.write("prmt.b32", "s32", *pair, _UPPER_HALVES) for pair in pairs]
            bits = self.elements(words)
            if self.element.halves and width == 1:
                bits = [self.convert(bits[0].bits("u32") >> 16, "u16")]
            self.store(values + self.multiply_wide(number, itemsize), *bits)
            self.store(indices + self.multiply_wide(number, 4), *entries[1::2])

    def elements(self, keys: list[Value]) -> list[Value]:
        kind = "s16x2" if self.element.halves else "s32"
        return [key ^ (key.bits(kind).sign().bits("s32") & self.element.flip) for key in keys]

    def rank(self, put: Callable[..., None]) -> None:
        self.barrier()  # all have read the list
        with self.each(self.thread, self.plan.ranked, self.plan.threads) as number:
            candidate = self.var(0, "u64")
            with self.when(number < self.n):
                word, index = self.load_vector(self.entry(number), "s32", 2)
                self.set(candidate, candidate_of(self, self.key_of(word), index))
            self.store(self.entry(number), candidate)
        self.barrier()
        room = self.list, self.n, self.plan.ranked, self.list + ENTRY_BYTES * self.plan.ranked
        sums = self.scratch + self.plan.extremes
        CandidateList(self, *room, sums, put, self.plan.k, self.element.dtype, self.plan.vocab).rank()
