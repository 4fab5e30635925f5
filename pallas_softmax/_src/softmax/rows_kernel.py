"""Kernels for softmax along the last axis. A row lies in registers, or passes through shared memory in steps.

    short rows       in the registers of some lanes    load -> reduce -> write
    long rows        in a CTA or a cluster             load -> reduce each segment -> merge all segments -> write
    longest rows     launch 1, a CTA per segment       load -> reduce -> write the segment's reduction
                     launch 2, which reads again       load -> merge the reductions of the row -> write

The CTAs of a cluster exchange reductions through shared memory. With `Parts.slots`, a team (a CTA or a cluster) takes
several rows in turns. If the result is one number per row, plain JAX merges the reductions in place of launch 2.

`part.py` has the stages of long rows. A CTA has 128 threads, and `gpu.layout` draws which elements each thread holds:
`Tile` for short rows, and `Walk` for long ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.staged_row import StagedRow, part_place
from pallas_softmax._src.softmax import label_rank, states_ptx
from pallas_softmax._src.softmax.formulas import SUM, Formula, Label, comes_before
from pallas_softmax._src.softmax.part import Job, Part, Refs, merged_row, wait_for_peers
from pallas_softmax._src.softmax.plan import Parts

# --- Short rows, in registers -------------------------------------------------------------------------


def compute_tile(
    formula: Formula, tile: Tile, mask: Mask | None, x_gmem, mask_gmem, scale_gmem, label_gmem, *out_gmem
) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and computes a formula on it; see `Tile` and `launch`."""
    row = lax.axis_index("row") * tile.rows  # the first row of this CTA
    fill = formula.reduction.neutral
    loaded, x = [], []  # the arrays in their own dtypes, and in float32
    for gmem in x_gmem:
        loaded.append(tiles.load(gmem, tile, row, fill))
        x.append(loaded[-1].astype(jnp.float32))
    term = formula.term(*x)  # what the formula reduces, for example the logits
    keep = None  # with a mask: which elements count
    if mask is not None:
        keep = tiles.load_mask(mask_gmem, tile, row, mask.row)
        term = jnp.where(keep, term, fill)
    element_scale, row_scale = _load_scales(scale_gmem, tile, row)  # in two layouts

    total = _reduce(formula.scaled(element_scale), tile, term)
    if label_gmem is not None:
        label = Label(*(tiles.load(gmem, tile, row) for gmem in label_gmem[:2]))
        before = _count_before(tile, loaded[0], keep, label, vocab=x_gmem[0].shape[1])
        total = total._replace(before=before)
    constants = formula.scaled(row_scale).constants(total)  # numbers per row, for example m and d
    constants = [tiles.broadcast(constant, tile) for constant in constants]

    if formula.value is None:  # the constants are the result, for example logsumexp
        results = constants
    else:
        y = formula.value(*x, *constants)
        results = [y if keep is None else jnp.where(keep, y, formula.masked_value)]
    for gmem, y in zip(out_gmem, results, strict=True):
        tiles.store(gmem, tile, row, y)


def _load_scales(scale_gmem, tile: Tile, row) -> tuple[Any, Any]:
    """Returns the scale of each row twice: repeated over a tile, and one per row. A scale of all rows is one number."""
    if scale_gmem is None:
        return None, None
    if scale_gmem.shape[0] == 1:
        return scale_gmem[0], scale_gmem[0]
    element_scale = tiles.load(scale_gmem, tile, row)
    return element_scale, jnp.max(element_scale, 1)


def _reduce(formula: Formula, tile: Tile, term):
    broadcast = functools.partial(tiles.broadcast, tile=tile)
    total = formula.reduction.combine_lanes(formula.reduction.states(term), 1, broadcast)
    if formula.locates:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        at = normalizers.if_largest(column, term, broadcast(total.moments.m))
        total = total._replace(at=jnp.min(at, 1))
    return total


def _count_before(tile: Tile, x, keep, label: Label, *, vocab: int):
    """Returns how many elements of each row come before its label, without those that are masked or beyond the row."""
    column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
    before = comes_before(sort_keys.key32(x), column, label)
    if keep is not None:
        before = jnp.where(keep, before, 0.0)
    if vocab < tile.shape[1]:
        before = jnp.where(column < vocab, before, 0.0)
    return jnp.sum(before, 1)


# --- Long rows, in one launch --------------------------------------------------------------------------


def compute_row(job: Job, refs: Refs) -> None:
    """The kernel: one CTA, or the CTAs of a cluster, compute a row; or each CTA computes the reduction of a segment."""
    parts = job.parts
    if parts.per_cta == 1:
        part = _load(job, refs)
        _reduce_merge_write(job, refs, lambda number: part)
        return

    def part_of(number) -> Part:
        place = part_place(parts.cut, job.view, rows=job.rows, per_cta=parts.per_cta, number=number)
        before = number * parts.walk.steps
        return Part(job, refs, place, StagedRow(parts.walk, steps_before=before, start=number * parts.length))

    _for_each(parts.per_cta, lambda number: _start_copies(part_of(number)))
    _reduce_merge_write(job, refs, part_of)


def _for_each(count: int, do: Callable[[Any], None]) -> None:
    if count == 1:
        do(0)
    else:
        lax.fori_loop(0, count, lambda number, _: do(number), None)


def _reduce_merge_write(job: Job, refs: Refs, part_of: Callable[[Any], Part]) -> None:
    """Reduces the segments part_of(number) while they are loaded, merges all of the row, and writes the results."""
    each = functools.partial(_for_each, job.parts.per_cta)
    each(lambda number: part_of(number).keep(number))  # step by step; waits until each has arrived
    formula = part_of(0).formula
    total = merged_row(job, refs, formula.reduction)
    if not job.parts.cluster:  # for a second launch
        part = part_of(0)
        total = part.located(_recounted(job, refs, part_of, total)) if formula.locates else total
        part.write_reduction(total)
    elif formula.value is not None:  # for example softmax: the elements, from shared memory
        # The last block of a segment may reach into the next segment, so the last segment is written first. (Masked
        # elements are stored while a segment is reduced, but then a CTA has one segment.)
        each(lambda number: part_of(job.parts.per_cta - 1 - number).write(total))
    elif formula.locates:
        _write_located(job, refs, part_of, total)
    else:
        part_of(0).write_constants(total)  # for example logsumexp: one number per row
    wait_for_peers(job, refs)  # a CTA must not exit, or write other records, before its peers have merged


def _write_located(job: Job, refs: Refs, part_of: Callable[[Any], Part], total) -> None:
    """Writes the constants of the row, in the CTA that has the segment with its largest element."""
    parts, total = job.parts, _recounted(job, refs, part_of, total)
    segment = total.at.astype(jnp.int32) // parts.all_steps - part_of(0).place.index

    @pl.when((segment >= 0) & (segment < parts.per_cta))
    def write():
        part = part_of(segment)
        part.write_constants(part.located(total))


def _recounted(job: Job, refs: Refs, part_of: Callable[[Any], Part], total):
    """Returns `total`, with `before` counted again if the steps may be wrong."""
    if not part_of(0).formula.counts:
        return total

    def keep_count(number):
        states_ptx.keep(SUM, label_rank.count_again(part_of(number)), refs.records_smem, number)

    def recount():
        wait_for_peers(job, refs)
        _for_each(job.parts.per_cta, keep_count)
        return merged_row(job, refs, SUM)

    # All CTAs of a cluster take the same branch: their m has the same bits.
    before = lax.cond(label_rank.is_inexact(part_of(0), total), recount, lambda: total.before)
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
    walk, slots = job.parts.walk, job.parts.slots or 0
    team = lax.axis_index("row")  # here the axis counts teams; a team takes rows team, team + teams, ...
    turns = (job.rows - team + job.teams - 1) // job.teams
    steps_of_row = walk.steps + job.parts.again

    def part_of(turn) -> Part:
        place = part_place(job.parts.cut, job.view, rows=job.rows, row=team + turn * job.teams)
        before = turn * steps_of_row

        def freed(i) -> None:
            load_step(before + i + slots)

        return Part(job, refs, place, StagedRow(walk, slots, before, freed=freed, again=job.parts.again))

    def load_step(number) -> None:
        """Starts the copies of a step into its free slot. Step numbers run on from row to row."""
        turn, i = number // steps_of_row, number % steps_of_row
        pl.when(number < turns * steps_of_row)(lambda: part_of(turn).copy_in(i))

    def take_turn(turn, _) -> None:
        part = part_of(turn)
        part.load_edges()
        # Each slot that this frees takes a later step, of this row or the next.
        _reduce_merge_write(job, refs, lambda number: part)

    lax.fori_loop(0, slots, lambda number, _: load_step(number), None)
    lax.fori_loop(0, turns, take_turn, None)


# --- Long rows, in two launches: `compute_row` is the first kernel -------------------------------------


def write_segment(job: Job, refs: Refs) -> None:
    """The second kernel of two: merges the reductions of the row's segments, then writes the elements."""
    # In reverse, since the L2 cache still holds what the first launch read last.
    part = _load(job, refs, backwards=True)
    total = part.combine_from_device_memory()
    part.wait_for_body()
    part.write_elements(total, read_mask=job.mask is not None)


def _load(job: Job, refs: Refs, *, backwards: bool = False) -> Part:
    """Returns the only segment of this CTA, which is being loaded."""
    place = part_place(job.parts.cut, job.view, rows=job.rows, backwards=backwards)
    part = Part(job, refs, place, StagedRow(job.parts.walk))
    _start_copies(part)
    part.load_edges()
    return part


def _start_copies(part: Part) -> None:
    for i in range(part.job.parts.walk.steps):
        part.copy_in(i)


# --- Launches -----------------------------------------------------------------------------------------


def launch(
    formula: Formula,
    arrays: list[jax.Array],
    mask: Mask | None,
    plan: Tile | Parts,
    scale: jax.Array | None = None,
    label: Label | None = None,
    *,
    name: str,
    approximate: bool,
) -> list[jax.Array]:
    """Computes a formula on the rows of the arrays (rows, vocab).

    `scale` is `normalizers.encoded_scale`, (rows,) or (1,), for a formula with a temperature. `label` is for a formula
    that `counts`. `name` is the kernel's name in profiles; if there are two launches, the first has the suffix
    "_reduce". `approximate` says whether exp may be approximate (`plan.approximate`).

    Returns one array of all elements, of the last array's dtype; or per-row outputs, (rows, 1) by a `Tile`, or (rows,).
    """
    if isinstance(plan, Tile):
        rows = arrays[0].shape[0]
        return gpu_kernel(
            functools.partial(compute_tile, formula, plan, mask),
            grid={"row": -(-rows // plan.rows)},
            out_type=formula.out_type(arrays[0].shape, (rows, 1), arrays[-1].dtype),
            name=name,
            approximate=approximate,
        )(arrays, None if mask is None else mask.array, scale, label)
    job = Job(formula, arrays, mask, plan, scale, label, approximate)
    results = formula.out_type(job.view, (job.rows,), job.dtype)
    if plan.cluster:
        kernel = compute_row if plan.slots is None else compute_rows_in_turns
        assert plan.slots is None or formula.value is not None  # slots are freed while elements are written
        return _launch(job, kernel, name, results)

    structure = jax.tree.structure(formula.reduction.empty)
    of_segments = [jax.ShapeDtypeStruct((job.rows, plan.count), jnp.float32)] * structure.num_leaves
    reductions = jax.tree.unflatten(structure, _launch(job, compute_row, f"{name}_reduce", of_segments))
    if formula.value is None:
        reduction = formula.scaled(None if scale is None else scale[:, None]).reduction
        totals = reduction.combine_lanes(reductions, 1, lambda per_row: per_row[:, None])
        constants = formula.scaled(scale).constants(totals)
        return [a.astype(to.dtype) for a, to in zip(constants, results, strict=True)]
    return _launch(job, write_segment, name, results, reductions)


def _launch(
    job: Job, kernel, name: str, out_type: list[jax.ShapeDtypeStruct], reductions=None
) -> list[jax.Array]:
    """Launches kernel(job, refs). `reductions` (rows, segments) are of the segments, if a launch before made them."""
    parts = job.parts
    scratch: dict[str, Any] = {
        "x_smem": [plgpu.SMEM((parts.smem_elements,), a.dtype) for a in job.arrays],
        "arrived": [plgpu.Barrier(num_barriers=parts.barriers)] * len(job.arrays),
    }
    if reductions is None:
        words = states_ptx.words(job.formula.reduction.fields, parts.per_cta)
        scratch["records_smem"] = plgpu.SMEM((words,), jnp.float32)
    if job.ctas > 1:
        scratch["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("part",))

    def body(x_gmem, mask_gmem, scale_gmem, label_gmem, reductions_gmem, *out_gmem, **scratch):
        inputs = {"mask_gmem": mask_gmem, "scale_gmem": scale_gmem, "label_gmem": label_gmem}
        kernel(job, Refs(x_gmem, out_gmem, reductions_gmem=reductions_gmem, **inputs, **scratch))

    return gpu_kernel(
        body,
        grid={"row": job.teams, "part": parts.count},
        cluster=job.ctas,
        out_type=out_type,
        scratch_types=scratch,
        name=name,
        approximate=job.approximate,
    )(
        [a.reshape(job.view) for a in job.arrays],
        None if job.mask is None else job.mask.array,
        job.scale,
        job.label,
        reductions,
    )
