"""The kernel of `sample`, which draws from each row of logits and reads them once from device memory.

A row lies in the shared memory of a cluster of CTAs, a part in each. What it goes through, for u = 0.7, top_k = 4 and a
temperature such that weights are powers of two:

    index                 0     1     2     3  |  4     5     6     7       two CTAs, with four elements each
    x                     3     5     0     4  |  5     1     4     4
                                                                            arrival     the maximum of the row is 5
    weight, 2^(x - 5)    .25    1   .03    .5  |  1   .06    .5    .5                   their mass is 3.84
                                                                            filters     the 4th is a 4, of which
    kept                  -     1     -    .5  |  1     -    .5     -                   two are kept
    kept mass                1.5               |        1.5                 draw        u * 3 = 2.1: the second CTA,
    up to here                  1         1.5  |  2.5                                   where 2.1 is exceeded first,
    drawn                                         ^                                     at index 4

A CTA has several warpgroups. One of them starts the bulk copies of the part, a step for each warpgroup, which waits for
its own and masks it. All that follows, once they have met, is one program of inline PTX, whose table of contents stands
in `draw_ptx`. Steps, warps and the words beside the part are drawn in `plan`.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.gpu.ptx.insert import insert_ptx
from pallas_softmax._src.sample import draw_ptx
from pallas_softmax._src.sample.draw import SamplingParams, draw
from pallas_softmax._src.sample.plan import Layout
from pallas_softmax._src.topk import selection
from pallas_softmax._src.topk.plan import Window
from pallas_softmax._src.topk.window_kernel import Part, mask_of_step, part_of, start_copies
from pallas_softmax.online import LOG2_E

_TINY = float(np.finfo(np.float32).tiny)  # the least temperature, in place of 0, and the least scale


def sample_rows(
    x, mask: Mask | None, params: SamplingParams, layout: Layout, *, interpret=None
) -> list[jax.Array]:
    """Draws from each row.

    Args:
      x: the logits, (rows, vocab).
      mask: which elements count, or None.
      params: what is asked of each row: arrays (rows,), or (1,) where all rows have the same number.
      layout: how a row lies over CTAs and in shared memory.
      interpret: as for `pallas_call`; the interpreter runs a twin of the program in plain JAX, in one CTA.

    Returns:
      Arrays (rows,): the index drawn, int32, its log probability, and the log of the share of the mass that is kept,
      float32; -1 and NaNs where the largest logit is not finite, or the temperature is negative or NaN.
    """
    rows, vocab = x.shape
    window = layout.window
    view = aligned_view(rows, vocab, window.vec)

    def sample(x_gmem, params_gmem, mask_gmem, *out, landed, scratch, x_smem, met: Any = None):
        part = part_of(window, view, rows, x_gmem, mask, mask_gmem)
        # Before the part has landed, so that nobody waits for these when it has.
        of_row = SamplingParams(*(ref[part.row if ref.shape[0] > 1 else 0] for ref in params_gmem))
        _copy_and_mask(window, part, x_smem, landed, met, interpret)
        if interpret:
            _draw_by_twin(part, x_smem, of_row, out, met)
            return
        results = dict(zip(("index", "log_prob", "log_mass"), out))
        place = {"row": part.row, "part": part.index, "origin": part.extent.origin}
        numbers = {"scale": scale_of(of_row.temperature), **of_row._asdict()}
        numbers |= {name: jnp.int32(number) for name, number in place.items()}
        insert_ptx(draw_ptx.text(layout, x.dtype), {"x": x_smem, "scratch": scratch, **results}, numbers)

    types = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    return gpu_kernel(
        sample,
        grid={"row": rows, "part": window.count} if window.count > 1 else {"row": rows},
        cluster=window.count,
        warpgroups=layout.warpgroups,
        out_type=types,
        scratch_types={
            "landed": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "scratch": plgpu.SMEM((layout.words,), jnp.int32),
            "x_smem": plgpu.SMEM((window.size,), x.dtype),
            **({"met": plgpu.Barrier(num_arrivals=layout.warpgroups)} if interpret else {}),
        },
        approximate=True,
        interpret=interpret,
    )(x.reshape(view), params, None if mask is None else mask.array)


def scale_of(temperature):
    """Returns log2(e) / temperature; that of 0 is that of the least normal float32, that of infinity this number."""
    return jnp.maximum(LOG2_E / jnp.maximum(temperature, _TINY), _TINY)


def _draw_by_twin(part: Part, x_smem, of_row: SamplingParams, out, met) -> None:
    """Draws in one warpgroup, after all have met, and writes the results."""
    _meet(met)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def write():
        position, *logs = draw(x_smem[...], of_row)
        index = jnp.where(position < 0, position, position + part.extent.origin)
        for gmem, result in zip(out, (index, *logs), strict=True):
            gmem[part.row] = result


def _meet(met) -> None:
    """Waits, in the interpreter, until all warpgroups are here."""
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def _copy_and_mask(window: Window, part: Part, x_smem, landed, met, interpret) -> None:
    """Copies the part to shared memory, where each warpgroup waits for its step, and masks it."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def start():
        start_copies(window, part, x_smem, landed)
        first, extent = part.first, part.extent
        selection.fill_edges(
            window, part.x_gmem, first, x_smem, extent, part.mask, infinite=True, interpret=interpret
        )

    @pl.when(warpgroup < len(window.copies()))
    def wait():
        plgpu.barrier_wait(landed.at[warpgroup])

    def mask(blocks):
        keep = mask_of_step(window, part, warpgroup, interpret)[:blocks]
        selection.mask_step(window, x_smem, warpgroup, [*keep], infinite=True, interpret=interpret)

    if part.mask is not None:
        if interpret:  # where a step is written as a whole, with what `fill_edges` has written
            _meet(met)
        if window.full:
            pl.when(warpgroup < window.full)(functools.partial(mask, window.step_blocks))
        if window.rest:
            pl.when(warpgroup == window.full)(functools.partial(mask, window.rest))
