"""What the Triton kernels share: ⊕, the mask, the order of top-k, and what is made of a row."""

# A constexpr is the value itself in a kernel, which pyright cannot know.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x by the GPU's 2^x, which is off by |x| eps, and 0 for a denormal result; `tl.exp` minds those."""
    return tl.exp2(x * LOG2E)


@triton.jit
def shift(m):
    """What to subtract before exp: as `online.shift`."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def larger(a, b):
    """The maximum; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def combine(m1, d1, m2, d2):
    """The operator ⊕ of the paper, as `online.combine`."""
    m = larger(m1, m2)
    s = shift(m)
    return m, d1 * exp(m1 - s) + d2 * exp(m2 - s)


@triton.jit
def log_sum(d):
    """log(d), accurate near 1, too, where the approximate one is not: d - 1 is what other logits add."""
    u = d - 1
    series = u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4)))
    return tl.where(tl.abs(u) < 2**-6, series, tl.log(d))


@triton.jit
def mask_start(row, V: tl.constexpr, WHERE: tl.constexpr, MASK: tl.constexpr):
    """First element of the mask's row for a row, by the terms of `folding.MaskRows`.

    WHERE: None without a mask, "row" for one along the row, "one" for one element a row.
    """
    at = row * 0
    if WHERE is not None:
        for i in tl.static_range(len(MASK)):
            at += row // MASK[i][0] % MASK[i][1] * MASK[i][2]
    return at * V if WHERE == "row" else at


@triton.jit
def kept(mask_ptr, start, col, inside, WHERE: tl.constexpr):
    """Which of the columns inside the row count."""
    if WHERE is None:
        return inside
    else:
        return inside & tl.load(mask_ptr + start + (col if WHERE == "row" else col * 0), mask=inside, other=0)


@triton.jit
def sort_key(x):
    """Integers in lax.top_k's total order of x, as `online.sort_key`."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return bits ^ ((bits >> 31) & 0x7FFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_key(key, DTYPE: tl.constexpr):
    """The float32 value of a key of this dtype."""
    if DTYPE.primitive_bitwidth == 16:
        bits = key ^ ((key >> 31) & 0x7FFF)
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lowest_key(DTYPE: tl.constexpr):
    """The key of what is masked, and of the -NaN of all ones."""
    return -(2 ** (DTYPE.primitive_bitwidth - 1))
