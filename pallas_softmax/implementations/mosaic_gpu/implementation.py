"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to.
"""

from typing import Any

import jax

from pallas_softmax import target
from pallas_softmax.call import Implementation
from pallas_softmax.implementations.folding import fold_topk
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax.rows import rows
from pallas_softmax.implementations.mosaic_gpu.support import slower, unsupported
from pallas_softmax.implementations.mosaic_gpu.topk import merge_kernel, tile_kernel, window_kernel
from pallas_softmax.implementations.mosaic_gpu.topk.plan import plan_topk
from pallas_softmax.online import Normalizer


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
    plan = plan_topk(x.shape[0], x.shape[1], k, x.dtype, target.capability())
    kernel: Any = tile_kernel if isinstance(plan, Tile) else window_kernel
    out = kernel.topk_rows(x, mask, temperature, k, plan, log=log, dtype=dtype)
    return jax.tree.map(unfold, out)


def merge(won, kept, indices, parts, temperature, *, k, log, dtype):
    folded, _, temperature, unfold = fold_topk(won, None, temperature)
    kept, indices, *parts = jax.tree.map(lambda a: a.reshape(len(folded), -1), (kept, indices, *parts))
    out = merge_kernel.merge_rows(
        folded, kept, indices, Normalizer(*parts), temperature, k, log=log, dtype=dtype
    )
    return jax.tree.map(unfold, out)


IMPLEMENTATION = Implementation(
    functions={
        "softmax": softmax,
        "softmax_grad": softmax_grad,
        "log_softmax": log_softmax,
        "log_softmax_grad": log_softmax_grad,
        "logsumexp": logsumexp,
        "topk": topk,
        "merge": merge,
    },
    unsupported=unsupported,
    slower=slower,
)
