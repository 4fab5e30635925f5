"""Short rows, in registers: several in a CTA, each over a few lanes, a warp, or all threads."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import memory
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax.formulas import Operation


def run(op: Operation, name: str, arrays, mask: Mask | None, plan: Tile, *, interpret, **settings):
    """`op` on the rows of the arrays (rows, vocab); arguments as for `parts_kernel.run`."""
    rows, vocab = arrays[0].shape
    inputs = [*arrays] if mask is None else [*arrays, mask.array]
    if op.value is None:
        out_type = [jax.ShapeDtypeStruct((rows, 1), jnp.float32)] * op.per_row
    else:
        out_type = [jax.ShapeDtypeStruct((rows, vocab), arrays[-1].dtype)]
    fill = op.reduction.neutral

    def spread(per_row):
        return lax.broadcast_in_dim(per_row, plan.shape, (0,))

    def body(*refs):
        x_gmem, out_gmem = refs[: len(arrays)], refs[len(inputs) :]
        row = lax.axis_index("row") * plan.rows
        x = [memory.load(ref, plan, row, fill, interpret=interpret).astype(jnp.float32) for ref in x_gmem]
        term = op.term(*x)
        if mask is not None:
            keep = memory.load_mask(
                refs[len(arrays)], plan, row, (rows, vocab), mask.row, interpret=interpret
            )
            term = jnp.where(keep, term, fill)
        total = op.reduction.across(op.reduction.lift(term), 1, spread)
        constants = [spread(constant) for constant in op.constants(total)]
        if op.value is None:
            out = constants
        else:
            y = op.value(*x, *constants)
            out = [y if mask is None else jnp.where(keep, y, op.masked)]
        for gmem, y in zip(out_gmem, out, strict=True):
            memory.store(gmem, plan, row, y, interpret=interpret)

    body.__name__ = name
    return gpu_kernel(
        body,
        grid={"row": -(-rows // plan.rows)},
        out_type=out_type,
        interpret=interpret,
        **settings,
    )(*inputs)
