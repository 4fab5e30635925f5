"""Kernels that make logits, x @ w + bias, tile by tile, and write numbers of each row, or exponentials, instead of them.

They compute in base 2, in which the GPU does: with z2 = z log2(e), exp(z - r) is exp2(z2 - r2). The rounding of r2
is no error, since r2 itself, and not r log2(e), is what is kept.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations.mosaic_gpu.linear.plan import Tiling
from pallas_softmax.implementations.mosaic_gpu.linear.product import (
    TILE_M,
    WARPGROUP_ROWS,
    Staging,
    product,
    store,
)

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Head:
    """What makes logits of a product: columns from `vocab` on count as -inf.

    Attributes:
      vocab: the number of columns of w.
      transposed: whether w is (vocab, depth).
      softcap: c in c tanh(z / c), or None.
    """

    vocab: int
    transposed: bool = False
    softcap: float | None = None


class RowSums(NamedTuple):
    """What a kernel finds of each row, one number for each tile of the columns: float32 (tiles, rows).

    Attributes:
      m2: the largest logit, in base 2.
      d: the sum of exp2(z2 - m2), or of exp2(z2 - reference).
      label: the logit at the label, 0 in the other tiles; None without labels.
      total: the sum of the logits; None if it is not asked for.
    """

    m2: Any
    d: Any
    label: Any = None
    total: Any = None


def row_sums(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array | None,
    reference: jax.Array | None,
    *,
    head: Head,
    with_total: bool = False,
    tiling: Tiling = Tiling(),
    interpret: Any = None,
) -> tuple[RowSums, jax.Array | None]:
    """Reduces the rows of the logits; with a reference, writes the exponentials, too.

    Args:
      x: (rows, depth).
      w: (depth, vocab), or (vocab, depth) if transposed.
      bias: float32 (vocab,), or None.
      labels: int32 (rows,), or None.
      reference: float32 (rows,), in base 2, or None.
      head: what makes logits of the product.
      with_total: whether to add up the logits.
      tiling: sizes of tiles and stages.
      interpret: as for `pallas_call`.

    Returns:
      The sums, and exp2(z2 - reference) in the dtype of x, (rows, vocab rounded up to a multiple of 8): columns
      after the vocabulary are 0. Of capped logits it is multiplied by the cap's slope.
    """
    rows, tiles = len(x), -(-head.vocab // tiling.tile_n)
    labels = None if labels is None else _pad(labels, TILE_M, -1)
    per_row = jax.ShapeDtypeStruct((tiles, -(-rows // TILE_M) * TILE_M), jnp.float32)
    sums = RowSums(per_row, per_row, None if labels is None else per_row, per_row if with_total else None)
    stored = None if reference is None else jax.ShapeDtypeStruct((rows, -(-head.vocab // 8) * 8), x.dtype)
    inputs = (
        None if bias is None else _pad(bias, tiling.tile_n, 0),
        labels,
        None if labels is None else _tiles_with_labels(labels, tiles, tiling.tile_n),
        None if reference is None else _pad(reference, TILE_M, 0),
    )

    def epilogue(acc, place, bias_gmem, labels_gmem, hits_gmem, reference_gmem, sums_gmem, stored_gmem):
        z, slope, column = _logits(acc, place, bias_gmem, head, interpret)
        own = (place.index, pl.ds(place.row, WARPGROUP_ROWS))
        m2 = jnp.max(z, axis=1) * LOG2E
        r2 = online.shift(m2) if reference_gmem is None else _of_rows(reference_gmem, place.row, interpret)
        e = jnp.exp2(z * LOG2E - _along(r2, z))
        sums_gmem.m2[own] = m2
        sums_gmem.d[own] = jnp.sum(e, axis=1)
        if sums_gmem.label is not None:
            label = _along(_of_rows(labels_gmem, place.row, interpret) - place.column, z)
            sums_gmem.label[own] = lax.cond(
                hits_gmem[place.row // WARPGROUP_ROWS, place.index] != 0,
                lambda: jnp.sum(jnp.where(column == label, z, 0.0), axis=1),
                lambda: jnp.zeros_like(m2) if interpret else plgpu.layout_cast(jnp.zeros_like(m2), plgpu.Layout.WGMMA.reduce(1)),
            )
        if sums_gmem.total is not None:
            sums_gmem.total[own] = jnp.sum(jnp.where(column < head.vocab - place.column, z, 0.0), axis=1)
        if stored_gmem is not None:
            e = e if slope is None else e * slope
            store(place.staging, e.astype(x.dtype), stored_gmem, place.row, place.column)

    return product(
        epilogue,
        x,
        w,
        inputs,
        b_transposed=head.transposed,
        out_type=(sums, stored),
        staging=None if stored is None else Staging(x.dtype, 64),
        tiling=tiling,
        name="linear_normalizer" if stored is None else "linear_exponentials",
        interpret=interpret,
    )


class Coefficients(NamedTuple):
    """What the gradient of a row of logits is: p * of_p - uniform, times the cap's slope; float32 (rows,).

    Attributes:
      lse2: the row's logsumexp, in base 2.
      of_p: factor of the probabilities.
      uniform: what is subtracted everywhere; None is 0.
    """

    lse2: Any
    of_p: Any
    uniform: Any = None


def logit_gradients(
    x, w, bias, coefficients: Coefficients, *, head: Head, tiling: Tiling = Tiling(), interpret: Any = None
) -> jax.Array:
    """The gradients of the logits, but for the label's own term, in the dtype of x: (rows, vocab rounded up to 8)."""
    rows = len(x)
    inputs = (
        None if bias is None else _pad(bias, tiling.tile_n, 0),
        jax.tree.map(lambda a: _pad(a, TILE_M, 0), coefficients),
    )

    def epilogue(acc, place, bias_gmem, of_rows_gmem, out_gmem):
        z, slope, column = _logits(acc, place, bias_gmem, head, interpret)
        lse2, of_p, uniform = (
            None if gmem is None else _along(_of_rows(gmem, place.row, interpret), z) for gmem in of_rows_gmem
        )
        dz = jnp.exp2(z * LOG2E - lse2) * of_p
        if uniform is not None:
            dz = jnp.where(column < head.vocab - place.column, dz - uniform, 0.0)
        dz = dz if slope is None else dz * slope
        store(place.staging, dz.astype(x.dtype), out_gmem, place.row, place.column)

    return product(
        epilogue,
        x,
        w,
        inputs,
        b_transposed=head.transposed,
        out_type=jax.ShapeDtypeStruct((rows, -(-head.vocab // 8) * 8), x.dtype),
        staging=Staging(x.dtype, 64),
        tiling=tiling,
        name="linear_logit_gradients",
        interpret=interpret,
    )


def _logits(acc, place, bias_gmem, head: Head, interpret):
    """Of a tile: its logits, the slope of the cap (None without one), and its columns, numbered from 0."""
    layout = None if interpret else plgpu.Layout.WGMMA
    column = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=layout)
    z, slope = acc, None
    if bias_gmem is not None:
        z = z + lax.broadcast_in_dim(_of_columns(bias_gmem, place.column, acc.shape[1], interpret), z.shape, (1,))
    if head.softcap is not None:
        t = _tanh(z / head.softcap)
        z, slope = head.softcap * t, 1 - t * t
    if head.vocab % acc.shape[1]:
        z = jnp.where(column < head.vocab - place.column, z, -jnp.inf)
    return z, slope, column


def _tanh(y):
    """tanh to some units of float32; the GPU's own instruction has 11 bits."""
    far = 1 - 2 / (1 + jnp.exp2(y * (2 * LOG2E)))
    square = y * y
    near = y * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))  # exact to float32 up to 0.1
    return jnp.where(jnp.abs(y) < 0.1, near, far)


def _tiles_with_labels(labels, tiles: int, tile_n: int):
    """int32 (blocks of 64 rows, tiles): not 0 where the block has a label in the tile; the others need no search."""
    tile = labels.reshape(-1, WARPGROUP_ROWS, 1) // tile_n
    return jnp.any(tile == jnp.arange(tiles), axis=1).astype(jnp.int32)


def _pad(a, multiple: int, value):
    return jnp.pad(a, (0, -len(a) % multiple), constant_values=value)


def _of_rows(gmem, row, interpret):
    """The numbers of the 64 rows from `row` on."""
    return _load(gmem.at[pl.ds(row, WARPGROUP_ROWS)], 1, interpret)


def _of_columns(gmem, column, count: int, interpret):
    """The numbers of `count` columns from `column` on."""
    return _load(gmem.at[pl.ds(column, count)], 0, interpret)


def _load(gmem, reduced: int, interpret):
    if interpret:
        return gmem[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10 wants the index of the whole
    return plgpu.load(gmem, *index, layout=plgpu.Layout.WGMMA.reduce(reduced), optimized=False)


def _along(of_rows, z):
    return lax.broadcast_in_dim(of_rows, z.shape, (0,))
