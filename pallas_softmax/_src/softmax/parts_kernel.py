"""Kernels for long rows, staged in shared memory: one CTA, a cluster, or many CTAs in two launches per row.

One CTA or one cluster per row, in one launch. The row is read once if shared memory holds it:

    load -> reduce -> (cluster only: merge with the other CTAs) -> write

More CTAs per row, in two launches. The row is read twice. In the second launch each CTA merges all parts' reductions:

    launch 1    load -> reduce -> write the part's reduction
    launch 2    load -> merge -> write
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.gpu.staged_row import PartPlace, StagedRow, part_place
from pallas_softmax._src.softmax.formulas import Formula, Located, Reduction
from pallas_softmax._src.softmax.moments_ptx import SCRATCH
from pallas_softmax._src.softmax.plan import EDGE, FEW_ROWS, Parts


def launch(
    formula: Formula,
    arrays: list[jax.Array],
    mask: Mask | None,
    parts: Parts,
    scale: jax.Array | None = None,
    *,
    name: str,
    approximate: bool,
) -> list[jax.Array]:
    """Computes a formula on the rows of the arrays (rows, vocab). Each CTA takes a part of a row.

    Args:
      formula: the formula to compute.
      arrays: the arrays that the formula reads, all of one shape.
      mask: which elements count, or None.
      parts: how rows are cut into parts.
      scale: 1 / temperature, (rows,) or (1,), for a formula with a temperature; or None.
      name: the kernel's name in profiles. If there are two launches, the first has the suffix "_reduce".
      approximate: whether exp may be approximate; see `plan.approximate`.

    Returns:
      One array with all elements of the result, in the last array's dtype. If the formula has per-row outputs: arrays
      (rows,).
    """
    job = _Job(formula, arrays, mask, parts, scale, approximate)
    if formula.value is None:
        results = formula.row_results((job.rows,), job.dtype)
    else:
        results = [jax.ShapeDtypeStruct(job.view, job.dtype)]
    if parts.cluster:
        return job.launch(_compute if parts.slots is None else _compute_in_turns, name, results)

    structure = jax.tree.structure(formula.reduction.empty)
    of_parts = [jax.ShapeDtypeStruct((job.rows, parts.count), jnp.float32)] * structure.num_leaves
    reductions = jax.tree.unflatten(structure, job.launch(_reduce_only, f"{name}_reduce", of_parts))
    if formula.value is None:
        of_parts = formula.scaled(None if scale is None else scale[:, None])
        totals = of_parts.reduction.combine_lanes(reductions, 1, lambda per_row: per_row[:, None])
        constants = formula.scaled(scale).constants(totals)
        return [a.astype(to.dtype) for a, to in zip(constants, results, strict=True)]
    return job.launch(_write_only, name, results, reductions)


@dataclasses.dataclass(frozen=True)
class _Job:
    """One call of `launch`; the fields are its arguments."""

    formula: Formula
    arrays: list[jax.Array]
    mask: Mask | None
    parts: Parts
    scale: jax.Array | None
    approximate: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.arrays[0].shape[0]

    @property
    def dtype(self) -> Any:
        """The dtype of the output elements."""
        return self.arrays[-1].dtype

    @property
    def view(self) -> tuple[int, ...]:
        """The shape of the arrays and the result inside the kernels."""
        return aligned_view(self.rows, self.parts.vocab, self.parts.vec)

    @property
    def mask_is_whole(self) -> bool:
        """Whether the mask has the shape of the arrays, so that its bodies are aligned to vec bytes.

        An aligned vector of the mask is a single load, and nothing waits for it until its step is reduced. Other masks
        need two words, and shifting these together waits for both loads.
        """
        return self.mask is not None and self.mask.array.shape == self.arrays[0].shape

    @property
    def clustered(self) -> bool:
        """Whether the CTAs of a row form a cluster and merge their reductions in the kernel."""
        return self.parts.cluster and self.parts.count > 1

    @property
    def teams(self) -> int:
        """Number of groups of CTAs. A group has one CTA per part of a row, and takes one row or several in turns."""
        return self.parts.teams or self.rows

    def launch(
        self, kernel, name: str, out_type: list[jax.ShapeDtypeStruct], reductions=None
    ) -> list[jax.Array]:
        """Launches a kernel on all rows and returns its results.

        Args:
          kernel: the work of a CTA, a function of the job and its `_Refs`.
          name: the kernel's name in profiles.
          out_type: shapes and dtypes of the results.
          reductions: the reductions of the parts, arrays (rows, parts), from a launch before; or None.
        """
        parts, count = self.parts, self.parts.count
        scratch: dict[str, Any] = {
            "x_smem": [plgpu.SMEM((parts.smem_elements,), a.dtype) for a in self.arrays],
            "arrived": [plgpu.Barrier(num_barriers=parts.barriers)] * len(self.arrays),
        }
        if self.formula.reduction.per_thread:
            scratch["scratch_smem"] = plgpu.SMEM((SCRATCH,), jnp.float32)
        if self.clustered:
            reduction_smem = plgpu.SMEM((WARPGROUP,), jnp.float32)
            scratch["sent_smem"] = jax.tree.map(lambda _: reduction_smem, self.formula.reduction.empty)
            scratch["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("part",))

        def body(x_gmem, mask_gmem, scale_gmem, reductions_gmem, *out_gmem, **scratch):
            kernel(self, _Refs(x_gmem, mask_gmem, scale_gmem, reductions_gmem, out_gmem, **scratch))

        inputs = [a.reshape(self.view) for a in self.arrays]
        return gpu_kernel(
            body,
            grid={"row": self.teams, "part": count} if count > 1 else {"row": self.teams},
            cluster=count if self.clustered else 1,
            out_type=out_type,
            scratch_types=scratch,
            name=name,
            approximate=self.approximate,
        )(inputs, None if self.mask is None else self.mask.array, self.scale, reductions)


class _Refs(NamedTuple):
    """The memory and barriers that a CTA uses.

    Attributes:
      x_gmem: the input arrays, in the shape `_Job.view`.
      mask_gmem: the mask, (mask rows, vocab or 1), or None.
      scale_gmem: 1 / temperature, (rows,) or (1,), or None.
      reductions_gmem: the reductions of the parts, as references (rows, parts), or None.
      out_gmem: the results.
      x_smem: for each array, the body of the CTA's part. The buffer of the last array also stages the output.
      arrived: for each array, one barrier per step, or per slot. It completes when the step has arrived.
      scratch_smem: with one state for each thread, memory to merge the threads.
      sent_smem: in a cluster, the reduction of this CTA's part, which the other CTAs read. Each thread has a copy.
      cluster_barrier: in a cluster, the barrier that synchronizes its CTAs.
    """

    x_gmem: list
    mask_gmem: Any
    scale_gmem: Any
    reductions_gmem: Any
    out_gmem: tuple
    x_smem: list
    arrived: list
    scratch_smem: Any = None
    sent_smem: Any = None
    cluster_barrier: Any = None


# --- The work of a CTA --------------------------------------------------------------------------------


def _compute(job: _Job, refs: _Refs) -> None:
    """The only launch: one CTA or one cluster reduces and writes the whole row."""
    _start(job, refs).finish()


def _compute_in_turns(job: _Job, refs: _Refs) -> None:
    """The only launch, with several rows in turns: the next row is loaded while this one is merged and written.

    If the slots hold one and a half rows (time goes to the right):

        row 0    load, reduce | merge | write |
        row 1    load ------------------- load, reduce | merge | write |
        row 2                                    load ---- load, reduce | ...
                  half of it ^          ^ the rest, as slots become free

    If a row has more steps than there are slots, its first steps give up their slots once they are reduced. They are
    read again while the other steps are written.
    """
    walk, slots, team = job.parts.walk, job.parts.slots or 0, lax.axis_index("row")
    turns = (job.rows - team + job.teams - 1) // job.teams
    steps_of_row = walk.steps + job.parts.again

    def part_of(turn) -> _Part:
        place = part_place(job.parts.cut, job.view, rows=job.rows, row=team + turn * job.teams)
        before = turn * steps_of_row
        body = StagedRow(walk, slots, before, lambda i: start_step(before + i + slots), job.parts.again)
        return _Part(job, refs, place, body)

    def start_step(number) -> None:
        """Starts the copies of a step into its free slot. Step numbers run on from row to row."""
        turn, i = number // steps_of_row, number % steps_of_row
        pl.when(number < turns * steps_of_row)(lambda: part_of(turn).copy_in(i))

    def take_turn(turn, _) -> None:
        part = part_of(turn)
        part.load_edges()
        part.finish()

    lax.fori_loop(0, slots, lambda number, _: start_step(number), None)
    lax.fori_loop(0, turns, take_turn, None)


def _reduce_only(job: _Job, refs: _Refs) -> None:
    """The first of two launches: reduces each part and writes its reduction."""
    part = _start(job, refs)
    total = part.reduce()
    for gmem, leaf in zip(refs.out_gmem, jax.tree.leaves(total), strict=True):
        gmem[part.place.row, part.place.index] = leaf


def _write_only(job: _Job, refs: _Refs) -> None:
    """The second of two launches: merges the reductions of the row's parts, then writes the elements.

    It takes the rows in reverse, since the L2 cache still holds what the first launch read last.
    """
    part = _start(job, refs, backwards=True)
    total = part.merge_from_device_memory()
    for arrived in refs.arrived:
        part.body.wait(arrived)
    part.write_elements(total, read_mask=job.mask is not None)


def _start(job: _Job, refs: _Refs, *, backwards: bool = False) -> "_Part":
    """Returns the only part of this CTA, after starting the copies of its body and the loads of its edges."""
    place = part_place(job.parts.cut, job.view, rows=job.rows, backwards=backwards)
    part = _Part(job, refs, place, StagedRow(job.parts.walk))
    for i in range(job.parts.walk.steps):
        part.copy_in(i)
    part.load_edges()
    return part


class _Part:
    """The part of a row that this CTA holds: the body in shared memory, the edges in registers; see `Parts`.

    Attributes:
      formula: the formula to compute, with the temperature of the row.
      place: the row and the position of the part in it.
      body_start: the element of the part at which its body starts.
      body: the body on its way through shared memory.
      edges: the first and the last EDGE elements of the part; empty before `load_edges`, or if it has no edges.
    """

    def __init__(self, job: _Job, refs: _Refs, place: PartPlace, body: StagedRow):
        self.job, self.refs, self.place, self.body = job, refs, place, body
        self.body_start = job.parts.body_start(place.row, place.start)
        self.edges: list[_Edge] = []
        scale = refs.scale_gmem
        self.formula = job.formula.scaled(
            None if scale is None else scale[place.row if scale.shape[0] > 1 else 0]
        )

    # --- Loads

    def copy_in(self, i) -> None:
        """Starts the copies of step i of the body, an int or traced."""
        start = self.place.first + self.body_start
        for x_gmem, x_smem, arrived in zip(
            self.refs.x_gmem, self.refs.x_smem, self.refs.arrived, strict=True
        ):
            self.body.copy_in(self.place.in_view(x_gmem), x_smem, arrived, start, i)

    def load_edges(self) -> None:
        """Loads the first and the last EDGE elements of the part, if it has edges."""
        if not self.job.parts.edges:
            return
        place, last = self.place, self.job.parts.length - EDGE
        position = blocks.positions()
        after_body = position + last >= self.body_start + self.job.parts.body
        for at, counted in (
            (0, position < self.body_start),
            (last, after_body & (position + last < place.owned)),
        ):
            where = pl.ds(place.first + at, EDGE)
            arrays = [blocks.load(place.in_view(x).at[where]) for x in self.refs.x_gmem]
            mask = None if self.job.mask is None else self._load_mask(at, EDGE, 1)
            self.edges.append(_Edge(at, arrays, mask, counted))

    def _load_body(self, i, size: int):
        """Yields the blocks of step i of the body, as a tuple with a block from each array."""
        fill = self.formula.reduction.neutral
        return zip(*(self.body.load(x_smem, i, size, fill) for x_smem in self.refs.x_smem), strict=True)

    def _load_body_mask(self, i) -> list:
        """Returns the mask of each block of step i of the body, as int8, 0 after its end. Without a mask: Nones."""
        walk = self.job.parts.walk
        if self.job.mask is None:
            return [None] * walk.step_blocks
        starts = [i * walk.step_size + block * walk.block_size for block in range(walk.step_blocks)]
        return [self._load_mask(self.body_start + at, walk.length - at, walk.vec) for at in starts]

    def _load_mask(self, at, held, vec: int):
        """Returns a block of the mask, from element `at` of the part on; 0 after the first `held` elements."""
        mask: Any = self.job.mask
        return blocks.load_mask(
            self.refs.mask_gmem,
            mask.row(self.place.row),
            self.place.start + at,
            held,
            vec,
            aligned=vec == 1 or self.job.mask_is_whole,
        )

    # --- Reduction

    def reduce(self):
        """Returns the reduction of the part; each element counts once."""
        reduction = self.formula.reduction
        if not self.edges or reduction.per_thread:
            return self._reduce_body()
        # Reducing the edges first overlaps with loading the body. With few rows, the extra registers are free.
        if self.job.rows <= FEW_ROWS and self.job.mask is None:
            of_edges, of_body = self._reduce_edges(), self._reduce_body()
        else:
            of_body, of_edges = self._reduce_body(), self._reduce_edges()
        return reduction.combine(of_body, of_edges)

    def _reduce_edges(self):
        """Returns the reduction of the edges, without the elements that count elsewhere."""
        reduction = self.formula.reduction
        lanes = jax.tree.map(lambda x: blocks.filled(x), reduction.empty)
        return reduction.combine_lanes(reduction.add(lanes, self._edge_terms(), 0))

    def _edge_terms(self) -> list:
        """Returns the terms of both edges, neutral for elements that count elsewhere."""
        return [self._term(edge.x, edge.keep, edge.counted) for edge in self.edges]

    def _reduce_body(self):
        """Returns the reduction of the body. Each step is added when it arrives.

        If a thread has one state, the edges are another step: merging threads takes longer than adding an element.
        """
        reduction = self.formula.reduction
        vec = 1 if reduction.per_thread else self.job.parts.vec
        lanes = jax.tree.map(lambda x: blocks.filled(x, vec), reduction.empty)
        masks = [self._load_body_mask(i) for i in range(self._mask_steps_ahead)]
        lanes, _ = self.body.sweep(self._absorb_step, (lanes, masks))
        if self.edges and reduction.per_thread:
            lanes = _add(reduction, lanes, self._edge_terms(), self.job.parts.walk.steps)
        total = _merge_threads(reduction, lanes, self.refs.scratch_smem)
        return self._located(total) if self.formula.locates else total

    @property
    def _mask_steps_ahead(self) -> int:
        return min(self.job.parts.mask_steps_ahead, self.job.parts.walk.steps)

    def _absorb_step(self, i, size: int, state):
        """Adds step i of the body to the reduction of each lane. The mask was loaded several steps earlier."""
        lanes, (mask_blocks, *next_masks) = state
        formula, x_smem = self.formula, self.refs.x_smem
        ahead = self._mask_steps_ahead
        all_loaded = ahead == self.job.parts.walk.steps
        next_masks.append(mask_blocks if all_loaded else self._load_body_mask(i + ahead))
        self._wait(i)
        xs = list(zip(self._load_body(i, size), _as_conditions(mask_blocks)))
        if self.job.mask is not None and formula.value is not None:  # `write` then need not read the mask
            kept = [jnp.where(keep, x[-1], formula.reduction.neutral) for x, keep in xs]
            self.body.store(x_smem[-1], i, size, kept)
        terms = [self._term(x, keep) for x, keep in xs]
        if formula.reduction.per_thread:
            terms = [x for term in terms for x in blocks.split(term, self.job.parts.vec)]
        lanes = _add(formula.reduction, lanes, terms, i)
        if self.body.again:

            @pl.when(i < self.body.again)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                self.body.freed(i)

        return lanes, next_masks

    def _located(self, total: Located) -> Located:
        """Returns the reduction of the part with the position of its largest element in the row.

        `total.at` is the first step that holds it. These blocks are read again from shared memory. If the step is
        shorter, they begin before it.
        """
        walk, (x_smem,) = self.job.parts.walk, self.refs.x_smem
        thread, position = (blocks.positions(vec) for vec in (1, walk.vec))
        terms, positions = self._edge_terms(), [thread + edge.start for edge in self.edges]
        held = walk.padded_length // walk.block_size
        count = min(walk.step_blocks, held)
        first = jnp.minimum(total.at.astype(jnp.int32) * walk.step_blocks, held - count)
        for block in range(count):
            at = (first + block) * walk.block_size
            x = blocks.load(x_smem.at[pl.ds(at, walk.block_size)], walk.vec)
            left = walk.length - at
            inside = position < left if walk.length % walk.block_size else None
            mask = None
            if self.job.mask is not None:
                (mask,) = _as_conditions([self._load_mask(self.body_start + at, left, walk.vec)])
            term = self._term([x.astype(jnp.float32)], mask, inside)
            terms += blocks.split(term, walk.vec)
            positions += [thread * walk.vec + (self.body_start + at + i) for i in range(walk.vec)]
        found = [online.if_largest(at, x, total.moments.m) for at, x in zip(positions, terms, strict=True)]
        at = jnp.min(online.tree(jnp.minimum, found))
        return total._replace(at=(self.place.start + at).astype(jnp.float32))

    def _wait(self, i) -> None:
        """Waits until step i of the body has arrived."""
        for arrived in self.refs.arrived:
            plgpu.barrier_wait(arrived.at[self.body.slot(i)])

    def _term(self, x, *conditions):
        """Returns the terms to reduce, from one block of each array; neutral where a condition is False."""
        term = self.formula.term(*x)
        for condition in conditions:
            if condition is not None:
                term = jnp.where(condition, term, self.formula.reduction.neutral)
        return term

    def merge_over_cluster(self, total):
        """Returns the merged reductions of the cluster's CTAs. Thread i reads from CTA number i."""
        sent_smem, cluster_barrier = self.refs.sent_smem, self.refs.cluster_barrier
        reduction, count = self.formula.reduction, self.job.parts.count
        for smem, leaf in zip(jax.tree.leaves(sent_smem), jax.tree.leaves(total), strict=True):
            block, layout = blocks.filled(leaf), blocks.layout(1)
            blocks.store_in_place(smem, block, layout)
        plgpu.commit_smem()
        plgpu.barrier_arrive(cluster_barrier)
        plgpu.barrier_wait(cluster_barrier)

        def of_peers(smem, empty):
            return blocks.load_from_ctas(smem, count, empty)

        if reduction.per_thread:
            total = reduction.per_thread.merge_ctas(sent_smem, count, self.refs.scratch_smem)
        else:
            total = reduction.combine_lanes(jax.tree.map(of_peers, sent_smem, reduction.empty))
        plgpu.barrier_arrive(cluster_barrier)  # all threads have read: the total depends on each read
        return total

    def merge_from_device_memory(self):
        """Returns the merged reductions of the row's parts, which the first launch wrote."""
        reduction, count = self.formula.reduction, self.job.parts.count

        def of_parts(first: int):
            def load(gmem, empty):
                return blocks.load_from_row(
                    gmem,
                    self.place.row,
                    start=first,
                    held=count - first,
                    fill=empty,
                )

            return jax.tree.map(load, self.refs.reductions_gmem, reduction.empty)

        lanes = [of_parts(first) for first in range(0, count, WARPGROUP)]
        return reduction.combine_lanes(online.tree(reduction.combine, lanes))

    # --- Results

    def finish(self) -> None:
        """Reduces the part, merges with the other CTAs of the cluster, and writes the results."""
        total = self.reduce()
        if self.job.clustered:
            total = self.merge_over_cluster(total)
        if self.formula.value is not None:
            self.write(total)
        else:
            self.write_constants(total)
            if self.job.parts.slots is not None:
                lax.fori_loop(0, self.job.parts.walk.steps, lambda i, _: self.body.freed(i), None)
        # A CTA must not exit, or overwrite `sent_smem`, while a peer may still read it.
        if self.job.clustered:
            plgpu.barrier_wait(self.refs.cluster_barrier)

    def write_constants(self, total) -> None:
        """Writes the constants of the row."""
        for gmem, constant in zip(self.refs.out_gmem, self.formula.constants(total), strict=True):
            gmem[self.place.row] = constant.astype(gmem.dtype)

    def write(self, total) -> None:
        """Writes the elements of the part. `reduce` has made the masked elements neutral in shared memory.

        For a neutral element, the formula gives the masked value, so the mask need not be read again. The exception is
        a NaN or an infinity in the row's reduction.
        """
        if self.job.mask is None:
            self.write_elements(total, read_mask=False)
            return
        leaves = jax.tree.leaves(total)
        finite = functools.reduce(jnp.logical_and, (jnp.abs(leaf) < jnp.inf for leaf in leaves))
        lax.cond(
            finite,
            lambda: self.write_elements(total, read_mask=False),
            lambda: self.write_elements(total, read_mask=True),
        )

    def write_elements(self, total, *, read_mask: bool) -> None:
        """Writes the elements of the part: the edges from registers, and the body through shared memory.

        Args:
          total: the reduction of the row.
          read_mask: whether to read the mask for the body.
        """
        formula, refs, place = self.formula, self.refs, self.place
        constants = formula.constants(total)
        elements: Any = formula.value

        def value(x, keep):
            y = elements(*x, *constants)
            return y if keep is None else jnp.where(keep, y, formula.masked_value)

        def body_values(i, size):
            if self.body.again:
                pl.when(i >= self.job.parts.walk.steps)(functools.partial(self._wait, i))
            mask_blocks = self._load_body_mask(i) if read_mask else [None] * self.job.parts.step_blocks
            return (value(x, keep) for x, keep in zip(self._load_body(i, size), _as_conditions(mask_blocks)))

        (out_gmem,) = refs.out_gmem
        for edge in self.edges:
            block = value(edge.x, edge.keep).astype(self.job.dtype)
            where = pl.ds(place.first + edge.start, EDGE)
            blocks.store(place.in_view(out_gmem).at[where], block)
        self.body.write(body_values, refs.x_smem[-1], place.in_view(out_gmem), place.first + self.body_start)


class _Edge(NamedTuple):
    """The first or the last EDGE elements of a part, in registers, one for each thread.

    Attributes:
      start: the position of the first of these elements in the part.
      arrays: a block from each array, as loaded: converting it early would wait for the load.
      mask: a block of the mask, as int8, or None.
      counted: which elements count here, and not in the body or in the next part.
    """

    start: int
    arrays: list[jax.Array]
    mask: jax.Array | None
    counted: jax.Array

    @property
    def x(self) -> list[jax.Array]:
        """A float32 block from each array."""
        return [block.astype(jnp.float32) for block in self.arrays]

    @property
    def keep(self):
        """The mask as a boolean block, or None."""
        return None if self.mask is None else self.mask != 0


@twin(lambda reduction, lanes, terms, step: reduction.add(lanes, terms, step))
def _add(reduction: Reduction, lanes, terms: list, step):
    """Returns the states of all threads with the elements of a step added."""
    add = reduction.per_thread.add if reduction.per_thread else reduction.add
    return add(lanes, terms, step)


@twin(lambda reduction, lanes, scratch_smem: reduction.combine_lanes(lanes))
def _merge_threads(reduction: Reduction, lanes, scratch_smem):
    """Returns one state that merges the states of all threads."""
    if reduction.per_thread:
        return reduction.per_thread.merge_threads(lanes, scratch_smem)
    return reduction.combine_lanes(lanes)


def _as_conditions(mask_blocks: list) -> list:
    """Returns blocks of a mask as booleans; None stays None."""
    return [None if block is None else block != 0 for block in mask_blocks]
