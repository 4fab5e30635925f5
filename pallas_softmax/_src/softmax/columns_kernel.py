"""Kernels for softmax along an axis that is not the last one: columns are reduced in place, without a transpose.

An array (outer, vocab, inner) has outer * inner columns of `vocab` elements. Threads are laid out along `inner`, since
its elements are contiguous. Each CTA takes adjacent columns:

    short columns   in registers, whole columns at once
    long columns    in shared memory; the lines are divided among the CTAs of a cluster

`columns_plan` chooses between the two.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import blocks, tiles
from pallas_softmax._src.gpu.interpreter import laid_out
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.columns_plan import Strips
from pallas_softmax._src.softmax.formulas import Formula


def launch(
    formula: Formula,
    arrays: list[jax.Array],
    plan: Tile | Strips,
    *,
    name: str,
    approximate: bool,
) -> list[jax.Array]:
    """Computes a formula along the middle axis of the arrays.

    Args:
      formula: the formula to compute.
      arrays: the arrays that the formula reads, all of one shape (outer, vocab, inner).
      plan: a tile (its rows are lines of the array), or strips.
      name: the kernel's name in profiles.
      approximate: whether exp may be approximate; see `plan.approximate`.

    Returns:
      One array (outer, vocab, inner) of the last array's dtype. If the formula has per-row outputs: arrays
      (outer, 1, inner).
    """
    outer, _, inner = arrays[0].shape
    if formula.value is None:
        out_type = formula.row_results((outer, 1, inner), arrays[-1].dtype)
    else:
        out_type = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[-1].dtype)]
    settings = {"out_type": out_type, "name": name, "approximate": approximate}
    if isinstance(plan, Tile):
        return _launch_tiles(formula, arrays, plan, settings)
    return _launch_strips(formula, arrays, plan, settings)


# --- Short columns, in registers ----------------------------------------------------------------------


def _launch_tiles(formula: Formula, arrays: list[jax.Array], tile: Tile, settings: dict[str, Any]):
    """Launches a kernel where each CTA holds whole columns in registers."""
    outer, _, inner = arrays[0].shape
    lines, width = tile.shape
    across = -(-inner // width)  # tiles side by side
    fill = formula.reduction.neutral

    def broadcast(per_column):
        return lax.broadcast_in_dim(per_column, tile.shape, (1,))

    def body(x_gmem, *out_gmem, reserved=None):
        number = lax.axis_index("tile")
        outer, column = number // across, number % across * width
        x = [tiles.load(gmem.at[outer], tile, 0, fill, column=column).astype(jnp.float32) for gmem in x_gmem]
        total = formula.reduction.combine_lanes(formula.reduction.of_terms(formula.term(*x)), 0, broadcast)
        constants = [broadcast(constant) for constant in formula.constants(total)]
        results = constants if formula.value is None else [formula.value(*x, *constants)]
        for gmem, y in zip(out_gmem, results, strict=True):
            tiles.store(gmem.at[outer], tile, 0, y, column=column)

    scratch = {"reserved": plgpu.SMEM((tile.reserved_bytes,), jnp.int8)} if tile.reserved_bytes else ()
    return gpu_kernel(body, grid={"tile": outer * across}, scratch_types=scratch, **settings)(arrays)


# --- Long columns, in shared memory -------------------------------------------------------------------


def _launch_strips(formula: Formula, arrays: list[jax.Array], plan: Strips, settings: dict[str, Any]):
    """Launches a kernel where each cluster takes one strip, or several in turns, through shared memory."""
    outer, _, inner = arrays[0].shape
    across = -(-inner // plan.width)  # strips side by side
    teams = -(-outer * across // plan.turns)
    scratch: dict[str, Any] = {
        "x_smem": [plgpu.SMEM((plan.slots * plan.step_rows, plan.width), a.dtype) for a in arrays],
        "arrived": [plgpu.Barrier(num_barriers=plan.slots)] * len(arrays),
    }
    if plan.count > 1:
        per_column = plgpu.SMEM((plan.width,), jnp.float32)
        scratch["sent_smem"] = jax.tree.map(lambda _: per_column, formula.reduction.empty)
        scratch["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("part",))

    def body(x_gmem, *out_gmem, **scratch):
        team = lax.axis_index("team")
        part = lax.axis_index("part") if plan.count > 1 else jnp.int32(0)
        turns = lax.div(outer * across - 1 - team, teams) + 1 if plan.turns > 1 else 1
        refs = _Refs(x_gmem, out_gmem, **scratch)
        _Part(formula, plan, refs, team, teams, turns, part, across).compute()

    grid = {"team": teams, "part": plan.count} if plan.count > 1 else {"team": teams}
    return gpu_kernel(body, grid=grid, cluster=plan.count, scratch_types=scratch, **settings)(arrays)


class _Refs(NamedTuple):
    """The memory and barriers that a CTA uses.

    Attributes:
      x_gmem: the input arrays (outer, vocab, inner).
      out_gmem: the results.
      x_smem: for each array, all its slots in a row. The slots of the last array also stage the output.
      arrived: for each array, one barrier per slot. It completes when a step has arrived in the slot.
      sent_smem: in a cluster, this CTA's reduction of each column, which the other CTAs read.
      cluster_barrier: in a cluster, the barrier that synchronizes its CTAs.
    """

    x_gmem: list
    out_gmem: tuple
    x_smem: list
    arrived: list
    sent_smem: Any = None
    cluster_barrier: Any = None


@dataclasses.dataclass(frozen=True)
class _Part:
    """The work of one CTA: it takes its part of a strip step by step, then its part of the cluster's next strip.

    Step numbers run on from one strip to the next. Steps take the slots in a circle.

    Attributes:
      formula, plan: as for `launch`.
      refs: memory and barriers.
      team: number of this cluster. The cluster takes strips team, team + teams, and so on.
      teams: number of clusters.
      turns: number of strips that this cluster takes.
      part: number of this CTA in the cluster.
      across: number of strips side by side.
    """

    formula: Formula
    plan: Strips
    refs: _Refs
    team: Any
    teams: int
    turns: Any
    part: Any
    across: int

    def compute(self) -> None:
        """Takes all strips of the cluster."""
        lax.fori_loop(0, self.plan.slots, lambda number, _: self._fetch(number), None)
        if self.plan.turns > 1:
            lax.fori_loop(0, self.turns, lambda turn, _: self._take(turn), None)
        else:
            self._take(jnp.int32(0))

    def _take(self, turn) -> None:
        """Reduces a strip, merges it with the other CTAs, and writes it. The next strip is loaded meanwhile."""
        plan, refs, reduction = self.plan, self.refs, self.formula.reduction
        first = turn * plan.steps
        lanes = jax.tree.map(self._filled, reduction.empty)
        lanes = lax.fori_loop(0, plan.steps, lambda i, lanes: self._absorb(first + i, lanes), lanes)
        total = reduction.combine_lanes(lanes, 0, self._broadcast)
        if plan.count > 1:
            total = self._merge(total)
        constants = [self._broadcast(constant) for constant in self.formula.constants(total)]
        if self.formula.value is None:
            outer, _, column = self._place(first)
            for gmem, y in zip(refs.out_gmem, constants, strict=True):
                # The result has one line, so only part 0 writes. The other parts are out of bounds.
                tiles.store(gmem.at[outer], plan.block, self.part, y, column=column)
        else:
            lax.fori_loop(0, plan.steps, lambda i, _: self._write(first, i, constants), None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if self._refills:
                self._fetch(first + plan.steps - 1 + plan.slots)
        if plan.count > 1:
            # A CTA must not exit, or overwrite `sent_smem`, while a peer may still read it.
            plgpu.barrier_wait(refs.cluster_barrier)

    # --- Loads

    @property
    def _refills(self) -> bool:
        """Whether there are more steps than slots."""
        return self.plan.turns > 1 or self.plan.steps > self.plan.slots

    def _place(self, number):
        """Returns where a step starts in the array: (outer, line, column)."""
        turn, step = lax.div(number, self.plan.steps), lax.rem(number, self.plan.steps)
        strip = self.team + turn * self.teams
        line = (self.part * self.plan.steps + step) * self.plan.step_rows
        return lax.div(strip, self.across), line, lax.rem(strip, self.across) * self.plan.width

    def _lines(self, gmem, number):
        """Returns a step of an array in device memory. Copies read 0 out of bounds, and write nothing there."""
        outer, line, column = self._place(number)
        return gmem.at[outer, pl.ds(line, self.plan.step_rows), pl.ds(column, self.plan.width)]

    def _slot(self, number):
        """Returns the lines of shared memory that hold a step."""
        return pl.ds(lax.rem(number, self.plan.slots) * self.plan.step_rows, self.plan.step_rows)

    def _fetch(self, number) -> None:
        """Starts the copies of a step, one from each array, if there is such a step."""

        def fetch():
            refs, slot = self.refs, lax.rem(number, self.plan.slots)
            for gmem, smem, arrived in zip(refs.x_gmem, refs.x_smem, refs.arrived, strict=True):
                plgpu.copy_gmem_to_smem(
                    self._lines(gmem, number), smem.at[self._slot(number)], arrived.at[slot]
                )

        if self._refills:
            pl.when(number < self.turns * self.plan.steps)(fetch)
        else:
            fetch()

    def _blocks(self, number):
        """Yields the blocks of a step: lines of shared memory, and a float32 block from each array."""
        block = self.plan.block
        for start in range(0, self.plan.step_rows, block.rows):
            at = pl.ds(self._slot(number).start + start, block.rows)
            x = [tiles.load_smem(smem.at[at], block) for smem in self.refs.x_smem]
            yield at, [a.astype(jnp.float32) for a in x]

    # --- Reduction

    def _broadcast(self, per_column):
        return lax.broadcast_in_dim(per_column, self.plan.block.shape, (1,))

    def _filled(self, value):
        """Returns a float32 block filled with `value`."""
        full = jnp.full(self.plan.block.shape, value, jnp.float32)
        return laid_out(full, tiles.layout(self.plan.block))

    def _absorb(self, number, lanes):
        """Adds a step to the reduction of each lane. If columns are only read, refills its slot at once."""
        plan, formula = self.plan, self.formula
        for arrived in self.refs.arrived:
            plgpu.barrier_wait(arrived.at[lax.rem(number, plan.slots)])
        terms = [formula.term(*x) for _, x in self._blocks(number)]
        if plan.lines_beyond:
            line = lax.broadcasted_iota(jnp.int32, plan.block.shape, 0)
            line = laid_out(line, tiles.layout(plan.block))
            held = plan.vocab - self._place(number)[1]  # lines of the array from this step on
            terms = [
                jnp.where(line < held - i * plan.block.rows, term, formula.reduction.neutral)
                for i, term in enumerate(terms)
            ]
        lanes = formula.reduction.add(lanes, terms, number)
        if formula.value is None and self._refills:
            plgpu.commit_smem()  # all threads have read the slot
            self._fetch(number + plan.slots)
        return lanes

    def _merge(self, total):
        """Returns the merged reductions of the cluster's CTAs. All CTAs merge in the same order.

        Threads read the reductions from the CTAs as the lines of a tile.
        """
        refs, plan = self.refs, self.plan
        for smem, leaf in zip(jax.tree.leaves(refs.sent_smem), jax.tree.leaves(total), strict=True):
            smem[...] = leaf
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.cluster_barrier)
        plgpu.barrier_wait(refs.cluster_barrier)
        tile = dataclasses.replace(plan.block, rows=max(plan.block.rows, plan.count))

        def of_peers(smem, empty):
            return tiles.load_from_ctas(smem, tile, plan.count, empty)

        def broadcast(per_column):
            return lax.broadcast_in_dim(per_column, tile.shape, (1,))

        reduction = self.formula.reduction
        peers = jax.tree.map(of_peers, refs.sent_smem, reduction.empty)
        total = reduction.combine_lanes(peers, 0, broadcast)
        # All reads from peers are complete here, since their values are merged. Peers may exit once this CTA arrives.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.cluster_barrier)
        return total

    # --- Results

    def _write(self, first, i, constants) -> None:
        """Writes step number first + i through its slot, and refills the slot of the step before it."""
        plan, number = self.plan, first + i
        value: Any = self.formula.value
        (out_gmem,), out_smem = self.refs.out_gmem, self.refs.x_smem[-1]
        for at, x in self._blocks(number):
            y = value(*x, *constants).astype(out_smem.dtype)
            blocks.store_in_place(out_smem.at[at], y, tiles.layout(plan.block))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[self._slot(number)], self._lines(out_gmem, number))
        if self._refills:

            @pl.when(i > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self._fetch(number - 1 + plan.slots)
