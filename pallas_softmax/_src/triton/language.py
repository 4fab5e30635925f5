"""Functions that the Triton kernels share: ⊕, the mask, the order of top-k, and exponentials.

The operator ⊕, `shift` and the sort key are defined in normalizers.py and sort_keys.py. Triton compiles its own
language, without jax.numpy, so this file restates them. tests/programs/triton_interpreter.py compares the definitions.

Kernels inline the functions that they call. Arguments marked as `tl.constexpr` are Python values that are known when a
kernel is compiled. All other arguments are Triton tensors of any shape: the arrays of one program.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # the logarithm of e to base 2
# Below this |d - 1|, four terms of a series are as accurate as float32.
_SERIES_BOUND = tl.constexpr(2**-6)


@triton.jit
def exp(x):
    """Computes e^x in float32 by the GPU's 2^x.

    The relative error is |x| eps, and denormal results become 0. `tl.exp` spends extra instructions on those.
    """
    return tl.exp2(x * LOG2E)


@triton.jit
def shift(m):
    """Returns the number to subtract before exp, like `normalizers.shift`."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def larger(a, b):
    """Returns the maximum. Like jnp.maximum, it is NaN if either number is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def combine(m1, d1, m2, d2):
    """Returns (m1, d1) ⊕ (m2, d2), like `normalizers.combine`."""
    m = larger(m1, m2)
    s = shift(m)
    return m, d1 * exp(m1 - s) + d2 * exp(m2 - s)


@triton.jit
def log_sum(d):
    """Computes log(d) of a sum of exponentials.

    The GPU's logarithm is not accurate near 1, so a series in d - 1 replaces it there. d - 1 is the sum of the terms of
    all logits except the largest.
    """
    u = d - 1
    series = u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4)))
    return tl.where(tl.abs(u) < _SERIES_BOUND, series, tl.log(d))


@triton.jit
def mask_start(row, V: tl.constexpr, WHERE: tl.constexpr, MASK: tl.constexpr):
    """Returns the index of the mask's first element for a row. MASK has the terms of `folding.MaskRows`.

    WHERE is None without a mask, "row" if the mask has all V elements of a row, and "one" if it has one per row.
    """
    at = row * 0
    if WHERE is not None:
        for i in tl.static_range(len(MASK)):
            at += row // MASK[i][0] % MASK[i][1] * MASK[i][2]
    return at * V if WHERE == "row" else at


@triton.jit
def kept(mask_ptr, start, col, inside, WHERE: tl.constexpr):
    """Returns which columns are inside the row and kept by the mask, if there is one."""
    if WHERE is None:
        return inside
    else:
        return inside & tl.load(mask_ptr + start + (col if WHERE == "row" else col * 0), mask=inside, other=0)


@triton.jit
def sort_key(x):
    """Returns int32 keys in the total order of lax.top_k, like `sort_keys.key32`."""
    bits = x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True).to(tl.int32)
    return bits ^ ((bits >> 31) & ~lowest_key(x.dtype))


@triton.jit
def from_sort_key(key, DTYPE: tl.constexpr):
    """Returns the elements of this dtype that have these keys, bit by bit."""
    bits = key ^ ((key >> 31) & ~lowest_key(DTYPE))
    return bits.to(tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32).to(DTYPE, bitcast=True)


@triton.jit
def lowest_key(DTYPE: tl.constexpr):
    """Returns the lowest key of a dtype: the key of the -NaN with all bits set. Masked elements get it."""
    return -(2 ** (DTYPE.primitive_bitwidth - 1))
