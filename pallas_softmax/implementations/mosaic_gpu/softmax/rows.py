"""softmax, log_softmax, logsumexp and their backwards on arrays of any rank: folded to rows, and launched."""

from typing import Any

from pallas_softmax import target
from pallas_softmax.implementations.folding import fold
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax import formulas, parts_kernel, tile_kernel
from pallas_softmax.implementations.mosaic_gpu.softmax.plan import approximate, plan_softmax


def rows(name, arrays, where, axes, *, plan=None, interpret=None):
    """The results of the operation `name` over `axes` of the arrays; other than the last axes are transposed.

    Args:
      name: of the operation; "softmax" is named softmax_forward in profiles.
      where: None, or a boolean of the rank of the arrays that broadcasts to them.
      plan: what `plan_softmax` chooses otherwise.
    """
    folded, mask, unfold = fold(arrays, where, axes)
    (count, vocab), dtype = folded[0].shape, arrays[-1].dtype
    plan = plan or plan_softmax(name, count, vocab, dtype, target.capability())
    kernel: Any = tile_kernel if isinstance(plan, Tile) else parts_kernel
    results = kernel.run(
        formulas.FORMULAS[name],
        name if name.endswith("grad") else f"{name}_forward",
        folded,
        mask,
        plan,
        approximate=approximate(dtype),
        interpret=interpret,
    )
    return [unfold(out) for out in results]
