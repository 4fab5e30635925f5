"""The kernels of softmax fused with top-k, and of its backward, for short rows in registers.

A CTA has several rows. Each row lies over some lanes of a warp. Its k best are found by merging the lanes' lists
(`gpu/ptx/merging.py`), and the normalizers of the lanes are combined by ⊕.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.operation import KERNEL_DTYPES
from pallas_softmax._src.folding import Mask, fold_numbers, fold_topk
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile, merged_tile
from pallas_softmax._src.gpu.ptx.merging import search_input, search_rows
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.softmax.plan import approximate
from pallas_softmax._src.topk.merge_kernel import Request
from pallas_softmax._src.topk.xla import TopK


def softmax_topk(plan: Tile, mask: Mask | None, request: Request, x_gmem, scale_gmem, mask_gmem, *lists_gmem) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and writes their winners and normalizers.

    Without a scale, nothing is normalized: the values are the winners as they are.

    Stages: load, reduce to the normalizer, find the k best, compute their probabilities, write. In 32-bit dtypes the
    search returns only indices, and the winners are read again, from the cache.
    """
    (rows, vocab), k = x_gmem.shape, request.k
    values_gmem, indices_gmem, *normalizer_gmem = lists_gmem
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA
    winners = merged_tile(plan, k)  # how the winners lie over the same lanes
    tiles.prefetch(x_gmem, plan, row)  # a tile of a later CTA
    # `elements` are x as the search takes them: the bits of 16-bit logits, the sort keys of others.
    x, elements = _load(x_gmem, mask_gmem, mask, plan, row, last_row=rows - 1)

    normalizer = scale = None
    if scale_gmem is not None:
        normalizer, scale = _normalizer_and_scale(x, scale_gmem, plan, row, scaled=request.scaled)
        for gmem, per_row in zip(normalizer_gmem, normalizer):
            tiles.store(gmem, plan, row, per_row)

    index, key = search_rows(plan, vocab, k, elements)
    if key is None:
        key = sort_keys.key32(tiles.load(x_gmem, winners, row, column=index))  # again, from the cache
        if mask is not None:
            keep = tiles.load_mask(mask_gmem, winners, row, mask.row, column=index)
            key = jnp.where(keep, key, sort_keys.lowest_key(x_gmem.dtype))

    normalizer, scale = jax.tree.map(lambda a: tiles.spread(a, plan, winners), (normalizer, scale))
    tiles.store(values_gmem, winners, row, request.values(key, normalizer, scale))
    tiles.store(indices_gmem, winners, row, index)


def topk_rows(x, mask: Mask | None, temperature, plan: Tile, request: Request) -> tuple[TopK, Normalizer | None]:
    """Returns what `window_kernel.topk_rows` returns."""
    rows, normalized = x.shape[0], request.normalized
    values, indices, *normalizer = gpu_kernel(
        functools.partial(softmax_topk, plan, mask, request),
        grid={"row": -(-rows // plan.rows)},
        out_type=[
            jax.ShapeDtypeStruct((rows, request.k), request.dtype),
            jax.ShapeDtypeStruct((rows, request.k), jnp.int32),
            *[jax.ShapeDtypeStruct((rows, 1), jnp.float32)] * (2 * normalized),
        ],
        name="softmax_topk" if normalized else "top_k",
    )(x, normalizers.encoded_scale(temperature) if normalized else None, None if mask is None else mask.array)
    return TopK(values, indices), Normalizer(*normalizer) if normalized else None


def _load(x_gmem, mask_gmem, mask: Mask | None, plan: Tile, row, *, last_row: int) -> tuple[Any, Any]:
    """Returns a tile of logits, with -inf for masked ones, and the same elements as the search takes them.

    Rows beyond the array repeat the last row. Filled with -inf, they would be ties, which take longer to search.
    """
    x = tiles.load(x_gmem, plan, row, -jnp.inf, last_row=last_row)
    elements, lowest = search_input(x)
    if mask is not None:
        keep = tiles.load_mask(mask_gmem, plan, row, mask.row, last_row=last_row)
        elements = jnp.where(keep, elements, jnp.full_like(elements, lowest))
        x = jnp.where(keep, x, jnp.full_like(x, -jnp.inf))
    return x, elements


def _normalizer_and_scale(x, scale_gmem, plan: Tile, row, *, scaled: bool) -> tuple[Normalizer, Any]:
    """Returns the normalizer and the scale of each row, spread over the tile; if `scaled`, the scale is a `Scale`."""
    broadcast = functools.partial(tiles.broadcast, tile=plan)
    m = jnp.max(x, 1).astype(jnp.float32)  # before the cast: one instruction compares two 16-bit elements
    x = x.astype(jnp.float32)
    row_scale = _per_row(scale_gmem, plan, row)
    row_scale = normalizers.scale_of(row_scale) if scaled else row_scale
    total = normalizers.combine_lanes(Normalizer(x, jnp.ones_like(x)), 1, broadcast, row_scale, m)
    return Normalizer(*map(broadcast, total)), row_scale


def _per_row(gmem, tile: Tile, row):
    """Returns one number per row, spread over a tile, of an array with one for each row or one for all."""
    if gmem.shape[0] > 1:
        return tiles.load(gmem, tile, row)
    return tiles.broadcast(jnp.full((tile.rows,), gmem[0]), tile)


# --- The backward


def topk_grad(
    plan: Tile, log: bool, x_gmem, scale_gmem, m_gmem, d_gmem, g_d_gmem, indices_gmem, g_gmem, dx_gmem, dt_gmem
) -> None:
    """The kernel of the backward: a CTA holds one tile of rows in registers, and writes their cotangents.

    Let p = softmax(x / T). The winners' values have the cotangents g, and d has the cotangent g_d. Let r be g_d d minus
    the sum over the winners of g p, and m the maximum of the row. The cotangents are:

        a logit that did not win    p r / T
        a winner                    p r / T + g p / T
        T                           - sum over all logits of cotangent * (x - m) / T

    With log, g p becomes g in all of these. In the sum for T, `slope` has the share of p r / T, and `slope_won` has the
    share of g p / T. The winners of a row lie over the same lanes as the row. They overwrite what the row wrote:
    `tiles.store` first waits until the warp has written the row.
    """
    k = indices_gmem.shape[1]
    winners = Tile(plan.rows, plan.lanes, 1, -(-k // plan.lanes))
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA
    spread = functools.partial(tiles.spread, tile=winners, out=plan)

    x = tiles.load(x_gmem, plan, row, -jnp.inf).astype(jnp.float32)
    index = tiles.load(indices_gmem, winners, row, 0)
    g = tiles.load(g_gmem, winners, row, 0).astype(jnp.float32)
    m, d, scale = (_per_row(gmem, winners, row) for gmem in (m_gmem, d_gmem, scale_gmem))
    x_won = tiles.load(x_gmem, winners, row, column=index).astype(jnp.float32)  # from the cache

    # the winners
    scaled_won = (x_won - m) * scale
    p_won = jnp.exp(scaled_won) / d
    direct = g if log else g * p_won  # the winners' own term, g p
    rest = _per_row(g_d_gmem, winners, row) * d - tiles.broadcast(jnp.sum(direct, 1), winners)  # r
    dx_won = (direct + p_won * rest) * scale
    # If a factor is 0, (x - m) / T may be -inf, and their product NaN.
    slope_won = tiles.broadcast(jnp.sum(jnp.where(direct == 0, 0.0, direct * scaled_won), 1), winners)

    # the row
    weight, scale = spread(rest / d), spread(scale)
    scaled = (x - spread(m)) * scale
    e = jnp.exp(scaled)
    tiles.store(dx_gmem, plan, row, e * (weight * scale))
    slope = tiles.broadcast(jnp.sum(jnp.where(e == 0, 0.0, e * scaled), 1), plan)
    tiles.store(dt_gmem, plan, row, -(weight * slope + spread(slope_won)) * scale)

    tiles.store(dx_gmem, winners, row, dx_won, column=index, held=k)  # over what the row wrote there


def topk_grad_rows(plan: Tile, residuals, where, g, g_d, *, log: bool):
    """Returns what `xla.topk_grad` returns; `where` is None."""
    logits, temperature, *per_row, indices = residuals
    x, _, temperature, unfold = fold_topk(logits, None, temperature)
    folded = functools.partial(fold_numbers, batch=logits.shape[:-1])
    m, d, g_d = (folded(a.astype(jnp.float32))[:, 0] for a in (*per_row, g_d))
    g = folded(g if g.dtype.name in KERNEL_DTYPES else g.astype(jnp.float32))
    indices = folded(indices)
    dx, dt = gpu_kernel(
        functools.partial(topk_grad, plan, log),
        grid={"row": -(-x.shape[0] // plan.rows)},
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)],
        name="topk_grad",
        approximate=approximate(x.dtype),
    )(x, 1 / temperature, m, d, g_d, indices, g)
    return dx.reshape(logits.shape), unfold(dt)
