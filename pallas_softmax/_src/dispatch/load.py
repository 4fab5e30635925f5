"""Imports an implementation when it is first needed, so that importing the package costs no GPU library."""

from pallas_softmax._src.dispatch.operation import Implementation


def load(name: str) -> Implementation:
    """Returns the implementation of this name, one of `choice.IMPLEMENTATIONS`."""
    match name:
        case "mosaic_gpu":
            from pallas_softmax._src.gpu.implementation import IMPLEMENTATION
        case "triton":
            from pallas_softmax._src.triton.implementation import IMPLEMENTATION
        case "xla":
            from pallas_softmax._src.dispatch.xla import IMPLEMENTATION
        case _:
            raise AssertionError(f"there is no implementation {name!r}")
    return IMPLEMENTATION
