"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to: the reduced
axes are the last ones, so that an array is folded to (rows, vocab) without a copy.
"""

import math

import jax
import jax.numpy as jnp

from pallas_softmax.mosaic_gpu.launch import slower, unsupported
from pallas_softmax.mosaic_gpu.softmax_kernel import softmax_grad_rows, softmax_rows
from pallas_softmax.mosaic_gpu.topk_kernel import topk_rows

__all__ = ["slower", "softmax", "softmax_grad", "topk", "unsupported"]


def softmax(x, where, *, axes):
    del where
    vocab = math.prod(x.shape[a] for a in axes)
    return softmax_rows(x.reshape(-1, vocab)).reshape(x.shape)


def softmax_grad(residuals, where, dy, *, axes):
    del where
    (y,) = residuals
    vocab = math.prod(y.shape[a] for a in axes)
    return softmax_grad_rows(y.reshape(-1, vocab), dy.reshape(-1, vocab)).reshape(y.shape)


def topk(logits, where, temperature, *, k):
    del where
    *batch, vocab = logits.shape
    if temperature.size > 1:
        temperature = jnp.broadcast_to(temperature, (*batch, 1))
    out = topk_rows(logits.reshape(-1, vocab), temperature.reshape(-1), k)
    return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), out)
