"""softmax, log_softmax, logsumexp and their backwards on arrays of any rank: folded to rows, and launched."""

from typing import Any

from pallas_softmax import dispatch
from pallas_softmax.folding import fold
from pallas_softmax.mosaic_gpu import launch, operations, parts_kernel, tile_kernel


def rows(name, arrays, where, axes, *, plan=None, interpret=None):
    """The results of the operation `name` over `axes` of the arrays; other than the last axes are transposed.

    Args:
      name: of the operation; "softmax" is named softmax_forward in profiles.
      where: None, or a boolean of the rank of the arrays that broadcasts to them.
      plan: what `launch.plan` chooses otherwise.
    """
    folded, mask, unfold = fold(arrays, where, axes)
    (count, vocab), dtype = folded[0].shape, arrays[-1].dtype
    plan = plan or launch.plan(name, count, vocab, dtype, dispatch.capability())
    kernel: Any = tile_kernel if isinstance(plan, launch.Tile) else parts_kernel
    results = kernel.run(
        getattr(operations, name),
        name if name.endswith("grad") else f"{name}_forward",
        folded,
        mask,
        plan,
        approximate=launch.approximate(dtype),
        interpret=interpret,
    )
    return [unfold(out) for out in results]
