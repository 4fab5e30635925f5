"""Finds the last entry that a filter keeps, from the lists that the CTAs have made of the keys in a zone.

    lists       12 40 | 7 31 | 40 3      of three CTAs, as distances from the least key
    merged      12 40 7 31 40 3          in each CTA, with the mass of each key
    last        40                       each CTA finds it by itself
    counts      0, 1 | 0, 0 | 0, 1       for each list: how many keys are above the last key, and how many equal it

Masses are added as integers: keys come in any order, and integer sums always have the same bits. The mass of the whole
zone is 2^31 units.
"""

import dataclasses

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.digits_ptx import number_of
from pallas_softmax._src.sample.plan import BUCKETS
from pallas_softmax._src.sample.row_ptx import RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch

_BUCKETS = 2 * LANES  # buckets in a round, two for each lane
# The histogram has room for these keys and for one more key of each lane, with a mass for each.
MAX_KEYS = BUCKETS // 2 - LANES
_LARGEST = 2.0**31  # the mass of the whole zone as an integer


@dataclasses.dataclass(frozen=True)
class Zone:
    """A range of keys that may contain the key of the last entry.

    Attributes:
      found: a condition: whether the goal is reached in the zone.
      least, greatest: the first and the last key of the range.
      number: how many elements have a key in the zone, in all CTAs.
      number_of_cta: the same number for each CTA, in the lane with its number.
      most: the largest number_of_cta.
      mass: the mass of all elements in the zone.
      above: the measure of all elements above the zone, in all CTAs.
      mass_above_of_cta: the mass above the zone for each CTA, in the lane with its number.
      known: a condition: whether all this is known. Then lists of several keys are merged, and if the zone has two keys
        that do not fit in the lists, the greater key is counted.
    """

    found: Value
    least: Value
    greatest: Value
    number: Value
    number_of_cta: Value
    most: Value
    mass: Value
    above: Value
    mass_above_of_cta: Value
    known: Value


def zone_of(p: RowProgram) -> Zone:
    """Returns variables for a zone that is not known yet."""
    kinds = ("pred", "s32", "s32", "u32", "u32", "u32", "f32", "f32", "f32")
    return Zone(*[p.fresh(kind) for kind in kinds], known=p.var(False, "pred"))


def have_room(p: RowProgram, zone: Zone) -> Value:
    """Returns whether the list of each CTA, and the merged list, have room for the zone."""
    return (zone.number <= MAX_KEYS) & (zone.most <= p.plan.list_size)


def search_lists(f: FilterSearch, zone: Zone) -> None:
    """Keeps what the filter keeps; its last key must be in the lists."""
    p, plan = f.p, f.p.plan
    mass = p.max(zone.mass, 1e-30)
    per_unit, unit = p.divide(p.var(_LARGEST, "f32"), mass), mass * (1 / _LARGEST)

    def mass_of(distance):
        key = (zone.least.bits("u32") + distance).bits("s32")
        return p.convert(p.weight(p.of_key(key)) * per_unit, "u32", "rni")

    first_of_cta, _ = p.before(zone.number_of_cta)
    _clear(p)
    p.store(p.word(plan.picked), 0, when=p.thread.equals(0))
    with p.when(~zone.known):
        _merge(f, zone, first_of_cta, mass_of)
        p.set(zone.known, True)
    p.barrier()
    rest = f.goal - zone.above
    goal = p.convert(p.max(f.measure(p.min(rest * per_unit, _LARGEST * 1.5), rest), 1.0), "u32", "rpi")
    distance, above = _last(f, zone, goal)
    left = p.convert((goal - above), "f32")
    each = p.convert(p.max(mass_of(distance), 1), "f32")
    number = number_of(p, f.measure(p.divide(left, each), left))

    cta = p.var(p.warp)  # each warp counts the keys of one list after another
    with p.loop() as leave:
        leave(cta >= p.ctas)
        mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
        slot = p.var(p.shuffle(first_of_cta, "idx", cta))
        end = slot + p.shuffle(zone.number_of_cta, "idx", cta)
        p.increase(slot, p.lane)
        with p.loop() as leave_keys:
            leave_keys(slot >= end)
            its, amount = p.load_vector(p.word(plan.histogram, slot, 2), "u32", 2)
            p.increase(mass_above, amount, its > distance)
            p.increase(equal, 1, its.equals(distance))
            p.increase(slot, LANES)
        p.store(
            p.word(plan.counters, cta, 4), *p.over_warp(["add"] * 2, [mass_above, equal]), when=p.first_lane
        )
        p.increase(cta, p.warps)
    p.barrier()
    mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
    p.load_vector_into([mass_above, equal], p.word(plan.counters, p.lane, 4), when=p.lane < p.ctas)
    key = (zone.least.bits("u32") + distance).bits("s32")
    f.kept.down_to(key, number, zone.mass_above_of_cta + p.convert(mass_above, "f32") * unit, equal)


def _merge(f: FilterSearch, zone: Zone, first_of_cta: Value, mass_of) -> None:
    """Copies the keys of all lists to one list, with a mass for each, as distances from the least key."""
    p, plan = f.p, f.p.plan
    slot = p.var(p.thread)
    with p.loop() as leave:
        leave(slot - p.lane >= zone.number)
        cta, is_key = p.var(0, "u32"), slot < zone.number
        for bit in reversed(range((p.ctas - 1).bit_length())):
            later = cta + (1 << bit)
            p.set(cta, later, is_key & (slot >= p.shuffle(first_of_cta, "idx", later)))
        slot_of_cta = slot - p.shuffle(first_of_cta, "idx", cta)
        (key,) = p.of_cta(p.word(plan.keys, slot_of_cta), cta, "s32", when=is_key)
        distance = key.bits("u32") - zone.least.bits("u32")
        p.store(p.word(plan.histogram, slot, 2), distance, mass_of(distance), when=is_key)
        p.increase(slot, plan.threads)


def _clear(p: RowProgram) -> None:
    """Clears the sums over buckets, and the list of the few keys that remain at the end."""
    p.store(p.word(p.plan.drawn, p.thread), p.var(0, "u32"), when=p.thread < 2 * _BUCKETS)
    p.store(p.word(p.plan.histogram + 2 * MAX_KEYS, p.thread), p.var(0, "u32"), when=p.thread < 2 * LANES)


def number_from(p: RowProgram, zone: Zone, least: Value) -> Value:
    """Returns how many keys of the merged list have at least this mass, as a float."""
    number, slot = p.var(0, "u32"), p.var(p.lane)
    with p.loop() as leave:
        leave(slot >= zone.number)
        distance = p.load(p.word(p.plan.histogram, slot, 2), "u32")
        key = (zone.least.bits("u32") + distance).bits("s32")
        p.increase(number, 1, p.weight(p.of_key(key)) >= least)
        p.increase(slot, LANES)
    return p.convert(p.over_lanes("add", number), "f32")


def _last(f: FilterSearch, zone: Zone, goal: Value) -> tuple[Value, Value]:
    """Returns the distance of the last key from the least key, and the measure above the last key, in all threads.

    Measures are integers. A round cuts a range of distances into 64 buckets, from the greatest distance down; the first
    range is the whole zone. The threads add the masses of the keys to the buckets. The bucket that reaches the goal is
    the next range. Rounds end when the range is one distance, or has no more keys than a warp has lanes. In that case,
    each lane takes one key and adds up all keys from the greatest one down to it.
    """
    p, plan = f.p, f.p.plan
    low, high = p.var(0, "u32"), p.var(zone.greatest.bits("u32") - zone.least.bits("u32"))
    keys, few_keys = p.word(plan.histogram), p.word(plan.histogram + 2 * MAX_KEYS)
    masses, numbers = p.word(plan.drawn), p.word(plan.drawn + _BUCKETS)
    # The number of keys in the range, and the mass and the number of the keys above it.
    inside, mass_above, number_above = p.var(zone.number), p.var(0, "u32"), p.var(0, "u32")
    several = p.var(low.differs(high))

    def each_key(body):
        slot = p.var(p.thread)
        with p.loop() as leave:
            leave(slot >= zone.number)
            its, amount = p.load_vector(keys + slot * 8, "u32", 2)
            with p.when(its - low <= high - low):
                body(its, amount)
            p.increase(slot, plan.threads)

    with p.loop() as leave:
        leave((inside <= LANES) | ~several)
        width = p.max(p.highest_bit(high - low).bits("s32") - (_BUCKETS.bit_length() - 2), 0).bits("u32")

        def add(its, amount):
            at = ((high - its) >> width) * 4
            p.add_to(masses + at, amount)
            p.add_to(numbers + at, 1)

        each_key(add)
        p.barrier()
        first_mass, second_mass = p.load_vector(masses + p.lane * 8, "u32", 2)
        first_number, second_number = p.load_vector(numbers + p.lane * 8, "u32", 2)
        mass, mass_upto = p.scan(first_mass + second_mass)
        number, number_upto = p.scan(first_number + second_number)
        mass, number = mass + mass_above, number + number_above
        upto = f.measure(mass_upto + mass_above, number_upto + number_above)
        # Rounding may have put the goal above the total.
        goal_here = p.min(goal, p.shuffle(upto, "idx", LANES - 1))
        lane = p.first_that(upto >= goal_here)
        in_second = f.measure(mass + first_mass, number + first_number) < goal_here
        bucket = p.lane * 2 + p.select(in_second, 1, 0, "u32")
        p.increase(mass, first_mass, in_second)
        p.increase(number, first_number, in_second)
        p.set(mass_above, p.shuffle(mass, "idx", lane))
        p.set(number_above, p.shuffle(number, "idx", lane))
        p.set(inside, p.shuffle(p.select(in_second, second_number, first_number), "idx", lane))
        p.set(high, high - (p.shuffle(bucket, "idx", lane) << width))
        p.set(low, p.select(high - low >> width > 0, high - ((p.var(1, "u32") << width) - 1), low))
        p.set(several, low.differs(high))
        with p.when((inside > LANES) & several):
            p.barrier()
            _clear(p)
            p.barrier()

    distance, above = p.var(low), p.var(f.measure(mass_above, number_above))
    with p.when(several):

        def copy(its, amount):
            place = p.take_from(p.word(plan.picked), 1)
            p.store(few_keys + place * 8, its, f.measure(amount, 1))

        each_key(copy)
    p.barrier()
    with p.when(several):
        own = p.load(few_keys + p.lane * 8, "u32", when=p.lane < inside, default=0)
        before, upto = p.var(above), p.var(above)
        at, number = p.var(few_keys), p.var(0, "u32")
        with p.loop() as leave:
            leave(number >= inside)
            words = p.load_vector(at, "u32", 8)
            for its, amount in zip(words[::2], words[1::2]):  # 0 where there is none
                p.increase(before, amount, its > own)
                p.increase(upto, amount, its >= own)
            p.increase(at, 32)
            p.increase(number, 4)
        # Rounding may have put the goal above the total. Then the last key of all is the last one.
        reached = (p.lane < inside) & (upto >= p.min(goal, p.over_lanes("max", upto)))
        p.set(distance, p.over_lanes("max", p.select(reached, own, low)))
        lane = p.first_that((p.lane < inside) & own.equals(distance))
        p.set(above, p.shuffle(before, "idx", lane))
    return distance, above
