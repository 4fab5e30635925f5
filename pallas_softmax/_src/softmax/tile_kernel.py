"""Kernel for short rows, held in registers: each row spans a few lanes, a warp, or all threads of a CTA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.formulas import Formula


def launch(
    formula: Formula,
    arrays: list[jax.Array],
    mask: Mask | None,
    tile: Tile,
    scale: jax.Array | None = None,
    *,
    name: str,
    approximate: bool,
) -> list[jax.Array]:
    """Computes a formula on the rows of the arrays (rows, vocab). Each CTA takes one tile of rows.

    Args:
      formula: the formula to compute.
      arrays: the arrays that the formula reads, all of one shape.
      mask: which elements count, or None.
      tile: how rows are laid out over a CTA.
      scale: 1 / temperature, (rows,) or (1,), for a formula with a temperature; or None.
      name: the kernel's name in profiles.
      approximate: whether exp may be approximate; see `plan.approximate`.

    Returns:
      One array (rows, vocab) of the last array's dtype. If the formula has per-row outputs: arrays (rows, 1).
    """
    rows, vocab = arrays[0].shape
    if formula.value is None:
        out_type = formula.row_results((rows, 1), arrays[-1].dtype)
    else:
        out_type = [jax.ShapeDtypeStruct((rows, vocab), arrays[-1].dtype)]
    fill = formula.reduction.neutral

    def broadcast(per_row):
        return lax.broadcast_in_dim(per_row, tile.shape, (0,))

    def body(x_gmem, mask_gmem, scale_gmem, *out_gmem):
        row = lax.axis_index("row") * tile.rows
        x = [tiles.load(gmem, tile, row, fill).astype(jnp.float32) for gmem in x_gmem]
        term = formula.term(*x)
        keep = None
        if mask is not None:
            keep = tiles.load_mask(mask_gmem, tile, row, mask.row)
            term = jnp.where(keep, term, fill)

        of_element, of_row = _scales(scale_gmem, tile, row)
        reduction = formula.scaled(of_element).reduction
        total = reduction.combine_lanes(reduction.of_terms(term), 1, broadcast)
        if formula.locates:
            column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
            at = online.if_largest(column, term, broadcast(total.moments.m))
            total = total._replace(at=jnp.min(at, 1))
        constants = [broadcast(constant) for constant in formula.scaled(of_row).constants(total)]
        if formula.value is None:
            results = constants
        else:
            y = formula.value(*x, *constants)
            results = [y if keep is None else jnp.where(keep, y, formula.masked_value)]

        for gmem, y in zip(out_gmem, results, strict=True):
            tiles.store(gmem, tile, row, y)

    kernel = gpu_kernel(
        body,
        grid={"row": -(-rows // tile.rows)},
        out_type=out_type,
        name=name,
        approximate=approximate,
    )
    return kernel(arrays, None if mask is None else mask.array, scale)


def _scales(scale_gmem, tile: Tile, row) -> tuple[Any, Any]:
    """Returns the scale of each element of a tile and of each of its rows; numbers if all rows share one, or None."""
    if scale_gmem is None:
        return None, None
    if scale_gmem.shape[0] == 1:
        return scale_gmem[0], scale_gmem[0]
    of_element = tiles.load(scale_gmem, tile, row)
    return of_element, jnp.max(of_element, 1)
