"""The last entry that a filter keeps, from the lists of keys that the CTAs have made of a zone.

    lists       12 40 | 7 31 | 40 3      of three CTAs, as distances from the least key
    merged      12 40 7 31 40 3          in each CTA, with the mass of each
    one warp    40                       it finds the last key bit by bit
    all warps   40 | - | 40              what the list of each CTA has above it, and how many of it

Masses are added as integers, in units of which that of the whole zone has 2^31: keys come in any order, and the sums
are the same bits again.
"""

import dataclasses

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import LANES
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Value
from pallas_softmax.implementations.mosaic_gpu.sample.digits_ptx import number_of
from pallas_softmax.implementations.mosaic_gpu.sample.plan import BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.search_ptx import Search

_OF_LANE = 6  # keys that a lane has in registers
_FEW = LANES * _OF_LANE
MAX_KEYS = BUCKETS // 2 - _FEW  # the histogram has room for all of them and for few, with a measure for each
_LARGEST = 2.0**31  # the mass of all keys as an integer


@dataclasses.dataclass(frozen=True)
class Zone:
    """Neighbouring keys, of which some may be that of the last entry.

    Attributes:
      found: a condition: whether the goal is reached among them.
      least, greatest: the first and the last of them.
      number: how many elements have such a key, in all CTAs.
      number_of_cta: the same of each CTA, in the lane of its number.
      most: the greatest of those.
      mass: of all of them.
      above, mass_above_of_cta: the measure of what is above them in all CTAs, and the mass of it in each.
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


def search(f: Search, zone: Zone) -> None:
    """Keeps what the filter keeps, whose last key is in the lists."""
    p, layout = f.p, f.p.layout
    mass = p.max(zone.mass, 1e-30)
    per_unit, unit = p.divide(p.var(_LARGEST, "f32"), mass), mass * (1 / _LARGEST)

    def mass_of(distance):
        key = (zone.least.bits("u32") + distance).bits("s32")
        return p.convert(p.weight(p.of_key(key)) * per_unit, "u32", "rni")

    first_of_cta, _ = p.before(zone.number_of_cta)
    _merge(f, zone, first_of_cta, mass_of)
    with p.when(p.warp.equals(0)):
        rest = f.goal - zone.above
        goal = p.convert(p.max(f.measure(p.min(rest * per_unit, _LARGEST * 1.5), rest), 1.0), "u32", "rpi")
        distance, above = _last(f, zone, goal)
        left = p.convert((goal - above), "f32")
        each = p.convert(p.max(mass_of(distance), 1), "f32")
        number = number_of(p, f.measure(p.divide(left, each), left))
        p.store(p.word(layout.picked), distance, number, when=p.first_lane)
    p.barrier()
    distance, number = p.load_vector(p.word(layout.picked), "u32", 2)

    cta = p.var(p.warp)  # that the warp looks at, one after another
    with p.loop() as leave:
        leave(cta >= p.ctas)
        mass_above, equal = p.var(0, "u32"), p.var(0, "u32")

        def add(slot):
            its = p.load(p.word(layout.histogram, slot, 2), "u32")
            with p.when(its >= distance):
                p.increase(mass_above, mass_of(its), its > distance)
                p.increase(equal, 1, its.equals(distance))

        _each_key(f, zone, first_of_cta, cta, lambda _, slot: add(slot))
        p.store(
            p.word(layout.counters, cta, 4), *p.over_warp(["add"] * 2, [mass_above, equal]), when=p.first_lane
        )
        p.increase(cta, p.warps)
    p.barrier()
    mass_above, equal = p.var(0, "u32"), p.var(0, "u32")
    p.load_vector_into([mass_above, equal], p.word(layout.counters, p.lane, 4), when=p.lane < p.ctas)
    key = (zone.least.bits("u32") + distance).bits("s32")
    f.kept.down_to(key, number, zone.mass_above_of_cta + p.convert(mass_above, "f32") * unit, equal)


def _each_key(f: Search, zone: Zone, first_of_cta: Value, cta: Value, body) -> None:
    """Calls body(slot, merged_slot) to write what a lane does with a key in the list of a CTA; a warp takes all."""
    p = f.p
    number = p.shuffle(zone.number_of_cta, "idx", cta)
    first = p.shuffle(first_of_cta, "idx", cta)
    slot = p.var(p.lane)
    with p.loop() as leave:
        leave(slot >= number)
        body(slot, first + slot)
        p.increase(slot, LANES)


def _merge(f: Search, zone: Zone, first_of_cta: Value, mass_of) -> None:
    """Writes the distance from the least key and the measure of the keys in all lists to one, a CTA for each warp."""
    p, layout = f.p, f.p.layout
    cta = p.var(p.warp)
    with p.loop() as leave:
        leave(cta >= p.ctas)

        def copy(slot, merged_slot):
            (key,) = p.of_cta(p.word(layout.keys, slot), cta, "s32")
            distance = key.bits("u32") - zone.least.bits("u32")
            p.store(p.word(layout.histogram, merged_slot, 2), distance, f.measure(mass_of(distance), 1))

        _each_key(f, zone, first_of_cta, cta, copy)
        p.increase(cta, p.warps)
    p.barrier()


def _last(f: Search, zone: Zone, goal: Value) -> tuple[Value, Value]:
    """Returns the last distance, and the measure above it; called in one warp.

    Measures are integers. From the highest bit down, a bit is 1 if the goal is reached by the keys from there up.
    """
    p, layout = f.p, f.p.layout
    extent = zone.greatest.bits("u32") - zone.least.bits("u32")
    bit = p.var(p.highest_bit(extent).bits("s32"))  # the next one; -1 if there is none
    distance, above = p.var(0, "u32"), p.var(0, "u32")  # what is found, and the measure of what is too large
    # The number of keys that are not less, and of those that are too large.
    number, number_above = p.var(zone.number), p.var(0, "u32")
    keys = p.var(p.word(layout.histogram))

    def load(first_slot, number):
        out = [[p.var(0, "u32"), p.var(0, "u32")] for _ in range(_OF_LANE)]
        at = keys + first_slot * 8
        for i, key in enumerate(out):
            p.load_vector_into(key, at, offset=8 * LANES * i, when=first_slot + LANES * i < number)
        return out

    def decide(candidate, measure, its_number):
        reached = measure >= goal
        p.set(distance, candidate, reached)
        p.set(number, its_number, reached)
        p.set(above, measure, ~reached)
        p.set(number_above, its_number, ~reached)
        p.increase(bit, -1)

    # Of many keys, until few are left.
    with p.loop() as leave:
        leave((bit < 0) | (number - number_above <= _FEW))
        candidate = distance | (p.var(1, "u32") << bit.bits("u32"))
        measure, its_number, slot = p.var(0, "u32"), p.var(0, "u32"), p.var(p.lane)
        with p.loop() as leave_keys:
            leave_keys(slot >= zone.number)
            for its, amount in load(slot, zone.number):
                reaches = its >= candidate
                p.increase(measure, amount, reaches)
                p.increase(its_number, 1, reaches)
            p.increase(slot, LANES * _OF_LANE)
        decide(candidate, *p.over_warp(["add"] * 2, [measure, its_number]))

    # They are written to one place, and from there to registers.
    left = p.var(zone.number)
    with p.when((zone.number > _FEW) & (bit >= 0)):
        few_keys = p.word(layout.histogram + 2 * MAX_KEYS)
        end, slot = p.var(0, "u32"), p.var(p.lane)
        with p.loop() as leave:
            leave(slot - p.lane >= zone.number)
            its, amount = p.var(0, "u32"), p.var(0, "u32")
            inside = slot < zone.number
            p.load_vector_into([its, amount], keys + slot * 8, when=inside)
            keep = (its - distance < p.var(2, "u32") << bit.bits("u32")) & inside
            kept = p.ballot(keep)
            own = end + p.count_ones(kept & p.special("lanemask_lt"))
            p.store(few_keys + own * 8, its, amount, when=keep)
            p.increase(end, p.count_ones(kept))
            p.increase(slot, LANES)
        p += "bar.warp.sync 0xffffffff;"
        p.set(keys, few_keys)
        p.set(left, end)
    few = load(p.lane, left)
    too_large = p.var(above)
    with p.loop() as leave:
        leave(bit < 0)
        candidate = distance | (p.var(1, "u32") << bit.bits("u32"))
        sums = [p.var(0, "u32") for _ in range(2)]
        for i, (its, amount) in enumerate(few):
            p.increase(sums[i % 2], amount, its >= candidate)
        measure = p.over_lanes("add", sums[0] + sums[1]) + too_large
        decide(candidate, measure, number)
    return distance, above
