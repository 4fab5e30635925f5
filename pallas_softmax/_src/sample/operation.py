"""The draw of `sample` and its derivatives, as objects."""

from pallas_softmax._src.dispatch.operation import MASK, PER_ROW, ROW, Kernel, Operation
from pallas_softmax._src.sample import gradient, xla
from pallas_softmax._src.topk.operation import indices_of

_RESIDUALS = (ROW, PER_ROW, PER_ROW, PER_ROW)  # logits, temperature, drawn index and its log-probability


def _save(xs, constants, ys, others):
    """Returns the residuals of the derivatives: logits, temperature, drawn index, its log-probability; and the mask."""
    return (*xs, indices_of(others[0]), *ys), constants[0]


def _mosaic_gpu() -> Kernel:
    from pallas_softmax._src.sample.mosaic_gpu import KERNEL

    return KERNEL


SAMPLE_GRAD = Operation(
    name="sample_grad",
    arguments=(_RESIDUALS, MASK, PER_ROW),
    results=(ROW, PER_ROW),
    plain=gradient.sample_grad,
    is_gradient=True,
    divided_by_xla=False,
)
SAMPLE_TANGENT = Operation(
    name="sample_tangent",
    arguments=(_RESIDUALS, MASK, ROW, PER_ROW),
    results=PER_ROW,
    plain=gradient.sample_tangent,
    divided_by_xla=False,
)
SAMPLE = Operation(
    name="sample",
    arguments=(ROW, MASK, PER_ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW),  # u, temperature, top_k, top_p, min_p
    results=PER_ROW,  # indices, log_probs and log_mass
    plain=xla.sample,
    kernels={"mosaic_gpu": _mosaic_gpu},
    gradient=SAMPLE_GRAD,
    tangent=SAMPLE_TANGENT,
    save=_save,
    divided_by_xla=False,
    vmap_adds_rows=True,
)
