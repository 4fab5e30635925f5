"""The last entry that a filter keeps of a row of float32 or float16: from how far elements are below the largest.

Here top_p is 0.5 of the mass:

    histogram    2 7 9 | 30 41 38 | 60 ...    elements in buckets of equal width, in all CTAs of the row, which tell
                       '---zone---'           the masses nearly, and so where the goal is reached
    zone         0.43 of the mass above       one sweep: the exact mass above, and lists of the 109 keys in it
    digits       0.4996 | 0.5003              the key in the lists, as `digits_ptx` finds it

Of a small top_k the histogram has the largest of each turn of a thread alone: where k of those reach a bucket, so do
k elements, and the zone is all above. If the lists are too long, since many elements are equal, or if the last entry is
not in the zone after all, the row is searched digit by digit; so any row has its threshold after a bounded number of
sweeps.
"""

import dataclasses

from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Value
from pallas_softmax.implementations.mosaic_gpu.sampling import digits_ptx
from pallas_softmax.implementations.mosaic_gpu.sampling.plan import BUCKETS, CHUNK_BYTES, SECTIONS
from pallas_softmax.implementations.mosaic_gpu.sampling.row_ptx import KEEP_ALL, LOWEST, Row
from pallas_softmax.implementations.mosaic_gpu.sampling.search_ptx import Search

_HIGHEST = 2**31 - 1  # a key above all others
_EACH = BUCKETS // SECTIONS  # buckets of a section, one for each lane

# Top_k up to this, and up to half the number of turns, goes by the largest of each turn; 1.1 to 1.4 times as many keys
# are in the lists then.
FEW = 1500
# The octaves that the histogram spans, by log2(V / mass): normal logits with V = 128,256 have 5.4 and span 13.5; the
# last that top_p = 0.9 keeps lies 6.8 octaves below the largest, of top_p = 0.999, 9.3.
SPAN = 2.5
MAX_LISTED = 4096  # keys in the lists of all CTAs
_DEVIATIONS = 1.2  # six times 0.3 ln(2)
_LEAST_ERROR = 1e-4  # where elements have few values, which lie anywhere in their buckets
_TOLERANCE = 1e-5  # of sums of 2048 masses in float32, relative
_MAGIC, _MAGIC_BITS = 2.0**23, 0x4B000000  # a float32 whose last bit counts 1, so that adding it rounds


class Widths:
    """How wide the buckets of a row are, whose whole mass is known.

    Attributes:
      per_unit: buckets in 1 of the logits.
      octaves: of the masses, in a bucket.
      total: the mass of the row.
    """

    def __init__(self, p: Row, total: Value):
        depth = p.log2(p.divide(p.var(float(p.layout.window.vocab), "f32"), total))
        per_octave = p.divide(p.var(float(BUCKETS), "f32"), p.max(depth * SPAN, 2.0**-10))
        self.per_unit = p.min(p.scale * per_octave, 1e30)
        self.octaves = p.divide(p.scale, self.per_unit)
        self.total = total


@dataclasses.dataclass(frozen=True)
class _Zone:
    """Neighbouring keys, of which some may be that of the last entry.

    Attributes:
      found: a condition: whether the goal is reached among them.
      least, greatest: the first and the last of them.
      number: how many elements have such a key, in all CTAs.
      number_of_cta: the same of each CTA, in the lane of its number.
      most: the greatest of those.
      above, mass_above_of_cta: the measure of what is above them in all CTAs, and the mass of it in each.
    """

    found: Value
    least: Value
    greatest: Value
    number: Value
    number_of_cta: Value
    most: Value
    above: Value
    mass_above_of_cta: Value


def search(f: Search, widths: Widths, few: Value) -> None:
    """Keeps what the filter keeps; `few` is whether it is a small top_k."""
    p = f.p
    _count(f, widths, few)
    zone = _zone(f, few, *_edges(f, widths, few))
    nothing = zone.found & zone.number.equals(0)  # the goal lies beyond the last of the row
    with p.when(nothing):
        f.kept.down_to_the_last(zone.mass_above_of_cta)
    with p.when(~nothing):
        _threshold(f, zone)


def _count(f: Search, widths: Widths, few: Value) -> None:
    """Counts elements by their distance from the largest, and sums up the sections of the histogram."""
    p, layout = f.p, f.p.layout
    p.store(p.word(layout.listed), 0, when=p.thread.equals(0))
    f.clear()
    # Bits of magic + bucket, times 4, in arithmetic modulo 2^32.
    base = p.word(layout.histogram) - (4 * _MAGIC_BITS) % 2**32

    def add(x):
        bits = p.multiply_add(p.top - x, widths.per_unit, _MAGIC).bits("u32")
        p.add_to((p.min(bits, _MAGIC_BITS + BUCKETS - 1) << 2) + base, 1)

    with p.when(few):
        p.sweep(lambda words, _: add(p.greatest(words)))
    with p.when(~few):
        p.sweep(lambda words, _: [add(x) for x in p.floats(words)])

    # By Horner's rule, as if elements lay in the middle of their bucket.
    ratio = f.measure(p.exp2(widths.octaves * -1), 1.0)

    def horner(bucket, numbers):
        sum_ = p.convert(numbers[-1], "f32")
        for number in numbers[-2::-1]:
            sum_ = p.multiply_add(sum_, ratio, p.convert(number, "f32"))
        return [sum_ * _measure_of(f, widths, bucket)]

    f.sum_buckets(horner)


def _measure_of(f: Search, widths: Widths, bucket: Value) -> Value:
    """Returns the measure of an element in the middle of a bucket."""
    p = f.p
    return f.measure(p.exp2(p.convert(bucket, "f32") * widths.octaves * -1), 1.0)


def _edges(f: Search, widths: Widths, few: Value) -> tuple[Value, Value]:
    """Returns the least and the greatest element that may be the last entry; warp 1 finds the one, warp 0 the other."""
    p, layout = f.p, f.p.layout
    with p.when(p.warp < 2):
        is_greatest = p.warp.equals(0)
        goal = f.measure(f.goal * _lean(f, widths, is_greatest), f.goal)
        section, before = f.section_that_reaches(goal)
        bucket = section * _EACH + p.lane
        address = p.word(layout.histogram, bucket)
        number = p.reduce("add", [p.of_cta(address, cta, "u32")[0] for cta in range(p.ctas)])
        # The last bucket has all that are further away, too.
        number = p.select(~is_greatest & bucket.equals(BUCKETS - 1), 0, number)
        _, upto = p.scan(p.convert(number, "f32") * _measure_of(f, widths, bucket))
        bucket = section * _EACH + p.first_that(before + upto >= goal)
        # Elements of the bucket may lie beside its edge by the rounding of that.
        half = p.select(is_greatest, -0.5, 0.5, "f32")
        distance = p.divide(p.convert(bucket, "f32") + half, widths.per_unit)
        edge = p.top - distance
        slack = p.absolute(edge) * 2.0**-23 + p.absolute(distance) * 2.0**-20 + 1e-44
        edge = p.select(is_greatest, edge + slack, p.max(edge - slack, LOWEST))
        is_outermost = bucket.equals(p.select(is_greatest, 0, BUCKETS - 1, "u32"))
        edge = p.select(is_outermost, p.select(is_greatest, p.top, LOWEST), edge)
        edge = p.select(few & is_greatest, p.top, edge)
        p.store(p.word(layout.picked, p.warp), edge, when=p.first_lane)
    p.barrier()
    greatest, least = p.load_vector(p.word(layout.picked), "f32", 2)
    return least, greatest


def _lean(f: Search, widths: Widths, is_greatest: Value) -> Value:
    """Returns by how much the goal is missed, at most, if elements are taken to lie in the middle of their buckets.

    If all lay at one edge it would be half a bucket. But errors of many elements cancel: in a bucket that spans the
    share b of a mass they are 0.3 b of each, and so 0.3 b sqrt(total) of a total in which no mass exceeds 1. It is
    enough that the goal is nearly always found in the zone, since where it is not, the row is searched.
    """
    p = f.p
    sign = p.select(is_greatest, -1.0, 1.0, "f32")
    errors = widths.octaves * p.exp2(p.log2(widths.total) * -0.5) * _DEVIATIONS + _LEAST_ERROR
    if_cancelled = p.multiply_add(errors, sign, 1.0)
    if_at_edge = p.exp2(widths.octaves * sign * 0.5) * p.multiply_add(sign, _TOLERANCE, 1.0)
    return p.select(is_greatest, p.max(if_at_edge, if_cancelled), p.min(if_at_edge, if_cancelled))


def _zone(f: Search, few: Value, low: Value, high: Value) -> _Zone:
    """Sums what lies above `high`, and lists the keys from `low` to `high`, as many as there is room for."""
    p, layout = f.p, f.p.layout
    mass_above, above, mass, number = (p.var(0, "f32") for _ in range(4))
    least, greatest = p.var(_HIGHEST, "s32"), p.var(KEEP_ALL, "s32")

    def list_element(address):
        x = p.elements.float_of_bits(p, p.elements.load_bits(p, address))
        key = p.key(x)
        p.increase(mass, p.weight(x))
        p.increase(number, 1)
        p.update(least, "min", key)
        p.update(greatest, "max", key)
        return key

    def take(words, address):
        some = p.var(1, "u32")
        with p.when(few):  # there nothing is above, and little is in the zone
            p.set(some, p.select(p.any(p.greatest(words) >= low), 1, 0, "u32"))
        with p.when(some.equals(1)):
            inside = p.var(0, "u32")  # a bit for each element
            for i, x in enumerate(p.floats(words)):
                is_above = x > high
                p.increase(mass_above, p.weight(x), is_above)
                p.increase(above, 1, is_above)
                p.update(inside, "or", 1 << i, ~is_above & (x >= low))
            with p.when(p.any(inside > 0)):
                has_room = p.load(p.word(layout.listed), "u32") < layout.list_size
                with p.loop() as leave:
                    leave(inside.equals(0))
                    key = list_element(_address_of(p, address, p.lowest_bit(inside)))
                    p.set(inside, inside & (inside - 1))
                    slot = p.take_from(p.word(layout.listed), 1, when=has_room)
                    p.store(p.word(layout.keys, slot), key, when=has_room & (slot < layout.list_size))

    p.sweep(take)
    p.over_cta(
        ["add"] * 4 + ["min", "max"],
        [mass_above, mass, p.convert(above, "u32"), p.convert(number, "u32"), least, greatest],
        [0.0, 0.0, 0, 0, _HIGHEST, KEEP_ALL],
        layout.zone,
    )
    p.meet()
    mass_above, mass = p.of_ctas(layout.zone, "f32", 2)
    above, number_of_cta = p.of_ctas(layout.zone + 2, "u32", 2)
    (least,) = p.of_ctas(layout.zone + 4, "s32", default=_HIGHEST)
    (greatest,) = p.of_ctas(layout.zone + 5, "s32", default=KEEP_ALL)
    least, greatest, most, all_above, mass, above, number = p.over_warp(
        ["min", "max", "max", "add", "add", "add", "add"],
        [least, greatest, number_of_cta, mass_above, mass, above, number_of_cta],
    )
    before = f.measure(all_above, p.convert(above, "f32"))
    reached = f.measure(mass, p.convert(number, "f32")) + before >= f.goal
    found = (reached | (low <= LOWEST)) & (before < f.goal)
    return _Zone(found, least, greatest, number, number_of_cta, most, before, mass_above)


def _address_of(p: Row, address: Value, number: Value) -> Value:
    """Returns the address of an element of a turn, by its number among those of the thread."""
    vec, itemsize = p.layout.window.vec, p.elements.itemsize
    chunk, element = number >> (vec.bit_length() - 1), number & (vec - 1)
    return address + chunk * CHUNK_BYTES + element * itemsize


def _threshold(f: Search, zone: _Zone) -> None:
    """Finds the last key in the zone, or in the row if it is not in the zone, and keeps what is down to it."""
    p, layout = f.p, f.p.layout
    fits = (zone.number <= MAX_LISTED) & (zone.most <= layout.list_size)
    listed = p.var(fits & zone.found)
    high = p.var(p.select(zone.found, zone.greatest, p.key(p.top)))
    low = p.select(zone.found, zone.least, p.key(p.var(LOWEST, "f32")))
    above = p.select(zone.found, zone.above, 0.0)

    keys = []
    for cta in range(p.ctas):
        number = p.select(listed, p.shuffle(zone.number_of_cta, "idx", cta), 0)
        for first in range(0, layout.list_size, layout.threads):
            slot = p.thread + first
            at = p.word(layout.keys, slot)
            (key,) = p.of_cta(at, cta, "s32", when=slot < number, default=KEEP_ALL)
            keys.append((cta, key))

    lists = digits_ptx.Lists(keys, listed)
    number, masses = digits_ptx.last_key(f, high, low, above, lists)
    mass, equal = p.var(zone.mass_above_of_cta), p.var(0, "u32")
    with p.when(listed):
        more, of_lists = _kept_of_lists(p, high, lists, masses)
        p.increase(mass, more)
        p.set(equal, of_lists)
    with p.when(~listed):
        for register, value in zip((mass, equal), digits_ptx.of_row(p, high)):
            p.set(register, value)
    f.kept.down_to(high, number, mass, equal)


def _kept_of_lists(
    p: Row, key: Value, lists: digits_ptx.Lists, masses: digits_ptx.Masses
) -> tuple[Value, Value]:
    """Returns the mass that the list of each CTA has above a key, and how many of its keys are equal to it."""
    counters = p.layout.counters
    p.store(p.word(counters, p.thread), 0, when=p.thread < 4 * p.ctas)
    p.barrier()
    for cta, each in lists.keys:
        amount = p.select(each > key, masses.of(each), 0)
        same = p.select(each.equals(key), 1, 0, "u32")
        for i, of_warp in enumerate(p.over_warp(["add"] * 3, [amount & 0xFFFF, amount >> 16, same])):
            p.add_to(p.word(counters, cta, 4), of_warp, offset=4 * i, when=p.first_lane)
    p.barrier()
    of_cta = [p.var(0, "u32") for _ in range(4)]
    p.load_vector_into(of_cta, p.word(counters, p.lane, 4), when=p.lane < p.ctas)
    low, high, number, _ = of_cta
    mass = p.multiply_add(p.convert(high, "f32"), 2.0**16, p.convert(low, "f32"))
    return mass * masses.unit, number
