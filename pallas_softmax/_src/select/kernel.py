"""The kernel of `top_k` for many winners: selects the k best of each row, usually in one read, and may order them.

A row has a CTA or a cluster. Each CTA lists the elements of its part that may win, in shared memory:

    sample (a bound for the whole row) -> stream (list what reaches it) -> gather (to CTA 0) -> rank, write (CTA 0 only)

`program_of` has these stages, which `stream_ptx` explains. Rows of up to 32 KiB without a mask may stay in registers
(`held_ptx`, `plan_in_registers`).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import cta_number, gpu_kernel, number_of_row
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.select.held_ptx import HeldRowProgram
from pallas_softmax._src.select.plan import PREFETCHED, SelectPlan
from pallas_softmax._src.select.stream_ptx import SelectProgram
from pallas_softmax._src.topk.xla import TopK


@functools.lru_cache(maxsize=16)
def program_of(plan: SelectPlan, dtype: np.dtype, masked: bool, fill: int) -> SelectProgram:
    """Returns the program of a CTA, stage by stage.

    `fill` has the bits of the value that fills results, as an int32; a 16-bit value is in its upper half. -1 is the NaN
    with the lowest key: without a mask and lengths, only such elements may be missing in a list.
    """
    if plan.in_registers:
        held = HeldRowProgram(plan, dtype, fill)
        held.select_row()
        held.write_results()
        return held
    p = SelectProgram(plan, dtype, masked, fill)
    if not masked:
        p.prefetch(p.max(p.first, p.whole_from), PREFETCHED)
    p.histogram.clear()
    p.barrier()
    with p.when(p.length > plan.capacity):
        p.sample()
    gathered = p.var(False, "pred")
    with p.loop() as leave:  # usually one turn
        p.stream()
        if plan.ctas > 1:
            with p.when(~gathered):
                p.gather()
            p.set(gathered, True)
            leave(p.part.differs(0))
            p.set(p.end, p.vectors)  # the first CTA takes the whole row
            p.set(p.whole_to, p.whole_vectors())
        leave((p.n >= plan.k) | p.floor.equals(p.lowest))
        p.stream(ties=True)
        leave(p.n >= plan.k)
        p.set(p.floor, p.lowest)  # the bound was too high
        p.set(p.n, 0)
    with p.when(p.part.equals(0)):
        p.write_results()
    return p


def select_rows(x, mask: Mask | None, lengths, k: int, plan: SelectPlan, *, fill=None) -> TopK:
    """Returns the k best of each row of x, (rows, vocab), and their int32 indices, (rows, k).

    Only the first lengths[row] elements of a row take part, and only those that the mask keeps. If fewer than k take
    part, some others fill the end of the results: as `fill` (-inf by default), in the order of their indices. `lengths`
    is (rows,) or (1,) int32, or None. Unless `plan.sorted`, the winners are in the same order in each run, but in no
    promised one.
    """
    if mask is not None and mask.array.shape[1] == 1:  # the mask keeps a whole row or nothing of it
        kept = mask.array[mask.row(jnp.arange(len(x))), 0]
        lengths, mask = jnp.where(kept, x.shape[1] if lengths is None else lengths, 0), None
    fill = np.array(-np.inf, x.dtype) if fill is None else fill
    keeps_all = mask is None and lengths is None
    return TopK(*_launch(x, mask, lengths, k, plan, None if keeps_all else fill))


def _launch(x, mask: Mask | None, lengths, k: int, plan: SelectPlan, fill) -> list[jax.Array]:
    rows, vocab = x.shape

    def top_k_select(x_gmem, lengths_gmem, mask_gmem, values_gmem, indices_gmem, **smem):
        row = lax.axis_index("row")
        length = jnp.int32(vocab) if lengths_gmem is None else number_of_row(lengths_gmem, row)
        masking = {} if mask is None else {"mask_row": mask.row(row)}
        numbers = {"row": row, "part": cta_number("part", plan.ctas), "length": length, **masking}
        # the operands of the program; `scratch_types` has its names too
        refs = {"x": x_gmem, "values": values_gmem, "indices": indices_gmem, **smem}
        _select(plan, fill, refs if mask is None else refs | {"mask": mask_gmem}, numbers)

    return gpu_kernel(
        top_k_select,
        grid={"row": rows, "part": plan.ctas},
        cluster=plan.ctas,
        warpgroups=plan.warpgroups,
        out_type=[jax.ShapeDtypeStruct((rows, k), x.dtype), jax.ShapeDtypeStruct((rows, k), jnp.int32)],
        scratch_types={
            "list": plgpu.SMEM((plan.list_bytes // 4,), jnp.int32),
            "scratch": plgpu.SMEM((plan.scratch_bytes // 4,), jnp.int32),
        },
        name="top_k_select",
    )(x, lengths, None if mask is None else mask.array)


@twin
def _select(plan: SelectPlan, fill, refs: dict[str, Any], numbers: dict[str, Any]) -> None:
    fill_bits = -1 if fill is None else int(fill.view(f"i{fill.itemsize}")) << 32 - 8 * fill.itemsize
    program = program_of(plan, np.dtype(refs["x"].dtype), "mask" in refs, fill_bits)
    insert_ptx(program, refs, {name: jnp.int32(number) for name, number in numbers.items()})
