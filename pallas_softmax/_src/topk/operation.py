"""The operations of `fused_topk` (TOPK) and `top_k` (SELECT), their derivatives, and the merge of lists of winners."""

import functools

from pallas_softmax._src.dispatch.operation import KERNEL_DTYPES, MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax._src.sort_keys import INTEGERS_AS_FLOATS
from pallas_softmax._src.topk import mesh, xla


def _kernels() -> dict[str, dict[str, Kernel]]:
    from pallas_softmax._src.topk import mosaic_gpu, triton

    return {"mosaic_gpu": mosaic_gpu.KERNELS, "triton": triton.KERNELS}


MERGE = RowOperation(
    name="merge", arguments=(ROW, MASK, ROW, PER_ROW, PER_ROW), plain=xla.merge, import_kernels=_kernels
)
TOPK = RowOperation(
    name="topk",
    arguments=(ROW, MASK, PER_ROW),
    plain=xla.topk,
    import_kernels=_kernels,
    plain_gradient=xla.topk_grad,
    plain_tangent=xla.topk_tangent,
    result_names=("values", "indices", "m", "d"),
    variables=("logits", "temperature"),
    differentiable=("values", "d"),
    saved=(("logits", "temperature", "m", "d", "indices"), "where"),
    on_mesh=functools.partial(mesh.topk_on_mesh, merge=MERGE),
)
SELECT = RowOperation(
    name="top_k",
    arguments=(ROW, MASK, PER_ROW),
    plain=xla.select,
    import_kernels=_kernels,
    kernel_dtypes=(*KERNEL_DTYPES, *INTEGERS_AS_FLOATS),
    plain_gradient=xla.select_grad,
    plain_tangent=xla.select_tangent,
    result_names=("values", "indices"),
    variables=("operand",),
    differentiable=("values",),
    saved=(("operand", "indices"), "where", "lengths"),
    on_mesh=functools.partial(mesh.select_on_mesh, merge=MERGE),
)
