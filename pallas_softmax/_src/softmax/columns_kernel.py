"""Columns: rows whose elements lie apart in memory, reduced where they are, with threads along contiguous elements.

An array (outer, vocab, inner) has outer * inner rows, each a column of `vocab` elements. A CTA takes neighbouring
columns: short ones in its registers, all at once; long ones in shared memory, with the other CTAs of a cluster, each
of which has some of the lines. Which, `columns_plan` says.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import column_tiles
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
    interpret=None,
) -> list[jax.Array]:
    """Computes a formula along the middle axis of the arrays.

    Args:
      formula: what is computed.
      arrays: those that the formula reads, of one shape (outer, vocab, inner).
      plan: a tile, whose rows are the lines of some columns; or strips.
      name: the kernel's name in profiles.
      approximate: whether exp may be approximate; see `plan.approximate`.
      interpret: as for `pallas_call`.

    Returns:
      One array (outer, vocab, inner) of the last array's dtype; or, of a formula that has numbers for each row,
      arrays (outer, 1, inner).
    """
    outer, _, inner = arrays[0].shape
    if formula.value is None:
        out_type = formula.row_results((outer, 1, inner), arrays[-1].dtype)
    else:
        out_type = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[-1].dtype)]
    settings = {"out_type": out_type, "name": name, "approximate": approximate, "interpret": interpret}
    if isinstance(plan, Tile):
        return _launch_tiles(formula, arrays, plan, settings)
    return _launch_strips(formula, arrays, plan, settings)


# --- Short columns, in registers ----------------------------------------------------------------------


def _launch_tiles(formula: Formula, arrays: list[jax.Array], tile: Tile, settings: dict[str, Any]):
    """Has each CTA hold whole columns in its registers."""
    outer, _, inner = arrays[0].shape
    lines, width = tile.shape
    across = -(-inner // width)  # tiles side by side
    fill, interpret = formula.reduction.neutral, settings["interpret"]

    def broadcast(per_column):
        return lax.broadcast_in_dim(per_column, tile.shape, (1,))

    def body(x_gmem, *out_gmem):
        number = lax.axis_index("tile")
        at = number // across, jnp.int32(0), number % across * width
        x = [
            column_tiles.load(gmem, tile, at, fill, interpret=interpret).astype(jnp.float32)
            for gmem in x_gmem
        ]
        total = formula.reduction.across(formula.reduction.lift(formula.term(*x)), 0, broadcast)
        constants = [broadcast(constant) for constant in formula.constants(total)]
        results = constants if formula.value is None else [formula.value(*x, *constants)]
        for gmem, y in zip(out_gmem, results, strict=True):
            column_tiles.store(gmem, tile, at, y, interpret=interpret)

    return gpu_kernel(body, grid={"tile": outer * across}, **settings)(arrays)


# --- Long columns, in shared memory -------------------------------------------------------------------


def _launch_strips(formula: Formula, arrays: list[jax.Array], plan: Strips, settings: dict[str, Any]):
    """Has each cluster take a strip, or several in turns, through its shared memory."""
    outer, _, inner = arrays[0].shape
    across = -(-inner // plan.width)  # strips side by side
    teams = -(-outer * across // plan.turns)
    scratch: dict[str, Any] = {
        "x_smem": [plgpu.SMEM((plan.slots * plan.step_rows, plan.width), a.dtype) for a in arrays],
        "landed": [plgpu.Barrier(num_barriers=plan.slots)] * len(arrays),
    }
    if plan.count > 1:
        per_column = plgpu.SMEM((plan.width,), jnp.float32)
        scratch["sent_smem"] = jax.tree.map(lambda _: per_column, formula.reduction.empty)
        scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",))

    def body(x_gmem, *out_gmem, **scratch):
        team = lax.axis_index("team")
        part = lax.axis_index("part") if plan.count > 1 else jnp.int32(0)
        turns = lax.div(outer * across - 1 - team, teams) + 1 if plan.turns > 1 else 1
        refs = _Refs(x_gmem, out_gmem, **scratch)
        _Part(formula, plan, refs, team, teams, turns, part, across, settings["interpret"]).compute()

    grid = {"team": teams, "part": plan.count} if plan.count > 1 else {"team": teams}
    return gpu_kernel(body, grid=grid, cluster=plan.count, scratch_types=scratch, **settings)(arrays)


class _Refs(NamedTuple):
    """What a CTA reads and writes.

    Attributes:
      x_gmem: the arrays (outer, vocab, inner).
      out_gmem: the results.
      x_smem: for each array, the slots, one after the other; those of the last one also hold what is to be written.
      landed: for each array, a barrier for each slot, which completes when a step has arrived there.
      sent_smem: in a cluster, the reduction of the CTA's part of each column, for the others to read.
      met: in a cluster, the barrier at which its CTAs meet.
    """

    x_gmem: list
    out_gmem: tuple
    x_smem: list
    landed: list
    sent_smem: Any = None
    met: Any = None


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a CTA does: some lines of a strip, step by step, and then those of the next one that its cluster takes.

    Steps are numbered over all strips that the cluster takes; a step takes the slot that has been free for the longest.

    Attributes:
      formula, plan: as for `launch`.
      refs: what it reads and writes.
      team: number of the cluster, whose first strip has the same number.
      teams: number of clusters, and how far the strips of a cluster are apart.
      turns: number of strips that the cluster takes.
      part: number of this CTA in the cluster.
      across: number of strips side by side.
      interpret: as for `pallas_call`.
    """

    formula: Formula
    plan: Strips
    refs: _Refs
    team: Any
    teams: int
    turns: Any
    part: Any
    across: int
    interpret: Any

    def compute(self) -> None:
        """Takes all strips of the cluster."""
        lax.fori_loop(0, self.plan.slots, lambda number, _: self._fetch(number), None)
        if self.plan.turns > 1:
            lax.fori_loop(0, self.turns, lambda turn, _: self._take(turn), None)
        else:
            self._take(jnp.int32(0))

    def _take(self, turn) -> None:
        """Reduces a strip, merges it with the other CTAs, and writes it, while the next strip is loaded."""
        plan, refs, reduction = self.plan, self.refs, self.formula.reduction
        first = turn * plan.steps
        lanes = jax.tree.map(self._filled, reduction.empty)
        lanes = lax.fori_loop(0, plan.steps, lambda i, lanes: self._absorb(first + i, lanes), lanes)
        total = reduction.across(lanes, 0, self._broadcast)
        if plan.count > 1:
            total = self._merge(total)
        constants = [self._broadcast(constant) for constant in self.formula.constants(total)]
        if self.formula.value is None:
            outer, _, column = self._place(first)
            for gmem, y in zip(refs.out_gmem, constants, strict=True):
                # the result has one line, which part 0 writes: what the others have lies beyond it
                column_tiles.store(gmem, plan.block, (outer, self.part, column), y, interpret=self.interpret)
        else:
            lax.fori_loop(0, plan.steps, lambda i, _: self._write(first, i, constants), None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if self._refills:
                self._fetch(first + plan.steps - 1 + plan.slots)
        if plan.count > 1:
            # no CTA leaves, or sends again, while another one may read what it sent
            plgpu.barrier_wait(refs.met)

    # --- Loads

    @property
    def _refills(self) -> bool:
        """Whether there are more steps than slots."""
        return self.plan.turns > 1 or self.plan.steps > self.plan.slots

    def _place(self, number):
        """Returns the index along the outer axis, the first line and the first column of a step."""
        turn, step = lax.div(number, self.plan.steps), lax.rem(number, self.plan.steps)
        strip = self.team + turn * self.teams
        line = (self.part * self.plan.steps + step) * self.plan.step_rows
        return lax.div(strip, self.across), line, lax.rem(strip, self.across) * self.plan.width

    def _lines(self, gmem, number):
        """Returns a step of an array in device memory. What is beyond the array reads as 0, and is not written."""
        outer, line, column = self._place(number)
        return gmem.at[outer, pl.ds(line, self.plan.step_rows), pl.ds(column, self.plan.width)]

    def _slot(self, number):
        """Returns the lines of shared memory that a step has: the slots are taken in turn."""
        return pl.ds(lax.rem(number, self.plan.slots) * self.plan.step_rows, self.plan.step_rows)

    def _fetch(self, number) -> None:
        """Starts the copies of a step, one of each array, if there is such a step."""

        def fetch():
            refs, slot = self.refs, lax.rem(number, self.plan.slots)
            for gmem, smem, landed in zip(refs.x_gmem, refs.x_smem, refs.landed, strict=True):
                plgpu.copy_gmem_to_smem(
                    self._lines(gmem, number), smem.at[self._slot(number)], landed.at[slot]
                )

        if self._refills:
            pl.when(number < self.turns * self.plan.steps)(fetch)
        else:
            fetch()

    def _blocks(self, number):
        """Yields, for each block of a step, its lines of shared memory, and the block of each array, in float32."""
        block = self.plan.block
        for start in range(0, self.plan.step_rows, block.rows):
            at = pl.ds(self._slot(number).start + start, block.rows)
            x = [
                column_tiles.load_smem(smem.at[at], block, interpret=self.interpret)
                for smem in self.refs.x_smem
            ]
            yield at, [a.astype(jnp.float32) for a in x]

    # --- Reduction

    def _broadcast(self, per_column):
        return lax.broadcast_in_dim(per_column, self.plan.block.shape, (1,))

    def _filled(self, value):
        """Returns a float32 block whose elements are all `value`."""
        full = jnp.full(self.plan.block.shape, value, jnp.float32)
        return column_tiles.laid_out(full, self.plan.block, interpret=self.interpret)

    def _absorb(self, number, lanes):
        """Adds a step to the reduction of each lane, and starts the one that takes its slot, if it is read only."""
        plan, formula = self.plan, self.formula
        for landed in self.refs.landed:
            plgpu.barrier_wait(landed.at[lax.rem(number, plan.slots)])
        terms = [formula.term(*x) for _, x in self._blocks(number)]
        if plan.lines_beyond:
            line = lax.broadcasted_iota(jnp.int32, plan.block.shape, 0)
            line = column_tiles.laid_out(line, plan.block, interpret=self.interpret)
            held = plan.vocab - self._place(number)[1]  # lines from this step on that are in the array
            terms = [
                jnp.where(line < held - i * plan.block.rows, term, formula.reduction.neutral)
                for i, term in enumerate(terms)
            ]
        lanes = formula.reduction.absorb(lanes, terms)
        if formula.value is None and self._refills:
            plgpu.commit_smem()  # all threads have read the slot
            self._fetch(number + plan.slots)
        return lanes

    def _merge(self, total):
        """Returns the reductions of the cluster's CTAs merged, in the same order by each of them.

        They are the lines of a tile, whose threads read them from the CTAs.
        """
        refs, plan = self.refs, self.plan
        for smem, leaf in zip(jax.tree.leaves(refs.sent_smem), jax.tree.leaves(total), strict=True):
            smem[...] = leaf
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.met)
        plgpu.barrier_wait(refs.met)
        tile = dataclasses.replace(plan.block, rows=max(plan.block.rows, plan.count))

        def of_peers(smem, empty):
            return column_tiles.load_from_ctas(smem, tile, plan.count, empty)

        def broadcast(per_column):
            return lax.broadcast_in_dim(per_column, tile.shape, (1,))

        reduction = self.formula.reduction
        peers = jax.tree.map(of_peers, refs.sent_smem, reduction.empty)
        total = reduction.across(peers, 0, broadcast)
        # What its threads read has come, since they have merged it: a peer may leave when this CTA arrives.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.met)
        return total

    # --- Results

    def _write(self, first, i, constants) -> None:
        """Writes the step of number first + i, through its slot, and starts the one that takes the slot before."""
        plan, number = self.plan, first + i
        value: Any = self.formula.value
        (out_gmem,), out_smem = self.refs.out_gmem, self.refs.x_smem[-1]
        for at, x in self._blocks(number):
            y = value(*x, *constants)
            column_tiles.store_smem(out_smem.at[at], plan.block, y, interpret=self.interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[self._slot(number)], self._lines(out_gmem, number))
        if self._refills:

            @pl.when(i > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self._fetch(number - 1 + plan.slots)
