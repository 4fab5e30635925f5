"""Kernels that multiply gradients of logits, dz (rows, V), by what the logits were made of."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_softmax.implementations.mosaic_gpu.linear.plan import Tiling
from pallas_softmax.implementations.mosaic_gpu.linear.product import Place, product, store
from pallas_softmax.projection import Head


def add_to_weight_gradient(
    total: jax.Array, x: jax.Array, dz: jax.Array, *, head: Head, tiling: Tiling, interpret: Any = None
) -> jax.Array:
    """total + x.T @ dz, or its transpose for head.transpose_w, in place: float32 of the shape of w.

    The sums are added by the L2 cache, while the CTA is at its next tile: `total` is not read into the multiprocessor.
    """

    def epilogue(acc, place: Place, total_gmem):
        store(place, acc, total_gmem, add=True)

    (total,) = product(
        epilogue,
        *((dz, x) if head.transpose_w else (x, dz)),
        (),
        (jax.ShapeDtypeStruct(total.shape, total.dtype),),
        a_transposed=True,
        into=(total,),
        staged=jnp.float32,
        tiling=tiling,
        name="linear_weight_gradient",
        interpret=interpret,
    )
    return total
