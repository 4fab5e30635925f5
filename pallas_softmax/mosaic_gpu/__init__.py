"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to.
"""

from typing import Any

import jax

from pallas_softmax import dispatch
from pallas_softmax.folding import fold_topk
from pallas_softmax.mosaic_gpu import launch, topk_kernel, topk_tile_kernel
from pallas_softmax.mosaic_gpu.launch import slower, unsupported
from pallas_softmax.mosaic_gpu.softmax_kernel import rows
from pallas_softmax.online import Normalizer

__all__ = [
    "log_softmax",
    "log_softmax_grad",
    "logsumexp",
    "merge",
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
    x, mask, temperature, unfold = fold_topk(logits, where, temperature)
    plan = launch.topk_plan(x.shape[0], x.shape[1], k, x.dtype, dispatch.capability())
    kernel: Any = topk_tile_kernel if isinstance(plan, launch.Tile) else topk_kernel
    out = kernel.topk_rows(x, mask, temperature, k, plan, log=log, dtype=dtype)
    return jax.tree.map(unfold, out)


def merge(won, kept, indices, parts, temperature, *, k, log, dtype):
    folded, _, temperature, unfold = fold_topk(won, None, temperature)
    kept, indices, *parts = jax.tree.map(lambda a: a.reshape(len(folded), -1), (kept, indices, *parts))
    out = topk_kernel.merge_rows(
        folded, kept, indices, Normalizer(*parts), temperature, k, log=log, dtype=dtype
    )
    return jax.tree.map(unfold, out)
