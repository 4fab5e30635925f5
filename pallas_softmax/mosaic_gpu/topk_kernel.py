"""Softmax fused with top-k for rows that one CTA holds in shared memory: device memory is read once.

While the row arrives, each lane keeps its normalizer and its best key. The k-th best lane's key bounds the
k-th best element from below, and only a few more than k elements reach it; these candidates are collected
from shared memory and ranked by counting. When too many reach it (ties), the bound is made exact by bisection
over the keys, then over the positions.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.mosaic_gpu import candidates, launch, pieces
from pallas_softmax.online import Candidates, Normalizer


def topk_rows(x, temperature, k, *, interpret=None):
    """Winners of the rows of x (rows, vocab), with their logits, and the rows' normalizers (rows, 1).

    Args:
      x: logits.
      temperature: float32, (1,) or (rows,).
      k: from 1 to `launch.MAX_K`.
    """
    rows, vocab = x.shape
    walk = launch.topk_walk(vocab, x.dtype)
    per_row = temperature.size > 1

    def softmax_topk(
        x_gmem, scale_gmem,  # inputs
        values_gmem, indices_gmem, m_gmem, d_gmem,  # outputs
        smem, landed, slots, count, lanes,  # scratch
    ):  # fmt: skip
        row = pieces.Row(walk, interpret)
        r = lax.axis_index("row")
        scale = scale_gmem[r if per_row else 0]
        row.copy_in(x_gmem.at[r], smem, landed)

        def absorb(i, size, state):
            plgpu.barrier_wait(landed.at[i])
            lane, best = state
            logits = list(row.load(smem, i, size, fill=-jnp.inf))
            for key in row.keys(smem, i, size):
                best = jnp.maximum(best, key)
            return pieces.absorb(lane, logits, scale), best

        lane = Normalizer(row.full(-jnp.inf), row.full(0.0))
        lowest = pieces.lowest_key(x.dtype)
        lane, best = row.sweep(absorb, (lane, row.full(lowest, jnp.int32)))
        m, d = pieces.across(lane, scale=scale)
        m_gmem[r] = m
        d_gmem[r] = d

        def number(bound, end):
            """Number of selected keys."""

            def step(i, size, total):
                for (at, _), key in zip(row.blocks(i, size), row.keys(smem, i, size), strict=True):
                    chosen = candidates.selected(key, row.positions() + at.start, bound, end)
                    total += jnp.where(chosen, 1, 0)
                return total

            return jnp.sum(row.sweep(step, row.full(0, jnp.int32)))

        def exact(bound, n):
            """A bound and an end that at least k and at most CAPACITY keys pass; n passed the last bound."""
            bound, n = jnp.where(n < k, lowest, bound), jnp.where(n < k, vocab, n)
            bound, n = _bisect(lambda q: number(q, vocab), bound, jnp.max(best), n, k)
            cut, _ = _bisect(lambda q: number(bound, vocab - q), jnp.int32(0), jnp.int32(vocab), n, k)
            return bound, vocab - cut

        def collect(state):
            """Appends the selected keys, and counts them."""
            bound, end, n = state
            untried = n < 0
            bound, end = lax.cond(untried, lambda: (bound, end), lambda: exact(bound, n))
            candidates.clear(slots, count, interpret=interpret)

            def step(i, size, carry):
                keys = list(row.keys(smem, i, size))
                candidates.append(slots, count, keys, i * walk.step, bound, end, row.layout)
                return carry

            row.sweep(step, ())
            plgpu.commit_smem()  # a barrier
            return bound, end, count[0]

        bound = candidates.threshold(lanes, best, k, row.layout)
        _, _, n = lax.while_loop(
            lambda state: (state[2] < k) | (state[2] > candidates.CAPACITY),
            collect,
            (bound, jnp.int32(vocab), jnp.int32(-1)),
        )
        candidates.rank(slots, n, smem, values_gmem, indices_gmem, r, k, interpret=interpret)

    values, indices, m, d = pieces.kernel(
        softmax_topk,
        grid={"row": rows},
        out_type=[
            jax.ShapeDtypeStruct((rows, k), x.dtype),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((walk.padded,), x.dtype),
            plgpu.Barrier(num_barriers=walk.steps),
            *candidates.SCRATCH,
        ],
        approximate=launch.approximate(x.dtype, "topk"),
        interpret=interpret,
    )(x, 1 / temperature)
    return Candidates(values.astype(jnp.float32), indices), Normalizer(m[:, None], d[:, None])


def _bisect(number, low, high, n, k):
    """The largest q from low to high with number(q) >= k, or any with at most CAPACITY besides; number(q).

    number falls as q rises; n = number(low) >= k.
    """

    def open_(state):
        low, high, n = state
        return (low != high) & (n > candidates.CAPACITY)

    def halve(state):
        low, high, n = state
        gap = high - low  # as unsigned: it may exceed 2^31
        middle = low + lax.shift_right_logical(gap, jnp.int32(1)) + (gap & 1)
        n_middle = number(middle)
        enough = n_middle >= k
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, n_middle, n),
        )

    low, _, n = lax.while_loop(open_, halve, (low, high, n))
    return low, n
