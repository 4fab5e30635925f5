"""Reasons why no Mosaic GPU kernel can run a call, whatever it computes."""

import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import KERNEL_DTYPES, Call
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, INT32_LIMIT, SMEM_BYTES
from pallas_softmax._src.gpu.layout import aligned_view


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Returns why the kernels cannot run a call on a GPU of this compute capability; None if they can."""
    if capability[0] not in SMEM_BYTES:
        majors = " or ".join(map(str, SMEM_BYTES))
        return f"needs a GPU of compute capability {majors}, not {capability[0]}.{capability[1]}"
    return unsupported_array(call)


def unsupported_array(call: Call) -> str | None:
    """Returns why no kernel of any kind takes an array; None if they do."""
    if call.dtype not in KERNEL_DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(KERNEL_DTYPES)}"
    if call.depth is None and (call.rows == 0 or call.vocab == 0):
        return "the array is empty"
    return None


def not_contiguous(call: Call) -> str | None:
    return None if call.inner == 1 else "the row is not contiguous: its axes are not the last ones"


def too_large(call: Call) -> str | None:
    """Returns a reason if int32 cannot number the elements of a row, as bulk copies see it."""
    vec = ACCESS_BYTES // jnp.dtype(call.dtype).itemsize
    if aligned_view(call.rows, call.vocab, vec)[-1] < INT32_LIMIT:
        return None
    unaligned = f"rows with a number of elements that is not a multiple of {vec}"
    what = "a row" if call.vocab >= INT32_LIMIT else unaligned
    return f"{what}, {call.rows} x {call.vocab} {call.dtype}, of 2^31 elements or more"
