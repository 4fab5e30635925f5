"""The search of `selection` in inline PTX, by the 128 threads of a CTA."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import Elements
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    LANES,
    REF,
    SCALAR,
    Code,
    emit_ptx,
    inline,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window
from pallas_softmax.implementations.mosaic_gpu.topk.slots import store_slot

_WARPS = WARPGROUP // LANES
_WARP_GROUPS = 1024  # up to so many group_keys every warp finds the threshold for itself: 32 keys a lane
_APPENDED_AT_ONCE = 8  # elements of a group up to which a thread appends them together
_LOADED_AT_ONCE = 8  # loads that a thread has under way


# ---- the threshold


def threshold(group_keys, scratch, groups: int, k: int):
    """Bisection between two keys, until few more than k group_keys reach the lower one, or the two are alike:

    low, high = a key that at least k group_keys reach, the largest group_key
    n = groups
    while low < high and n > k + max(2, k / 16):
        middle = the key halfway, rounded up
        v = how many group_keys reach middle
        if v >= k:  low, n = middle, v
        else:       high = middle - 1

    A lane holds the same group_keys all the while. Of few, every warp has all, and needs no barrier; of many, each
    warp has a quarter, and the warps add up what they count.
    """
    together = groups > _WARP_GROUPS
    code = Code()
    keys = _load_group_keys(code, groups, WARPGROUP if together else LANES)
    parity = code.new("b32")[0] if together else None
    low, high = _bracket_threshold(code, keys, groups, k, parity)
    n, middle, gap, reach = code.new("b32", 4)
    (p,) = code.new("pred")
    code += f"mov.b32 {n}, {groups}; again: setp.lt.s32 {p}, {low}, {high};"
    code += f"setp.gt.and.s32 {p}, {n}, {k + max(2, k // 16)}, {p}; @!{p} bra done;"
    code += f"sub.u32 {gap}, {high}, {low}; and.b32 {middle}, {gap}, 1; shr.u32 {gap}, {gap}, 1;"
    code += f"add.u32 {middle}, {middle}, {gap}; add.u32 {middle}, {middle}, {low};"
    _count_reaching(code, keys, middle, reach)
    _reduce_threads(code, "add.u32", reach, parity)
    code += f"setp.ge.s32 {p}, {reach}, {k}; @{p} mov.b32 {low}, {middle}; @{p} mov.b32 {n}, {reach};"
    code += f"@!{p} sub.u32 {high}, {middle}, 1; bra again; done: mov.b32 <bound>, {low};"
    code += BARRIER if together else ""  # after it the scratch may be used again

    @inline(arg_types=(REF, REF), return_type=plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=SCALAR))
    def emit(_, group_keys, scratch):
        operands = {"group_keys": group_keys, "scratch": scratch, "thread": thread()}
        (bound,) = emit_ptx(code, operands, {"bound": "i32"})
        return fragmented_array.FragmentedArray.splat(bound, (), is_signed=True)

    return emit(group_keys, scratch)


def _load_group_keys(code: Code, groups: int, threads: int) -> list[str]:
    """Loads every `threads`-th of the group_keys, when all are written; returns their registers."""
    (address,) = code.new("b32")
    code += f"{BARRIER} and.b32 {address}, <thread>, {threads - 1}; mad.lo.u32 {address}, {address}, 4, <group_keys>;"
    keys = code.new("b32", groups // threads)
    for i, key in enumerate(keys):
        code += f"ld.shared.b32 {key}, [{address}+{4 * threads * i}];"
    return keys


def _bracket_threshold(
    code: Code, keys: list[str], groups: int, k: int, parity: str | None
) -> tuple[str, str]:
    """Returns registers with a key that at least k group_keys reach, and with the largest.

    Each lane's keys are dealt out to as many sets as make k sets or more of all lanes; all sets have a key that
    reaches the least of their maxima. Where k is more than half of the groups, each key is a set.
    """
    low, high = code.new("b32", 2)
    threads = groups // len(keys)
    sets = -(-k // threads) if 2 * k <= groups else len(keys)
    code += f"mov.b32 {high}, {code.tree('max.s32', 'b32', list(keys))};"
    maxima = [code.tree("max.s32", "b32", keys[i::sets]) for i in range(sets)]
    code += f"mov.b32 {low}, {code.tree('min.s32', 'b32', maxima)};"
    if parity is not None:
        code += f"mov.b32 {parity}, 0;"
    _reduce_threads(code, "min.s32", low, parity)
    _reduce_threads(code, "max.s32", high, parity)
    return low, high


def _count_reaching(code: Code, keys: list[str], bound: str, count: str) -> None:
    """Writes to register `count` how many of the keys reach the bound, by four sums that do not wait for each other."""
    (p,) = code.new("pred")
    sums = code.new("b32", 4)
    code += "".join(f"mov.b32 {x}, 0; " for x in sums)
    for i, key in enumerate(keys):
        code += f"setp.ge.s32 {p}, {key}, {bound}; @{p} add.u32 {sums[i % 4]}, {sums[i % 4]}, 1;"
    code += f"mov.b32 {count}, {code.tree('add.u32', 'b32', list(sums))};"


def _reduce_threads(code: Code, op: str, value: str, parity: str | None) -> None:
    """Reduces a register in place over the lanes of a warp, and with `parity` over the warps of the CTA as well.

    The warps meet in <scratch>, in two places by turns, which `parity` (0 or 1) tells and changes: so a warp that is
    ahead does not overwrite what another has still to read, for none is ahead by more than one turn.
    """
    code += f"redux.sync.{op} {value}, {value}, 0xffffffff;"
    if parity is None:
        return
    address, lane = code.new("b32", 2)
    (p,) = code.new("pred")
    of_warps = code.new("b32", _WARPS)
    code += f"shr.u32 {address}, <thread>, 5; mad.lo.u32 {address}, {parity}, 4, {address};"
    code += f"mad.lo.u32 {address}, {address}, 4, <scratch>; and.b32 {lane}, <thread>, {LANES - 1};"
    code += f"setp.eq.u32 {p}, {lane}, 0; @{p} st.shared.b32 [{address}], {value};"
    code += f"{BARRIER} mad.lo.u32 {address}, {parity}, 16, <scratch>; xor.b32 {parity}, {parity}, 1;"
    code += f"ld.shared.v4.b32 {{{', '.join(of_warps)}}}, [{address}]; mov.b32 {value}, {of_warps[0]};"
    code += "".join(f"{op} {value}, {value}, {x};" for x in of_warps[1:])


# ---- the candidates


def collect(
    window: Window, x_smem, group_keys, hits, slots, counts, bound, extent, *, all_groups: bool
) -> None:
    """A thread takes one group that reaches the bound after another, and appends its elements that do:

    n = list the groups that reach the bound         with all_groups: n = all groups, and skip those that do not
    for i = thread, thread + 128, ... below n:
        append the elements of group hits[i]         two ways, by how many elements a group has

    All threads leave at once where the list is too short for the groups, or the slots for the elements.
    """
    kind, capacity = Elements(x_smem.dtype), slots.shape[0] // 2
    code = Code()
    n, turn, group, address = code.new("b32", 4)
    (p,) = code.new("pred")
    if all_groups:
        code += f"mov.b32 {n}, {window.groups};"
    else:
        _list_hits(code, window, n, address, hits.shape[0], capacity)
    code += f"mov.b32 {turn}, <thread>; next_group: setp.ge.u32 {p}, {turn}, {n}; @{p} bra end;"
    if all_groups:
        code += f"mad.lo.u32 {address}, {turn}, 4, <group_keys>; ld.shared.b32 {group}, [{address}];"
        code += f"setp.lt.s32 {p}, {group}, <bound>; " + _go_on(turn, f"@{p}")
        code += f"mov.b32 {group}, {turn};"
    else:
        code += f"mad.lo.u32 {address}, {turn}, 4, <hits>; ld.shared.b32 {group}, [{address}];"
    first, keys = _load_group(code, window, kind, group, address)
    append = _append_together if len(keys) <= _APPENDED_AT_ONCE else _append_one_by_one
    append(code, window, kind, keys, first, capacity, turn, address)
    code += f"end: {BARRIER}"
    insert(
        code,
        {"x": x_smem, "group_keys": group_keys, "hits": hits, "slots": slots, "counts": counts},
        {"bound": bound, "low": extent.low, "high": extent.high, "origin": extent.origin},
    )


def _go_on(turn: str, predicate: str = "") -> str:
    """Returns PTX that goes on to the thread's next group, if a predicate ("@p") holds; `turn` counts the groups."""
    return f"{predicate} add.u32 {turn}, {turn}, {WARPGROUP}; {predicate} bra next_group;"


def _list_hits(code: Code, window: Window, n: str, address: str, room: int, capacity: int) -> None:
    """Lists in <hits> the numbers of the groups that reach <bound>, in any order; register n gets how many there are.

    A thread counts its groups that do, reserves as many places by an atomic addition, and writes them there. If
    they are more than there is room for, it makes the number of candidates too large, and jumps to label end.

    Args:
      n: register for the result.
      address: register for scratch.
      room: number of places in <hits>.
      capacity: number of slots for candidates.
    """
    keys = code.new("b32", min(window.groups_per_thread, _LOADED_AT_ONCE))
    group_keys, count, group = code.new("b32", 3)
    p, fits = code.new("pred", 2)

    def load(i):
        key = keys[i % len(keys)]
        return f"ld.shared.b32 {key}, [{group_keys}+{4 * WARPGROUP * i}]; setp.ge.s32 {p}, {key}, <bound>;"

    code += f"mad.lo.u32 {group_keys}, <thread>, 4, <group_keys>; mov.b32 {count}, 0;"
    for i in range(window.groups_per_thread):
        code += load(i) + f"@{p} add.u32 {count}, {count}, 1;"
    code += f"setp.eq.u32 {p}, {count}, 0; @{p} bra listed;"
    code += f"atom.relaxed.cta.shared::cta.add.u32 {n}, [<counts>+4], {count};"
    for i in range(window.groups_per_thread):
        code += load(i) + f"setp.lt.and.u32 {fits}, {n}, {room}, {p}; mad.lo.u32 {address}, {n}, 4, <hits>;"
        code += f"add.u32 {group}, <thread>, {WARPGROUP * i}; @{fits} st.shared.b32 [{address}], {group};"
        code += f"@{p} add.u32 {n}, {n}, 1;"
    code += f"listed: {BARRIER} ld.shared.b32 {n}, [<counts>+4]; setp.le.u32 {p}, {n}, {room}; @{p} bra room;"
    code += f"setp.eq.u32 {p}, <thread>, 0; @{p} st.shared.b32 [<counts>], {capacity + 1}; bra end; room:"


def _load_group(
    code: Code, window: Window, kind: Elements, group: str, address: str
) -> tuple[str, list[str]]:
    """Loads the elements of a group; returns a register with its first position, and those with the keys.

    Args:
      group: register with the number of the group.
      address: register for scratch.
    """
    block, first, after = code.new("b32", 3)
    block_bytes = window.block * kind.itemsize
    code += f"shr.u32 {block}, {group}, {WARPGROUP.bit_length() - 1};"
    code += f"mul.lo.u32 {block}, {block}, {window.group_blocks};"  # that of its first elements
    code += f"and.b32 {first}, {group}, {WARPGROUP - 1}; mul.lo.u32 {first}, {first}, {window.vec};"
    code += f"mad.lo.u32 {first}, {block}, {window.block}, {first};"
    code += f"mad.lo.u32 {address}, {first}, {kind.itemsize}, <x>;"
    keys = []
    for j in range(window.group_blocks):
        if j and window.blocks % window.group_blocks:
            # The last block stands for those that would come after it; no position of theirs is in the extent.
            code += f"add.u32 {after}, {block}, {j}; min.u32 {after}, {after}, {window.blocks - 1};"
            code += f"sub.u32 {after}, {after}, {block};"
            code += f"mad.lo.u32 {after}, {after}, {block_bytes}, {address};"
            (words,) = kind.vectors(code, after, [0])
        else:
            (words,) = kind.vectors(code, address, [j * block_bytes])
        keys += kind.keys(code, kind.bits(code, words))
    return first, keys


def _append_one_by_one(
    code: Code,
    window: Window,
    kind: Elements,
    keys: list[str],
    first: str,
    capacity: int,
    turn: str,
    slot: str,
) -> None:
    """Appends those of up to 32 keys that reach <bound>, and goes on; to label end if the slots are full.

    mask = a bit for each key that reaches the bound                 as a rule there is one
    while mask: take its lowest bit, and append that element, unless its position is outside the extent

    Args:
      first: register with the first position of the group.
      capacity: number of slots.
      turn: register that counts the groups of the thread; see `_go_on`.
      slot: register for scratch.
    """
    mask, bit, position, key = code.new("b32", 4)
    (p,) = code.new("pred")
    code += f"mov.b32 {mask}, 0;"
    for i, value in enumerate(keys):
        code += f"setp.ge.s32 {p}, {value}, <bound>; @{p} or.b32 {mask}, {mask}, {1 << i};"
    code += f"next_bit: setp.eq.u32 {p}, {mask}, 0; " + _go_on(turn, f"@{p}")
    code += f"brev.b32 {bit}, {mask}; clz.b32 {bit}, {bit}; sub.u32 {slot}, {mask}, 1;"
    code += f"and.b32 {mask}, {mask}, {slot};"
    code += f"shr.u32 {position}, {bit}, {window.vec.bit_length() - 1};"
    code += f"and.b32 {bit}, {bit}, {window.vec - 1};"
    code += f"mad.lo.u32 {position}, {position}, {window.block}, {bit};"
    code += f"add.u32 {position}, {position}, {first};"
    code += f"setp.lt.s32 {p}, {position}, <low>; @{p} bra next_bit;"
    code += f"setp.ge.s32 {p}, {position}, <high>; @{p} bra next_bit;"
    _load_key(code, kind, position, key)  # once more, since a register cannot be chosen by number
    code += f"add.u32 {position}, {position}, <origin>;"
    code += f"atom.relaxed.cta.shared::cta.add.u32 {slot}, [<counts>], 1;"
    code += f"setp.ge.u32 {p}, {slot}, {capacity}; @{p} bra end;"
    code += store_slot("<slots>", slot, key, position) + "bra next_bit;"


def _load_key(code: Code, kind: Elements, position: str, key: str) -> None:
    """Writes the key of the element at a position to register `key`."""
    (address,) = code.new("b32")
    code += f"mad.lo.u32 {address}, {position}, {kind.itemsize}, <x>;"
    if kind.halves:
        (half,) = code.new("b16")
        code += f"ld.shared.b16 {half}, [{address}]; cvt.s32.s16 {key}, {half};"
    else:
        code += f"ld.shared.b32 {key}, [{address}];"
    kind.keys(code, [key])


def _append_together(
    code: Code,
    window: Window,
    kind: Elements,
    keys: list[str],
    first: str,
    capacity: int,
    turn: str,
    slot: str,
) -> None:
    """Appends those of few keys that reach <bound>, and goes on; to label end if the slots are full.

    chosen[i] = key[i] >= bound, and its position is in the extent
    slot = what an atomic addition of the number of the chosen ones gives: the first place that is free
    for all i: if chosen[i], write the candidate, and go to the next slot

    The arguments are those of `_append_one_by_one`; `first` is changed.
    """
    starts = [b * window.block + j for b in range(window.group_blocks) for j in range(window.vec)]
    chosen = code.new("pred", len(keys))
    count, position = code.new("b32", 2)
    (p,) = code.new("pred")
    code += f"mov.b32 {count}, 0;"
    for key, start, q in zip(keys, starts, chosen):
        code += f"add.s32 {position}, {first}, {start}; setp.ge.s32 {p}, {position}, <low>;"
        code += f"setp.lt.and.s32 {p}, {position}, <high>, {p};"
        code += f"setp.ge.and.s32 {q}, {key}, <bound>, {p}; @{q} add.u32 {count}, {count}, 1;"
    code += f"setp.eq.u32 {p}, {count}, 0; @{p} bra appended;"
    code += f"atom.relaxed.cta.shared::cta.add.u32 {slot}, [<counts>], {count};"
    code += f"add.u32 {count}, {count}, {slot}; setp.gt.u32 {p}, {count}, {capacity}; @{p} bra end;"
    code += f"add.s32 {first}, {first}, <origin>;"
    for i, (key, start, q) in enumerate(zip(keys, starts, chosen)):
        code += f"@!{q} bra not_chosen{i}; add.s32 {position}, {first}, {start};"
        code += store_slot("<slots>", slot, key, position) + f"add.u32 {slot}, {slot}, 1; not_chosen{i}:"
    code += "appended:" + _go_on(turn)


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
    totals = code.new("b32", _WARPS)
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
