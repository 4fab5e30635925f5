"""What the tests of all kernels of mosaic_gpu share; tests/OPERATION/kernels.py runs the kernels of an operation.

Those modules run a kernel with a given plan, in Pallas's interpreter or on a GPU. They also have plans that cover every
kind of launch, and the checks of the results.
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
