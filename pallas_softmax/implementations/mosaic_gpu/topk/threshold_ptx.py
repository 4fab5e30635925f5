"""A bound for the k best elements of a part, from the largest keys of its groups, in inline PTX: `selection.threshold`.

The keys are counted in buckets, pieces of their range that are all as long, a power of two. The bucket in which the
k-th largest key lies starts at a key that k keys reach, and not many more, or the same is done for it alone:

    keys       2 9 4 8 7 4 7 1      k = 3
    bucket     3 0 2 0 1 2 1 4      (9 - key) / 2
    counts     2 2 2 1 1            the third largest key is in bucket 1, of 6 and 7: four keys reach 6
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    LANES,
    REF,
    SCALAR,
    Code,
    emit_ptx,
    inline,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.topk import sums_ptx

_EACH = 4  # counters of a thread
_COUNTERS_BITS = (_EACH * WARPGROUP).bit_length() - 1


def threshold(group_keys, slots, counts, groups: int, k: int):
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
        (bound,) = emit_ptx(code, operands, {"bound": "i32"})
        return fragmented_array.FragmentedArray.splat(bound, (), is_signed=True)

    return emit(group_keys, slots, counts)


def few_more(k: int) -> int:
    """Returns how many groups may reach the bound: not more than k if these are whole turns of all threads."""
    return min(k + max(2, k // 16), -(-k // WARPGROUP) * WARPGROUP)


def text(groups: int, k: int) -> Code:
    """Returns the text of `threshold`; <bound> gets the result, and words 4 to 15 of <counts> are used meanwhile."""
    code = Code()
    high, above, width, shift, distance, at, edge, scratch = code.new("b32", 8)
    low = "<bound>"
    (p,) = code.new("pred")
    keys = _load_group_keys(code, groups)
    code += f"add.u32 {scratch}, <counts>, 16;"
    _bracket(code, keys, k, low, high, scratch)
    code += f"mov.b32 {above}, 0; again: sub.u32 {width}, {high}, {low};"
    code += f"setp.eq.u32 {p}, {width}, 0; @{p} bra done;"
    code += f"bfind.u32 {shift}, {width}; sub.s32 {shift}, {shift}, {_COUNTERS_BITS - 1}; max.s32 {shift}, {shift}, 0;"
    for key in keys:
        code += f"sub.u32 {distance}, {high}, {key}; setp.le.u32 {p}, {distance}, {width};"
        code += f"shr.u32 {distance}, {distance}, {shift}; mad.lo.u32 {at}, {distance}, 4, <slots>;"
        code += f"@{p} red.relaxed.cta.shared::cta.add.u32 [{at}], 1;"
    bucket, before, reach = _find_bucket(code, above, k, scratch)
    # The least key of the bucket is high - (bucket + 1 << shift) + 1, and no less than low; its largest is
    # high - (bucket << shift).
    code += f"shl.b32 {edge}, {bucket}, {shift}; sub.u32 {high}, {high}, {edge}; mov.b32 {edge}, 1;"
    code += f"shl.b32 {edge}, {edge}, {shift}; sub.u32 {edge}, {edge}, 1; sub.u32 {at}, {high}, {low};"
    code += f"min.u32 {edge}, {edge}, {at}; sub.u32 {low}, {high}, {edge}; mov.b32 {above}, {before};"
    code += f"setp.gt.s32 {p}, {reach}, {few_more(k)}; @{p} bra again; done:"
    return code


def _load_group_keys(code: Code, groups: int) -> list[str]:
    """Loads every 128th of the group_keys, when all are written; returns their registers."""
    (address,) = code.new("b32")
    keys = code.new("b32", groups // WARPGROUP)
    code += f"{BARRIER} mad.lo.u32 {address}, <thread>, 4, <group_keys>;"
    for i, key in enumerate(keys):
        code += f"ld.shared.b32 {key}, [{address}+{4 * WARPGROUP * i}];"
    return keys


def _bracket(code: Code, keys: list[str], k: int, low: str, high: str, scratch: str) -> None:
    """Finds a key that at least k group_keys reach, and the largest.

    Each thread's keys are dealt out to as many sets as make k sets or more of all threads; all sets have a key that
    reaches the least of their maxima.
    """
    sets = -(-k // WARPGROUP)
    code += f"mov.b32 {high}, {code.tree('max.s32', 'b32', list(keys))};"
    maxima = [code.tree("max.s32", "b32", keys[i::sets]) for i in range(sets)]
    code += f"mov.b32 {low}, {code.tree('min.s32', 'b32', maxima)};"
    code += f"redux.sync.min.s32 {low}, {low}, 0xffffffff; redux.sync.max.s32 {high}, {high}, 0xffffffff;"
    lows, highs = sums_ptx.of_warps(code, [low, high], scratch, 0)
    code += f"mov.b32 {low}, {code.tree('min.s32', 'b32', lows)};"
    code += f"mov.b32 {high}, {code.tree('max.s32', 'b32', highs)};"


def _find_bucket(code: Code, above: str, k: int, scratch: str) -> tuple[str, str, str]:
    """Finds the bucket with the k-th largest key, and clears the counters, when all keys are counted.

    Args:
      above: register with the number of keys above those counted.

    Returns:
      Registers with the number of the bucket, how many keys are above it, and how many reach its least key.
    """
    mine, total, start, bucket, before, reach = code.new("b32", 6)
    counts = code.new("b32", _EACH)
    p, found = code.new("pred", 2)
    code += f"{BARRIER} mad.lo.u32 {mine}, <thread>, {4 * _EACH}, <slots>;"
    ((byte, kind, words),) = sums_ptx.vectors(counts)
    ((_, _, zeros),) = sums_ptx.vectors(["0"] * _EACH)
    code += f"ld.shared.{kind} {words}, [{mine}+{byte}]; st.shared.{kind} [{mine}+{byte}], {zeros};"
    code += f"mov.b32 {total}, {code.tree('add.u32', 'b32', list(counts))};"
    sums_ptx.add_lower_lanes(code, total, start)
    (totals,) = sums_ptx.of_warps(code, [total], scratch, LANES - 1)
    sums_ptx.add_lower_warps(code, start, totals)
    code += f"add.u32 {before}, {start}, {above}; mul.lo.u32 {bucket}, <thread>, {_EACH};"
    for count in counts:
        # of all threads one finds, at one of its counters, that before < k <= reach
        code += f"add.u32 {reach}, {before}, {count}; setp.lt.s32 {p}, {before}, {k};"
        code += f"setp.ge.and.s32 {found}, {reach}, {k}, {p};"
        code += f"@{found} st.shared.v2.b32 [{scratch}+16], {{{bucket}, {before}}};"
        code += f"@{found} st.shared.b32 [{scratch}+24], {reach};"
        code += f"mov.b32 {before}, {reach}; add.u32 {bucket}, {bucket}, 1;"
    code += f"{BARRIER} ld.shared.v2.b32 {{{bucket}, {before}}}, [{scratch}+16]; ld.shared.b32 {reach}, [{scratch}+24];"
    return bucket, before, reach
