"""softmax, log_softmax, logsumexp and their backwards on arrays of any rank: folded to rows, and launched."""

import math
from typing import Any

from pallas_softmax import dispatch
from pallas_softmax.mosaic_gpu import direct, launch, operations, parts_kernel, tile_kernel


def rows(name, arrays, where, axes, *, plan=None, interpret=None):
    """The results of the operation `name` over `axes` of the arrays; other than the last axes are transposed.

    Args:
      name: of the operation; "softmax" is named softmax_forward in profiles.
      where: None, or a boolean of the rank of the arrays that broadcasts to them.
      plan: what `launch.plan` chooses otherwise.
    """
    x = arrays[-1]
    batch = tuple(a for a in range(x.ndim) if a not in axes)
    order = (*batch, *axes)
    inverse = tuple(order.index(a) for a in range(x.ndim))
    shape = tuple(x.shape[a] for a in batch)
    vocab = math.prod(x.shape[a] for a in axes)
    folded = [a.transpose(order).reshape(-1, vocab) for a in arrays]
    where = None if where is None else where.transpose(order)
    mask = direct.fold_mask(where, tuple(x.shape[a] for a in order), len(batch))
    op = getattr(operations, name)
    plan = plan or launch.plan(name, math.prod(shape), vocab, x.dtype, dispatch.capability())
    kernel: Any = tile_kernel if isinstance(plan, launch.Tile) else parts_kernel
    results = kernel.run(
        op,
        name if name.endswith("grad") else f"{name}_forward",
        folded,
        mask,
        plan,
        approximate=launch.approximate(x.dtype),
        interpret=interpret,
    )
    kept = [1] * len(axes) if op.value is None else [x.shape[a] for a in axes]
    return [out.reshape(*shape, *kept).transpose(inverse) for out in results]
