"""The seven algorithms of the paper's benchmark, for the record: `softmax` and `fused_topk` are our answer.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), sections 2 to 5. The
kernels run one thread block a row, as the paper's do, and stream the row from device memory once for each
access that the paper counts: between two sweeps no register or shared memory keeps any of it. They are forward
only, take float32 of shape (rows, V), and mean what the printed algorithms mean:

- naive softmax is NaN where a logit is above 88.7, or all are so low that the sum is 0; if only the sum overflows, 0;
- top-k compares floats: of ties the lowest index is first, -0 and 0 among them; a NaN is never chosen; the index
  is -1 where fewer than k are above -inf. `fused_topk` has lax.top_k's total order;
- unfused, top-k sees probabilities: those that have rounded to the same number, or to 0, are ties.

A row with a NaN or +inf has only NaN for probabilities, and so has one of nothing but -inf.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.arguments import static_int
from pallas_softmax.implementations.mosaic_gpu.device import memory, staging
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.online import Candidates, Normalizer

MAX_K = 128  # a thread keeps its k best in registers, of which it has 255; at 128 a few of them spill


# --- Kernels ------------------------------------------------------------------------------------------


class _Row:
    """The row of this thread block in an array (rows, V) in device memory, in blocks of an element a thread."""

    def __init__(self, gmem, interpret, loads):
        self.gmem, self.interpret = gmem, interpret
        self.index = lax.axis_index("row")
        self.vocab = gmem.shape[1]
        self.loads = min(loads, pl.cdiv(self.vocab, WARPGROUP))

    def full(self, value, dtype=jnp.float32):
        """A block of one value."""
        return staging.laid_out(jnp.full((WARPGROUP,), value, dtype), self.interpret)

    def positions(self, start):
        """The block of the positions from `start` on."""
        return start + staging.laid_out(lax.broadcasted_iota(jnp.int32, (WARPGROUP,), 0), self.interpret)

    def sweep(self, step, state):
        """state = step(starts, blocks, state) along the row: one access. After its end the blocks are -inf."""

        def body(i, state):
            starts = [(i * self.loads + j) * WARPGROUP for j in range(self.loads)]
            load = functools.partial(memory.load_block, self.gmem, row=self.index, interpret=self.interpret)
            blocks = [load(start=start, held=self.vocab - start, fill=-jnp.inf) for start in starts]
            return step(starts, blocks, state)

        return lax.fori_loop(0, pl.cdiv(self.vocab, self.loads * WARPGROUP), body, state)

    def maximum(self):
        """Of the row; one access."""
        lane = self.sweep(lambda _, blocks, m: functools.reduce(jnp.maximum, blocks, m), self.full(-jnp.inf))
        return jnp.max(lane)

    def total(self, term):
        """The sum of term(x) over the row; one access."""
        lane = self.sweep(lambda _, blocks, d: d + online.tree_sum(map(term, blocks)), self.full(0.0))
        return jnp.sum(lane)

    def normalizer(self):
        """(m, d), online (algorithm 3, lines 1 to 6); one access."""
        return online.across(self.sweep(lambda _, blocks, lane: online.absorb(lane, blocks), self.empty()))

    def empty(self):
        """The normalizers of threads that have seen nothing."""
        return Normalizer(self.full(-jnp.inf), self.full(0.0))

    def write(self, value, gmem):
        """Writes value(x) to the row of `gmem`; two accesses, for x is read once more."""

        def step(starts, blocks, state):
            for start, x in zip(starts, blocks, strict=True):
                held = self.vocab - start
                memory.store_block(
                    gmem, row=self.index, start=start, block=value(x), held=held, interpret=self.interpret
                )
            return state

        self.sweep(step, jnp.int32(0))


def _naive(x: _Row, y_gmem):
    """Algorithm 1."""
    scale = 1 / x.total(jnp.exp)
    x.write(lambda x: jnp.exp(x) * scale, y_gmem)


def _safe(x: _Row, y_gmem):
    """Algorithm 2."""
    m = x.maximum()
    scale = 1 / x.total(lambda x: jnp.exp(x - m))
    x.write(lambda x: jnp.exp(x - m) * scale, y_gmem)


def _online(x: _Row, y_gmem):
    """Algorithm 3."""
    m, d = x.normalizer()
    scale = 1 / d
    x.write(lambda x: jnp.exp(x - m) * scale, y_gmem)


class _Best(NamedTuple):
    """The k best that each thread has seen, in order: k blocks of logits, and of their indices."""

    values: list[jax.Array]
    indices: list[jax.Array]


def _nothing(x: _Row, k: int) -> _Best:
    """Of no logits (algorithm 4, lines 3 and 4)."""
    return _Best([x.full(-jnp.inf)] * k, [x.full(-1, jnp.int32)] * k)


def _insert(x: _Row, starts, blocks, best: _Best) -> _Best:
    """With the elements of `blocks` (algorithm 4, lines 8 to 15)."""
    values, indices = map(list, best)
    for start, new in zip(starts, blocks, strict=True):
        beaten = [new > value for value in values]
        entries = (values, new), (indices, x.positions(start))
        for i in reversed(range(len(values))):  # from the last on: it is lost, and its register is free
            for kept, entry in entries:
                above = jnp.where(beaten[i - 1], kept[i - 1], entry) if i else entry
                kept[i] = jnp.where(beaten[i], above, kept[i])
    return _Best(values, indices)


def _rank(x: _Row, best: _Best, value, values_gmem, indices_gmem):
    """Writes the k best of all threads, one after another: value(logit) and index."""

    def step(r, best):
        first, its_index = best.values[0], best.indices[0]
        top = jnp.max(first)
        index = jnp.min(jnp.where(first == top, its_index, x.vocab))
        values_gmem[x.index, r] = value(top)
        indices_gmem[x.index, r] = index

        def left(blocks, last):
            return [jnp.where(its_index == index, *pair) for pair in zip([*blocks[1:], last], blocks)]

        return _Best(left(best.values, x.full(-jnp.inf)), left(best.indices, x.full(-1, jnp.int32)))

    lax.fori_loop(0, len(best.values), step, best)


def _topk(x: _Row, values_gmem, indices_gmem):
    """Of the row itself."""
    k = values_gmem.shape[1]
    best = x.sweep(functools.partial(_insert, x), _nothing(x, k))
    _rank(x, best, lambda y: y, values_gmem, indices_gmem)


def _safe_fused(x: _Row, values_gmem, indices_gmem):
    m = x.maximum()

    def step(starts, blocks, state):
        d, best = state
        d = d + online.tree_sum(jnp.exp(block - m) for block in blocks)
        return d, _insert(x, starts, blocks, best)

    d, best = x.sweep(step, (x.full(0.0), _nothing(x, values_gmem.shape[1])))
    scale = 1 / jnp.sum(d)
    _rank(x, best, lambda u: jnp.exp(u - m) * scale, values_gmem, indices_gmem)


def _online_fused(x: _Row, values_gmem, indices_gmem):
    """Algorithm 4."""

    def step(starts, blocks, state):
        lane, best = state
        return online.absorb(lane, blocks), _insert(x, starts, blocks, best)

    lane, best = x.sweep(step, (x.empty(), _nothing(x, values_gmem.shape[1])))
    m, d = online.across(lane)
    scale = 1 / d
    _rank(x, best, lambda u: jnp.exp(u - m) * scale, values_gmem, indices_gmem)


def _launch(algorithm, x, outputs, k, interpret):
    """The kernel `algorithm` on the rows of x, with exp as the paper has it (__expf)."""

    def body(x_gmem, *out_gmem):
        algorithm(_Row(x_gmem, interpret, _loads(len(x), k)), *out_gmem)

    body.__name__ = f"paper{algorithm.__name__}"
    kernel = gpu_kernel(body, grid={"row": len(x)}, out_type=outputs, approximate=True, interpret=interpret)
    return kernel(x)


def _loads(rows: int, k: int) -> int:
    """How many loads of a thread are under way together.

    Few rows are faster the more there are; with 16 they are as fast as the paper's own program, whose blocks
    have 256 threads where V is large. Many rows would be faster, too, but for the wrong reason: each thread
    block needs more registers, fewer run at once, and a cache holds their rows until the next sweep.
    """
    return min(8 if rows >= 1024 else 16, max(1, 80 // k))


def _softmax(algorithm, x, *, interpret=None):
    x = _rows(x)
    return _launch(algorithm, x, jax.ShapeDtypeStruct(x.shape, x.dtype), 1, interpret)


def _winners(algorithm, x, k, *, interpret=None):
    x, k = _rows(x), _static_k(x, k)
    outputs = [jax.ShapeDtypeStruct((len(x), k), dtype) for dtype in (jnp.float32, jnp.int32)]
    return Candidates(*_launch(algorithm, x, outputs, k, interpret))


def _safe_unfused(x, k, *, interpret=None):
    return _winners(_topk, _softmax(_safe, x, interpret=interpret), k, interpret=interpret)


def _rows(x):
    x = jnp.asarray(x)
    if x.ndim != 2 or x.size == 0 or x.dtype != jnp.float32:
        raise ValueError(f"x must be float32 of shape (rows, V), neither of them 0; got {x.dtype}{x.shape}")
    return x


def _static_k(x, k) -> int:
    k = static_int("paper", "k", k)
    if not 1 <= k <= min(MAX_K, x.shape[1]):
        raise ValueError(f"k must be from 1 to {MAX_K}, and at most V={x.shape[1]}; got {k}")
    return k


# --- The same in jax.numpy ----------------------------------------------------------------------------


def _plain_naive(x):
    e = jnp.exp(x)
    return e / jnp.sum(e, -1, keepdims=True)


def _plain_safe(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def _plain_online(x):
    m, d = online.reduce(x)
    return jnp.exp(x - m) / d


def _plain_topk(x, k):
    return Candidates(*lax.top_k(x, k))


def _plain_safe_unfused(x, k):
    return _plain_topk(lax.optimization_barrier(_plain_safe(x)), k)


def _plain_safe_fused(x, k):
    m = jnp.max(x, -1, keepdims=True)
    return _plain_fused(x, k, Normalizer(m, jnp.sum(jnp.exp(x - m), -1, keepdims=True)))


def _plain_online_fused(x, k):
    return _plain_fused(x, k, online.reduce(x))


def _plain_fused(x, k, normalizer):
    logits, indices = lax.top_k(x, k)
    return Candidates(jnp.exp(logits - normalizer.m) / normalizer.d, indices)


# --- All seven ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One of the seven.

    Attributes:
      title: as in the legends of the paper's figures.
      accesses: to device memory for each logit, as the paper counts them.
      kernel: x -> y, or (x, k) -> (values, indices); a Pallas kernel, or two, for Hopper and newer GPUs. Takes
        `interpret`, as `pallas_call` does.
      plain: the same algorithm in jax.numpy, for any device; XLA decides on its accesses, and its top-k is
        lax.top_k.
    """

    title: str
    accesses: int
    kernel: Callable[..., Any]
    plain: Callable[..., Any]


SOFTMAX = {
    "naive": Algorithm("Naive Softmax", 3, functools.partial(_softmax, _naive), _plain_naive),
    "safe": Algorithm("Safe Softmax", 4, functools.partial(_softmax, _safe), _plain_safe),
    "online": Algorithm("Online Softmax", 3, functools.partial(_softmax, _online), _plain_online),
}
TOPK = {
    "topk": Algorithm("TopK", 1, functools.partial(_winners, _topk), _plain_topk),
    "safe_unfused": Algorithm("Safe Softmax + TopK unfused", 5, _safe_unfused, _plain_safe_unfused),
    "safe_fused": Algorithm(
        "Safe Softmax + TopK fused", 2, functools.partial(_winners, _safe_fused), _plain_safe_fused
    ),
    "online_fused": Algorithm(
        "Online Softmax + TopK fused", 1, functools.partial(_winners, _online_fused), _plain_online_fused
    ),
}
