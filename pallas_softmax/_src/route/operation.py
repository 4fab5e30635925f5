"""The router and its gradient as objects."""

import functools

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, Operation
from pallas_softmax._src.route import xla
from pallas_softmax._src.topk.operation import indices_of

_RESIDUALS = (ROW, PER_ROW)  # logits and the winners' indices


def _save(xs, constants, ys, others):
    """Returns what the derivatives need: the logits and the winners' indices."""
    return ((*xs, indices_of(others[0])),)


def _mosaic_gpu(name: str) -> Kernel:
    from pallas_softmax._src.route.mosaic_gpu import KERNELS

    return KERNELS[name]


ROUTE_GRAD = Operation(
    name="route_grad",
    arguments=(_RESIDUALS, PER_ROW, PER_ROW),
    results=(ROW,),
    plain=xla.route_grad,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "route_grad")},
    is_gradient=True,
    divided_by_xla=False,
    whole_rows=True,
)
ROUTE_TANGENT = Operation(
    name="route_tangent",
    arguments=(_RESIDUALS, ROW),
    results=PER_ROW,
    plain=xla.route_tangent,
    divided_by_xla=False,
    whole_rows=True,
)
ROUTE = Operation(
    name="route",
    arguments=(ROW, MASK),  # the bias broadcasts to the logits, like a mask
    results=PER_ROW,
    plain=xla.route,
    kernels={"mosaic_gpu": functools.partial(_mosaic_gpu, "route")},
    gradient=ROUTE_GRAD,
    tangent=ROUTE_TANGENT,
    save=_save,
    divided_by_xla=False,
    whole_rows=True,
)
