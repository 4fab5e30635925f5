"""The search for the last entry that a filter keeps: its goal, what is kept, and the search digit by digit.

Entries come in the order of their keys: the largest first, ties by index. The goal is a number of entries for top_k, or
a mass for top_p. The last kept entry is the first one at which the running sum reaches the goal. The measure of an
entry is 1 or its mass, whichever the goal is:

    x                5    4    4    3    1          sorted; the temperature makes the masses powers of two
    number, up to    1    2    3    4    5          top_k = 3: the goal is 3, reached with the second 4
    mass, up to      1    1.5  2    2.25 2.31       top_p = 0.5: the goal is 1.16, reached with the first 4

`search_digits` always works, but it is slow. `histogram_ptx` and `zone_ptx` are faster for most rows.
"""

import dataclasses

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import DIGIT, MAX_V, SCRATCH
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, PartProgram

# Atomic additions come in any order, so masses are added as integers: the sums always have the same bits. The largest
# mass counts as this many units.
MOST_UNITS = 2.0**31
_HALF_BITS, _LANE_BUCKETS = 16, DIGIT // LANES


class Kept:
    """The entries that the filters have kept so far."""

    def __init__(self, p: PartProgram, mass: Value):
        self._p = p
        self.key = p.var(KEEP_ALL, "s32")  # the last key that is kept
        self.mass = p.var(mass)  # of all kept entries
        # How many entries have the last key, and how many of them are kept, in the CTA with the number of this lane.
        self.equal, self.equal_kept = p.var(0, "u32"), p.var(0, "u32")
        self.listed = p.var(False, "pred")  # whether all kept entries are in the lists of the CTAs

    def all_down_to(self, key: Value | int, mass: Value) -> None:
        """Keeps all entries down to a key."""
        for register, value in ((self.key, key), (self.mass, mass), (self.equal, 0), (self.equal_kept, 0)):
            self._p.set(register, value)

    def down_to(self, key: Value, number: Value, mass_above: Value, equal: Value) -> None:
        """Keeps everything above a key, and the first `number` entries with it; each lane has `equal` of a CTA."""
        p = self._p
        before, all_equal = p.before(equal)
        room = p.max((number - before).bits("s32"), 0).bits("u32")
        p.set(self.key, key)
        p.set(self.equal, equal)
        p.set(self.equal_kept, p.min(room, equal))
        mass = p.convert(p.min(number, all_equal), "f32") * p.mass(p.from_key(key))
        p.set(self.mass, mass_above + mass)


@dataclasses.dataclass(frozen=True)
class FilterSearch:
    """The search for the last entry that a filter keeps; it changes `kept`."""

    p: PartProgram
    kept: Kept
    goal: Value  # what the entries up to the last one must reach, as a float
    is_mass: Value  # whether the goal is a mass; otherwise it is a number of entries

    def measure(self, mass: Value, number: Value | float) -> Value:
        """Returns the mass or the number of entries, whichever the goal is."""
        return self.p.select(self.is_mass, mass, number)

    def number_that_reaches(self, rest: Value, mass: Value) -> Value:
        """Returns how many entries of this mass reach `rest`, a part of the goal; at least 1."""
        p = self.p
        number = self.measure(p.divide(rest, mass), rest)
        return p.convert(p.min(p.max(number, 1.0), float(MAX_V)), "u32", "rpi")

    def keep_down_to(self, key: Value, above: Value, mass_above: Value, equal: Value) -> None:
        """Like `Kept.down_to`, with as many entries as reach the goal; `above` is the measure above the key."""
        number = self.number_that_reaches(self.goal - above, self.p.mass(self.p.from_key(key)))
        self.kept.down_to(key, number, mass_above, equal)


def search_digits(f: FilterSearch, high: Value, low: Value, above: Value) -> None:
    """Finds the last entry of the filter by rounds of `narrow` over the elements of all CTAs, and updates `f.kept`.

    The last kept key is from `high` down to `low`; `above` is the measure above `high`. A sum has two words: for the
    lower 16 bits of the integers, and for the upper ones.
    """
    p = f.p
    keys, greatest = KeyRange(p, high, low), p.from_key(high)
    sums = p.var(p.word(SCRATCH.histogram))
    other_sums = p.var(sums + 4 * 2 * DIGIT)
    rest = f.goal - above  # what the range must reach
    in_units = p.divide(rest, p.mass(greatest) * (1 / MOST_UNITS))
    rest = p.var(p.max(f.measure(in_units, rest), 1.0))

    def units_of(key):
        return p.convert(p.exp2((p.from_key(key) - greatest) * p.octaves_per_unit) * MOST_UNITS, "u32", "rni")

    def one_round(bucket_of):
        zero = p.var(0, "u32")
        for first in range(0, 2 * DIGIT, p.plan.threads):
            p.store(sums + p.thread * 4, zero, offset=4 * first, when=p.thread < 2 * DIGIT - first)
        p.barrier()

        def add(x):
            key = p.key(x)
            bucket, inside = bucket_of(key)
            with p.when(inside):
                at, units = sums + bucket * 4, f.measure(units_of(key), 1)
                p.add_to(at, units & 2**_HALF_BITS - 1)
                p.add_to(at, units >> _HALF_BITS, offset=4 * DIGIT)

        p.sweep_elements(add)
        p.sync_cluster()
        with p.when(p.warp.equals(0)):
            bucket, new_rest = bucket_that_reaches(p, _sums_of_ctas(p, sums, rest), rest)
            p.store(p.word(SCRATCH.picked), bucket, new_rest.bits("u32"), when=p.first_lane)
        p.barrier()
        bucket, new_rest = p.load_vector(p.word(SCRATCH.picked), "u32", 2)
        p.set(rest, new_rest.bits("f32"))
        # Other CTAs may still read these sums. The cluster synchronizes before they are written again.
        last_sums = p.var(sums)
        p.set(sums, other_sums)
        p.set(other_sums, last_sums)
        return bucket

    narrow(p, keys, DIGIT, one_round)
    number = f.number_that_reaches(rest, p.convert(p.max(units_of(keys.high), 1), "f32"))
    mass_above, equal = p.var(0, "f32"), p.var(0, "u32")

    def add(x):
        key = p.key(x)
        p.increase(mass_above, p.mass(x), key > keys.high)
        p.increase(equal, 1, key.equals(keys.high))

    p.sweep_elements(add)
    masses, equal = p.over_each_cta(["add", "add"], [mass_above, equal], [0.0, 0], p.word(SCRATCH.counted))
    (mass_above,) = p.over_warp(["add"], [masses])
    f.kept.down_to(keys.high, number, mass_above, equal)


def _sums_of_ctas(p: PartProgram, sums: Value, rest: Value) -> list[Value]:
    """Returns the sums over this lane's buckets, in all CTAs; `rest` is above 0."""
    totals = [p.var(0, "f32") for _ in range(_LANE_BUCKETS)]
    # This hides the number of turns from ptxas. Unrolled, the loop would take more registers than all other code.
    with p.each(0, p.select(rest > 0.0, p.ctas, 0, "u32")) as cta:
        at = sums + p.lane * (4 * _LANE_BUCKETS)
        low, high = (p.of_cta(at + 4 * first, cta, "u32", _LANE_BUCKETS) for first in (0, DIGIT))
        for total, *words in zip(totals, low, high):
            lower_bits, others = (p.convert(word, "f32") for word in words)
            p.increase(total, p.multiply_add(others, 2.0**_HALF_BITS, lower_bits))
    return totals
