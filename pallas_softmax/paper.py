"""The seven algorithms of the paper's benchmark, for the record: `softmax` and `fused_topk` are our answer to them.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), sections 2 to 5. Like
the paper's kernels, these run one thread block (CTA) for each row. They read the row from device memory once for each
access that the paper counts: no register or shared memory keeps any of it between two sweeps. They are forward only,
and take float32 of shape (rows, V). Their results follow the printed algorithms:

- Naive softmax is NaN if a logit is above 88.7, or if all logits are so low that the sum is 0. If only the sum
  overflows, the result is 0.
- Top-k compares floats. Among ties the lowest index comes first; -0 and 0 tie. A NaN is never chosen. If fewer than k
  logits are above -inf, the other indices are -1. (`fused_topk` has the total order of lax.top_k.)
- If softmax and top-k are not fused, top-k compares probabilities. Probabilities that round to the same number, or to
  0, tie.

All probabilities of a row with a NaN or +inf are NaN. The same holds for a row with only -inf.

Examples:
  >>> from pallas_softmax import paper
  >>> paper.SOFTMAX["online"].plain(jnp.array([[0.0, 1.0, 2.0]]))
  Array([[0.09 , 0.245, 0.665]], dtype=float32)
"""

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.arguments import static_int
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax.online import Candidates

MAX_K = 128  # winners that a thread keeps in its 255 registers; at 128 a few of them spill
MANY_ROWS = 1024  # from this many rows on, a thread has 8 loads in flight instead of 16
WINNERS_TIMES_LOADS = 80  # the most winners of a thread times its loads in flight, since both need registers


# --- Kernels ------------------------------------------------------------------------------------------


class _Row:
    """The row of this thread block in an array (rows, V) in device memory.

    The row is read in blocks of 128 elements, one for each thread. Beyond its end, blocks hold -inf.
    """

    def __init__(self, gmem, loads: int):
        self.gmem = gmem
        self.index = lax.axis_index("row")
        self.vocab = gmem.shape[1]
        self.loads = min(loads, pl.cdiv(self.vocab, WARPGROUP))  # number of blocks in flight at once

    def sweep(self, step, state):
        """Calls state = step(starts, x_blocks, state) along the row, with the start of each block: one access."""

        def body(i, state):
            starts = [(i * self.loads + j) * WARPGROUP for j in range(self.loads)]
            load = partial(blocks.load_from_row, self.gmem, row=self.index)
            x_blocks = [load(start=start, held=self.vocab - start, fill=-jnp.inf) for start in starts]
            return step(starts, x_blocks, state)

        return lax.fori_loop(0, pl.cdiv(self.vocab, self.loads * WARPGROUP), body, state)

    def maximum(self):
        """Returns the maximum of the row: one access."""
        lane = self.sweep(lambda _, x, m: reduce(jnp.maximum, x, m), blocks.filled(-jnp.inf))
        return jnp.max(lane)

    def total(self, term):
        """Returns the sum of term(x) over the row: one access."""
        lane = self.sweep(lambda _, x, d: d + normalizers.tree_sum(map(term, x)), blocks.filled(0.0))
        return jnp.sum(lane)

    def write(self, value, gmem):
        """Writes value(x) to the row of `gmem`: two accesses, since x is read again."""

        def step(starts, x_blocks, state):
            for start, x in zip(starts, x_blocks, strict=True):
                blocks.store_to_row(gmem, row=self.index, start=start, held=self.vocab - start, block=value(x))
            return state

        self.sweep(step, jnp.int32(0))


def _no_logits() -> Normalizer:
    """Returns the normalizers of threads that have seen nothing (algorithm 3, lines 1 and 2)."""
    return Normalizer(blocks.filled(-jnp.inf), blocks.filled(0.0))


def _probability(m, d):
    """Returns the function logit -> probability in the row with this normalizer."""
    inverse = 1 / d
    return lambda x: jnp.exp(x - m) * inverse


def _naive(x: _Row, y_gmem):
    """Algorithm 1: naive softmax."""
    inverse = 1 / x.total(jnp.exp)
    x.write(lambda x: jnp.exp(x) * inverse, y_gmem)


def _safe(x: _Row, y_gmem):
    """Algorithm 2: safe softmax, which subtracts the maximum."""
    m = x.maximum()
    x.write(_probability(m, x.total(lambda x: jnp.exp(x - m))), y_gmem)


def _online(x: _Row, y_gmem):
    """Algorithm 3: safe softmax with an online normalizer."""
    lane = x.sweep(lambda _, x, lane: normalizers.add_logits(lane, x), _no_logits())  # lines 3 to 6
    x.write(_probability(*normalizers.combine_lanes(lane)), y_gmem)


# The k best that each thread has seen, in order: k blocks of logits, and of their indices.
_Best = tuple[list[jax.Array], list[jax.Array]]


def _no_winners(k: int) -> _Best:
    """Returns the k best before any logit is seen (algorithm 4, lines 3 and 4)."""
    return [blocks.filled(-jnp.inf)] * k, [blocks.filled(-1, dtype=jnp.int32)] * k


def _insert(starts, x_blocks, best: _Best) -> _Best:
    """Inserts the elements of the blocks into the k best of each thread (algorithm 4, lines 8 to 15)."""
    values, indices = map(list, best)
    for start, new in zip(starts, x_blocks, strict=True):
        beaten = [new > value for value in values]
        entries = (values, new), (indices, start + blocks.positions())
        for i in reversed(range(len(values))):  # the last one drops out first, and frees its register
            for kept, entry in entries:
                above = jnp.where(beaten[i - 1], kept[i - 1], entry) if i else entry
                kept[i] = jnp.where(beaten[i], above, kept[i])
    return values, indices


def _rank(x: _Row, best: _Best, value, values_gmem, indices_gmem):
    """Writes the k best of all threads in order: value(logit), and the index."""

    def step(r, best):
        values, indices = best
        first, its_index = values[0], indices[0]
        top = jnp.max(first)
        index = jnp.min(jnp.where(first == top, its_index, x.vocab))
        values_gmem[x.index, r] = value(top)
        indices_gmem[x.index, r] = index

        def without_winner(entries, last):
            moved_up = [*entries[1:], blocks.filled(last, dtype=entries[0].dtype)]
            return [jnp.where(its_index == index, *pair) for pair in zip(moved_up, entries)]

        return without_winner(values, -jnp.inf), without_winner(indices, -1)

    lax.fori_loop(0, len(best[0]), step, best)


def _topk(x: _Row, values_gmem, indices_gmem):
    """Top-k of the row itself, without a softmax."""
    best = x.sweep(_insert, _no_winners(values_gmem.shape[1]))
    _rank(x, best, lambda y: y, values_gmem, indices_gmem)


def _safe_fused(x: _Row, values_gmem, indices_gmem):
    """Top-k fused with the second sweep of safe softmax."""
    m = x.maximum()

    def step(starts, x_blocks, state):
        d, best = state
        d = d + normalizers.tree_sum(jnp.exp(block - m) for block in x_blocks)
        return d, _insert(starts, x_blocks, best)

    d, best = x.sweep(step, (blocks.filled(0.0), _no_winners(values_gmem.shape[1])))
    _rank(x, best, _probability(m, jnp.sum(d)), values_gmem, indices_gmem)


def _online_fused(x: _Row, values_gmem, indices_gmem):
    """Algorithm 4: top-k fused with the online normalizer, in one sweep."""

    def step(starts, x_blocks, state):
        lane, best = state
        return normalizers.add_logits(lane, x_blocks), _insert(starts, x_blocks, best)

    lane, best = x.sweep(step, (_no_logits(), _no_winners(values_gmem.shape[1])))
    _rank(x, best, _probability(*normalizers.combine_lanes(lane)), values_gmem, indices_gmem)


def _launch(algorithm, x, outputs, k):
    """Runs algorithm(row, *outputs) on the rows of x, with the paper's fast exp (__expf of CUDA)."""

    def body(x_gmem, *out_gmem):
        algorithm(_Row(x_gmem, _loads(len(x), k)), *out_gmem)

    name = f"paper{algorithm.__name__}"
    return gpu_kernel(body, grid={"row": len(x)}, out_type=outputs, name=name)(x)


def _loads(rows: int, k: int) -> int:
    """Returns the number of blocks in flight at once.

    With few rows, more loads are faster. With 16 the kernels are as fast as the paper's own program, which uses thread
    blocks of 256 threads for large V. Many rows would also be faster with 16, though for the wrong reason: each thread
    block needs more registers, fewer thread blocks run at once, and a cache holds their rows until the next sweep.
    """
    loads = 8 if rows >= MANY_ROWS else 16
    return min(loads, max(1, WINNERS_TIMES_LOADS // k))


def _softmax(algorithm, x):
    x = _rows(x)
    return _launch(algorithm, x, jax.ShapeDtypeStruct(x.shape, x.dtype), 1)


def _winners(algorithm, x, k):
    x, k = _rows(x), _static_k(x, k)
    outputs = [jax.ShapeDtypeStruct((len(x), k), dtype) for dtype in (jnp.float32, jnp.int32)]
    return Candidates(*_launch(algorithm, x, outputs, k))


def _safe_unfused(x, k):
    return _winners(_topk, _softmax(_safe, x), k)


def _rows(x) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim != 2 or x.size == 0 or x.dtype != jnp.float32:
        raise ValueError(f"x must be float32 of shape (rows, V), both at least 1; got {x.dtype}{x.shape}")
    return x


def _static_k(x, k) -> int:
    k = static_int("paper", "k", k)
    if not 1 <= k <= min(MAX_K, x.shape[1]):
        raise ValueError(f"k must be from 1 to {MAX_K}, and at most V={x.shape[1]}; got {k}")
    return k


# --- The algorithms in jax.numpy ----------------------------------------------------------------------


def _naive_normalizer(x):  # m is 0: nothing is subtracted
    return 0, jnp.sum(jnp.exp(x), -1, keepdims=True)


def _safe_normalizer(x):
    m = jnp.max(x, -1, keepdims=True)
    return m, jnp.sum(jnp.exp(x - m), -1, keepdims=True)


def _plain_softmax(normalizer, x):
    m, d = normalizer(x)
    return jnp.exp(x - m) / d


def _plain_topk(x, k):
    return Candidates(*lax.top_k(x, k))


def _plain_safe_unfused(x, k):
    return _plain_topk(lax.optimization_barrier(_plain_softmax(_safe_normalizer, x)), k)


def _plain_fused(normalizer, x, k):
    m, d = normalizer(x)
    logits, indices = lax.top_k(x, k)
    return Candidates(jnp.exp(logits - m) / d, indices)


# --- Tables of the algorithms -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One of the seven algorithms.

    Attributes:
      title: its name in the legends of the paper's figures.
      accesses: number of accesses to device memory for each logit, as the paper counts them.
      kernel: x -> y, or (x, k) -> `Candidates`: one or two Pallas kernels, for Hopper and newer GPUs.
      plain: the same algorithm in jax.numpy, for any device. XLA decides its accesses; its top-k is lax.top_k.
    """

    title: str
    accesses: int
    kernel: Callable[..., Any]
    plain: Callable[..., Any]


SOFTMAX = {
    "naive": Algorithm("Naive Softmax", 3, partial(_softmax, _naive), partial(_plain_softmax, _naive_normalizer)),
    "safe": Algorithm("Safe Softmax", 4, partial(_softmax, _safe), partial(_plain_softmax, _safe_normalizer)),
    "online": Algorithm("Online Softmax", 3, partial(_softmax, _online), partial(_plain_softmax, normalizers.reduce)),
}
TOPK = {
    "topk": Algorithm("TopK", 1, partial(_winners, _topk), _plain_topk),
    "safe_unfused": Algorithm("Safe Softmax + TopK unfused", 5, _safe_unfused, _plain_safe_unfused),
    "safe_fused": Algorithm(
        "Safe Softmax + TopK fused", 2, partial(_winners, _safe_fused), partial(_plain_fused, _safe_normalizer)
    ),
    "online_fused": Algorithm(
        "Online Softmax + TopK fused", 1, partial(_winners, _online_fused), partial(_plain_fused, normalizers.reduce)
    ),
}
