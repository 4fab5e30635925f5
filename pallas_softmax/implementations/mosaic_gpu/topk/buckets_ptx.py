"""The order of many candidates, by buckets, in inline PTX, by the 128 threads of a CTA; see `ranking_ptx`.

The range of the keys is cut into equal pieces, the buckets, as many as there are slots. Candidates are counted in
their buckets; a running sum of the counts says where in the order each bucket starts; and within its bucket a
candidate is compared with the others there. With 4 buckets, of the keys 9 to 1:

    slots      3  8  1  9  5  2  9'      in any order
    bucket     2  0  3  0  1  3  0       (9 - key) / 2.25
    counts     3  1  1  2
    starts     0  3  4  5
    grouped    8  9  9' | 5 | 3 | 1  2   in any order within a bucket
    ranked     9  9' 8  | 5 | 3 | 2  1

If the keys are spread over the buckets, the time grows with the number of candidates alone. If they are not, there is
a bucket with many, and `ranking_ptx` sorts.
"""

import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, LANES, Code
from pallas_softmax.implementations.mosaic_gpu.topk import sums_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.slots import split_slot

_COMPARED_AT_ONCE = (
    4  # candidates of a thread that are compared together, so that loads do not wait for each other
)


def rank_by_buckets(code: Code, capacity: int, k: int, padded: int, most: int, otherwise: str) -> None:
    """Writes the k best of the first <n> slots to <ranked>; a thread has slots thread, thread + 128, ...

    Args:
      capacity: number of slots, and of the words of <buckets>.
      padded: as in `ranking_ptx.rank`.
      most: number of candidates of a bucket up to which they are compared.
      otherwise: label to which it jumps if a bucket has more; the slots are as they were.
    """
    each = capacity // WARPGROUP
    values, places = code.new("b64", each), code.new("b32", each)
    mine, largest, factor = code.new("b32", 3)
    code += f"mad.lo.u32 {mine}, <thread>, {4 * each}, <buckets>;"
    _clear(code, mine, each)
    _load_and_bracket(code, values, largest, factor, capacity)
    _count(code, values, places, largest, factor)
    _start(code, mine, each, most, otherwise)
    _group(code, values, places)
    for first in range(0, each, _COMPARED_AT_ONCE):
        own = slice(first, first + _COMPARED_AT_ONCE)
        _compare(code, first, values[own], places[own], k, padded)
    code += "ranked:"


def _own(code: Code, label: str, first: int, registers):
    """Yields a predicate, whether the thread has a candidate, and its registers, for its candidates from `first` on.

    All threads jump to `label`, which follows, as soon as none of them has one.
    """
    none, have, left = *code.new("pred", 2), *code.new("b32")
    for i, own in enumerate(registers, first):
        code += f"sub.s32 {left}, <n>, {WARPGROUP * i}; setp.le.s32 {none}, {left}, 0; @{none} bra {label};"
        code += f"setp.lt.s32 {have}, <thread>, {left};"
        yield have, *own
    code += f"{label}:"


def _clear(code: Code, mine: str, each: int) -> None:
    """Clears the thread's counters, which start at address `mine`."""
    for byte, kind, zeros in sums_ptx.vectors(["0"] * each):
        code += f"st.shared.{kind} [{mine}+{byte}], {zeros};"


def _load_and_bracket(code: Code, values: list[str], largest: str, factor: str, capacity: int) -> None:
    """Loads the thread's slots; finds the largest key of all, and the factor by which keys become buckets:

    bucket = (largest - key) * factor / 2^32

    It is a little less than capacity * 2^32 / (largest - least + 1), by more than float32 rounds, and at most
    2^32 - 1. It only matters that better keys do not have later buckets.
    """
    address, low, high, least = code.new("b32", 4)
    (ratio,) = code.new("f32")
    code += f"mov.b32 {largest}, 0; mov.b32 {least}, 0xffffffff; mad.lo.u32 {address}, <thread>, 8, <slots>;"

    for have, i, value in _own(code, "loaded", 0, enumerate(values)):
        code += f"ld.shared.b64 {value}, [{address}+{8 * WARPGROUP * i}]; mov.b64 {{{low}, {high}}}, {value};"
        code += f"@{have} max.u32 {largest}, {largest}, {high}; @{have} min.u32 {least}, {least}, {high};"
    for op, value, byte in (("max", largest, 0), ("min", least, 16)):
        code += f"redux.sync.{op}.u32 {value}, {value}, 0xffffffff; add.u32 {address}, <ranked>, {byte};"
        each_warp = sums_ptx.of_warps(code, value, address, 0)
        code += f"mov.b32 {value}, {code.tree(f'{op}.u32', 'b32', each_warp)};"
    code += f"sub.u32 {least}, {largest}, {least};"
    bits = np.float32(capacity * 2.0**32 * (1 - 2.0**-20)).view(np.uint32)
    code += f"cvt.rn.f32.u32 {ratio}, {least}; add.f32 {ratio}, {ratio}, 0f3F800000;"
    code += f"rcp.approx.ftz.f32 {ratio}, {ratio}; mul.f32 {ratio}, {ratio}, 0f{bits:08X};"
    code += f"cvt.rzi.u32.f32 {factor}, {ratio};"


def _count(code: Code, values: list[str], places: list[str], largest: str, factor: str) -> None:
    """Counts the candidates in their buckets; a place is the bucket, and above 16 bits how many it had before."""
    low, high, address = code.new("b32", 3)

    for have, value, place in _own(code, "counted", 0, zip(values, places)):
        code += f"mov.b64 {{{low}, {high}}}, {value}; sub.u32 {high}, {largest}, {high};"
        code += f"mul.hi.u32 {place}, {high}, {factor}; mad.lo.u32 {address}, {place}, 4, <buckets>;"
        code += f"@{have} atom.relaxed.cta.shared::cta.add.u32 {low}, [{address}], 1;"
        code += f"shl.b32 {low}, {low}, 16; or.b32 {place}, {place}, {low};"
    code += BARRIER


def _start(code: Code, mine: str, each: int, most: int, otherwise: str) -> None:
    """Turns each count into where its bucket starts, and above 16 bits the count.

    sums of the thread's counts -> of the lanes below -> of the warps below, through <ranked>
    """
    start, total, held, word = code.new("b32", 4)
    counts, largest = code.new("b32", each), code.new("b32", sums_ptx.WARPS)
    (p,) = code.new("pred")
    for byte, kind, words in sums_ptx.vectors(counts):
        code += f"ld.shared.{kind} {words}, [{mine}+{byte}];"
    code += f"mov.b32 {total}, {code.tree('add.u32', 'b32', counts)};"
    sums_ptx.add_lower_lanes(code, total, start)
    code += f"mov.b32 {held}, {code.tree('max.u32', 'b32', counts)}; redux.sync.max.u32 {held}, {held}, 0xffffffff;"
    code += f"shl.b32 {held}, {held}, 16; or.b32 {total}, {total}, {held};"
    totals = sums_ptx.of_warps(code, total, "<ranked>", LANES - 1)
    for total, held in zip(totals, largest):
        code += f"shr.u32 {held}, {total}, 16; and.b32 {total}, {total}, 0xffff;"
    sums_ptx.add_lower_warps(code, start, totals)
    code += f"setp.gt.u32 {p}, {code.tree('max.u32', 'b32', largest)}, {most}; @{p} bra {otherwise};"
    for count in counts:
        code += f"shl.b32 {word}, {count}, 16; add.u32 {word}, {word}, {start};"
        code += f"add.u32 {start}, {start}, {count}; mov.b32 {count}, {word};"
    for byte, kind, words in sums_ptx.vectors(counts):
        code += f"st.shared.{kind} [{mine}+{byte}], {words};"
    code += BARRIER


def _group(code: Code, values: list[str], places: list[str]) -> None:
    """Writes the candidates to the slots again, grouped by buckets; a place is now where its bucket starts, and above
    16 bits how many it has.
    """
    number, address = code.new("b32", 2)

    for have, value, place in _own(code, "grouped", 0, zip(values, places)):
        code += f"shr.u32 {number}, {place}, 16; and.b32 {address}, {place}, 0xffff;"
        code += f"mad.lo.u32 {address}, {address}, 4, <buckets>; @{have} ld.shared.b32 {place}, [{address}];"
        code += f"and.b32 {address}, {place}, 0xffff; add.u32 {address}, {address}, {number};"
        code += f"mad.lo.u32 {address}, {address}, 8, <slots>; @{have} st.shared.b64 [{address}], {value};"
    code += BARRIER


def _compare(code: Code, first: int, values: list[str], places: list[str], k: int, padded: int) -> None:
    """Compares candidates of the thread with those of their buckets, one after another, and writes them at their ranks.

    A bucket that starts at rank k or later is left out.
    """
    counts, ranks, addresses = (code.new("b32", len(values)) for _ in range(3))
    others, inside = code.new("b64", len(values)), code.new("pred", len(values))
    turn, most, key, index = code.new("b32", 4)
    (p,) = code.new("pred")
    for count in counts:
        code += f"mov.b32 {count}, 0;"

    own = zip(places, counts, ranks, addresses)
    for have, place, count, rank, address in _own(code, f"looked_up{first}", first, own):
        code += f"and.b32 {rank}, {place}, 0xffff; mad.lo.u32 {address}, {rank}, 8, <slots>;"
        code += f"setp.lt.and.u32 {p}, {rank}, {k}, {have}; @{p} shr.u32 {count}, {place}, 16;"
    code += f"mov.b32 {most}, {code.tree('max.u32', 'b32', counts)}; mov.b32 {turn}, 0;"
    code += f"setp.eq.u32 {p}, {most}, 0; @{p} bra compared{first}; next{first}:"
    for count, other, address, q in zip(counts, others, addresses, inside):
        code += f"setp.lt.u32 {q}, {turn}, {count}; @{q} ld.shared.b64 {other}, [{address}];"
        code += f"add.u32 {address}, {address}, 8;"
    for value, other, rank, q in zip(values, others, ranks, inside):
        code += f"setp.gt.and.u64 {q}, {other}, {value}, {q}; @{q} add.u32 {rank}, {rank}, 1;"
    code += f"add.u32 {turn}, {turn}, 1; setp.lt.u32 {p}, {turn}, {most}; @{p} bra next{first};"
    for value, count, rank, address in zip(values, counts, ranks, addresses):
        code += f"setp.gt.u32 {p}, {count}, 0; setp.lt.and.u32 {p}, {rank}, {k}, {p};" + split_slot(
            value, key, index
        )
        code += f"mad.lo.u32 {address}, {rank}, 4, <ranked>; @{p} st.shared.b32 [{address}], {key};"
        code += f"@{p} st.shared.b32 [{address}+{4 * padded}], {index};"
    code += f"compared{first}:"
