"""softmax, log_softmax, logsumexp and two backwards as a Triton kernel.

Triton is an optional dependency. So the file of kernels, which imports Triton, is imported where they are launched.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.triton import checks
from pallas_softmax._src.triton.launch import launch, mask_arguments
from pallas_softmax._src.triton.plan import FEW_ROWS, WIDEST_STEP, Steps, plan_softmax


def plan(call: Call, capability: tuple[int, int]) -> Steps | Refusal:
    reason = checks.unsupported(call, capability) or checks.missing()
    return plan_softmax(call.vocab) if reason is None else Refusal(reason)


def slower(call: Call) -> str | None:
    """Returns why XLA is faster; None if it is not. A program takes whole rows: few rows leave most of a GPU idle."""
    if call.rows <= FEW_ROWS and call.vocab > WIDEST_STEP:
        return f"slower than xla for up to {FEW_ROWS} rows of more than {WIDEST_STEP}"
    return checks.slower(call)


def softmax_rows(op: str, plan: Steps, x, where, *dy, axes: tuple[int, ...]):
    """Returns what the plain function of the operation named `op` returns; see `mosaic_gpu.softmax_rows`."""
    from pallas_softmax._src.softmax.triton_kernels import softmax_kernel

    arrays = [*jax.tree.leaves(x), *dy]
    folded, mask, unfold = fold(arrays, where, axes)
    last, per_row = folded[-1], op == "logsumexp"
    rows, vocab = last.shape
    mask_array, mask_constants = mask_arguments(mask, last)
    inputs = folded[0], last, mask_array  # a forward has one array, which takes both places
    constants = {
        "ROWS": rows,
        "V": vocab,
        "OP": op,
        "PROGRAM_ROWS": plan.rows,
        "WIDTH": plan.width,
    } | mask_constants
    out = jax.ShapeDtypeStruct(*(((3, rows, 1), jnp.float32) if per_row else (last.shape, last.dtype)))
    (result,) = launch(softmax_kernel, inputs, [out], (-(-rows // plan.rows),), plan.warps, **constants)
    if not per_row:
        return unfold(result)
    lse, m, d = map(unfold, result)
    return lse.astype(last.dtype), Normalizer(m, d)


_NAMES = ("softmax", "log_softmax", "logsumexp", "softmax_grad", "log_softmax_grad")
KERNELS = {name: Kernel(plan, functools.partial(softmax_rows, name), slower) for name in _NAMES}
