"""Softmax fused with top-k of short rows, in registers: several rows in a CTA, each over some lanes of a warp.

The k best of a row are taken one after another: the one with the largest key, and of those that have it the one of
lowest index. The other steps are those of softmax: loads with -inf where a row ends, and the normalizer by ⊕ over
the lanes of a row.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import sort_keys, tiles
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.topk import selection
from pallas_softmax.implementations.mosaic_gpu.topk.plan import sorted_tile, sorts, winners_tile
from pallas_softmax.implementations.mosaic_gpu.topk.winners import weight
from pallas_softmax.online import Candidates, Normalizer


def topk_rows(
    x, mask: Mask | None, temperature, k: int, plan: Tile, *, log, dtype, interpret=None
) -> tuple[Candidates, Normalizer]:
    """Returns the k best of each row, and the normalizers; all but `plan` is as in `window_kernel.topk_rows`."""
    rows, vocab = x.shape
    scale = 1 / temperature
    in_order = sorts(vocab, k)
    winners = sorted_tile(plan) if in_order else winners_tile(plan, k)

    def broadcast(per_row):
        return lax.broadcast_in_dim(per_row, plan.shape, (0,))

    def softmax_topk(x_gmem, scale_gmem, mask_gmem, values_gmem, indices_gmem, m_gmem, d_gmem):
        row = lax.axis_index("row") * plan.rows
        x = tiles.load(x_gmem, plan, row, -jnp.inf, interpret=interpret)
        key, x = sort_keys.key(x), x.astype(jnp.float32)
        if mask is not None:
            keep = tiles.load_mask(mask_gmem, plan, row, (rows, vocab), mask.row, interpret=interpret)
            key = jnp.where(keep, key, sort_keys.lowest_key(x_gmem.dtype))
            x = jnp.where(keep, x, -jnp.inf)
        if len(scale) > 1:
            row_scale = tiles.load_per_row(scale_gmem, plan, row, interpret=interpret)
        else:
            row_scale = broadcast(jnp.full((plan.rows,), scale_gmem[0]))
        m, d = map(broadcast, online.across(Normalizer(x, jnp.ones_like(x)), 1, broadcast, row_scale))
        tiles.store(m_gmem, plan, row, m, interpret=interpret)
        tiles.store(d_gmem, plan, row, d, interpret=interpret)
        index, (m, d, row_scale) = selection.take(
            plan,
            vocab,
            k,
            key,
            (m, d, row_scale),
            narrow=x_gmem.dtype.itemsize == 2,
            in_order=in_order,
            interpret=interpret,
        )
        key = sort_keys.key(
            tiles.gather(x_gmem, winners, row, index, rows=rows, blocked=in_order, interpret=interpret)
        )
        if mask is not None:
            keep = tiles.gather(
                mask_gmem,
                winners,
                row,
                index,
                rows=rows,
                ref_row=mask.row,
                blocked=in_order,
                interpret=interpret,
            )
            key = jnp.where(keep != 0, key, sort_keys.lowest_key(x_gmem.dtype))
        value = weight(key, x_gmem.dtype, Normalizer(m, d), row_scale, log=log, masked=mask is not None)
        tiles.store(values_gmem, winners, row, value, blocked=in_order, interpret=interpret)
        tiles.store(indices_gmem, winners, row, index, blocked=in_order, interpret=interpret)

    values, indices, m, d = gpu_kernel(
        softmax_topk,
        grid={"row": -(-rows // plan.rows)},
        out_type=[
            jax.ShapeDtypeStruct((rows, k), dtype),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
        ],
        approximate=True,
        interpret=interpret,
    )(x, scale, None if mask is None else mask.array)
    return Candidates(values, indices), Normalizer(m, d)
