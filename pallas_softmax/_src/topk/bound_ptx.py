"""Inline PTX that finds a lower bound for the k best elements of a part.

It looks only at the largest key of each group. The range of these keys is cut into buckets of equal length, a power of
two, and the keys are counted by bucket. One bucket holds the k-th largest key. At least k keys reach the least key of
that bucket, which is the bound. If many more than k keys reach it, `narrow` cuts the bucket into buckets again:

    keys       2 9 4 8 7 4 7 1      k = 3
    bucket     3 0 2 0 1 2 1 4      (9 - key) / 2
    counts     2 2 2 1 1            the third largest key is in bucket 1, keys 6 and 7: four keys reach 6
"""

from pallas_softmax._src.gpu.hardware import LANES, WARPGROUP
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, narrow
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.topk.window_ptx import SCRATCH_BYTE, WindowProgram

_EACH = 4  # counters per thread
_BUCKET_BYTE, _BEFORE_BYTE = 16, 24  # offsets in the scratch where one thread publishes its result


def find_bound(p: WindowProgram, rank: int) -> tuple[Value, Value]:
    """Returns a key that at least `rank` group_keys reach, and the highest group_key.

    At most few_more(rank) group_keys reach the first result, unless many are equal. Each round counts the group_keys in
    the range by bucket, and narrows the range to the bucket with group_key number `rank` of all. The counters use the
    list of candidates, which must be empty, and every round clears them.
    """
    p.barrier()  # all threads have written their group_keys
    own, scratch = p.at(p.group_keys, p.thread, 4), p.counts + SCRATCH_BYTE
    keys = [p.load(own, "s32", offset=4 * i) for i in range(0, p.window.groups, WARPGROUP)]
    left = _bracket(p, keys, rank, scratch)
    highest = p.var(left.high)
    # The number of keys above the range, and of keys that reach it. The latter is more than few_more(rank) at first.
    above, reach = p.var(0, "s32"), p.var(rank + WARPGROUP, "s32")

    def one_round(bucket_of):
        for key in keys:
            bucket, inside = bucket_of(key)
            p.add_to(p.at(p.candidates, bucket, 4), 1, when=inside)
        return _find_bucket(p, above, reach, rank, scratch)

    narrow(p, left, _EACH * WARPGROUP, one_round, stop=lambda: reach <= few_more(rank))
    return left.high - left.extent.bits("s32"), highest


def few_more(rank: int) -> int:
    """Returns how many groups may reach the bound: a sixteenth more than `rank`, within the same multiple of 128."""
    return min(rank + max(2, rank // 16), -(-rank // WARPGROUP) * WARPGROUP)


def _bracket(p: WindowProgram, keys: list[Value], rank: int, scratch: Value) -> KeyRange:
    """Returns the range from a key that at least `rank` group_keys reach to the largest group_key.

    Each thread divides its keys into sets, so that all threads together have at least `rank` sets. The least of the
    sets' maxima is a key that every set reaches.
    """
    sets = -(-rank // WARPGROUP)
    largest = p.reduce("max", keys)
    least = p.reduce("min", [p.reduce("max", keys[i::sets]) for i in range(sets)])
    of_warp = [p.over_lanes("min", least), p.over_lanes("max", largest)]
    lows, highs = p.of_warps(of_warp, scratch, lane=0)
    return KeyRange(p, p.reduce("max", highs), p.reduce("min", lows))


def _find_bucket(p: WindowProgram, above: Value, reach: Value, rank: int, scratch: Value) -> Value:
    """Returns the bucket with key number `rank`, from the largest down, once all have counted. Clears the counters.

    `above` is the number of keys above those counted, and becomes the number above the bucket. `reach` becomes the
    number of keys that reach the least key of the bucket.

    A thread has four neighbouring counters. Exactly one thread has the counter of the bucket: fewer than `rank` keys
    lie before that bucket, and at least `rank` keys reach it. That thread publishes its result in the scratch:

        word of scratch   0 to 3               4        6        7
                          totals of the warps  bucket   before   reach
    """
    p.barrier()
    mine = p.at(p.candidates, p.thread, 4 * _EACH)
    counts = p.load_vector(mine, "s32", _EACH)
    p.store(mine, *[0] * _EACH)
    start, total = p.scan(p.reduce("add", counts))
    (totals,) = p.of_warps([total], scratch, lane=LANES - 1)
    p.add_lower_warps(start, totals)
    first = end = start + above
    bucket, before, upto = p.fresh("u32"), p.fresh("s32"), p.fresh("s32")
    for i, count in enumerate(counts):
        start, end = end, end + count
        is_before = start < rank  # the last counter that starts before `rank` may be the one
        for register, value in zip((bucket, before, upto), (i, start, end)):
            p.set(register, value, when=is_before)
    found = (first < rank) & (end >= rank)
    p.store(scratch, p.multiply_add(p.thread, _EACH, bucket), offset=_BUCKET_BYTE, when=found)
    p.store(scratch, before, upto, offset=_BEFORE_BYTE, when=found)
    p.barrier()
    p.load_into([above, reach], scratch, offset=_BEFORE_BYTE)
    return p.load(scratch, "u32", offset=_BUCKET_BYTE)
