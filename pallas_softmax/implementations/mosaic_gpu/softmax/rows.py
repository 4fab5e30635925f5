"""softmax, log_softmax, logsumexp and two backwards on arrays of any rank: folded into rows, planned, launched."""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_softmax import target
from pallas_softmax.implementations.folding import fold
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax import parts_kernel, tile_kernel
from pallas_softmax.implementations.mosaic_gpu.softmax.formulas import FORMULAS
from pallas_softmax.implementations.mosaic_gpu.softmax.plan import Parts, approximate, plan_softmax


def rows(
    op: str,
    arrays: Sequence[jax.Array],
    where: jax.Array | None,
    axes: tuple[int, ...],
    *,
    plan: Tile | Parts | None = None,
    interpret: Any = None,
) -> list[jax.Array]:
    """The results of an operation over `axes` of the arrays.

    Args:
      op: the name of the operation, in `FORMULAS`.
      arrays: those that it reads, of one shape. Arrays whose reduced axes are not the last ones are transposed.
      where: None, or a boolean of the rank of the arrays that broadcasts to them.
      axes: the reduced axes, ascending.
      plan: how rows lie over the GPU, if it is not what `plan_softmax` chooses.
      interpret: as for `pallas_call`.

    Returns:
      Arrays of the shape of `arrays`; or of that shape with the reduced axes of size 1.
    """
    folded, mask, unfold = fold(arrays, where, axes)
    (count, vocab), dtype = folded[0].shape, arrays[-1].dtype
    plan = plan or plan_softmax(op, count, vocab, dtype, target.capability())
    kernel: Any = tile_kernel if isinstance(plan, Tile) else parts_kernel
    results = kernel.launch(
        FORMULAS[op],
        folded,
        mask,
        plan,
        name=op if op.endswith("grad") else f"{op}_forward",
        approximate=approximate(dtype),
        interpret=interpret,
    )
    return [unfold(result) for result in results]
