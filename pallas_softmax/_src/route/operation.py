"""The router and its gradient as objects."""

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax._src.route import xla

_RESIDUALS = (ROW, PER_ROW)  # logits and the winners' indices


def _mosaic_gpu() -> dict[str, Kernel]:
    from pallas_softmax._src.route.mosaic_gpu import KERNELS

    return KERNELS


ROUTE_GRAD = RowOperation(
    name="route_grad",
    arguments=(_RESIDUALS, PER_ROW, PER_ROW),
    results=(ROW,),
    plain=xla.route_grad,
    kernels={"mosaic_gpu": _mosaic_gpu},
    is_gradient=True,
    divided_by_xla=False,
    whole_rows=True,
)
ROUTE_TANGENT = RowOperation(
    name="route_tangent",
    arguments=(_RESIDUALS, ROW),
    results=PER_ROW,
    plain=xla.route_tangent,
    divided_by_xla=False,
    whole_rows=True,
)
ROUTE = RowOperation(
    name="route",
    arguments=(ROW, MASK),  # the bias broadcasts to the logits, like a mask
    results=PER_ROW,
    plain=xla.route,
    kernels={"mosaic_gpu": _mosaic_gpu},
    gradient=ROUTE_GRAD,
    tangent=ROUTE_TANGENT,
    result_names=("weights", "indices", "logsumexp"),
    variables=("logits",),
    differentiable=("weights", "logsumexp"),
    integers=("indices",),
    saved=(("logits", "indices"),),
    divided_by_xla=False,
    whole_rows=True,
)
