"""Inline PTX that merges lists of winners of a row. Those winners that reach a bound are ranked like candidates."""

import functools

import numpy as np

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.topk.candidates import CANDIDATE_BYTES, CandidateList, candidate_of, clear
from pallas_softmax._src.topk.ranking_ptx import rank

_LOADED_AT_ONCE = 8  # winners that a thread has in flight


@functools.lru_cache(maxsize=16)
def rank_lists_program(winners: int, capacity: int, k: int, dtype: np.dtype) -> CtaProgram:
    """Returns the program that writes the k best of n winners to <ranked>. At least k of them must reach <bound>.

    <keys>, <indices>     (rows, winners) int32, device memory; the <n> winners start at [row, first] of these arrays
    <row>, <first>, <n>   numbers
    <candidates>          shared memory for the winners that reach the bound, `capacity` entries
    <counts>, <buckets>   scratch in shared memory
    <ranked>              see `CandidateList`
    """
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
    first = p.multiply_wide(row, winners) + p.convert(first, "u64")
    for start in range(0, each, _LOADED_AT_ONCE):
        turns = range(start, min(start + _LOADED_AT_ONCE, each))
        own = first + p.convert(p.thread, "u64") << 2  # bytes
        listed = [p.thread + WARPGROUP * i < n for i in turns]
        keys, indices = (
            [
                p.load(own + at, "s32", offset=4 * WARPGROUP * i, when=is_listed, space="global")
                for i, is_listed in zip(turns, listed)
            ]
            for at in p.operands("u64", "keys", "indices")
        )
        for is_listed, key, index in zip(listed, keys, indices):
            with p.when(is_listed & (key >= bound)):
                place = p.take_from(counts, 1)
                p.store(p.at(candidates, place, CANDIDATE_BYTES), candidate_of(p, key, index))
    p.barrier()
