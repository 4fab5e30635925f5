"""Softmax fused with top-k of short rows, in registers: several in a CTA, each over some lanes of a warp.

The k best are taken one after another: the largest key of the row, and of those that have it the lowest index.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import memory, sort_keys
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax import formulas
from pallas_softmax.implementations.mosaic_gpu.topk import selection
from pallas_softmax.implementations.mosaic_gpu.topk.plan import winners_tile
from pallas_softmax.online import Candidates, Normalizer


def topk_rows(x, mask: Mask | None, temperature, k: int, plan: Tile, *, log, dtype, interpret=None):
    """As `topk_kernel.topk_rows`."""
    rows, vocab = x.shape
    scale = 1 / temperature
    inputs = [x, scale] + ([] if mask is None else [mask.array])
    lowest = sort_keys.lowest_key(x.dtype)

    def spread(per_row):
        return lax.broadcast_in_dim(per_row, plan.shape, (0,))

    def softmax_topk(x_gmem, scale_gmem, *refs):
        mask_gmem, refs = (None, refs) if mask is None else (refs[0], refs[1:])
        values_gmem, indices_gmem, m_gmem, d_gmem = refs
        row = lax.axis_index("row") * plan.rows
        x = memory.load(x_gmem, plan, row, -jnp.inf, interpret=interpret)
        key, x = sort_keys.key(x), x.astype(jnp.float32)
        if mask is not None:
            keep = memory.load_mask(mask_gmem, plan, row, (rows, vocab), mask.row, interpret=interpret)
            key, x = jnp.where(keep, key, lowest), jnp.where(keep, x, -jnp.inf)
        if len(scale) > 1:
            of_row = memory.load_per_row(scale_gmem, plan, row, interpret=interpret)
        else:
            of_row = spread(jnp.full((plan.rows,), scale_gmem[0]))
        m, d = map(spread, online.across(Normalizer(x, jnp.ones_like(x)), 1, spread, of_row))
        memory.store(m_gmem, plan, row, m, interpret=interpret)
        memory.store(d_gmem, plan, row, d, interpret=interpret)
        (key, index), (m, d, of_row) = selection.take(
            plan, vocab, k, key, (m, d, of_row), narrow=x_gmem.dtype.itemsize == 2, interpret=interpret
        )
        value = formulas.weight(key, x_gmem.dtype, Normalizer(m, d), of_row, log=log, masked=mask is not None)
        winners = winners_tile(plan, k)
        memory.store(values_gmem, winners, row, value, interpret=interpret)
        memory.store(indices_gmem, winners, row, index, interpret=interpret)

    wide, one = (rows, k), (rows, 1)
    types = ((wide, dtype), (wide, jnp.int32), (one, jnp.float32), (one, jnp.float32))
    values, indices, m, d = gpu_kernel(
        softmax_topk,
        grid={"row": -(-rows // plan.rows)},
        out_type=[jax.ShapeDtypeStruct(*t) for t in types],
        approximate=True,
        interpret=interpret,
    )(*inputs)
    return Candidates(values, indices), Normalizer(m, d)
