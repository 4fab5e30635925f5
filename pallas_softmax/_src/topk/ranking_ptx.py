"""Inline PTX that puts the candidates in order, with the 128 threads of a CTA."""

from pallas_softmax._src.gpu.hardware import LANES, WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.topk import packed_ptx
from pallas_softmax._src.topk.buckets_ptx import rank_by_buckets
from pallas_softmax._src.topk.candidates import CANDIDATE_BYTES, CandidateList, store_winners

_COUNTED = 96  # up to this many candidates, counting is faster than buckets
_COMPARED = 256  # up to this many candidates, counting is faster than sorting
_AT_ONCE = 4  # candidates that a thread compares with its own at once


def rank(p: CtaProgram, of: CandidateList) -> None:
    """Writes the k best candidates in order. The number of candidates and their spread select the method:

    up to 96 candidates                counting
    more, at most 32 in each bucket    buckets
    more, over 32 in some bucket       counting if the list has 256 entries, sorting if it has more
    """
    with p.block() as finish:
        with p.block() as count:
            count(of.n <= _COUNTED)
            with p.block() as crowded:
                rank_by_buckets(p, of, otherwise=crowded)
                finish()
            if of.capacity > _COMPARED:
                _rank_by_sorting(p, of)
                finish()
            else:
                p.barrier()  # counting overwrites <ranked>, where other threads may still read sums of warps
        _rank_by_counting(p, of)
    p.barrier()


def _rank_by_counting(p: CtaProgram, of: CandidateList) -> None:
    """Ranks each candidate by counting the better ones:

    for own = thread, thread + 128, ... below n:
        rank = number of entries greater than entry `own`, among the first n rounded up to four   (empty entries are 0)
        write entry `own` at its rank, if the rank is below k
    """
    last = of.at(p, of.n)
    with p.each(p.thread, of.n, WARPGROUP) as own:
        value = p.load(of.at(p, own), "u64")
        rank, at = p.var(0, "u32"), p.var(of.address)
        with p.repeat() as again:
            for other in p.load_vector(at, "u64", _AT_ONCE):
                p.increase(rank, 1, when=other > value)
            p.increase(at, _AT_ONCE * CANDIDATE_BYTES)
            again(at < last)
        store_winners(p, of.ranked, [value], rank, of.k)


def _rank_by_sorting(p: CtaProgram, of: CandidateList) -> None:
    """Sorts all entries in registers by a bitonic sort, the largest first. A thread holds capacity / 128 neighbours.

    sort the values of each thread                            a run of one thread
    for run = 2, 4, ..., 128 threads:                         its halves are sorted, in opposite directions
        for stride = run / 2, ..., 2, 1 threads:
            exchange with thread ^ stride: the lower thread keeps the larger value of each pair
        sort the values of each thread, which are bitonic now

    Every other run must be sorted in the opposite order. Its values are complemented meanwhile, so that all threads
    execute the same comparisons.
    """
    own = of.at(p, p.thread)
    # The initial order is free. Loads of entries 128 apart have no bank conflicts.
    values = [p.load(own, "u64", offset=CANDIDATE_BYTES * i) for i in range(0, of.capacity, WARPGROUP)]
    run = p.var(1, "u32")

    def set_values(new):
        """Sets the values to the new ones, complemented in odd runs."""
        ones = p.select((p.thread & run).differs(0), -1, 0, "u64")
        for value, of_new in zip(values, new):
            p.set(value, of_new ^ ones)

    set_values(values)
    set_values(packed_ptx.best(p, values, len(values)))
    with p.repeat() as next_run:
        p.set(run, run << 1)
        set_values(values)
        stride = p.var(run >> 1)
        with p.repeat() as next_stride:
            _exchange(p, of, values, stride, own)
            p.set(stride, stride >> 1)
            next_stride(stride.differs(0))
        set_values(packed_ptx.sorted_bitonic(p, values))
        next_run(run < WARPGROUP)
    store_winners(p, of.ranked, values, p.thread * len(values), of.k)


def _exchange(p: CtaProgram, of: CandidateList, values: list[Value], stride: Value, own: Value) -> None:
    """Exchanges values with thread ^ stride, a power of two. The lower thread keeps the larger value of each pair.

    Threads of one warp exchange by shuffles. Threads of different warps exchange through the list, where `own` is the
    address of this thread's first entry.
    """
    upper = (p.thread & stride).differs(0)

    def keep(value: Value, other: Value) -> None:
        p.set(value, p.select((value < other) ^ upper, other, value))

    with p.block() as exchanged:
        with p.block() as through_list:
            through_list(stride >= LANES)
            for value in values:
                keep(value, p.shuffle(value, "bfly", stride))
            exchanged()
        p.barrier()
        for i, value in enumerate(values):
            p.store(own, value, offset=CANDIDATE_BYTES * WARPGROUP * i)
        p.barrier()
        partner = of.at(p, p.thread ^ stride)
        for i, value in enumerate(values):
            keep(value, p.load(partner, "u64", offset=CANDIDATE_BYTES * WARPGROUP * i))
