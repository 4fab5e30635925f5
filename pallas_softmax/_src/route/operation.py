"""The router and its gradient as objects."""

from pallas_softmax._src.dispatch.operation import MASK, ROW, Kernel, RowOperation
from pallas_softmax._src.route import xla


def _kernels() -> dict[str, dict[str, Kernel]]:
    from pallas_softmax._src.route import kernel

    return {"mosaic_gpu": kernel.KERNELS}


ROUTE = RowOperation(
    name="route",
    arguments=(ROW, MASK),  # the bias broadcasts to the logits, like a mask
    plain=xla.route,
    import_kernels=_kernels,
    plain_gradient=xla.route_grad,
    plain_tangent=xla.route_tangent,
    result_names=("weights", "indices", "logsumexp"),
    variables=("logits",),
    differentiable=("weights", "logsumexp"),
    saved=(("logits", "indices"),),
    whole_rows=True,
)
