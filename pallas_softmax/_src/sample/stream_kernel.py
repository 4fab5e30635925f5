"""The kernel of `sample` without filters: one pass over the logits in device memory; `stream_ptx` is its program."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.sample import stream_ptx
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import DRAWN, row_operands
from pallas_softmax._src.sample.stream_plan import StreamPlan


def draw_rows(x, temperature, words, plan: StreamPlan, stride: int) -> list:
    """Draws once from each row of x, (rows, vocab), without filters.

    The temperature is (rows,), or (1,) for all rows; the words of the noise are (rows, 4). Returns the results of
    `xla.sample`, (rows,).
    """
    rows, _ = x.shape

    def draw(x_gmem, temperature_gmem, words_gmem, *out, scratch):
        row, part = jax.lax.axis_index("row"), jax.lax.axis_index("part") if plan.ctas > 1 else jnp.int32(0)
        of_row = temperature_gmem[row if temperature_gmem.shape[0] > 1 else 0]
        words = dict(zip(NOISE_OPERANDS, [words_gmem[row, i] for i in range(4)]))
        refs = {"x": x_gmem, "scratch": scratch, **dict(zip(DRAWN, out))}
        _draw(plan, stride, refs, row_operands(row, part, of_row), words)

    return gpu_kernel(
        draw,
        name="sample",
        grid={"row": rows, "part": plan.ctas} if plan.ctas > 1 else {"row": rows},
        cluster=plan.ctas,
        warpgroups=plan.warpgroups,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in DRAWN.values()],
        scratch_types={"scratch": plgpu.SMEM((plan.words,), jnp.int32)},
        approximate=True,
    )(x, temperature, words)


@twin
def _draw(plan: StreamPlan, stride: int, refs, numbers, words) -> None:
    """Runs `stream_ptx.row_program` in this CTA."""
    insert_ptx(stream_ptx.row_program(plan, refs["x"].dtype, stride), refs, numbers | words)
