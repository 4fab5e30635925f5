"""softmax, log_softmax, logsumexp and two backwards as Triton kernels.

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
from pallas_softmax._src.triton.plan import Block, Long, plan_softmax


def plan(call: Call, capability: tuple[int, int]) -> Block | Long | Refusal:
    if reason := checks.unsupported(call, capability) or checks.missing():
        return Refusal(reason)
    return plan_softmax(call.op, call.rows, call.vocab, call.dtype, call.masked)


def softmax_rows(op: str, plan: Block | Long, x, where, *dy, axes: tuple[int, ...]):
    """Returns what the plain function of the operation named `op` returns; see `mosaic_gpu.softmax_rows`."""
    from pallas_softmax._src.softmax.triton_kernels import long_kernel, rows_kernel

    arrays = [*jax.tree.leaves(x), *dy]
    folded, mask, unfold = fold(arrays, where, axes)
    last = folded[-1]
    rows, vocab = last.shape
    mask_array, mask_constants = mask_arguments(mask, last)
    inputs = folded[0], last, mask_array  # a forward has one array, which takes both places
    constants = {"ROWS": rows, "V": vocab, "OP": op} | mask_constants
    shape, dtype = ((3, rows, 1), jnp.float32) if op == "logsumexp" else (last.shape, last.dtype)
    out = jax.ShapeDtypeStruct(shape, dtype)

    if isinstance(plan, Block):
        grid, of_plan = (-(-rows // plan.rows),), {"PROGRAM_ROWS": plan.rows, "WIDTH": plan.width}
        (result,) = launch(rows_kernel, inputs, [out], grid, plan.warps, **constants, **of_plan)
    else:
        result = _launch_long(long_kernel, plan, inputs, out, constants)
    if op != "logsumexp":
        return unfold(result)
    lse, m, d = map(unfold, result)
    return lse.astype(last.dtype), Normalizer(m, d)


def _launch_long(long_kernel, plan: Long, inputs, out: jax.ShapeDtypeStruct, constants) -> jax.Array:
    """Launches the kernel of long rows: once, or for rows in several parts once to reduce and once to write."""
    rows, x = constants["ROWS"], inputs[1]
    constants = constants | {
        "PARTS": plan.parts, "SLOTS": power_of_two(plan.parts, 1),
        "LENGTH": plan.length, "DEPTH": plan.depth, "WIDTH": plan.width,
    }  # fmt: skip

    def launch_phase(normalizers, out, grid, **phase: bool):
        (result,) = launch(long_kernel, (*inputs, normalizers), [out], grid, plan.warps, **constants, **phase)
        return result

    if plan.parts == 1:  # x takes the place of the normalizers, which are not read
        return launch_phase(x, out, (rows, 1), REDUCE=True, WRITE=True)
    part_normalizers = jax.ShapeDtypeStruct((2, rows, plan.parts), jnp.float32)
    normalizers = launch_phase(x, part_normalizers, (rows, plan.parts), REDUCE=True, WRITE=False)
    writers = 1 if constants["OP"] == "logsumexp" else plan.parts
    return launch_phase(normalizers, out, (rows, writers), REDUCE=False, WRITE=True)


_NAMES = ("softmax", "log_softmax", "logsumexp", "softmax_grad", "log_softmax_grad")
KERNELS = {name: Kernel(plan, functools.partial(softmax_rows, name), checks.slower) for name in _NAMES}
