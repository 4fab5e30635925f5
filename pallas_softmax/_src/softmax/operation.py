"""The operations softmax, log_softmax and logsumexp, and their derivatives, as objects."""

import dataclasses

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax._src.softmax import mesh, xla


def _mosaic_gpu() -> dict[str, Kernel]:
    from pallas_softmax._src.softmax.mosaic_gpu import KERNELS

    return KERNELS


def _triton() -> dict[str, Kernel]:
    from pallas_softmax._src.softmax.triton import KERNELS

    return KERNELS


_KERNELS = {"mosaic_gpu": _mosaic_gpu, "triton": _triton}

LOGSUMEXP = RowOperation(
    name="logsumexp",
    arguments=(ROW, MASK),
    results=PER_ROW,
    plain=xla.logsumexp,
    kernels=_KERNELS,
    # The gradient is elementwise, so XLA fuses it with its neighbours: one read and one write.
    plain_gradient=xla.logsumexp_grad,
    plain_tangent=xla.logsumexp_tangent,
    result_names=("logsumexp", "m", "d"),
    variables=("x",),
    differentiable=("logsumexp", "d"),  # no derivative depends on m
    saved=(("x", "m", "d"), "where"),
    on_mesh=mesh.logsumexp_on_mesh,
)
LOG_SOFTMAX = RowOperation(
    name="log_softmax",
    arguments=(ROW, MASK),
    results=ROW,
    plain=xla.log_softmax,
    kernels=_KERNELS,
    plain_gradient=xla.log_softmax_grad,
    plain_tangent=xla.log_softmax_tangent,
    gradient_kernels=_KERNELS,
    result_names=("y",),
    variables=("x",),
    differentiable=("y",),
    saved=(("y",), "where"),
    gradient_needs_kernel=True,
    on_mesh=mesh.log_softmax_on_mesh,
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
