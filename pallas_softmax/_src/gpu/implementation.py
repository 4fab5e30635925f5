"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs, through Mosaic GPU.

The functions have the names, arguments and results that every implementation has (see `implementations/xla.py`).
They take the calls that `support.unsupported` has no objection to.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import Implementation
from pallas_softmax._src.folding import fold_mask, fold_topk
from pallas_softmax._src.gpu.hardware import DTYPES
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.support import slower, unsupported
from pallas_softmax._src.linear import pieces as projection
from pallas_softmax._src.sample import kernel as sample_kernel
from pallas_softmax._src.sample.draw import SamplingParams
from pallas_softmax._src.sample.plan import plan_sample
from pallas_softmax._src.softmax.mosaic_gpu import softmax_rows
from pallas_softmax._src.topk import merge_kernel, tile_kernel, window_kernel
from pallas_softmax._src.topk import tile_grad_kernel as grad_kernel
from pallas_softmax._src.topk.plan import plan_topk
from pallas_softmax._src.topk.tile_plan import plan_topk_grad
from pallas_softmax.online import Normalizer


def softmax(x, where, *, axes):
    (y,) = softmax_rows("softmax", (x,), where, axes)
    return y


def log_softmax(x, where, *, axes):
    (y,) = softmax_rows("log_softmax", (x,), where, axes)
    return y


def logsumexp(x, where, *, axes):
    lse, m, d = softmax_rows("logsumexp", (x,), where, axes)
    return lse, Normalizer(m, d)


def softmax_grad(residuals, where, dy, *, axes):
    (y,) = softmax_rows("softmax_grad", (*residuals, dy), where, axes)
    return y


def log_softmax_grad(residuals, where, dy, *, axes):
    (y,) = softmax_rows("log_softmax_grad", (*residuals, dy), where, axes)
    return y


def topk(logits, where, temperature, *, k, log, dtype):
    x, mask, temperature, unfold = fold_topk(logits, where, temperature)
    rows, vocab = x.shape
    plan = plan_topk(rows, vocab, k, x.dtype, target.capability())
    kernel: Any = tile_kernel if isinstance(plan, Tile) else window_kernel
    winners_and_normalizer = kernel.topk_rows(x, mask, temperature, k, plan, log=log, dtype=dtype)
    return jax.tree.map(unfold, winners_and_normalizer)


def topk_grad(residuals, where, g, g_d, *, log):
    assert where is None, "unsupported"
    logits, temperature, *per_row, indices = residuals
    x, _, temperature, unfold = fold_topk(logits, None, temperature)
    plan = plan_topk_grad(x.shape[1], x.dtype)
    assert plan is not None, "unsupported"

    def folded(a):  # of a vmap, what all slices share has size 1 there
        return jnp.broadcast_to(a, (*logits.shape[:-1], a.shape[-1])).reshape(len(x), -1)

    m, d, g_d = (folded(a.astype(jnp.float32))[:, 0] for a in (*per_row, g_d))
    g = folded(g if g.dtype.name in DTYPES else g.astype(jnp.float32))
    dx, dt = grad_kernel.topk_grad_rows(x, temperature, m, d, folded(indices), g, g_d, plan, log=log)
    return dx.reshape(logits.shape), unfold(dt)


def merge(won, kept, indices, parts, temperature, *, k, log, dtype):
    x, _, temperature, unfold = fold_topk(won, None, temperature)
    kept, indices, *parts = jax.tree.map(lambda a: a.reshape(len(x), -1), (kept, indices, *parts))
    winners_and_normalizer = merge_kernel.merge_rows(
        x, kept, indices, Normalizer(*parts), temperature, k, log=log, dtype=dtype
    )
    return jax.tree.map(unfold, winners_and_normalizer)


def sample(logits, where, u, temperature, top_k, top_p, min_p):
    *batch, vocab = logits.shape
    layout = plan_sample(logits.size // vocab, vocab, logits.dtype, target.capability())
    assert layout is not None, "unsupported"

    def per_row(numbers, default, dtype):
        numbers = jnp.asarray(default if numbers is None else numbers, dtype)
        return jnp.broadcast_to(numbers, (*batch, 1)).reshape(-1) if numbers.size > 1 else numbers.reshape(1)

    numbers = SamplingParams(
        per_row(u, None, jnp.float32),
        per_row(temperature, None, jnp.float32),
        per_row(top_k, vocab, jnp.int32),
        per_row(top_p, 1, jnp.float32),
        per_row(min_p, 0, jnp.float32),
    )
    mask = fold_mask(where, logits.shape, len(batch))
    results = sample_kernel.sample_rows(logits.reshape(-1, vocab), mask, numbers, layout)
    return tuple(result.reshape(*batch, 1) for result in results)


IMPLEMENTATION = Implementation(
    functions={
        "softmax": softmax,
        "softmax_grad": softmax_grad,
        "log_softmax": log_softmax,
        "log_softmax_grad": log_softmax_grad,
        "logsumexp": logsumexp,
        "topk": topk,
        "topk_grad": topk_grad,
        "merge": merge,
        **projection.operations(),
        "sample": sample,
    },
    unsupported=unsupported,
    slower=slower,
)
