"""Finds the last entry that a filter keeps, from the lists that the CTAs have made of the keys in a zone.

    lists       12 40 | 7 31 | 40 3      of three CTAs
    merged      12 40 7 31 40 3          in each CTA, with the mass of each key
    last        40                       each CTA finds it by itself
    counts      0, 1 | 0, 0 | 0, 1       for each list: how many keys are above the last key, and how many equal it

Masses are added as integers: keys come in any order, and integer sums always have the same bits. The mass of the whole
zone is 2^31 units.
"""

import dataclasses

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.narrow import bucket_that_reaches, key_range, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import BUCKETS
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, RowProgram
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


def zone_of(p: RowProgram) -> Zone:
    """Returns variables for a zone."""
    kinds = ("pred", "s32", "s32", "u32", "u32", "u32", "f32", "f32", "f32")
    return Zone(*[p.fresh(kind) for kind in kinds])


def have_room(p: RowProgram, zone: Zone) -> Value:
    """Returns whether the list of each CTA, and the merged list, have room for the zone."""
    return (zone.number <= MAX_KEYS) & (zone.most <= p.plan.list_size)


def search_lists(f: FilterSearch, zone: Zone, again: Value) -> None:
    """Keeps what the filter keeps; its last key must be in the lists. If `again`, the lists are already merged."""
    p, plan = f.p, f.p.plan
    mass = p.max(zone.mass, 1e-30)
    per_unit, unit = p.divide(p.var(_LARGEST, "f32"), mass), mass * (1 / _LARGEST)

    def mass_of(key):
        return p.convert(p.weight(p.of_key(key)) * per_unit, "u32", "rni")

    first_of_cta, _ = p.before(zone.number_of_cta)
    _clear(p)
    p.store(p.word(plan.picked), 0, when=p.thread.equals(0))
    with p.when(~again):
        _merge(p, zone, first_of_cta, mass_of)
    p.barrier()
    rest = f.goal - zone.above
    rest = p.max(f.measure(p.min(rest * per_unit, _LARGEST * 1.5), rest), 1.0)
    rest = p.var(p.convert(rest, "u32", "rpi"))
    key = _last_key(f, zone, rest)
    one = p.convert(p.max(mass_of(key), 1), "f32")
    number = f.number_that_reaches(p.convert(rest, "f32"), one)
    mass_above, equal = _of_lists(p, zone, first_of_cta, key)
    f.kept.down_to(key, number, zone.mass_above_of_cta + p.convert(mass_above, "f32") * unit, equal)


def _merge(p: RowProgram, zone: Zone, first_of_cta: Value, mass_of) -> None:
    """Copies the keys of all lists to one list, with a mass for each."""
    entry = p.var(p.thread)
    with p.loop() as leave:
        leave(entry - p.lane >= zone.number)
        cta, is_key = p.var(0, "u32"), entry < zone.number
        for bit in reversed(range((p.ctas - 1).bit_length())):
            later = cta + (1 << bit)
            p.set(cta, later, is_key & (entry >= p.shuffle(first_of_cta, "idx", later)))
        in_list = entry - p.shuffle(first_of_cta, "idx", cta)
        (key,) = p.of_cta(p.word(p.plan.keys, in_list), cta, "s32", when=is_key)
        p.store(p.word(p.plan.histogram, entry, 2), key, mass_of(key), when=is_key)
        p.increase(entry, p.plan.threads)


def _clear(p: RowProgram) -> None:
    """Clears the sums over buckets, and the list of the few keys that remain at the end."""
    p.store(p.word(p.plan.drawn, p.thread), p.var(0, "u32"), when=p.thread < 2 * _BUCKETS)
    p.store(p.word(_few(p), p.thread), p.var(0, "u32"), when=p.thread < 2 * LANES)


def _few(p: RowProgram) -> int:
    """Returns the first word of the list of the few keys that remain at the end."""
    return p.plan.histogram + 2 * MAX_KEYS


def number_from(p: RowProgram, zone: Zone, least: Value) -> Value:
    """Returns how many keys of the merged list have at least this mass, as a float."""
    number, entry = p.var(0, "u32"), p.var(p.lane)
    with p.loop() as leave:
        leave(entry >= zone.number)
        key = p.load(p.word(p.plan.histogram, entry, 2), "s32")
        p.increase(number, 1, p.weight(p.of_key(key)) >= least)
        p.increase(entry, LANES)
    return p.convert(p.over_lanes("add", number), "f32")


def _last_key(f: FilterSearch, zone: Zone, rest: Value) -> Value:
    """Returns the last kept key, in all threads. Measures are integers.

    If a range has no more keys than a warp has lanes, each lane takes one key and adds up all keys down to it.

    Args:
      f: the search.
      zone: the range of keys; its lists are merged.
      rest: what the zone must reach. This becomes what the entries with the last key must reach.
    """
    p, plan = f.p, f.p.plan
    keys, inside = key_range(p, zone.greatest, zone.least), p.var(zone.number)
    whole = p.var(keys.extent)
    sums, numbers = p.word(plan.drawn), p.word(plan.drawn + _BUCKETS)

    def each_key(body):
        entry = p.var(p.thread)
        with p.loop() as leave:
            leave(entry >= zone.number)
            key, mass = p.load_vector(p.word(plan.histogram, entry, 2), "u32", 2)
            body(key.bits("s32"), mass)
            p.increase(entry, plan.threads)

    def one_round(bucket_of):
        with p.when(keys.extent.differs(whole)):  # not the first round
            p.barrier()
            _clear(p)
            p.barrier()

        def add(key, mass):
            bucket, is_inside = bucket_of(key)
            with p.when(is_inside):
                p.add_to(sums + bucket * 4, f.measure(mass, 1))
                p.add_to(numbers + bucket * 4, 1)

        each_key(add)
        p.barrier()
        bucket, new_rest = bucket_that_reaches(p, p.load_vector(sums + p.lane * 8, "u32", 2), rest)
        p.set(rest, new_rest)
        p.set(inside, p.load(numbers + bucket * 4, "u32"))
        return bucket

    narrow(p, keys, _BUCKETS, one_round, stop=lambda: inside <= LANES)
    with p.when(keys.extent > 0):

        def copy(key, mass):
            with p.when(keys.distance(key) <= keys.extent):
                entry = p.take_from(p.word(plan.picked), 1)
                p.store(p.word(_few(p), entry, 2), key, f.measure(mass, 1))

        each_key(copy)
        p.barrier()
        p.set(keys.high, _among_few(p, inside, rest))
    return keys.high


def _among_few(p: RowProgram, number: Value, rest: Value) -> Value:
    """Does what `_last_key` does, with at most one key for each lane."""
    few = p.word(_few(p))
    own = p.load(few + p.lane * 8, "s32", when=p.lane < number, default=KEEP_ALL)
    before, upto = p.var(0, "u32"), p.var(0, "u32")
    at, entry = p.var(few), p.var(0, "u32")
    with p.loop() as leave:
        leave(entry >= number)
        words = p.load_vector(at, "u32", 8)
        for key, amount in zip(words[::2], words[1::2]):  # 0 where there is none
            key = key.bits("s32")
            p.increase(before, amount, key > own)
            p.increase(upto, amount, key >= own)
        p.increase(at, 32)
        p.increase(entry, 4)
    goal = p.min(rest, p.over_lanes("max", upto))  # rounding may have put the goal above the total
    last = p.over_lanes("max", p.select(upto >= goal, own, KEEP_ALL))
    p.set(rest, goal - p.shuffle(before, "idx", p.first_that(own.equals(last))))
    return last


def _of_lists(p: RowProgram, zone: Zone, first_of_cta: Value, last: Value) -> tuple[Value, Value]:
    """Returns the mass above a key and the number of entries with that key, for each CTA, from the merged list."""
    plan = p.plan
    cta = p.var(p.warp)  # each warp counts the keys of one list after another
    with p.loop() as leave:
        leave(cta >= p.ctas)
        mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
        entry = p.var(p.shuffle(first_of_cta, "idx", cta))
        end = entry + p.shuffle(zone.number_of_cta, "idx", cta)
        p.increase(entry, p.lane)
        with p.loop() as leave_keys:
            leave_keys(entry >= end)
            key, mass = p.load_vector(p.word(plan.histogram, entry, 2), "u32", 2)
            p.increase(mass_above, mass, key.bits("s32") > last)
            p.increase(equal, 1, key.bits("s32").equals(last))
            p.increase(entry, LANES)
        of_list = p.over_warp(["add", "add"], [mass_above, equal])
        p.store(p.word(plan.counters, cta, 4), *of_list, when=p.first_lane)
        p.increase(cta, p.warps)
    p.barrier()
    mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
    p.load_vector_into([mass_above, equal], p.word(plan.counters, p.lane, 4), when=p.lane < p.ctas)
    return mass_above, equal
