"""Finds the last entry that a filter keeps in a zone: between two elements where the entry is expected.

For top_p, and for a large top_k, a histogram shows where (`expected_zone`). It counts elements by their distance from
the largest, in buckets of equal widths, and so gives the masses nearly. For top_p = 0.5:

    numbers of elements      2 7 9 | 30 41 38 | 60 ...       the goal, 0.5 of the mass, is reached in the zone
                                   '---zone---'

An example of the search:

    elements    5.1  5.0 | 3.2  3.1  3.1  3.0 | 2.9 ..       the zone is from 3 to 4
    sweep       the mass of 5.1 and 5.0; the keys of 3.2, 3.1, 3.1, 3.0 in lists, one for each CTA
    lists       12 40 | 7 31 | 40 3       (other keys, of three CTAs)
    all keys    12 40 7 31 40 3           in each CTA, with the mass of each key; so each CTA finds the last key, 40
    results     0, 1 | 0, 0 | 0, 1        for each list: the mass above the last key, and how many keys equal it

There are these exceptions:

    the zone has one key                          no list is needed
    the zone starts at a bound for a small        the caller retries with a better bound, and then with a histogram
    top_k, and the lists overflow
    the zone has two keys, and the lists          a sweep counts the elements with the greater key
    overflow
    the lists overflow otherwise                  the zone is searched digit by digit
    the zone does not reach the goal              the row is searched digit by digit
"""

import contextlib
from collections.abc import Callable, Iterator

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import filter_ptx
from pallas_softmax._src.sample.filter_ptx import MOST_UNITS, FilterSearch, search_digits
from pallas_softmax._src.sample.plan import BUCKETS, SCRATCH, SECTIONS
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, PartProgram

_ROUND_BUCKETS = 2 * LANES  # buckets in a round over the listed keys, two for each lane
# The words of the histogram hold all listed keys, and then a shortlist with a key for each lane; masses follow keys.
_MAX_KEYS = BUCKETS // 2 - LANES
_SHORTLIST = SCRATCH.histogram + 2 * _MAX_KEYS


class Zone:
    """A range of keys that may contain the key of the last entry, in variables. Sums are over all CTAs.

    `number_of_cta` is of the CTA with the lane's number.
    """

    def __init__(self, p: PartProgram):
        self._p = p
        self.found = p.fresh("pred")  # whether the zone reaches the goal, or the row ends in it before that
        self.has_room = p.fresh("pred")  # whether each CTA's list, and the list of all keys, have room
        self.least, self.greatest = p.fresh("s32"), p.fresh("s32")  # keys
        self.number, self.number_of_cta = p.fresh("u32"), p.fresh("u32")  # of elements with a key in the zone
        self.mass = p.fresh("f32")  # of the elements in the zone
        self.above = p.fresh("f32")  # the measure of the elements above the zone
        self.mass_above = p.fresh("f32")  # of these elements

    def set(self, **values) -> None:
        for name, value in values.items():
            self._p.set(getattr(self, name), value)

    def set_sums(self, mass: Value, number: Value) -> None:
        """Sets what follows from the mass and the number of elements in the zone; a lane passes the sums of a CTA."""
        mass, all_, most = self._p.over_warp(["add", "add", "max"], [mass, number, number])
        has_room = (all_ <= _MAX_KEYS) & (most <= self._p.plan.list_size)
        self.set(mass=mass, number=all_, number_of_cta=number, has_room=has_room)


# --- The sweeps that make the lists


def sweep_from_bound(p: PartProgram, zone: Zone, low: Value) -> Value:
    """Lists the keys from a bound up: at least top_k elements reach `low`. Returns whether the lists overflow.

    A CTA stops when its list is full. A single key needs no list, so it never overflows.
    """
    listed, may_overflow = _start_list(p), low < p.top
    mass, number = p.var(0, "f32"), p.var(0, "u32")

    def list_words(words, address):
        with p.when(p.any(p.greatest(words) >= low)):  # most words have no element in the zone
            is_full = may_overflow & (p.load(listed, "u32") > p.plan.list_size)
            p.increase(number, 1, is_full)
            with p.when(~is_full):
                inside = p.var(0, "u32")
                for i, x in enumerate(p.floats(words)):
                    p.update(inside, "or", 1 << i, x >= low)
                p.increase(number, p.count_ones(inside))
                _list_keys(p, address, inside, lambda x, _: p.increase(mass, p.mass(x)))

    p.sweep(list_words)
    zone.set_sums(*p.over_each_cta(["add", "add"], [mass, number], [0.0, 0], p.word(SCRATCH.zone)))
    least = p.select(low.equals(0.0), p.key(p.var(-0.0, "f32")), p.key(low))
    zone.set(found=True, least=least, greatest=p.key(p.top), above=0, mass_above=0)
    return may_overflow & ~zone.has_room


def sweep_between(f: FilterSearch, zone: Zone, low: Value, high: Value) -> None:
    """Adds up the mass above `high`, and lists the keys from `low` to `high`, as far as there is room."""
    p = f.p
    _start_list(p)
    mass_above, above, mass, number = p.var(0, "f32"), p.var(0, "f32"), p.var(0, "f32"), p.var(0, "u32")
    least, greatest = p.var(HIGHEST, "s32"), p.var(KEEP_ALL, "s32")

    def add(x, key, when=None):
        p.increase(mass, p.mass(x), when)
        p.update(least, "min", key, when)
        p.update(greatest, "max", key, when)

    def list_words(words, address):
        elements, inside = p.floats(words), p.var(0, "u32")  # a bit for each element
        for i, x in enumerate(elements):
            is_above = x > high
            p.update(inside, "or", 1 << i, (x >= low) & ~is_above)
            p.increase(mass_above, p.mass(x), is_above)
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

    p.sweep(list_words)
    mass, number, *rest = p.over_each_cta(
        ["add", "add", "add", "add", "min", "max"],
        [mass, number, mass_above, p.convert(above, "u32"), least, greatest],
        [0.0, 0, 0.0, 0, HIGHEST, KEEP_ALL],
        p.word(SCRATCH.zone),
    )
    zone.set_sums(mass, number)
    mass_above, above, least, greatest = rest
    ops, values = ["min", "max", "add", "add"], [least, greatest, mass_above, above]
    least, greatest, mass_above, above = p.over_warp(ops, values)
    above = f.measure(mass_above, p.convert(above, "f32"))
    zone.set(least=least, greatest=greatest, mass_above=mass_above, above=above)
    reached = f.measure(zone.mass, p.convert(zone.number, "f32")) + zone.above >= f.goal
    zone.set(found=(reached | (low <= LEAST_FINITE)) & (zone.above < f.goal))


def _start_list(p: PartProgram) -> Value:
    listed = p.word(SCRATCH.listed)
    p.store(listed, 0, when=p.thread.equals(0))
    p.barrier()
    return listed


def _list_keys(p: PartProgram, address: Value, inside: Value, add: Callable[[Value, Value], object]) -> Value:
    """Lists the keys of a sweep's elements that have a bit in `inside`, and calls add(element, key) for each.

    It lists none unless the CTA's list has room for all. Returns `inside`, which becomes 0 if they are listed.
    """
    run, count = p.plan.window.run, p.count_ones(inside)
    entry = p.take_from(p.word(SCRATCH.listed), count, when=inside > 0, default=0)
    with p.when(entry + count <= p.plan.list_size), p.loop() as leave:
        leave(inside.equals(0))
        number = p.lowest_bit(inside)
        position = p.multiply_add(number >> log2(run), LANES * run, number & (run - 1))
        at = address + position * p.elements.itemsize
        x = p.element(at)
        key = p.key(x)
        add(x, key)
        p.store(p.word(p.plan.keys, entry), key)
        p.store(p.word(p.plan.key_positions) + entry * 2, p.convert(p.position_of(at).bits("u32"), "u16"))
        p.increase(entry, 1)
        p.set(inside, inside & (inside - 1))
    return inside


# --- The search


def search_zone(f: FilterSearch, zone: Zone, searched: Value) -> None:
    """Finds the last entry of the filter, which may be outside of the zone, and updates `f.kept`.

    `searched` is a condition: whether the zone was searched before, for another filter.
    """
    p = f.p
    nothing = zone.found & zone.number.equals(0)  # the row ends before it reaches the goal
    one_key = zone.found & ~nothing & zone.least.equals(zone.greatest)
    several = zone.found & ~nothing & ~one_key
    listed = several & zone.has_room
    two_keys = several & ~zone.has_room & (zone.greatest - zone.least).equals(1)
    with p.when(nothing & f.kept.keeps_all()):
        f.kept.all_down_to(KEEP_ALL, zone.mass_above)
    with p.when(one_key):
        f.keep_down_to(zone.least, zone.above, zone.mass_above, zone.number_of_cta)
    with p.when(listed):
        _search_lists(f, zone, searched)
    with p.when(two_keys):
        _search_two_keys(f, zone, searched)
    with p.when(~(nothing | one_key | listed | two_keys)):
        high = p.select(zone.found, zone.greatest, p.key(p.top))
        low = p.select(zone.found, zone.least, p.key(p.var(LEAST_FINITE, "f32")))
        search_digits(f, high, low, p.select(zone.found, zone.above, 0.0))


def _search_two_keys(f: FilterSearch, zone: Zone, counted: Value) -> None:
    """Searches a zone of two keys, such as +0 and -0. `counted` says whether the greater ones are counted."""
    p, at = f.p, f.p.word(SCRATCH.counted)
    with p.when(~counted):
        number = p.var(0, "u32")
        p.sweep_elements(lambda x: p.increase(number, 1, p.key(x).equals(zone.greatest)))
        p.over_cta(["add"], [number], [0], at)
        p.sync_cluster()
    (greater,) = p.fetched(at, p.lane, p.ctas, ["u32"], [0])
    number = p.convert(p.over_lanes("add", greater), "f32")
    mass = p.mass(p.from_key(zone.greatest))
    above = zone.above + f.measure(number * mass, number)
    is_greater = p.var(above >= f.goal)
    with p.when(is_greater):
        f.keep_down_to(zone.greatest, zone.above, zone.mass_above, greater)
    with p.when(~is_greater):
        mass_above = zone.mass_above + number * mass
        f.keep_down_to(zone.least, above, mass_above, zone.number_of_cta - greater)


def _search_lists(f: FilterSearch, zone: Zone, copied: Value) -> None:
    """Searches the lists, after it copies the keys of all CTAs to one list, with a mass for each, unless `copied`.

    Masses are added as integers, as in `search_digits`; here the mass of the whole zone counts as `MOST_UNITS`.
    """
    p = f.p
    mass = p.max(zone.mass, 1e-30)  # so that its reciprocal is finite
    units_per_mass, mass_of_unit = p.divide(p.var(MOST_UNITS, "f32"), mass), mass * (1 / MOST_UNITS)

    def units_of(key):
        return p.convert(p.mass(p.from_key(key)) * units_per_mass, "u32", "rni")

    first_of_cta, _ = p.before(zone.number_of_cta)
    _clear_sums(p)
    p.store(p.word(SCRATCH.picked), 0, when=p.thread.equals(0))
    with p.when(~copied), p.each(p.thread, zone.number + p.lane, p.plan.threads) as entry:  # a warp stays together
        cta, is_key = p.var(0, "u32"), entry < zone.number
        for bit in reversed(range((p.ctas - 1).bit_length())):
            later = cta + (1 << bit)
            p.set(cta, later, is_key & (entry >= p.shuffle(first_of_cta, "idx", later)))
        in_list = entry - p.shuffle(first_of_cta, "idx", cta)
        (key,) = p.of_cta(p.word(p.plan.keys, in_list), cta, "s32", when=is_key)
        p.store(p.word(SCRATCH.histogram, entry, 2), key, units_of(key), when=is_key)
    p.barrier()
    rest = f.goal - zone.above
    # Rounding may put the goal above the mass of the zone, by less than half. 1.5 times `MOST_UNITS` fits in 32 bits.
    rest = p.max(f.measure(p.min(rest * units_per_mass, MOST_UNITS * 1.5), rest), 1.0)
    rest = p.var(p.convert(rest, "u32", "rpi"))
    key = _last_key(f, zone, rest)
    one = p.convert(p.max(units_of(key), 1), "f32")
    number = f.number_that_reaches(p.convert(rest, "f32"), one)
    units_above, equal = _sums_of_lists(p, zone, first_of_cta, key)
    mass_above = p.convert(p.over_lanes("add", units_above), "f32") * mass_of_unit
    f.kept.down_to(key, number, zone.mass_above + mass_above, equal)


def _clear_sums(p: PartProgram) -> None:
    p.store(p.word(SCRATCH.sums, p.thread), p.var(0, "u32"), when=p.thread < 2 * _ROUND_BUCKETS)
    p.store(p.word(_SHORTLIST, p.thread), p.var(0, "u32"), when=p.thread < 2 * LANES)


@contextlib.contextmanager
def _each_key(p: PartProgram, first: Value, end: Value, step: int) -> Iterator[tuple[Value, Value]]:
    """Opens a GPU loop over entries of the list of all keys."""
    with p.each(first, end, step) as entry:
        key, units = p.load_vector(p.word(SCRATCH.histogram, entry, 2), "u32", 2)
        yield key.bits("s32"), units


def _last_key(f: FilterSearch, zone: Zone, rest: Value) -> Value:
    """Returns the last kept key, in all threads. `rest` becomes what the entries with this key must reach.

    Once a range has no more keys than a warp has lanes, they are copied to the shortlist.
    """
    p = f.p
    keys, number_inside = KeyRange(p, zone.greatest, zone.least), p.var(zone.number)
    first_extent = p.var(keys.extent)
    sums, numbers = p.word(SCRATCH.sums), p.word(SCRATCH.sums + _ROUND_BUCKETS)

    def one_round(bucket_of):
        with p.when(keys.extent.differs(first_extent)):  # not the first round
            p.barrier()
            _clear_sums(p)
            p.barrier()

        with _each_key(p, p.thread, zone.number, p.plan.threads) as (key, units):
            bucket, is_inside = bucket_of(key)
            with p.when(is_inside):
                p.add_to(sums + bucket * 4, f.measure(units, 1))
                p.add_to(numbers + bucket * 4, 1)
        p.barrier()
        bucket, new_rest = bucket_that_reaches(p, p.load_vector(sums + p.lane * 8, "u32", 2), rest)
        p.set(rest, new_rest)
        p.set(number_inside, p.load(numbers + bucket * 4, "u32"))
        return bucket

    narrow(p, keys, _ROUND_BUCKETS, one_round, stop=lambda: number_inside <= LANES)
    with p.when(keys.extent > 0):
        with _each_key(p, p.thread, zone.number, p.plan.threads) as (key, units):
            with p.when(keys.distance(key) <= keys.extent):
                entry = p.take_from(p.word(SCRATCH.picked), 1)
                p.store(p.word(_SHORTLIST, entry, 2), key, f.measure(units, 1))
        p.barrier()
        p.set(keys.high, _last_of_shortlist(p, number_inside, rest))
    return keys.high


def _last_of_shortlist(p: PartProgram, number: Value, rest: Value) -> Value:
    """Returns the last kept key, and sets `rest`. Each lane takes one key, and adds up measures down to it."""
    at = p.var(p.word(_SHORTLIST))
    own = p.load(at + p.lane * 8, "s32", when=p.lane < number, default=KEEP_ALL)
    before, upto = p.var(0, "u32"), p.var(0, "u32")
    with p.each(0, number, 4):
        words = p.load_vector(at, "u32", 8)
        for key, measure in zip(words[::2], words[1::2]):  # 0 where there is none
            key = key.bits("s32")
            p.increase(before, measure, key > own)
            p.increase(upto, measure, key >= own)
        p.increase(at, 32)
    goal = p.min(rest, p.over_lanes("max", upto))  # rounding may have put the goal above the total
    last = p.over_lanes("max", p.select(upto >= goal, own, KEEP_ALL))
    p.set(rest, goal - p.shuffle(before, "idx", p.first_that(own.equals(last))))
    return last


def _sums_of_lists(p: PartProgram, zone: Zone, first_of_cta: Value, last: Value) -> list[Value]:
    """Returns the mass above a key and the number of entries with it, in the list of this lane's CTA."""
    with p.each(p.warp, p.ctas, p.warps) as cta:  # each warp counts the keys of one list after another
        units_above, equal = p.var(0, "u32"), p.var(0, "u32")
        first = p.shuffle(first_of_cta, "idx", cta)
        end = first + p.shuffle(zone.number_of_cta, "idx", cta)
        with _each_key(p, first + p.lane, end, LANES) as (key, units):
            p.increase(units_above, units, key > last)
            p.increase(equal, 1, key.equals(last))
        sums = p.over_warp(["add", "add"], [units_above, equal])
        p.store(p.record_of_cta(cta), *sums, when=p.first_lane)
    return p.from_records(("u32", "u32"), (0, 0), p.ctas)


# --- Where the zone is

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


def expected_zone(f: FilterSearch) -> tuple[Value, Value]:
    """Returns the least and the greatest element that may be the last entry."""
    p = f.p
    depth = p.log2(p.divide(p.var(float(p.plan.window.vocab), "f32"), f.kept.total))
    buckets_per_octave = p.divide(p.var(float(BUCKETS), "f32"), p.max(depth * _SPAN, 2.0**-10))
    # A unit is a difference of 1 between logits. The limits 2^-10 and 1e30 keep both numbers finite.
    buckets_per_unit = p.min(p.octaves_per_unit * buckets_per_octave, 1e30)
    octaves_per_bucket = p.divide(p.octaves_per_unit, buckets_per_unit)
    _count_distances(f, buckets_per_unit, octaves_per_bucket)
    with p.when(p.warp < 2):
        end = _end_of_zone(f, buckets_per_unit, octaves_per_bucket, p.warp.equals(0))
        p.store(p.word(SCRATCH.picked, p.warp), end, when=p.first_lane)
    p.barrier()
    greatest, least = p.load_vector(p.word(SCRATCH.picked), "f32", 2)
    return least, greatest


def _count_distances(f: FilterSearch, buckets_per_unit: Value, octaves_per_bucket: Value) -> None:
    p = f.p
    filter_ptx.clear_buckets(p)
    # The address follows from the bits of magic + bucket, times 4, in arithmetic modulo 2^32.
    base = p.word(SCRATCH.histogram) - (4 * _MAGIC_BITS) % 2**32

    def count(x):
        bits = p.multiply_add(p.top - x, buckets_per_unit, _MAGIC).bits("u32")
        p.add_to((p.min(bits, _MAGIC_BITS + BUCKETS - 1) << 2) + base, 1)

    p.sweep_elements(count)

    # Horner's rule sums the masses, as if each element lay in the middle of its bucket. `ratio` is the mass of an
    # element relative to an element one bucket further up.
    ratio = f.measure_below(octaves_per_bucket)

    def horner(bucket, numbers):
        sum_ = p.convert(numbers[-1], "f32")
        for number in numbers[-2::-1]:
            sum_ = p.multiply_add(sum_, ratio, p.convert(number, "f32"))
        return [sum_ * f.measure_below(p.convert(bucket, "f32") * octaves_per_bucket)]

    filter_ptx.sum_sections(p, horner)


def _end_of_zone(f: FilterSearch, buckets_per_unit: Value, octaves_per_bucket: Value, is_greatest: Value) -> Value:
    """Returns the greatest element of the zone, or the least one: the upper or the lower end of a bucket.

    The bucket reaches a goal that is lowered (for the greatest element) or raised by the bound on its error.
    """
    p = f.p
    goal = f.measure(f.goal * _error_of_goal(f, octaves_per_bucket, is_greatest), f.goal)
    section, rest = filter_ptx.section_that_reaches(p, goal, p.var(SCRATCH.sections, "u32"))
    bucket = section * _SECTION + p.lane
    address = p.word(SCRATCH.histogram, bucket)
    number = p.reduce("add", [p.of_cta(address, cta, "u32")[0] for cta in range(p.ctas)])
    measure = p.convert(number, "f32") * f.measure_below(p.convert(bucket, "f32") * octaves_per_bucket)
    measure = p.select(bucket.equals(BUCKETS - 1), INF, measure)
    bucket = section * _SECTION + bucket_that_reaches(p, [measure], rest)[0]
    half = p.select(is_greatest, -0.5, 0.5, "f32")
    end = p.max(p.top - p.divide(p.convert(bucket, "f32") + half, buckets_per_unit), LEAST_FINITE)
    is_outermost = bucket.equals(p.select(is_greatest, 0, BUCKETS - 1, "u32"))
    return p.select(is_outermost, p.select(is_greatest, p.top, LEAST_FINITE), end)


def _error_of_goal(f: FilterSearch, octaves_per_bucket: Value, is_greatest: Value) -> Value:
    """Returns a bound on the error of the goal, as a factor, if elements count as in the middle of their buckets.

    If all elements lay at the same end of their buckets, the error would be half a bucket. But the errors of many
    elements cancel. Masses in a bucket differ by a share b. Then the error of a mass m has a standard deviation of
    0.3 b m, because 1 / sqrt(12) = 0.3. No mass exceeds 1, so all errors together have at most 0.3 b sqrt(total).
    """
    p = f.p
    sign = p.select(is_greatest, -1.0, 1.0, "f32")
    errors = octaves_per_bucket * p.exp2(p.log2(f.kept.total) * -0.5) * _SIX_DEVIATIONS + _LEAST_ERROR
    if_cancelled = p.multiply_add(errors, sign, 1.0)
    if_at_end = p.exp2(octaves_per_bucket * sign * 0.5) * p.multiply_add(sign, _SUM_ERROR, 1.0)
    return p.select(is_greatest, p.max(if_at_end, if_cancelled), p.min(if_at_end, if_cancelled))
