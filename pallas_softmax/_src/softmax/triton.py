"""softmax, log_softmax, logsumexp and two backwards as a Triton kernel.

Triton is an optional dependency. So the file of kernels, which imports Triton, is imported where they are launched.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold
from pallas_softmax._src.gpu.layout import power_of_two
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.triton import checks
from pallas_softmax._src.triton.launch import launch, mask_arguments
from pallas_softmax._src.triton.plan import Steps, plan_softmax


def plan(call: Call, capability: tuple[int, int]) -> Steps | Refusal:
    reason = checks.unsupported(call, capability) or checks.missing()
    return plan_softmax(call.rows, call.vocab) if reason is None else Refusal(reason)


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
        **{"ROWS": rows, "V": vocab, "OP": op, **mask_constants},
        **{"PROGRAM_ROWS": plan.rows, "PARTS": plan.parts, "SLOTS": power_of_two(plan.parts, 1)},
        **{"LENGTH": plan.length, "WIDTH": plan.width},
    }
    out = jax.ShapeDtypeStruct(*(((3, rows, 1), jnp.float32) if per_row else (last.shape, last.dtype)))

    def run(normalizers, out, parts: int, **phase: bool) -> jax.Array:
        grid = -(-rows // plan.rows), parts
        (result,) = launch(
            softmax_kernel, (*inputs, normalizers), [out], grid, plan.warps, **constants, **phase
        )
        return result

    if plan.parts == 1:  # the last array takes the place of the normalizers, which are not read
        result = run(last, out, 1, REDUCE=True, WRITE=True)
    else:
        of_parts = jax.ShapeDtypeStruct((2, rows, plan.parts), jnp.float32)
        normalizers = run(last, of_parts, plan.parts, REDUCE=True, WRITE=False)
        result = run(normalizers, out, 1 if per_row else plan.parts, REDUCE=False, WRITE=True)
    if not per_row:
        return unfold(result)
    lse, m, d = map(unfold, result)
    return lse.astype(last.dtype), Normalizer(m, d)


_NAMES = ("softmax", "log_softmax", "logsumexp", "softmax_grad", "log_softmax_grad")
KERNELS = {name: Kernel(plan, functools.partial(softmax_rows, name), checks.slower) for name in _NAMES}
