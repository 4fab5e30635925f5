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

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    LANES,
    ONE,
    WARPS,
    Code,
    float_literal,
)
from pallas_softmax.implementations.mosaic_gpu.topk import sums_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.slots import split_slot

_CHUNK = 4  # candidates of a thread that are handled together


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
    for i, own in enumerate(_chunks(code, "ranked", values, places)):
        _compare(code, *own, k, padded, label=f"compared{i}")


def _chunks(code: Code, label: str, values: list[str], places: list[str]):
    """Yields some of the thread's candidates after others: predicates, whether it has them, and their registers.

    What is done with those of a chunk does not wait for each other. All threads jump to `label`, which follows the
    last chunk, as soon as none of them has one.
    """
    none, left = *code.new("pred"), *code.new("b32")
    have = code.new("pred", min(_CHUNK, len(values)))
    for first in range(0, len(values), _CHUNK):
        code += (
            f"sub.s32 {left}, <n>, {WARPGROUP * first}; setp.le.s32 {none}, {left}, 0; @{none} bra {label};"
        )
        for p in have:
            code += f"setp.lt.s32 {p}, <thread>, {left}; sub.s32 {left}, {left}, {WARPGROUP};"
        yield have, values[first : first + _CHUNK], places[first : first + _CHUNK]
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
    for have, some, _ in _chunks(code, "loaded", values, values):
        for i, value in enumerate(some):
            code += f"ld.shared.b64 {value}, [{address}+{8 * WARPGROUP * i}];"
        for p, value in zip(have, some):
            code += f"mov.b64 {{{low}, {high}}}, {value};"
            code += f"@{p} max.u32 {largest}, {largest}, {high}; @{p} min.u32 {least}, {least}, {high};"
        code += f"add.u32 {address}, {address}, {8 * WARPGROUP * _CHUNK};"
    code += f"redux.sync.max.u32 {largest}, {largest}, 0xffffffff;"
    code += f"redux.sync.min.u32 {least}, {least}, 0xffffffff;"
    larger, smaller = sums_ptx.of_warps(code, [largest, least], "<ranked>", 0)
    code += f"mov.b32 {largest}, {code.tree('max.u32', 'b32', larger)};"
    code += f"sub.u32 {least}, {largest}, {code.tree('min.u32', 'b32', smaller)};"
    per_range = float_literal(capacity * 2.0**32 * (1 - 2.0**-20))
    code += f"cvt.rn.f32.u32 {ratio}, {least}; add.f32 {ratio}, {ratio}, {ONE};"
    code += f"rcp.approx.ftz.f32 {ratio}, {ratio}; mul.f32 {ratio}, {ratio}, {per_range};"
    code += f"cvt.rzi.u32.f32 {factor}, {ratio};"


def _count(code: Code, values: list[str], places: list[str], largest: str, factor: str) -> None:
    """Counts the candidates in their buckets; a place is the bucket, and above 16 bits how many it had before."""
    low, high, address = code.new("b32", 3)
    before = code.new("b32", min(_CHUNK, len(values)))
    for have, some, own in _chunks(code, "counted", values, places):
        for p, value, place, number in zip(have, some, own, before):
            code += f"mov.b64 {{{low}, {high}}}, {value}; sub.u32 {high}, {largest}, {high};"
            code += f"mul.hi.u32 {place}, {high}, {factor}; mad.lo.u32 {address}, {place}, 4, <buckets>;"
            code += f"@{p} atom.relaxed.cta.shared::cta.add.u32 {number}, [{address}], 1;"
        for place, number in zip(own, before):
            code += f"shl.b32 {number}, {number}, 16; or.b32 {place}, {place}, {number};"
    code += BARRIER


def _start(code: Code, mine: str, each: int, most: int, otherwise: str) -> None:
    """Turns each count into where its bucket starts, and above 16 bits the count.

    sums of the thread's counts -> of the lanes below -> of the warps below, through <ranked>
    """
    start, total, held, word = code.new("b32", 4)
    counts, largest = code.new("b32", each), code.new("b32", WARPS)
    (p,) = code.new("pred")
    for byte, kind, words in sums_ptx.vectors(counts):
        code += f"ld.shared.{kind} {words}, [{mine}+{byte}];"
    code += f"mov.b32 {total}, {code.tree('add.u32', 'b32', counts)};"
    sums_ptx.add_lower_lanes(code, total, start)
    code += f"mov.b32 {held}, {code.tree('max.u32', 'b32', counts)}; redux.sync.max.u32 {held}, {held}, 0xffffffff;"
    code += f"shl.b32 {held}, {held}, 16; or.b32 {total}, {total}, {held};"
    (totals,) = sums_ptx.of_warps(code, [total], "<ranked>", LANES - 1)
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
    address = code.new("b32")[0]
    before = code.new("b32", min(_CHUNK, len(values)))
    for have, some, own in _chunks(code, "grouped", values, places):
        for p, place, number in zip(have, own, before):
            code += f"shr.u32 {number}, {place}, 16; and.b32 {address}, {place}, 0xffff;"
            code += f"mad.lo.u32 {address}, {address}, 4, <buckets>; @{p} ld.shared.b32 {place}, [{address}];"
        for p, value, place, number in zip(have, some, own, before):
            code += f"and.b32 {address}, {place}, 0xffff; add.u32 {address}, {address}, {number};"
            code += f"mad.lo.u32 {address}, {address}, 8, <slots>; @{p} st.shared.b64 [{address}], {value};"
    code += BARRIER


def _compare(
    code: Code, have: list[str], values: list[str], places: list[str], k: int, padded: int, label: str
) -> None:
    """Compares candidates with the others of their buckets, one after another, and writes them at their ranks.

    A bucket that starts at rank k or later is left out.
    """
    counts, ranks, addresses = (code.new("b32", len(values)) for _ in range(3))
    others, inside = code.new("b64", len(values)), code.new("pred", len(values))
    turn, most, key, index = code.new("b32", 4)
    (p,) = code.new("pred")
    for q, place, count, rank, address in zip(have, places, counts, ranks, addresses):
        code += f"and.b32 {rank}, {place}, 0xffff; mad.lo.u32 {address}, {rank}, 8, <slots>;"
        code += f"setp.lt.and.u32 {p}, {rank}, {k}, {q};"
        code += f"shr.u32 {count}, {place}, 16; selp.b32 {count}, {count}, 0, {p};"
    code += f"mov.b32 {most}, {code.tree('max.u32', 'b32', counts)}; mov.b32 {turn}, 0;"
    code += f"setp.eq.u32 {p}, {most}, 0; @{p} bra {label}; next_{label}:"
    for count, other, address, q in zip(counts, others, addresses, inside):
        code += f"setp.lt.u32 {q}, {turn}, {count}; @{q} ld.shared.b64 {other}, [{address}];"
        code += f"add.u32 {address}, {address}, 8;"
    for value, other, rank, q in zip(values, others, ranks, inside):
        code += f"setp.gt.and.u64 {q}, {other}, {value}, {q}; @{q} add.u32 {rank}, {rank}, 1;"
    code += f"add.u32 {turn}, {turn}, 1; setp.lt.u32 {p}, {turn}, {most}; @{p} bra next_{label};"
    for value, count, rank, address in zip(values, counts, ranks, addresses):
        code += f"setp.gt.u32 {p}, {count}, 0; setp.lt.and.u32 {p}, {rank}, {k}, {p};" + split_slot(
            value, key, index
        )
        code += f"mad.lo.u32 {address}, {rank}, 4, <ranked>; @{p} st.shared.b32 [{address}], {key};"
        code += f"@{p} st.shared.b32 [{address}+{4 * padded}], {index};"
    code += f"{label}:"
