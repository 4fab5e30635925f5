"""Finds the last entry that a filter keeps in a zone: between two elements where the entry is expected.

    elements    5.1  5.0 | 3.2  3.1  3.1  3.0 | 2.9 ..       the zone is from 3 to 4
    sweep       the mass of 5.1 and 5.0; the keys of 3.2, 3.1, 3.1, 3.0 in lists, one for each CTA
    lists       the second 3.1 is the last entry

Every CTA reads the lists of all CTAs, and decides by itself (`lists_ptx`). There are these exceptions:

    the zone has one key                          no list is needed
    the zone starts at a bound for a small        the caller retries with a better bound, and then with a histogram
    top_k, and the lists overflow
    the zone has two keys, and the lists          a sweep counts the elements with the greater key
    overflow
    the lists overflow otherwise                  the zone is searched digit by digit (`digits_ptx`)
    the zone does not reach the goal              the row is searched digit by digit
"""

from collections.abc import Callable

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import digits_ptx, lists_ptx
from pallas_softmax._src.sample.lists_ptx import Zone
from pallas_softmax._src.sample.plan import WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, KEEP_ALL, LEAST_FINITE, RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch


def sweep_from_bound(p: RowProgram, zone: Zone, low: Value) -> Value:
    """Lists the keys from a bound up: at least top_k elements reach `low`. Returns whether the lists overflow.

    If they overflow, a CTA stops when its list is full. A single key needs no list, so it never overflows.
    """
    listed, plan = _start_list(p), p.plan
    may_overflow = low < p.top
    mass, number = p.var(0, "f32"), p.var(0, "u32")
    for words, address in p.sweep():
        with p.when(p.any(p.greatest(words) >= low)):  # most words have no element in the zone
            is_full = may_overflow & (p.load(listed, "u32") > plan.list_size)
            p.increase(number, 1, is_full)
            with p.when(~is_full):
                inside = p.var(0, "u32")
                for i, x in enumerate(p.floats(words)):
                    p.update(inside, "or", 1 << i, x >= low)
                p.increase(number, p.count_ones(inside))
                _list_keys(p, address, inside, lambda x, _: p.increase(mass, p.weight(x)))
    zone.set_sums(*p.each_cta(["add", "add"], [mass, number], [0.0, 0], p.word(plan.zone)))
    least = p.select(low.equals(0.0), p.key(p.var(-0.0, "f32")), p.key(low))
    zone.set(found=True, least=least, greatest=p.key(p.top), above=0, mass_above=0)
    return may_overflow & ~zone.has_room


def sweep_between(f: FilterSearch, zone: Zone, low: Value, high: Value) -> None:
    """Adds up the mass above `high`, and lists the keys from `low` to `high`, as many as there is room for."""
    p, plan = f.p, f.p.plan
    _start_list(p)
    mass_above, above, mass, number = p.var(0, "f32"), p.var(0, "f32"), p.var(0, "f32"), p.var(0, "u32")
    least, greatest = p.var(HIGHEST, "s32"), p.var(KEEP_ALL, "s32")

    def add(x, key, when=None):
        p.increase(mass, p.weight(x), when)
        p.update(least, "min", key, when)
        p.update(greatest, "max", key, when)

    for words, address in p.sweep():
        elements, inside = p.floats(words), p.var(0, "u32")  # a bit for each element
        for i, x in enumerate(elements):
            is_above = x > high
            p.update(inside, "or", 1 << i, (x >= low) & ~is_above)
            p.increase(mass_above, p.weight(x), is_above)
        with p.when(~f.is_mass):
            for x in elements:
                p.increase(above, 1, x > high)
        with p.when(p.any(inside > 0)):
            p.increase(number, p.count_ones(inside))
            unlisted = _list_keys(p, address, inside, add)
            with p.when(unlisted > 0):
                # The order is the same as in `_list_keys`, so that the mass has the same bits.
                for i, x in enumerate(p.floats(words)):
                    add(x, p.key(x), (unlisted & (1 << i)).differs(0))
    mass, number, mass_above, above, least, greatest = p.each_cta(
        ["add", "add", "add", "add", "min", "max"],
        [mass, number, mass_above, p.convert(above, "u32"), least, greatest],
        [0.0, 0, 0.0, 0, HIGHEST, KEEP_ALL],
        p.word(plan.zone),
    )
    zone.set_sums(mass, number)
    edges_and_sums = least, greatest, mass_above, above
    least, greatest, mass_above, above = p.over_warp(["min", "max", "add", "add"], edges_and_sums)
    zone.set(
        least=least,
        greatest=greatest,
        mass_above=mass_above,
        above=f.measure(mass_above, p.convert(above, "f32")),
    )
    reached = f.measure(zone.mass, p.convert(zone.number, "f32")) + zone.above >= f.goal
    zone.set(found=(reached | (low <= LEAST_FINITE)) & (zone.above < f.goal))


def _start_list(p: RowProgram) -> Value:
    """Empties the list of the CTA; returns the address of its number of keys."""
    listed = p.word(p.plan.listed)
    p.store(listed, 0, when=p.thread.equals(0))
    p.barrier()
    return listed


def _list_keys(p: RowProgram, address: Value, inside: Value, add: Callable[[Value, Value], object]) -> Value:
    """Lists the keys of the elements of a sweep that have their bit in `inside`, if the CTA's list has room for all.

    Then this clears `inside`, and add(element, key) writes what else is done with each. Returns `inside`.
    """
    elements, vec, count = p.elements, p.plan.window.vec, p.count_ones(inside)
    entry = p.take_from(p.word(p.plan.listed), count, when=inside > 0, default=0)
    with p.when(entry + count <= p.plan.list_size), p.loop() as leave:
        leave(inside.equals(0))
        number = p.lowest_bit(inside)
        load, element = number >> (vec.bit_length() - 1), number & (vec - 1)
        at = address + load * WARP_LOAD_BYTES + element * elements.itemsize
        x = elements.float_of_bits(p, elements.load_bits(p, at))
        key = p.key(x)
        add(x, key)
        p.store(p.word(p.plan.keys, entry), key)
        p.store(p.word(p.plan.key_positions) + entry * 2, p.convert(p.position_of(at).bits("u32"), "u16"))
        p.increase(entry, 1)
        p.set(inside, inside & (inside - 1))
    return inside


def search_zone(f: FilterSearch, zone: Zone, searched: Value) -> None:
    """Keeps what the filter keeps; its last entry may be outside the zone.

    `searched` is a condition: whether the zone was searched before, for another filter.
    """
    p = f.p
    nothing = zone.found & zone.number.equals(0)  # the row ends before it reaches the goal
    one_key = zone.found & ~nothing & zone.least.equals(zone.greatest)
    several = zone.found & ~nothing & ~one_key
    listed = several & zone.has_room
    two_keys = several & ~zone.has_room & (zone.greatest - zone.least).equals(1)
    with p.when(nothing):
        f.kept.down_to_all(KEEP_ALL, zone.mass_above)
    with p.when(one_key):
        f.keep_down_to(zone.least, zone.above, zone.mass_above, zone.number_of_cta)
    with p.when(listed):
        lists_ptx.search_lists(f, zone, searched)
    with p.when(two_keys):
        _search_two_keys(f, zone, searched)
    with p.when(~(nothing | one_key | listed | two_keys)):
        high = p.select(zone.found, zone.greatest, p.key(p.top))
        low = p.select(zone.found, zone.least, p.key(p.var(LEAST_FINITE, "f32")))
        digits_ptx.search_digits(f, high, low, p.select(zone.found, zone.above, 0.0))


def _search_two_keys(f: FilterSearch, zone: Zone, counted: Value) -> None:
    """Keeps what the filter keeps in a zone of two keys, such as +0 and -0.

    `counted` is a condition: whether an earlier filter counted the elements with the greater key.
    """
    p, at = f.p, f.p.word(f.p.plan.counted)
    with p.when(~counted):
        number = p.var(0, "u32")
        for words, _ in p.sweep():
            for x in p.floats(words):
                p.increase(number, 1, p.key(x).equals(zone.greatest))
        p.over_cta(["add"], [number], [0], at)
        p.sync_cluster()
    (greater,) = p.of_ctas(at, ["u32"], [0])
    of_greater = p.convert(p.over_lanes("add", greater), "f32")
    weight = p.weight(p.of_key(zone.greatest))
    above = zone.above + f.measure(of_greater * weight, of_greater)
    is_greater = p.var(above >= f.goal)
    with p.when(is_greater):
        f.keep_down_to(zone.greatest, zone.above, zone.mass_above, greater)
    with p.when(~is_greater):
        mass_above = zone.mass_above + of_greater * weight
        f.keep_down_to(zone.least, above, mass_above, zone.number_of_cta - greater)
