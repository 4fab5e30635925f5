"""Finds where the running sum over a row reaches the goal of a filter, by a histogram over all CTAs.

There are few bfloat16 values, so each has its own bucket, and the last kept key follows at once: `search_values`.

    bucket    0 to 7     ..  zero - 2   |  zero - 1  |  zero  |  zero + 1  |  zero + 2  |  ..   4095
    value     largest,       above      |  near 0    |  +0    |  -0        |  near 0,   |       all that are
              next ones      2^-14      |            |        |            |  negative  |       further away

In float32 and float16, buckets have equal widths, and count elements by their distance from the largest. They give the
masses nearly, so the last kept entry is expected in a zone (`expected_zone`). `zone_ptx` finds it there.
For top_p = 0.5:

    numbers of elements      2 7 9 | 30 41 38 | 60 ...       the goal, 0.5 of the mass, is reached in the zone
                                   '---zone---'

A section is 32 or 64 neighbouring buckets. The CTAs exchange sums over sections first, and then one section.
"""

from collections.abc import Callable

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.narrow import bucket_that_reaches
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.filter_ptx import FilterSearch, search_digits
from pallas_softmax._src.sample.plan import BUCKETS, SCRATCH, SECTIONS, VALUE_BUCKETS
from pallas_softmax._src.sample.row_ptx import INF, LEAST_FINITE, PartProgram

_THREAD_BUCKETS = 8  # buckets that a thread sums up

# --- The buckets of both histograms


def _clear(p: PartProgram) -> None:
    """Sets the numbers of elements in all buckets to 0."""
    zeros = [p.var(0, "u32")] * 4
    for first in range(0, p.plan.buckets, 4 * p.plan.threads):
        inside = p.thread * 4 < p.plan.buckets - first
        p.store(p.word(SCRATCH.histogram + first, p.thread, 4), *zeros, when=inside)
    p.barrier()


def _sum_sections(p: PartProgram, sum_up: Callable[[Value, list[Value]], list[Value]]) -> None:
    """Sums up each section of the buckets; afterwards all CTAs can read the sums.

    sum_up(bucket, numbers) writes one or two sums over eight buckets, from their numbers of elements.
    """
    p.barrier()
    threads = p.plan.buckets // _THREAD_BUCKETS
    neighbours = threads // SECTIONS  # lanes that sum up one section
    for first in range(0, threads, p.plan.threads):
        thread = p.thread + first
        with p.when(thread < threads):
            at = p.word(SCRATCH.histogram, thread, _THREAD_BUCKETS)
            numbers = p.load_vector(at, "u32", _THREAD_BUCKETS)
            is_first = (p.lane & (neighbours - 1)).equals(0)
            at = p.word(SCRATCH.sections, thread >> (neighbours.bit_length() - 1))
            for i, sum_ in enumerate(sum_up(thread * _THREAD_BUCKETS, numbers)):
                for bit in range(neighbours.bit_length() - 1):
                    sum_ = sum_ + p.shuffle(sum_, "bfly", 1 << bit)
                p.store(at, sum_, offset=4 * SECTIONS * i, when=is_first)
    p.sync_cluster()


def _section_that_reaches(p: PartProgram, goal: Value, at: Value) -> tuple[Value, Value]:
    """Returns the section at which the sums reach a goal, and what it must reach of the goal. Each warp works alone.

    The sums over the sections start at word `at`. The last bucket has all elements further away, so its section reaches
    any goal.
    """
    at = p.word(0, at + p.lane * 2)
    each = [p.of_cta(at, cta, "f32", 2) for cta in range(p.ctas)]
    first, second = (p.reduce("add", column) for column in zip(*each))
    return bucket_that_reaches(p, [first, p.select(p.lane.equals(LANES - 1), INF, second)], goal)


# --- By distance: float32 and float16

# The histogram spans _SPAN * log2(V / mass) octaves. For normal logits with V = 128,256 the logarithm is 5.4, and the
# histogram spans 13.5 octaves. The last entry lies 6.8 octaves below the largest for top_p = 0.9, and 9.3 for 0.999.
_SPAN = 2.5
# Six standard deviations of the log of a mass, if elements lie anywhere in a bucket of one octave: 6 ln(2) / sqrt(12).
_SIX_DEVIATIONS = 1.2
# For rows with few distinct values, which may lie anywhere in their buckets. An estimate. If it is too small, more
# zones miss the goal, and rows are searched digit by digit. If it is too large, zones have more keys than needed.
_LEAST_ERROR = 1e-4
_SUM_ERROR = 1e-5  # relative error of a sum of 2048 masses in float32
_SECTION = BUCKETS // SECTIONS  # buckets of a section, one for each lane
_MAGIC, _MAGIC_BITS = 2.0**23, 0x4B000000  # in this float32 the last bit counts 1: adding it rounds


def expected_zone(f: FilterSearch, total: Value) -> tuple[Value, Value]:
    """Returns the least and the greatest element that may be the last entry; `total` is the mass of the row."""
    p = f.p
    depth = p.log2(p.divide(p.var(float(p.plan.window.vocab), "f32"), total))
    buckets_per_octave = p.divide(p.var(float(BUCKETS), "f32"), p.max(depth * _SPAN, 2.0**-10))
    # A unit is a difference of 1 between logits. The limits 2^-10 and 1e30 keep both numbers finite.
    buckets_per_unit = p.min(p.octaves_per_unit * buckets_per_octave, 1e30)
    octaves_per_bucket = p.divide(p.octaves_per_unit, buckets_per_unit)
    _count_distances(f, buckets_per_unit, octaves_per_bucket)
    with p.when(p.warp < 2):
        end = _end_of_zone(f, buckets_per_unit, octaves_per_bucket, total, p.warp.equals(0))
        p.store(p.word(SCRATCH.picked, p.warp), end, when=p.first_lane)
    p.barrier()
    greatest, least = p.load_vector(p.word(SCRATCH.picked), "f32", 2)
    return least, greatest


def _count_distances(f: FilterSearch, buckets_per_unit: Value, octaves_per_bucket: Value) -> None:
    """Counts elements by their distance from the largest one, and sums up the sections of the histogram."""
    p = f.p
    _clear(p)
    # The address follows from the bits of magic + bucket, times 4, in arithmetic modulo 2^32.
    base = p.word(SCRATCH.histogram) - (4 * _MAGIC_BITS) % 2**32

    def count(x):
        bits = p.multiply_add(p.top - x, buckets_per_unit, _MAGIC).bits("u32")
        p.add_to((p.min(bits, _MAGIC_BITS + BUCKETS - 1) << 2) + base, 1)

    p.sweep_elements(count)

    # Horner's rule sums the masses, as if each element lay in the middle of its bucket. `ratio` is the mass of an
    # element relative to an element one bucket further up.
    ratio = f.measure(p.exp2(octaves_per_bucket * -1), 1.0)

    def horner(bucket, numbers):
        sum_ = p.convert(numbers[-1], "f32")
        for number in numbers[-2::-1]:
            sum_ = p.multiply_add(sum_, ratio, p.convert(number, "f32"))
        return [sum_ * _measure_in_middle(f, octaves_per_bucket, bucket)]

    _sum_sections(p, horner)


def _measure_in_middle(f: FilterSearch, octaves_per_bucket: Value, bucket: Value) -> Value:
    """Returns the measure of an element in the middle of a bucket."""
    p = f.p
    return f.measure(p.exp2(p.convert(bucket, "f32") * octaves_per_bucket * -1), 1.0)


def _end_of_zone(
    f: FilterSearch, buckets_per_unit: Value, octaves_per_bucket: Value, total: Value, is_greatest: Value
) -> Value:
    """Returns the greatest element of the zone, or the least one: the upper or the lower end of a bucket.

    The bucket reaches a goal that is lowered (for the greatest element) or raised by the bound on its error. Nothing
    lies above the first bucket or below the last one, so their ends are the largest element and the least number.
    """
    p = f.p
    goal = f.measure(f.goal * _error_of_goal(f, octaves_per_bucket, total, is_greatest), f.goal)
    section, rest = _section_that_reaches(p, goal, p.var(SCRATCH.sections, "u32"))
    bucket = section * _SECTION + p.lane
    address = p.word(SCRATCH.histogram, bucket)
    number = p.reduce("add", [p.of_cta(address, cta, "u32")[0] for cta in range(p.ctas)])
    measure = p.convert(number, "f32") * _measure_in_middle(f, octaves_per_bucket, bucket)
    measure = p.select(bucket.equals(BUCKETS - 1), INF, measure)
    bucket = section * _SECTION + bucket_that_reaches(p, [measure], rest)[0]
    half = p.select(is_greatest, -0.5, 0.5, "f32")
    end = p.max(p.top - p.divide(p.convert(bucket, "f32") + half, buckets_per_unit), LEAST_FINITE)
    is_outermost = bucket.equals(p.select(is_greatest, 0, BUCKETS - 1, "u32"))
    return p.select(is_outermost, p.select(is_greatest, p.top, LEAST_FINITE), end)


def _error_of_goal(f: FilterSearch, octaves_per_bucket: Value, total: Value, is_greatest: Value) -> Value:
    """Returns a bound on the error of the goal, as a factor, if elements count as in the middle of their buckets.

    If all elements lay at the same end of their buckets, the error would be half a bucket. But the errors of many
    elements cancel. Masses in a bucket differ by a share b. Then the error of a mass m has a standard deviation of
    0.3 b m, because 1 / sqrt(12) = 0.3. No mass exceeds 1, so all errors together have at most 0.3 b sqrt(total).
    In rare cases the zone misses the goal. Then the row is searched digit by digit.
    """
    p = f.p
    sign = p.select(is_greatest, -1.0, 1.0, "f32")
    errors = octaves_per_bucket * p.exp2(p.log2(total) * -0.5) * _SIX_DEVIATIONS + _LEAST_ERROR
    if_cancelled = p.multiply_add(errors, sign, 1.0)
    if_at_end = p.exp2(octaves_per_bucket * sign * 0.5) * p.multiply_add(sign, _SUM_ERROR, 1.0)
    return p.select(is_greatest, p.max(if_at_end, if_cancelled), p.min(if_at_end, if_cancelled))


# --- By value: bfloat16

_NEAR_ZERO = 14  # values up to 2^-14, and the next one, share a bucket
_FIRST = (127 - _NEAR_ZERO) << 7  # the bits of 2^-14
_LAST = VALUE_BUCKETS - 1
_VALUE_SECTION = VALUE_BUCKETS // SECTIONS  # buckets of a section, two for each lane
_MASS_ERROR = 2.0**-22  # the relative error of a mass that may be ignored


def search_values(f: FilterSearch, counted: Value) -> Value:
    """Finds the last entry of the filter, and updates `f.kept`. Returns whether the next filter can use the histogram.

    `counted` is a condition: whether the histogram is there already. The row is searched digit by digit if the goal
    lies in a bucket of many values. The same happens if so many elements are near 0 that their mass is not known well
    enough.
    """
    p = f.p
    zero = _bucket_of_zero(p)
    with p.when(~counted):
        _clear(p)
        _count_values(p, zero)
        _sum_sections(p, lambda bucket, numbers: _number_and_mass(p, zero, bucket, numbers))
    with p.when(p.warp.equals(0)):
        p.store(p.word(SCRATCH.picked), _bucket_that_reaches(f, zero), when=p.first_lane)
    p.barrier()
    bucket = p.load(p.word(SCRATCH.picked), "u32")
    above, mass_above, equal, near_zero = _sums_around(f, zero, bucket)

    # Error bound on the near-zero mass: all elements of a bucket count as its greatest or its least value.
    mass_error = near_zero * p.mass(p.var(0, "f32")) * p.octaves_per_unit * 2.0 ** (1 - _NEAR_ZERO)
    mass_error = p.select(bucket + 1 >= _bucket_of_negative_zero(zero), mass_error, 0.0)
    positive, negative = _buckets_near_zero(zero)
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
    """Returns the bucket of -0."""
    return (zero + 1) & 0xFFFF


def _buckets_near_zero(zero: Value) -> tuple[Value, Value]:
    """Returns the bucket of the positive elements near 0, and the bucket of the negative ones."""
    return (zero - 1) & 0xFFFF, (zero + 2) & 0xFFFF


def _count_values(p: PartProgram, zero: Value) -> None:
    """Counts elements by value, two elements of a word at a time."""
    base = p.word(SCRATCH.histogram)
    negative_zero = _bucket_of_negative_zero(zero)
    offset = negative_zero | (negative_zero << 16)
    minus_first, last, one = (
        p.var((n & 0xFFFF) * 0x10001, kind)
        for n, kind in ((-_FIRST, "s16x2"), (_LAST, "u16x2"), (1, "s16x2"))
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
    """Returns the bucket at which the sums reach the goal, or else the last bucket; called in one warp."""
    p = f.p
    numbers, masses = SCRATCH.sections, SCRATCH.sections + SECTIONS
    section, rest = _section_that_reaches(p, f.goal, p.select(f.is_mass, masses, numbers, "u32"))
    bucket = section * _VALUE_SECTION + p.lane * 2
    at = p.word(SCRATCH.histogram, bucket)
    numbers = [p.of_cta(at, cta, "u32", 2) for cta in range(p.ctas)]
    first, second = (
        p.convert(p.reduce("add", column), "f32")
        * f.measure(_bounded_mass(p, _value(p, zero, bucket + i)), 1.0)
        for i, column in enumerate(zip(*numbers))
    )
    second = p.select((bucket + 1).equals(_LAST), INF, second)
    return section * _VALUE_SECTION + bucket_that_reaches(p, [first, second], rest)[0]


def _sums_around(f: FilterSearch, zero: Value, bucket: Value) -> tuple[Value, Value, Value, Value]:
    """Returns sums over elements above a bucket, in it, and near 0.

    First, the measure and the mass above the bucket. Then, for each CTA, in the lane with its number, the number of
    elements in the bucket. Last, the number of elements near 0, as a float.
    """
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
        p.store(p.gathered(cta), *sums, near_zero, when=p.first_lane)
    number, mass, equal, near_zero = p.from_gathered(("f32", "f32", "u32", "u32"), (0, 0, 0, 0))
    number, mass, near_zero = p.over_warp(["add"] * 3, [number, mass, near_zero])
    return f.measure(mass, number), mass, equal, p.convert(near_zero, "f32")
