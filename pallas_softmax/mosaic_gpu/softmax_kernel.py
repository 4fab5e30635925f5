"""Softmax of rows that one CTA holds in shared memory: device memory is read once and written once."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.mosaic_gpu import launch, pieces
from pallas_softmax.online import Normalizer, shift


def softmax_rows(x, *, interpret=None):
    """softmax over the rows of x (rows, vocab), by the online normalizer (paper, algorithm 3)."""
    rows, vocab = x.shape
    walk = launch.walk(vocab, x.dtype)

    def softmax_forward(x_gmem, y_gmem, smem, landed):
        row = pieces.Row(walk, interpret)
        r = lax.axis_index("row")
        row.copy_in(x_gmem.at[r], smem, landed)

        def absorb(i, size, lane):
            plgpu.barrier_wait(landed.at[i])
            return pieces.absorb(lane, list(row.load(smem, i, size, fill=-jnp.inf)))

        lane = Normalizer(row.full(-jnp.inf), row.full(0.0))
        m, d = pieces.across_lanes(row.sweep(absorb, lane))
        s, scale = shift(m), 1 / d

        def probabilities(i, size):
            return (jnp.exp(logits - s) * scale for logits in row.load(smem, i, size, fill=-jnp.inf))

        row.write(probabilities, smem, y_gmem.at[r])

    return pieces.kernel(
        softmax_forward,
        rows=rows,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM((walk.padded,), x.dtype), plgpu.Barrier(num_barriers=walk.steps)],
        approximate=launch.approximate(x.dtype),
        interpret=interpret,
    )(x)


def softmax_grad_rows(y, dy, *, interpret=None):
    """dx = y (dy - sum(y dy)) over the rows of y and dy (rows, vocab)."""
    rows, vocab = y.shape
    walk = launch.walk(vocab, y.dtype)

    def softmax_backward(y_gmem, dy_gmem, dx_gmem, y_smem, dy_smem, y_landed, dy_landed):
        row = pieces.Row(walk, interpret)
        r = lax.axis_index("row")
        row.copy_in(y_gmem.at[r], y_smem, y_landed)
        row.copy_in(dy_gmem.at[r], dy_smem, dy_landed)

        def both(i, size):
            y, dy = (row.load(smem, i, size, fill=0.0) for smem in (y_smem, dy_smem))
            return zip(y, dy, strict=True)

        def dot(i, size, lane):
            plgpu.barrier_wait(y_landed.at[i])
            plgpu.barrier_wait(dy_landed.at[i])
            return lane + pieces.tree_sum(p * g for p, g in both(i, size))

        total = jnp.sum(row.sweep(dot, row.full(0.0)))

        def dx(i, size):
            return (p * (g - total) for p, g in both(i, size))

        row.write(dx, dy_smem, dx_gmem.at[r])

    return pieces.kernel(
        softmax_backward,
        rows=rows,
        out_type=jax.ShapeDtypeStruct(y.shape, y.dtype),
        scratch_types=[plgpu.SMEM((walk.padded,), y.dtype)] * 2
        + [plgpu.Barrier(num_barriers=walk.steps)] * 2,
        interpret=interpret,
    )(y, dy)
