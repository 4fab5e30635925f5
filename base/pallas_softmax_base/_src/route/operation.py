"""The router and its gradient as objects."""

import functools

from pallas_softmax_base._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax_base._src.route import xla

_RESIDUALS = (ROW, PER_ROW)  # logits and the winners' indices


def _mosaic_gpu(name: str) -> Kernel:
    from pallas_softmax_base._src.route.mosaic_gpu import KERNELS

    return KERNELS[name]


ROUTE_GRAD = RowOperation(
    name="route_grad",
    arguments=(_RESIDUALS, PER_ROW, PER_ROW),
    results=(ROW,),
    plain=xla.route_grad,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "route_grad")},
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
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "route")},
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
