"""Inline PTX that ranks the winners of a few sorted lists by binary search: `selection.rank_lists`.

A winner's rank is the number of better winners in all lists. A binary search counts them in each list. For k = 4:

    lists     9 6 5 2 | 8 7 5' 1        5' has the larger index, so 5 is better
    rank      0 3 4 . | 1 2 .  .        6: one better winner in its own list, two in the other
    ranked    9 8 7 6
"""

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.insert import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.topk.candidates import CANDIDATE_BYTES, candidate_of, store_winners


def rank_lists(candidates, ranked, keys_gmem, indices_gmem, row, lists: int, k: int, padded: int) -> None:
    """Each thread handles every 128th winner, and counts the better winners list by list."""
    p = CtaProgram()
    thread, row_number, candidates_at = p.operands("u32", "thread", "row", "candidates")
    keys, indices = p.operands("u64", "keys", "indices")
    own = p.multiply_wide(row_number, lists * k) + p.convert(thread, "u64") << 2  # bytes
    turns = range(-(-lists * k // WARPGROUP))
    listed = [thread < lists * k - i * WARPGROUP for i in turns]
    loaded = [
        [p.load(own + at, "s32", offset=4 * WARPGROUP * i, when=listed[i], space="global") for i in turns]
        for at in (keys, indices)
    ]
    values = [candidate_of(p, key, index) for key, index in zip(*loaded)]
    own_candidate = p.at(candidates_at, thread, CANDIDATE_BYTES)
    for i, value in enumerate(values):
        p.store(own_candidate, value, offset=CANDIDATE_BYTES * WARPGROUP * i, when=listed[i])
    p.barrier()
    ranks = [p.var(0, "u32") for _ in turns]
    for number in range(lists):
        better = _better(p, candidates_at + CANDIDATE_BYTES * k * number, k, values)
        for rank, of_list in zip(ranks, better):
            p.increase(rank, of_list)
    for value, rank, is_listed in zip(values, ranks, listed):
        store_winners(p, [value], rank, k, padded, when=is_listed)
    p.barrier()
    refs = {"candidates": candidates, "ranked": ranked, "keys": keys_gmem, "indices": indices_gmem}
    insert_ptx(p, refs, {"row": row})


def _better(p: CtaProgram, start: Value, k: int, values: list[Value]) -> list[Value]:
    """Returns for each value the number of greater entries in a sorted list of k at address `start`."""
    ends = [p.var(start) for _ in values]  # end of the entries that are known to be greater
    step = 1 << k.bit_length() - 1
    while step:
        last = start + CANDIDATE_BYTES * (k - step)
        for end, value in zip(ends, values):
            inside = end <= last
            other = p.load(end, "u64", offset=CANDIDATE_BYTES * (step - 1), when=inside)
            p.increase(end, CANDIDATE_BYTES * step, when=inside & (other > value))
        step //= 2
    return [(end - start) >> (CANDIDATE_BYTES.bit_length() - 1) for end in ends]
