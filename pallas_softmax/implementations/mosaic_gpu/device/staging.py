"""The walk over a row in shared memory."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP


def load(ref, layout):
    """The block in `ref`, one-dimensional; the interpreter has no layouts (None)."""
    if layout is None:
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # an argument of jax 0.10 only
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref, block, interpret):
    """Writes a block to device memory."""
    if interpret:
        ref[...] = block
    else:
        if hasattr(plgpu, "store"):  # jax 0.12
            plgpu.store(ref, block, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            ref[...] = block


def per_thread(interpret) -> Any:
    """The layout of a block with an element for each thread."""
    return None if interpret else plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def laid_out(block, interpret):
    """The block in that layout."""
    return block if interpret else plgpu.layout_cast(block, per_thread(interpret))
