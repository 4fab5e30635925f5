"""Finds the last entry that a filter keeps in a bfloat16 row, from the number of elements with each value.

There are few bfloat16 values, so each has its own bucket of the histogram, from the largest element down. The bits of
neighbouring values of one sign are neighbouring integers. The values near 0 are too many: they share one bucket for
each sign. +0 and -0 have their own buckets:

    bucket    0 to 7     ..  zero - 2   |  zero - 1  |  zero  |  zero + 1  |  zero + 2  |  ..   4095
    value     largest,       above      |  near 0    |  +0    |  -0        |  near 0,   |       all that are
              next ones      2^-14      |            |        |            |  negative  |       further away

So the mass in each bucket is known, and the last key follows after one exchange over the cluster. The row is searched
digit by digit if the goal lies in a bucket of many values. The same happens if so many elements are near 0 that their
mass is not known well enough.
"""

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import digits_ptx
from pallas_softmax._src.sample.plan import SECTIONS, VALUE_BUCKETS
from pallas_softmax._src.sample.row_ptx import LEAST_FINITE
from pallas_softmax._src.sample.search_ptx import FilterSearch

_NEAR_ZERO = 14  # values up to 2^-14, and the next one, share a bucket
_FIRST = (127 - _NEAR_ZERO) << 7  # the bits of 2^-14
_LAST = VALUE_BUCKETS - 1
_EACH = VALUE_BUCKETS // SECTIONS  # buckets of a section, two for each lane


def search_values(f: FilterSearch, counted: Value) -> Value:
    """Keeps what the filter keeps. `counted` and the result are conditions: whether the histogram is there."""
    p, plan = f.p, f.p.plan
    zero = _zero_bucket(f)

    def number_and_mass(bucket, numbers):
        # The values of eight buckets have one exponent, so they lie at equal distances. Only 0, at an end, may not.
        fourth, fifth = (_value(f, zero, bucket + i) for i in (3, 4))
        values = [p.multiply_add(fifth - fourth, float(i - 4), fifth) for i in range(8)]
        for i, of_zero in ((0, _negative_zero(zero)), (7, zero)):
            values[i] = p.select((bucket + i).equals(of_zero), 0.0, values[i])
        numbers = [p.convert(number, "f32") for number in numbers]
        mass = p.reduce("add", [n * _weight(f, x) for n, x in zip(numbers, values)])
        return [p.reduce("add", numbers), mass]

    with p.when(~counted):
        f.clear()
        _count(f, zero)
        f.sum_buckets(number_and_mass)
    with p.when(p.warp.equals(0)):
        p.store(p.word(plan.picked), _bucket_that_reaches(f, zero), when=p.first_lane)
    p.barrier()
    bucket = p.load(p.word(plan.picked), "u32")
    above, mass_above, equal, near_zero = _of_ctas(f, zero, bucket)

    # Error bound on the near-zero mass: all elements of a bucket count as its greatest or its least value.
    off = near_zero * p.weight(p.var(0, "f32")) * p.scale * 2.0 ** (1 - _NEAR_ZERO)
    off = p.select(bucket + 1 >= _negative_zero(zero), off, 0.0)
    positive, negative = _near_zero(zero)
    is_one_value = (bucket < _LAST) & bucket.differs(positive) & bucket.differs(negative)
    exact = is_one_value & (off <= mass_above * 2.0**-22)
    with p.when(exact):
        f.keep_down_to(p.key(_value(f, zero, bucket)), above, mass_above, equal)
    with p.when(~exact):
        p.sync_cluster()  # other CTAs may still read the histogram, and the sums over digits overwrite it
        low = p.var(LEAST_FINITE, "f32")
        digits_ptx.search_digits(f, p.key(p.top), p.key(low), p.var(0, "f32"))
        p.sync_cluster()  # other CTAs may still read these sums, and a histogram may overwrite them
    return exact


def _zero_bucket(f: FilterSearch) -> Value:
    """Returns the bucket of +0: one before a multiple of 8, so that the largest element is in the first 8 buckets.

    The result is a number modulo 2^16. If all elements are negative, it lies after all buckets. If the largest one is
    then above -2^-14, the result is 65535, and the bucket of -0 is 0.
    """
    p = f.p
    bits = p.top.bits("u32") >> 16
    size = bits & 0x7FFF
    size = p.max((size - _FIRST).bits("s32"), p.min(size, 1).bits("s32")).bits("u32")
    negative = p.op("sub", "u32", 7, size) & -8
    return (p.select(p.top < 0.0, negative, (size + 8) & -8) - 1) & 0xFFFF


def _negative_zero(zero: Value) -> Value:
    """Returns the bucket of -0."""
    return (zero + 1) & 0xFFFF


def _near_zero(zero: Value) -> tuple[Value, Value]:
    """Returns the bucket of the positive elements near 0, and the bucket of the negative ones."""
    return (zero - 1) & 0xFFFF, (zero + 2) & 0xFFFF


def _count(f: FilterSearch, zero: Value) -> None:
    """Counts elements by value, two elements of a word at a time."""
    p = f.p
    base = p.word(p.plan.histogram)
    of_negative_zero = _negative_zero(zero)
    offset = of_negative_zero | (of_negative_zero << 16)
    minus_first, last, one = (
        p.var((n & 0xFFFF) * 0x10001, kind)
        for n, kind in ((-_FIRST, "s16x2"), (_LAST, "u16x2"), (1, "s16x2"))
    )
    for words, _ in p.sweep():
        for word in words:
            not_negative = (~word).bits("s16x2").sign().bits("u32")  # each half all ones, or all zeros
            size = word & 0x7FFF7FFF
            least = p.min(size.bits("s16x2"), one)  # 0 for 0
            size = p.max(p.op("add", "s16x2", size.bits("s16x2"), minus_first), least).bits("u16x2")
            bucket = p.op("add", "u16x2", size ^ not_negative, offset.bits("u16x2"))
            bucket = p.min(bucket, last).bits("u32")
            p.add_to(base + ((bucket & 0xFFFF) << 2), 1)
            p.add_to(base + ((bucket >> 16) << 2), 1)


def _value(f: FilterSearch, zero: Value, bucket: Value) -> Value:
    """Returns the value of a bucket: near 0, its greatest positive or its least negative value."""
    p = f.p
    from_zero = (bucket - zero - 1) & 0xFFFF  # its bits are inverted if the value is not negative
    positive = from_zero >= 0x8000
    size = p.select(positive, from_zero ^ 0xFFFF, from_zero)
    sign = p.select(positive, 0, 0x80000000, "u32")
    return ((p.select(size.equals(0), 0, size + _FIRST) << 16) | sign).bits("f32")


def _weight(f: FilterSearch, x: Value) -> Value:
    """Returns the mass of an element; 1 for NaN, and for a value larger than all elements."""
    return f.p.min(f.p.weight(x), 1.0)


def _bucket_that_reaches(f: FilterSearch, zero: Value) -> Value:
    """Returns the bucket at which the sums reach the goal, or else the last bucket; called in one warp."""
    p = f.p
    numbers, masses = p.plan.sections, p.plan.sections + SECTIONS
    section, before = f.section_that_reaches(f.goal, p.select(f.is_mass, masses, numbers, "u32"))
    bucket = section * _EACH + p.lane * 2
    at = p.word(p.plan.histogram, bucket)
    numbers = [p.of_cta(at, cta, "u32", 2) for cta in range(p.ctas)]
    first, second = (
        p.convert(p.reduce("add", column), "f32") * f.measure(_weight(f, _value(f, zero, bucket + i)), 1.0)
        for i, column in enumerate(zip(*numbers))
    )
    lower, upto = p.scan(first + second)
    lane = p.first_that(before + upto >= f.goal)
    in_first = before + p.shuffle(lower + first, "idx", lane) >= f.goal
    return section * _EACH + lane * 2 + p.select(in_first, 0, 1, "u32")


def _of_ctas(f: FilterSearch, zero: Value, bucket: Value) -> tuple[Value, Value, Value, Value]:
    """Returns sums over elements above a bucket, in it, and near 0.

    First, the measure and the mass above the bucket. Then, for each CTA, in the lane with its number, the number of
    elements in the bucket. Last, the number of elements near 0, as a float.
    """
    p, plan = f.p, f.p.plan
    with p.each(p.warp, p.ctas, p.warps) as cta:  # each warp sums up one CTA after another
        at = p.word(plan.sections, p.lane, 2)
        of_sections = zip(*(p.of_cta(at + 4 * SECTIONS * i, cta, "f32", 2) for i in range(2)))
        own = (bucket & -_EACH) + p.lane * 2
        of_buckets = p.of_cta(p.word(plan.histogram, own), cta, "u32", 2)
        number, mass, equal = p.var(0, "f32"), p.var(0, "f32"), p.var(0, "u32")
        for i, (of_section, in_bucket) in enumerate(zip(of_sections, of_buckets)):
            here, in_bucket_f32 = own + i, p.convert(in_bucket, "f32")
            of_bucket = in_bucket_f32, in_bucket_f32 * _weight(f, _value(f, zero, here))
            is_before = (p.lane * 2 + (i + 1)) * _EACH <= bucket  # the whole section
            for sums, counts in ((of_section, is_before), (of_bucket, here < bucket)):
                p.increase(number, sums[0], counts)
                p.increase(mass, sums[1], counts)
            p.set(equal, in_bucket, here.equals(bucket))
        near_zero = [p.word(plan.histogram, p.min(one, _LAST)) for one in _near_zero(zero)]
        near_zero = p.reduce("add", [p.of_cta(at, cta, "u32")[0] for at in near_zero])
        sums = p.over_warp(["add"] * 3, [number, mass, equal])
        p.store(p.word(plan.counters, cta, 4), *sums, near_zero, when=p.first_lane)
    p.barrier()
    number, mass, equal, near_zero = out = [p.var(0, kind) for kind in ("f32", "f32", "u32", "u32")]
    p.load_into(out, p.word(plan.counters, p.lane, 4), when=p.lane < p.ctas)
    number, mass, near_zero = p.over_warp(["add"] * 3, [number, mass, near_zero])
    return f.measure(mass, number), mass, equal, p.convert(near_zero, "f32")
