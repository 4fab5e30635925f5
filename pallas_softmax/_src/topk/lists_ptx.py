"""Inline PTX that merges lists of winners of a row. Each list has k winners, in order, in device memory.

A few lists are ranked by binary search. A winner's rank is the number of better winners in all lists. A binary search
counts them in each list. For k = 4:

    lists     9 6 5 2 | 8 7 5' 1        5' has the larger index, so 5 is better
    rank      0 3 4 6 | 1 2 5  7        6: one better winner in its own list, two in the other
    ranked    9 8 7 6

More lists are ranked like the candidates of a window: those winners that reach a bound. The operands of both programs:

    <keys>, <indices>       (rows, all winners of a row) int32, device memory
    <row>                   the number of the row
    <candidates>            shared memory for the winners that are ranked
    <ranked>                the k best, see `CandidateList`
    <first>, <n>            with a bound: the first winner in the row, and the number of winners
    <bound>                 with a bound: a key that at least k of them reach
    <counts>, <buckets>     with a bound: scratch in shared memory
"""

import functools

import numpy as np

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.topk.candidates import (
    CANDIDATE_BYTES,
    CandidateList,
    candidate_of,
    clear,
    store_winners,
)
from pallas_softmax._src.topk.ranking_ptx import rank

_LOADED_AT_ONCE = 8  # loads that a thread has in flight


@functools.lru_cache(maxsize=16)
def search_lists_program(lists: int, k: int) -> CtaProgram:
    """Returns the program that ranks a few lists. Each thread handles every 128th winner."""
    p = CtaProgram()
    candidates, ranked = p.operands("u32", "candidates", "ranked")
    turns = range(-(-lists * k // WARPGROUP))
    first = p.multiply_wide(p.operand("row", "u32"), lists * k)
    listed, *keys_and_indices = zip(*_load(p, first, turns, lists * k))
    values = [candidate_of(p, key, index) for key, index in zip(*keys_and_indices)]
    own_candidate = p.at(candidates, p.thread, CANDIDATE_BYTES)
    for i, value in enumerate(values):
        p.store(own_candidate, value, offset=CANDIDATE_BYTES * WARPGROUP * i, when=listed[i])
    p.barrier()
    ranks = [p.var(0, "u32") for _ in turns]
    for number in range(lists):
        _add_better(p, candidates + CANDIDATE_BYTES * k * number, k, values, ranks)
    for value, rank_, is_listed in zip(values, ranks, listed):
        store_winners(p, ranked, [value], rank_, k, when=is_listed)
    p.barrier()
    return p


def _load(p: CtaProgram, first: Value, turns: range, n: Value | int) -> list[tuple[Value, Value, Value]]:
    """Loads winners thread + 128 i of n winners, for each turn i; `first` is the number of the first winner in <keys>.

    Returns for each turn whether there is such a winner, and its key and index.
    """
    own = first + p.convert(p.thread, "u64") << 2  # bytes
    listed = [p.thread + i * WARPGROUP < n for i in turns]
    keys, indices = (
        [
            p.load(own + at, "s32", offset=4 * WARPGROUP * i, when=is_listed, space="global")
            for i, is_listed in zip(turns, listed)
        ]
        for at in p.operands("u64", "keys", "indices")
    )
    return list(zip(listed, keys, indices))


def _add_better(p: CtaProgram, start: Value, k: int, values: list[Value], ranks: list[Value]) -> None:
    """Adds to each value's rank the number of greater entries in a sorted list of k at address `start`."""
    ends = [p.var(start) for _ in values]  # end of the entries that are known to be greater
    step = 1 << k.bit_length() - 1
    while step:
        last = start + CANDIDATE_BYTES * (k - step)
        for end, value in zip(ends, values):
            inside = end <= last
            other = p.load(end, "u64", offset=CANDIDATE_BYTES * (step - 1), when=inside)
            p.increase(end, CANDIDATE_BYTES * step, when=inside & (other > value))
        step //= 2
    for rank_, end in zip(ranks, ends):
        p.increase(rank_, (end - start) >> (CANDIDATE_BYTES.bit_length() - 1))


@functools.lru_cache(maxsize=16)
def rank_lists_program(winners: int, capacity: int, k: int, dtype: np.dtype) -> CtaProgram:
    """Returns the program that ranks the winners that reach a bound: at most `capacity` of them."""
    p = CtaProgram()
    candidates, counts, buckets, ranked = p.operands("u32", "candidates", "counts", "buckets", "ranked")
    clear(p, candidates, CANDIDATE_BYTES * capacity, counts)
    _collect(p, winners, candidates, counts, capacity)
    n = p.load(counts, "u32")
    rank(p, CandidateList(candidates, n, capacity, buckets, ranked, k, dtype, None))
    return p


def _collect(p: CtaProgram, winners: int, candidates: Value, counts: Value, capacity: int) -> None:
    """Loads every 128th winner per thread, eight at a time, and appends the winners that reach <bound> to the list."""
    row, first, n = p.operands("u32", "row", "first", "n")
    bound, each = p.operand("bound", "s32"), capacity // WARPGROUP
    number = p.multiply_wide(row, winners) + p.convert(first, "u64")
    for start in range(0, each, _LOADED_AT_ONCE):
        turns = range(start, min(start + _LOADED_AT_ONCE, each))
        for is_listed, key, index in _load(p, number, turns, n):
            with p.when(is_listed & (key >= bound)):
                place = p.take_from(counts, 1)
                p.store(p.at(candidates, place, CANDIDATE_BYTES), candidate_of(p, key, index))
    p.barrier()
