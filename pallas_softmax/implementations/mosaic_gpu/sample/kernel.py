"""A draw from each row of logits, which are read once from device memory.

A row lies in the shared memory of a cluster of CTAs, a part in each:

    arrive       the part is copied to shared memory; the largest element of every 16 of a thread, and their mass
                 relative to it; then the largest of the row
    threshold    of top_k, then of top_p: the last entry that is kept, found as `threshold.py` tells
    draw         the kept mass of every 16 elements of a thread, of the CTA, of the row; then the way back from
                 u times that of the row to a CTA, a group, a thread and an element

Windows, blocks and steps are drawn in `topk/plan.py`.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import blocks
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import aligned_view
from pallas_softmax.implementations.mosaic_gpu.sample import arrival
from pallas_softmax.implementations.mosaic_gpu.sample.draw import Place, Request, draw
from pallas_softmax.implementations.mosaic_gpu.sample.plan import Scratch
from pallas_softmax.implementations.mosaic_gpu.topk import selection
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window
from pallas_softmax.implementations.mosaic_gpu.topk.window_kernel import (
    Part,
    mask_of_step,
    part_of,
    start_copies,
)

_LOG2_E = float(1 / np.log(2))
_TINY = float(np.finfo(np.float32).tiny)  # the least temperature, in place of 0


def sample_rows(x, mask: Mask | None, request: Request, window: Window, *, interpret=None) -> list[jax.Array]:
    """Draws from each row.

    Args:
      x: (rows, vocab), the logits.
      mask: which elements count, or None.
      request: numbers for each row, (rows,), or (1,) where all have the same.
      window: how a row lies over CTAs and in shared memory.
      interpret: as for `pallas_call`.

    Returns:
      Arrays (rows,): index, log probability, and log of the kept share.
    """
    rows, vocab = x.shape
    view = aligned_view(rows, vocab, window.vec)

    def sample(x_gmem, request_gmem, mask_gmem, *out, landed, scratch, x_smem):
        part = part_of(window, view, rows, x_gmem, mask, mask_gmem)
        start_copies(window, part, x_smem, landed)
        of_row = Request(*(ref[part.row if ref.shape[0] > 1 else 0] for ref in request_gmem))
        selection.fill_edges(
            window,
            part.x_gmem,
            part.first,
            x_smem,
            part.extent,
            part.mask,
            infinite=True,
            interpret=interpret,
        )
        arrival.meet(x_smem, interpret=interpret)
        scale = _LOG2_E / jnp.maximum(of_row.temperature, _TINY)
        m = _arrive(window, x_smem, scratch, landed, part, scale, interpret)
        arrival.meet(x_smem, interpret=interpret)
        where = Place(*(jnp.int32(i) for i in (part.row, part.index, part.extent.origin)))
        draw(window, x_smem, scratch, m, scale, of_row, where, out, interpret=interpret)

    results = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    return gpu_kernel(
        sample,
        grid={"row": rows, "part": window.count} if window.count > 1 else {"row": rows},
        cluster=window.count,
        out_type=results,
        scratch_types={
            "landed": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "scratch": plgpu.SMEM((Scratch(window).words,), jnp.int32),
            "x_smem": plgpu.SMEM((window.size,), x.dtype),
        },
        approximate=True,
        interpret=interpret,
    )(x.reshape(view), request, None if mask is None else mask.array)


def _arrive(window: Window, x_smem, scratch, landed, part: Part, scale, interpret):
    """Waits for the part; the largest element of each thread (128,), NaN if there is one."""

    def absorb(i, count, copied, carry):
        m, keep = carry
        next_keep = mask_of_step(window, part, i + 1, interpret)  # its loads are under way meanwhile
        if copied:
            plgpu.barrier_wait(landed.at[i])
        if part.mask is not None:
            selection.mask_step(window, x_smem, i, [*keep[:count]], infinite=True, interpret=interpret)
        return arrival.absorb_step(
            window, x_smem, scratch, i, count, m, scale, interpret=interpret
        ), next_keep

    carry: Any = blocks.filled(-jnp.inf, interpret=interpret), mask_of_step(window, part, 0, interpret)
    if window.full:
        full_step = functools.partial(absorb, count=window.step_blocks, copied=True)
        carry = lax.fori_loop(0, window.full, lambda i, carry: full_step(i, carry=carry), carry)
    if window.rest:
        carry = absorb(jnp.int32(window.full), window.rest, len(window.copies()) > window.full, carry)
    return carry[0]
