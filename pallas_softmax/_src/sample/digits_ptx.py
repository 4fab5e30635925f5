"""Finds the last key that a filter keeps, digit by digit of the key, from the elements of a row.

A round splits a range of keys into 128 buckets and adds up the measure in each. The bucket that reaches the goal is the
next range. Rounds end when the range is a single key:

    round 1    |    0.31    |    0.12    |    ..    |       the goal is 0.40: the second bucket must reach 0.09
                             ||||||||||||
    round 2                  .02 .03 .05                    the third key reaches 0.09

Masses are added as integers: atomic additions come in any order, and integer sums always have the same bits. The unit
is so small that the largest mass is 2^31. A sum has two words: one adds up the lower 16 bits of the masses, and the
other adds up the upper 16 bits.
"""

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import DIGIT, MAX_V
from pallas_softmax._src.sample.row_ptx import LEAST_FINITE, RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch

_LARGEST = 2.0**31  # the largest mass as an integer
_DIGIT_BITS = DIGIT.bit_length() - 1
_EACH = DIGIT // LANES  # buckets of a lane


class Masses:
    """Masses as integers, relative to the mass of one key; no key may exceed it.

    Attributes:
      unit: the mass that the integer 1 stands for.
    """

    def __init__(self, p: RowProgram, key: Value):
        self._p, self._largest = p, p.of_key(key)
        self.unit = p.weight(self._largest) * (1 / _LARGEST)

    def of(self, key: Value) -> Value:
        """Returns the mass of an element."""
        p = self._p
        distance = (p.of_key(key) - self._largest) * p.scale
        return p.convert(p.exp2(distance) * _LARGEST, "u32", "rni")


def search_row(f: FilterSearch) -> None:
    """Keeps what the filter keeps, by a search of all elements of the row."""
    p = f.p
    search_digits(f, p.key(p.top), p.key(p.var(LEAST_FINITE, "f32")), p.var(0, "f32"))


def search_digits(f: FilterSearch, high: Value, low: Value, above: Value) -> None:
    """Keeps what the filter keeps, by a search of a range of keys that contains the last kept key.

    Args:
      f: the search.
      high, low: the greatest and the least key of the range.
      above: the measure of all elements above the range.
    """
    last = f.p.var(high)
    number = _last_key(f, last, low, above)
    f.kept.down_to(last, number, *_of_row(f.p, last))


def _last_key(f: FilterSearch, high: Value, low: Value, above: Value) -> Value:
    """Finds the last kept key in the range from `low` to `high`, and sets `high` to it.

    Args:
      f: the search.
      high, low: the greatest and the least key of the range.
      above: the measure of all elements above the range.

    Returns:
      How many entries with that key are kept.
    """
    p, plan = f.p, f.p.plan
    masses = Masses(p, high)
    sums = p.var(p.word(plan.histogram))
    other_sums = p.var(sums + 4 * 2 * DIGIT)
    extent = p.var(high.bits("u32") - low.bits("u32"))
    rest = f.goal - above  # what the range must reach
    rest = p.var(p.max(f.measure(p.divide(rest, masses.unit), rest), 1.0))

    def add(key):
        distance = high.bits("u32") - key.bits("u32")
        with p.when((key <= high) & (distance <= extent)):
            at = sums + (distance >> shift) * 4
            amount = f.measure(masses.of(key), 1)
            p.add_to(at, amount & 0xFFFF)
            p.add_to(at, amount >> 16, offset=4 * DIGIT)

    with p.loop() as leave:
        leave(extent.equals(0))
        shift = p.max(p.highest_bit(extent).bits("s32") - (_DIGIT_BITS - 1), 0).bits("u32")
        zero = p.var(0, "u32")
        for first in range(0, 2 * DIGIT, plan.threads):
            p.store(sums + p.thread * 4, zero, offset=4 * first, when=p.thread < 2 * DIGIT - first)
        p.barrier()
        p.sweep(lambda words, _: [add(p.key(x)) for x in p.floats(words)])
        p.sync_cluster()
        with p.when(p.warp.equals(0)):
            bucket, left = _bucket_that_reaches(p, sums, rest)
            p.store(p.word(plan.picked), bucket, left.bits("u32"), when=p.first_lane)
        p.barrier()
        bucket, left = p.load_vector(p.word(plan.picked), "u32", 2)
        p.set(rest, left.bits("f32"))
        skipped = bucket << shift
        p.set(high, (high.bits("u32") - skipped).bits("s32"))
        p.set(extent, p.min(extent - skipped, (p.var(1, "u32") << shift) - 1))
        # Other CTAs may still read these sums. The cluster synchronizes before they are written again.
        last_sums = p.var(sums)
        p.set(sums, other_sums)
        p.set(other_sums, last_sums)
    each = p.convert(p.max(masses.of(high), 1), "f32")
    return number_of(p, f.measure(p.divide(rest, each), rest))


def number_of(p: RowProgram, rest: Value) -> Value:
    """Returns a number of entries as an integer: rounded up, and at least 1."""
    return p.convert(p.min(p.max(rest, 1.0), float(MAX_V)), "u32", "rpi")


def keep_down_to(f: FilterSearch, key: Value, above: Value, mass_above: Value, equal: Value) -> None:
    """Keeps everything above a key, and as many entries with that key as reach the goal.

    Args:
      above: the measure above the key, in all CTAs.
      mass_above, equal: the arguments `above` and `equal` of `Kept.down_to`.
    """
    p = f.p
    rest = f.goal - above
    number = number_of(p, f.measure(p.divide(rest, p.weight(p.of_key(key))), rest))
    f.kept.down_to(key, number, mass_above, equal)


def _bucket_that_reaches(p: RowProgram, sums: Value, rest: Value) -> tuple[Value, Value]:
    """Returns the bucket at which the sums reach `rest`, and how much of `rest` is left for that bucket.

    If all sums together are less than `rest`, their total takes its place.
    """
    amounts = [p.var(0, "f32") for _ in range(_EACH)]
    # This hides the number of turns from ptxas. Unrolled, the loop would take more registers than all other code.
    cta, ctas = p.var(0, "u32"), p.select(rest > 0.0, p.ctas, 0, "u32")
    with p.loop() as leave:
        leave(cta >= ctas)
        at = sums + p.lane * (4 * _EACH)
        low, high = (p.of_cta(at + 4 * first, cta, "u32", _EACH) for first in (0, DIGIT))
        for amount, *words in zip(amounts, low, high):
            lower_bits, others = (p.convert(word, "f32") for word in words)
            p.increase(amount, p.multiply_add(others, 2.0**16, lower_bits))
        p.increase(cta, 1)
    run, total = p.before(p.reduce("add", amounts))
    goal = p.min(rest, total)
    found, left = p.var(0, "u32"), p.var(0, "f32")
    for i, amount in enumerate(amounts):
        reaches = (run < goal) & (amount > 0.0)  # the last one that starts before the goal
        p.set(found, p.lane * _EACH + i, reaches)
        p.set(left, goal - run, reaches)
        run = run + amount
    lane = p.last_that(left > 0.0)
    return p.shuffle(found, "idx", lane), p.shuffle(left, "idx", lane)


def _of_row(p: RowProgram, key: Value) -> tuple[Value, Value]:
    """Sweeps the row; returns the mass above a key and the number of elements with that key, for each CTA."""
    above, number = p.var(0, "f32"), p.var(0, "u32")

    def take(words, _):
        for x in p.floats(words):
            its = p.key(x)
            p.increase(above, p.weight(x), its > key)
            p.increase(number, 1, its.equals(key))

    p.sweep(take)
    p.over_cta(["add", "add"], [above, number], [0.0, 0], p.plan.kept)
    p.sync_cluster()
    above, number = p.of_ctas(p.plan.kept, 2)
    return above.bits("f32"), number
