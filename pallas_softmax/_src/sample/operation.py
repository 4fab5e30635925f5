"""The cutoff of the filters, the draw of `sample` and its derivatives, as objects."""

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax._src.sample import mesh, xla


def _kernels() -> dict[str, dict[str, Kernel]]:
    from pallas_softmax._src.sample import mosaic_gpu

    return {"mosaic_gpu": mosaic_gpu.KERNELS}


CUTOFF = RowOperation(
    name="filter_cutoff",
    arguments=(ROW, MASK, PER_ROW, PER_ROW, PER_ROW, PER_ROW),  # temperature, top_k, top_p, min_p
    plain=xla.cutoff,
    import_kernels=_kernels,
    on_mesh=mesh.cutoff_on_mesh,
    vmap_adds_rows=True,
)
SAMPLE = RowOperation(
    name="sample",
    arguments=(ROW, MASK, *(PER_ROW,) * 5),  # words, temperature, top_k, top_p, min_p
    result_names=("indices", "log_probs", "log_mass"),
    plain=xla.sample,
    import_kernels=_kernels,
    plain_gradient=xla.sample_grad,
    plain_tangent=xla.sample_tangent,
    variables=("logits", "temperature"),
    differentiable=("log_probs",),
    saved=(("logits", "temperature", "indices", "log_probs"), "where"),
    on_mesh=mesh.sample_on_mesh,
    vmap_adds_rows=True,
)
DRAW_BY_MASS = RowOperation(  # for `verify`
    name="draw_by_mass",
    arguments=(ROW, ROW, PER_ROW),  # masses, the same masses, noise
    plain=xla.draw_by_mass,
    on_mesh=mesh.draw_by_mass_on_mesh,
)
