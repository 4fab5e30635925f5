"""softmax, log_softmax, logsumexp and two backwards as Mosaic GPU kernels, on arrays of any rank.

Rows along the last axes are folded to (rows, vocab). Rows along another axis stay in place if `plan_columns` has a
plan for them; otherwise they are transposed.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import TRANSPOSED, fold
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.softmax import columns_kernel, parts_kernel, tile_kernel
from pallas_softmax._src.softmax.columns_plan import plan_columns
from pallas_softmax._src.softmax.formulas import FORMULAS
from pallas_softmax._src.softmax.plan import Parts, approximate, plan_softmax


class Columns(NamedTuple):
    """The plan for rows that lie across memory, and stay there.

    Attributes:
      view: the shape (outer, vocab, inner), where each row is a column.
      plan: the result of `plan_columns`.
    """

    view: tuple[int, int, int]
    plan: Any


def plan(call: Call, capability: tuple[int, int]) -> Columns | Tile | Parts | Refusal:
    """Returns how the rows of a call lie over the GPU."""
    reason = checks.unsupported(call, capability) or checks.too_large(call)
    if reason is not None:
        return Refusal(reason)
    if (columns := _plan_columns(call, capability)) is not None:
        return columns
    return plan_softmax(call.op, call.rows, call.vocab, call.dtype, capability, masked=call.masked)


def _plan_columns(call: Call, capability: tuple[int, int]) -> Columns | None:
    """Returns the plan for rows that lie across memory; None if they are contiguous, masked, or must be transposed."""
    if call.inner in (None, 1) or call.vocab == 1 or call.masked:  # one element has no neighbours in memory
        return None
    view = call.rows // call.inner, call.vocab, call.inner
    found = plan_columns(call.op, *view, call.dtype, capability)
    return None if found is None else Columns(view, found)


def slower(call: Call) -> str | None:
    """Returns why XLA is faster; None if it is not. The kernels are at least as fast at nearly all measured shapes."""
    if call.inner != 1 and _plan_columns(call, target.capability()) is None:
        return TRANSPOSED
    return None


def softmax_rows(
    name: str,
    arrays: Sequence[jax.Array],
    where: jax.Array | None,
    axes: tuple[int, ...],
    plan: Columns | Tile | Parts,
) -> list[jax.Array]:
    """Returns the results of an operation over `axes` of the arrays.

    Args:
      name: the name of the operation, in `FORMULAS`.
      arrays: the inputs, of one shape.
      where: None, or a boolean of the rank of the arrays that broadcasts to them.
      axes: the reduced axes, ascending.
      plan: how rows lie over the GPU.

    Returns:
      Arrays of the shape of `arrays`; or of that shape with the reduced axes of size 1.
    """
    shape = arrays[0].shape
    keywords: dict[str, Any] = {
        "name": name if name.endswith("grad") else f"{name}_forward",
        "approximate": approximate(arrays[-1].dtype),
    }
    if isinstance(plan, Columns):
        per_row = [1 if a in axes else size for a, size in enumerate(shape)]
        viewed = [a.reshape(plan.view) for a in arrays]
        results = columns_kernel.launch(FORMULAS[name], viewed, plan.plan, **keywords)
        return [result.reshape(shape if result.shape == plan.view else per_row) for result in results]
    folded, mask, unfold = fold(arrays, where, axes)
    kernel: Any = tile_kernel if isinstance(plan, Tile) else parts_kernel
    return [unfold(result) for result in kernel.launch(FORMULAS[name], folded, mask, plan, **keywords)]


def _forward(name: str, plan, x, where, *, axes):
    (y,) = softmax_rows(name, (x,), where, axes, plan)
    return y


def _logsumexp(plan, x, where, *, axes):
    lse, m, d = softmax_rows("logsumexp", (x,), where, axes, plan)
    return lse, Normalizer(m, d)


def _grad(name: str, plan, residuals, where, dy, *, axes):
    (dx,) = softmax_rows(name, (*residuals, dy), where, axes, plan)
    return dx


KERNELS = {
    "softmax": Kernel(plan, functools.partial(_forward, "softmax"), slower),
    "log_softmax": Kernel(plan, functools.partial(_forward, "log_softmax"), slower),
    "logsumexp": Kernel(plan, _logsumexp, slower),
    "softmax_grad": Kernel(plan, functools.partial(_grad, "softmax_grad"), slower),
    "log_softmax_grad": Kernel(plan, functools.partial(_grad, "log_softmax_grad"), slower),
}
