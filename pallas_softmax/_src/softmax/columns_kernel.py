"""Kernels for softmax along an axis that is not the last one: columns are reduced in place, without a transpose.

An array (outer, vocab, inner) has outer * inner columns of `vocab` elements. A line is `inner` contiguous elements, one
of each adjacent column. Neighbouring threads hold neighbouring elements of a line. Several threads may share a column.

    short columns   a CTA holds a tile of whole adjacent columns in registers: `tile_kernel`
    long columns    a cluster takes a strip of adjacent columns. Each CTA holds some of the lines in shared memory:
                    load -> reduce -> merge with the other CTAs -> write

Columns have no mask and no temperature. `columns_plan` chooses between the two. The rows of a tile, and `step_rows`,
are lines.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import blocks, tiles
from pallas_softmax._src.gpu.interpreter import laid_out
from pallas_softmax._src.gpu.kernel import cta_number, gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax import tile_kernel
from pallas_softmax._src.softmax.columns_plan import Strips
from pallas_softmax._src.softmax.formulas import Job
from pallas_softmax._src.softmax.plan import approximate
from pallas_softmax._src.softmax.segment import Refs


def compute_strips(job: Job, x_gmem, *out_gmem, **scratch) -> None:
    """The kernel for long columns: a cluster takes one strip, or several in turns. A CTA takes its part of each.

    `columns_plan.Strips` draws strips, parts, steps and slots.
    """
    cta = _StripsOfCta(job, Refs(x_gmem, out_gmem, **scratch))
    lax.fori_loop(0, cta.plan.slots, lambda number, _: cta.load(number), None)
    if cta.plan.turns > 1:
        lax.fori_loop(0, cta.turns, lambda turn, _: _compute_strip(cta, turn), None)
    else:
        _compute_strip(cta, jnp.int32(0))


def _compute_strip(cta: "_StripsOfCta", turn) -> None:
    first = turn * cta.plan.steps
    plan, total = cta.plan, cta.reduce(first)  # step by step; waits until each has arrived
    if plan.count > 1:
        total = cta.combine_over_cluster(total)  # exchanges reductions; now the total is of whole columns
    constants = [tiles.broadcast(constant, plan.block_tile, 1) for constant in cta.formula.constants(total)]
    if cta.formula.value is None:
        cta.write_constants(first, constants)  # for example logsumexp: numbers per column
    else:
        cta.write(first, constants)  # for example softmax: the elements, from shared memory
    if plan.count > 1:  # a CTA must not exit, or change `sent_smem`, before its peers have merged
        plgpu.barrier_wait(cta.refs.cluster_barrier)


# --- Launches -----------------------------------------------------------------------------------------


def launch(job: Job) -> list[jax.Array]:
    """Computes the formula along the middle axis of the arrays (outer, vocab, inner), by a `Tile` or `Strips`.

    Returns one array of all elements, of the last array's dtype; or per-column outputs (outer, 1, inner).
    """
    formula, plan, shape = job.formula, job.plan, job.arrays[0].shape
    if isinstance(plan, Tile):
        return tile_kernel.launch(job)
    scratch: dict[str, Any] = {
        "x_smem": [plgpu.SMEM((plan.slots * plan.step_rows, plan.width), a.dtype) for a in job.arrays],
        "arrived": [plgpu.Barrier(num_barriers=plan.slots)] * len(job.arrays),
    }
    if plan.count > 1:
        per_column = plgpu.SMEM((plan.width,), jnp.float32)
        scratch["sent_smem"] = jax.tree.map(lambda _: per_column, formula.reduction.empty)
        scratch["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("part",))
    return gpu_kernel(
        functools.partial(compute_strips, job),
        grid={"team": _strips_and_teams(plan, shape)[1], "part": plan.count},
        cluster=plan.count,
        out_type=formula.out_type(shape, (shape[0], 1, shape[2]), job.dtype),
        scratch_types=scratch,
        name=job.name,
        approximate=approximate(job.dtype),
    )(job.arrays)


def _strips_and_teams(plan: Strips, shape: tuple[int, ...]) -> tuple[int, int]:
    outer, _, inner = shape
    strips = outer * -(-inner // plan.width)
    return strips, -(-strips // plan.turns)


class _StripsOfCta:
    """One CTA and its part of each strip of its cluster. Step numbers run on from one strip to the next."""

    def __init__(self, job: Job, refs: Refs):
        self.formula, self.refs = job.formula, refs
        self.plan: Strips = job.plan
        plan, shape = self.plan, refs.x_gmem[0].shape
        # The cluster takes strips team, team + teams, and so on: `turns` of them.
        strips, self.teams = _strips_and_teams(plan, shape)
        self.team = lax.axis_index("team")
        self.part = cta_number("part", plan.count)
        self.turns: Any = lax.div(strips - 1 - self.team, self.teams) + 1 if plan.turns > 1 else 1
        self.across = -(-shape[2] // plan.width)  # strips side by side

    # --- Loads

    @property
    def _refills(self) -> bool:
        """Whether there are more steps than slots."""
        return self.plan.turns > 1 or self.plan.steps > self.plan.slots

    def _place(self, number):
        """Returns where a step starts in the array."""
        turn, step = lax.div(number, self.plan.steps), lax.rem(number, self.plan.steps)
        strip = self.team + turn * self.teams
        line = (self.part * self.plan.steps + step) * self.plan.step_rows
        return lax.div(strip, self.across), line, lax.rem(strip, self.across) * self.plan.width

    def _lines(self, gmem, number):
        """Returns a step of an array in device memory. Copies read 0 out of bounds, and write nothing there."""
        outer, line, column = self._place(number)
        return gmem.at[outer, pl.ds(line, self.plan.step_rows), pl.ds(column, self.plan.width)]

    def _slot(self, number):
        return pl.ds(lax.rem(number, self.plan.slots) * self.plan.step_rows, self.plan.step_rows)

    def load(self, number) -> None:
        """Starts the copies of a step, one from each array, if there is such a step."""

        def fetch():
            refs, slot = self.refs, lax.rem(number, self.plan.slots)
            for gmem, smem, arrived in zip(refs.x_gmem, refs.x_smem, refs.arrived, strict=True):
                plgpu.copy_gmem_to_smem(self._lines(gmem, number), smem.at[self._slot(number)], arrived.at[slot])

        if self._refills:
            pl.when(number < self.turns * self.plan.steps)(fetch)
        else:
            fetch()

    def _blocks(self, number):
        """Yields the blocks of a step: lines of shared memory, and a float32 block from each array."""
        block = self.plan.block_tile
        for start in range(0, self.plan.step_rows, block.rows):
            at = pl.ds(self._slot(number).start + start, block.rows)
            x = [tiles.load_smem(smem.at[at], block) for smem in self.refs.x_smem]
            yield at, [a.astype(jnp.float32) for a in x]

    # --- Reduction

    def reduce(self, first):
        """Returns the reduction of each column of the part, from step number `first` on."""
        tile, reduction = self.plan.block_tile, self.formula.reduction
        lanes = jax.tree.map(
            lambda number: laid_out(jnp.full(tile.shape, number, jnp.float32), tiles.layout(tile)), reduction.empty
        )
        lanes = lax.fori_loop(0, self.plan.steps, lambda i, lanes: self._absorb(first + i, lanes), lanes)
        return reduction.combine_lanes(lanes, 0, functools.partial(tiles.broadcast, tile=tile, axis=1))

    def _absorb(self, number, lanes):
        """Adds a step to the reduction of each lane. If columns are only read, refills its slot at once."""
        plan, formula = self.plan, self.formula
        for arrived in self.refs.arrived:
            plgpu.barrier_wait(arrived.at[lax.rem(number, plan.slots)])
        terms = [formula.term(*x) for _, x in self._blocks(number)]
        if plan.lines_beyond:
            tile, neutral = plan.block_tile, formula.reduction.neutral
            line = laid_out(lax.broadcasted_iota(jnp.int32, tile.shape, 0), tiles.layout(tile))
            held = plan.vocab - self._place(number)[1]  # lines of the array from this step on
            terms = [jnp.where(line < held - i * tile.rows, term, neutral) for i, term in enumerate(terms)]
        lanes = formula.reduction.add(lanes, terms, number)  # columns have no reduction that uses the number
        if formula.value is None and self._refills:
            plgpu.commit_smem()  # all threads have read the slot
            self.load(number + plan.slots)
        return lanes

    def combine_over_cluster(self, total):
        """Merges the reductions of the cluster's CTAs, all in the same order. Threads read them as lines of a tile."""
        refs, plan = self.refs, self.plan
        for smem, leaf in zip(jax.tree.leaves(refs.sent_smem), jax.tree.leaves(total), strict=True):
            smem[...] = leaf
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.cluster_barrier)
        plgpu.barrier_wait(refs.cluster_barrier)
        tile = dataclasses.replace(plan.block_tile, rows=max(plan.block_tile.rows, plan.count))
        reduction = self.formula.reduction
        peers = jax.tree.map(
            lambda smem, empty: tiles.load_from_ctas(smem, tile, plan.count, empty), refs.sent_smem, reduction.empty
        )
        total = reduction.combine_lanes(peers, 0, functools.partial(tiles.broadcast, tile=tile, axis=1))
        # All reads from peers are complete here, since their values are merged. Peers may exit once this CTA arrives.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.cluster_barrier)
        return total

    # --- Results

    def write_constants(self, first, constants) -> None:
        # The result has one line, so only part 0 writes. The other parts are out of bounds.
        outer, _, column = self._place(first)
        for gmem, y in zip(self.refs.out_gmem, constants, strict=True):
            tiles.store(gmem.at[outer], self.plan.block_tile, self.part, y, column=column)

    def write(self, first, constants) -> None:
        plan = self.plan
        lax.fori_loop(0, plan.steps, lambda i, _: self._write_step(first, i, constants), None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self._refills:
            self.load(first + plan.steps - 1 + plan.slots)

    def _write_step(self, first, i, constants) -> None:
        """Writes step number first + i through its slot, and refills the slot of the step before it."""
        plan, number = self.plan, first + i
        value: Any = self.formula.value
        (out_gmem,), out_smem = self.refs.out_gmem, self.refs.x_smem[-1]
        for at, x in self._blocks(number):
            y = value(*x, *constants).astype(out_smem.dtype)
            blocks.store_in_place(out_smem.at[at], y, tiles.layout(plan.block_tile))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[self._slot(number)], self._lines(out_gmem, number))
        if self._refills:

            @pl.when(i > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self.load(number - 1 + plan.slots)
