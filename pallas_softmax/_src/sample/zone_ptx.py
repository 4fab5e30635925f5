"""Finds the last entry that a filter keeps in a zone: between two elements where the entry is expected.

    elements    5.1  5.0 | 3.2  3.1  3.1  3.0 | 2.9 ..       the zone is from 3 to 4
    sweep       the mass of 5.1 and 5.0; the keys of 3.2, 3.1, 3.1, 3.0 in lists, one for each CTA
    lists       the second 3.1 is the last entry

Every CTA reads the lists of all CTAs, and decides by itself (`lists_ptx`). There are these exceptions:

    the lists overflow; the zone starts at a      the caller retries with a better bound, and then with a histogram
    bound for a small top_k
    the lists overflow; the zone has two keys     a sweep counts the elements with the greater key
    the lists overflow otherwise                  the zone is searched digit by digit (`digits_ptx`)
    the zone does not reach the goal              the row is searched digit by digit
"""

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import digits_ptx, lists_ptx
from pallas_softmax._src.sample.lists_ptx import Zone
from pallas_softmax._src.sample.plan import WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, LEAST_FINITE, RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch

_HIGHEST = 2**31 - 1  # a key above all others


def search_zone(f: FilterSearch, zone: Zone, low: Value, high: Value, from_bound: Value) -> Value:
    """Keeps what the filter keeps; or returns True if `from_bound`, and the lists have no room for the zone.

    Args:
      f: the search.
      zone: what is known of the zone; if nothing is known, this finds it.
      low, high: the least and the greatest element of the zone, which need not be in the row.
      from_bound: whether the zone starts at a bound for a small top_k. Then nothing is above it, and it probably has
        few keys.
    """
    p = f.p
    may_fail = from_bound & (low < high)  # a single key needs no list
    with p.when(~zone.known):
        _sweep(f, zone, low, high, from_bound, may_fail)
    fits = lists_ptx.have_room(p, zone)
    failed = p.var(may_fail & ~fits)
    with p.when(~failed):
        nothing = zone.found & zone.number.equals(0)  # the row ends before it reaches the goal
        with p.when(nothing):
            f.kept.down_to_the_last(zone.mass_above_of_cta)
        with p.when(~nothing):
            _threshold(f, zone, fits)
    return failed


def _sweep(f: FilterSearch, zone: Zone, low: Value, high: Value, from_bound: Value, may_fail: Value) -> None:
    """Sums up the mass above `high`, and lists the keys from `low` to `high`, as many as there is room for.

    If the search `may_fail`, a CTA stops when its list overflows. Its number of keys is then too large for the list.
    """
    p, plan = f.p, f.p.plan
    p.store(p.word(plan.listed), 0, when=p.thread.equals(0))
    p.barrier()
    mass_above, above, mass, number = (p.var(0, "f32") for _ in range(4))
    least, greatest = p.var(_HIGHEST, "s32"), p.var(KEEP_ALL, "s32")

    def add(x, when=None):
        key = p.key(x)
        p.increase(mass, p.weight(x), when)
        p.update(least, "min", key, when)
        p.update(greatest, "max", key, when)
        return key

    def take(words, address):
        some = p.var(1, "u32")
        with p.when(from_bound):  # most words have no element in the zone
            p.set(some, p.select(p.any(p.greatest(words) >= low), 1, 0, "u32"))
            with p.when(may_fail & some.equals(1)):
                fails = p.load(p.word(plan.listed), "u32") > plan.list_size
                p.increase(number, 1, fails)
                p.set(some, 0, fails)
        with p.when(some.equals(1)):
            elements, inside = p.floats(words), p.var(0, "u32")  # a bit for each element
            with p.when(from_bound):  # nothing is above
                for i, x in enumerate(elements):
                    p.update(inside, "or", 1 << i, x >= low)
            with p.when(~from_bound):
                for i, x in enumerate(elements):
                    is_above = x > high
                    p.update(inside, "or", 1 << i, (x >= low) & ~is_above)
                    p.increase(mass_above, p.weight(x), is_above)
                with p.when(~f.is_mass):
                    for x in elements:
                        p.increase(above, 1, x > high)
            with p.when(p.any(inside > 0)):
                count = p.count_ones(inside)
                p.increase(number, p.convert(count, "f32"))
                slot = p.take_from(p.word(plan.listed), count, when=inside > 0, default=0)
                has_room = p.var(slot + count <= plan.list_size)
                with p.when(~has_room):  # in the same order as below, so that the mass has the same bits
                    for i, x in enumerate(p.floats(words)):
                        add(x, (inside & (1 << i)).differs(0))
                with p.when(has_room), p.loop() as leave:
                    leave(inside.equals(0))
                    at = _address_of(p, address, p.lowest_bit(inside))
                    key = add(p.elements.float_of_bits(p, p.elements.load_bits(p, at)))
                    p.store(p.word(plan.keys, slot), key)
                    p.increase(slot, 1)
                    p.set(inside, inside & (inside - 1))

    p.sweep(take)
    number = p.convert(number, "u32")
    with p.when(from_bound):  # all else is known
        p.over_cta(["add", "add"], [mass, number], [0.0, 0], plan.zone)
    with p.when(~from_bound):
        p.over_cta(
            ["add", "add", "add", "add", "min", "max"],
            [mass, number, mass_above, p.convert(above, "u32"), least, greatest],
            [0.0, 0, 0.0, 0, _HIGHEST, KEEP_ALL],
            plan.zone,
        )
    p.sync_cluster()
    mass, number, mass_above, above, least, greatest, _, _ = p.of_ctas(plan.zone, 8)
    mass, mass_above = mass.bits("f32"), mass_above.bits("f32")
    p.set(zone.number_of_cta, number)
    for found, value in zip(
        (zone.mass, zone.number, zone.most), p.over_warp(["add", "add", "max"], [mass, number, number])
    ):
        p.set(found, value)
    p.set(zone.least, p.select(low.equals(0.0), p.key(p.var(-0.0, "f32")), p.key(low)))
    p.set(zone.greatest, p.key(high))
    p.set(zone.above, 0)
    p.set(zone.mass_above_of_cta, 0)
    with p.when(~from_bound):
        inside = p.lane < p.ctas
        least = p.select(inside, least.bits("s32"), _HIGHEST)
        greatest = p.select(inside, greatest.bits("s32"), KEEP_ALL)
        least, greatest, all_above, above = p.over_warp(
            ["min", "max", "add", "add"], [least, greatest, mass_above, above]
        )
        p.set(zone.least, least)
        p.set(zone.greatest, greatest)
        p.set(zone.above, f.measure(all_above, p.convert(above, "f32")))
        p.set(zone.mass_above_of_cta, mass_above)
    reached = f.measure(zone.mass, p.convert(zone.number, "f32")) + zone.above >= f.goal
    p.set(zone.found, (reached | (low <= LEAST_FINITE)) & (zone.above < f.goal))


def _address_of(p: RowProgram, address: Value, number: Value) -> Value:
    """Returns the address of one of the elements that `RowProgram.sweep` takes at once, by its number among them."""
    vec, itemsize = p.plan.window.vec, p.elements.itemsize
    load, element = number >> (vec.bit_length() - 1), number & (vec - 1)
    return address + load * WARP_LOAD_BYTES + element * itemsize


def _threshold(f: FilterSearch, zone: Zone, fits: Value) -> None:
    """Finds the last key, in the zone or else in the row, and keeps everything down to it."""
    p = f.p
    one_key = p.var(zone.found & zone.least.equals(zone.greatest))
    with p.when(one_key):
        f.keep_down_to(zone.least, zone.above, zone.mass_above_of_cta, zone.number_of_cta)
        p.set(zone.known, one_key)
    listed = p.var(fits & zone.found & ~one_key)
    with p.when(listed):
        lists_ptx.search_lists(f, zone)
    two_keys = p.var(zone.found & ~fits & (zone.greatest - zone.least).equals(1))
    with p.when(two_keys):
        _of_two_keys(f, zone)
    with p.when(~(listed | one_key | two_keys)):
        high = p.select(zone.found, zone.greatest, p.key(p.top))
        low = p.select(zone.found, zone.least, p.key(p.var(LEAST_FINITE, "f32")))
        digits_ptx.search_digits(f, high, low, p.select(zone.found, zone.above, 0.0))


def _of_two_keys(f: FilterSearch, zone: Zone) -> None:
    """Keeps what the filter keeps in a zone of two keys, such as +0 and -0; a sweep counts the greater one."""
    p = f.p
    with p.when(~zone.known):
        number = p.var(0, "u32")

        def take(words, _):
            for x in p.floats(words):
                p.increase(number, 1, p.key(x).equals(zone.greatest))

        p.sweep(take)
        p.over_cta(["add"], [number], [0], p.plan.kept)
        p.set(zone.known, True)
        p.sync_cluster()
    (greater,) = p.of_ctas(p.plan.kept, 1)
    of_greater = p.convert(p.over_lanes("add", greater), "f32")
    weight = p.weight(p.of_key(zone.greatest))
    above = zone.above + f.measure(of_greater * weight, of_greater)
    mass_above_of_cta = zone.mass_above_of_cta + p.convert(greater, "f32") * weight
    is_greater = p.var(above >= f.goal)
    with p.when(is_greater):
        f.keep_down_to(zone.greatest, zone.above, zone.mass_above_of_cta, greater)
    with p.when(~is_greater):
        f.keep_down_to(zone.least, above, mass_above_of_cta, zone.number_of_cta - greater)
