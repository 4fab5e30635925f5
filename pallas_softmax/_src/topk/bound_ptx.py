"""Inline PTX that finds a lower bound for the k best elements of a part.

It looks only at the largest key of each group. The range of these keys is cut into buckets of equal length, a power of
two, and the keys are counted by bucket. One bucket holds the k-th largest key. At least k keys reach the least key of
that bucket, which is the bound. If many more than k keys reach it, the bucket is cut into buckets again:

    keys       2 9 4 8 7 4 7 1      k = 3
    bucket     3 0 2 0 1 2 1 4      (9 - key) / 2
    counts     2 2 2 1 1            the third largest key is in bucket 1, keys 6 and 7: four keys reach 6
"""

from pallas_softmax._src.gpu.hardware import LANES, WARPGROUP
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.topk.window_ptx import SCRATCH_BYTE, WindowProgram

_EACH = 4  # counters per thread
_COUNTERS_BITS = (_EACH * WARPGROUP).bit_length() - 1
_BUCKET_BYTE, _REACH_BYTE = 16, 24  # offsets in the scratch where one thread publishes its result


def find_bound(p: WindowProgram, rank: int) -> Value:
    """Returns a key that at least `rank` group_keys reach, and few more:

    low, high = a key that at least `rank` group_keys reach, the largest group_key
    above = 0                                              number of group_keys that exceed high
    while low < high:
        count the group_keys from low to high in buckets
        b = the bucket with the group_key number `rank` of all, from the largest down
        low = max(low, the least key of b), n = number of group_keys that reach low
        high = the largest key of b, above = number of group_keys that exceed high
        stop if n is at most few_more(rank)

    The counters use the list of candidates, which must be empty, and every pass clears them again.
    """
    scratch = p.counts + SCRATCH_BYTE
    keys = _load_group_keys(p)
    low, high = _bracket(p, keys, rank, scratch)
    above = p.var(0, "s32")
    with p.block() as finish, p.repeat() as again:
        width = (high - low).bits("u32")
        finish(width.equals(0))
        # A bucket is 2^shift keys long, as short as the number of counters allows.
        shift = p.max((p.highest_bit(width) - (_COUNTERS_BITS - 1)).bits("s32"), 0)
        for key in keys:
            distance = (high - key).bits("u32")
            counted = distance <= width
            p.add_to(p.at(p.candidates, distance >> shift, 4), 1, when=counted)
        bucket, before, reach = _find_bucket(p, above, rank, scratch)
        p.update(high, "sub", bucket << shift)
        longest = (p.var(1, "u32") << shift) - 1
        p.set(low, high - p.min(longest, high - low))
        p.set(above, before)
        again(reach > few_more(rank))
    return low


def few_more(rank: int) -> int:
    """Returns how many groups may reach the bound: a sixteenth more than `rank`, within the same multiple of 128."""
    return min(rank + max(2, rank // 16), -(-rank // WARPGROUP) * WARPGROUP)


def _load_group_keys(p: WindowProgram) -> list[Value]:
    """Loads every 128th of the group_keys, after a barrier: all threads must have written theirs."""
    p.barrier()
    own = p.at(p.group_keys, p.thread, 4)
    return [p.load(own, "s32", offset=4 * i) for i in range(0, p.window.groups, WARPGROUP)]


def _bracket(p: WindowProgram, keys: list[Value], rank: int, scratch: Value) -> tuple[Value, Value]:
    """Returns a key that at least `rank` group_keys reach, and the largest group_key, as variables.

    Each thread divides its keys into sets, so that all threads together have at least `rank` sets. The first result is
    the least of the sets' maxima, so every set has a key that reaches it.
    """
    sets = -(-rank // WARPGROUP)
    largest = p.reduce("max", keys)
    least = p.reduce("min", [p.reduce("max", keys[i::sets]) for i in range(sets)])
    of_warp = [p.over_lanes("min", least), p.over_lanes("max", largest)]
    lows, highs = p.of_warps(of_warp, scratch, lane=0)
    return p.var(p.reduce("min", lows)), p.var(p.reduce("max", highs))


def _find_bucket(p: WindowProgram, above: Value, rank: int, scratch: Value) -> tuple[Value, Value, Value]:
    """Finds the bucket with key number `rank`, from the largest down, once all have counted. Clears the counters.

    A thread has four neighbouring counters. Exactly one thread has the counter of the bucket: fewer than `rank` keys
    lie before that bucket, and at least `rank` keys reach it. That thread publishes its result in the scratch:

        word of scratch   0 to 3               4        5        6
                          totals of the warps  bucket   before   reach

    Args:
      above: number of keys above those counted.

    Returns:
      The number of the bucket, how many keys lie above it, and how many keys reach its least key.
    """
    p.barrier()
    mine = p.at(p.candidates, p.thread, 4 * _EACH)
    counts = p.load_vector(mine, "s32", _EACH)
    p.store(mine, *[0] * _EACH)
    start, total = p.scan(p.reduce("add", counts))
    (totals,) = p.of_warps([total], scratch, lane=LANES - 1)
    p.add_lower_warps(start, totals)
    before, bucket = start + above, p.thread * _EACH
    for i, count in enumerate(counts):
        reach = before + count
        found = (before < rank) & (reach >= rank)
        p.store(scratch, bucket + i, before, offset=_BUCKET_BYTE, when=found)
        p.store(scratch, reach, offset=_REACH_BYTE, when=found)
        before = reach
    p.barrier()
    bucket, before = p.load_vector(scratch, "u32", 2, offset=_BUCKET_BYTE)
    return bucket, before.bits("s32"), p.load(scratch, "s32", offset=_REACH_BYTE)
