"""The order of candidates in inline PTX, by the 128 threads of a CTA: `selection.rank`."""

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, LANES, Code
from pallas_softmax.implementations.mosaic_gpu.topk.buckets_ptx import rank_by_buckets
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.slots import split_slot

# On an H100, 4000 x 25000 float32 in two CTAs of a multiprocessor: 67 candidates take 790 cycles by counting, 1400 by
# buckets; 140 take 2960 and 1780; 620 take 7730 by sorting, 3650 by buckets; 2400 take 30,300 and 12,800.
_COUNTED = 96  # candidates up to which a comparison of each with all is faster than buckets
_COMPARED = 256  # candidates up to which it is faster than a sort
_IN_BUCKET = 32  # candidates of one bucket above which buckets are slower than either


def rank(slots, n, buckets, ranked, k: int, padded: int) -> None:
    """Writes the k best candidates in order: of few found by counting, of many by buckets.

    Where many lie in one bucket, they are found by counting or, if there is room for more candidates, by sorting.
    """
    capacity = slots.shape[0] // 2
    otherwise = "crowded" if capacity <= _COMPARED else "sort"
    code = Code()
    (p,) = code.new("pred")
    code += f"setp.le.u32 {p}, <n>, {_COUNTED}; @{p} bra count;"
    rank_by_buckets(code, capacity, k, padded, _IN_BUCKET, otherwise)
    code += f"bra end; crowded: {BARRIER} count:"  # the barrier: all threads have read what they reduced in <ranked>
    _rank_by_counting(code, k, padded, end="end")
    if otherwise == "sort":
        code += "sort:"
        _rank_by_sorting(code, capacity, k, padded)
    code += f"end: {BARRIER}"
    insert(code, {"slots": slots, "buckets": buckets, "ranked": ranked}, {"n": n})


def _write_ranked(code: Code, values: list[str], rank: str, k: int, padded: int) -> None:
    """Writes key and index of slots whose ranks are `rank`, rank + 1, ... to <ranked>, as far as they are below k."""
    address, key, index = code.new("b32", 3)
    (p,) = code.new("pred")
    code += f"mad.lo.u32 {address}, {rank}, 4, <ranked>;"
    for i, value in enumerate(values):
        code += f"setp.lt.s32 {p}, {rank}, {k - i};" + split_slot(value, key, index)
        code += f"@{p} st.shared.b32 [{address}+{4 * i}], {key};"
        code += f"@{p} st.shared.b32 [{address}+{4 * (padded + i)}], {index};"


# ---- by counting


def _rank_by_counting(code: Code, k: int, padded: int, end: str) -> None:
    """A slot's rank is the number of better ones:

    for own = thread, thread + 128, ... below n:
        rank = how many of the first n slots, rounded up to four, are greater than slot `own`   (empty ones are 0)
        write slot `own` at its rank, if that is below k
    """
    own, at, last, rank, address = code.new("b32", 5)
    (value,) = code.new("b64")
    others = code.new("b64", 4)
    (p,) = code.new("pred")
    code += f"mov.b32 {own}, <thread>; mad.lo.u32 {last}, <n>, 8, <slots>;"
    code += f"next_slot: setp.ge.u32 {p}, {own}, <n>; @{p} bra {end};"
    code += f"mad.lo.u32 {address}, {own}, 8, <slots>; ld.shared.b64 {value}, [{address}];"
    code += f"mov.b32 {rank}, 0; mov.b32 {at}, <slots>;"
    code += f"next_four: ld.shared.v2.b64 {{{others[0]}, {others[1]}}}, [{at}];"
    code += f"ld.shared.v2.b64 {{{others[2]}, {others[3]}}}, [{at}+16];"
    for other in others:
        code += f"setp.gt.u64 {p}, {other}, {value}; @{p} add.u32 {rank}, {rank}, 1;"
    code += f"add.u32 {at}, {at}, 32; setp.lt.u32 {p}, {at}, {last}; @{p} bra next_four;"
    _write_ranked(code, [value], rank, k, padded)
    code += f"add.u32 {own}, {own}, {WARPGROUP}; bra next_slot;"


# ---- by sorting


def _rank_by_sorting(code: Code, size: int, k: int, padded: int) -> None:
    """A bitonic sort of all slots, the largest first, in registers; a thread holds size / 128 neighbours.

    sort the values of each thread                            a run of one thread
    for run = 2, 4, ..., 128 threads:                         its halves are sorted, in opposite directions
        for stride = run / 2, ..., 2, 1 threads:
            exchange with thread ^ stride: the lower thread keeps the larger of each two values
        sort the values of each thread, which are bitonic now

    Every other run is to be sorted the other way round. Its values are complemented meanwhile, so that all threads
    do the same.
    """
    values = code.new("b64", size // WARPGROUP)
    own, run, stride, rank = code.new("b32", 4)
    (p,) = code.new("pred")
    code += f"mad.lo.u32 {own}, <thread>, 8, <slots>;"
    for i, v in enumerate(values):  # in any order, so 128 slots apart, without bank conflicts
        code += f"ld.shared.b64 {v}, [{own}+{8 * WARPGROUP * i}];"
    _sort_halves_of_thread(code, values)
    code += f"mov.b32 {run}, 1;"
    _complement_odd_runs(code, values, run)
    _sort_bitonic(code, values)
    _complement_odd_runs(code, values, run)
    code += f"next_run: shl.b32 {run}, {run}, 1;"
    _complement_odd_runs(code, values, run)
    code += f"shr.u32 {stride}, {run}, 1; next_stride:"
    _exchange(code, values, stride, own)
    code += f"shr.u32 {stride}, {stride}, 1; setp.ne.u32 {p}, {stride}, 0; @{p} bra next_stride;"
    _sort_bitonic(code, values)
    _complement_odd_runs(code, values, run)
    code += f"setp.lt.u32 {p}, {run}, {WARPGROUP}; @{p} bra next_run;"
    code += f"mul.lo.u32 {rank}, <thread>, {len(values)};"
    _write_ranked(code, values, rank, k, padded)


def _compare_and_swap(code: Code, a: str, b: str, larger: str, swap: str) -> None:
    """Puts the larger of two values into register a, the other one into b; larger and swap are for scratch."""
    code += f"setp.lt.u64 {swap}, {a}, {b}; selp.b64 {larger}, {b}, {a}, {swap};"
    code += f"selp.b64 {b}, {a}, {b}, {swap}; mov.b64 {a}, {larger};"


def _sort_halves_of_thread(code: Code, values: list[str]) -> None:
    """Sorts each half of a thread's values, a power of two: the first from the largest, the second to the largest.

    Together they then are bitonic. It grows runs of 2, 4, ... values, every other one the other way round.
    """
    larger, swap = code.new("b64")[0], code.new("pred")[0]
    length = 2
    while length < len(values):
        for start in range(0, len(values), length):
            turned = start // length % 2
            half = length
            while half > 1:
                half //= 2
                for i in range(start, start + length):
                    if not (i - start) & half:
                        a, b = values[i], values[i + half]
                        _compare_and_swap(code, *((b, a) if turned else (a, b)), larger, swap)
        length *= 2


def _sort_bitonic(code: Code, values: list[str]) -> None:
    """Sorts a thread's values, which are bitonic and a power of two, from the largest on."""
    larger, swap = code.new("b64")[0], code.new("pred")[0]
    half = len(values)
    while half > 1:
        half //= 2
        for i in range(len(values)):
            if not i & half:
                _compare_and_swap(code, values[i], values[i + half], larger, swap)


def _complement_odd_runs(code: Code, values: list[str], run: str) -> None:
    """Complements the values of the threads whose run, of `run` threads, has an odd number."""
    odd, ones, p = code.new("b32")[0], code.new("b64")[0], code.new("pred")[0]
    code += f"and.b32 {odd}, <thread>, {run}; setp.ne.u32 {p}, {odd}, 0; selp.b64 {ones}, -1, 0, {p};"
    for v in values:
        code += f"xor.b64 {v}, {v}, {ones};"


def _exchange(code: Code, values: list[str], stride: str, own: str) -> None:
    """Exchanges values with thread ^ stride; the lower of the two keeps the larger of each two values.

    Lanes of a warp exchange by shuffles, others through the slots.

    Args:
      stride: register with a power of two.
      own: register with the address of this thread's slot.
    """
    part, low, high, partner = code.new("b32", 4)
    other, smaller = code.new("b64")[0], code.new("pred")[0]
    upper, far = code.new("pred", 2)

    def keep(value):
        return (
            f"setp.lt.u64 {smaller}, {value}, {other}; xor.pred {smaller}, {smaller}, {upper};"
            f"selp.b64 {value}, {other}, {value}, {smaller};"
        )

    code += f"and.b32 {part}, <thread>, {stride}; setp.ne.u32 {upper}, {part}, 0;"
    code += f"setp.ge.u32 {far}, {stride}, {LANES}; @{far} bra through_slots;"
    for v in values:
        code += f"mov.b64 {{{low}, {high}}}, {v}; shfl.sync.bfly.b32 {low}, {low}, {stride}, 31, 0xffffffff;"
        code += f"shfl.sync.bfly.b32 {high}, {high}, {stride}, 31, 0xffffffff;"
        code += f"mov.b64 {other}, {{{low}, {high}}};" + keep(v)
    code += f"bra exchanged; through_slots: {BARRIER}"
    for i, v in enumerate(values):
        code += f"st.shared.b64 [{own}+{8 * WARPGROUP * i}], {v};"
    code += f"{BARRIER} xor.b32 {part}, <thread>, {stride}; mad.lo.u32 {partner}, {part}, 8, <slots>;"
    for i, v in enumerate(values):
        code += f"ld.shared.b64 {other}, [{partner}+{8 * WARPGROUP * i}];" + keep(v)
    code += "exchanged:"
