"""Triton kernels for fused top-k.

A candidate is an element packed into one int64. The high half is the sort key of its value (`language.sort_key`). The
low half is the complement of its index in the row. Candidates never tie: the larger value wins, then the lower index.

A program cuts its part of a row into groups, as drawn in _src/triton/plan.py. Groups are ranked by their best element,
and the k best elements lie in the k best groups: for an element of any other group, each of the k groups holds a
better one. So one pass keeps the best candidate of each group, and the normalizer. Then the k best groups are read
again, cut into smaller groups, and the k best of these are kept. This repeats until a group is one element. No branch
and no loop depends on the values.

`topk_kernel` does this in one launch, with a program for each part. If a row has several parts, `merge_kernel` merges
their candidates and normalizers, in one or more launches.

In a normalizer (m, d), m is the maximum of x itself, and d is the sum of exp((x first - m first) * scale * again).
These are the factors of 1 / temperature, see `normalizers.Scale`; without a temperature all are 1.
"""

import triton
import triton.language as tl

from pallas_softmax._src.triton.language import (
    LOG2E,
    exp,
    from_sort_key,
    kept,
    log_sum,
    lowest_key,
    mask_start,
    shift,
    sort_key,
)

_NOTHING = tl.constexpr(-(2**63))  # loses to the candidate of any element
_LIMIT, _HOT = tl.constexpr(2.0**100), tl.constexpr(2.0**120)  # as in `normalizers.Scale` and temperatures.py
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite number, so that -inf minus it is not NaN


# --- Candidates ---------------------------------------------------------------------------------------


@triton.jit
def _load(ptr, mask_ptr, base, mask_base, col, inside, WHERE: tl.constexpr):
    """Returns elements in float32, and their keys; -inf and the lowest key for elements that do not count."""
    x = tl.load(ptr + base + col, mask=inside, other=0.0)
    keep = kept(mask_ptr, mask_base, col, inside, WHERE)
    key = tl.where(keep, sort_key(x), lowest_key(ptr.dtype.element_ty))
    return tl.where(keep, x.to(tl.float32), float("-inf")), key


@triton.jit
def _candidate(key, col, inside):
    packed = (key.to(tl.int64) << 32) | (~col).to(tl.uint32, bitcast=True).to(tl.int64)
    return tl.where(inside, packed, _NOTHING)


@triton.jit
def _index(candidate):
    return ~candidate.to(tl.int32)


@triton.jit
def _members(best, start, stop, WIDTH: tl.constexpr, VEC: tl.constexpr, SLABS: tl.constexpr, SIZE: tl.constexpr):
    """Returns the columns of the groups that contain the candidates `best`, as a one-dimensional array.

    A group has VEC columns in each of SLABS slabs. A slab is WIDTH columns wide, and the part starts at column `start`.
    For a _NOTHING in `best`, the columns start at `stop`, which is outside the part.

    The next step cuts these groups into smaller groups of SIZE columns and ranks them. The columns are ordered by: slab
    in a smaller group, smaller group, candidate, element of a slab.

    This order works around a bug: Triton 3.6 miscompiles a reduction if its layout leaves a bit of the warp's number
    unused below a used one. In this order, no reduction over a smaller group does. With arrays of several dimensions
    the bug might still occur.
    """
    offset = _index(best) - start
    first = offset // (WIDTH * SLABS) * (WIDTH * SLABS) + offset % WIDTH // VEC * VEC
    first = tl.where(best == _NOTHING, stop, start + first)
    at = tl.arange(0, SLABS)
    GROUPS: tl.constexpr = SLABS * VEC // SIZE if SIZE > VEC else SLABS
    slab = at % GROUPS * (SLABS // GROUPS) + at // GROUPS
    col = first[None, :, None] + (slab * WIDTH)[:, None, None] + tl.arange(0, VEC)[None, None, :]
    col = tl.reshape(col, [col.numel])
    return tl.max_contiguous(tl.multiple_of(col, VEC), VEC)


@triton.jit
def _best(candidates, SLOTS: tl.constexpr, VEC: tl.constexpr, SIZE: tl.constexpr):
    """Returns the best candidates of the SLOTS best groups, best first.

    A group has SIZE candidates. The candidates are in the order of `_members`.
    """
    if SIZE >= VEC:
        candidates = tl.max(tl.reshape(candidates, [candidates.numel // VEC, VEC]), 1)
        slabs: tl.constexpr = SIZE // VEC
        candidates = tl.max(tl.reshape(candidates, [slabs, candidates.numel // slabs]), 0)
    return tl.topk(candidates, SLOTS)


# --- Normalizers and results --------------------------------------------------------------------------


@triton.jit
def _combine_lanes(m, d, first, scale, again):
    largest = tl.max(m, 0)
    return largest, tl.sum(d * exp((m * first - shift(largest) * first) * scale * again), 0)


@triton.jit
def _scale(temperature_ptr, row, SCALAR: tl.constexpr, SCALED: tl.constexpr):
    """Returns the factors of 1 / temperature of a row. If SCALAR, all rows share one; unless SCALED, it is 1."""
    t = tl.load(temperature_ptr + (0 if SCALAR else row)).to(tl.float32)
    if SCALED:
        first, again = tl.where(t > _HOT, 0.25, 1.0), tl.where(t < 1 / _LIMIT, _LIMIT, 1.0)
        return first, tl.minimum(tl.div_rn(1.0, t * first * again), _LIMIT), again
    else:
        return 1.0, tl.div_rn(1.0, t), 1.0


@triton.jit
def _store(
    best, m, d, first, scale, again, row, part,  # the winners and the normalizer of a part of a row
    values_ptr, indices_ptr, normalizers_ptr,  # outputs
    ROWS: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, WHERE: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Stores the winners and the normalizer of a part; m and d go to normalizers (2, ROWS, PARTS).

    If a row is a single part, the results are final: values (ROWS, K) are probabilities, or with LOG their logarithms,
    and indices are (ROWS, K). Otherwise no values are stored, and indices hold the candidates (ROWS, PARTS, slots), two
    int32 each. If LOG is None, nothing is normalized: the values are the winners, and no normalizers are stored.
    """
    slot = tl.arange(0, best.numel)
    at = row * PARTS + part
    if LOG is not None:
        tl.store(normalizers_ptr + at, m)
        tl.store(normalizers_ptr + ROWS * PARTS + at, d)
    if PARTS > 1:
        tl.store(indices_ptr.to(tl.pointer_type(tl.int64)) + at * best.numel + slot, best)
    else:
        key = (best >> 32).to(tl.int32)
        value = from_sort_key(key, DTYPE)
        if LOG is not None:
            scaled = (value.to(tl.float32) * first - m * first) * scale * again
            if SCALED:  # at temperature 0, any negative number is -inf
                scaled = tl.where(scaled < 0, scaled + tl.where(scale == _LIMIT, float("-inf"), 0.0), scaled)
            value = scaled - log_sum(d) if LOG else exp(scaled) / d
        if WHERE is not None:
            masked = 0.0 if LOG == False else float("-inf")  # noqa: E712
            value = tl.where(key == lowest_key(DTYPE), tl.full(value.shape, masked, value.dtype), value)
        tl.store(values_ptr + row * K + slot, value.to(values_ptr.dtype.element_ty), mask=slot < K)
        tl.store(indices_ptr + row * K + slot, _index(best), mask=slot < K)


# --- Kernels ------------------------------------------------------------------------------------------


@triton.jit
def topk_kernel(
    x_ptr,  # (ROWS, V)
    mask_ptr,  # bool, with the strides of MASK
    temperature_ptr,  # (1,) if SCALAR, else (ROWS,)
    values_ptr, indices_ptr, normalizers_ptr,  # outputs, as `_store` describes them
    # constants of the call
    ROWS: tl.constexpr, V: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, SCALAR: tl.constexpr,
    SCALED: tl.constexpr, WHERE: tl.constexpr, MASK: tl.constexpr,
    # constants of the plan, a Slabs
    PARTS: tl.constexpr, LENGTH: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Finds the winners and the normalizer of a part of LENGTH elements of a row. The grid is (ROWS, PARTS)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, mask_base = row * V, mask_start(row, V, WHERE, MASK)
    first, scale, again = _scale(temperature_ptr, row, SCALAR, SCALED)
    start = part * LENGTH
    stop = start + min(LENGTH, V - start)

    # Each lane keeps a normalizer, its best key, and the column of that key.
    WIDTH: tl.constexpr = GROUPS * VEC
    lane = start + tl.arange(0, WIDTH)
    best, best_col = tl.full([WIDTH], lowest_key(x_ptr.dtype.element_ty), tl.int32), lane
    m, d = tl.full([WIDTH], _LOWEST, tl.float32), tl.zeros([WIDTH], tl.float32)
    for at in range(0, stop - start, WIDTH):
        col = at + lane
        x, key = _load(x_ptr, mask_ptr, base, mask_base, col, col < stop, WHERE)
        if LOG is not None:
            # This is (m, d) ⊕ (x, 1). One of its two exponentials is exp(0), so one call is enough.
            e = tl.exp2(-tl.abs(x * first - m * first) * (scale * LOG2E) * again)
            d = tl.where(x > m, d * e + 1, d + e)
            m = tl.maximum(m, x)
        best_col = tl.where(key > best, col, best_col)  # of tied keys the first stays
        best = tl.maximum(best, key)
    m = tl.where(d == 0, float("-inf"), m)
    d = tl.where(m == float("inf"), float("nan"), d)
    m, d = _combine_lanes(m, d, first, scale, again)

    best = _best(_candidate(best, best_col, lane < stop), SLOTS, VEC, VEC)
    for level in tl.static_range(len(LEVELS)):
        col = _members(best, start, stop, WIDTH, VEC, LEVELS[level][0], LEVELS[level][1])
        _, key = _load(x_ptr, mask_ptr, base, mask_base, col, col < stop, WHERE)
        best = _best(_candidate(key, col, col < stop), SLOTS, VEC, LEVELS[level][1])

    _store(
        best, m, d, first, scale, again, row, part, values_ptr, indices_ptr, normalizers_ptr, ROWS, K, LOG, WHERE,
        PARTS, x_ptr.dtype.element_ty, SCALED,
    )  # fmt: skip


@triton.jit
def merge_kernel(
    x_ptr,  # used only for its dtype
    temperature_ptr,  # (1,) if SCALAR, else (ROWS,)
    candidates_ptr,  # int32 (ROWS, LISTS, SLOTS, 2)
    list_normalizers_ptr,  # float32 (2, ROWS, LISTS), m and d
    values_ptr, indices_ptr, normalizers_ptr,  # outputs, as `_store` describes them
    # constants of the call
    ROWS: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, SCALAR: tl.constexpr, SCALED: tl.constexpr,
    WHERE: tl.constexpr,
    # constants of the plan; PARTS is LISTS / FAN_IN, rounded up
    SLOTS: tl.constexpr, LISTS: tl.constexpr, FAN_IN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merges FAN_IN lists of a row's candidates, and their normalizers, into one.

    A row has LISTS lists before the launch, and PARTS lists after it. The grid is (ROWS, PARTS).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, scale, again = _scale(temperature_ptr, row, SCALAR, SCALED)
    which = part * FAN_IN + tl.arange(0, FAN_IN)
    m = tl.load(list_normalizers_ptr + row * LISTS + which, mask=which < LISTS, other=float("-inf"))
    d = tl.load(list_normalizers_ptr + (ROWS + row) * LISTS + which, mask=which < LISTS, other=0.0)
    m, d = _combine_lanes(m, d, first, scale, again)
    slot = part * (FAN_IN * SLOTS) + tl.arange(0, FAN_IN * SLOTS)
    row_ptr = candidates_ptr.to(tl.pointer_type(tl.int64)) + row * (LISTS * SLOTS)
    best = tl.topk(tl.load(row_ptr + slot, mask=slot < LISTS * SLOTS, other=_NOTHING), SLOTS)
    _store(
        best, m, d, first, scale, again, row, part, values_ptr, indices_ptr, normalizers_ptr, ROWS, K, LOG, WHERE,
        PARTS, x_ptr.dtype.element_ty, SCALED,
    )  # fmt: skip
