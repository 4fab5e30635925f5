"""The operations softmax, log_softmax and logsumexp, and their derivatives, as objects."""

import dataclasses

from pallas_softmax._src.dispatch.operation import MASK, ROW, Kernel, RowOperation
from pallas_softmax._src.softmax import mesh, xla


def _kernels() -> dict[str, dict[str, Kernel]]:
    from pallas_softmax._src.softmax import mosaic_gpu, triton

    return {"mosaic_gpu": mosaic_gpu.KERNELS, "triton": triton.KERNELS}


LOGSUMEXP = RowOperation(
    name="logsumexp",
    arguments=(ROW, MASK),
    plain=xla.logsumexp,
    import_kernels=_kernels,
    # The gradient is elementwise, so XLA fuses it with its neighbours: one read and one write.
    plain_gradient=xla.logsumexp_grad,
    plain_tangent=xla.logsumexp_tangent,
    result_names=("logsumexp", "m", "d"),
    variables=("x",),
    differentiable=("logsumexp", "d"),  # no derivative depends on m
    saved=(("x", "m", "d"), "where"),
    on_mesh=mesh.logsumexp_on_mesh,
    divided_by_xla=True,
)
LOG_SOFTMAX = RowOperation(
    name="log_softmax",
    arguments=(ROW, MASK),
    results=ROW,
    plain=xla.log_softmax,
    import_kernels=_kernels,
    plain_gradient=xla.log_softmax_grad,
    plain_tangent=xla.log_softmax_tangent,
    result_names=("y",),
    variables=("x",),
    differentiable=("y",),
    saved=(("y",), "where"),
    gradient_needs_kernel=True,
    on_mesh=mesh.log_softmax_on_mesh,
    divided_by_xla=True,
    shard_step=LOGSUMEXP,
)
SOFTMAX = dataclasses.replace(
    LOG_SOFTMAX,
    name="softmax",
    plain=xla.softmax,
    plain_gradient=xla.softmax_grad,
    plain_tangent=xla.softmax_grad,  # the Jacobian is symmetric
    on_mesh=mesh.softmax_on_mesh,
)
