"""Top-k of a softmax, its derivatives, and the merge of several devices' winners, as objects."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, Operation
from pallas_softmax._src.topk import mesh, xla

_RESIDUALS = (ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW)  # logits, temperature, m, d and the winners' indices


def indices_of(bits):
    """Returns the int32 indices that are kept as floats with the same bits."""
    return lax.bitcast_convert_type(bits, jnp.int32)


def _save(xs, constants, ys, others):
    """Returns what the derivatives need: the logits, the temperature, (m, d), the winners' indices, and the mask."""
    m, bits = others
    return (*xs, m, ys[1], indices_of(bits)), *constants


def _mosaic_gpu(name: str) -> Kernel:
    from pallas_softmax._src.topk.mosaic_gpu import KERNELS

    return KERNELS[name]


def _triton() -> Kernel:
    from pallas_softmax._src.topk.triton import KERNEL

    return KERNEL


TOPK_GRAD = Operation(
    name="topk_grad",
    arguments=(_RESIDUALS, MASK, PER_ROW, PER_ROW),
    results=(ROW, PER_ROW),
    plain=xla.topk_grad,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "topk_grad")},
    is_gradient=True,
    divided_by_xla=False,
)
TOPK_TANGENT = Operation(
    name="topk_tangent",
    arguments=(_RESIDUALS, MASK, ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.topk_tangent,
    divided_by_xla=False,
)
MERGE = Operation(
    name="merge",
    arguments=(ROW, MASK, ROW, PER_ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.merge,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "merge")},
)
TOPK = Operation(
    name="topk",
    arguments=(ROW, MASK, PER_ROW),
    results=PER_ROW,
    plain=xla.topk,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "topk"), "triton": _triton},
    gradient=TOPK_GRAD,
    tangent=TOPK_TANGENT,
    save=_save,
    on_mesh=functools.partial(mesh.topk_on_mesh, merge=MERGE),
    divided_by_xla=False,
)
