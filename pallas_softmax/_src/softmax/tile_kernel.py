"""Kernel for short rows, held in registers: each row spans a few lanes, a warp, or all threads of a CTA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.formulas import Formula


def compute_rows(
    formula: Formula, tile: Tile, mask: Mask | None, x_gmem, mask_gmem, scale_gmem, *out_gmem
) -> None:
    """The kernel: computes a formula on one tile of rows. The arguments are as for `launch`."""
    row = lax.axis_index("row") * tile.rows  # the first row of this CTA
    fill = formula.reduction.neutral
    x = [tiles.load(gmem, tile, row, fill).astype(jnp.float32) for gmem in x_gmem]
    term, keep = formula.term(*x), None  # what the formula reduces, for example the logits
    if mask is not None:
        keep = tiles.load_mask(mask_gmem, tile, row, mask.row)
        term = jnp.where(keep, term, fill)
    scale_of_element, scale_of_row = _load_scales(scale_gmem, tile, row)

    total = _reduce(formula.scaled(scale_of_element), tile, term)
    constants = formula.scaled(scale_of_row).constants(total)  # numbers per row, for example m and d
    constants = [_broadcast(constant, tile) for constant in constants]

    if formula.value is None:
        results = constants
    else:
        y = formula.value(*x, *constants)
        results = [y if keep is None else jnp.where(keep, y, formula.masked_value)]
    for gmem, y in zip(out_gmem, results, strict=True):
        tiles.store(gmem, tile, row, y)


def _load_scales(scale_gmem, tile: Tile, row) -> tuple[Any, Any]:
    """Returns the scale of each element of a tile and of each of its rows; numbers if all rows share one, or None."""
    if scale_gmem is None:
        return None, None
    if scale_gmem.shape[0] == 1:
        return scale_gmem[0], scale_gmem[0]
    of_element = tiles.load(scale_gmem, tile, row)
    return of_element, jnp.max(of_element, 1)


def _reduce(formula: Formula, tile: Tile, term):
    """Returns the reduction of each row of a tile of terms."""
    broadcast = functools.partial(_broadcast, tile=tile)
    total = formula.reduction.combine_lanes(formula.reduction.of_terms(term), 1, broadcast)
    if formula.locates:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        at = normalizers.if_largest(column, term, broadcast(total.moments.m))
        total = total._replace(at=jnp.min(at, 1))
    return total


def _broadcast(per_row, tile: Tile):
    return lax.broadcast_in_dim(per_row, tile.shape, (0,))


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
    return gpu_kernel(
        functools.partial(compute_rows, formula, tile, mask),
        grid={"row": -(-rows // tile.rows)},
        out_type=out_type,
        name=name,
        approximate=approximate,
    )(arrays, None if mask is None else mask.array, scale)
