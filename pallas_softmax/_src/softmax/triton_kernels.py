"""The Triton kernel for softmax, log_softmax, logsumexp and their backwards.

OP is the name of the operation. The kernel takes two arrays (ROWS, V). A backward gets `a` = y and `b` = dy. A forward
gets x as both, and reads only `a`.

The kernel reduces each row to a normalizer (m, d). Each output element is computed from the input elements at its place
and the normalizer. A backward only sums its rows: d is the sum and m is 0. A program reads its rows once to reduce
them, and again to write. The compiler keeps rows of a single step in registers.

_src/triton/plan.py draws the plan and explains its constants.
"""

import triton
import triton.language as tl

from pallas_softmax._src.triton.language import exp, kept, larger, log_sum, mask_start, shift


@triton.jit
def _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP: tl.constexpr, WHERE: tl.constexpr):
    """Loads the elements at `base` + `col` that are `inside` the row, and their mask.

    Returns a and b in float32, which elements count, and the term that each adds to the row's normalizer: a logit, or
    -inf if it does not count; in a backward a term of the sum, or 0.
    """
    keep = kept(mask_ptr, mask_base, col, inside, WHERE)
    a = tl.load(a_ptr + base + col, mask=inside, other=0.0).to(tl.float32)
    b = a
    if OP == "softmax_grad" or OP == "log_softmax_grad":
        b = tl.load(b_ptr + base + col, mask=inside, other=0.0).to(tl.float32)
        term = tl.where(keep, a * b if OP == "softmax_grad" else b, 0.0)
    else:
        term = tl.where(keep, a, float("-inf"))
    return a, b, keep, term


@triton.jit
def _empty(N: tl.constexpr, OP: tl.constexpr):
    m: tl.constexpr = 0.0 if OP == "softmax_grad" or OP == "log_softmax_grad" else float("-inf")
    return tl.full([N], m, tl.float32), tl.zeros([N], tl.float32)


@triton.jit
def _absorb(m, d, term, OP: tl.constexpr):
    """Adds the terms of each row to its normalizer (m, d): ⊕ with one rescaling of d."""
    if OP == "softmax_grad" or OP == "log_softmax_grad":
        return m, d + tl.sum(term, 1)
    else:
        largest = larger(m, tl.reduce(term, 1, larger))
        s = shift(largest)
        return largest, d * exp(m - s) + tl.sum(exp(term - s[:, None]), 1)


@triton.jit
def _row_constants(m, d, OP: tl.constexpr):
    """Returns the two constants of a row that `_value` needs."""
    if OP == "softmax":
        return shift(m), tl.div_rn(1.0, d)
    elif OP == "log_softmax":
        return m, log_sum(d)
    else:
        return m, d


@triton.jit
def _value(a, b, keep, c0, c1, OP: tl.constexpr, WHERE: tl.constexpr):
    """Returns the float32 outputs for elements a and b, given the row's constants."""
    masked = 0.0
    if OP == "softmax":
        y = exp(a - c0) * c1
    elif OP == "log_softmax":
        y = a - c0 - c1
        masked = float("-inf")
    elif OP == "softmax_grad":
        y = a * (b - c1)
    else:
        y = b - exp(a) * c1
    if WHERE is not None:
        y = tl.where(keep, y, masked)
    return y


@triton.jit
def softmax_kernel(
    # inputs
    a_ptr,  # (ROWS, V)
    b_ptr,  # (ROWS, V)
    mask_ptr,  # bool, with the strides of MASK
    # outputs
    out_ptr,  # (ROWS, V), or float32 (3, ROWS) for logsumexp
    # constants of the call
    ROWS: tl.constexpr,
    V: tl.constexpr,
    OP: tl.constexpr,
    WHERE: tl.constexpr,
    MASK: tl.constexpr,
    # constants of the plan, `Steps`
    PROGRAM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes PROGRAM_ROWS rows in steps of WIDTH elements of each row. The grid covers all ROWS."""
    row = tl.program_id(0).to(tl.int64) * PROGRAM_ROWS + tl.arange(0, PROGRAM_ROWS)
    exists = row < ROWS
    base = (row * V)[:, None]
    mask_base = mask_start(row, V, WHERE, MASK)[:, None]
    step = tl.arange(0, WIDTH)[None, :]

    m, d = _empty(PROGRAM_ROWS, OP)
    for at in range(0, V, WIDTH):
        col = at + step
        inside = exists[:, None] & (col < V)
        _, _, _, term = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
        m, d = _absorb(m, d, term, OP)

    if OP == "logsumexp":
        lse = tl.where(m == float("inf"), m, m + log_sum(d))  # with a logit of +inf, d is NaN
        tl.store(out_ptr + row, lse, mask=exists)
        tl.store(out_ptr + ROWS + row, m, mask=exists)
        tl.store(out_ptr + 2 * ROWS + row, d, mask=exists)
    else:
        c0, c1 = _row_constants(m, d, OP)
        for at in range(0, V, WIDTH):
            # In reverse order, since the L2 cache still holds what was read last.
            col = (V - 1) // WIDTH * WIDTH - at + step
            inside = exists[:, None] & (col < V)
            a, b, keep, _ = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
            y = _value(a, b, keep, c0[:, None], c1[:, None], OP, WHERE)
            tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)
