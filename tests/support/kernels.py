"""Shared by the modules tests/OPERATION/kernels.py, which run the kernels of mosaic_gpu of an operation.

They run a kernel with a given plan, in Pallas's interpreter or on a GPU. They also have plans that cover every kind of
launch, and the checks of the results.
"""

import dataclasses

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams()


def fewer_rows(plan):
    """Returns a tile with fewer rows, so that the few rows of a test take several tiles. For the interpreter only."""
    return dataclasses.replace(plan, rows=min(plan.rows, 4))
