"""The kernels of fused top-k.

A candidate is one int64: the key of its value (`language.sort_key`) and, below it, the complement of its index.
All differ, and the larger is the better. The k best elements lie in the k groups whose best elements are the
best: were one of them in another group, the k groups would hold k better ones. So one pass keeps the best
candidate of each group, and (m, d) by the way; then the k best groups are read again, and sorted.
"""

# What pyright cannot know of a kernel is said in language.py.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from pallas_softmax.implementations.triton.language import (
    LOG2E,
    exp,
    kept,
    log_sum,
    lowest_key,
    mask_start,
    of_key,
    shift,
    sort_key,
)

_NOTHING = tl.constexpr(-(2**63))  # the candidate of no element
_LEAST = tl.constexpr(-3.4028234663852886e38)  # finite, so that no difference of m is NaN


@triton.jit
def _load(ptr, mask_ptr, base, mask_base, col, inside, WHERE: tl.constexpr):
    """The elements in float32 and their keys: -inf and the lowest where they do not count."""
    x = tl.load(ptr + base + col, mask=inside, other=0.0)
    keep = kept(mask_ptr, mask_base, col, inside, WHERE)
    key = tl.where(keep, sort_key(x), lowest_key(ptr.dtype.element_ty))
    return tl.where(keep, x.to(tl.float32), float("-inf")), key


@triton.jit
def _candidate(key, col, inside):
    """The candidates of elements, or of nothing."""
    packed = (key.to(tl.int64) << 32) | (~col).to(tl.uint32, bitcast=True).to(tl.int64)
    return tl.where(inside, packed, _NOTHING)


@triton.jit
def _index(candidate):
    """The index of a candidate."""
    return ~candidate.to(tl.int32)


@triton.jit
def _members(
    best, start, stop, WIDTH: tl.constexpr, VEC: tl.constexpr, SLABS: tl.constexpr, SIZE: tl.constexpr
):
    """The columns of the candidates' groups, of the SLABS slabs that each is in; `stop` for what is not there.

    In groups of SIZE, ordered by slab of a group, group, candidate, element of a slab. So a reduction over a group
    leaves no warp bit unused below a used one, which Triton 3.6 miscompiles; as it may what is not one-dimensional.
    """
    place = _index(best) - start
    first = place // (WIDTH * SLABS) * (WIDTH * SLABS) + place % WIDTH // VEC * VEC
    first = tl.where(best == _NOTHING, stop, start + first)
    at = tl.arange(0, SLABS)
    GROUPS: tl.constexpr = SLABS * VEC // SIZE if SIZE > VEC else SLABS
    slab = at % GROUPS * (SLABS // GROUPS) + at // GROUPS
    col = first[None, :, None] + (slab * WIDTH)[:, None, None] + tl.arange(0, VEC)[None, None, :]
    col = tl.reshape(col, [col.numel])
    return tl.max_contiguous(tl.multiple_of(col, VEC), VEC)


@triton.jit
def _best(candidates, SLOTS: tl.constexpr, VEC: tl.constexpr, SIZE: tl.constexpr):
    """The best of each group of SIZE candidates in the order of `_members`, and of these the SLOTS best, in order."""
    if SIZE >= VEC:
        candidates = tl.max(tl.reshape(candidates, [candidates.numel // VEC, VEC]), 1)
        slabs: tl.constexpr = SIZE // VEC
        candidates = tl.max(tl.reshape(candidates, [slabs, candidates.numel // slabs]), 0)
    return tl.topk(candidates, SLOTS)


@triton.jit
def _merge(m, d, scale):
    """(m, d) of lanes, whose d is of exp((x - m) scale), merged by ⊕."""
    largest = tl.max(m, 0)
    return largest, tl.sum(d * exp((m - shift(largest)) * scale), 0)


@triton.jit
def _scale(temperature_ptr, row, SCALAR: tl.constexpr):
    """What the row is multiplied by: SCALAR, there is one temperature for all."""
    return tl.div_rn(1.0, tl.load(temperature_ptr + (0 if SCALAR else row)).to(tl.float32))


@triton.jit
def _store(
    best,
    m,
    d,
    scale,
    row,
    part,
    values_ptr,
    indices_ptr,
    sums_ptr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    LOG: tl.constexpr,
    WHERE: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The winners' probabilities and indices, and the row's m and d (2, rows).

    If they are of one of PARTS parts only: `indices` are the candidates (rows, PARTS, slots), two int32 each, the
    sums (2, rows, PARTS), and `values` is not written.
    """
    slot = tl.arange(0, best.numel)
    at = row * PARTS + part
    tl.store(sums_ptr + at, m)
    tl.store(sums_ptr + ROWS * PARTS + at, d)
    if PARTS > 1:
        tl.store(indices_ptr.to(tl.pointer_type(tl.int64)) + at * best.numel + slot, best)
    else:
        key = (best >> 32).to(tl.int32)
        scaled = (of_key(key, DTYPE) - m) * scale
        value = scaled - log_sum(d) if LOG else exp(scaled) / d
        if WHERE is not None:
            value = tl.where(key == lowest_key(DTYPE), float("-inf") if LOG else 0.0, value)
        tl.store(values_ptr + row * K + slot, value.to(values_ptr.dtype.element_ty), mask=slot < K)
        tl.store(indices_ptr + row * K + slot, _index(best), mask=slot < K)


@triton.jit
def topk_kernel(
    x_ptr,
    mask_ptr,
    temperature_ptr,
    values_ptr,
    indices_ptr,
    sums_ptr,
    ROWS: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    LOG: tl.constexpr,
    SCALAR: tl.constexpr,
    WHERE: tl.constexpr,
    MASK: tl.constexpr,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    VEC: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """A part of LENGTH elements of a row, in slabs of GROUPS x VEC, of which group g has the g-th VEC elements.

    LEVELS: how the winners are narrowed down from a group of all slabs to one element. Each level is the number of
    slabs of the winning groups that are read again, and the size of the groups of the next level in them.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, mask_base = row * V, mask_start(row, V, WHERE, MASK)
    scale = _scale(temperature_ptr, row, SCALAR)
    start = part * LENGTH
    stop = start + min(LENGTH, V - start)

    WIDTH: tl.constexpr = GROUPS * VEC
    lane = start + tl.arange(0, WIDTH)
    best, best_col = tl.full([WIDTH], lowest_key(x_ptr.dtype.element_ty), tl.int32), lane
    m, d = tl.full([WIDTH], _LEAST, tl.float32), tl.zeros([WIDTH], tl.float32)
    for at in range(0, stop - start, WIDTH):
        col = at + lane
        x, key = _load(x_ptr, mask_ptr, base, mask_base, col, col < stop, WHERE)
        # x ⊕ (m, d): of the two exponentials one is 1
        e = tl.exp2(-tl.abs(x - m) * (scale * LOG2E))
        d = tl.where(x > m, d * e + 1, d + e)
        m = tl.maximum(m, x)
        best_col = tl.where(key > best, col, best_col)  # the first of equals
        best = tl.maximum(best, key)
    m = tl.where(d == 0, float("-inf"), m)
    d = tl.where(m == float("inf"), float("nan"), d)
    m, d = _merge(m, d, scale)

    best = _best(_candidate(best, best_col, lane < stop), SLOTS, VEC, VEC)
    for level in tl.static_range(len(LEVELS)):
        col = _members(best, start, stop, WIDTH, VEC, LEVELS[level][0], LEVELS[level][1])
        _, key = _load(x_ptr, mask_ptr, base, mask_base, col, col < stop, WHERE)
        best = _best(_candidate(key, col, col < stop), SLOTS, VEC, LEVELS[level][1])

    _store(
        best, m, d, scale, row, part, values_ptr, indices_ptr, sums_ptr, ROWS, K, LOG, WHERE, PARTS,
        x_ptr.dtype.element_ty,
    )  # fmt: skip


@triton.jit
def merge_kernel(
    x_ptr,
    temperature_ptr,
    lists_ptr,
    parts_ptr,
    values_ptr,
    indices_ptr,
    sums_ptr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    LOG: tl.constexpr,
    SCALAR: tl.constexpr,
    WHERE: tl.constexpr,
    LISTS: tl.constexpr,
    FAN: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """FAN of the row's LISTS lists of candidates and (m, d) merged into one of PARTS. Of x only the dtype counts."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _scale(temperature_ptr, row, SCALAR)
    which = part * FAN + tl.arange(0, FAN)
    m = tl.load(parts_ptr + row * LISTS + which, mask=which < LISTS, other=float("-inf"))
    d = tl.load(parts_ptr + (ROWS + row) * LISTS + which, mask=which < LISTS, other=0.0)
    m, d = _merge(m, d, scale)
    slot = part * (FAN * SLOTS) + tl.arange(0, FAN * SLOTS)
    candidates_ptr = lists_ptr.to(tl.pointer_type(tl.int64)) + row * (LISTS * SLOTS)
    best = tl.topk(tl.load(candidates_ptr + slot, mask=slot < LISTS * SLOTS, other=_NOTHING), SLOTS)
    _store(
        best, m, d, scale, row, part, values_ptr, indices_ptr, sums_ptr, ROWS, K, LOG, WHERE, PARTS,
        x_ptr.dtype.element_ty,
    )  # fmt: skip
