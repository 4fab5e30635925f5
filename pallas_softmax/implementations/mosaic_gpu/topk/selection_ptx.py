"""The search of `selection` in inline PTX, by the 128 threads of a CTA."""

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import Elements
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, LANES, WARPS, Code
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window
from pallas_softmax.implementations.mosaic_gpu.topk.slots import store_slot

_BITS = 32  # elements that a thread looks at together, one for each bit of a word
_FEW_SLOTS = (
    256  # slots up to which a thread has so few candidates that it appends two, and not four, at once
)
_LOADED_AT_ONCE = 8  # loads that a thread has under way


# ---- the candidates


def collect(
    window: Window, x_smem, group_keys, hits, slots, counts, bound, extent, *, all_groups: bool
) -> None:
    """A thread takes some groups that reach the bound, 32 elements in all, and then others, and appends their elements:

    n = list the groups that reach the bound          with all_groups: n = all groups, and leave out those that do not
    for turn = 0, 128 * groups at once, ... below n:
        mask = a bit for each of the thread's 32 elements that is in the extent and reaches the bound
        place = reserve as many places as mask has bits
        while mask: take its lowest bit, and write that element to slot `place`, and go to the next

    All threads leave at once where the list is too short for the groups, or the slots for the elements.
    """
    kind, capacity = Elements(x_smem.dtype), slots.shape[0] // 2
    code = Code()
    n, turn, count, mask, place = code.new("b32", 5)
    (p,) = code.new("pred")
    if all_groups:
        code += f"mov.b32 {n}, {window.groups};"
    else:
        _list_hits(code, window, n, hits.shape[0], capacity)
    code += f"and.b32 {turn}, <thread>, {WARPGROUP - LANES}; setp.ge.u32 {p}, {turn}, {n}; @{p} bra end;"
    code += f"mov.b32 {turn}, <thread>; next_turn:"
    _mask_turn(code, window, kind, mask, turn, n, all_groups)
    code += f"popc.b32 {count}, {mask}; setp.ne.u32 {p}, {count}, 0;"
    code += f"@{p} atom.relaxed.cta.shared::cta.add.u32 {place}, [<counts>], {count};"
    _append(code, window, kind, mask, turn, place, capacity, all_groups)
    at_once = _BITS // window.group_size * WARPGROUP
    code += f"add.u32 {turn}, {turn}, {at_once}; and.b32 {count}, {turn}, -{LANES};"
    code += f"setp.lt.u32 {p}, {count}, {n}; @{p} bra next_turn; end: {BARRIER}"
    insert(
        code,
        {"x": x_smem, "group_keys": group_keys, "hits": hits, "slots": slots, "counts": counts},
        {"bound": bound, "low": extent.low, "high": extent.high, "origin": extent.origin},
    )


def _list_hits(code: Code, window: Window, n: str, room: int, capacity: int) -> None:
    """Lists in <hits> the numbers of the groups that reach <bound>, in any order; register n gets how many there are.

    A warp counts those of its groups that do, and reserves as many places. If they are more than there is room for, it
    makes the number of candidates too large, and jumps to label end.

    Args:
      n: register for the result.
      room: number of places in <hits>.
      capacity: number of slots for candidates.
    """
    each = window.groups_per_thread
    keys, ballots, at = (code.new("b32", min(each, _LOADED_AT_ONCE)) for _ in range(3))
    reach = code.new("pred", len(keys))
    count, group, place, lower_lanes, address = code.new("b32", 5)
    p, fits = code.new("pred", 2)
    code += f"mad.lo.u32 {address}, <thread>, 4, <group_keys>; mov.u32 {lower_lanes}, %lanemask_lt;"
    for start in range(0, each, _LOADED_AT_ONCE):
        turns = range(start, min(start + _LOADED_AT_ONCE, each))
        for i, key in zip(turns, keys):
            code += f"ld.shared.b32 {key}, [{address}+{4 * WARPGROUP * i}];"
        code += f"mov.b32 {count}, 0;"
        for _, key, q, ballot, before in zip(turns, keys, reach, ballots, at):
            code += f"setp.ge.s32 {q}, {key}, <bound>; vote.sync.ballot.b32 {ballot}, {q}, 0xffffffff;"
            code += f"and.b32 {before}, {ballot}, {lower_lanes}; popc.b32 {before}, {before};"
            code += f"add.u32 {before}, {before}, {count}; popc.b32 {ballot}, {ballot};"
            code += f"add.u32 {count}, {count}, {ballot};"
        code += f"setp.eq.u32 {p}, {count}, 0; @{p} bra listed{start}; setp.eq.u32 {p}, {lower_lanes}, 0;"
        code += (
            f"mov.b32 {place}, 0; @{p} atom.relaxed.cta.shared::cta.add.u32 {place}, [<counts>+4], {count};"
        )
        code += f"shfl.sync.idx.b32 {place}, {place}, 0, 31, 0xffffffff;"
        for i, q, before in zip(turns, reach, at):
            code += f"add.u32 {before}, {before}, {place}; setp.lt.and.u32 {fits}, {before}, {room}, {q};"
            code += f"mad.lo.u32 {before}, {before}, 4, <hits>; add.u32 {group}, <thread>, {WARPGROUP * i};"
            code += f"@{fits} st.shared.b32 [{before}], {group};"
        code += f"listed{start}:"
    code += f"{BARRIER} ld.shared.b32 {n}, [<counts>+4]; setp.le.u32 {p}, {n}, {room}; @{p} bra room;"
    code += f"setp.eq.u32 {p}, <thread>, 0; @{p} st.shared.b32 [<counts>], {capacity + 1}; bra end; room:"


def _mask_turn(
    code: Code, window: Window, kind: Elements, mask: str, turn: str, n: str, all_groups: bool
) -> None:
    """Sets a bit of `mask` for each element of groups turn, turn + 128, ... in the extent that reaches <bound>.

    Bits above compare as keys do: those of a negative bound are turned first.
    """
    at_once = _BITS // window.group_size
    groups, firsts, have = code.new("b32", at_once), code.new("b32", at_once), code.new("pred", at_once)
    address, bound, flip = code.new("b32", 3)
    vectors = []
    for u, (group, first, p) in enumerate(zip(groups, firsts, have)):
        code += f"add.u32 {group}, {turn}, {u * WARPGROUP}; setp.lt.u32 {p}, {group}, {n};"
        if all_groups:
            code += f"mad.lo.u32 {address}, {group}, 4, <group_keys>; mov.b32 {first}, 0x80000000;"
            code += f"@{p} ld.shared.b32 {first}, [{address}]; setp.ge.and.s32 {p}, {first}, <bound>, {p};"
            code += f"selp.b32 {group}, {group}, 0, {p};"
        else:
            code += f"mad.lo.u32 {address}, {group}, 4, <hits>; mov.b32 {group}, 0;"
            code += f"@{p} ld.shared.b32 {group}, [{address}];"
    for group, first in zip(groups, firsts):
        _first_position(code, window, group, first)
        code += f"mad.lo.u32 {address}, {first}, {kind.itemsize}, <x>;"
        vectors.append(_group_words(code, window, kind, first, address))
    code += f"mov.b32 {mask}, 0; shr.s32 {flip}, <bound>, 31; and.b32 {flip}, {flip}, {kind.flip};"
    code += f"shl.b32 {bound}, <bound>, {16 if kind.halves else 0};"
    for u, (first, p, words) in enumerate(zip(firsts, have, vectors)):
        bits = _bits_reaching(code, kind, sum(words, []), bound, flip)
        if window.groups * window.group_size > window.cut.shortest:  # some are outside
            _keep_extent(code, window, first, bits)
        code += f"selp.b32 {bits}, {bits}, 0, {p}; shl.b32 {bits}, {bits}, {u * window.group_size};"
        code += f"or.b32 {mask}, {mask}, {bits};"


def _bits_reaching(code: Code, kind: Elements, words: list[str], bound: str, flip: str) -> str:
    """Returns a register with a bit for each element of the words, turned by `flip`, that is not below `bound`."""
    each = _BITS // 4  # bits of one of several registers, which do not wait for each other
    elements = []
    for word in words:
        code += f"xor.b32 {word}, {word}, {flip};"
        if kind.halves:
            (low,) = code.new("b32")
            code += f"shl.b32 {low}, {word}, 16;"
            elements.append(low)
        elements.append(word)
    bits = code.new("b32", -(-len(elements) // each))
    (p,) = code.new("pred")
    code += "".join(f"mov.b32 {b}, 0;" for b in bits)
    for i, element in enumerate(elements):
        b = bits[i // each]
        code += f"setp.ge.s32 {p}, {element}, {bound}; @{p} or.b32 {b}, {b}, {1 << i};"
    return code.tree("or.b32", "b32", bits)


def _first_position(code: Code, window: Window, group: str, first: str) -> None:
    """Writes the first position of a group to register `first`."""
    (block,) = code.new("b32")
    code += f"shr.u32 {block}, {group}, {WARPGROUP.bit_length() - 1};"
    code += f"mul.lo.u32 {block}, {block}, {window.group_blocks * window.block};"  # that of its first block
    code += f"and.b32 {first}, {group}, {WARPGROUP - 1}; mad.lo.u32 {first}, {first}, {window.vec}, {block};"


def _group_words(code: Code, window: Window, kind: Elements, first: str, address: str) -> list[list[str]]:
    """Loads the vectors of a group; returns the registers of the words of each.

    Args:
      first: register with the first position of the group.
      address: that of this position.
    """
    offsets = [b * window.block * kind.itemsize for b in range(window.group_blocks)]
    if window.blocks % window.group_blocks == 0:
        return kind.vectors(code, address, offsets)
    vectors = []
    last, at = code.new("b32", 2)
    # The last block stands for those that would come after it; no position of theirs is in the extent.
    code += f"and.b32 {last}, {first}, {window.block - 1};"
    code += f"add.u32 {last}, {last}, {(window.blocks - 1) * window.block};"
    code += f"mad.lo.u32 {last}, {last}, {kind.itemsize}, <x>;"
    for offset in offsets:
        code += f"add.u32 {at}, {address}, {offset}; min.u32 {at}, {at}, {last};"
        vectors += kind.vectors(code, at, [0])
    return vectors


def _keep_extent(code: Code, window: Window, first: str, bits: str) -> None:
    """Clears the bits of a group's elements that are outside of the extent: those before <low> and from <high> on.

    Positions rise with the bits, and those before <low> are in the first vector of the window.
    """
    rest, blocks, ones = code.new("b32", 3)
    (p,) = code.new("pred")
    code += f"setp.eq.u32 {p}, {first}, 0; shl.b32 {ones}, -1, <low>; @{p} and.b32 {bits}, {bits}, {ones};"
    code += f"sub.s32 {rest}, <high>, {first}; max.s32 {rest}, {rest}, 0;"
    code += f"shr.u32 {blocks}, {rest}, {window.block.bit_length() - 1}; and.b32 {rest}, {rest}, {window.block - 1};"
    code += f"min.u32 {rest}, {rest}, {window.vec}; mad.lo.u32 {blocks}, {blocks}, {window.vec}, {rest};"
    code += f"shl.b32 {ones}, -1, {blocks}; not.b32 {ones}, {ones}; and.b32 {bits}, {bits}, {ones};"


def _append(
    code: Code,
    window: Window,
    kind: Elements,
    mask: str,
    turn: str,
    place: str,
    capacity: int,
    all_groups: bool,
) -> None:
    """Writes the elements whose bits are in `mask` to the slots from `place` on, some at once."""
    at_once = 2 if capacity <= _FEW_SLOTS else 4
    bits, groups, keys, positions = (code.new("b32", at_once) for _ in range(4))
    chosen = code.new("pred", at_once)
    (rest,) = code.new("b32")
    (p,) = code.new("pred")
    code += f"next_bits: setp.eq.u32 {p}, {mask}, 0; setp.ge.or.u32 {p}, {place}, {capacity}, {p};"
    code += f"@{p} bra appended;"
    for j, (q, bit, group) in enumerate(zip(chosen, bits, groups)):
        code += f"add.u32 {rest}, {place}, {j}; setp.lt.u32 {p}, {rest}, {capacity};"
        code += f"setp.ne.and.u32 {q}, {mask}, 0, {p};"
        code += f"brev.b32 {bit}, {mask}; clz.b32 {bit}, {bit}; sub.u32 {rest}, {mask}, 1;"
        code += f"and.b32 {mask}, {mask}, {rest};"
        code += f"shr.u32 {group}, {bit}, {window.group_size.bit_length() - 1};"
        code += f"mad.lo.u32 {group}, {group}, {WARPGROUP}, {turn};"
        if not all_groups:
            code += f"mad.lo.u32 {group}, {group}, 4, <hits>; @{q} ld.shared.b32 {group}, [{group}];"
    for q, bit, group, key, position in zip(chosen, bits, groups, keys, positions):
        _first_position(code, window, group, position)
        code += f"and.b32 {bit}, {bit}, {window.group_size - 1}; shr.u32 {rest}, {bit}, {window.vec.bit_length() - 1};"
        code += f"and.b32 {bit}, {bit}, {window.vec - 1}; mad.lo.u32 {bit}, {rest}, {window.block}, {bit};"
        code += f"add.u32 {position}, {position}, {bit};"
        _load_bits(code, kind, position, key, q)  # once more, since a register cannot be chosen by number
    for q, key, position in zip(chosen, keys, positions):
        kind.keys(code, [key])
        code += f"add.u32 {position}, {position}, <origin>;" + store_slot(
            "<slots>", place, key, position, f"@{q}"
        )
        code += f"add.u32 {place}, {place}, 1;"
    code += "bra next_bits; appended:"


def _load_bits(code: Code, kind: Elements, position: str, bits: str, predicate: str) -> None:
    """Writes the bits of the element at a position, as a signed number, to register `bits`, if the predicate holds."""
    (address,) = code.new("b32")
    code += f"mad.lo.u32 {address}, {position}, {kind.itemsize}, <x>;"
    if kind.halves:
        (half,) = code.new("b16")
        code += f"@{predicate} ld.shared.b16 {half}, [{address}]; cvt.s32.s16 {bits}, {half};"
    else:
        code += f"@{predicate} ld.shared.b32 {bits}, [{address}];"


# ---- counts and ties


def count(window: Window, x_smem, group_keys, bound) -> tuple:
    """Returns for each thread how many of its positions reach the bound, and how many exceed it (128,).

    for each group of the thread: skip its blocks if the largest key is below the bound, or compare each element
    """
    kind, code = Elements(x_smem.dtype), Code()
    block_bytes = window.block * kind.itemsize
    address, group, left, blocks, largest = code.new("b32", 5)
    (p,) = code.new("pred")
    code += f"mov.b32 <reach>, 0; mov.b32 <exceed>, 0; mad.lo.u32 {address}, <thread>, 16, <x>;"
    code += f"mad.lo.u32 {group}, <thread>, 4, <group_keys>; mov.b32 {left}, {window.blocks};"
    code += f"next_group: ld.shared.b32 {largest}, [{group}];"
    code += f"min.u32 {blocks}, {left}, {window.group_blocks};"
    code += f"sub.u32 {left}, {left}, {blocks}; setp.ge.s32 {p}, {largest}, <bound>; @{p} bra next_block;"
    code += f"mad.lo.u32 {address}, {blocks}, {block_bytes}, {address}; bra counted; next_block:"
    (words,) = kind.vectors(code, address, [0])
    for key in kind.keys(code, kind.bits(code, words)):
        code += f"setp.ge.s32 {p}, {key}, <bound>; @{p} add.u32 <reach>, <reach>, 1;"
        code += f"setp.gt.s32 {p}, {key}, <bound>; @{p} add.u32 <exceed>, <exceed>, 1;"
    code += f"add.u32 {address}, {address}, {block_bytes}; sub.u32 {blocks}, {blocks}, 1;"
    code += f"setp.ne.u32 {p}, {blocks}, 0; @{p} bra next_block; counted: add.u32 {group}, {group}, {4 * WARPGROUP};"
    code += f"setp.ne.u32 {p}, {left}, 0; @{p} bra next_group;"
    refs = {"x": x_smem, "group_keys": group_keys}
    return insert(code, refs, {"bound": bound}, results={"reach": "i32", "exceed": "i32"})


def collect_ties(window: Window, x_smem, scratch, slots, bound, extent, first, k: int) -> None:
    """Goes through the blocks in order, and numbers the elements that are equal to the bound:

    base = first
    for each block, while base < k:
        before = base + those in the vectors of lower threads of this warp + those of lower warps
        for each element of the thread's vector that is tied:
            if before < k: write it to slot `before`
            before += 1
        base += those in the block
    """
    kind, code = Elements(x_smem.dtype), Code()
    address, block, first_position, base, parity, index, warp, lower_lanes = code.new("b32", 8)
    p, q = code.new("pred", 2)
    code += f"mov.b32 {base}, <first>; mov.b32 {parity}, 0; mov.u32 {lower_lanes}, %lanemask_lt;"
    code += f"shr.u32 {warp}, <thread>, 5; mul.lo.u32 {first_position}, <thread>, {window.vec};"
    code += f"mad.lo.u32 {address}, <thread>, 16, <x>; mov.b32 {block}, 0;"
    code += f"next_block: setp.ge.u32 {p}, {block}, {window.blocks};"
    code += f"setp.ge.or.s32 {p}, {base}, {k}, {p}; @{p} bra end;"
    (words,) = kind.vectors(code, address, [0])
    keys = kind.keys(code, kind.bits(code, words))
    tied, before, in_warp = _tied_in_warp(code, keys, first_position, lower_lanes)
    _add_lower_warps(code, before, in_warp, base, parity, warp, lower_lanes)
    for j, t in enumerate(tied):
        code += f"setp.lt.and.s32 {q}, {before}, {k}, {t}; @!{q} bra not_tied{j};"
        code += f"add.s32 {index}, {first_position}, {j}; add.s32 {index}, {index}, <origin>;"
        code += store_slot("<slots>", before, "<bound>", index)
        code += f"not_tied{j}: @{t} add.u32 {before}, {before}, 1;"
    code += f"add.u32 {address}, {address}, {window.block * kind.itemsize};"
    code += f"add.u32 {first_position}, {first_position}, {window.block}; add.u32 {block}, {block}, 1;"
    code += f"xor.b32 {parity}, {parity}, 1; bra next_block; end: {BARRIER}"
    insert(
        code,
        {"x": x_smem, "scratch": scratch, "slots": slots},
        {"bound": bound, "low": extent.low, "high": extent.high, "origin": extent.origin, "first": first},
    )


def _tied_in_warp(
    code: Code, keys: list[str], first_position: str, lower_lanes: str
) -> tuple[list[str], str, str]:
    """Finds which of a thread's keys, at positions from `first_position` on, are <bound> and in the extent.

    Returns a predicate for each, and two registers: how many there are in lower lanes of the warp, whose mask is in
    `lower_lanes`, and in the whole warp.
    """
    tied, p = code.new("pred", len(keys)), code.new("pred")[0]
    before, in_warp, position, ballot, ones = code.new("b32", 5)
    code += f"mov.b32 {in_warp}, 0; mov.b32 {before}, 0;"
    for j, (key, t) in enumerate(zip(keys, tied)):
        code += f"add.s32 {position}, {first_position}, {j}; setp.eq.s32 {p}, {key}, <bound>;"
        code += f"setp.ge.and.s32 {p}, {position}, <low>, {p}; setp.lt.and.s32 {t}, {position}, <high>, {p};"
        code += f"vote.sync.ballot.b32 {ballot}, {t}, 0xffffffff; popc.b32 {ones}, {ballot};"
        code += f"add.u32 {in_warp}, {in_warp}, {ones}; and.b32 {ballot}, {ballot}, {lower_lanes};"
        code += f"popc.b32 {ones}, {ballot}; add.u32 {before}, {before}, {ones};"
    return tied, before, in_warp


def _add_lower_warps(
    code: Code, before: str, in_warp: str, base: str, parity: str, warp: str, lower_lanes: str
) -> None:
    """Adds to `before` the counts `in_warp` of lower warps, and `base`; to `base` the counts of all warps.

    The warps meet in <scratch>, in two places by turns, which `parity` (0 or 1) tells. The lane that writes for its
    warp is the one whose mask of lower lanes is 0.
    """
    address, of_warp = code.new("b32", 2)
    (p,) = code.new("pred")
    totals = code.new("b32", WARPS)
    code += f"mad.lo.u32 {address}, {parity}, 16, <scratch>; mad.lo.u32 {of_warp}, {warp}, 4, {address};"
    code += f"setp.eq.u32 {p}, {lower_lanes}, 0; @{p} st.shared.b32 [{of_warp}], {in_warp}; {BARRIER}"
    code += f"ld.shared.v4.b32 {{{', '.join(totals)}}}, [{address}]; add.u32 {before}, {before}, {base};"
    for i, total in enumerate(totals):
        code += f"setp.gt.u32 {p}, {warp}, {i}; @{p} add.u32 {before}, {before}, {total};"
        code += f"add.u32 {base}, {base}, {total};"


# ---- the winners of other CTAs


def collect_winners(slots, counts, keys_gmem, indices_gmem, row, first, n, bound) -> None:
    """A thread takes every 128th winner: it loads eight at a time, and appends those that reach the bound.

    The list must be empty, and all threads past the barrier at the end of `clear`.
    """
    code = Code()
    winners = keys_gmem.shape[1]
    each = slots.shape[0] // 2 // WARPGROUP
    at, number, slot = *code.new("b64"), *code.new("b32", 2)
    wide, p = *code.new("b64"), *code.new("pred")
    code += f"mul.wide.u32 {at}, <row>, {winners}; cvt.u64.u32 {wide}, <first>; add.u64 {at}, {at}, {wide};"
    code += f"cvt.u64.u32 {wide}, <thread>; add.u64 {at}, {at}, {wide}; shl.b64 {at}, {at}, 2;"
    keys, indices = (code.new("b32", min(each, _LOADED_AT_ONCE)) for _ in range(2))
    for start in range(0, each, _LOADED_AT_ONCE):
        turns = range(start, min(start + _LOADED_AT_ONCE, each))
        for i, key, index in zip(turns, keys, indices):
            code += f"add.u32 {number}, <thread>, {i * WARPGROUP}; setp.lt.u32 {p}, {number}, <n>;"
            code += f"mov.b32 {key}, 0x80000000; mov.b32 {index}, 0; add.u64 {wide}, {at}, <keys>;"
            code += f"@{p} ld.global.b32 {key}, [{wide}+{4 * WARPGROUP * i}];"
            code += f"add.u64 {wide}, {at}, <indices>;"
            code += f"@{p} ld.global.b32 {index}, [{wide}+{4 * WARPGROUP * i}];"
        for i, key, index in zip(turns, keys, indices):
            code += f"add.u32 {number}, <thread>, {i * WARPGROUP}; setp.lt.u32 {p}, {number}, <n>;"
            code += f"setp.ge.and.s32 {p}, {key}, <bound>, {p}; @!{p} bra below{i};"
            code += f"atom.relaxed.cta.shared::cta.add.u32 {slot}, [<counts>], 1;"
            code += store_slot("<slots>", slot, key, index) + f"below{i}:"
    code += BARRIER
    insert(
        code,
        {"slots": slots, "counts": counts, "keys": keys_gmem, "indices": indices_gmem},
        {"row": row, "first": first, "n": n, "bound": bound},
    )
