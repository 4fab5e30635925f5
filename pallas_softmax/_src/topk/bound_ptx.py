"""A bound for the k best elements of a part, from the largest keys of its groups, in inline PTX: `selection.bound`.

The keys are counted in buckets, pieces of their range that are all as long, a power of two. The bucket in which the
k-th largest key lies starts at a key that k keys reach, and not many more, or the same is done for it alone:

    keys       2 9 4 8 7 4 7 1      k = 3
    bucket     3 0 2 0 1 2 1 4      (9 - key) / 2
    counts     2 2 2 1 1            the third largest key is in bucket 1, of 6 and 7: four keys reach 6
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_softmax._src.gpu.hardware import LANES, WARPGROUP
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, emit_ptx, inline, thread
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax._src.topk import sums_ptx

_EACH = 4  # counters of a thread
_COUNTERS_BITS = (_EACH * WARPGROUP).bit_length() - 1
_SCRATCH_BYTE = 16  # of <counts>: where the search has its scratch
_BUCKET_BYTE, _REACH_BYTE = 16, 24  # of the scratch: where a thread tells the others what it has found


def bound(group_keys, slots, counts, groups: int, k: int):
    """Goes from all keys to those of one bucket, as long as there are many in it:

    low, high = a key that at least k group_keys reach, the largest group_key
    above = 0                                              number of group_keys that exceed high
    while low < high:
        count the group_keys from low to high in buckets
        b = the bucket with the k-th largest of all
        low = max(low, its least key), n = how many group_keys reach it
        high, above = the largest key of bucket b, how many exceed it
        stop if n is few more than k

    The counters lie in the empty slots, and leave them empty.
    """
    code = text(groups, k)

    @inline(arg_types=(REF,) * 3, return_type=plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=SCALAR))
    def emit(_, group_keys, slots, counts):
        operands = {"group_keys": group_keys, "slots": slots, "counts": counts, "thread": thread()}
        (found,) = emit_ptx(code, operands, {"bound": "i32"})
        return fragmented_array.FragmentedArray.splat(found, (), is_signed=True)

    return emit(group_keys, slots, counts)


def few_more(k: int) -> int:
    """Returns how many groups may reach the bound: not more than k if these are whole turns of all threads."""
    return min(k + max(2, k // 16), -(-k // WARPGROUP) * WARPGROUP)


def text(groups: int, k: int) -> Program:
    """Returns the text of `bound`; <bound> gets the result, and words 4 to 11 of <counts> are used meanwhile."""
    p = Program()
    slots, counts = p.operands("u32", "slots", "counts")
    low, high = p.operand("bound", "s32"), p.fresh("s32")
    scratch = counts + _SCRATCH_BYTE
    keys = _load_group_keys(p, groups)
    _bracket(p, keys, k, low, high, scratch)
    above = p.var(0, "s32")
    with p.block() as finish, p.repeat() as again:
        width = (high - low).bits("u32")
        finish(width.equals(0))
        # A bucket is 2^shift keys long: as short as it can be with a counter for each bucket.
        shift = p.max((p.highest_bit(width) - (_COUNTERS_BITS - 1)).bits("s32"), 0)
        for key in keys:
            distance = (high - key).bits("u32")
            counted = distance <= width
            p.add_to(p.at(slots, distance >> shift, 4), 1, when=counted)
        bucket, before, reach = _find_bucket(p, above, k, scratch)
        p.update(high, "sub", bucket << shift)
        longest = (p.var(1, "u32") << shift) - 1
        p.set(low, high - p.min(longest, high - low))
        p.set(above, before)
        again(reach > few_more(k))
    return p


def _load_group_keys(p: Program, groups: int) -> list[Value]:
    """Loads every 128th of the group_keys, when all are written."""
    thread, group_keys = p.operands("u32", "thread", "group_keys")
    p.barrier()
    own = p.at(group_keys, thread, 4)
    return [p.load(own, "s32", offset=4 * i) for i in range(0, groups, WARPGROUP)]


def _bracket(p: Program, keys: list[Value], k: int, low: Value, high: Value, scratch: Value) -> None:
    """Sets `low` to a key that at least k group_keys reach, and `high` to the largest of them.

    Each thread's keys are dealt out to as many sets as make k sets or more of all threads; all sets have a key that
    reaches the least of their maxima.
    """
    sets = -(-k // WARPGROUP)
    largest = p.reduce("max", keys)
    least = p.reduce("min", [p.reduce("max", keys[i::sets]) for i in range(sets)])
    p.set(low, p.over_lanes("min", least))
    p.set(high, p.over_lanes("max", largest))
    lows, highs = sums_ptx.of_warps(p, [low, high], scratch, lane=0)
    p.set(low, p.reduce("min", lows))
    p.set(high, p.reduce("max", highs))


def _find_bucket(p: Program, above: Value, k: int, scratch: Value) -> tuple[Value, Value, Value]:
    """Finds the bucket with the k-th largest key, and clears the counters, when all keys are counted.

    A thread has four neighbouring counters. Of all threads one finds, at one of its counters, that fewer than k keys
    lie before that bucket, and that k keys reach it. It tells the others:

        word of scratch   0 to 3               4        5        6
                          totals of the warps  bucket   before   reach

    Args:
      above: number of keys above those counted.

    Returns:
      The number of the bucket, how many keys are above it, and how many reach its least key.
    """
    thread, slots = p.operands("u32", "thread", "slots")
    p.barrier()
    mine = p.at(slots, thread, 4 * _EACH)
    counts = p.load_vector(mine, "s32", _EACH)
    p.store(mine, *[0] * _EACH)
    start, total = sums_ptx.in_lower_lanes(p, p.reduce("add", counts))
    (totals,) = sums_ptx.of_warps(p, [total], scratch, lane=LANES - 1)
    sums_ptx.add_lower_warps(p, start, totals)
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
