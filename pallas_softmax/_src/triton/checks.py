"""Reasons why no Triton kernel can run a call, and why XLA may be faster. Nothing here imports Triton."""

import functools
import importlib.metadata
import importlib.util
import re
import sys

from pallas_softmax._src.dispatch.operation import Call
from pallas_softmax._src.folding import TRANSPOSED
from pallas_softmax._src.gpu.checks import unsupported_array
from pallas_softmax._src.triton.plan import MAX_INDEX

# The first GPUs with the instructions that Triton emits for bfloat16: A100.
MIN_CAPABILITY = (8, 0)

# Elements of the longest row for a masked backward in float32 that the kernels run as fast as XLA (measured on an
# H100). Longer ones are read twice, in steps that the mask keeps small.
FAST_MASKED_BACKWARD = 16_384
# Elements of the longest row of a float32 softmax that XLA keeps on chip, so that it is as fast.
FUSED_ROW = 8_192

# The oldest versions that can lower and compile the kernels.
MIN_JAX_TRITON = (0, 3, 1)
MIN_TRITON = (3, 6)


def slower(call: Call) -> str | None:
    """Returns why XLA is faster than the kernels at a call that they support; None if it is not."""
    if call.inner != 1:
        return TRANSPOSED
    is_plain = call.op == "softmax" and call.dtype == "float32" and not call.masked
    if is_plain and call.vocab % 4 == 0 and call.vocab <= FUSED_ROW:
        return f"no faster than xla for aligned float32 rows of up to {FUSED_ROW} without where"
    is_gradient = call.row_operation.is_gradient
    if is_gradient and call.masked and call.dtype == "float32" and call.vocab > FAST_MASKED_BACKWARD:
        return f"slower than xla for the masked backward of float32 rows of more than {FAST_MASKED_BACKWARD}"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Returns why the kernels cannot run a call on a GPU of this compute capability; None if they can."""
    if capability < MIN_CAPABILITY:
        return f"needs compute capability {_dotted(MIN_CAPABILITY)} or newer, not {_dotted(capability)}"
    reason = unsupported_array(call)
    if reason is None and max(call.rows, call.vocab) > MAX_INDEX:
        return f"more than {MAX_INDEX} rows, or elements of a row: {call.rows} x {call.vocab}"
    return reason


@functools.cache
def missing() -> str | None:
    """Returns why jax-triton cannot be used in this Python environment; None if it can."""
    cuda = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    return incompatible(_installed("jax-triton"), _installed("triton"), sys.version_info[:2], cuda)


def incompatible(jax_triton: str | None, triton: str | None, python: tuple[int, int], cuda: bool) -> str | None:
    """Returns why versions do not work together; None if they do. A package that is not installed has the version None.

    jax-triton 0.3.1 lowers with triton 3.6 to 3.9, and 0.4.1 with triton 3.7 to 3.9, both with jax 0.10.2 to
    0.12.0.1. It makes custom calls with JAX's CUDA plugin (`cuda`).
    """
    install = f"pip install 'jax-triton>={_dotted(MIN_JAX_TRITON)}'"
    required = (("jax-triton", jax_triton, MIN_JAX_TRITON), ("triton", triton, MIN_TRITON))
    for name, version, least in required:
        if version is None:
            return f"{name} is not installed: {install}"
        if _parse(version) < least:
            return f"needs {name} {_dotted(least)} or newer, not {version}: {install}"
    assert jax_triton is not None and triton is not None
    if _parse(jax_triton) >= (0, 4) and python < (3, 12):
        return f"jax-triton {jax_triton} needs Python 3.12 or newer, not {_dotted(python)}: take 0.3.1"
    if _parse(jax_triton) >= (0, 4) and _parse(triton) < (3, 7):
        return f"jax-triton {jax_triton} needs triton 3.7 or newer, not {triton}; 0.3.1 works with it"
    if not cuda:
        return "JAX is installed without CUDA: pip install 'jax[cuda13]' or 'jax[cuda12]'"
    return None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse(version: str) -> tuple[int, ...]:
    """Returns the first three numbers of a version; the tuples compare like versions."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
