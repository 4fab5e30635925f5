"""Implementation `mosaic_gpu`: Pallas kernels for Hopper and newer GPUs.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to: the reduced
axes are the last ones, so that an array is folded to (rows, vocab) without a copy.
"""

import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_softmax.mosaic_gpu.launch import slower, unsupported
from pallas_softmax.mosaic_gpu.softmax_kernel import softmax_grad_rows, softmax_rows
from pallas_softmax.mosaic_gpu.topk_kernel import topk_rows

__all__ = ["slower", "softmax", "softmax_grad", "topk", "unsupported"]


def softmax(x, where, *, axes):
    del where
    vocab = math.prod(x.shape[a] for a in axes)
    return _batched(softmax_rows)(x.reshape(-1, vocab)).reshape(x.shape)


def softmax_grad(residuals, where, dy, *, axes):
    del where
    (y,) = residuals
    vocab = math.prod(y.shape[a] for a in axes)
    dx = _batched(softmax_grad_rows)(y.reshape(-1, vocab), dy.astype(y.dtype).reshape(-1, vocab))
    return dx.reshape(y.shape)


def topk(logits, where, temperature, *, k):
    del where
    *batch, vocab = logits.shape
    kernel = _batched(lambda x, t: topk_rows(x, t, k))
    out = kernel(logits.reshape(-1, vocab), temperature.reshape(-1))
    return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), out)


def _batched(kernel):
    """`kernel` of arrays (rows, ...), under vmap one launch over all rows. An array (1,) serves every row."""

    def fold(axis_size, in_batched, *args):
        rows = args[0].shape[1 if in_batched[0] else 0]

        def to_rows(a, batched):
            if not batched and a.shape == (1,):
                return a
            a = a if batched else a[None]
            return jnp.broadcast_to(a, (axis_size, rows, *a.shape[2:])).reshape(-1, *a.shape[2:])

        out = vmappable(*map(to_rows, args, in_batched))
        out = jax.tree.map(lambda a: a.reshape(axis_size, rows, *a.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    vmappable = custom_vmap(kernel)
    vmappable.def_vmap(fold)
    return vmappable
