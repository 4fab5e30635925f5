"""Kernel for short rows, held in registers: each row spans a few lanes, a warp, or all threads of a CTA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax_base._src import normalizers
from pallas_softmax_base._src.folding import Mask
from pallas_softmax_base._src.gpu import tiles
from pallas_softmax_base._src.gpu.kernel import gpu_kernel
from pallas_softmax_base._src.gpu.layout import Tile
from pallas_softmax_base._src.softmax.formulas import Formula


def compute_rows(
    formula: Formula, tile: Tile, mask: Mask | None, x_gmem, mask_gmem, scale_gmem, *out_gmem
) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and computes a formula on it.

    Stages: load, reduce each row, compute the elements (if the result has elements), write. `launch` documents the
    arguments.
    """
    row = lax.axis_index("row") * tile.rows  # the first row of this CTA
    fill = formula.reduction.neutral
    x = [tiles.load(gmem, tile, row, fill).astype(jnp.float32) for gmem in x_gmem]
    term = formula.term(*x)  # what the formula reduces, for example the logits
    keep = None  # with a mask: which elements count
    if mask is not None:
        keep = tiles.load_mask(mask_gmem, tile, row, mask.row)
        term = jnp.where(keep, term, fill)
    element_scale, row_scale = _load_scales(scale_gmem, tile, row)  # 1 / temperature in two layouts

    total = _reduce(formula.scaled(element_scale), tile, term)
    constants = formula.scaled(row_scale).constants(total)  # numbers per row, for example m and d
    constants = [tiles.broadcast(constant, tile) for constant in constants]

    if formula.value is None:  # the constants are the result, for example logsumexp
        results = constants
    else:
        y = formula.value(*x, *constants)
        results = [y if keep is None else jnp.where(keep, y, formula.masked_value)]
    for gmem, y in zip(out_gmem, results, strict=True):
        tiles.store(gmem, tile, row, y)


def _load_scales(scale_gmem, tile: Tile, row) -> tuple[Any, Any]:
    """Returns the scale of each row twice: repeated over a tile, and one per row.

    If all rows share one scale, both are that number. Without a scale, both are None.
    """
    if scale_gmem is None:
        return None, None
    if scale_gmem.shape[0] == 1:
        return scale_gmem[0], scale_gmem[0]
    element_scale = tiles.load(scale_gmem, tile, row)
    return element_scale, jnp.max(element_scale, 1)


def _reduce(formula: Formula, tile: Tile, term):
    """Returns the reduction of each row of a tile of terms."""
    broadcast = functools.partial(tiles.broadcast, tile=tile)
    total = formula.reduction.combine_lanes(formula.reduction.states(term), 1, broadcast)
    if formula.locates:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        at = normalizers.if_largest(column, term, broadcast(total.moments.m))
        total = total._replace(at=jnp.min(at, 1))
    return total


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

    `scale` is 1 / temperature, (rows,) or (1,), for a formula with a temperature. `name` is the kernel's name in
    profiles. `approximate` says whether exp may be approximate (`plan.approximate`). Returns one array (rows, vocab) of
    the last array's dtype, or if the formula has per-row outputs, arrays (rows, 1).
    """
    rows = arrays[0].shape[0]
    return gpu_kernel(
        functools.partial(compute_rows, formula, tile, mask),
        grid={"row": -(-rows // tile.rows)},
        out_type=formula.out_type(arrays[0].shape, (rows, 1), arrays[-1].dtype),
        name=name,
        approximate=approximate,
    )(arrays, None if mask is None else mask.array, scale)
