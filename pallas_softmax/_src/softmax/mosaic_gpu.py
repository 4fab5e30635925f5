"""softmax, log_softmax, logsumexp and two backwards as Mosaic GPU kernels, on arrays of any rank.

Rows along the last axes are folded to (rows, vocab). Rows along another axis stay in place if `plan_columns` has a
plan for them; otherwise they are transposed.
"""

import functools
from typing import Any, NamedTuple

import jax

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import TRANSPOSED, fold
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.softmax import columns_kernel, rows_kernel
from pallas_softmax._src.softmax.columns_plan import plan_columns
from pallas_softmax._src.softmax.formulas import FORMULAS, Job
from pallas_softmax._src.softmax.plan import Parts, plan_softmax


class Columns(NamedTuple):
    """The plan for rows that lie across memory, and stay there."""

    view: tuple[int, int, int]  # the shape (outer, vocab, inner), where each row is a column
    plan: Any  # the result of `plan_columns`


def plan(call: Call, capability: tuple[int, int]) -> Columns | Tile | Parts | Refusal:
    reason = checks.unsupported(call, capability) or checks.too_large(call)
    if reason is not None:
        return Refusal(reason)
    if (columns := _plan_columns(call, capability)) is not None:
        return columns
    return plan_softmax(call.op, call.rows, call.vocab, call.dtype, capability, masked=call.masked)


def _plan_columns(call: Call, capability: tuple[int, int]) -> Columns | None:
    if call.inner in (None, 1) or call.vocab == 1 or call.masked:  # one element has no neighbours in memory
        return None
    view = call.rows // call.inner, call.vocab, call.inner
    found = plan_columns(call.op, *view, call.dtype, capability)
    return None if found is None else Columns(view, found)


def slower(call: Call) -> str | None:
    """Returns why XLA is faster; None if it is not. The kernels are at least as fast at nearly all measured shapes."""
    is_transposed = call.inner != 1 and _plan_columns(call, target.capability()) is None
    return TRANSPOSED if is_transposed else None


def softmax_rows(name: str, plan: Columns | Tile | Parts, x, where, *dy, axes: tuple[int, ...]) -> Any:
    """Returns what the plain function of the operation in `FORMULAS` returns.

    `x` has the logits, or for a gradient what is saved, a tuple of arrays of one shape. Then `dy` is the cotangent.
    """
    arrays = [*jax.tree.leaves(x), *dy]
    shape = arrays[0].shape
    kernel_name = name if name.endswith("grad") else f"{name}_forward"
    if isinstance(plan, Columns):
        per_row = [1 if a in axes else size for a, size in enumerate(shape)]
        viewed = [a.reshape(plan.view) for a in arrays]
        results = columns_kernel.launch(Job(FORMULAS[name], viewed, plan.plan, kernel_name))
        results = [result.reshape(shape if result.shape == plan.view else per_row) for result in results]
    else:
        folded, mask, unfold = fold(arrays, where, axes)
        results = map(unfold, rows_kernel.launch(Job(FORMULAS[name], folded, plan, kernel_name, mask)))
    first, *normalizer = results
    return (first, Normalizer(*normalizer)) if normalizer else first


_NAMES = ("softmax", "log_softmax", "logsumexp", "softmax_grad", "log_softmax_grad")
KERNELS = {name: Kernel(plan, functools.partial(softmax_rows, name), slower) for name in _NAMES}
