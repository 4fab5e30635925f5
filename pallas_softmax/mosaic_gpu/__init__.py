"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_softmax import dispatch
from pallas_softmax.folding import fold_mask
from pallas_softmax.mosaic_gpu import launch, topk_kernel, topk_tile_kernel
from pallas_softmax.mosaic_gpu.launch import slower, unsupported
from pallas_softmax.mosaic_gpu.softmax_kernel import rows
from pallas_softmax.online import Normalizer

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
    (y,) = rows("softmax", (x,), where, axes)
    return y


def log_softmax(x, where, *, axes):
    (y,) = rows("log_softmax", (x,), where, axes)
    return y


def logsumexp(x, where, *, axes):
    lse, m, d = rows("logsumexp", (x,), where, axes)
    return lse, Normalizer(m, d)


def softmax_grad(residuals, where, dy, *, axes):
    (y,) = rows("softmax_grad", (*residuals, dy), where, axes)
    return y


def log_softmax_grad(residuals, where, dy, *, axes):
    (y,) = rows("log_softmax_grad", (*residuals, dy), where, axes)
    return y


def topk(logits, where, temperature, *, k, log, dtype):
    *batch, vocab = logits.shape
    if temperature.size > 1:
        temperature = jnp.broadcast_to(temperature, (*batch, 1))
    mask = fold_mask(where, logits.shape, len(batch))
    x = logits.reshape(-1, vocab)
    plan = launch.topk_plan(len(x), vocab, k, x.dtype, dispatch.capability())
    kernel: Any = topk_tile_kernel if isinstance(plan, launch.Tile) else topk_kernel
    out = kernel.topk_rows(x, mask, temperature.reshape(-1), k, plan, log=log, dtype=dtype)
    return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), out)
