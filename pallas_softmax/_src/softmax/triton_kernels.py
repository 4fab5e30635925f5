"""Triton kernels for softmax, log_softmax, logsumexp and their backwards.

OP is the name of the operation. A kernel takes two arrays (ROWS, V). A backward gets `a` = y and `b` = dy. A forward
gets x as both, and reads only `a`.

A kernel reduces each row to a normalizer (m, d). Each output element is computed from the input elements at its place
and the normalizer. A backward only sums its rows: d is the sum and m is 0, so that ⊕ adds. There are two kernels:

    rows_kernel   a program holds whole short rows in registers: load -> reduce -> write
    long_kernel   a program walks over a part of a row, and reads it again to write:
                  one part per row    reduce -> write, in one launch
                  several parts       launch 1: reduce -> write the part's (m, d);  launch 2: merge -> write

_src/triton/plan.py draws the plans and explains their constants.
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
    m = 0.0 if OP == "softmax_grad" or OP == "log_softmax_grad" else float("-inf")
    return tl.full([N], m, tl.float32), tl.zeros([N], tl.float32)


@triton.jit
def _absorb(m, d, term, OP: tl.constexpr, AXIS: tl.constexpr):
    """Reduces the terms along AXIS and adds them to the normalizers (m, d): ⊕ with one rescaling of d."""
    if OP == "softmax_grad" or OP == "log_softmax_grad":
        return m, d + tl.sum(term, AXIS)
    else:
        largest = larger(m, tl.reduce(term, AXIS, larger))
        s = shift(largest)
        return largest, d * exp(m - s) + tl.sum(exp(term - tl.expand_dims(s, AXIS)), AXIS)


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
def _store_logsumexp(out_ptr, row, inside, m, d, ROWS: tl.constexpr):
    """Stores logsumexp, m and d of rows into the three lines of out (3, ROWS)."""
    lse = tl.where(m == float("inf"), m, m + log_sum(d))  # with a logit of +inf, d is NaN
    tl.store(out_ptr + row, lse, mask=inside)
    tl.store(out_ptr + ROWS + row, m, mask=inside)
    tl.store(out_ptr + 2 * ROWS + row, d, mask=inside)


@triton.jit
def rows_kernel(
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
    # constants of the plan, a Block
    PROGRAM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes PROGRAM_ROWS whole rows per program, each in WIDTH elements of registers. The grid covers all ROWS."""
    row = tl.program_id(0) * PROGRAM_ROWS + tl.arange(0, PROGRAM_ROWS)
    col = tl.arange(0, WIDTH)[None, :]
    inside = (row < ROWS)[:, None] & (col < V)
    base = row.to(tl.int64)[:, None] * V
    mask_base = mask_start(row.to(tl.int64), V, WHERE, MASK)[:, None]
    a, b, keep, term = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
    if OP == "softmax":
        # The exponentials replace the logits in registers, so that they are computed only once.
        e = exp(term - shift(tl.reduce(term, 1, larger))[:, None])
        y = e * tl.div_rn(1.0, tl.sum(e, 1))[:, None]
        if WHERE is not None:
            y = tl.where(keep, y, 0.0)
        tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        m, d = _empty(PROGRAM_ROWS, OP)
        m, d = _absorb(m, d, term, OP, 1)
        if OP == "logsumexp":
            _store_logsumexp(out_ptr, row, row < ROWS, m, d, ROWS)
        else:
            c0, c1 = _row_constants(m, d, OP)
            y = _value(a, b, keep, c0[:, None], c1[:, None], OP, WHERE)
            tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write(
    a_ptr, b_ptr, mask_ptr, out_ptr, base, mask_base, col, inside, c0, c1, OP: tl.constexpr, WHERE: tl.constexpr
):
    """Loads elements a second time, and stores their outputs."""
    a, b, keep, _ = _load(a_ptr, b_ptr, mask_ptr, base, mask_base, col, inside, OP, WHERE)
    y = _value(a, b, keep, c0, c1, OP, WHERE)
    tl.store(out_ptr + base + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_kernel(
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
    # constants of the plan, a Long
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,  # PARTS rounded up to a power of two
    LENGTH: tl.constexpr,
    VECTOR: tl.constexpr,  # number of elements in 16 bytes
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes a part of LENGTH elements of a row in steps of DEPTH x WIDTH. The grid is (ROWS, PARTS).

    REDUCE and WRITE   the row is a single part: reads it to reduce it, then again to write the outputs
    REDUCE             writes the normalizer of the part
    WRITE              merges the normalizers of the row's parts (in each program), then writes the outputs
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = part * LENGTH
    length = min(LENGTH, V - start)

    # plan.py draws head, middle and tail. The edge has the head in its first `head` places, and the tail after them.
    # Columns count from the start of the middle.
    head = 0
    if V % VECTOR:
        head = min(length, ((VECTOR - (row * V + start) % VECTOR) % VECTOR).to(tl.int32))
    middle = tl.multiple_of((length - head) // VECTOR * VECTOR, VECTOR)
    base = tl.multiple_of(row * V + start + head, VECTOR)
    mask_base = mask_start(row, V, WHERE, MASK)
    if WHERE == "row":
        mask_base += start + head
    tile = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = tl.arange(0, 2 * VECTOR)
    edge = tl.where(place < head, -1 - place, middle + place - head)
    at_edge = place < length - middle

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
        m = tl.load(normalizers_ptr + row * PARTS + slot, mask=slot < PARTS, other=float("-inf"))
        d = tl.load(normalizers_ptr + (ROWS + row) * PARTS + slot, mask=slot < PARTS, other=0.0)
        m, d = tl.reduce((m, d), 0, combine)

    if not WRITE:
        tl.store(out_ptr + row * PARTS + part, m)
        tl.store(out_ptr + (ROWS + row) * PARTS + part, d)
    elif OP == "logsumexp":
        _store_logsumexp(out_ptr, row, row < ROWS, m, d, ROWS)
    else:
        c0, c1 = _row_constants(m, d, OP)
        steps = tl.cdiv(middle, DEPTH * WIDTH)
        for step in range(0, steps):
            # In reverse order, since the L2 cache still holds what was read last.
            col = (steps - 1 - step) * (DEPTH * WIDTH) + tile
            _write(a_ptr, b_ptr, mask_ptr, out_ptr, base, mask_base, col, col < middle, c0, c1, OP, WHERE)
        if V % VECTOR:
            _write(a_ptr, b_ptr, mask_ptr, out_ptr, base, mask_base, edge, at_edge, c0, c1, OP, WHERE)
