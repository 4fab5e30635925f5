"""The exact key of a threshold, by rounds in which a range of keys narrows, in inline PTX.

A range is cut into up to 256 buckets of 2^shift keys each, from its highest key down. Candidates are counted, and
their masses summed, by bucket; the bucket in which the target is reached is the next range. For a count of 4, with
ranges of 4 buckets:

    keys        20 20 18 15 15 15 15 11 9         range 20 to 5, shift 2
    bucket       0  0  0  1  1  1  1  2 2         (20 - key) >> 2
    counts       3  4  2  0                       the 4th is in bucket 1, whose keys are 16 to 13; of 4, 1 remains

    keys        15 15 15 15                       range 16 to 13, shift 0
    counts       0  4  0  0                       the key is 15, 1 of its 4 entries is to be kept

The rounds end with a bucket of a single key (shift 0), or with one that holds a single element, whose lowest key does
for a threshold. There are two sets of counters, one after the other in <scratch>, which rounds take by turns: so none
is cleared while another CTA may still read it. Each has 256 counts, and both words of 256 masses (see `masses_ptx`).
"""

import dataclasses

import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device import sort_keys
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import ONE, ZERO, float_literal
from pallas_softmax.implementations.mosaic_gpu.sample import candidates_ptx, cluster_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.buckets_ptx import Passed, choose
from pallas_softmax.implementations.mosaic_gpu.sample.masses_ptx import Unit
from pallas_softmax.implementations.mosaic_gpu.sample.plan import KEY_BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program
from pallas_softmax.implementations.mosaic_gpu.sample.search import Alike, Search, Target

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_BUCKET_BITS = KEY_BUCKETS.bit_length() - 1
_MOST_MASS = float_literal(2.0**62)  # units, which 64 bits hold whatever is added


@dataclasses.dataclass(frozen=True)
class KeyRange:
    """Registers with the highest and the lowest key of a range (b32)."""

    high: str
    low: str


@dataclasses.dataclass(frozen=True)
class _Run:
    """Registers with equal elements that a thread met one after another, and has not counted yet.

    Of a constant row these are all that it has, which would else be added to one counter one by one.

    Attributes:
      key: their key (b32).
      distance: their distance (f32).
      times: how many they are (b32).
    """

    key: str
    distance: str
    times: str


@dataclasses.dataclass(frozen=True)
class Last:
    """Registers with the last key of which an entry is kept, and what is known of it.

    Attributes:
      key: the key (b32).
      count_at: address of the number of elements with it; it is that of all CTAs, each of which has its own number.
      passed: what comes before it, and what it holds.
      above_mass: the mass above the zone (f32).
    """

    key: str
    count_at: str
    passed: Passed
    above_mass: str


def find_key(code: Program, search: Search, target: Target, keys: KeyRange, unit: Unit, fail: str) -> Last:
    """Narrows the range of keys to the one at which the target is reached, which both its ends become.

    Args:
      search: where to look; the warps have sent their masses and numbers to `zone_mail`.
      target: what is to be reached.
      keys: the range of all keys in the zone.
      unit: that of the masses.
      fail: label to which all threads jump if the target is not reached in the zone.
    """
    above_mass, first_round = code.one("f32"), code.one("pred")
    again, done, later = (code.label(name) for name in ("round", "rounds_done", "later_round"))
    counts, extent, shift = code.new("b32", 3)
    passed = Passed(code.one("b64"), code.one("b64"), code.one("b64"), code.one("b32"), code.one("b32"))
    stop = code.one("pred")
    # True, since the factor is a number; the rounds set it to false.
    code += f"setp.eq.f32 {first_round}, {unit.factor}, {unit.factor};"
    code += f"mov.b64 {passed.mass}, 0; {again}:"
    code += f"mov.b32 {counts}, {code.next_counts}; sub.u32 {code.next_counts}, {code.both_counts}, {counts};"
    # The least shift for which the range has no more than 256 buckets.
    code += f"sub.u32 {extent}, {keys.high}, {keys.low}; clz.b32 {shift}, {extent};"
    code += f"sub.s32 {shift}, {32 - _BUCKET_BITS}, {shift}; max.s32 {shift}, {shift}, 0;"
    _clear(code, counts)
    _count_candidates(code, search, keys, shift, counts, unit)
    cluster_ptx.meet_cluster(code)
    code += f"@!{first_round} bra {later}; setp.ne.f32 {first_round}, {unit.factor}, {unit.factor};"
    _receive(code, search, target, unit, above_mass, passed.remaining, fail)
    code += f"{later}:"
    choose(code, target.by_mass, counts, unit, passed)
    code += f"setp.eq.s32 {stop}, {passed.bucket}, -1; @{stop} bra {fail};"
    code += f"mad.lo.u32 {counts}, {passed.bucket}, 4, {counts};"
    _narrow(code, keys, extent, shift, passed.bucket, done)
    code += f"setp.ne.u32 {stop}, {passed.number}, 1; @{stop} bra {again};"
    # The range has one element, and so its lowest key will do for a threshold, if it is a number's.
    least = sort_keys.key_of(-np.inf, _DTYPES[code.kind.name])
    code += f"max.s32 {keys.high}, {keys.low}, {least}; {done}:"
    return Last(keys.high, counts, passed, above_mass)


def _clear(code: Program, counts: str) -> None:
    """Clears a set of counters."""
    address = code.one("b32")
    own_bytes = 4 * code.scratch.round_words // WARPGROUP
    code += f"mad.lo.u32 {address}, <thread>, {own_bytes}, {counts};"
    for byte in range(0, own_bytes, 4):
        code += f"st.shared.b32 [{address}+{byte}], 0;"
    cluster_ptx.meet(code)


def _count_candidates(
    code: Program, search: Search, keys: KeyRange, shift: str, counts: str, unit: Unit
) -> None:
    """Counts the thread's candidates in the range, and adds up their masses, runs of equal ones at once."""
    run, same = _Run(code.one("b32"), code.one("f32"), code.one("b32")), code.one("pred")
    code += f"mov.b32 {run.times}, 0; add.s32 {run.key}, {keys.high}, 1; mov.f32 {run.distance}, {ZERO};"
    _start_alike(code, search.alike, keys, run)
    for candidate in candidates_ptx.walk(code, search, without=search.alike.holds):
        inside, key = candidate.inside, code.kind.key(code, candidate.bits)
        code += f"setp.ge.and.s32 {inside}, {key}, {keys.low}, {inside};"
        code += f"setp.le.and.s32 {inside}, {key}, {keys.high}, {inside}; @!{inside} bra {candidate.next};"
        code += f"setp.eq.s32 {same}, {key}, {run.key}; @{same} add.u32 {run.times}, {run.times}, 1;"
        code += f"@{same} bra {candidate.next};"
        _add(code, run, keys, shift, counts, unit)
        code += f"mov.b32 {run.key}, {key}; mov.f32 {run.distance}, {candidate.distance};"
        code += f"mov.b32 {run.times}, 1;"
    _add(code, run, keys, shift, counts, unit)


def _start_alike(code: Program, alike: Alike, keys: KeyRange, run: _Run) -> None:
    """Starts the run with all elements of a thread whose elements are alike, if their key is in the range."""
    in_range = code.one("pred")
    key = code.kind.key(code, code.kind.bits_of_float(code, alike.x))
    code += f"setp.ge.and.s32 {in_range}, {key}, {keys.low}, {alike.holds};"
    code += f"setp.le.and.s32 {in_range}, {key}, {keys.high}, {in_range};"
    code += f"@{in_range} mov.b32 {run.times}, {alike.count}; @{in_range} mov.b32 {run.key}, {key};"
    distance = code.distance(alike.x)
    code += f"@{in_range} mov.f32 {run.distance}, {distance};"


def _add(code: Program, run: _Run, keys: KeyRange, shift: str, counts: str, unit: Unit) -> None:
    """Adds a run to the counters of its bucket: its number, and both words of its mass."""
    counter, empty, end = code.one("b32"), code.one("pred"), code.label("added")
    code += f"setp.eq.u32 {empty}, {run.times}, 0; @{empty} bra {end};"
    code += f"sub.u32 {counter}, {keys.high}, {run.key}; shr.u32 {counter}, {counter}, {shift};"
    code += f"mad.lo.u32 {counter}, {counter}, 4, {counts};"
    words = unit.split(code, run.distance)
    code += f"red.relaxed.cta.shared::cta.add.u32 [{counter}+0], {run.times};"
    for i, of_one in enumerate(words, 1):
        of_run = code.one("b32")
        code += f"mul.lo.u32 {of_run}, {of_one}, {run.times};"
        code += f"red.relaxed.cta.shared::cta.add.u32 [{counter}+{4 * KEY_BUCKETS * i}], {of_run};"
    code += f"{end}:"


def _receive(
    code: Program, search: Search, target: Target, unit: Unit, above_mass: str, remaining: str, fail: str
) -> None:
    """Receives what is above the zone in the whole row; writes how much of the target remains for the zone."""
    kept, mail = search.kept, code.scratch.zone_mail[target.by_mass]
    reductions = [("add.f32", "f32"), ("add.f32", "f32"), ("add.s32", "b32")]
    total, mass, count = cluster_ptx.receive(code, mail, reductions)
    code += f"mov.f32 {above_mass}, {mass};"
    if not target.by_mass:
        code += f"mov.b32 {search.above.count_of_row}, {count};"
    # The whole row's total is that of the first search; a second one has -inf in place of some elements.
    code += f"@{kept.known} mov.f32 {total}, {kept.total}; mov.f32 {kept.total}, {total};"
    code += f"@!{kept.known} mov.f32 {kept.mass}, {total}; setp.eq.f32 {kept.known}, {total}, {total};"
    if target.by_mass:
        left = _mass_left(code, target.amount, kept.mass, above_mass, unit, fail)
    else:
        left = _count_left(code, target.amount, count, fail)
    code += f"mov.b64 {remaining}, {left};"


def _count_left(code: Program, wanted: str, above: str, fail: str) -> str:
    """Returns how many entries of the zone are to be kept (b64); jumps to `fail` if there are enough above it."""
    left, number, enough = code.one("b64"), code.one("b32"), code.one("pred")
    code += f"setp.le.u32 {enough}, {wanted}, {above}; @{enough} bra {fail};"
    code += f"sub.u32 {number}, {wanted}, {above}; cvt.u64.u32 {left}, {number};"
    return left


def _mass_left(code: Program, share: str, mass: str, above: str, unit: Unit, fail: str) -> str:
    """Returns what mass the zone is to have, in units (b64); jumps to `fail` if there is enough above it."""
    left, wanted, enough = code.one("b64"), code.one("f32"), code.one("pred")
    code += f"mul.f32 {wanted}, {mass}, {share};"
    code += f"setp.ge.f32 {enough}, {above}, {wanted}; setp.gt.and.f32 {enough}, {above}, {ZERO}, {enough};"
    code += f"@{enough} bra {fail}; sub.f32 {wanted}, {wanted}, {above};"
    code += f"mul.f32 {wanted}, {wanted}, {unit.factor};"
    code += f"min.f32 {wanted}, {wanted}, {_MOST_MASS}; max.f32 {wanted}, {wanted}, {ONE};"
    code += f"cvt.rni.u64.f32 {left}, {wanted};"
    return left


def _narrow(code: Program, keys: KeyRange, extent: str, shift: str, bucket: str, done: str) -> None:
    """Makes the range that of a bucket; jumps to `done` if that is a single key."""
    single = code.one("pred")
    code += f"shl.b32 {bucket}, {bucket}, {shift}; sub.u32 {keys.high}, {keys.high}, {bucket};"
    code += f"setp.eq.u32 {single}, {shift}, 0; @{single} bra {done};"
    # The last bucket may be a short one.
    code += f"sub.u32 {extent}, {extent}, {bucket}; shl.b32 {bucket}, 1, {shift};"
    code += f"sub.u32 {bucket}, {bucket}, 1; min.u32 {extent}, {extent}, {bucket};"
    code += f"sub.u32 {keys.low}, {keys.high}, {extent};"
