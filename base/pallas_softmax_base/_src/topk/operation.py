"""Top-k of a softmax, its derivatives, and the merge of several devices' winners, as objects."""

import functools

from pallas_softmax_base._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax_base._src.topk import mesh, xla

_RESIDUALS = (ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW)  # logits, temperature, m, d and the winners' indices


def _mosaic_gpu(name: str) -> Kernel:
    from pallas_softmax_base._src.topk.mosaic_gpu import KERNELS

    return KERNELS[name]


def _triton() -> Kernel:
    from pallas_softmax_base._src.topk.triton import KERNEL

    return KERNEL


TOPK_GRAD = RowOperation(
    name="topk_grad",
    arguments=(_RESIDUALS, MASK, PER_ROW, PER_ROW),
    results=(ROW, PER_ROW),
    plain=xla.topk_grad,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "topk_grad")},
    is_gradient=True,
    divided_by_xla=False,
)
TOPK_TANGENT = RowOperation(
    name="topk_tangent",
    arguments=(_RESIDUALS, MASK, ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.topk_tangent,
    divided_by_xla=False,
)
MERGE = RowOperation(
    name="merge",
    arguments=(ROW, MASK, ROW, PER_ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.merge,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "merge")},
)
TOPK = RowOperation(
    name="topk",
    arguments=(ROW, MASK, PER_ROW),
    results=PER_ROW,
    plain=xla.topk,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "topk"), "triton": _triton},
    gradient=TOPK_GRAD,
    tangent=TOPK_TANGENT,
    result_names=("values", "indices", "m", "d"),
    variables=("logits", "temperature"),
    differentiable=("values", "d"),
    integers=("indices",),
    saved=(("logits", "temperature", "m", "d", "indices"), "where"),
    on_mesh=functools.partial(mesh.topk_on_mesh, merge=MERGE),
    divided_by_xla=False,
)
