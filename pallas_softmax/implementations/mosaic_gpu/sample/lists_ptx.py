"""The last entry that a filter keeps, from the lists of keys that the CTAs have made of a zone.

    lists       12 40 | 7 31 | 40 3      of three CTAs, as distances from the least key
    merged      12 40 7 31 40 3          in each CTA, with the mass of each
    all warps   40                       they find the last key, five bits of it at a time
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

_GROUP = 8  # keys that a warp loads at once
_ROUND_BITS = LANES.bit_length() - 1
_ROUNDS = -(-32 // _ROUND_BITS)
# The histogram has room for so many keys and a group of none, with a measure for each, and for a sum of each lane in
# each round.
MAX_KEYS = (BUCKETS - LANES * _ROUNDS) // 2 - _GROUP
_SUMS = 2 * (MAX_KEYS + _GROUP)  # words before the sums
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
    rest = f.goal - zone.above
    goal = p.convert(p.max(f.measure(p.min(rest * per_unit, _LARGEST * 1.5), rest), 1.0), "u32", "rpi")
    distance, above = _last(f, zone, goal)
    left = p.convert((goal - above), "f32")
    each = p.convert(p.max(mass_of(distance), 1), "f32")
    number = number_of(p, f.measure(p.divide(left, each), left))

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
    """Writes the distance from the least key and the measure of the keys in all lists to one, a CTA for each warp.

    A group of keys without a measure follows them. The sums of the rounds become 0.
    """
    p, layout = f.p, f.p.layout
    nothing = p.var(0, "u32")
    p.store(p.word(layout.histogram, zone.number + p.thread, 2), nothing, nothing, when=p.thread < _GROUP)
    for first in range(0, LANES * _ROUNDS, layout.threads):
        inside = p.thread < LANES * _ROUNDS - first
        p.store(p.word(layout.histogram + _SUMS + first, p.thread), nothing, when=inside)
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
    """Returns the last distance, and the measure above it, in all threads.

    Measures are integers. The distance is found five bits at a time: a lane for each of 32 candidates, whose measure,
    that of the keys from there up, all warps add up, a part of the list each.
    """
    p, layout = f.p, f.p.layout
    extent = zone.greatest.bits("u32") - zone.least.bits("u32")
    shift = p.var(p.highest_bit(extent).bits("s32") - (_ROUND_BITS - 1))
    distance, above = p.var(0, "u32"), p.var(0, "u32")
    sums = p.var(p.word(layout.histogram + _SUMS, p.lane))  # of this round
    with p.repeat() as again:
        bits = p.max(shift, 0).bits("u32")
        candidate = distance + (p.lane << bits)
        measures = [p.var(0, "u32") for _ in range(2)]
        group = p.var(p.warp)
        with p.loop() as leave_keys:
            leave_keys(group * _GROUP >= zone.number)
            words = p.load_vector(p.word(layout.histogram, group, 2 * _GROUP), "u32", 2 * _GROUP)
            for i, (its, measure) in enumerate(zip(words[::2], words[1::2])):
                p.increase(measures[i % 2], measure, its >= candidate)
            p.increase(group, p.warps)
        p.add_to(sums, measures[0] + measures[1])
        p.barrier()
        measure = p.load(sums, "u32")
        lane = p.last_that(measure >= goal)
        p.set(distance, p.shuffle(candidate, "idx", lane))
        next_measure = p.shuffle(measure, "idx", p.min(lane + 1, LANES - 1))
        p.set(above, next_measure, lane < LANES - 1)
        p.increase(sums, 4 * LANES)
        p.increase(shift, -_ROUND_BITS)
        again(shift > -_ROUND_BITS)
    return distance, above
