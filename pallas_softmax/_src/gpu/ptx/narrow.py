"""Finds the key at which a running sum reaches a goal, among items in any order: `narrow`.

Each item has a key and a measure, for example its mass. The sum runs over the items by their keys, the greatest first.
A round cuts a range of keys into buckets and adds up the measures in each. The bucket that reaches the goal is the next
range:

    round 1    |    0.31    |    0.12    |    ..    |       the goal is 0.40: the second bucket must reach 0.09
                             ||||||||||||
    round 2                  .02 .03 .05                    the third key reaches 0.09

The caller says where the items and the sums are: in one CTA or in all CTAs of a cluster.

If each measure is 1 and the goal is a rank, `find_rank` does all of this, with a `Histogram` of a CTA.
"""

import dataclasses
from collections.abc import Callable, Sequence

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.values import Condition, Value

BucketOf = Callable[[Value], tuple[Value, Value]]  # of a key: its bucket, and whether the key is in the range


class KeyRange:
    """A range of sort keys, in variables: from `high` ("s32") down to high - extent; `extent` is unsigned.

    In a round of `narrow`, a bucket has 2^shift keys.
    """

    shift: Value

    def __init__(self, p: CtaProgram, high: Value, low: Value):
        self.high, self.extent = p.var(high), p.var((high - low).bits("u32"))

    def least(self) -> Value:
        return self.high - self.extent.bits("s32")

    def distance(self, key: Value) -> Value:
        """Returns high - key. The key is in the range if this is at most `extent`."""
        return (self.high - key).bits("u32")


def narrow(
    p: CtaProgram,
    keys: KeyRange,
    buckets: int,
    one_round: Callable[[BucketOf], Value],
    stop: Callable[[], Condition] | None = None,
) -> None:
    """Narrows a range of keys to one key, or until stop(). The number of buckets of a round is a power of two.

    one_round(bucket_of) adds up the measures of the items in each bucket, and returns the bucket that reaches the goal.
    """
    with p.loop() as leave:
        leave(keys.extent.equals(0))
        if stop is not None:
            leave(stop())
        # Distances up to `extent` have highest_bit + 1 bits. The upper log2(buckets) bits are the number of the bucket.
        log2_buckets = buckets.bit_length() - 1
        keys.shift = shift = p.max(p.highest_bit(keys.extent).bits("s32") - (log2_buckets - 1), 0).bits("u32")

        def bucket_of(key):
            distance = keys.distance(key)
            return distance >> shift, distance <= keys.extent

        above = one_round(bucket_of) << shift  # number of key values above the bucket
        p.update(keys.high.bits("u32"), "sub", above)
        p.set(keys.extent, p.min(keys.extent - above, (p.var(1, "u32") << shift) - 1))


def bucket_that_reaches(p: CtaProgram, sums: Sequence[Value], goal: Value) -> tuple[Value, Value]:
    """Returns the bucket at which the sums reach a goal, and what it must reach of the goal. Each warp works alone.

    A lane passes the sums over its neighbouring buckets, not negative. The goal is above 0. If all sums together are
    less, their total takes its place.
    """
    before, total = p.before(p.reduce("add", sums))
    goal = p.min(goal, total)
    bucket, rest = p.var(0, "u32"), p.var(0, goal.kind)
    for i, sum_ in enumerate(sums):
        reaches = (before < goal) & (sum_ > 0)  # the last one that starts before the goal
        p.set(bucket, p.lane * len(sums) + i, reaches)
        p.set(rest, goal - before, reaches)
        before = before + sum_
    lane = p.last_that(rest > 0)
    return p.shuffle(bucket, "idx", lane), p.shuffle(rest, "idx", lane)


# --- Ranks


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of items in the buckets of a CTA; they start at 0. A thread owns neighbouring buckets."""

    p: CtaProgram
    address: Value  # of a word for each bucket
    each: int  # number of neighbouring buckets of a thread, a multiple of 4
    sums: Value  # address of scratch, a word for each warp
    picked: Value  # address of scratch, 16 bytes

    def count(self, bucket: Value, when: Condition = None) -> None:
        self.p.add_to(self.p.at(self.address, bucket, 4), 1, when=when)

    def own(self) -> list[Value]:
        return self.p.load_vector(self._own_address, "u32", self.each)

    def clear(self) -> None:
        for first in range(0, 4 * self.each, ACCESS_BYTES):
            self.p.store(self._own_address, 0, 0, 0, 0, offset=first)

    def pick(self, rank: Value) -> tuple[Value, Value, Value, Value]:
        """Returns the bucket with the item of a rank, its rank there, the bucket's count, and the count of all items.

        Rank 1 is the first item of the first bucket. The first three are of no use if there are fewer items. All
        threads must have counted, and synchronized. Clears the histogram.
        """
        p = self.p
        before, upto = p.scan(p.reduce("add", self.own()))
        lower, total = p.lower_warps(upto, self.sums)
        start = p.var(before + lower)
        with p.when((start < rank) & (rank <= lower + upto)):
            bucket, upto = p.var(p.thread * self.each), p.var(start)
            for count in self.own():
                p.increase(upto, count)
                p.set(start, upto, when=upto < rank)
                p.increase(bucket, 1, when=upto < rank)
            inside = p.load(p.at(self.address, bucket, 4), "u32")
            p.store(self.picked, bucket, rank - start, inside, 0)
        self.clear()
        p.barrier()
        bucket, rest, inside, _ = p.load_vector(self.picked, "u32", 4)
        return bucket, rest, inside, total

    @property
    def _own_address(self) -> Value:
        return self.p.at(self.address, self.p.thread, 4 * self.each)


def find_rank(
    histogram: Histogram, keys: KeyRange, rank: Value | int, enough: Value | int, count: Callable[[BucketOf], None]
) -> tuple[Value, Value]:
    """Narrows a range to the key of a rank (1 is the greatest), or to a range that at most `enough` keys reach.

    count(bucket_of) counts the items, see `narrow`; none is above the first range. Lower ones may count in the last
    bucket of the range or after it. If the rank may be below the range, the last bucket must be whole.

    Returns how many items are above the range, and how many reach it: too many if lower ones are counted, until the
    range is a single key; and 2^32 - 1 if it was one from the start. If the items are fewer than `rank`, the second
    number is 0, and the range of no use.
    """
    p = histogram.p
    rank, above, reach = p.var(rank, "u32"), p.var(0, "u32"), p.var(2**32 - 1, "u32")

    def one_round(bucket_of):
        count(bucket_of)
        p.barrier()
        left = rank - above
        bucket, rest, inside, total = histogram.pick(left)
        p.set(above, rank - rest)
        p.set(reach, p.select(total < left, 0, above + inside))
        return bucket

    narrow(p, keys, histogram.each * p.threads, one_round, stop=lambda: reach <= enough)
    return above, reach
