"""Long rows, in shared memory: each over one CTA, a cluster of CTAs, or, in two launches, any number of CTAs.

A row of one CTA, or of a cluster, is read from device memory once, if shared memory holds it, and written once:

    load -> reduce -> (of a cluster: merge with the other CTAs) -> write

A row of more CTAs is read by two launches, of which the second one merges the reductions of the parts in each CTA:

    load -> reduce -> write the part's reduction
    load -> merge -> write
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
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.gpu.staged_row import PartPlace, StagedRow, part_place
from pallas_softmax._src.softmax.formulas import Formula
from pallas_softmax._src.softmax.plan import EDGE, FEW_ROWS, Parts


def launch(
    formula: Formula,
    arrays: list[jax.Array],
    mask: Mask | None,
    parts: Parts,
    *,
    name: str,
    approximate: bool,
    interpret=None,
) -> list[jax.Array]:
    """Computes a formula on the rows of the arrays (rows, vocab), a part of a row in each CTA.

    Args:
      formula: what is computed.
      arrays: those that the formula reads, of one shape.
      mask: which elements count, or None.
      parts: how rows are cut into parts.
      name: the kernel's name in profiles; of two launches the first one's has "_reduce" after it.
      approximate: whether exp may be approximate; see `plan.approximate`.
      interpret: as for `pallas_call`.

    Returns:
      One array of the last array's dtype and the size of all rows; or, of a formula that has numbers for each
      row, arrays (rows,).
    """
    job = _Job(formula, arrays, mask, parts, approximate, interpret)
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
        totals = formula.reduction.across(reductions, 1, lambda per_row: per_row[:, None])
        return [a.astype(to.dtype) for a, to in zip(formula.constants(totals), results, strict=True)]
    return job.launch(_write_only, name, results, reductions)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A formula, the arrays (rows, vocab) on whose rows it is computed, and how; arguments as for `launch`."""

    formula: Formula
    arrays: list[jax.Array]
    mask: Mask | None
    parts: Parts
    approximate: bool
    interpret: Any

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.arrays[0].shape[0]

    @property
    def dtype(self) -> Any:
        """The dtype of the elements that are written."""
        return self.arrays[-1].dtype

    @property
    def view(self) -> tuple[int, ...]:
        """The shape in which the kernels see the arrays and the result."""
        return aligned_view(self.rows, self.parts.vocab, self.parts.vec)

    @property
    def mask_is_whole(self) -> bool:
        """Whether the mask has the shape of the arrays, so that its bodies start at multiples of vec bytes, too.

        Then a vector of the mask is one load, whose result nothing touches until its step is reduced. Of other masks
        two words are loaded and shifted at once, which waits for them.
        """
        return self.mask is not None and self.mask.array.shape == self.arrays[0].shape

    @property
    def clustered(self) -> bool:
        """Whether a row is over several CTAs that merge their reductions in the kernel."""
        return self.parts.cluster and self.parts.count > 1

    @property
    def teams(self) -> int:
        """Number of CTAs, or of groups of CTAs with a row's parts, which take one row each or several in turns."""
        return self.parts.teams or self.rows

    def launch(
        self, kernel, name: str, out_type: list[jax.ShapeDtypeStruct], reductions=None
    ) -> list[jax.Array]:
        """Returns the results of a launch, with a CTA for each part of each row, or of every so many rows in turns.

        Args:
          kernel: what a CTA does, a function of the job and its `_Refs`.
          name: the kernel's name in profiles.
          out_type: shapes and dtypes of the results.
          reductions: those of the parts, arrays (rows, parts), if they are known. Then the CTAs take the rows from
            the last one on, since the L2 cache holds what the launch before read last.
        """
        parts, count = self.parts, self.parts.count
        scratch: dict[str, Any] = {
            "x_smem": [plgpu.SMEM((parts.smem_elements,), a.dtype) for a in self.arrays],
            "landed": [plgpu.Barrier(num_barriers=parts.barriers)] * len(self.arrays),
        }
        if self.clustered:
            reduction_smem = plgpu.SMEM((WARPGROUP,), jnp.float32)
            scratch["sent_smem"] = jax.tree.map(lambda _: reduction_smem, self.formula.reduction.empty)
            scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",))

        def body(x_gmem, mask_gmem, reductions_gmem, *out_gmem, **scratch):
            kernel(self, _Refs(x_gmem, mask_gmem, reductions_gmem, out_gmem, **scratch))

        inputs = [a.reshape(self.view) for a in self.arrays]
        return gpu_kernel(
            body,
            grid={"row": self.teams, "part": count} if count > 1 else {"row": self.teams},
            cluster=count if self.clustered else 1,
            out_type=out_type,
            scratch_types=scratch,
            name=name,
            approximate=self.approximate,
            interpret=self.interpret,
        )(inputs, None if self.mask is None else self.mask.array, reductions)


class _Refs(NamedTuple):
    """What a CTA reads and writes.

    Attributes:
      x_gmem: the arrays, in the shape of the view.
      mask_gmem: the mask, (mask rows, vocab or 1), or None.
      reductions_gmem: the reductions of the parts, with references (rows, parts) for arrays, or None.
      out_gmem: the results.
      x_smem: for each array, the body of the CTA's part; the last one also holds what is to be written.
      landed: for each array, a barrier for each step, or slot, which completes when the step has arrived.
      sent_smem: in a cluster, the reduction of the CTA's part, for the others to read, a copy for each thread.
      met: in a cluster, the barrier at which its CTAs meet.
    """

    x_gmem: list
    mask_gmem: Any
    reductions_gmem: Any
    out_gmem: tuple
    x_smem: list
    landed: list
    sent_smem: Any = None
    met: Any = None


# --- What a CTA does ----------------------------------------------------------------------------------


def _compute(job: _Job, refs: _Refs) -> None:
    """All in one launch: a CTA, or a cluster, has the whole row."""
    _start(job, refs).finish()


def _compute_in_turns(job: _Job, refs: _Refs) -> None:
    """Takes several rows, one after the other: the next row's steps arrive as this one's leave.

    With slots for one row and a half, time goes to the right:

        row 0    load, reduce | merge | write |
        row 1    load ------------------- load, reduce | merge | write |
        row 2                                    load ---- load, reduce | ...
                  half of it ^          ^ the rest, as slots become free

    Of a row with more steps than there are slots, the first ones leave their slots when they are reduced, and are read
    again as the others are written.
    """
    walk, slots, team = job.parts.walk, job.parts.slots or 0, lax.axis_index("row")
    turns = (job.rows - team + job.teams - 1) // job.teams
    steps_of_row = walk.steps + job.parts.again

    def part_of(turn) -> _Part:
        place = part_place(job.parts.cut, job.view, rows=job.rows, row=team + turn * job.teams)
        before = turn * steps_of_row
        body = StagedRow(
            walk, job.interpret, slots, before, lambda i: start_step(before + i + slots), job.parts.again
        )
        return _Part(job, refs, place, body)

    def start_step(number) -> None:
        """Starts the copies of a step, whose number counts those of all rows, into the slot that is free for it."""
        turn, i = number // steps_of_row, number % steps_of_row
        pl.when(number < turns * steps_of_row)(lambda: part_of(turn).copy_in(i))

    def take_turn(turn, _) -> None:
        part = part_of(turn)
        part.load_edges()
        part.finish()

    lax.fori_loop(0, slots, lambda number, _: start_step(number), None)
    lax.fori_loop(0, turns, take_turn, None)


def _reduce_only(job: _Job, refs: _Refs) -> None:
    """The first of two launches: writes the reduction of each part."""
    part = _start(job, refs)
    total = part.reduce()
    for gmem, leaf in zip(refs.out_gmem, jax.tree.leaves(total), strict=True):
        gmem[part.place.row, part.place.index] = leaf


def _write_only(job: _Job, refs: _Refs) -> None:
    """The second of two launches: writes the elements, when it has merged the reductions of the row's parts."""
    part = _start(job, refs, backwards=True)
    total = part.merge_from_device_memory()
    for landed in refs.landed:
        part.body.wait(landed)
    part.write_elements(total, read_mask=job.mask is not None)


def _start(job: _Job, refs: _Refs, *, backwards: bool = False) -> "_Part":
    """Returns the only part that this CTA takes: starts the copies of its body, and loads its edges."""
    place = part_place(job.parts.cut, job.view, rows=job.rows, backwards=backwards)
    part = _Part(job, refs, place, StagedRow(job.parts.walk, job.interpret))
    for i in range(job.parts.walk.steps):
        part.copy_in(i)
    part.load_edges()
    return part


class _Part:
    """A part of a row that this CTA holds: its body in shared memory, its edges in registers; see `Parts`.

    Attributes:
      place: which part of which row it is.
      body_start: the element of the part at which its body starts.
      body: the body on its way through shared memory.
      edges: when `load_edges` was called, the first and the last EDGE elements of the part, if it has edges.
    """

    def __init__(self, job: _Job, refs: _Refs, place: PartPlace, body: StagedRow):
        self.job, self.refs, self.place, self.body = job, refs, place, body
        self.body_start = job.parts.body_start(place.row, place.start)
        self.edges: list[_Edge] = []

    # --- Loads

    def copy_in(self, i) -> None:
        """Starts the copies of step i of the body, an int or traced."""
        start = self.place.first + self.body_start
        for x_gmem, x_smem, landed in zip(self.refs.x_gmem, self.refs.x_smem, self.refs.landed, strict=True):
            self.body.copy_in(self.place.in_view(x_gmem), x_smem, landed, start, i)

    def load_edges(self) -> None:
        """Loads the first and the last EDGE elements of the part, if it has edges."""
        if not self.job.parts.edges:
            return
        interpret, place, last = self.job.interpret, self.place, self.job.parts.length - EDGE
        position = blocks.positions(interpret=interpret)
        after_body = position + last >= self.body_start + self.job.parts.body
        for at, counted in (
            (0, position < self.body_start),
            (last, after_body & (position + last < place.owned)),
        ):
            where = pl.ds(place.first + at, EDGE)
            arrays = [blocks.load(place.in_view(x).at[where], interpret=interpret) for x in self.refs.x_gmem]
            mask = None if self.job.mask is None else self._load_mask(at, EDGE, 1)
            self.edges.append(_Edge(at, arrays, mask, counted))

    def _load_body(self, i, size: int):
        """Returns the blocks of step i of the body: for each block, those of all arrays."""
        fill = self.job.formula.reduction.neutral
        return zip(*(self.body.load(x_smem, i, size, fill) for x_smem in self.refs.x_smem), strict=True)

    def _load_body_mask(self, i) -> list:
        """Returns the mask of each block of step i of the body, as int8; 0 after its end. None, without a mask."""
        walk = self.job.parts.walk
        if self.job.mask is None:
            return [None] * walk.step_blocks
        starts = [i * walk.step_size + block * walk.block_size for block in range(walk.step_blocks)]
        return [self._load_mask(self.body_start + at, walk.length - at, walk.vec) for at in starts]

    def _load_mask(self, at, held, vec: int):
        """Returns a block of the mask, from element `at` of the part on, of which the first `held` are in the row."""
        mask: Any = self.job.mask
        return blocks.load_mask(
            self.refs.mask_gmem,
            mask.row(self.place.row),
            self.place.start + at,
            held,
            vec,
            aligned=vec == 1 or self.job.mask_is_whole,
            interpret=self.job.interpret,
        )

    # --- Reduction

    def reduce(self):
        """Returns the reduction of the part's elements, each counted once."""
        if not self.edges:
            return self._reduce_body()
        # Few rows do not miss the registers that this takes: the edges are reduced while the body is on its way.
        if self.job.rows <= FEW_ROWS and self.job.mask is None:
            of_edges, of_body = self._reduce_edges(), self._reduce_body()
        else:
            of_body, of_edges = self._reduce_body(), self._reduce_edges()
        return self.job.formula.reduction.merge(of_body, of_edges)

    def _reduce_edges(self):
        """Returns the reduction of the elements of the edges that count there."""
        reduction = self.job.formula.reduction
        lanes = jax.tree.map(lambda x: blocks.filled(x, interpret=self.job.interpret), reduction.empty)
        terms = [self._term(edge.x, edge.keep, edge.counted) for edge in self.edges]
        return reduction.across(reduction.absorb(lanes, terms))

    def _reduce_body(self):
        """Returns the reduction of the body, step by step as they arrive."""
        reduction = self.job.formula.reduction
        lanes = jax.tree.map(self.body.filled, reduction.empty)
        masks = [self._load_body_mask(i) for i in range(self._mask_steps_ahead)]
        lanes, _ = self.body.sweep(self._absorb_step, (lanes, masks))
        return reduction.across(lanes)

    @property
    def _mask_steps_ahead(self) -> int:
        return min(self.job.parts.mask_steps_ahead, self.job.parts.walk.steps)

    def _absorb_step(self, i, size: int, state):
        """Adds step i of the body to the reduction of each lane. Its mask was loaded some steps before."""
        lanes, (mask_blocks, *next_masks) = state
        formula, x_smem = self.job.formula, self.refs.x_smem
        ahead = self._mask_steps_ahead
        all_loaded = ahead == self.job.parts.walk.steps
        next_masks.append(mask_blocks if all_loaded else self._load_body_mask(i + ahead))
        self._wait(i)
        xs = list(zip(self._load_body(i, size), _as_conditions(mask_blocks)))
        if self.job.mask is not None and formula.value is not None:  # `write` need not read it then
            kept = [jnp.where(keep, x[-1], formula.reduction.neutral) for x, keep in xs]
            self.body.store(x_smem[-1], i, size, kept)
        terms = [self._term(x, keep) for x, keep in xs]
        lanes = formula.reduction.absorb(lanes, terms)
        if self.body.again:

            @pl.when(i < self.body.again)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                self.body.freed(i)

        return lanes, next_masks

    def _wait(self, i) -> None:
        """Waits until step i of the body has arrived."""
        for landed in self.refs.landed:
            plgpu.barrier_wait(landed.at[self.body.slot(i)])

    def _term(self, x, *conditions):
        """Returns what is reduced of the blocks x, one of each array; neutral where a condition is False."""
        term = self.job.formula.term(*x)
        for condition in conditions:
            if condition is not None:
                term = jnp.where(condition, term, self.job.formula.reduction.neutral)
        return term

    def merge_over_cluster(self, total):
        """Returns the reductions of the cluster's CTAs, merged in the same order by each: thread i takes CTA i's."""
        interpret, sent_smem, met = self.job.interpret, self.refs.sent_smem, self.refs.met
        reduction, count = self.job.formula.reduction, self.job.parts.count
        for smem, leaf in zip(jax.tree.leaves(sent_smem), jax.tree.leaves(total), strict=True):
            blocks.store_in_place(smem, blocks.filled(leaf, interpret=interpret), interpret=interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

        def of_peers(smem, empty):
            return blocks.load_from_ctas(smem, count, empty)

        total = reduction.across(jax.tree.map(of_peers, sent_smem, reduction.empty))
        plgpu.barrier_arrive(met)  # all threads have read, since the result is that of all
        return total

    def merge_from_device_memory(self):
        """Returns the reductions of the row's parts, which the launch before has written, merged."""
        reduction, count = self.job.formula.reduction, self.job.parts.count

        def of_parts(first: int):
            def load(gmem, empty):
                return blocks.load_from_row(
                    gmem,
                    self.place.row,
                    start=first,
                    held=count - first,
                    fill=empty,
                    interpret=self.job.interpret,
                )

            return jax.tree.map(load, self.refs.reductions_gmem, reduction.empty)

        lanes = [of_parts(first) for first in range(0, count, WARPGROUP)]
        return reduction.across(online.tree(reduction.merge, lanes))

    # --- Results

    def finish(self) -> None:
        """Reduces the part, merges its reduction with those of the cluster, and writes the results."""
        total = self.reduce()
        if self.job.clustered:
            total = self.merge_over_cluster(total)
        if self.job.formula.value is not None:
            self.write(total)
        else:
            self.write_constants(total)
            if self.job.parts.slots is not None:
                lax.fori_loop(0, self.job.parts.walk.steps, lambda i, _: self.body.freed(i), None)
        # No CTA leaves, or sends again, while another one may read what it sent.
        if self.job.clustered:
            plgpu.barrier_wait(self.refs.met)

    def write_constants(self, total) -> None:
        """Writes the numbers of the row."""
        for gmem, constant in zip(self.refs.out_gmem, self.job.formula.constants(total), strict=True):
            gmem[self.place.row] = constant.astype(gmem.dtype)

    def write(self, total) -> None:
        """Writes the elements of the part, after `reduce`, which has made masked ones neutral in shared memory.

        From neutral elements the formula gives the value that masked ones get, so the mask need not be read again,
        unless they meet a NaN or an infinity in the row's reduction.
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
          read_mask: whether the mask must be read for the body.
        """
        formula, refs, place = self.job.formula, self.refs, self.place
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
            blocks.store(place.in_view(out_gmem).at[where], block, interpret=self.job.interpret)
        self.body.write(body_values, refs.x_smem[-1], place.in_view(out_gmem), place.first + self.body_start)


class _Edge(NamedTuple):
    """The first or the last EDGE elements of a part, in registers, one for each thread.

    Attributes:
      start: the first of them, an element of the part.
      arrays: a block of each array, which nothing touches before it is used: that would wait for its load.
      mask: a block of the mask, as int8, or None.
      counted: which of them the reduction takes from here, and not from the body or the next part.
    """

    start: int
    arrays: list[jax.Array]
    mask: jax.Array | None
    counted: jax.Array

    @property
    def x(self) -> list[jax.Array]:
        """A float32 block of each array."""
        return [block.astype(jnp.float32) for block in self.arrays]

    @property
    def keep(self):
        """The mask, a boolean block, or None."""
        return None if self.mask is None else self.mask != 0


def _as_conditions(mask_blocks: list) -> list:
    """Blocks of a mask as booleans; None stays None."""
    return [None if block is None else block != 0 for block in mask_blocks]
