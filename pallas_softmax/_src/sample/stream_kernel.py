"""The kernel of `sample` without filters: one pass over the logits in device memory; `stream_ptx` is its program."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.gpu.interpreter import interpret
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample import stream_ptx, xla
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import TINY
from pallas_softmax._src.sample.stream_plan import StreamPlan

# The results, by their names in the program.
RESULTS = {"index": jnp.int32, "log_prob": jnp.float32, "log_mass": jnp.float32}


def draw_rows(x, temperature, words, plan: StreamPlan, stride: int) -> list:
    """Draws once from each row of x, (rows, vocab), without filters.

    The temperature is (rows,), or (1,) for all rows; the words of the noise are (rows, 4). Returns the results of
    `xla.sample`, (rows,). The interpreter runs plain JAX in place of the program.
    """
    rows, _ = x.shape

    def draw(x_gmem, temperature_gmem, words_gmem, *out, scratch):
        row, part = jax.lax.axis_index("row"), jax.lax.axis_index("part") if plan.ctas > 1 else jnp.int32(0)
        of_row = temperature_gmem[row if temperature_gmem.shape[0] > 1 else 0]
        words = [words_gmem[row, i] for i in range(4)]
        if interpret():
            _run_twin(x_gmem.at[row], part, of_row, words, [ref.at[row] for ref in out], stride)
            return
        numbers = {
            "row": row.astype(jnp.int32),
            "part": part.astype(jnp.int32),
            "temperature": of_row,
            "octaves_per_unit": octaves_per_unit(of_row),
            **dict(zip(NOISE_OPERANDS, words)),
        }
        program = stream_ptx.row_program(plan, x.dtype, stride)
        insert_ptx(program, {"x": x_gmem, "scratch": scratch, **dict(zip(RESULTS, out))}, numbers)

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


def octaves_per_unit(temperature):
    """Returns log2(e) / temperature, for a temperature of at least the smallest normal float32."""
    before = jnp.where(temperature > 2.0**120, 0.25, 1.0)  # divisors above 2^126 may give 0
    return LOG2_E / jnp.maximum(temperature * before, TINY) * before


def _run_twin(x_gmem, part, temperature, words, out, stride: int) -> None:
    """Computes the results of the row in one thread, in plain JAX."""

    @pl.when((part == 0) & (jax.lax.axis_index("warpgroup") == 0))
    def write():
        x, one = x_gmem[...][None], jnp.reshape(temperature, (1, 1))
        results = xla.sample(x, None, jnp.stack(words)[None], one, None, None, None, stride=stride)
        for ref, result in zip(out, results, strict=True):
            ref[...] = result[0, 0]
