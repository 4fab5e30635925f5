"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to.
"""

import math

import jax
import jax.numpy as jnp

from pallas_softmax.mosaic_gpu.launch import slower, unsupported
from pallas_softmax.mosaic_gpu.softmax_kernel import rows
from pallas_softmax.mosaic_gpu.topk_kernel import topk_rows

__all__ = [
    "log_softmax",
    "log_softmax_grad",
    "logsumexp",
    "slower",
    "softmax",
    "softmax_grad",
    "topk",
    "unsupported",
]


def softmax(x, where, *, axes):
    return rows("softmax", (x,), where, axes)


def log_softmax(x, where, *, axes):
    return rows("log_softmax", (x,), where, axes)


def logsumexp(x, where, *, axes):
    return rows("logsumexp", (x,), where, axes)


def softmax_grad(residuals, where, dy, *, axes):
    return rows("softmax_grad", (*residuals, dy), where, axes)


def log_softmax_grad(residuals, where, dy, *, axes):
    return rows("log_softmax_grad", (*residuals, dy), where, axes)


def topk(logits, where, temperature, *, k):
    del where
    *batch, vocab = logits.shape
    if temperature.size > 1:
        temperature = jnp.broadcast_to(temperature, (*batch, 1))
    out = topk_rows(logits.reshape(-1, vocab), temperature.reshape(-1), k)
    return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), out)
