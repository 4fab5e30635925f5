"""The draw of `sample` and its derivatives, as objects."""

from pallas_softmax_base._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, RowOperation
from pallas_softmax_base._src.sample import gradient, xla

_RESIDUALS = (ROW, PER_ROW, PER_ROW, PER_ROW)  # logits, temperature, drawn index and its log-probability


def _mosaic_gpu() -> Kernel:
    from pallas_softmax_base._src.sample.mosaic_gpu import KERNEL

    return KERNEL


SAMPLE_GRAD = RowOperation(
    name="sample_grad",
    arguments=(_RESIDUALS, MASK, PER_ROW),
    results=(ROW, PER_ROW),
    plain=gradient.sample_grad,
    is_gradient=True,
    divided_by_xla=False,
)
SAMPLE_TANGENT = RowOperation(
    name="sample_tangent",
    arguments=(_RESIDUALS, MASK, ROW, PER_ROW),
    results=PER_ROW,
    plain=gradient.sample_tangent,
    divided_by_xla=False,
)
SAMPLE = RowOperation(
    name="sample",
    arguments=(ROW, MASK, PER_ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW),  # u, temperature, top_k, top_p, min_p
    results=PER_ROW,
    result_names=("indices", "log_probs", "log_mass"),
    plain=xla.sample,
    kernels={"mosaic_gpu": _mosaic_gpu},
    gradient=SAMPLE_GRAD,
    tangent=SAMPLE_TANGENT,
    variables=("logits", "temperature"),
    differentiable=("log_probs",),
    integers=("indices",),
    saved=(("logits", "temperature", "indices", "log_probs"), "where"),
    divided_by_xla=False,
    vmap_adds_rows=True,
)
