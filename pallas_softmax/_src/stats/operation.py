"""The statistics of each row that language models are trained and judged by, and their derivatives, as objects."""

import dataclasses

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax._src.stats import mesh, xla


def _kernels() -> dict[str, dict[str, Kernel]]:
    from pallas_softmax._src.stats import mosaic_gpu

    return {"mosaic_gpu": mosaic_gpu.KERNELS}


TOKEN_STATS = RowOperation(
    name="token_stats",
    arguments=(ROW, MASK, PER_ROW, PER_ROW),
    plain=xla.token_stats,
    import_kernels=_kernels,
    plain_gradient=xla.token_stats_grad,
    plain_tangent=xla.token_stats_tangent,
    elementwise_derivatives=True,  # XLA fuses the gradient with its neighbours: one read and one write
    result_names=("logsumexp", "entropy", "at_label", "m", "d", "t", "argmax"),
    variables=("logits", "temperature"),
    differentiable=("logsumexp", "entropy", "at_label", "d", "t"),
    saved=(("logits", "temperature", "m", "d", "t"), "where", "labels"),
    on_mesh=mesh.token_stats_on_mesh,
)
# The counts of a device in its shard of a row. The labels and the keys of their logits are of the whole row.
COUNTED_STATS = RowOperation(
    name="counted_stats",
    arguments=(ROW, MASK, PER_ROW, PER_ROW, PER_ROW),
    plain=xla.counted_stats,
    import_kernels=_kernels,
)
RANKED_STATS = dataclasses.replace(
    TOKEN_STATS,
    name="ranked_stats",
    plain=xla.ranked_stats,
    result_names=(*TOKEN_STATS.result_names, "rank"),
    on_mesh=mesh.ranked_stats_on_mesh,
    shard_step=COUNTED_STATS,
)
