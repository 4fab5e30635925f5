"""The kernel of `sample`, which draws from each row of logits and reads them once from device memory.

A row lies in the shared memory of a cluster of CTAs, a part in each. What it goes through, for u = 0.7, top_k = 4 and a
temperature such that weights are powers of two:

    index                 0     1     2     3  |  4     5     6     7       two CTAs, with four elements each
    x                     3     5     0     4  |  5     1     4     4
                                                                            arrive      the maximum of the row is 5
    weight, 2^(x - 5)    .25    1   .03    .5  |  1   .06    .5    .5                   their mass is 3.84
                                                                            threshold   the 4th is a 4, of which
    kept                  -     1     -    .5  |  1     -    .5     -                   two are kept
    kept mass                1.5               |        1.5                 draw        u * 3 = 2.1: the second CTA,
    up to here                  1         1.5  |  2.5                                   where 2.1 is exceeded first,
    drawn                                         ^                                     at index 4

    arrive       each part is copied to shared memory (`arrival`); each thread keeps the largest element of every 16,
                 its groups, and their mass relative to it; then the cluster finds the row's maximum
    threshold    of top_k, then of top_p: the last entry that is kept (`threshold_ptx`)
    draw         the kept mass of each group, of the CTA, of the row (`kept_ptx`); then the way back from u times that
                 of the row to a CTA, a group, a thread and an element (`inverse_ptx`)

All stages after the arrival are one piece of inline PTX, whose table of contents stands in `draw_ptx`. Windows, blocks
and steps are drawn in `topk/plan.py`.
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
      x: the logits, (rows, vocab).
      mask: which elements count, or None.
      request: what is asked of each row: arrays (rows,), or (1,) where all rows have the same number.
      window: how a row lies over CTAs and in shared memory.
      interpret: as for `pallas_call`.

    Returns:
      Arrays (rows,): the index drawn, its log probability, and the log of the share of the mass that is kept.
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
    """Waits for the part, step by step; returns the largest element of each thread, (128,), NaN where it has one."""

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
