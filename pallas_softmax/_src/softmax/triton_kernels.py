"""The Triton kernel for softmax, log_softmax, logsumexp and their backwards.

OP is the name of the operation. The kernel takes two arrays (ROWS, V). A backward gets `a` = y and `b` = dy. A forward
gets x as both, and reads only `a`.

The kernel reduces each row to a normalizer (m, d). Each output element is computed from the input elements at its place
and the normalizer. A backward only sums its rows: d is the sum and m is 0, so that ⊕ adds. A program reads its rows, or
its part of a row, once to reduce them, and again to write:

    one part per row    reduce -> write, in one launch. The compiler keeps a row of a single step in registers
    several parts       launch 1: reduce -> write the part's (m, d);  launch 2: merge -> write

_src/triton/plan.py draws the plan and explains its constants.
"""

import triton
import triton.language as tl

from pallas_softmax._src.triton.language import combine, exp, kept, larger, log_sum, mask_start, shift


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
    normalizers_ptr,  # float32 (2, ROWS, PARTS), m and d; read only if not REDUCE
    # outputs
    out_ptr,  # if WRITE (ROWS, V), or float32 (3, ROWS) for logsumexp; else float32 (2, ROWS, PARTS), m and d
    # constants of the call
    ROWS: tl.constexpr,
    V: tl.constexpr,
    OP: tl.constexpr,
    WHERE: tl.constexpr,
    MASK: tl.constexpr,
    # constants of the launch
    REDUCE: tl.constexpr,
    WRITE: tl.constexpr,
    # constants of the plan, `Steps`
    PROGRAM_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,  # PARTS rounded up to a power of two
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes PROGRAM_ROWS rows, or a part of LENGTH elements of a row, in steps of WIDTH elements of each row.

    REDUCE and WRITE   a row is a single part: reads it to reduce it, then again to write the outputs
    REDUCE             writes the normalizer of the part
    WRITE              merges the normalizers of the row's parts (in each program), then writes the outputs

    The grid is (ROWS / PROGRAM_ROWS, rounded up, PARTS).
    """
    row = tl.program_id(0).to(tl.int64) * PROGRAM_ROWS + tl.arange(0, PROGRAM_ROWS)
    exists, part = row < ROWS, tl.program_id(1)
    start = 0 if PARTS == 1 else part * LENGTH
    stop = V if PARTS == 1 else min(V, start + LENGTH)
    base = (row * V)[:, None]
    mask_base = mask_start(row, V, WHERE, MASK)[:, None]
    step = tl.arange(0, WIDTH)[None, :]

    if REDUCE:
        m, d = _empty(PROGRAM_ROWS, OP)
        for at in range(start, stop, WIDTH):
            col = at + step
            inside = exists[:, None] & (col < stop)
            _, _, _, term = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
            m, d = _absorb(m, d, term, OP)
    else:
        slot = tl.arange(0, SLOTS)[None, :]
        at = row[:, None] * PARTS + slot
        m = tl.load(normalizers_ptr + at, mask=slot < PARTS, other=float("-inf"))
        d = tl.load(normalizers_ptr + ROWS * PARTS + at, mask=slot < PARTS, other=0.0)
        m, d = tl.reduce((m, d), 1, combine)

    if not WRITE:
        tl.store(out_ptr + row * PARTS + part, m)
        tl.store(out_ptr + (ROWS + row) * PARTS + part, d)
    elif OP == "logsumexp":
        lse = tl.where(m == float("inf"), m, m + log_sum(d))  # with a logit of +inf, d is NaN
        tl.store(out_ptr + row, lse, mask=exists)
        tl.store(out_ptr + ROWS + row, m, mask=exists)
        tl.store(out_ptr + 2 * ROWS + row, d, mask=exists)
    else:
        c0, c1 = _row_constants(m, d, OP)
        last = (stop - 1 - start) // WIDTH * WIDTH
        for at in range(0, last + 1, WIDTH):
            # In reverse order, since the L2 cache still holds what was read last.
            col = start + last - at + step
            inside = exists[:, None] & (col < stop)
            a, b, keep, _ = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
            y = _value(a, b, keep, c0[:, None], c1[:, None], OP, WHERE)
            tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)
