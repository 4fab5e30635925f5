"""The kernels of softmax, log_softmax, logsumexp and their backwards.

OP names the operation. A forward reads x, a backward the y and dy of the forward (`a`, `b`; a forward passes
x twice). The state of a row is always (m, d): in a backward, whose rows are summed, m is 0, and ⊕ adds.
"""

# What pyright cannot know of a kernel is said in language.py.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from pallas_softmax.implementations.triton.language import (
    combine,
    exp,
    kept,
    larger,
    log_sum,
    mask_start,
    shift,
)


@triton.jit
def _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP: tl.constexpr, WHERE: tl.constexpr):
    """The elements, which of them count, and the terms of the reduction, neutral elsewhere."""
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
def _absorb(m, d, term, OP: tl.constexpr, AXIS: tl.constexpr):
    """The state with the terms along AXIS added."""
    if OP == "softmax_grad" or OP == "log_softmax_grad":
        return m, d + tl.sum(term, AXIS)
    else:
        largest = larger(m, tl.reduce(term, AXIS, larger))
        s = shift(largest)
        return largest, d * exp(m - s) + tl.sum(exp(term - tl.expand_dims(s, AXIS)), AXIS)


@triton.jit
def _empty(N: tl.constexpr, OP: tl.constexpr):
    """The state of no elements."""
    if OP == "softmax_grad" or OP == "log_softmax_grad":
        return tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    else:
        return tl.full([N], float("-inf"), tl.float32), tl.zeros([N], tl.float32)


@triton.jit
def _constants(m, d, OP: tl.constexpr):
    """What `_value` needs of the state."""
    if OP == "softmax":
        return shift(m), tl.div_rn(1.0, d)
    elif OP == "log_softmax":
        return m, log_sum(d)
    else:
        return m, d


@triton.jit
def _value(a, b, keep, c0, c1, OP: tl.constexpr, WHERE: tl.constexpr):
    """What is written."""
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
def _store_sums(out_ptr, row, inside, m, d, ROWS: tl.constexpr):
    """logsumexp, m and d, a row of the result each. A +inf among numbers: the sum is +inf, not NaN."""
    lse = tl.where(m == float("inf"), m, m + log_sum(d))
    tl.store(out_ptr + row, lse, mask=inside)
    tl.store(out_ptr + ROWS + row, m, mask=inside)
    tl.store(out_ptr + 2 * ROWS + row, d, mask=inside)


@triton.jit
def _write(
    a_ptr,
    b_ptr,
    mask_ptr,
    out_ptr,
    base,
    mask_base,
    col,
    inside,
    c0,
    c1,
    OP: tl.constexpr,
    WHERE: tl.constexpr,
):
    """The elements again, and what is made of them stored."""
    a, b, keep, _ = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
    y = _value(a, b, keep, c0, c1, OP, WHERE)
    tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rows_kernel(
    a_ptr,
    b_ptr,
    mask_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    V: tl.constexpr,
    OP: tl.constexpr,
    WHERE: tl.constexpr,
    MASK: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """N rows, each in BLOCK elements of registers: one read."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < ROWS)[:, None] & (col < V)
    base = row.to(tl.int64)[:, None] * V
    mask_base = mask_start(row.to(tl.int64), V, WHERE, MASK)[:, None]
    a, b, keep, term = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
    if OP == "softmax":  # the exponentials take the place of the logits
        e = exp(term - shift(tl.reduce(term, 1, larger))[:, None])
        y = e * tl.div_rn(1.0, tl.sum(e, 1))[:, None]
        if WHERE is not None:
            y = tl.where(keep, y, 0.0)
        tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        m, d = _empty(N, OP)
        m, d = _absorb(m, d, term, OP, 1)
        if OP == "logsumexp":
            _store_sums(out_ptr, row, row < ROWS, m, d, ROWS)
        else:
            c0, c1 = _constants(m, d, OP)
            y = _value(a, b, keep, c0[:, None], c1[:, None], OP, WHERE)
            tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_kernel(
    a_ptr,
    b_ptr,
    mask_ptr,
    parts_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    V: tl.constexpr,
    OP: tl.constexpr,
    WHERE: tl.constexpr,
    MASK: tl.constexpr,
    REDUCE: tl.constexpr,
    WRITE: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    LENGTH: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A part of LENGTH elements of a row, in steps of DEPTH x WIDTH, each lane with its own (m, d).

    REDUCE and WRITE: the row is one part, read twice, the second time from what the L2 cache still has of it.
    REDUCE alone: out (2, rows, parts) is the (m, d) of the part. WRITE alone: those of all parts are merged first.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * LENGTH
    length = min(LENGTH, V - start)
    # Rows of a V that the vectors of a load do not divide start anywhere: aligned is their middle, and what is
    # before and behind it, the edge, is loaded by itself.
    head = 0
    if V % VECTOR:
        head = min(length, ((VECTOR - (row * V + start) % VECTOR) % VECTOR).to(tl.int32))
    middle = tl.multiple_of((length - head) // VECTOR * VECTOR, VECTOR)
    base = tl.multiple_of(row * V + start + head, VECTOR)
    mask_base = mask_start(row, V, WHERE, MASK)
    if WHERE == "row":
        mask_base += start + head
    tile = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    lane = tl.arange(0, 2 * VECTOR)
    edge = tl.where(lane < head, -1 - lane, middle + lane - head)
    at_edge = lane < length - middle
    if REDUCE:
        m, d = _empty(WIDTH, OP)
        for at in range(0, middle, DEPTH * WIDTH):
            col = at + tile
            _, _, _, term = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, col < middle, OP, WHERE)
            m, d = _absorb(m, d, term, OP, 0)
        m, d = tl.reduce((m, d), 0, combine)
        if V % VECTOR:
            _, _, _, term = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, edge, at_edge, OP, WHERE)
            m, d = _absorb(m, d, term, OP, 0)
    else:
        slot = tl.arange(0, SLOTS)
        m = tl.load(parts_ptr + row * PARTS + slot, mask=slot < PARTS, other=float("-inf"))
        d = tl.load(parts_ptr + (ROWS + row) * PARTS + slot, mask=slot < PARTS, other=0.0)
        m, d = tl.reduce((m, d), 0, combine)
    if not WRITE:
        tl.store(out_ptr + row * PARTS + part, m)
        tl.store(out_ptr + (ROWS + row) * PARTS + part, d)
    elif OP == "logsumexp":
        _store_sums(out_ptr, row, row < ROWS, m, d, ROWS)
    else:
        c0, c1 = _constants(m, d, OP)
        steps = tl.cdiv(middle, DEPTH * WIDTH)
        for step in range(0, steps):  # backwards: the last read is what the L2 cache still has
            col = (steps - 1 - step) * (DEPTH * WIDTH) + tile
            _write(a_ptr, b_ptr, mask_ptr, out_ptr, base, mask_base, col, col < middle, c0, c1, OP, WHERE)
        if V % VECTOR:
            _write(a_ptr, b_ptr, mask_ptr, out_ptr, base, mask_base, edge, at_edge, c0, c1, OP, WHERE)
