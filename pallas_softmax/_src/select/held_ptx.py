"""The selection from a row that a CTA holds in registers. It finds the last winner exactly, without a sample.

    read      the thread's words, as distances of keys from the highest key: the best element is at the least distance
    search    a histogram of distances finds the limit: the k-th least distance, or one just after k elements. The next
              round divides the bucket that holds it. Usually 16-bit rows take one round, and float32 rows take two
    ties      if more than k elements are within the limit: counts of ties in each vector find the vector with the last
              tie that wins
    list      each thread has a bit for each of its elements. A prefix sum over the threads says where its winners go
    write     the list: the winners of thread 0, then of thread 1, and so on

A histogram has a bucket for each vector of the row, so the search for ties is a round like the others. `used` vectors
of a thread have elements of the row; so the work falls with the row's length. A row of at most k elements needs no
search.
"""

from collections.abc import Iterator

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, find_rank
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.select.list_ptx import ENTRY_BYTES
from pallas_softmax._src.select.plan import SelectPlan
from pallas_softmax._src.select.stream_ptx import SelectProgram

# Distances of the first round, at most: 8 binades.
_GUESS = {"bf16": 2**10, "f16": 2**13, "f32": 2**26}


class HeldRowProgram(SelectProgram):
    """The program. Elements at a distance below `limit` win, and the first `ties` of those at it."""

    def __init__(self, plan: SelectPlan, dtype, fill: int):
        super().__init__(plan, dtype, False, fill)
        # A short row has fewer vectors in each thread, not fewer threads.
        used = (self.vectors + (plan.threads - 1)) >> log2(plan.threads)
        # The shuffle hides a constant. ptxas would compute addresses ahead, in registers that other CTAs need.
        self.used = self.shuffle(used, "idx", 0)
        self.thread_first = self.warp * (self.used * LANES) + self.lane
        self.limit, self.ties = self.var(self.element.all_ones, "u32"), self.var(0, "u32")
        self.pair = "u16x2" if self.element.halves else "u32"

    def vectors_of(self, words: list[Value]) -> Iterator[tuple[list[Value], Value]]:
        """Yields the words and the number of each vector j. The caller's instructions run only if `used` > j."""
        first = self.shuffle(self.thread_first, "bfly", 0)  # the same number, hidden like `used`
        for j in range(self.loads):
            with self.when(self.used > j):
                yield words[4 * j : 4 * j + 4], first + LANES * j

    def read_row(self) -> list[Value]:
        """Returns the thread's words, as distances from the highest key; all ones where there is no element."""
        words = [self.fresh("s32") for _ in range(4 * self.loads)]
        vectors = [self.thread_first + LANES * j for j in range(self.loads)]
        for word in words:
            self.set(word, -1)
        whole = self.max((self.whole_to - self.whole_from).bits("s32"), 0).bits("u32")
        for j, vector in enumerate(vectors):
            is_whole = (self.used > j) & (vector - self.whole_from < whole)
            self.load_into(words[4 * j : 4 * j + 4], self.vector(vector), when=is_whole)
        with self.when(whole.differs(self.vectors)):
            for own, vector in self.vectors_of(words):
                with self.when((vector - self.whole_from >= whole) & (vector < self.vectors)):
                    self.read_elements(own, self.vector(vector), self.index(vector))
        for word in words:
            sign = word.bits("s16x2" if self.element.halves else "s32").sign().bits("s32")
            self.set(word, self.bitwise3(lambda w, s, m: w ^ (~s & m), word, sign, self.element.flip))
        return words

    def search(self, words: list[Value]) -> None:
        """Sets the limit and the number of ties, so that k elements win. The row has more than k elements."""
        k, halves, pair = self.plan.k, self.element.halves, self.pair
        # The best element, and the worst of every fourth word, give the first range.
        best = self.reduce("min", [word.bits(pair) for word in words]).bits("u32")
        worst = self.reduce("max", [word.bits(pair) for word in words[::4]]).bits("u32")
        if halves:
            best, worst = self.min(best & 0xFFFF, best >> 16), self.max(worst & 0xFFFF, worst >> 16)
        of_warp = [self.over_lanes("min", best), self.over_lanes("max", worst)]
        bests, worsts = self.of_warps(of_warp, self.scratch + self.plan.extremes, lane=0)
        high = self.highest - self.reduce("min", bests).bits("s32")
        low = self.highest - self.reduce("max", worsts).bits("s32")
        found, is_first = KeyRange(self, high, low), self.var(True, "pred")
        # The limit may be below this range. So its buckets are whole, and no element below it counts in one of them.
        whole = (self.var(2, "u32") << self.highest_bit(found.extent | 1)) - 1
        self.set(found.extent, self.min(whole, (high - self.lowest).bits("u32")))
        # Fewer than half of the elements win: usually they are among the positive ones, in 8 binades.
        self.update(found.extent, "min", _GUESS[self.element.name] - 1, when=self.length > 9 * k // 4)

        def count(bucket_of):
            self.count_buckets(words, found, is_first)
            self.set(is_first, False)

        with self.loop() as leave:
            above, reach = find_rank(self.histogram, found, k, k, count)
            leave(reach.differs(0))
            self.set(found.high, high)
            self.set(found.extent, (high - self.lowest).bits("u32"))
        all_win = reach.equals(k)
        last = self.select(all_win, found.least() - 1, found.high)
        self.set(self.limit, (self.highest - last).bits("u32"))
        has_ties = ~all_win & last.differs(self.lowest)  # the lowest key never wins
        self.set(self.ties, self.select(has_ties, k - above, 0))

    def count_buckets(self, words: list[Value], keys: KeyRange, is_first: Value) -> None:
        """Counts one round of `search`, all elements in buckets of 2^shift distances.

        Elements beyond the buckets are counted in words of their lanes, which nothing reads. The distance from the
        range of a better element wraps around, and is greater than all others. So no such element counts before the
        rank. Later rounds have few elements to divide. They skip each vector that has none in the range.
        """
        pair, others = self.pair, self.lane + self.plan.buckets
        minus = (keys.high - self.highest).bits("u32")
        if self.element.halves:
            minus = minus & 0xFFFF | minus << 16
        for skips in (True, False):
            with self.when(~is_first if skips else is_first):
                for own, _ in self.vectors_of(words):
                    with self.block() as done:
                        far = [self.op("add", pair, word.bits(pair), minus.bits(pair)) for word in own]
                        if skips:
                            least = self.reduce("min", far).bits("u32")
                            if self.element.halves:
                                least = self.min(least & 0xFFFF, least >> 16)
                            done(least > keys.extent)
                        for x in far:
                            x = x.bits("u32")
                            for distance in (x & 0xFFFF, x >> 16) if self.element.halves else (x,):
                                self.histogram.count(self.min(distance >> keys.shift, others))

    def bits_of(self, words: list[Value], relation: str) -> list[Value]:
        """Returns a bit for each of the thread's elements: whether its distance is "lt" or "le" the limit."""
        bits = [self.var(0, "u32") for _ in range(-(-self.loads * self.vec // LANES))]
        below = 0xFFFF if relation == "le" else 0  # of a 16-bit element: its lower half does not count
        limit = self.limit << 16 | below if self.element.halves else self.limit
        for j, (own, _) in enumerate(self.vectors_of(words)):
            for i, distance in enumerate(self.element_words(own)):
                word, bit = divmod(j * self.vec + i, LANES)
                reaches = self.compare(distance.bits("u32"), relation, limit)
                self.update(bits[word], "or", 1 << bit, when=reaches)
        return bits

    def first_ties(self, words: list[Value], winners: list[Value]) -> None:
        """Adds the first ties at the limit to `winners`, bits of the elements of each thread."""
        ties = [upto ^ below for upto, below in zip(self.bits_of(words, "le"), winners)]
        fields = [divmod(j * self.vec, LANES) for j in range(self.loads)]  # of each vector
        masks = [((1 << self.vec) - 1) << bit for _, bit in fields]
        for (_, vector), (word, _), mask in zip(self.vectors_of(words), fields, masks):
            self.store(self.at(self.histogram.address, vector, 4), self.count_ones(ties[word] & mask))
        self.barrier()
        # Vectors after the last one keep no tie. That one keeps its first `rest` ties: the others are the highest bits.
        last_vector, rest, *_ = self.histogram.pick(self.ties)
        for (_, vector), (word, _), mask in zip(self.vectors_of(words), fields, masks):
            self.update(ties[word], "and", 0xFFFFFFFF ^ mask, when=vector > last_vector)
            with self.when(vector.equals(last_vector)):
                with self.loop() as leave:
                    own = ties[word] & mask
                    leave(self.count_ones(own) <= rest)
                    self.update(ties[word], "xor", self.var(1, "u32") << self.highest_bit(own))
        for own, more in zip(winners, ties):
            self.update(own, "or", more)

    def list_winners(self, words: list[Value], winners: list[Value]) -> None:
        before, upto = self.scan(self.reduce("add", [self.count_ones(bits) for bits in winners]))
        lower, added = self.scan_warps(upto)
        entry = self.var(self.entry(lower + before))
        for word in words:
            self.update(word, "xor", self.element.flip)  # the key
        for j, (own, vector) in enumerate(self.vectors_of(words)):
            index = self.index(vector)
            for i, key in enumerate(self.element_words(own)):
                word, bit = divmod(j * self.vec + i, LANES)
                wins = (winners[word] & 1 << bit).differs(0)
                self.store(entry, key, index + i, when=wins)
                self.increase(entry, ENTRY_BYTES, when=wins)
        self.set(self.n, added)
        self.barrier()

    def select_row(self) -> None:
        self.histogram.clear()
        words = self.read_row()
        with self.when(self.length > self.plan.k):
            self.search(words)
        winners = self.bits_of(words, "lt")
        with self.when(self.ties > 0):
            self.first_ties(words, winners)
        self.list_winners(words, winners)
