"""The program that finds the k best of the part of a row in a window, and puts them in order.

    stage                                                          file
    a bound that k elements should reach, and few more             candidates_ptx
    the elements that reach it: the candidates                     candidates_ptx
    if they are fewer than k, or do not fit: an exact bound        here
    the order of the candidates                                    ranking_ptx

`window_kernel.py` explains the search.
"""

import functools

import numpy as np

from pallas_softmax_base._src import sort_keys
from pallas_softmax_base._src.gpu.hardware import ACCESS_BYTES, WARPGROUP, WARPS
from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.gpu.window import Window
from pallas_softmax_base._src.topk.candidates import CandidateList, clear
from pallas_softmax_base._src.topk.candidates_ptx import (
    SCRATCH_BYTE,
    WindowProgram,
    collect,
    collect_ties,
    expand_positions,
    find_bound,
)
from pallas_softmax_base._src.topk.plan import bound_rank, ordering_words
from pallas_softmax_base._src.topk.ranking_ptx import rank


@functools.lru_cache(maxsize=16)
def search_program(window: Window, dtype: np.dtype, k: int) -> WindowProgram:
    """Returns the program; `WindowProgram` has its operands. The k best go to <group_keys> (`CandidateList.ranked`).

    In a compact window, they go to <x>, as the last array of `ordering_words`.
    """
    p = WindowProgram(window, dtype, k)
    lowest = sort_keys.lowest_key(dtype)
    bound_at = bound_rank(window, k, p.capacity)
    all_keys = p.var(lowest, "s32"), p.var(~lowest, "s32")
    bound, highest = find_bound(p, bound_at) if window.groups >= bound_at else all_keys
    collect(p, bound)
    n = p.var(p.load(p.counts, "u32"))
    with p.when((n < k) | (n > p.capacity)):
        _find_exactly(p, bound, highest, n)
    if window.compact:  # the list replaces the row
        words, bucket_words, _ = ordering_words(k)
        buckets = p.x + 4 * words
        ranked = buckets + 4 * bucket_words
        listed = CandidateList(p.x, n, words // 2, buckets, ranked, k, dtype, window.vocab)
        expand_positions(p, listed)
    else:
        listed = CandidateList(p.candidates, n, p.capacity, p.hits, p.group_keys, k, dtype, window.vocab)
    rank(p, listed)
    return p


def _find_exactly(p: WindowProgram, failed: Value, highest: Value, n: Value) -> None:
    """Collects again with an exact bound instead of the one that failed. Sets `n` to the number of candidates."""
    bound, reach, exceed = _bisect(p, failed, highest)
    all_fit = p.var(reach <= p.capacity)
    clear(p, p.candidates, p.list_bytes, p.counts)
    with p.when(all_fit | (exceed > 0)):
        collect(p, p.select(all_fit, bound, bound + 1), all_groups=True)
    with p.when(~all_fit):
        collect_ties(p, bound, exceed)
    p.set(n, p.select(all_fit, reach, p.k).bits("u32"))


def _bisect(p: WindowProgram, failed: Value, highest: Value) -> tuple[Value, Value, Value]:
    """Returns an exact bound, how many elements reach it, and how many exceed it. No element exceeds `highest`."""
    k, dtype = p.k, p.element.dtype
    lowest = sort_keys.lowest_key(dtype)
    # These keys are tried first. Each ends the bisection at once in a case that is not rare: ties at the bound, fewer
    # than k unmasked elements, or NaNs.
    likely_keys = (
        failed,
        lowest + 1,
        sort_keys.key_of_number(np.nan, dtype),
        sort_keys.key_of_number(-np.nan, dtype),
    )
    low, high = p.var(lowest, "s32"), p.var(highest)
    reach, exceed = (p.var(p.high - p.low) for _ in range(2))
    turn = p.var(0, "u32")
    with p.loop() as leave:
        too_many = (reach > p.capacity) & (exceed >= k)
        leave(~(too_many & low.differs(high)))
        gap = (high - low).bits("u32")  # it may exceed 2^31
        middle = p.var(low + ((gap >> 1) + (gap & 1)).bits("s32"))
        for i, likely in enumerate(likely_keys):
            likely = likely if isinstance(likely, Value) else p.var(likely, "s32")
            inside = (likely > low) & (likely <= high)
            p.set(middle, likely, when=inside & turn.equals(i))
        reach_middle, exceed_middle = _count(p, middle, turn)
        enough = p.var(reach_middle >= k)
        for register, found in ((low, middle), (reach, reach_middle), (exceed, exceed_middle)):
            p.set(register, found, when=enough)
        p.set(high, middle - 1, when=~enough)
        p.increase(turn, 1)
    with p.when(low.equals(lowest)):  # not counted yet
        p.set(exceed, _count(p, low, turn)[1])
    return low, reach, exceed


def _count(p: WindowProgram, bound: Value, turn: Value) -> tuple[Value, Value]:
    """Returns how many elements of the part reach the bound, and how many exceed it. `turn` numbers the calls.

    for each group of the thread: skip its blocks if its largest key is below the bound, else compare each element
    """
    window, element = p.window, p.element
    reach, exceed = (p.var(0, "s32") for _ in range(2))
    address, group = p.at(p.x, p.thread, ACCESS_BYTES), p.at(p.group_keys, p.thread, 4)
    blocks_left = p.var(window.blocks, "u32")
    with p.repeat() as next_group:
        largest = p.load(group, "s32")
        blocks = p.min(blocks_left, window.group_blocks)
        p.update(blocks_left, "sub", blocks)
        with p.block() as counted:
            with p.when(largest < bound):
                p.set(address, p.at(address, blocks, p.block_bytes))
                counted()
            with p.repeat() as next_block:
                for key in element.keys(element.vector(p, address)):
                    p.increase(reach, 1, when=key >= bound)
                    p.increase(exceed, 1, when=key > bound)
                p.increase(address, p.block_bytes)
                p.update(blocks, "sub", 1)
                next_block(blocks.differs(0))
        p.increase(group, 4 * WARPGROUP)
        next_group(blocks_left.differs(0))
    counts = [p.over_lanes("add", reach), p.over_lanes("add", exceed)]
    # Calls alternate between two parts of the scratch, so that each needs one barrier only.
    scratch = p.at(p.counts + SCRATCH_BYTE, turn & 1, 2 * 4 * WARPS)
    reaches, exceeds = p.of_warps(counts, scratch, lane=0)
    # Positions outside the part hold -inf, and are counted as well.
    around, neg_inf = window.size - (p.high - p.low), sort_keys.key_of_number(-np.inf, element.dtype)
    outside_reach = p.select(bound <= neg_inf, around, 0)
    outside_exceed = p.select(bound < neg_inf, around, 0)
    return p.reduce("add", reaches) - outside_reach, p.reduce("add", exceeds) - outside_exceed
