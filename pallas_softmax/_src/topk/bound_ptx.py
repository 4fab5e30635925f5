"""Inline PTX that finds a lower bound for the k best elements of a part: `selection.bound`.

It looks only at the largest key of each group. The range of these keys is cut into buckets of equal length, a power of
two, and the keys are counted by bucket. One bucket holds the k-th largest key. At least k keys reach the least key of
that bucket, which is the bound. If many more than k keys reach it, the bucket is cut into buckets again:

    keys       2 9 4 8 7 4 7 1      k = 3
    bucket     3 0 2 0 1 2 1 4      (9 - key) / 2
    counts     2 2 2 1 1            the third largest key is in bucket 1, keys 6 and 7: four keys reach 6
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_softmax._src.gpu.hardware import LANES, WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, emit_ptx, inline, thread
from pallas_softmax._src.gpu.ptx.values import Value

_EACH = 4  # counters per thread
_COUNTERS_BITS = (_EACH * WARPGROUP).bit_length() - 1
_SCRATCH_BYTE = 16  # offset of the scratch in <counts>
_BUCKET_BYTE, _REACH_BYTE = 16, 24  # offsets in the scratch where one thread publishes its result


def bound(group_keys, candidates, counts, groups: int, k: int):
    """Narrows the range of keys to one bucket, until few more than k keys reach its least key:

    low, high = a key that at least k group_keys reach, the largest group_key
    above = 0                                              number of group_keys that exceed high
    while low < high:
        count the group_keys from low to high in buckets
        b = the bucket with the k-th largest of all
        low = max(low, the least key of b), n = number of group_keys that reach low
        high = the largest key of b, above = number of group_keys that exceed high
        stop if n is at most few_more(k)

    The counters use the empty list of candidates, and every pass clears them again.
    """
    code = bound_program(groups, k)

    @inline(arg_types=(REF,) * 3, return_type=plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=SCALAR))
    def emit(_, group_keys, candidates, counts):
        operands = {"group_keys": group_keys, "candidates": candidates, "counts": counts, "thread": thread()}
        (found,) = emit_ptx(code, operands, {"bound": "i32"})
        return fragmented_array.FragmentedArray.splat(found, (), is_signed=True)

    return emit(group_keys, candidates, counts)


def few_more(k: int) -> int:
    """Returns how many groups may reach the bound: at most k rounded up to a multiple of the threads."""
    return min(k + max(2, k // 16), -(-k // WARPGROUP) * WARPGROUP)


def bound_program(groups: int, k: int) -> CtaProgram:
    """Returns the program of `bound`. <bound> gets the result. Words 4 to 11 of <counts> are scratch."""
    p = CtaProgram()
    candidates, counts = p.operands("u32", "candidates", "counts")
    low, high = p.operand("bound", "s32"), p.fresh("s32")
    scratch = counts + _SCRATCH_BYTE
    keys = _load_group_keys(p, groups)
    _bracket(p, keys, k, low, high, scratch)
    above = p.var(0, "s32")
    with p.block() as finish, p.repeat() as again:
        width = (high - low).bits("u32")
        finish(width.equals(0))
        # A bucket is 2^shift keys long, as short as the number of counters allows.
        shift = p.max((p.highest_bit(width) - (_COUNTERS_BITS - 1)).bits("s32"), 0)
        for key in keys:
            distance = (high - key).bits("u32")
            counted = distance <= width
            p.add_to(p.at(candidates, distance >> shift, 4), 1, when=counted)
        bucket, before, reach = _find_bucket(p, above, k, scratch)
        p.update(high, "sub", bucket << shift)
        longest = (p.var(1, "u32") << shift) - 1
        p.set(low, high - p.min(longest, high - low))
        p.set(above, before)
        again(reach > few_more(k))
    return p


def _load_group_keys(p: CtaProgram, groups: int) -> list[Value]:
    """Loads every 128th of the group_keys, after a barrier: all threads must have written theirs."""
    thread, group_keys = p.operands("u32", "thread", "group_keys")
    p.barrier()
    own = p.at(group_keys, thread, 4)
    return [p.load(own, "s32", offset=4 * i) for i in range(0, groups, WARPGROUP)]


def _bracket(p: CtaProgram, keys: list[Value], k: int, low: Value, high: Value, scratch: Value) -> None:
    """Sets `low` to a key that at least k group_keys reach, and `high` to the largest group_key.

    Each thread divides its keys into sets, so that all threads together have at least k sets. `low` is the least of the
    sets' maxima, so every set has a key that reaches it.
    """
    sets = -(-k // WARPGROUP)
    largest = p.reduce("max", keys)
    least = p.reduce("min", [p.reduce("max", keys[i::sets]) for i in range(sets)])
    p.set(low, p.over_lanes("min", least))
    p.set(high, p.over_lanes("max", largest))
    lows, highs = p.of_warps([low, high], scratch, lane=0)
    p.set(low, p.reduce("min", lows))
    p.set(high, p.reduce("max", highs))


def _find_bucket(p: CtaProgram, above: Value, k: int, scratch: Value) -> tuple[Value, Value, Value]:
    """Finds the bucket with the k-th largest key once all keys are counted, and clears the counters.

    A thread has four neighbouring counters. Exactly one thread has the counter of the bucket: fewer than k keys lie
    before that bucket, and at least k keys reach it. That thread publishes its result in the scratch:

        word of scratch   0 to 3               4        5        6
                          totals of the warps  bucket   before   reach

    Args:
      above: number of keys above those counted.

    Returns:
      The number of the bucket, how many keys lie above it, and how many keys reach its least key.
    """
    thread, candidates = p.operands("u32", "thread", "candidates")
    p.barrier()
    mine = p.at(candidates, thread, 4 * _EACH)
    counts = p.load_vector(mine, "s32", _EACH)
    p.store(mine, *[0] * _EACH)
    start, total = p.scan(p.reduce("add", counts))
    (totals,) = p.of_warps([total], scratch, lane=LANES - 1)
    p.add_lower_warps(start, totals)
    before, bucket = start + above, thread * _EACH
    for i, count in enumerate(counts):
        reach = before + count
        found = (before < k) & (reach >= k)
        p.store(scratch, bucket + i, before, offset=_BUCKET_BYTE, when=found)
        p.store(scratch, reach, offset=_REACH_BYTE, when=found)
        before = reach
    p.barrier()
    bucket, before = p.load_vector(scratch, "u32", 2, offset=_BUCKET_BYTE)
    return bucket, before.bits("s32"), p.load(scratch, "s32", offset=_REACH_BYTE)
