"""The operations on a projection and its softmax, as objects; `gradients.py` describes them.

Their arguments are x, w and bias instead of logits, so they are no `RowOperation`s. `linear/mesh.py` divides them over
a mesh, and their kernels take mesh_axes= themselves.
"""

from pallas_softmax._src.dispatch.operation import Kernel, Operation
from pallas_softmax._src.linear import xla


def _kernels() -> dict[str, dict[str, Kernel]]:
    from pallas_softmax._src.linear import mosaic_gpu

    return {"mosaic_gpu": mosaic_gpu.KERNELS}


def _operation(name: str) -> Operation:
    return Operation(name=name, plain=xla.OPERATIONS[name], import_kernels=_kernels)


PROJECTION = _operation("projection")
PROJECTION_GRAD = _operation("projection_grad")
PROJECTION_SAMPLE = _operation("projection_sample")
