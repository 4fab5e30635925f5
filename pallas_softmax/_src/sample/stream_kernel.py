"""The kernel of `sample` without filters: one pass over the logits in device memory; `stream_ptx` is its program."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample import stream_ptx
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import TINY
from pallas_softmax._src.sample.stream_plan import StreamPlan

# The results, by their names in the program.
RESULTS = {"index": jnp.int32, "log_prob": jnp.float32, "log_mass": jnp.float32}


def draw_rows(x, temperature, words, plan: StreamPlan, stride: int) -> list:
    """Draws once from each row of x, (rows, vocab), without filters.

    The temperature is (rows,), or (1,) for all rows; the words of the noise are (rows, 4). Returns the results of
    `xla.sample`, (rows,).
    """
    rows, _ = x.shape

    def draw(x_gmem, temperature_gmem, words_gmem, *out, scratch):
        row, part = jax.lax.axis_index("row"), jax.lax.axis_index("part") if plan.ctas > 1 else jnp.int32(0)
        place = {"row": row.astype(jnp.int32), "part": part.astype(jnp.int32)}
        of_row = temperature_gmem[row if temperature_gmem.shape[0] > 1 else 0]
        words = dict(zip(NOISE_OPERANDS, [words_gmem[row, i] for i in range(4)]))
        refs = {"x": x_gmem, "scratch": scratch, **dict(zip(RESULTS, out))}
        _draw(plan, stride, refs, place, of_row, words)

    return gpu_kernel(
        draw,
        name="sample",
        grid={"row": rows, "part": plan.ctas} if plan.ctas > 1 else {"row": rows},
        cluster=plan.ctas,
        warpgroups=plan.warpgroups,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in RESULTS.values()],
        scratch_types={"scratch": plgpu.SMEM((plan.words,), jnp.int32)},
        approximate=True,
    )(x, temperature, words)


@twin
def _draw(plan: StreamPlan, stride: int, refs, place, temperature, words) -> None:
    """Runs `stream_ptx.row_program` in this CTA."""
    numbers = {"temperature": temperature, "octaves_per_unit": octaves_per_unit(temperature), **words}
    insert_ptx(stream_ptx.row_program(plan, refs["x"].dtype, stride), refs, place | numbers)


def octaves_per_unit(temperature):
    """Returns log2(e) / temperature, for a temperature of at least the smallest normal float32."""
    before = jnp.where(temperature > 2.0**120, 0.25, 1.0)  # divisors above 2^126 may give 0
    return LOG2_E / jnp.maximum(temperature * before, TINY) * before
