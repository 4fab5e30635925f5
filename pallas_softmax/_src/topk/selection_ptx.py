"""Inline PTX for the search of `selection`, with the 128 threads of a CTA.

The groups that reach the bound are listed, and each thread takes every 128th group of the list. It handles 32 elements
at once, and makes a mask with one bit for each. An example with four groups of 8 elements:

    its groups    12         71         130        388
    mask          00100001   00000010   00000001   01000000       a bit for each element that reaches the bound
    candidates    | 12: 0 | 12: 5 | 71: 1 | 130: 0 | 388: 6 |     appended, two or four at a time
"""

from collections.abc import Callable

import numpy as np

from pallas_softmax._src.gpu.hardware import LANES, WARPGROUP, WARPS
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.insert import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.gpu.window import Window
from pallas_softmax._src.topk.candidates import (
    CANDIDATE_BYTES,
    LOWEST_KEY,
    POSITION_BYTES,
    candidate_of,
    capacity_of,
    lists_positions,
    store_candidate,
    store_position,
)

_BITS = 32  # elements that a thread tests together, one for each bit of a word
_ALL_ONES = 2**32 - 1
# Up to this capacity of the list, a thread has so few candidates that it appends two at once, instead of four.
_FEW_CANDIDATES = 256
_LOADED_AT_ONCE = 8  # loads that a thread has in flight

_GROUPS_BYTE = (
    4  # offset in <counts> of the number of groups that reach the bound; the number of candidates is before
)


# ---- the candidates


def collect(
    window: Window, x_smem, group_keys, hits, candidates, counts, bound, extent, *, all_groups: bool
) -> None:
    """Appends elements that reach the bound. A thread handles 32 elements at once, from one or several groups:

    n = list the groups that reach the bound          with all_groups: n = all groups; skip those below the bound
    for turn = 0, 128 * groups at once, ... below n:
        mask = a bit for each of the thread's 32 elements that is in the extent and reaches the bound
        place = reserve as many places as mask has bits
        while mask: clear its lowest bit, write that element to entry `place`, place += 1

    If `hits` is too short for the groups, all threads leave at once. If the list is full, further candidates
    are only counted.
    """
    element, capacity = Elements(x_smem.dtype), capacity_of(candidates)
    p = CtaProgram()
    thread, count_at = p.operands("u32", "thread", "counts")
    with p.block() as finish:
        if all_groups:
            n = p.var(window.groups, "u32")
        else:
            n = _list_hits(p, window, hits, capacity, finish)
        finish((thread & (WARPGROUP - LANES)) >= n)  # the first thread of the warp has no group
        turn = p.var(thread)
        with p.repeat() as again:
            mask = _mask_turn(p, window, element, turn, n, None if all_groups else hits)
            count = p.count_ones(mask)
            place = p.take_from(count_at, count, when=count.differs(0))
            _append(p, window, element, mask, turn, place, candidates, None if all_groups else hits)
            p.increase(turn, _BITS // window.group_size * WARPGROUP)
            again((turn & -LANES) < n)
    p.barrier()
    insert_ptx(
        p,
        {"x": x_smem, "group_keys": group_keys, "hits": hits, "candidates": candidates, "counts": counts},
        {"bound": bound, "low": extent.low, "high": extent.high, "origin": extent.origin},
    )


def _list_hits(p: CtaProgram, window: Window, hits, capacity: int, give_up: Callable[..., None]) -> Value:
    """Lists the numbers of the groups that reach <bound> in `hits`, in any order. Returns how many there are.

    A warp counts its groups that reach the bound, and reserves as many places. If all warps' groups together do not
    fit, the number of candidates is set to more than the capacity, and all threads give up.

    Args:
      capacity: capacity of the list of candidates.
      give_up: leaves the search.
    """
    thread, group_keys, counts = p.operands("u32", "thread", "group_keys", "counts")
    bound, (room,) = p.operand("bound", "s32"), hits.shape
    own = p.at(group_keys, thread, 4)
    lower_lanes, place = p.special("lanemask_lt"), p.fresh("u32")
    each = window.groups_per_thread
    for start in range(0, each, _LOADED_AT_ONCE):
        turns = range(start, min(start + _LOADED_AT_ONCE, each))
        keys = [p.load(own, "s32", offset=4 * WARPGROUP * i) for i in turns]
        count, before, reach = p.var(0, "u32"), [], []
        for key in keys:
            reach.append(key >= bound)
            ballot = p.ballot(reach[-1])
            before.append(p.count_ones(ballot & lower_lanes) + count)
            count = count + p.count_ones(ballot)
        with p.block() as leave:
            leave(count.equals(0))
            p.set(place, 0)
            p.take_into(place, counts, count, offset=_GROUPS_BYTE, when=lower_lanes.equals(0))
            first = p.shuffle(place, "idx", 0)
            for i, reaches, lower in zip(turns, reach, before):
                at = lower + first
                fits = reaches & (at < room)
                _store_hit(p, hits, at, thread + WARPGROUP * i, fits)
    p.barrier()
    n = p.load(counts, "u32", offset=_GROUPS_BYTE)
    with p.when(n > room):
        p.store(counts, capacity + 1, when=thread.equals(0))
        give_up()
    return n


def _store_hit(p: CtaProgram, hits, at: Value, group: Value, when: Value) -> None:
    """Writes the number of a group to entry `at` of `hits`, the list of groups that reach the bound."""
    itemsize = np.dtype(hits.dtype).itemsize
    value = group if itemsize == 4 else p.convert(group, "u16")
    p.store(p.at(p.operand("hits", "u32"), at, itemsize), value, when=when)


def _load_hit(p: CtaProgram, hits, at: Value, when: Value, default: int | None = None) -> Value:
    """Returns entry `at` of `hits`. If `when` does not hold: the default, or an undefined number without a default."""
    itemsize = np.dtype(hits.dtype).itemsize
    address = p.at(p.operand("hits", "u32"), at, itemsize)
    if itemsize == 2:
        return p.convert(p.load(address, "u16", when=when, default=default), "u32")
    if default is not None:
        return p.load(address, "u32", when=when, default=default)
    p.load_into(address, address, when=when)  # overwriting the address saves a register
    return address


def _mask_turn(p: CtaProgram, window: Window, element: Elements, turn: Value, n: Value, hits) -> Value:
    """Returns a mask of the elements in groups turn, turn + 128, ... that are in the extent and reach <bound>.

    The group numbers index `hits`, or count all groups if `hits` is None. Raw bits are compared instead of keys:

      * If the bound is not negative, this gives the same result. As integers, the bits of negative elements are < 0.
      * If the bound is negative, all bits except the signs are inverted first. This turns negative elements into their
        keys, and leaves the others above the bound.
    """
    group_keys, x = p.operands("u32", "group_keys", "x")
    bound = p.operand("bound", "s32")
    groups, have = [], []
    for i in range(_BITS // window.group_size):
        number = turn + i * WARPGROUP
        has = number < n
        if hits is None:
            key = p.load(p.at(group_keys, number, 4), "s32", when=has, default=LOWEST_KEY)
            has = has & (key >= bound)
            groups.append(p.select(has, number, 0))
        else:
            groups.append(_load_hit(p, hits, number, has, default=0))
        have.append(has)
    firsts, vectors = [], []
    for group in groups:
        first = _first_position(p, window, group)
        firsts.append(first)
        vectors.append(_group_words(p, window, element, first, p.at(x, first, element.itemsize)))
    mask, flip = p.var(0, "u32"), bound.sign() & element.flip
    bound = bound << (16 if element.halves else 0)
    for i, (first, has, words) in enumerate(zip(firsts, have, vectors)):
        bits = _bits_reaching(p, element, words, bound, flip)
        if window.groups * window.group_size > window.cut.shortest:  # some are outside
            bits = _in_extent(p, window, first, bits)
        mask = mask | p.select(has, bits, 0) << i * window.group_size
    return mask


def _bits_reaching(p: CtaProgram, element: Elements, words: list[Value], bound: Value, flip: Value) -> Value:
    """Returns a mask of the elements of the words that are not below `bound`, after an xor with `flip`."""
    each = _BITS // 4  # bits per register: several registers make shorter dependency chains
    elements = []
    for word in words:
        turned = word ^ flip
        elements += [turned << 16, turned] if element.halves else [turned]
    bits = [p.var(0, "u32") for _ in range(0, len(elements), each)]
    for i, x in enumerate(elements):
        p.update(bits[i // each], "or", 1 << i, when=x >= bound)
    return p.reduce("or", bits)


def _first_position(p: CtaProgram, window: Window, group: Value) -> Value:
    """Returns the first position of a group."""
    of_first_block = (group >> _log2(WARPGROUP)) * (window.group_blocks * window.block)
    return p.multiply_add(group & (WARPGROUP - 1), window.vec, of_first_block)


def _log2(n: int) -> int:
    """Returns the logarithm of a power of two."""
    return n.bit_length() - 1


def _group_words(
    p: CtaProgram, window: Window, element: Elements, first: Value, address: Value
) -> list[Value]:
    """Returns the words of a group, loaded 16 bytes at a time.

    Args:
      first: the first position of the group.
      address: the address of this position.
    """
    offsets = [b * window.block * element.itemsize for b in range(window.group_blocks)]
    words = []
    if window.blocks % window.group_blocks == 0:
        for offset in offsets:
            words += element.vector(p, address, offset)
        return words
    # Reads beyond the last block are redirected to it. Positions beyond it are never in the extent.
    in_last_block = (first & (window.block - 1)) + (window.blocks - 1) * window.block
    last = p.at(p.operand("x", "u32"), in_last_block, element.itemsize)
    for offset in offsets:
        words += element.vector(p, p.min(address + offset, last))
    return words


def _in_extent(p: CtaProgram, window: Window, first: Value, bits: Value) -> Value:
    """Clears the bits of a group's elements outside the extent: before <low>, and from <high> on.

    Positions increase with the bits. Positions before <low> are in the first vector of the window.
    """
    low, high = p.operand("low", "u32"), p.operand("high", "s32")
    starts = first.equals(0)
    p.update(bits, "and", p.var(_ALL_ONES, "u32") << low, when=starts)
    rest = p.max(high - first, 0).bits("u32")
    blocks = rest >> _log2(window.block)
    in_vector = p.min(rest & (window.block - 1), window.vec)
    return bits & ~(p.var(_ALL_ONES, "u32") << p.multiply_add(blocks, window.vec, in_vector))


def _append(
    p: CtaProgram,
    window: Window,
    element: Elements,
    mask: Value,
    turn: Value,
    place: Value,
    listed,
    hits,
) -> None:
    """Appends the elements with bits in `mask` at `place`, two or four at once. Clears `mask` and advances `place`."""
    candidates, origin = p.operands("u32", "candidates", "origin")
    capacity = capacity_of(listed)
    with p.loop() as leave:
        leave(mask.equals(0) | (place >= capacity))
        chosen, bits, groups = [], [], []
        for i in range(2 if capacity <= _FEW_CANDIDATES else 4):
            inside = place + i < capacity
            chosen.append(inside & mask.differs(0))
            bits.append(p.lowest_bit(mask))
            p.update(mask, "and", mask - 1)
            group = p.multiply_add(bits[-1] >> _log2(window.group_size), WARPGROUP, turn)
            groups.append(group if hits is None else _load_hit(p, hits, group, chosen[-1]))
        keys, positions = [], []
        for choose, bit, group in zip(chosen, bits, groups):
            position = _first_position(p, window, group)
            in_group = bit & (window.group_size - 1)
            block, in_vector = in_group >> _log2(window.vec), in_group & (window.vec - 1)
            positions.append(position + p.multiply_add(block, window.block, in_vector))
            if lists_positions(listed):
                store_position(p, candidates, place, positions[-1], when=choose)
                p.increase(place, 1)
                continue
            # The element is loaded again, because registers cannot be indexed.
            at = p.at(p.operand("x", "u32"), positions[-1], element.itemsize)
            keys.append(element.load_bits(p, at, when=choose))
        for choose, key, position in zip(chosen, keys, positions):
            p.set(key, element.key(key))
            store_candidate(p, candidates, place, key, position + origin, when=choose)
            p.increase(place, 1)


# ---- counts and ties


def count(window: Window, x_smem, group_keys, bound) -> tuple:
    """Returns for each thread how many of its positions reach the bound, and how many exceed it, each (128,).

    for each group of the thread: skip its blocks if its largest key is below the bound, else compare each element
    """
    element, p = Elements(x_smem.dtype), CtaProgram()
    thread, x, keys_at = p.operands("u32", "thread", "x", "group_keys")
    limit = p.operand("bound", "s32")
    reach, exceed = p.operands("u32", "reach", "exceed")
    block_bytes = window.block * element.itemsize
    p.set(reach, 0)
    p.set(exceed, 0)
    address, group = p.at(x, thread, 16), p.at(keys_at, thread, 4)
    blocks_left = p.var(window.blocks, "u32")
    with p.repeat() as next_group:
        largest = p.load(group, "s32")
        blocks = p.min(blocks_left, window.group_blocks)
        p.update(blocks_left, "sub", blocks)
        with p.block() as counted:
            reaches = largest >= limit
            with p.when(~reaches):
                p.set(address, p.at(address, blocks, block_bytes))
                counted()
            with p.repeat() as next_block:
                for key in element.keys(element.vector(p, address)):
                    p.increase(reach, 1, when=key >= limit)
                    p.increase(exceed, 1, when=key > limit)
                p.increase(address, block_bytes)
                p.update(blocks, "sub", 1)
                next_block(blocks.differs(0))
        p.increase(group, 4 * WARPGROUP)
        next_group(blocks_left.differs(0))
    refs = {"x": x_smem, "group_keys": group_keys}
    return insert_ptx(p, refs, {"bound": bound}, results={"reach": "i32", "exceed": "i32"})


def collect_ties(window: Window, x_smem, scratch, candidates, bound, extent, first, k: int) -> None:
    """Goes through the blocks in order, and numbers the elements that equal the bound, the ties:

    base = first
    for each block, while base < k:
        before = base + ties of lower lanes of this warp + ties of lower warps
        for each tie in the thread's vector:
            if before < k: write it to entry `before`
            before += 1
        base += ties in the block
    """
    element, p = Elements(x_smem.dtype), CtaProgram()
    thread, x, candidates_at = p.operands("u32", "thread", "x", "candidates")
    tie, origin, number = p.operands("s32", "bound", "origin", "first")
    base, parity = p.var(number), p.var(0, "u32")
    lower_lanes, scratch_at = p.special("lanemask_lt"), p.operand("scratch", "u32")
    first_position = (thread * window.vec).bits("s32")
    address, block = p.at(x, thread, 16), p.var(0, "u32")
    with p.loop() as leave:
        leave((block >= window.blocks) | (base >= k))
        keys = element.keys(element.vector(p, address))
        tied, before, in_warp = _tied_in_warp(p, keys, first_position, lower_lanes)
        # Two places alternate, so that one barrier for each block suffices.
        (totals,) = p.of_warps([in_warp], p.at(scratch_at, parity, 4 * WARPS), lane=0)
        p.increase(before, base)
        p.add_lower_warps(before, totals)
        p.increase(base, p.reduce("add", totals))
        for j, is_tied in enumerate(tied):
            with p.when(is_tied & (before < k)):
                if lists_positions(candidates):
                    store_position(p, candidates_at, before, first_position + j)
                else:
                    store_candidate(p, candidates_at, before, tie, first_position + j + origin)
            p.increase(before, 1, when=is_tied)
        p.increase(address, window.block * element.itemsize)
        p.increase(first_position, window.block)
        p.increase(block, 1)
        p.update(parity, "xor", 1)
    p.barrier()
    insert_ptx(
        p,
        {"x": x_smem, "scratch": scratch, "candidates": candidates},
        {"bound": bound, "low": extent.low, "high": extent.high, "origin": extent.origin, "first": first},
    )


def _tied_in_warp(
    p: CtaProgram, keys: list[Value], first_position: Value, lower_lanes: Value
) -> tuple[list[Value], Value, Value]:
    """Finds a thread's keys that equal <bound> and are in the extent. The first key is at `first_position`.

    Returns one condition for each key, the number of such keys in the lower lanes of the warp, and their number in the
    whole warp. `lower_lanes` is the bit mask of the lower lanes.
    """
    tie, low, high = p.operands("s32", "bound", "low", "high")
    in_warp, before = p.var(0, "s32"), p.var(0, "s32")
    tied = []
    for j, key in enumerate(keys):
        position = first_position + j
        equal = key.equals(tie)
        from_low = equal & (position >= low)
        tied.append(from_low & (position < high))
        ballot = p.ballot(tied[-1])
        p.increase(in_warp, p.count_ones(ballot))
        p.increase(before, p.count_ones(ballot & lower_lanes))
    return tied, before, in_warp


# ---- from positions to candidates


def expand_positions(x_smem, positions, candidates, n, origin) -> None:
    """Loads every 128th candidate of a thread to registers. After a barrier, the list overwrites the row.

    Entries after the last candidate become empty, as they are in a window that is not compact.
    """
    element, each = Elements(x_smem.dtype), capacity_of(positions) // WARPGROUP
    p = CtaProgram()
    thread, x, own, first_index = p.operands("u32", "thread", "x", "positions", "origin")
    count_at = p.operand("n", "u32")
    own = p.at(own, thread, POSITION_BYTES)
    values = [p.var(0, "u64") for _ in range(capacity_of(candidates) // WARPGROUP)]
    with p.block() as leave:
        for first in range(0, each, _LOADED_AT_ONCE):
            leave(count_at <= WARPGROUP * first)
            loaded = []
            for i in range(first, min(first + _LOADED_AT_ONCE, each)):
                listed = thread + WARPGROUP * i < count_at
                offset = POSITION_BYTES * WARPGROUP * i
                position = p.convert(p.load(own, "u16", offset=offset, when=listed, default=0), "u32")
                loaded.append(
                    (i, listed, position, element.load_bits(p, p.at(x, position, element.itemsize)))
                )
            for i, listed, position, bits in loaded:
                p.set(values[i], candidate_of(p, element.key(bits), position + first_index), when=listed)
    p.barrier()
    at = p.at(x, thread, CANDIDATE_BYTES)
    for i, value in enumerate(values):
        p.store(at, value, offset=CANDIDATE_BYTES * WARPGROUP * i)
    p.barrier()
    insert_ptx(p, {"x": x_smem, "positions": positions}, {"n": n, "origin": origin})


# ---- the winners of other CTAs


def collect_winners(candidates, counts, keys_gmem, indices_gmem, row, first, n, bound) -> None:
    """Loads every 128th winner per thread, eight at a time, and appends the winners that reach the bound.

    The list must be empty, and all threads must have passed the barrier at the end of `clear`.
    """
    p = CtaProgram()
    thread, row_number, first_winner, winners = p.operands("u32", "thread", "row", "first", "n")
    candidates_at, count_at = p.operands("u32", "candidates", "counts")
    keys_at, indices_at = p.operands("u64", "keys", "indices")
    least = p.operand("bound", "s32")
    each = candidates.shape[0] // 2 // WARPGROUP
    number = p.multiply_wide(row_number, keys_gmem.shape[1]) + p.convert(first_winner, "u64")
    own = number + p.convert(thread, "u64") << 2  # bytes
    keys, indices = ([p.fresh("s32") for _ in range(min(each, _LOADED_AT_ONCE))] for _ in range(2))
    for start in range(0, each, _LOADED_AT_ONCE):
        turns, listed = range(start, min(start + _LOADED_AT_ONCE, each)), []
        for i, key, index in zip(turns, keys, indices):
            listed.append(thread + i * WARPGROUP < winners)
            p.set(key, LOWEST_KEY)
            p.set(index, 0)
            offset = 4 * WARPGROUP * i
            p.load_into(key, own + keys_at, offset=offset, when=listed[-1], space="global")
            p.load_into(index, own + indices_at, offset=offset, when=listed[-1], space="global")
        for is_listed, key, index in zip(listed, keys, indices):
            with p.when(is_listed & (key >= least)):
                place = p.take_from(count_at, 1)
                store_candidate(p, candidates_at, place, key, index)
    p.barrier()
    insert_ptx(
        p,
        {"candidates": candidates, "counts": counts, "keys": keys_gmem, "indices": indices_gmem},
        {"row": row, "first": first, "n": n, "bound": bound},
    )
