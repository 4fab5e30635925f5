"""The search for the last entry that a filter keeps: its goal, what is kept, and the searches that need no zone.

Entries come in the order of their keys: the largest first, ties by index. The goal is a number of entries for top_k, or
a mass for top_p. The last kept entry is the first one at which the running sum reaches the goal. The measure of an
entry is 1 or its mass, whichever the goal is:

    x                5    4    4    3    1          sorted; the temperature makes the masses powers of two
    number, up to    1    2    3    4    5          top_k = 3: the goal is 3, reached with the second 4
    mass, up to      1    1.5  2    2.25 2.31       top_p = 0.5: the goal is 1.16, reached with the first 4

There are three searches:

    search_digits              always works, but it is slow
    search_values              bfloat16: a histogram over all CTAs with a bucket for each value shows the last key
    zone_ptx.expected_zone     float32, float16: a histogram of distances shows a zone, which has the key

A section is 32 or 64 neighbouring buckets of a histogram. CTAs exchange sums over sections first, and then one section.
"""

import dataclasses
from collections.abc import Callable

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import DIGIT, MAX_V, SCRATCH, SECTIONS, VALUE_BUCKETS, WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, PartProgram

# Atomic additions come in any order, so masses are added as integers: the sums always have the same bits. The largest
# mass counts as this many units.
MOST_UNITS = 2.0**31
_HALF_BITS, _LANE_BUCKETS = 16, DIGIT // LANES
_GOLDEN = 0x61C88647  # its multiples are spread evenly modulo 2^32


class Kept:
    """The entries that the filters have kept so far."""

    def __init__(self, p: PartProgram, total: Value):
        self._p, self.total = p, total  # the mass of the row
        self.last_key = p.var(KEEP_ALL, "s32")  # the last key that is kept
        self.mass = p.var(total)  # of all kept entries
        # How many entries have the last key, and how many of them are kept, in the CTA with the number of this lane.
        self.equal, self.equal_kept = p.var(0, "u32"), p.var(0, "u32")
        self.number = p.var(2**32 - 1, "u32")  # of kept entries with the last key
        self.listed = p.var(False, "pred")  # whether all kept entries are in the lists of the CTAs

    def keeps_all(self) -> Value:
        return self.last_key.equals(KEEP_ALL)

    def all_down_to(self, key: Value | int, mass: Value) -> None:
        values = (self.last_key, key), (self.mass, mass), (self.equal, 0), (self.equal_kept, 0)
        for register, value in values:
            self._p.set(register, value)

    def down_to(self, key: Value, number: Value, mass_above: Value, equal: Value) -> None:
        """Keeps everything above a key, and the first `number` entries with it; each lane has `equal` of a CTA."""
        p = self._p
        before, all_equal = p.before(equal)
        room = p.max((number - before).bits("s32"), 0).bits("u32")
        # Rounding may put a share of the kept mass after the last entry that an earlier filter kept.
        with p.when((key > self.last_key) | (key.equals(self.last_key) & (number < self.number))):
            p.set(self.last_key, key)
            p.set(self.number, number)
            p.set(self.equal, equal)
            p.set(self.equal_kept, p.min(room, equal))
            p.set(self.mass, mass_above + p.convert(p.min(number, all_equal), "f32") * p.mass(p.from_key(key)))


@dataclasses.dataclass(frozen=True)
class FilterSearch:
    """The search for the last entry that a filter keeps; it changes `kept`."""

    p: PartProgram
    kept: Kept
    goal: Value  # what the entries up to the last one must reach, as a float
    is_mass: Value  # whether the goal is a mass; otherwise it is a number of entries

    def measure(self, mass: Value, number: Value | float) -> Value:
        return self.p.select(self.is_mass, mass, number)

    def measure_below(self, octaves: Value) -> Value:
        """Returns the measure of an element so many octaves below the largest one."""
        return self.measure(self.p.exp2(octaves * -1), 1.0)

    def number_that_reaches(self, rest: Value, mass: Value) -> Value:
        """Returns how many entries of this mass reach `rest`, a part of the goal."""
        p = self.p
        number = self.measure(p.divide(rest, mass), rest)
        return p.convert(p.min(p.max(number, 1.0), float(MAX_V)), "u32", "rpi")

    def keep_down_to(self, key: Value, above: Value, mass_above: Value, equal: Value) -> None:
        """Like `Kept.down_to`, with as many entries as reach the goal; `above` is the measure above the key."""
        number = self.number_that_reaches(self.goal - above, self.p.mass(self.p.from_key(key)))
        self.kept.down_to(key, number, mass_above, equal)


def search_digits(f: FilterSearch, high: Value, low: Value, above: Value) -> None:
    """Finds the last entry by rounds of `narrow` over the elements of all CTAs, and updates `f.kept`.

    Its key is from `high` down to `low`; `above` is the measure above `high`. A sum has two words, for the lower and
    the upper 16 bits of the integers.
    """
    p = f.p
    keys, greatest = KeyRange(p, high, low), p.from_key(high)
    sums = p.var(p.word(SCRATCH.histogram))
    other_sums = p.var(sums + 4 * 2 * DIGIT)
    rest = f.goal - above  # what the range must reach
    in_units = p.divide(rest, p.mass(greatest) * (1 / MOST_UNITS))
    rest = p.var(p.max(f.measure(in_units, rest), 1.0))

    def units_of(key):
        return p.exp2((p.from_key(key) - greatest) * p.octaves_per_unit) * MOST_UNITS

    turn = p.fresh("u32")

    def rounded(units):  # Up and down in turn. If all went to the nearest, equal masses would add up their errors.
        return p.convert(units + p.convert(turn >> 8, "f32") * 2.0**-24, "u32", "rzi")

    def one_round(bucket_of):
        p.set(turn, (p.cta * p.plan.threads + p.thread) * _GOLDEN)  # an element is rounded alike in all rounds
        zero = p.var(0, "u32")
        for first in range(0, 2 * DIGIT, p.plan.threads):
            p.store(sums + p.thread * 4, zero, offset=4 * first, when=p.thread < 2 * DIGIT - first)
        p.barrier()

        def add(x):
            key = p.key(x)
            bucket, inside = bucket_of(key)
            p.increase(turn, _GOLDEN)
            with p.when(inside):
                at, units = sums + bucket * 4, f.measure(rounded(units_of(key)), 1)
                p.add_to(at, units & 2**_HALF_BITS - 1)
                p.add_to(at, units >> _HALF_BITS, offset=4 * DIGIT)

        p.sweep_elements(add)
        p.sync_cluster()
        with p.when(p.warp.equals(0)):
            bucket, new_rest = bucket_that_reaches(p, _sums_of_ctas(p, sums, rest), rest)
            p.store(p.word(SCRATCH.picked), bucket, new_rest.bits("u32"), when=p.first_lane)
        p.barrier()
        bucket, new_rest = p.load_vector(p.word(SCRATCH.picked), "u32", 2)
        p.set(rest, new_rest.bits("f32"))
        # Other CTAs may still read these sums. The cluster synchronizes before they are written again.
        last_sums = p.var(sums)
        p.set(sums, other_sums)
        p.set(other_sums, last_sums)
        return bucket

    narrow(p, keys, DIGIT, one_round)
    number = f.number_that_reaches(rest, p.max(units_of(keys.high), 2.0**-40))
    mass_above, equal = p.var(0, "f32"), p.var(0, "u32")

    def add(x):
        key = p.key(x)
        p.increase(mass_above, p.mass(x), key > keys.high)
        p.increase(equal, 1, key.equals(keys.high))

    p.sweep_elements(add)
    masses, equal = p.over_each_cta(["add", "add"], [mass_above, equal], [0.0, 0], p.word(SCRATCH.counted))
    (mass_above,) = p.over_warp(["add"], [masses])
    f.kept.down_to(keys.high, number, mass_above, equal)


def _sums_of_ctas(p: PartProgram, sums: Value, rest: Value) -> list[Value]:
    totals = [p.var(0, "f32") for _ in range(_LANE_BUCKETS)]
    # `rest` is above 0. This hides the number of turns from ptxas. Unrolled, the loop would take more registers than
    # all other code.
    with p.each(0, p.select(rest > 0.0, p.ctas, 0, "u32")) as cta:
        at = sums + p.lane * (4 * _LANE_BUCKETS)
        low, high = (p.of_cta(at + 4 * first, cta, "u32", _LANE_BUCKETS) for first in (0, DIGIT))
        for total, *words in zip(totals, low, high):
            lower_bits, others = (p.convert(word, "f32") for word in words)
            p.increase(total, p.multiply_add(others, 2.0**_HALF_BITS, lower_bits))
    return totals


# --- Ties: the entries with the last kept key


def find_last_tie(p: PartProgram, kept: Kept) -> tuple[Value, Value, Value]:
    """Returns the CTA of the last kept tie, the last position of ties that this CTA keeps, and if any is left out.

    The kept ties are the first ones of the row: all of them in lower CTAs (HIGHEST), none in higher ones (-1).
    """
    is_cut = p.any(kept.equal_kept < kept.equal)
    last = p.last_that(kept.equal_kept > 0)
    position = p.var(p.select(is_cut & (p.cta > last), -1, HIGHEST, "s32"))
    with p.when(is_cut & p.cta.equals(last)):
        p.set(position, _position_of_tie(p, kept.last_key, p.shuffle(kept.equal_kept, "idx", last)))
    return last, position, is_cut


def _position_of_tie(p: PartProgram, key: Value, number: Value) -> Value:
    """Returns the position of element `number`, from 1, of the CTA's elements with this key.

    Each warp counts its elements with the key. The warp that has the element looks for its load; then, in a shifted
    window, for its run in that load.
    """
    window, itemsize, equal = p.plan.window, p.elements.itemsize, p.var(0, "u32")
    p.sweep_elements(lambda x: p.increase(equal, 1, when=p.key(x).equals(key)))
    own = p.over_lanes("add", equal)
    lower, _ = p.lower_warps(own, p.word(SCRATCH.warps))
    rest = p.var(number - lower)  # the number among the elements of this warp
    with p.when((rest.bits("s32") > 0) & (rest <= own)):
        at = p.var(p.first_vector)

        def find(load: Callable[[], list[Value]], step: int) -> tuple[list[Value], Value]:
            """Advances `at` to the elements of all lanes that have the number. Returns this lane's, and `before`."""
            with p.repeat() as again:
                elements = load()
                equal = p.var(0, "u32")
                for x in elements:
                    p.increase(equal, 1, when=p.key(x).equals(key))
                before, in_all = p.before(equal)
                missing = in_all < rest
                p.increase(at, step, when=missing)
                p.update(rest, "sub", in_all, when=missing)
                again(missing)
            return elements, before

        elements, before = find(lambda: p.floats(*p.vectors(at, 1)), WARP_LOAD_BYTES)
        if window.shifted:
            runs = range(0, window.run * itemsize, itemsize)
            elements, before = find(lambda: [p.element(at + i) for i in runs], LANES * window.run * itemsize)
        position, seen = p.position_of(at), p.var(before)
        for i, x in enumerate(elements):
            is_equal = p.key(x).equals(key)
            p.increase(seen, 1, when=is_equal)
            p.store(p.word(SCRATCH.picked), position + i, when=is_equal & seen.equals(rest))
    p.barrier()
    return p.load(p.word(SCRATCH.picked), "s32")


# --- Histograms

_THREAD_BUCKETS = 8  # buckets that a thread sums up


def clear_buckets(p: PartProgram) -> None:
    zeros = [p.var(0, "u32")] * 4
    for first in range(0, p.plan.buckets, 4 * p.plan.threads):
        inside = p.thread * 4 < p.plan.buckets - first
        p.store(p.word(SCRATCH.histogram + first, p.thread, 4), *zeros, when=inside)
    p.barrier()


def sum_sections(p: PartProgram, sum_up: Callable[[Value, list[Value]], list[Value]]) -> None:
    """Sums up each section for all CTAs. sum_up(bucket, numbers) returns one or two sums over eight buckets."""
    p.barrier()
    threads = p.plan.buckets // _THREAD_BUCKETS
    neighbours = threads // SECTIONS  # lanes that sum up one section
    for first in range(0, threads, p.plan.threads):
        thread = p.thread + first
        with p.when(thread < threads):
            at = p.word(SCRATCH.histogram, thread, _THREAD_BUCKETS)
            numbers = p.load_vector(at, "u32", _THREAD_BUCKETS)
            is_first = (p.lane & (neighbours - 1)).equals(0)
            at = p.word(SCRATCH.sections, thread >> log2(neighbours))
            for i, sum_ in enumerate(sum_up(thread * _THREAD_BUCKETS, numbers)):
                for bit in range(log2(neighbours)):
                    sum_ = sum_ + p.shuffle(sum_, "bfly", 1 << bit)
                p.store(at, sum_, offset=4 * SECTIONS * i, when=is_first)
    p.sync_cluster()


def section_that_reaches(p: PartProgram, goal: Value, at: Value) -> tuple[Value, Value]:
    """Returns the section at which the sums, from word `at` on, reach a goal, and what it must reach of the goal.

    Each warp works alone. The last bucket has all elements further away, so its section reaches any goal.
    """
    at = p.word(0, at + p.lane * 2)
    each = [p.of_cta(at, cta, "f32", 2) for cta in range(p.ctas)]
    first, second = (p.reduce("add", column) for column in zip(*each))
    return bucket_that_reaches(p, [first, p.select(p.lane.equals(LANES - 1), INF, second)], goal)


# --- By value: bfloat16 has so few values that each has its own bucket
#
#     bucket    0 to 7     ..  zero - 2   |  zero - 1  |  zero  |  zero + 1  |  zero + 2  |  ..   4095
#     value     largest,       above      |  near 0    |  +0    |  -0        |  near 0,   |       all that are
#               next ones      2^-14      |            |        |            |  negative  |       further away

_NEAR_ZERO = 14  # values up to 2^-14, and the next one, share a bucket
_FIRST = (127 - _NEAR_ZERO) << 7  # the bits of 2^-14
_LAST = VALUE_BUCKETS - 1
_VALUE_SECTION = VALUE_BUCKETS // SECTIONS  # buckets of a section, two for each lane
_MASS_ERROR = 2.0**-22  # the relative error of a mass that may be ignored


def search_values(f: FilterSearch, counted: Value) -> Value:
    """Finds the last entry of the filter, and updates `f.kept`. Returns whether the next filter can use the histogram.

    `counted` is a condition: whether the histogram is there already. The row is searched digit by digit if the goal
    lies in a bucket of many values, or if the mass of the elements near 0 is not known well enough.
    """
    p = f.p
    zero = _bucket_of_zero(p)
    with p.when(~counted):
        clear_buckets(p)
        _count_values(p, zero)
        sum_sections(p, lambda bucket, numbers: _number_and_mass(p, zero, bucket, numbers))
    with p.when(p.warp.equals(0)):
        p.store(p.word(SCRATCH.picked), _bucket_that_reaches(f, zero), when=p.first_lane)
    p.barrier()
    bucket = p.load(p.word(SCRATCH.picked), "u32")
    above, mass_above, equal, near_zero = _sums_around(f, zero, bucket)

    # Error bound on the near-zero mass: all elements of a bucket count as its greatest or its least value.
    positive, negative = _buckets_near_zero(zero)
    greatest = _bounded_mass(p, _value(p, zero, positive))
    mass_error = near_zero * greatest * p.octaves_per_unit * 2.0 ** (1 - _NEAR_ZERO)
    mass_error = p.select(bucket + 1 >= _bucket_of_negative_zero(zero), mass_error, 0.0)
    is_one_value = (bucket < _LAST) & bucket.differs(positive) & bucket.differs(negative)
    exact = is_one_value & (mass_error <= mass_above * _MASS_ERROR)
    with p.when(exact):
        f.keep_down_to(p.key(_value(p, zero, bucket)), above, mass_above, equal)
    with p.when(~exact):
        p.sync_cluster()  # other CTAs may still read the histogram, and the sums over digits overwrite it
        low = p.var(LEAST_FINITE, "f32")
        search_digits(f, p.key(p.top), p.key(low), p.var(0, "f32"))
        p.sync_cluster()  # other CTAs may still read these sums, and a histogram may overwrite them
    return exact


def _bucket_of_zero(p: PartProgram) -> Value:
    """Returns the bucket of +0. From there, buckets count by the bits: positive values before it, negative ones after.

    The bucket is one before a multiple of 8, so eight buckets from a multiple of 8 on share an exponent. The largest
    element is in one of the first 8 buckets. If all elements are negative, +0 would be before bucket 0. The result is
    modulo 2^16, so it is then after all other buckets, for example 65535 if the largest element is -2^-14.
    """
    bits = p.top.bits("u32") >> 16
    size = bits & 0x7FFF
    size = p.max((size - _FIRST).bits("s32"), p.min(size, 1).bits("s32")).bits("u32")
    negative = p.op("sub", "u32", 7, size) & -8
    return (p.select(p.top < 0.0, negative, (size + 8) & -8) - 1) & 0xFFFF


def _bucket_of_negative_zero(zero: Value) -> Value:
    return (zero + 1) & 0xFFFF


def _buckets_near_zero(zero: Value) -> tuple[Value, Value]:
    return (zero - 1) & 0xFFFF, (zero + 2) & 0xFFFF


def _count_values(p: PartProgram, zero: Value) -> None:
    base = p.word(SCRATCH.histogram)
    negative_zero = _bucket_of_negative_zero(zero)
    offset = negative_zero | (negative_zero << 16)
    minus_first, last, one = (
        p.var((n & 0xFFFF) * 0x10001, kind) for n, kind in ((-_FIRST, "s16x2"), (_LAST, "u16x2"), (1, "s16x2"))
    )

    def count(words, _):
        for word in words:
            not_negative = (~word).bits("s16x2").sign().bits("u32")  # each half all ones, or all zeros
            size = word & 0x7FFF7FFF
            least = p.min(size.bits("s16x2"), one)  # 0 for 0
            size = p.max(p.op("add", "s16x2", size.bits("s16x2"), minus_first), least).bits("u16x2")
            bucket = p.op("add", "u16x2", size ^ not_negative, offset.bits("u16x2"))
            bucket = p.min(bucket, last).bits("u32")
            p.add_to(base + ((bucket & 0xFFFF) << 2), 1)
            p.add_to(base + ((bucket >> 16) << 2), 1)

    p.sweep(count)


def _value(p: PartProgram, zero: Value, bucket: Value) -> Value:
    """Returns the value of a bucket: near 0, its greatest positive or its least negative value."""
    from_zero = (bucket - zero - 1) & 0xFFFF  # its bits are inverted if the value is not negative
    positive = from_zero >= 0x8000
    size = p.select(positive, from_zero ^ 0xFFFF, from_zero)
    sign = p.select(positive, 0, 0x80000000, "u32")
    return ((p.select(size.equals(0), 0, size + _FIRST) << 16) | sign).bits("f32")


def _bounded_mass(p: PartProgram, x: Value) -> Value:
    """Returns the mass of an element; 1 for NaN, and for a value larger than all elements."""
    return p.min(p.mass(x), 1.0)


def _number_and_mass(p: PartProgram, zero: Value, bucket: Value, numbers: list[Value]) -> list[Value]:
    """Returns the number and the mass of the elements in eight buckets.

    Their values have one exponent, so they lie at equal distances. Only 0, at an end, may not.
    """
    fourth, fifth = (_value(p, zero, bucket + i) for i in (3, 4))
    values = [p.multiply_add(fifth - fourth, float(i - 4), fifth) for i in range(8)]
    for i, zero_bucket in ((0, _bucket_of_negative_zero(zero)), (7, zero)):
        values[i] = p.select((bucket + i).equals(zero_bucket), 0.0, values[i])
    numbers = [p.convert(number, "f32") for number in numbers]
    mass = p.reduce("add", [n * _bounded_mass(p, x) for n, x in zip(numbers, values)])
    return [p.reduce("add", numbers), mass]


def _bucket_that_reaches(f: FilterSearch, zero: Value) -> Value:
    p = f.p
    numbers, masses = SCRATCH.sections, SCRATCH.sections + SECTIONS
    section, rest = section_that_reaches(p, f.goal, p.select(f.is_mass, masses, numbers, "u32"))
    bucket = section * _VALUE_SECTION + p.lane * 2
    at = p.word(SCRATCH.histogram, bucket)
    numbers = [p.of_cta(at, cta, "u32", 2) for cta in range(p.ctas)]
    first, second = (
        p.convert(p.reduce("add", column), "f32") * f.measure(_bounded_mass(p, _value(p, zero, bucket + i)), 1.0)
        for i, column in enumerate(zip(*numbers))
    )
    second = p.select((bucket + 1).equals(_LAST), INF, second)
    return section * _VALUE_SECTION + bucket_that_reaches(p, [first, second], rest)[0]


def _sums_around(f: FilterSearch, zero: Value, bucket: Value) -> tuple[Value, Value, Value, Value]:
    """Returns the measure and the mass above a bucket, the number in it of this lane's CTA, and the number near 0."""
    p = f.p
    with p.each(p.warp, p.ctas, p.warps) as cta:  # each warp sums up one CTA after another
        at = p.word(SCRATCH.sections, p.lane, 2)
        sections = zip(*(p.of_cta(at + 4 * SECTIONS * i, cta, "f32", 2) for i in range(2)))
        own = (bucket & -_VALUE_SECTION) + p.lane * 2
        in_buckets = p.of_cta(p.word(SCRATCH.histogram, own), cta, "u32", 2)
        number, mass, equal = p.var(0, "f32"), p.var(0, "f32"), p.var(0, "u32")
        for i, (in_section, in_bucket) in enumerate(zip(sections, in_buckets)):
            here, in_bucket_f32 = own + i, p.convert(in_bucket, "f32")
            sums_of_bucket = in_bucket_f32, in_bucket_f32 * _bounded_mass(p, _value(p, zero, here))
            is_before = (p.lane * 2 + (i + 1)) * _VALUE_SECTION <= bucket  # the whole section
            for sums, is_above in ((in_section, is_before), (sums_of_bucket, here < bucket)):
                p.increase(number, sums[0], is_above)
                p.increase(mass, sums[1], is_above)
            p.set(equal, in_bucket, here.equals(bucket))
        near_zero = [p.word(SCRATCH.histogram, p.min(one, _LAST)) for one in _buckets_near_zero(zero)]
        near_zero = p.reduce("add", [p.of_cta(at, cta, "u32")[0] for at in near_zero])
        sums = p.over_warp(["add"] * 3, [number, mass, equal])
        p.store(p.record_of_cta(cta), *sums, near_zero, when=p.first_lane)
    number, mass, equal, near_zero = p.from_records(("f32", "f32", "u32", "u32"), (0, 0, 0, 0), p.ctas)
    number, mass, near_zero = p.over_warp(["add"] * 3, [number, mass, near_zero])
    return f.measure(mass, number), mass, equal, p.convert(near_zero, "f32")
