"""The three operations on a projection and its softmax, as objects; `gradients.py` describes them.

Their arguments are x, w and bias instead of logits. `linear/mesh.py` divides them over a mesh, so ROW, MASK and
PER_ROW do not apply to them.
"""

from pallas_softmax._src.dispatch.operation import Kernel, Operation
from pallas_softmax._src.linear import xla


def _operation(name: str) -> Operation:
    def mosaic_gpu() -> Kernel:
        from pallas_softmax._src.linear.mosaic_gpu import KERNELS

        return KERNELS[name]

    return Operation(
        name=name,
        arguments=(),
        results=(),
        plain=xla.OPERATIONS[name],
        kernels={"mosaic_gpu": mosaic_gpu},
        kernels_take_mesh_axes=True,
    )


PROJECTION = _operation("projection")
PROJECTION_GRAD = _operation("projection_grad")
PROJECTION_WITH_GRAD = _operation("projection_with_grad")
GRADIENTS = (PROJECTION_GRAD, PROJECTION_WITH_GRAD)  # the other operations return numbers of each token only
