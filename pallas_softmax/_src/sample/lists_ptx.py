"""Finds the last entry that a filter keeps, from the lists that the CTAs have made of the keys in a zone.

    lists       12 40 | 7 31 | 40 3      of three CTAs
    merged      12 40 7 31 40 3          in each CTA, with the mass of each key
    last        40                       each CTA finds it by itself
    results     0, 1 | 0, 0 | 0, 1       for each list: the mass above the last key, and how many keys equal it

Masses are added as integers, as in `digits_ptx`. The mass of the whole zone is 2^31 units.
"""

import contextlib
from collections.abc import Iterator

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import BUCKETS
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch

_BUCKETS = 2 * LANES  # buckets in a round, two for each lane
# The words of the histogram hold the merged list, and then a shortlist with a key for each lane; masses follow keys.
MAX_KEYS = BUCKETS // 2 - LANES
_SHORTLIST = 2 * MAX_KEYS
_LARGEST = 2.0**31  # the mass of the whole zone as an integer


class Zone:
    """A range of keys that may contain the key of the last entry, in variables.

    `number_of_cta` has a number for each CTA, in the lane with its number. The others are of all CTAs together.
    """

    def __init__(self, p: RowProgram):
        self._p = p
        self.found = p.fresh("pred")  # whether the zone reaches the goal, or the row ends in it before that
        self.has_room = p.fresh("pred")  # whether each CTA's list, and the merged list, have room
        self.least, self.greatest = p.fresh("s32"), p.fresh("s32")  # keys
        self.number, self.number_of_cta = p.fresh("u32"), p.fresh("u32")  # of elements with a key in the zone
        self.mass = p.fresh("f32")  # of the elements in the zone
        self.above = p.fresh("f32")  # the measure of the elements above the zone
        self.mass_above = p.fresh("f32")  # of these elements

    def set(self, **values) -> None:
        """Sets variables by their names."""
        for name, value in values.items():
            self._p.set(getattr(self, name), value)

    def set_sums(self, mass: Value, number: Value) -> None:
        """Sets what follows from the mass and the number of elements in the zone; each lane passes one CTA."""
        mass, all_, most = self._p.over_warp(["add", "add", "max"], [mass, number, number])
        has_room = (all_ <= MAX_KEYS) & (most <= self._p.plan.list_size)
        self.set(mass=mass, number=all_, number_of_cta=number, has_room=has_room)


def search_lists(f: FilterSearch, zone: Zone, merged: Value) -> None:
    """Keeps what the filter keeps; its last key must be in the lists, which may be `merged` already."""
    p, plan = f.p, f.p.plan
    mass = p.max(zone.mass, 1e-30)
    per_unit, unit = p.divide(p.var(_LARGEST, "f32"), mass), mass * (1 / _LARGEST)

    def mass_of(key):
        return p.convert(p.weight(p.of_key(key)) * per_unit, "u32", "rni")

    first_of_cta, _ = p.before(zone.number_of_cta)
    _clear(p)
    p.store(p.word(plan.picked), 0, when=p.thread.equals(0))
    with p.when(~merged):
        _merge(p, zone, first_of_cta, mass_of)
    p.barrier()
    rest = f.goal - zone.above
    rest = p.max(f.measure(p.min(rest * per_unit, _LARGEST * 1.5), rest), 1.0)
    rest = p.var(p.convert(rest, "u32", "rpi"))
    key = _last_key(f, zone, rest)
    one = p.convert(p.max(mass_of(key), 1), "f32")
    number = f.number_that_reaches(p.convert(rest, "f32"), one)
    mass_above, equal = _of_lists(p, zone, first_of_cta, key)
    mass_above = p.convert(p.over_lanes("add", mass_above), "f32") * unit
    f.kept.down_to(key, number, zone.mass_above + mass_above, equal)


def _merge(p: RowProgram, zone: Zone, first_of_cta: Value, mass_of) -> None:
    """Copies the keys of all lists to one list, with a mass for each."""
    with p.each(p.thread, zone.number + p.lane, p.plan.threads) as entry:  # a warp stays together
        cta, is_key = p.var(0, "u32"), entry < zone.number
        for bit in reversed(range((p.ctas - 1).bit_length())):
            later = cta + (1 << bit)
            p.set(cta, later, is_key & (entry >= p.shuffle(first_of_cta, "idx", later)))
        in_list = entry - p.shuffle(first_of_cta, "idx", cta)
        (key,) = p.of_cta(p.word(p.plan.keys, in_list), cta, "s32", when=is_key)
        p.store(p.word(p.plan.histogram, entry, 2), key, mass_of(key), when=is_key)


def _clear(p: RowProgram) -> None:
    """Clears the sums over buckets, and the shortlist."""
    p.store(p.word(p.plan.sums, p.thread), p.var(0, "u32"), when=p.thread < 2 * _BUCKETS)
    p.store(p.word(p.plan.histogram + _SHORTLIST, p.thread), p.var(0, "u32"), when=p.thread < 2 * LANES)


@contextlib.contextmanager
def _each_key(p: RowProgram, first: Value, end: Value, step: int) -> Iterator[tuple[Value, Value]]:
    """Opens a GPU loop over the keys and masses of entries first, first + step, .. of the merged list."""
    with p.each(first, end, step) as entry:
        key, mass = p.load_vector(p.word(p.plan.histogram, entry, 2), "u32", 2)
        yield key.bits("s32"), mass


def number_from_min_p(p: RowProgram, zone: Zone) -> Value:
    """Returns how many keys of the merged list have at least the mass min_p, as a float."""
    number = p.var(0, "u32")
    with _each_key(p, p.lane, zone.number, LANES) as (key, _):
        p.increase(number, 1, p.weight(p.of_key(key)) >= p.min_p)
    return p.convert(p.over_lanes("add", number), "f32")


def _last_key(f: FilterSearch, zone: Zone, rest: Value) -> Value:
    """Returns the last kept key, in all threads. Measures are integers.

    Once a range has no more keys than a warp has lanes, they are copied to the shortlist. `rest` is what the zone must
    reach, and becomes what the entries with the last key must reach.
    """
    p, plan = f.p, f.p.plan
    keys, inside = KeyRange(p, zone.greatest, zone.least), p.var(zone.number)
    whole = p.var(keys.extent)
    sums, numbers = p.word(plan.sums), p.word(plan.sums + _BUCKETS)

    def one_round(bucket_of):
        with p.when(keys.extent.differs(whole)):  # not the first round
            p.barrier()
            _clear(p)
            p.barrier()

        with _each_key(p, p.thread, zone.number, plan.threads) as (key, mass):
            bucket, is_inside = bucket_of(key)
            with p.when(is_inside):
                p.add_to(sums + bucket * 4, f.measure(mass, 1))
                p.add_to(numbers + bucket * 4, 1)
        p.barrier()
        bucket, new_rest = bucket_that_reaches(p, p.load_vector(sums + p.lane * 8, "u32", 2), rest)
        p.set(rest, new_rest)
        p.set(inside, p.load(numbers + bucket * 4, "u32"))
        return bucket

    narrow(p, keys, _BUCKETS, one_round, stop=lambda: inside <= LANES)
    with p.when(keys.extent > 0):
        with _each_key(p, p.thread, zone.number, plan.threads) as (key, mass):
            with p.when(keys.distance(key) <= keys.extent):
                entry = p.take_from(p.word(plan.picked), 1)
                p.store(p.word(plan.histogram + _SHORTLIST, entry, 2), key, f.measure(mass, 1))
        p.barrier()
        p.set(keys.high, _last_of_shortlist(p, inside, rest))
    return keys.high


def _last_of_shortlist(p: RowProgram, number: Value, rest: Value) -> Value:
    """Returns the last kept key, and sets `rest`. Each lane takes one key, and adds up measures down to that key."""
    at = p.var(p.word(p.plan.histogram + _SHORTLIST))
    own = p.load(at + p.lane * 8, "s32", when=p.lane < number, default=KEEP_ALL)
    before, upto = p.var(0, "u32"), p.var(0, "u32")
    with p.each(0, number, 4):
        words = p.load_vector(at, "u32", 8)
        for key, amount in zip(words[::2], words[1::2]):  # 0 where there is none
            key = key.bits("s32")
            p.increase(before, amount, key > own)
            p.increase(upto, amount, key >= own)
        p.increase(at, 32)
    goal = p.min(rest, p.over_lanes("max", upto))  # rounding may have put the goal above the total
    last = p.over_lanes("max", p.select(upto >= goal, own, KEEP_ALL))
    p.set(rest, goal - p.shuffle(before, "idx", p.first_that(own.equals(last))))
    return last


def _of_lists(p: RowProgram, zone: Zone, first_of_cta: Value, last: Value) -> tuple[Value, Value]:
    """Returns the mass above a key and the number of entries with that key, for each CTA, from the merged list."""
    plan = p.plan
    with p.each(p.warp, p.ctas, p.warps) as cta:  # each warp counts the keys of one list after another
        mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
        first = p.shuffle(first_of_cta, "idx", cta)
        end = first + p.shuffle(zone.number_of_cta, "idx", cta)
        with _each_key(p, first + p.lane, end, LANES) as (key, mass):
            p.increase(mass_above, mass, key > last)
            p.increase(equal, 1, key.equals(last))
        of_list = p.over_warp(["add", "add"], [mass_above, equal])
        p.store(p.word(plan.counters, cta, 4), *of_list, when=p.first_lane)
    p.barrier()
    mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
    p.load_into([mass_above, equal], p.word(plan.counters, p.lane, 4), when=p.lane < p.ctas)
    return mass_above, equal
