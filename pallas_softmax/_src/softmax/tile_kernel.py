"""The kernel of softmax for short rows, and for short columns: a CTA holds them whole, as a tile in registers.

`gpu.layout.Tile` draws which elements each thread holds. A row of the array (rows, vocab) is a row of a tile. In an
array (outer, vocab, inner), the rows of a tile are lines of `inner` elements, one of each adjacent column: the softmax
runs along axis 0 of the tile. Columns have no mask, temperature or label.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.formulas import Job, Label, comes_before
from pallas_softmax._src.softmax.plan import approximate


def compute_tile(job: Job, x_gmem, mask_gmem, scale_gmem, label_gmem, *out_gmem, reserved: Any = None) -> None:
    """The kernel: computes a formula on the rows or columns of one tile. Nothing uses `reserved`; see `Tile`."""
    formula, tile, mask = job.formula, job.plan, job.mask
    axis = 1 if x_gmem[0].ndim == 2 else 0  # of the tile; the softmax runs along it
    view, row, column = _place(tile, x_gmem[0].shape)
    broadcast = functools.partial(tiles.broadcast, tile=tile, axis=1 - axis)  # a number per row, or column
    fill = formula.reduction.neutral
    loaded, x = [], []  # the arrays in their own dtypes, and in float32
    for gmem in x_gmem:
        loaded.append(tiles.load(view(gmem), tile, row, fill, column=column))
        x.append(loaded[-1].astype(jnp.float32))
    term = formula.term(*x)  # what the formula reduces, for example the logits
    keep = None  # with a mask: which elements count
    if mask is not None:
        keep = tiles.load_mask(mask_gmem, tile, row, mask.row)
        term = jnp.where(keep, term, fill)
    element_scale, row_scale = _load_scales(scale_gmem, tile, row)  # in two layouts

    reduction = formula.scaled(element_scale).reduction
    total = reduction.combine_lanes(reduction.states(term), axis, broadcast)
    if formula.locates:
        position = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        at = normalizers.if_largest(position, term, broadcast(total.moments.m))
        total = total._replace(at=jnp.min(at, 1))
    if label_gmem is not None:
        label = Label(*(tiles.load(gmem, tile, row) for gmem in label_gmem[:2]))
        before = _count_before(tile, loaded[0], keep, label, vocab=x_gmem[0].shape[1])
        total = total._replace(before=before)
    constants = [broadcast(a) for a in formula.scaled(row_scale).constants(total)]  # for example m and d

    if formula.value is None:  # the constants are the result, for example logsumexp
        results = constants
    else:
        y = formula.value(*x, *constants)
        results = [y if keep is None else jnp.where(keep, y, formula.masked_value)]
    for gmem, y in zip(out_gmem, results, strict=True):
        tiles.store(view(gmem), tile, row, y, column=column)


def _place(tile: Tile, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Returns a function that views an array with two dimensions; and the row and column where the tile starts."""
    number = lax.axis_index("tile")
    if len(shape) == 2:
        return lambda gmem: gmem, number * tile.rows, 0
    across = -(-shape[2] // tile.shape[1])  # tiles side by side
    outer = number // across
    return lambda gmem: gmem.at[outer], 0, number % across * tile.shape[1]


def _load_scales(scale_gmem, tile: Tile, row) -> tuple[Any, Any]:
    """Returns the scale of each row twice: repeated over a tile, and one per row. A scale of all rows is one number."""
    if scale_gmem is None:
        return None, None
    if scale_gmem.shape[0] == 1:
        return scale_gmem[0], scale_gmem[0]
    element_scale = tiles.load(scale_gmem, tile, row)
    return element_scale, jnp.max(element_scale, 1)


def _count_before(tile: Tile, x, keep, label: Label, *, vocab: int):
    """Returns how many elements of each row come before its label, without those that are masked or beyond the row."""
    column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    before = comes_before(sort_keys.key32(x), column, label)
    if keep is not None:
        before = jnp.where(keep, before, 0.0)
    if vocab < tile.shape[1]:
        before = jnp.where(column < vocab, before, 0.0)
    return jnp.sum(before, 1)


def launch(job: Job) -> list[jax.Array]:
    """Runs the job with a `Tile`; see `rows_kernel.launch` and `columns_kernel.launch`."""
    tile, shape = job.plan, job.arrays[0].shape
    count = -(-shape[0] // tile.rows) if len(shape) == 2 else shape[0] * -(-shape[2] // tile.shape[1])
    return gpu_kernel(
        functools.partial(compute_tile, job),
        grid={"tile": count},
        out_type=job.formula.out_type(shape, (shape[0], 1, *shape[2:]), job.dtype),
        scratch_types={"reserved": plgpu.SMEM((tile.reserved_bytes,), jnp.int8)} if tile.reserved_bytes else (),
        name=job.name,
        approximate=approximate(job.dtype),
    )(job.arrays, None if job.mask is None else job.mask.array, job.scale, job.label)
