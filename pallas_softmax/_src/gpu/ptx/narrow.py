"""Finds the key at which a running sum reaches a goal, among items in any order: `narrow`.

Each item has a key and a measure, for example its mass. The sum runs over the items by their keys, the greatest first.
A round cuts a range of keys into buckets and adds up the measures in each. The bucket that reaches the goal is the next
range:

    round 1    |    0.31    |    0.12    |    ..    |       the goal is 0.40: the second bucket must reach 0.09
                             ||||||||||||
    round 2                  .02 .03 .05                    the third key reaches 0.09

The caller says where the items and the sums are: in one CTA or in all CTAs of a cluster.
"""

from collections.abc import Callable, Sequence

from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.values import Condition, Value


class KeyRange:
    """A range of sort keys, in variables: from `high` ("s32") down to high - extent; `extent` is unsigned."""

    def __init__(self, p: CtaProgram, high: Value, low: Value):
        self.high, self.extent = p.var(high), p.var((high - low).bits("u32"))

    def least(self) -> Value:
        """Returns the least key of the range."""
        return self.high - self.extent.bits("s32")

    def distance(self, key: Value) -> Value:
        """Returns high - key. The key is in the range if this is at most `extent`."""
        return (self.high - key).bits("u32")


def narrow(
    p: CtaProgram,
    keys: KeyRange,
    buckets: int,
    one_round: Callable[[Callable[[Value], tuple[Value, Value]]], Value],
    stop: Callable[[], Condition] | None = None,
) -> None:
    """Narrows a range of keys to one key, or until stop(). The number of buckets of a round is a power of two.

    one_round(bucket_of) adds up the measures of the items in each bucket, and returns the bucket that reaches the goal.
    bucket_of(key) returns a key's bucket, and whether the key is in the range.
    """
    with p.loop() as leave:
        leave(keys.extent.equals(0))
        if stop is not None:
            leave(stop())
        # Distances up to `extent` have highest_bit + 1 bits. The upper log2(buckets) bits are the number of the bucket,
        # so a bucket has 2^shift keys.
        log2_buckets = buckets.bit_length() - 1
        shift = p.max(p.highest_bit(keys.extent).bits("s32") - (log2_buckets - 1), 0).bits("u32")

        def bucket_of(key):
            distance = keys.distance(key)
            return distance >> shift, distance <= keys.extent

        above = one_round(bucket_of) << shift  # number of keys above the bucket
        p.update(keys.high.bits("u32"), "sub", above)
        p.set(keys.extent, p.min(keys.extent - above, (p.var(1, "u32") << shift) - 1))


def bucket_that_reaches(p: CtaProgram, sums: Sequence[Value], goal: Value) -> tuple[Value, Value]:
    """Returns the bucket at which the sums reach a goal, and what it must reach of the goal. Each warp works alone.

    A lane passes the sums over its neighbouring buckets, not negative. The goal is above 0, and of the same kind. If
    all sums together are less than the goal, their total takes its place.
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
