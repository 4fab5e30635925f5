"""Kernels for softmax along the last axis. A row lies in registers, or passes through shared memory in steps.

    short rows       in the registers of some lanes    `tile_kernel`
    long rows        in a CTA or a cluster             load -> reduce each segment -> merge all segments -> write
    longest rows     launch 1, a CTA per segment       load -> reduce -> write the segment's reduction
                     launch 2, which reads again       load -> merge the reductions of the row -> write

The CTAs of a cluster exchange reductions through shared memory. With `Parts.slots`, a team (a CTA or a cluster) takes
several rows in turns. If the results are numbers per row, plain JAX merges the reductions in place of launch 2.

`segment.py` has the stages of long rows. A CTA has 128 threads, and `gpu.layout.Walk` draws which elements each thread
holds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu.kernel import gpu_kernel, part_place
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax import label_rank, states_ptx, tile_kernel
from pallas_softmax._src.softmax.formulas import SUM, Job
from pallas_softmax._src.softmax.plan import Parts, approximate
from pallas_softmax._src.softmax.segment import Refs, Segment, merged_row, wait_for_peers

# --- Long rows, in one launch --------------------------------------------------------------------------


def compute_row(job: Job, refs: Refs) -> None:
    """The kernel: one CTA, or the CTAs of a cluster, compute a row; or each CTA computes the reduction of a segment."""
    parts: Parts = job.plan

    def segment_of(number) -> Segment:
        place = part_place(parts.cut, refs.x_gmem[0].shape, per_cta=parts.per_cta, number=number)
        return Segment(job, refs, place, number * parts.walk.steps, smem_start=number * parts.length)

    if parts.per_cta > 1:  # their numbers are traced, so each stage makes its own objects
        _for_each(parts.per_cta, lambda number: segment_of(number).load())
        _reduce_merge_write(job, refs, segment_of)
    else:  # the object keeps its edges in registers from stage to stage
        segment = segment_of(0)
        segment.load()
        _reduce_merge_write(job, refs, lambda number: segment)


def _for_each(count: int, do: Callable[[Any], None]) -> None:
    if count == 1:
        do(0)
    else:
        lax.fori_loop(0, count, lambda number, _: do(number), None)


def _reduce_merge_write(job: Job, refs: Refs, segment_of: Callable[[Any], Segment]) -> None:
    """Reduces the segments segment_of(number) while they are loaded, and merges and writes the row."""
    each = functools.partial(_for_each, job.plan.per_cta)
    each(lambda number: segment_of(number).reduce(number))  # step by step; waits until each has arrived
    formula = segment_of(0).formula  # with the row's temperature
    total = merged_row(job, refs, formula.reduction)
    if formula.counts:
        total = _recounted(job, refs, segment_of, total)
    if not job.plan.cluster:  # for a second launch, or for plain JAX
        segment = segment_of(0)
        segment.write_reduction(segment.located(total) if formula.locates else total)
    elif formula.value is not None:  # for example softmax: the elements, from shared memory
        # The last block of a segment may reach into the next segment, so the last segment is written first. (Masked
        # elements are stored while a segment is reduced, but then a CTA has one segment.)
        each(lambda number: segment_of(job.plan.per_cta - 1 - number).write(total))
    elif formula.locates:
        _write_located(job, segment_of, total)
    else:
        segment_of(0).write_constants(total)  # for example logsumexp: numbers per row
    wait_for_peers(job, refs)  # a CTA must not exit, or write other records, before its peers have merged


def _write_located(job: Job, segment_of: Callable[[Any], Segment], total) -> None:
    """Writes the constants of the row, in the CTA that has the segment with its largest element."""
    number = total.at.astype(jnp.int32) // job.plan.all_steps - segment_of(0).place.index

    @pl.when((number >= 0) & (number < job.plan.per_cta))
    def write():
        segment = segment_of(number)
        segment.write_constants(segment.located(total))


def _recounted(job: Job, refs: Refs, segment_of: Callable[[Any], Segment], total):
    """Returns `total`. If its `before` may be wrong (`label_rank.is_inexact`), it is counted again."""

    def recount():
        wait_for_peers(job, refs)
        _for_each(job.plan.per_cta, lambda number: label_rank.count_again(segment_of(number), number))
        return merged_row(job, refs, SUM)

    # All CTAs of a cluster take the same branch: their m has the same bits.
    before = lax.cond(label_rank.is_inexact(segment_of(0), total), recount, lambda: total.before)
    return total._replace(before=before)


def compute_rows_in_turns(job: Job, refs: Refs) -> None:
    """The kernel with several rows in turns: the next row is loaded while this one is merged and written.

    If the slots hold one and a half rows (time goes to the right):

        row 0    load, reduce | merge | write |
        row 1    load ------------------- load, reduce | merge | write |
        row 2                                    load ---- load, reduce | ...
                  half of it ^          ^ the rest, as slots become free

    If a row has more steps than there are slots, its first steps give up their slots once they are reduced. They are
    read again while the other steps are written.
    """
    slots, teams = job.plan.slots, job.plan.teams
    team = lax.axis_index("row")  # here the axis counts teams; a team takes rows team, team + teams, ...
    turns = (job.rows - team + teams - 1) // teams
    steps_of_row = job.plan.walk.steps + job.plan.again

    def segment_of(turn) -> Segment:
        place = part_place(job.plan.cut, refs.x_gmem[0].shape, row=team + turn * teams)
        before = turn * steps_of_row
        return Segment(job, refs, place, before, freed=lambda i: load_step(before + i + slots))

    def load_step(number) -> None:
        """Starts the copies of a step into its free slot. Step numbers run on from row to row."""
        turn, i = number // steps_of_row, number % steps_of_row
        pl.when(number < turns * steps_of_row)(lambda: segment_of(turn).copy_in(i))

    def take_turn(turn, _) -> None:
        segment = segment_of(turn)
        segment.load_edges()
        # Each slot that this frees takes a later step, of this row or the next.
        _reduce_merge_write(job, refs, lambda number: segment)

    lax.fori_loop(0, slots, lambda number, _: load_step(number), None)
    lax.fori_loop(0, turns, take_turn, None)


# --- Long rows, in two launches: `compute_row` is the first kernel -------------------------------------


def write_segment(job: Job, refs: Refs) -> None:
    """The second kernel of two: merges the reductions of the row's segments, then writes the elements."""
    # In reverse, since the L2 cache still holds what the first launch read last.
    segment = Segment(job, refs, part_place(job.plan.cut, refs.x_gmem[0].shape, backwards=True))
    segment.load()
    total = segment.combine_from_device_memory()
    for i in range(job.plan.walk.steps):
        segment.wait(i)
    segment.write_elements(total, read_mask=job.mask is not None)


# --- Launches -----------------------------------------------------------------------------------------


def launch(job: Job) -> list[jax.Array]:
    """Computes the formula on the rows of the arrays (rows, vocab), by the plan: a `Tile` or `Parts`.

    Returns one array of all elements, of the last array's dtype, (rows, vocab) by a `Tile`, or in the shape of
    `Parts.view`; or per-row outputs, (rows, 1) by a `Tile`, or (rows,).
    """
    formula, parts = job.formula, job.plan
    if isinstance(parts, Tile):
        return tile_kernel.launch(job)
    results = formula.out_type(parts.view(job.rows), (job.rows,), job.dtype)
    if parts.cluster:
        kernel = compute_row if parts.slots is None else compute_rows_in_turns
        assert parts.slots is None or formula.value is not None  # slots are freed while elements are written
        return _launch(job, kernel, results)

    structure = jax.tree.structure(formula.reduction.empty)
    of_segments = [jax.ShapeDtypeStruct((job.rows, parts.count), jnp.float32)] * structure.num_leaves
    reductions = jax.tree.unflatten(structure, _launch(job, compute_row, of_segments, suffix="_reduce"))
    if formula.value is None:
        reduction = formula.scaled(None if job.scale is None else job.scale[:, None]).reduction
        totals = reduction.combine_lanes(reductions, 1, lambda per_row: per_row[:, None])
        constants = formula.scaled(job.scale).constants(totals)
        return [a.astype(to.dtype) for a, to in zip(constants, results, strict=True)]
    return _launch(job, write_segment, results, reductions)


def _launch(job: Job, kernel, out_type: list[jax.ShapeDtypeStruct], reductions=None, suffix="") -> list[jax.Array]:
    """Launches kernel(job, refs). `reductions` (rows, segments) are of the segments, if a launch before made them."""
    parts: Parts = job.plan
    scratch: dict[str, Any] = {
        "x_smem": [plgpu.SMEM((parts.smem_elements,), a.dtype) for a in job.arrays],
        "arrived": [plgpu.Barrier(num_barriers=parts.barriers)] * len(job.arrays),
    }
    if reductions is None:
        words = states_ptx.words(job.formula.reduction.fields, parts.per_cta)
        scratch["records_smem"] = plgpu.SMEM((words,), jnp.float32)
    if parts.ctas > 1:
        scratch["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("part",))

    def body(x_gmem, mask_gmem, scale_gmem, label_gmem, reductions_gmem, *out_gmem, **scratch):
        inputs = {"mask_gmem": mask_gmem, "scale_gmem": scale_gmem, "label_gmem": label_gmem}
        kernel(job, Refs(x_gmem, out_gmem, reductions_gmem=reductions_gmem, **inputs, **scratch))

    arrays = [a.reshape(parts.view(job.rows)) for a in job.arrays]
    mask = None if job.mask is None else job.mask.array
    return gpu_kernel(
        body,
        grid={"row": parts.teams or job.rows, "part": parts.count},
        cluster=parts.ctas,
        out_type=out_type,
        scratch_types=scratch,
        name=job.name + suffix,
        approximate=approximate(job.dtype),
    )(arrays, mask, job.scale, job.label, reductions)
