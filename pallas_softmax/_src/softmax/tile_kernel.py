"""Kernel for short rows, held in registers: each row spans a few lanes, a warp, or all threads of a CTA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.formulas import Formula, Label, comes_before


def compute_rows(
    formula: Formula, tile: Tile, mask: Mask | None, x_gmem, mask_gmem, scale_gmem, label_gmem, *out_gmem
) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and computes a formula on it.

    Stages: load, reduce each row, count the elements before its label (if there are labels), compute the elements (if
    the result has elements), write. `Tile` draws which thread holds what. `launch` documents the arguments.
    """
    row = lax.axis_index("row") * tile.rows  # the first row of this CTA
    fill = formula.reduction.neutral
    loaded, x = [], []  # the arrays in their own dtypes, and in float32
    for gmem in x_gmem:
        loaded.append(tiles.load(gmem, tile, row, fill))
        x.append(loaded[-1].astype(jnp.float32))
    term = formula.term(*x)  # what the formula reduces, for example the logits
    keep = None  # with a mask: which elements count
    if mask is not None:
        keep = tiles.load_mask(mask_gmem, tile, row, mask.row)
        term = jnp.where(keep, term, fill)
    element_scale, row_scale = _load_scales(scale_gmem, tile, row)  # in two layouts

    total = _reduce(formula.scaled(element_scale), tile, term)
    if label_gmem is not None:
        label = Label(*(tiles.load(gmem, tile, row) for gmem in label_gmem[:2]))
        before = _count_before(tile, loaded[0], keep, label, vocab=x_gmem[0].shape[1])
        total = total._replace(before=before)
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


def _count_before(tile: Tile, x, keep, label: Label, *, vocab: int):
    """Returns how many elements of each row come before its label, without those that are masked or beyond the row."""
    column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    before = comes_before(sort_keys.key32(x), column, label)
    if keep is not None:
        before = jnp.where(keep, before, 0.0)
    if vocab < tile.shape[1]:
        before = jnp.where(column < vocab, before, 0.0)
    return jnp.sum(before, 1)


def launch(
    formula: Formula,
    arrays: list[jax.Array],
    mask: Mask | None,
    tile: Tile,
    scale: jax.Array | None = None,
    label: Label | None = None,
    *,
    name: str,
    approximate: bool,
) -> list[jax.Array]:
    """Computes a formula on the rows of the arrays (rows, vocab). Each CTA takes one tile of rows.

    `scale` is `normalizers.encoded_scale`, (rows,) or (1,), for a formula with a temperature. `label` is for a formula
    that `counts`. `name` is the kernel's name in profiles. `approximate` says whether exp may be approximate
    (`plan.approximate`). Returns one array (rows, vocab) of the last array's dtype, or if the formula has per-row
    outputs, arrays (rows, 1).
    """
    rows = arrays[0].shape[0]
    return gpu_kernel(
        functools.partial(compute_rows, formula, tile, mask),
        grid={"row": -(-rows // tile.rows)},
        out_type=formula.out_type(arrays[0].shape, (rows, 1), arrays[-1].dtype),
        name=name,
        approximate=approximate,
    )(arrays, None if mask is None else mask.array, scale, label)
