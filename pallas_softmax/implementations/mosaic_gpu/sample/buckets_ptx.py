"""The bucket of keys in which a target is reached, in inline PTX; see `rounds_ptx`.

A thread has two neighbouring buckets. It sums their counters over the CTAs of the cluster, and a running sum over the
threads says what comes before each; one thread finds its bucket to be the one, and tells the others through <scratch>:

    word        chosen       + 1        + 2, + 3       + 4, + 5      + 6, + 7
    holds       bucket       number     amount before  mass before   mass of the bucket
                -1 if none
"""

import dataclasses

from pallas_softmax.implementations.mosaic_gpu.sample import cluster_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.masses_ptx import Unit
from pallas_softmax.implementations.mosaic_gpu.sample.plan import KEY_BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program, word

_AMOUNT_BEFORE, _MASS_BEFORE, _MASS = 2, 4, 6  # words of 64 bits, from `chosen` on


@dataclasses.dataclass(frozen=True)
class Passed:
    """Registers with how far the rounds have come.

    Attributes:
      remaining: what is left of the target for the range and what follows it: a number, or a mass in units (b64).
      mass: the mass, in units, of the zone's elements that come before the range (b64).
      held: the mass, in units, of the elements in the range (b64).
      bucket: number of the bucket that the range was in the last round; -1 if the target is reached in none (b32).
      number: number of elements in the range (b32).
    """

    remaining: str
    mass: str
    held: str
    bucket: str
    number: str


def choose(code: Program, by_mass: bool, counts: str, unit: Unit, passed: Passed) -> None:
    """Finds the bucket in which what remains is reached, and takes off what comes before it.

    Args:
      by_mass: whether what remains is a mass.
      counts: register with the address of the set of counters; the cluster has met since they were written.
      unit: that of the masses.
      passed: how far the rounds had come; it becomes how far they are with this bucket.
    """
    numbers, masses = _sum_counters(code, counts, unit)
    amounts = masses
    if not by_mass:
        amounts = code.new("b64", 2)
        for amount, number in zip(amounts, numbers):
            code += f"cvt.u64.u32 {amount}, {number};"
    first_thread = cluster_ptx.is_first_thread(code)
    code += f"@{first_thread} st.shared.b32 [{word(code.scratch.chosen)}], -1;"
    before = _sum_before(code, amounts, code.scratch.scans)
    mass_before = before if by_mass else _sum_before(code, masses, code.scratch.second_scan)
    _write_chosen(code, by_mass, passed.remaining, numbers, amounts, masses, before, mass_before)
    cluster_ptx.meet(code)
    _read_chosen(code, passed)


def _sum_counters(code: Program, counts: str, unit: Unit) -> tuple[list[str], list[str]]:
    """Returns, of the thread's two buckets, the numbers (b32) and the masses (b64) in all CTAs of the cluster."""
    own = code.one("b32")
    code += f"mad.lo.u32 {own}, <thread>, 8, {counts};"
    numbers = cluster_ptx.load_from(code, 0, own, 2)
    masses: tuple[list[str], list[str]] = [], []
    for cta in range(code.ctas):
        if cta:
            for total, more in zip(numbers, cluster_ptx.load_from(code, cta, own, 2)):
                code += f"add.u32 {total}, {total}, {more};"
        highs, lows = (cluster_ptx.load_from(code, cta, own, 2, 4 * KEY_BUCKETS * i) for i in (1, 2))
        for of_bucket, high, low in zip(masses, highs, lows):
            of_bucket.append(unit.join(code, high, low))
    return numbers, [code.tree("add.u64", "b64", of_bucket) for of_bucket in masses]


def _sum_before(code: Program, pair: list[str], at: int) -> str:
    """Returns the sum of both numbers of all lower threads (b64); the words from number `at` on are scratch."""
    both = code.one("b64")
    code += f"add.u64 {both}, {pair[0]}, {pair[1]};"
    before, _ = cluster_ptx.sum_of_lower_threads(code, both, "b64", at)
    return before


def _write_chosen(
    code: Program,
    by_mass: bool,
    remaining: str,
    numbers: list[str],
    amounts: list[str],
    masses: list[str],
    before: str,
    mass_before: str,
) -> None:
    """Writes what is known of the bucket in which what remains is reached, in the thread that has it."""
    bucket, end, here = code.one("b32"), code.one("b64"), code.one("pred")
    chosen = code.scratch.chosen
    for i in range(2):
        code += f"add.u64 {end}, {before}, {amounts[i]}; mad.lo.u32 {bucket}, <thread>, 2, {i};"
        code += f"setp.lt.u64 {here}, {before}, {remaining};"
        code += f"setp.le.and.u64 {here}, {remaining}, {end}, {here};"
        code += f"@{here} st.shared.v2.b32 [{word(chosen)}], {{{bucket}, {numbers[i]}}};"
        for at, amount in ((_AMOUNT_BEFORE, before), (_MASS_BEFORE, mass_before), (_MASS, masses[i])):
            code += f"@{here} st.shared.b64 [{word(chosen + at)}], {amount};"
        code += f"mov.b64 {before}, {end};"
        if not by_mass and not i:
            code += f"add.u64 {mass_before}, {mass_before}, {masses[0]};"


def _read_chosen(code: Program, passed: Passed) -> None:
    """Reads what is known of the bucket, in all threads."""
    before, found = code.one("b64"), code.one("pred")
    chosen = code.scratch.chosen
    code += f"ld.shared.v2.b32 {{{passed.bucket}, {passed.number}}}, [{word(chosen)}];"
    code += f"setp.ne.s32 {found}, {passed.bucket}, -1;"
    code += f"ld.shared.b64 {before}, [{word(chosen + _AMOUNT_BEFORE)}];"
    code += f"@{found} sub.u64 {passed.remaining}, {passed.remaining}, {before};"
    code += f"ld.shared.b64 {before}, [{word(chosen + _MASS_BEFORE)}];"
    code += f"@{found} add.u64 {passed.mass}, {passed.mass}, {before};"
    code += f"ld.shared.b64 {passed.held}, [{word(chosen + _MASS)}];"
