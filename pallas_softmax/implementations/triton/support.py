"""Which calls the kernels take, and which of these XLA runs faster."""

import functools
import importlib.metadata
import importlib.util
import re
import sys

from pallas_softmax import operations
from pallas_softmax.call import Call
from pallas_softmax.implementations.triton.plan import DTYPES, MAX_INDEX, MAX_K, MAX_PARTS, plan_topk


def slower(call: Call) -> str | None:
    """Why XLA is faster than the kernels at a call that they support; None if it is not."""
    if (
        operations.TABLE[call.op].is_gradient
        and call.dtype == "float32"
        and call.masked
        and call.vocab > 16_384
    ):
        return "slower than xla for the masked backward of float32 rows of more than 16384"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take this call on a GPU of this compute capability; None if they do."""
    if capability < (8, 0):
        return f"needs compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    if call.dtype not in DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(DTYPES)}"
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if max(call.rows, call.vocab) > MAX_INDEX:
        return f"more than {MAX_INDEX} rows, or elements of a row: {call.rows} x {call.vocab}"
    if call.op == "merge":
        return "no kernel for winners of other devices"
    if call.op == "topk":
        if not call.trailing:
            return "the row is not contiguous: its axes are not the last ones"
        if call.k is None or not 1 <= call.k <= MAX_K:
            return f"k={call.k} is not from 1 to {MAX_K}"
        if plan_topk(call.rows, call.vocab, call.k, call.dtype).parts > MAX_PARTS:
            return f"k={call.k} of a row of {call.vocab}: more than {MAX_PARTS} parts"
    return missing()


@functools.cache
def missing() -> str | None:
    """Why jax-triton cannot be used here; None if it can."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    cuda = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    return incompatible(version("jax-triton"), version("triton"), sys.version_info[:2], cuda)


def incompatible(
    jax_triton: str | None, triton: str | None, python: tuple[int, int], cuda: bool
) -> str | None:
    """Why these versions do not work together; None if they do. `cuda`: JAX has its CUDA plugin.

    jax-triton 0.3.1 lowers with triton 3.6 to 3.9, 0.4.1 with 3.7 to 3.9, both with jax 0.10.2 to 0.12.0.1.
    """
    install = "pip install 'pallas-softmax[triton]'"
    for name, version, least in (("jax-triton", jax_triton, (0, 3, 1)), ("triton", triton, (3, 6))):
        if version is None:
            return f"{name} is not installed: {install}"
        if _version(version) < least:
            return f"needs {name} {'.'.join(map(str, least))} or newer, not {version}: {install}"
    assert jax_triton is not None and triton is not None
    if _version(jax_triton) >= (0, 4):
        if python < (3, 12):
            return (
                f"jax-triton {jax_triton} needs Python 3.12 or newer, not {python[0]}.{python[1]}: take 0.3.1"
            )
        if _version(triton) < (3, 7):
            return f"jax-triton {jax_triton} needs triton 3.7 or newer, not {triton}; 0.3.1 works with it"
    if not cuda:
        return "JAX is installed without CUDA: pip install 'jax[cuda13]' or 'jax[cuda12]'"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
