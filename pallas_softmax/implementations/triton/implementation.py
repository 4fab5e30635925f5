"""Implementation `triton`: Triton kernels, called by jax_triton, for GPUs of compute capability 8.0 and newer.

The functions take what those of `xla` take, for calls that `unsupported` has no objection to. Triton itself is
imported with the first of them.
"""

import jax
import jax.numpy as jnp

from pallas_softmax.call import Implementation
from pallas_softmax.implementations.folding import Mask, fold, fold_topk
from pallas_softmax.implementations.triton import plan as plans
from pallas_softmax.implementations.triton.support import slower, unsupported
from pallas_softmax.online import Candidates, Normalizer


def softmax(x, where, *, axes):
    return _rows("softmax", (x,), where, axes)


def log_softmax(x, where, *, axes):
    return _rows("log_softmax", (x,), where, axes)


def softmax_grad(residuals, where, dy, *, axes):
    return _rows("softmax_grad", (*residuals, dy), where, axes)


def log_softmax_grad(residuals, where, dy, *, axes):
    return _rows("log_softmax_grad", (*residuals, dy), where, axes)


def logsumexp(x, where, *, axes):
    lse, m, d = _rows("logsumexp", (x,), where, axes)
    return lse, Normalizer(m, d)


def _masked(mask: Mask | None, x) -> tuple[jax.Array, str | None, tuple]:
    """The array that a kernel takes for the mask, and its WHERE and MASK."""
    if mask is None:
        return x, None, ()
    return mask.array, "row" if mask.array.shape[1] > 1 else "one", mask.row.terms


def _rows(op, arrays, where, axes, plan=None):
    """The result of the operation over `axes`; of logsumexp three, with those axes of size 1."""
    from pallas_softmax.implementations.triton import softmax_kernels
    from pallas_softmax.implementations.triton.call import call

    folded, mask, unfold = fold(arrays, where, axes)
    x = folded[-1]
    rows, vocab = x.shape
    plan = plan or plans.plan_softmax(op, rows, vocab, x.dtype, mask is not None)
    mask_array, extent, terms = _masked(mask, x)
    inputs = folded[0], x, mask_array
    constants = {"ROWS": rows, "V": vocab, "OP": op, "WHERE": extent, "MASK": terms}
    sums = op == "logsumexp"
    out = jax.ShapeDtypeStruct((3, rows, 1) if sums else (rows, vocab), jnp.float32 if sums else x.dtype)
    if isinstance(plan, plans.Block):
        grid = (-(-rows // plan.rows),)
        constants |= {"N": plan.rows, "BLOCK": plan.lanes}
        (y,) = call(softmax_kernels.rows_kernel, inputs, [out], grid, plan.warps, **constants)
    else:
        kernel, parts = softmax_kernels.long_kernel, plan.parts
        constants |= {"PARTS": parts, "SLOTS": plans.power_of_two(parts)}
        constants |= {"LENGTH": plan.length, "DEPTH": plan.depth, "WIDTH": plan.width}
        constants |= {"VECTOR": 16 // x.dtype.itemsize}
        states = x
        if parts > 1:
            state = jax.ShapeDtypeStruct((2, rows, parts), jnp.float32)
            phase = {"REDUCE": True, "WRITE": False}
            (states,) = call(kernel, (*inputs, x), [state], (rows, parts), plan.warps, **constants, **phase)
        phase = {"REDUCE": parts == 1, "WRITE": True}
        grid = (rows, 1 if sums else parts)
        (y,) = call(kernel, (*inputs, states), [out], grid, plan.warps, **constants, **phase)
    return tuple(unfold(of) for of in y) if sums else unfold(y)


def topk(logits, where, temperature, *, k, log, dtype, plan=None):
    from pallas_softmax.implementations.triton import topk_kernels
    from pallas_softmax.implementations.triton.call import call

    x, mask, temperature, unfold = fold_topk(logits, where, temperature)
    rows, vocab = x.shape
    mask_array, extent, terms = _masked(mask, x)
    plan = plan or plans.plan_topk(rows, vocab, k, x.dtype)
    shared = {"ROWS": rows, "K": k, "LOG": log, "SCALAR": len(temperature) == 1, "SLOTS": plan.slots}
    shared |= {"WHERE": extent}
    of_row = {"V": vocab, "MASK": terms, "LENGTH": plan.length}
    of_row |= {"GROUPS": plan.groups, "VEC": plan.vec, "LEVELS": plan.levels}

    def outputs(parts):
        """The result, or lists of its candidates."""
        values, indices = ((), (rows, parts, plan.slots, 2)) if parts > 1 else ((rows, k), (rows, k))
        shapes = (values, dtype), (indices, jnp.int32), ((2, rows, parts), jnp.float32)
        return [jax.ShapeDtypeStruct(*out) for out in shapes]

    parts = plan.parts
    values, indices, sums = call(
        topk_kernels.topk_kernel,
        (x, mask_array, temperature),
        outputs(parts),
        (rows, parts),
        plan.warps,
        **(shared | of_row | {"PARTS": parts}),
    )
    while parts > 1:
        fan = min(plans.lists_per_merge(plan.slots), plans.power_of_two(parts))
        lists, parts = parts, -(-parts // fan)
        values, indices, sums = call(
            topk_kernels.merge_kernel,
            (x, temperature, indices, sums),
            outputs(parts),
            (rows, parts),
            max(1, min(8, fan * plan.slots // 64)),
            **(shared | {"LISTS": lists, "FAN": fan, "PARTS": parts}),
        )
    m, d = sums
    return Candidates(unfold(values), unfold(indices)), Normalizer(unfold(m), unfold(d))


IMPLEMENTATION = Implementation(
    functions={
        "softmax": softmax,
        "softmax_grad": softmax_grad,
        "log_softmax": log_softmax,
        "log_softmax_grad": log_softmax_grad,
        "logsumexp": logsumexp,
        "topk": topk,
    },
    unsupported=unsupported,
    slower=slower,
)
