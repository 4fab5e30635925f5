"""Finds the last entry that a filter keeps in a float32 or float16 row, from distances below the largest element.

Here top_p is 0.5 of the mass:

    histogram    2 7 9 | 30 41 38 | 60 ...    numbers of elements in buckets of equal width, over all CTAs of the row;
                       '---zone---'           they give the masses nearly, and so where the goal is reached
    zone         0.43 of the mass above       one sweep finds the exact mass above, and lists the 109 keys of the zone
    lists        0.4996 | 0.5003              the last key, among the listed keys

This file builds the histogram and finds the edges of the zone. `zone_ptx` does the rest.
"""

from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.sample.plan import BUCKETS, SECTIONS
from pallas_softmax_base._src.sample.row_ptx import LEAST_FINITE
from pallas_softmax_base._src.sample.search_ptx import FilterSearch

_EACH = BUCKETS // SECTIONS  # buckets of a section, one for each lane

# The histogram spans SPAN * log2(V / mass) octaves. For normal logits with V = 128,256 the logarithm is 5.4, and the
# histogram spans 13.5 octaves. The last entry lies 6.8 octaves below the largest for top_p = 0.9, and 9.3 for 0.999.
SPAN = 2.5
_DEVIATIONS = 1.2  # six times 0.3 ln(2), see `_lean`
_LEAST_ERROR = 1e-4  # for rows with few distinct values, which may lie anywhere in their buckets
_TOLERANCE = 1e-5  # relative error of a sum of 2048 masses in float32
_MAGIC, _MAGIC_BITS = 2.0**23, 0x4B000000  # in this float32 the last bit counts 1: adding it rounds


def edges(f: FilterSearch, total: Value) -> tuple[Value, Value]:
    """Returns the least and the greatest element that may be the last entry; `total` is the mass of the row."""
    p = f.p
    depth = p.log2(p.divide(p.var(float(p.plan.window.vocab), "f32"), total))
    per_octave = p.divide(p.var(float(BUCKETS), "f32"), p.max(depth * SPAN, 2.0**-10))
    per_unit = p.min(p.scale * per_octave, 1e30)  # number of buckets in a difference of 1 between logits
    octaves = p.divide(p.scale, per_unit)  # number of octaves of mass in a bucket
    _count(f, per_unit, octaves)
    return _edges(f, per_unit, octaves, total)


def _count(f: FilterSearch, per_unit: Value, octaves: Value) -> None:
    """Counts elements by their distance from the largest one, and sums up the sections of the histogram."""
    p, plan = f.p, f.p.plan
    f.clear()
    # The address follows from the bits of magic + bucket, times 4, in arithmetic modulo 2^32.
    base = p.word(plan.histogram) - (4 * _MAGIC_BITS) % 2**32
    for words, _ in p.sweep():
        for x in p.floats(words):
            bits = p.multiply_add(p.top - x, per_unit, _MAGIC).bits("u32")
            p.add_to((p.min(bits, _MAGIC_BITS + BUCKETS - 1) << 2) + base, 1)

    # Horner's rule sums the masses, as if each element lay in the middle of its bucket.
    ratio = f.measure(p.exp2(octaves * -1), 1.0)

    def horner(bucket, numbers):
        sum_ = p.convert(numbers[-1], "f32")
        for number in numbers[-2::-1]:
            sum_ = p.multiply_add(sum_, ratio, p.convert(number, "f32"))
        return [sum_ * _measure_of(f, octaves, bucket)]

    f.sum_buckets(horner)


def _measure_of(f: FilterSearch, octaves: Value, bucket: Value) -> Value:
    """Returns the measure of an element in the middle of a bucket."""
    p = f.p
    return f.measure(p.exp2(p.convert(bucket, "f32") * octaves * -1), 1.0)


def _edges(f: FilterSearch, per_unit: Value, octaves: Value, total: Value) -> tuple[Value, Value]:
    """Returns the least and the greatest element of the zone; warp 1 finds the least, warp 0 the greatest."""
    p, plan = f.p, f.p.plan
    with p.when(p.warp < 2):
        is_greatest = p.warp.equals(0)
        goal = f.measure(f.goal * _lean(f, octaves, total, is_greatest), f.goal)
        section, before = f.section_that_reaches(goal, p.var(plan.sections, "u32"))
        bucket = section * _EACH + p.lane
        address = p.word(plan.histogram, bucket)
        number = p.reduce("add", [p.of_cta(address, cta, "u32")[0] for cta in range(p.ctas)])
        # The last bucket also has all elements further away: for the least element of the zone it counts as empty.
        number = p.select(~is_greatest & bucket.equals(BUCKETS - 1), 0, number)
        _, upto = p.scan(p.convert(number, "f32") * _measure_of(f, octaves, bucket))
        bucket = section * _EACH + p.first_that(before + upto >= goal)
        # Rounding may put elements of the bucket slightly outside its edge.
        half = p.select(is_greatest, -0.5, 0.5, "f32")
        distance = p.divide(p.convert(bucket, "f32") + half, per_unit)
        edge = p.top - distance
        slack = p.absolute(edge) * 2.0**-23 + p.absolute(distance) * 2.0**-20 + 1e-44
        edge = p.select(is_greatest, edge + slack, p.max(edge - slack, LEAST_FINITE))
        is_outermost = bucket.equals(p.select(is_greatest, 0, BUCKETS - 1, "u32"))
        edge = p.select(is_outermost, p.select(is_greatest, p.top, LEAST_FINITE), edge)
        p.store(p.word(plan.picked, p.warp), edge, when=p.first_lane)
    p.barrier()
    greatest, least = p.load_vector(p.word(plan.picked), "f32", 2)
    return least, greatest


def _lean(f: FilterSearch, octaves: Value, total: Value, is_greatest: Value) -> Value:
    """Returns a bound on the error of the goal, as a factor, if elements count as in the middle of their buckets.

    If all elements lay at the same edge, the error would be half a bucket. But the errors of many elements cancel. In a
    bucket that spans a share b of a mass, the error is about 0.3 b for each element. If no mass exceeds 1, it is about
    0.3 b sqrt(total) for all elements together. The zone may miss the goal in rare cases: then the row is searched.
    """
    p = f.p
    sign = p.select(is_greatest, -1.0, 1.0, "f32")
    errors = octaves * p.exp2(p.log2(total) * -0.5) * _DEVIATIONS + _LEAST_ERROR
    if_cancelled = p.multiply_add(errors, sign, 1.0)
    if_at_edge = p.exp2(octaves * sign * 0.5) * p.multiply_add(sign, _TOLERANCE, 1.0)
    return p.select(is_greatest, p.max(if_at_edge, if_cancelled), p.min(if_at_edge, if_cancelled))
