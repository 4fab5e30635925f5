"""Which calls the kernels take, and which of these XLA runs faster."""

import jax.numpy as jnp

from pallas_softmax import operations
from pallas_softmax.call import Call
from pallas_softmax.implementations.mosaic_gpu.device.hardware import ACCESS_BYTES, DTYPES, SMEM_BYTES
from pallas_softmax.implementations.mosaic_gpu.device.layout import aligned_view
from pallas_softmax.implementations.mosaic_gpu.topk.plan import MAX_K, lists_per_merge

_LONE_ROW = 65_536


def slower(call: Call) -> str | None:
    """Why XLA is faster than the kernels at a call that they support; None if it is not.

    The kernels are at least as fast at nearly every shape measured (benchmarks/results/launch, figure2) but for
    the backward and thousands of winners of one very long row.
    """
    if call.op == "topk" and call.rows == 1 and call.vocab > _LONE_ROW and (call.k or 0) > 1_024:
        if call.dtype == "float32":
            return f"slower than xla for more than 1024 of a single float32 row of more than {_LONE_ROW}"
    if operations.TABLE[call.op].is_gradient and call.rows == 1 and call.vocab > _LONE_ROW:
        return f"slower than xla for the backward of a single row of more than {_LONE_ROW}"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take this call on a GPU of this compute capability; None if they do."""
    if capability[0] not in SMEM_BYTES:
        return f"needs compute capability 9.0 or newer, not {capability[0]}.{capability[1]}"
    if call.dtype not in DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(DTYPES)}"
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if call.op in ("topk", "merge"):
        reason = _topk_unsupported(call)
        if reason is not None:
            return reason
    vec = ACCESS_BYTES // jnp.dtype(call.dtype).itemsize
    view = aligned_view(call.rows, call.vocab, vec)
    if view[-1] >= 2**31:
        what = (
            "a row" if call.vocab >= 2**31 else f"rows of which neither V nor number is a multiple of {vec}"
        )
        return f"{what}, {call.rows} x {call.vocab} {call.dtype}, of 2^31 elements or more"
    return None


def _topk_unsupported(call: Call) -> str | None:
    if not call.trailing:
        return "the row is not contiguous: its axes are not the last ones"
    if call.k is None or not 1 <= call.k <= MAX_K:
        return f"k={call.k} is not from 1 to {MAX_K}"
    if call.op == "merge" and call.vocab > lists_per_merge(call.k) * call.k:
        return f"{call.vocab // call.k} lists of {call.k} are more than the {lists_per_merge(call.k)} that a CTA merges"
    return None
