"""Kernels that multiply the gradients of logits, dz (rows, vocab), by what made the logits: dx = dz w, dw += x dz."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.linear.logits_kernel import _along, _of_rows, _pad
from pallas_softmax.implementations.mosaic_gpu.linear.plan import Tiling
from pallas_softmax.implementations.mosaic_gpu.linear.product import TILE_M, Staging, product, store


def times_w(dz, w, scale, *, transposed: bool, tiling: Tiling = Tiling(), interpret: Any = None):
    """dx: scale (rows,) times dz @ w.T, in the dtype of w, (rows, depth)."""
    depth = w.shape[1 if transposed else 0]

    def epilogue(acc, place, scale_gmem, out_gmem):
        if scale_gmem is not None:
            acc = acc * _along(_of_rows(scale_gmem, place.row, interpret), acc)
        store(place.staging, acc.astype(w.dtype), out_gmem, place.row, place.column)

    return product(
        epilogue, dz, w, (None if scale is None else _pad(scale, TILE_M, 0),),
        b_transposed=not transposed,
        out_type=jax.ShapeDtypeStruct((len(dz), depth), w.dtype),
        staging=Staging(w.dtype, 64),
        tiling=tiling, name="linear_dx", interpret=interpret,
    )


def weight_gradient(x, dz, vocab, *, transposed: bool, into=None, dtype=jnp.float32, tiling: Tiling = Tiling(), interpret: Any = None):
    """dw = x.T @ dz (or its transpose), added to `into` in place, if that is given: float32 of the shape of w."""
    depth = x.shape[1]
    shape = (vocab, depth) if transposed else (depth, vocab)

    def epilogue(acc, place, out_gmem):
        store(place.staging, acc.astype(dtype), out_gmem, place.row, place.column, add=into is not None)

    return product(
        epilogue, *((dz, x) if transposed else (x, dz)), (),
        a_transposed=True,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        into=into,
        staging=Staging(dtype, 128 // jnp.dtype(dtype).itemsize),
        tiling=tiling, name="linear_dw", interpret=interpret,
    )
