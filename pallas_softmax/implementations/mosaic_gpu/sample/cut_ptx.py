"""The cut of equal entries: of those with the last key some are kept, of the lowest indices, in inline PTX.

The others become -inf in shared memory, so that the threshold alone tells what is kept. A CTA keeps what those before
it leave over; if that is all or nothing, the threshold says so, and nothing is written. If not:

    block          0    1    2    3    4
    equal in it    3    0    4    2    5        5 of them are to be kept
    before it      0    3    3    7    9
                   keep all  |    cut all       the cut is in block 2, the first whose end exceeds 5:
                             of its 4 the first 2, in the order of the threads and of the elements of each

+0 and -0 are equal as floats, but have two keys, and +0 comes first. So where the last key is that of +0, all -0 go
too; and of zeros even a cut of nothing, or of all, is written, since the threshold cannot tell one from the other.
"""

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import ZERO
from pallas_softmax.implementations.mosaic_gpu.sample import cluster_ptx, walk_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.masses_ptx import Unit
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program
from pallas_softmax.implementations.mosaic_gpu.sample.rounds_ptx import Last
from pallas_softmax.implementations.mosaic_gpu.sample.search import Kept

_NONE = -1  # the number of a block, where no block is meant


def cut(code: Program, last: Last, unit: Unit, kept: Kept, by_mass: bool) -> None:
    """Makes -inf of the entries of the last key that are too many, and writes what is kept."""
    everywhere, before, own = _numbers(code, last.count_at)
    least = code.kind.float_of_bits(code, code.kind.key(code, last.key))
    code += f"mov.f32 {kept.least}, {least};"
    of_one = code.one("b64")
    code += f"cvt.u64.u32 {of_one}, {everywhere}; div.u64 {last.passed.held}, {last.passed.held}, {of_one};"
    if by_mass:
        keep = _number_for_mass(code, last.passed.remaining, last.passed.held, everywhere)
    else:
        keep = code.one("b32")
        code += f"cvt.u32.u64 {keep}, {last.passed.remaining};"
        _write_mass(code, last, unit, kept)
    end, write = code.label("cut_done"), code.label("cut_written")
    condition, next_key = code.one("pred"), code.one("b32")
    code += f"sub.s32 {keep}, {keep}, {before}; max.s32 {keep}, {keep}, 0;"
    code += f"setp.eq.f32 {condition}, {kept.least}, {ZERO}; @{condition} bra {write};"
    # This CTA keeps all its entries of the key: done.
    code += f"setp.ge.s32 {condition}, {keep}, {own}; @{condition} bra {end};"
    code += f"setp.gt.s32 {condition}, {keep}, 0; @{condition} bra {write};"
    # It keeps none: the threshold is the next key.
    code += f"add.s32 {next_key}, {last.key}, 1;"
    least = code.kind.float_of_bits(code, code.kind.key(code, next_key))
    code += f"mov.f32 {kept.least}, {least}; bra {end}; {write}:"
    _write_cut(code, last.key, keep, kept.least)
    code += f"{end}:"


def _numbers(code: Program, count_at: str) -> tuple[str, str, str]:
    """Returns how many entries of the last key the cluster has, the CTAs before this one, and this one (b32)."""
    everywhere, before, own = code.constant("b32", 0), code.constant("b32", 0), code.one("b32")
    is_before = code.one("pred")
    for cta in range(code.ctas):
        (number,) = cluster_ptx.load_from(code, cta, count_at, 1)
        code += f"add.u32 {everywhere}, {everywhere}, {number}; setp.gt.u32 {is_before}, <part>, {cta};"
        code += f"@{is_before} add.u32 {before}, {before}, {number};"
    code += f"ld.shared.b32 {own}, [{count_at}];"
    return everywhere, before, own


def _number_for_mass(code: Program, remaining: str, of_one: str, everywhere: str) -> str:
    """Returns how many entries reach the mass that remains, if one has the mass `of_one`: rounded up (b32)."""
    number, keep = code.one("b64"), code.one("b32")
    code += f"max.u64 {of_one}, {of_one}, 1; add.u64 {number}, {remaining}, {of_one}; sub.u64 {number}, {number}, 1;"
    code += f"div.u64 {number}, {number}, {of_one}; cvt.u32.u64 {keep}, {number};"
    code += f"min.u32 {keep}, {keep}, {everywhere};"
    return keep


def _write_mass(code: Program, last: Last, unit: Unit, kept: Kept) -> None:
    """Writes the kept mass: above the zone, and in it before the last key, and of so many entries of that key."""
    mass, passed, in_zone = last.passed.held, last.passed, code.one("f32")
    code += f"mad.lo.u64 {mass}, {mass}, {passed.remaining}, {passed.mass};"
    inverse = unit.inverse(code)
    code += f"cvt.rn.f32.u64 {in_zone}, {mass};"
    code += f"fma.rn.f32 {kept.mass}, {in_zone}, {inverse}, {last.above_mass};"


def _write_cut(code: Program, key: str, keep: str, least: str) -> None:
    """Keeps the first `keep` entries of a key in this CTA, and makes -inf of the others."""
    key_bits = _count_blocks(code, key, least)
    block, before = _find_block(code, keep)
    neg_inf = code.constant(f"b{8 * code.kind.itemsize}", code.kind.neg_inf)
    _cut_after(code, key, key_bits, block, least, neg_inf)
    done, nowhere = code.label("block_cut"), code.one("pred")
    code += f"setp.eq.s32 {nowhere}, {block}, {_NONE}; @{nowhere} bra {done};"
    _cut_in_block(code, key_bits, keep, block, before, neg_inf)
    code += f"{done}:"
    cluster_ptx.meet(code)


def _count_blocks(code: Program, key: str, least: str) -> str:
    """Counts the entries of a key in each block, a counter each from `next_counts` on; returns the key's bits."""
    counter, equal, first_lane = code.one("b32"), code.one("pred"), code.one("pred")
    code += f"mad.lo.u32 {counter}, <thread>, 4, {code.next_counts}; st.shared.b32 [{counter}], 0;"
    cluster_ptx.meet(code)
    code += f"setp.eq.u32 {first_lane}, {code.lane}, 0;"
    key_bits = code.kind.key(code, key)
    for vector in walk_ptx.blocks(code, code.constant("b32", 0), least):
        number, counter = code.constant("b32", 0), code.one("b32")
        for bits in vector.bits:
            code += f"setp.eq.s32 {equal}, {bits}, {key_bits}; @{equal} add.u32 {number}, {number}, 1;"
        cluster_ptx.reduce_warp(code, "add.s32", "b32", number)
        code += f"mad.lo.u32 {counter}, {vector.block}, 4, {code.next_counts};"
        code += f"@{first_lane} red.relaxed.cta.shared::cta.add.u32 [{counter}], {number};"
    cluster_ptx.meet(code)
    return key_bits


def _find_block(code: Program, keep: str) -> tuple[str, str]:
    """Returns the block of the first entry that is too many, and how many come before the block, or -1 and -1 (b32).

    Every warp does it by itself: a lane takes the counters of two blocks.
    """
    counters, own, block, before = code.new("b32", 4)
    here = code.one("pred")
    numbers = code.new("b32", 2)
    code += f"mad.lo.u32 {counters}, {code.lane}, 8, {code.next_counts};"
    code += f"ld.shared.v2.b32 {{{numbers[0]}, {numbers[1]}}}, [{counters}];"
    code += f"add.u32 {own}, {numbers[0]}, {numbers[1]};"
    start, end = cluster_ptx.sum_up_to_lane(code, own, "b32"), own
    code += f"sub.u32 {start}, {start}, {own}; mov.b32 {block}, {_NONE}; mov.b32 {before}, {_NONE};"
    for i, number in enumerate(numbers):
        code += f"add.u32 {end}, {start}, {number};"
        code += f"setp.le.u32 {here}, {start}, {keep}; setp.lt.and.u32 {here}, {keep}, {end}, {here};"
        code += f"@{here} mad.lo.u32 {block}, {code.lane}, 2, {i}; @{here} mov.b32 {before}, {start};"
        code += f"mov.b32 {start}, {end};"
    cluster_ptx.reduce_warp(code, "max.s32", "b32", block)
    cluster_ptx.reduce_warp(code, "max.s32", "b32", before)
    return block, before


def _cut_after(code: Program, key: str, key_bits: str, block: str, least: str, neg_inf: str) -> None:
    """Makes -inf of the entries of a key in the blocks after `block`; if the key is that of +0, of all -0."""
    size = 8 * code.kind.itemsize
    first = code.constant("b32", 0)
    is_zero, late, late_or_zero, equal, equal_zero = code.new("pred", 5)
    negative_zero = code.one("b32")  # its bits, or, where the key is not that of +0, those of the key again
    code += f"setp.eq.s32 {is_zero}, {key}, 0; mov.b32 {negative_zero}, {key_bits};"
    code += f"@{is_zero} mov.b32 {negative_zero}, {-(1 << (size - 1))};"
    code += f"@!{is_zero} add.u32 {first}, {block}, 1;"
    for vector in walk_ptx.blocks(code, first, least):
        code += f"setp.ne.s32 {late}, {block}, {_NONE};"
        code += f"setp.gt.and.s32 {late}, {vector.block}, {block}, {late};"
        code += f"or.pred {late_or_zero}, {late}, {is_zero};"
        for i, bits in enumerate(vector.bits):
            code += f"setp.eq.and.s32 {equal}, {bits}, {key_bits}, {late};"
            code += f"setp.eq.and.s32 {equal_zero}, {bits}, {negative_zero}, {late_or_zero};"
            code += f"or.pred {equal}, {equal}, {equal_zero};"
            code += f"@{equal} st.shared.b{size} [{vector.address}+{i * code.kind.itemsize}], {neg_inf};"


def _cut_in_block(code: Program, key_bits: str, keep: str, block: str, before: str, neg_inf: str) -> None:
    """Makes -inf of the entries of a key in one block that are too many, if so many come before the block."""
    size = 8 * code.kind.itemsize
    address, number = code.one("b32"), code.constant("b32", 0)
    code += f"mad.lo.u32 {address}, {block}, {WARPGROUP}, <thread>;"
    code += f"mad.lo.u32 {address}, {address}, 16, <x>;"
    (words,) = code.kind.vectors(code, address, [0])
    equals, too_late = code.new("pred", code.window.vec), code.one("pred")
    for bits, equal in zip(code.kind.bits(code, words), equals):
        code += f"setp.eq.s32 {equal}, {bits}, {key_bits}; @{equal} add.u32 {number}, {number}, 1;"
    lower, _ = cluster_ptx.sum_of_lower_threads(code, number, "b32", code.scratch.scans)
    code += f"add.u32 {lower}, {lower}, {before};"
    for i, equal in enumerate(equals):
        code += f"setp.ge.and.s32 {too_late}, {lower}, {keep}, {equal};"
        code += f"@{equal} add.u32 {lower}, {lower}, 1;"
        code += f"@{too_late} st.shared.b{size} [{address}+{i * code.kind.itemsize}], {neg_inf};"
