"""softmax, log_softmax, logsumexp and two backwards on arrays of any rank: folded into rows, planned, launched.

Rows that lie across memory, along an axis that is not the last one, stay where they are if `plan_columns` has a plan
for them, and are transposed otherwise.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import distance
from pallas_softmax._src.folding import fold
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax import columns_kernel, parts_kernel, tile_kernel
from pallas_softmax._src.softmax.columns_plan import plan_columns
from pallas_softmax._src.softmax.formulas import FORMULAS
from pallas_softmax._src.softmax.plan import Parts, approximate, plan_softmax


def softmax_rows(
    op: str,
    arrays: Sequence[jax.Array],
    where: jax.Array | None,
    axes: tuple[int, ...],
    *,
    plan: Tile | Parts | None = None,
    interpret: Any = None,
) -> list[jax.Array]:
    """Returns the results of an operation over `axes` of the arrays.

    Args:
      op: the name of the operation, in `FORMULAS`.
      arrays: those that it reads, of one shape.
      where: None, or a boolean of the rank of the arrays that broadcasts to them.
      axes: the reduced axes, ascending.
      plan: how rows lie over the GPU, if it is not what `plan_softmax` chooses.
      interpret: as for `pallas_call`.

    Returns:
      Arrays of the shape of `arrays`; or of that shape with the reduced axes of size 1.
    """
    dtype = arrays[-1].dtype
    keywords: dict[str, Any] = {
        "name": op if op.endswith("grad") else f"{op}_forward",
        "approximate": approximate(dtype),
        "interpret": interpret,
    }
    shape = arrays[0].shape
    view = _columns(shape, axes) if where is None and plan is None else None
    if view and (columns := plan_columns(op, *view, dtype, target.capability())):
        per_row = [1 if a in axes else size for a, size in enumerate(shape)]
        results = columns_kernel.launch(FORMULAS[op], [a.reshape(view) for a in arrays], columns, **keywords)
        return [result.reshape(shape if result.shape == view else per_row) for result in results]

    folded, mask, unfold = fold(arrays, where, axes)
    (count, vocab) = folded[0].shape
    plan = plan or plan_softmax(op, count, vocab, dtype, target.capability(), masked=mask is not None)
    kernel: Any = tile_kernel if isinstance(plan, Tile) else parts_kernel
    return [unfold(result) for result in kernel.launch(FORMULAS[op], folded, mask, plan, **keywords)]


def _columns(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Returns the shape (outer, vocab, inner) in which the rows along `axes` are columns; None if they are not."""
    inner = distance(shape, axes)
    if inner in (None, 1):
        return None
    vocab = math.prod(shape[a] for a in axes)
    return math.prod(shape) // (vocab * inner), vocab, inner
