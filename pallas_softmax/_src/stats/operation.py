"""The statistics of each row that language models are trained and judged by, and their derivatives, as objects."""

import dataclasses

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax._src.stats import mesh, xla

_RESIDUALS = (ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW)  # logits, temperature, m, d and t


def _mosaic_gpu() -> dict[str, Kernel]:
    from pallas_softmax._src.stats.mosaic_gpu import KERNELS

    return KERNELS


# The gradient is elementwise, so XLA fuses it with its neighbours: one read and one write.
TOKEN_STATS_GRAD = RowOperation(
    name="token_stats_grad",
    arguments=(_RESIDUALS, MASK, *(PER_ROW,) * 6),
    results=(ROW, PER_ROW),
    plain=xla.token_stats_grad,
    is_gradient=True,
)
TOKEN_STATS_TANGENT = RowOperation(
    name="token_stats_tangent",
    arguments=(_RESIDUALS, MASK, PER_ROW, ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.token_stats_tangent,
)
TOKEN_STATS = RowOperation(
    name="token_stats",
    arguments=(ROW, MASK, PER_ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.token_stats,
    kernels={"mosaic_gpu": _mosaic_gpu},
    gradient=TOKEN_STATS_GRAD,
    tangent=TOKEN_STATS_TANGENT,
    result_names=("logsumexp", "entropy", "at_label", "m", "d", "t", "argmax"),
    variables=("logits", "temperature"),
    differentiable=("logsumexp", "entropy", "at_label", "d", "t"),
    integers=("argmax",),
    saved=(("logits", "temperature", "m", "d", "t"), "where", "labels"),
    on_mesh=mesh.token_stats_on_mesh,
    divided_by_xla=False,
)
# The counts of a device in its shard of a row. The labels and the keys of their logits are of the whole row.
COUNTED_STATS = RowOperation(
    name="counted_stats",
    arguments=(ROW, MASK, PER_ROW, PER_ROW, PER_ROW),
    results=PER_ROW,
    plain=xla.counted_stats,
    kernels={"mosaic_gpu": _mosaic_gpu},
)
RANKED_STATS = dataclasses.replace(
    TOKEN_STATS,
    name="ranked_stats",
    plain=xla.ranked_stats,
    result_names=(*TOKEN_STATS.result_names, "rank"),
    integers=("argmax", "rank"),
    on_mesh=mesh.ranked_stats_on_mesh,
    shard_step=COUNTED_STATS,
)
