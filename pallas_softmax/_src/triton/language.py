"""Functions that the Triton kernels share: ⊕, the mask, the order of top-k, and exponentials.

The operator ⊕, `shift` and the sort key are defined in pallas_softmax/online.py. Triton compiles a language of its
own, of which jax.numpy is no part, so they are restated here; tests/triton_interpreter.py holds them against
online.py.

A function here is inlined into the kernels that call it. Its arguments are Triton tensors, the arrays of one program,
of any shape, unless they are marked as `tl.constexpr`: these are values of Python that are known when a kernel is
compiled.
"""

# A constexpr is the value itself in a kernel, which pyright cannot know; and Triton may not be installed.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingImports=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # the logarithm of e to base 2
# |d - 1| below which four terms of a series are as accurate as float32 is.
_SERIES_BOUND = tl.constexpr(2**-6)


# --- The normalizer -----------------------------------------------------------------------------------


@triton.jit
def exp(x):
    """Computes e^x in float32 by the GPU's 2^x.

    It is off by a relative error of |x| eps, and gives 0 for a denormal result. `tl.exp` spends instructions on
    those.
    """
    return tl.exp2(x * LOG2E)


@triton.jit
def shift(m):
    """Returns what is subtracted before exp, as `online.shift` does: m, but 0 for m = -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def larger(a, b):
    """Returns the maximum, which is NaN if either is, as that of jnp.maximum is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def combine(m1, d1, m2, d2):
    """Applies the operator ⊕ of the paper to the normalizers (m1, d1) and (m2, d2), as `online.combine` does."""
    m = larger(m1, m2)
    s = shift(m)
    return m, d1 * exp(m1 - s) + d2 * exp(m2 - s)


@triton.jit
def log_sum(d):
    """Computes log(d) of a sum of exponentials.

    The GPU's logarithm is not accurate near 1, where d - 1 is what all logits but the largest add.
    """
    u = d - 1
    series = u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4)))
    return tl.where(tl.abs(u) < _SERIES_BOUND, series, tl.log(d))


# --- The mask -----------------------------------------------------------------------------------------


@triton.jit
def mask_start(row, V: tl.constexpr, WHERE: tl.constexpr, MASK: tl.constexpr):
    """Returns the index of the mask's first element for a row, by the terms of `folding.MaskRows`.

    WHERE is None without a mask, "row" if the mask has an element for each of the V elements of a row, and "one" if
    it has one element for the whole row.
    """
    at = row * 0
    if WHERE is not None:
        for i in tl.static_range(len(MASK)):
            at += row // MASK[i][0] % MASK[i][1] * MASK[i][2]
    return at * V if WHERE == "row" else at


@triton.jit
def kept(mask_ptr, start, col, inside, WHERE: tl.constexpr):
    """Returns which columns count: those inside the row that the mask, if there is one, does not leave out."""
    if WHERE is None:
        return inside
    else:
        return inside & tl.load(mask_ptr + start + (col if WHERE == "row" else col * 0), mask=inside, other=0)


# --- The order of top-k -------------------------------------------------------------------------------


@triton.jit
def sort_key(x):
    """Returns int32 keys in the total order of lax.top_k, as `online.sort_key` does: the larger wins."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return bits ^ ((bits >> 31) & 0x7FFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_sort_key(key, DTYPE: tl.constexpr):
    """Returns the values, in float32, of elements of this dtype that have these keys."""
    if DTYPE.primitive_bitwidth == 16:
        bits = key ^ ((key >> 31) & 0x7FFF)
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lowest_key(DTYPE: tl.constexpr):
    """Returns the lowest key of a dtype: that of a -NaN whose bits are all ones, and given to what is masked."""
    return -(2 ** (DTYPE.primitive_bitwidth - 1))
