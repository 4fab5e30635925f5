"""Inline PTX that puts the candidates in order, with all threads of a CTA.

`rank` selects counting, sorting or buckets. For buckets, the range of the candidates is cut into buckets of equal
length, one for each entry of a full list. Candidates are counted by bucket. A running sum of the counts is the rank at
which each bucket starts. Within a bucket, each candidate is compared with all others. An example with keys from 9 to 1
and only 4 buckets:

    list       3  8  1  9  5  2  9'      in any order
    bucket     2  0  3  0  1  3  0       (9 - key) / 2.25
    counts     3  1  1  2
    starts     0  3  4  5
    grouped    8  9  9' | 5 | 3 | 1  2   in any order within a bucket
    ranked     9  9' 8  | 5 | 3 | 2  1

If the candidates are spread over the buckets, the time is linear in their number. If one bucket has too many of them,
`rank` sorts all candidates, or compares each with all. To spread the candidates, the buckets cut the range of their
distances from the best one:

  * A distance is a difference of keys, and keys grow like logarithms of the elements. In a range around 0, most keys
    belong to tiny numbers. So if both signs occur, magnitudes below 2^-16 of the largest one count as 0.
  * Many 16-bit candidates have the same key, so the index counts as well: V * difference of keys + index.

A candidate is an element that may be among the k best of its row. Its entry in the list has 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is an int32 that orders elements like lax.top_k (`sort_keys.py`). With its sign bit inverted, it has the same
order as an unsigned number. The index counts in the row. A lower index has a larger complement. So an entry, read as
one unsigned 64-bit number, orders the candidates: the larger number is the better candidate, and among equal keys the
lower index wins. No two candidates are equal. An empty entry is 0, and lower than any candidate.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP
from pallas_softmax._src.gpu.ptx import networks
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Condition, Value

CANDIDATE_BYTES, POSITION_BYTES = 8, 2
LOADED_AT_ONCE = 8  # loads that a thread has in flight, not timed: fewer wait longer, more take registers
LOWEST_KEY = -(2**31)  # its only bit is the sign, which entries invert

# We kept no times for the limits of this file: take them as estimates.
_COUNTED = 96  # up to this many candidates, counting is faster than buckets
_COMPARED = 256  # up to this many candidates, counting is faster than sorting
_AT_ONCE = 4  # candidates that a thread compares with its own at once

# Wrong values of these cost time, never a winner.
_BATCH = 4  # candidates that a thread handles together, for buckets
_LOADED_AGAIN = 8  # up to so many counters of a thread are loaded twice: held, they would take registers of a CTA
_IN_BUCKET = 32  # with more candidates in one bucket, buckets are slower than counting and sorting
_OCTAVES = 16  # powers of two between the largest magnitude and the magnitudes that count as 0
_INDEX_BITS = 16  # bits of an index that count, so that a distance has 32

# For buckets, words have two 16-bit numbers, the upper half and the lower half:
#     of a candidate   | candidates counted before it in its bucket | number of its bucket    |
#     of a bucket      | candidates in the bucket                   | where the bucket starts |
_HALF, _LOWER = 16, 0xFFFF

_ZERO_KEY = 2**31  # the key of +0 in an entry; the key of -0 is one less
# Lowers a factor by more than three rounding errors of float32, 2^-23 each. Otherwise the last distance might get a
# bucket beyond the last one.
_ROUNDED_DOWN = 1 - 2.0**-20


def clear(p: CtaProgram, address: Value, size: int, counts: Value) -> None:
    """Sets a list of `size` bytes, a multiple of 2 KB, to 0, and the first two words of `counts`; in one warpgroup."""
    p.barrier()
    at, turn = p.at(address, p.thread, ACCESS_BYTES), p.var(p.thread)
    with p.repeat() as again:
        p.store(at, 0, 0, 0, 0)
        p.increase(at, ACCESS_BYTES * WARPGROUP)
        p.increase(turn, WARPGROUP)
        again(turn < size // ACCESS_BYTES)
    p.store(counts, 0, 0, when=p.thread.equals(0))
    p.barrier()


def candidate_of(p: Program, key: Value, index: Value) -> Value:
    return p.join(~index, key ^ LOWEST_KEY)


@dataclasses.dataclass(frozen=True)
class CandidateList:
    """A list of candidates in shared memory, and what ranks them."""

    p: CtaProgram
    address: Value  # of the first entry
    n: Value  # number of candidates; entries from number n on are empty
    capacity: int  # number of entries: a power of two, at least the threads of the CTA
    buckets: Value  # the address of scratch, one word for each entry
    sums: Value  # the address of two words for each warp; winners may overwrite them
    put: Callable[..., None]  # put(rank, key, index, when) writes the winner of a rank
    k: int  # number of winners
    dtype: Any  # dtype of the logits
    vocab: int | None  # an exclusive upper bound of the indices, or None

    def at(self, entry: Value) -> Value:
        return self.p.at(self.address, entry, CANDIDATE_BYTES)

    def load(self, address: Value, turns: range) -> list[Value]:
        """Loads the entries that are so many times a CTA's threads after an address."""
        stride = CANDIDATE_BYTES * self.p.threads
        return [self.p.load(address, "u64", offset=stride * turn) for turn in turns]

    def put_winner(self, winner: Value, rank: Value, when: Condition = None) -> None:
        wins = rank.bits("s32") < self.k
        low, high = self.p.split(winner)
        self.put(rank, high ^ LOWEST_KEY, ~low, wins if when is None else when & wins)

    def rank(self) -> None:
        """Writes the k best candidates in order. The number of candidates and their spread select the method:

        up to 96 candidates                counting
        more, at most 32 in each bucket    buckets
        more, over 32 in some bucket       counting if the list has 256 entries, sorting if it has more
        """
        p = self.p
        with p.block() as finish:
            with p.block() as count:
                count(self.n <= _COUNTED)
                with p.block() as crowded:
                    self._rank_by_buckets(otherwise=crowded)
                    finish()
                p.barrier()  # the winners may overwrite the sums, which other threads may still read
                if self.capacity > _COMPARED:
                    self._rank_by_sorting()
                    finish()
            self._rank_by_counting()
        p.barrier()

    def _rank_by_counting(self) -> None:
        """Ranks each candidate by counting the better ones, among the first n entries rounded up to four."""
        p, last = self.p, self.at(self.n)
        with p.each(p.thread, self.n, p.threads) as own:
            value = p.load(self.at(own), "u64")
            rank, at = p.var(0, "u32"), p.var(self.address)
            with p.repeat() as again:
                for other in p.load_vector(at, "u64", _AT_ONCE):
                    p.increase(rank, 1, when=other > value)
                p.increase(at, _AT_ONCE * CANDIDATE_BYTES)
                again(at < last)
            self.put_winner(value, rank)

    # --- Sorting

    def _rank_by_sorting(self) -> None:
        """Sorts all entries in registers by a bitonic sort, the largest first. A thread holds some neighbours.

        sort the values of each thread                            a run of one thread
        for run = 2, 4, ..., all threads:                         its halves are sorted, in opposite directions
            for stride = run / 2, ..., 2, 1 threads:
                exchange with thread ^ stride: the lower thread keeps the larger value of each pair
            sort the values of each thread, which are bitonic now

        Every other run is sorted in the opposite order: its values are complemented meanwhile.
        """
        p = self.p
        own = self.at(p.thread)
        # The initial order is free. Loads of entries that are a CTA's threads apart have no bank conflicts.
        values = self.load(own, range(self.capacity // p.threads))
        run = p.var(1, "u32")

        def set_values(new):  # complemented in odd runs
            ones = p.select((p.thread & run).differs(0), -1, 0, "u64")
            for value, new_value in zip(values, new):
                p.set(value, new_value ^ ones)

        set_values(values)
        set_values(networks.best(p, values, len(values)))
        with p.repeat() as next_run:
            p.set(run, run << 1)
            set_values(values)
            stride = p.var(run >> 1)
            with p.repeat() as next_stride:
                self._exchange(values, stride, own)
                p.set(stride, stride >> 1)
                next_stride(stride.differs(0))
            set_values(networks.sorted_bitonic(p, values))
            next_run(run < p.threads)
        for i, value in enumerate(values):
            entry = p.thread * len(values) + i
            self.put_winner(value, entry, when=entry < self.n)

    def _exchange(self, values: list[Value], stride: Value, own: Value) -> None:
        """Exchanges values with thread ^ stride. The lower thread keeps the larger value of each pair.

        Lanes exchange by shuffles, and warps through the list. `own` is the address of this thread's first entry.
        """
        p = self.p
        upper = (p.thread & stride).differs(0)

        def keep(value: Value, other: Value) -> None:
            p.set(value, p.select((value < other) ^ upper, other, value))

        with p.block() as exchanged:
            with p.block() as through_list:
                through_list(stride >= LANES)
                for value in values:
                    keep(value, p.shuffle(value, "bfly", stride))
                exchanged()
            p.barrier()
            for i, value in enumerate(values):
                p.store(own, value, offset=CANDIDATE_BYTES * p.threads * i)
            p.barrier()
            partner = self.at(p.thread ^ stride)
            for i, value in enumerate(values):
                keep(value, *self.load(partner, range(i, i + 1)))

    # --- Buckets

    def _rank_by_buckets(self, otherwise: Callable[[Value], None]) -> None:
        """Jumps out by otherwise(condition) where a bucket has too many candidates, with the list unchanged."""
        p = self.p
        each = self.capacity // p.threads
        mine = p.at(self.buckets, p.thread, 4 * each)  # the thread's counters
        p.store(mine, *[0] * each)
        values, greatest, least = self._load_and_bracket(each)
        distance, distances = self._distances(greatest, least)
        # The bucket is distance * factor / 2^32, where the factor is capacity * 2^32 / distances, but at most 2^32 - 1.
        reciprocal = p.op("rcp.approx.ftz", "f32", distances)
        factor = p.convert(reciprocal * (self.capacity * 2.0**32 * _ROUNDED_DOWN), "u32")
        bucket_words = self._count_in_buckets(values, distance, factor)
        self._start_buckets(mine, each, otherwise)
        self._group_by_bucket(values, bucket_words)
        # Neighbouring threads take neighbouring entries of the grouped list, and write neighbouring results.
        own = self.at(p.thread)
        for have, batch in self._batches(each):
            grouped = self.load(own, range(batch.start, batch.stop))
            words = [p.var(0, "u32") for _ in grouped]
            for has, value, word in zip(have, grouped, words):
                bucket = p.multiply_high(distance(value), factor)
                p.load_into([word], p.at(self.buckets, bucket, 4), when=has)
            self._rank_in_buckets(have, grouped, words)

    def _batches(self, each: int) -> Iterator[tuple[list[Value], slice]]:
        """Yields batches of a thread's `each` candidates: whether each candidate exists, and the batch as a slice.

        Work on one batch overlaps. All threads leave at the first batch that is empty for all of them.
        """
        p = self.p
        thread, n = p.thread.bits("s32"), self.n.bits("s32")
        with p.block() as leave:
            for first in range(0, each, _BATCH):
                remaining = n - p.threads * first
                leave(remaining <= 0)
                some = slice(first, min(first + _BATCH, each))
                yield [thread < remaining - p.threads * i for i in range(some.stop - some.start)], some

    def _load_and_bracket(self, each: int) -> tuple[list[Value], Value, Value]:
        p = self.p
        greatest, least = p.var(0, "u32"), p.var(2**32 - 1, "u32")
        own = self.at(p.thread)
        values = []
        for have, batch in self._batches(each):
            values += self.load(own, range(batch.start, batch.stop))
            for has, value in zip(have, values[batch]):
                _, key = p.split(value)
                p.update(greatest, "max", key, when=has)
                p.update(least, "min", key, when=has)
        greater, smaller = p.of_warps(p.over_warp(("max", "min"), (greatest, least)), self.sums, lane=0)
        return values, p.reduce("max", greater), p.reduce("min", smaller)

    def _distances(self, greatest: Value, least: Value) -> tuple[Callable[[Value], Value], Value]:
        """Returns a function from a candidate to its distance from the best one, and the number of distances, a float.

        Distances are below 2^32. A better candidate must not have a larger distance; otherwise distances are free. Keys
        from `last` to `first` count as 0 and have one distance. Other keys are measured from the nearer end:

            key        least ... last           | last ... first | first ... greatest
            distance   to_zero + (last - key)   | to_zero        | greatest - key

        Here to_zero is greatest - first, or greatest - last if the best key is below `last`.
        """
        p, vocab = self.p, self.vocab
        largest = p.max(greatest - _ZERO_KEY, _ZERO_KEY - 1 - least).bits("s32")
        small = p.max(largest - (_OCTAVES << jnp.finfo(self.dtype).nmant), 0).bits("u32")
        # +0 and -0 always count as 0. Small magnitudes count as 0 if both signs occur.
        small = p.select((least < _ZERO_KEY) & (greatest >= _ZERO_KEY), small, 0)
        first, last = small + _ZERO_KEY, _ZERO_KEY - 1 - small

        def nearest(key: Value) -> Value:
            return p.max(p.min(key, first), last)

        to_zero, indices, shift = greatest - nearest(greatest), 1, 0
        if vocab is not None and jnp.dtype(self.dtype).itemsize == 2:
            shift = max(0, (vocab - 1).bit_length() - _INDEX_BITS)
            indices = (vocab - 1 >> shift) + 1

        def distance(candidate: Value) -> Value:
            complement, key = p.split(candidate)
            at = nearest(key)
            between = to_zero - (key - at)
            if indices == 1:
                return between
            # Among candidates that count as 0, a better key may have a higher index. So their indices are not added.
            return p.multiply_add(between, indices, p.select(at.equals(key), 0, ~complement >> shift))

        last_distance = to_zero - (least - nearest(least))
        return distance, (p.convert(last_distance, "f32") + 1.0) * float(indices)

    def _count_in_buckets(self, values: list[Value], distance: Callable, factor: Value) -> list[Value]:
        """Returns the candidates' words (see the comment at `_HALF`)."""
        p = self.p
        bucket_words = [p.fresh("u32") for _ in values]
        for have, batch in self._batches(len(values)):
            before = []
            for has, value, word in zip(have, values[batch], bucket_words[batch]):
                p.set(word, p.multiply_high(distance(value), factor))
                before.append(p.take_from(p.at(self.buckets, word, 4), 1, when=has))
            for word, number in zip(bucket_words[batch], before):
                p.update(word, "or", number << _HALF)
        p.barrier()
        return bucket_words

    def _start_buckets(self, mine: Value, each: int, otherwise: Callable[[Value], None]) -> None:
        """Replaces each count by the bucket's word. The starts are running sums."""
        p = self.p
        counts = p.load_vector(mine, "u32", each)
        start, total = p.scan(p.reduce("add", counts))
        held = p.over_lanes("max", p.reduce("max", counts))
        (words,) = p.of_warps([total | held << _HALF], self.sums, lane=LANES - 1)
        held, totals = zip(*((word >> _HALF, word & _LOWER) for word in words))
        for i, of_warp in enumerate(totals[:-1]):
            p.increase(start, of_warp, when=p.warp > i)
        otherwise(p.reduce("max", held) > _IN_BUCKET)
        if each <= _LOADED_AGAIN:
            counts = p.load_vector(mine, "u32", each)
        starts = []
        for count in counts:
            starts.append((count << _HALF) + start)
            start = start + count
        p.store(mine, *starts)
        p.barrier()

    def _group_by_bucket(self, values: list[Value], bucket_words: list[Value]) -> None:
        p = self.p
        for have, batch in self._batches(len(values)):
            before = [word >> _HALF for word in bucket_words[batch]]
            for has, word in zip(have, bucket_words[batch]):
                p.load_into([word], p.at(self.buckets, word & _LOWER, 4), when=has)
            for has, value, word, number in zip(have, values[batch], bucket_words[batch], before):
                p.store(self.at((word & _LOWER) + number), value, when=has)
        p.barrier()

    def _rank_in_buckets(self, have: list[Value], values: list[Value], bucket_words: list[Value]) -> None:
        """Compares each candidate with all others in its bucket, if that starts before rank k, and writes it."""
        p = self.p
        ranks = [p.var(word & _LOWER) for word in bucket_words]
        addresses = [p.var(self.at(rank)) for rank in ranks]
        have = [has & (rank < self.k) for has, rank in zip(have, ranks)]
        counts = [p.select(has, word >> _HALF, 0) for has, word in zip(have, bucket_words)]
        most, turn = p.reduce("max", counts), p.var(0, "u32")
        with p.block() as leave:
            leave(most.equals(0))
            with p.repeat() as again:
                inside, others = [], []
                for count, address in zip(counts, addresses):
                    inside.append(turn < count)
                    others.append(p.load(address, "u64", when=inside[-1]))
                    p.increase(address, CANDIDATE_BYTES)
                for value, other, rank, within in zip(values, others, ranks, inside):
                    p.increase(rank, 1, when=within & (other > value))
                p.increase(turn, 1)
                again(turn < most)
            for value, count, rank in zip(values, counts, ranks):
                self.put_winner(value, rank, when=count > 0)
