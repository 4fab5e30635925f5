"""The search for the threshold of a filter: its goal, what is kept, and numbers of elements in buckets.

Entries come in the order of their keys: the largest first, ties by index. The goal is a number of entries for top_k and
min_p, or a mass for top_p. The last kept entry is the first one at which the running sum reaches the goal. `measure`
returns the number or the mass, whichever the goal is:

    x                5    4    4    3    1          sorted; the temperature makes the weights powers of two
    number, up to    1    2    3    4    5          top_k = 3: the goal is 3, reached with the second 4
    mass, up to      1    1.5  2    2.25 2.31       top_p = 0.5: the goal is 1.16, reached with the first 4
"""

import dataclasses
from collections.abc import Callable

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import MAX_V, SECTIONS
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, RowProgram

_EACH = 8  # buckets that a thread sums up


class Kept:
    """The entries that the filters have kept so far."""

    def __init__(self, p: RowProgram, mass: Value):
        self._p = p
        self.key = p.var(KEEP_ALL, "s32")  # the last key that is kept
        self.mass = p.var(mass)  # of all kept entries
        # How many entries have the last key, and how many of them are kept, in the CTA with the number of this lane.
        self.equal, self.equal_kept = p.var(0, "u32"), p.var(0, "u32")
        self.listed = p.var(False, "pred")  # whether all kept entries are in the lists of the CTAs

    def down_to_all(self, key: Value | int, mass: Value) -> None:
        """Keeps all entries down to a key."""
        for register, value in ((self.key, key), (self.mass, mass), (self.equal, 0), (self.equal_kept, 0)):
            self._p.set(register, value)

    def down_to(self, key: Value, number: Value, above: Value, equal: Value) -> None:
        """Keeps everything above a key, which has the mass `above`, and the first `number` entries with that key.

        Each lane passes the number of entries with the key in one CTA.
        """
        p = self._p
        before, all_equal = p.before(equal)
        room = p.max((number - before).bits("s32"), 0).bits("u32")
        p.set(self.key, key)
        p.set(self.equal, equal)
        p.set(self.equal_kept, p.min(room, equal))
        p.set(self.mass, above + p.convert(p.min(number, all_equal), "f32") * p.weight(p.of_key(key)))


@dataclasses.dataclass(frozen=True)
class FilterSearch:
    """The search for the last entry that a filter keeps; it changes `kept`.

    The goal is what the entries up to the last one must reach, as a float.
    """

    p: RowProgram
    kept: Kept
    goal: Value
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
        number = self.number_that_reaches(self.goal - above, self.p.weight(self.p.of_key(key)))
        self.kept.down_to(key, number, mass_above, equal)

    def clear(self) -> None:
        """Sets the numbers of elements in all buckets to 0."""
        p, plan = self.p, self.p.plan
        zero = [p.var(0, "u32")] * 4
        for first in range(0, plan.buckets, 4 * plan.threads):
            inside = p.thread * 4 < plan.buckets - first
            p.store(p.word(plan.histogram + first, p.thread, 4), *zero, when=inside)
        p.barrier()

    def sum_buckets(self, of_eight: Callable[[Value, list[Value]], list[Value]]) -> None:
        """Sums up each section of the buckets; afterwards all CTAs can read the sums.

        of_eight(bucket, numbers) writes one or two sums over eight buckets, from their numbers of elements.
        """
        p, plan = self.p, self.p.plan
        p.barrier()
        threads = plan.buckets // _EACH // SECTIONS  # neighbouring lanes that sum up one section
        for first in range(0, plan.buckets // _EACH, plan.threads):
            group = p.thread + first
            with p.when(group < plan.buckets // _EACH):
                numbers = p.load_vector(p.word(plan.histogram, group, _EACH), "u32", _EACH)
                whole = (p.lane & (threads - 1)).equals(0)
                at = p.word(plan.sections, group >> (threads.bit_length() - 1))
                for i, of_group in enumerate(of_eight(group * _EACH, numbers)):
                    for bit in range(threads.bit_length() - 1):
                        of_group = of_group + p.shuffle(of_group, "bfly", 1 << bit)
                    p.store(at, of_group, offset=4 * SECTIONS * i, when=whole)
        p.sync_cluster()

    def section_that_reaches(self, goal: Value, at: Value) -> tuple[Value, Value]:
        """Returns the section at which the sums reach a goal, and the measure before it. Each warp works alone.

        The sums over the sections start at word `at`.
        """
        p = self.p
        at = p.word(0, at + p.lane * 2)
        of_ctas = [p.of_cta(at, cta, "f32", 2) for cta in range(p.ctas)]
        first, second = (p.reduce("add", column) for column in zip(*of_ctas))
        before, upto = p.scan(first + second)
        lane = p.first_that(upto >= goal)
        before, first = p.shuffle(before, "idx", lane), p.shuffle(first, "idx", lane)
        in_first = before + first >= goal
        section = lane * 2 + p.select(in_first, 0, 1, "u32")
        return section, p.select(in_first, before, before + first)
