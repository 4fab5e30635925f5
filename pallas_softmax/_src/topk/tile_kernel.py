"""Softmax fused with top-k of short rows, in registers: several rows in a CTA, each over some lanes of a warp.

The k best of a row are found by merges of the lanes' lists (`merging_ptx`) or, where most of the row are winners, by a
sort of it (`sorting_ptx`). The other steps are those of softmax: loads with -inf where a row ends, and the normalizer
by ⊕ over the lanes of a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import sort_keys, tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.topk import selection
from pallas_softmax._src.topk.tile_plan import sorts, winners_tile
from pallas_softmax._src.topk.winners import probability
from pallas_softmax.online import Candidates, Normalizer


def topk_rows(
    x, mask: Mask | None, temperature, k: int, plan: Tile, *, log, dtype, interpret=None
) -> tuple[Candidates, Normalizer]:
    """Returns the k best of each row, and the normalizers; all but `plan` is as in `window_kernel.topk_rows`."""
    rows, vocab = x.shape
    scale = 1 / temperature
    itemsize = x.dtype.itemsize
    by_words = itemsize == 2 and not sorts(vocab, k)  # keys come packed, two elements at a time
    winners = winners_tile(plan, vocab, k)

    def broadcast(per_row):
        return lax.broadcast_in_dim(per_row, plan.shape, (0,))

    def key_at(x_gmem, mask_gmem, row, index):
        """Reads the winners again, from the cache; returns their keys."""
        gather = functools.partial(
            tiles.gather,
            tile=winners,
            row=row,
            column=index,
            rows=rows,
            blocked=True,
            interpret=interpret,
        )
        key = sort_keys.key(gather(x_gmem))
        if mask is None:
            return key
        keep = gather(mask_gmem, ref_row=mask.row)
        return jnp.where(keep != 0, key, sort_keys.lowest_key(x_gmem.dtype))

    def softmax_topk(x_gmem, scale_gmem, mask_gmem, values_gmem, indices_gmem, m_gmem, d_gmem):
        row = lax.axis_index("row") * plan.rows
        x = tiles.load(x_gmem, plan, row, -jnp.inf, interpret=interpret)
        if by_words:
            held = lax.bitcast_convert_type(x, jnp.int16)
            lowest = -1
        else:
            held = sort_keys.key(x)
            lowest = sort_keys.lowest_key(x_gmem.dtype)
        if mask is not None:
            keep = tiles.load_mask(mask_gmem, plan, row, (rows, vocab), mask.row, interpret=interpret)
            held = jnp.where(keep, held, jnp.full_like(held, lowest))
            x = jnp.where(keep, x, jnp.full_like(x, -jnp.inf))
        m = jnp.max(x, 1).astype(jnp.float32)  # of 16 bits, two elements by one instruction
        x = x.astype(jnp.float32)
        if len(scale) > 1:
            row_scale = tiles.load_per_row(scale_gmem, plan, row, interpret=interpret)
        else:
            row_scale = broadcast(jnp.full((plan.rows,), scale_gmem[0]))
        m, d = map(broadcast, online.across(Normalizer(x, jnp.ones_like(x)), 1, broadcast, row_scale, m))
        tiles.store(m_gmem, plan, row, m, interpret=interpret)
        tiles.store(d_gmem, plan, row, d, interpret=interpret)
        if by_words:
            key, index, (m, d, row_scale) = selection.take_words(
                plan, vocab, k, held, (m, d, row_scale), interpret=interpret
            )
        else:
            index, (m, d, row_scale) = selection.take(
                plan,
                vocab,
                k,
                held,
                (m, d, row_scale),
                itemsize=itemsize,
                interpret=interpret,
            )
            key = key_at(x_gmem, mask_gmem, row, index)
        value = probability(key, x_gmem.dtype, Normalizer(m, d), row_scale, log=log, masked=mask is not None)
        tiles.store(values_gmem, winners, row, value, blocked=True, interpret=interpret)
        tiles.store(indices_gmem, winners, row, index, blocked=True, interpret=interpret)

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
