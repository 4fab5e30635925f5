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

from pallas_softmax import online
from pallas_softmax.implementations.mosaic_gpu.device import column_tiles
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.softmax.columns_plan import Strips
from pallas_softmax.implementations.mosaic_gpu.softmax.formulas import Formula


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
      float32 arrays (outer, 1, inner).
    """
    outer, _, inner = arrays[0].shape
    if formula.value is None:
        out_type = [jax.ShapeDtypeStruct((outer, 1, inner), jnp.float32)] * formula.results_per_row
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
    """Has each cluster take one strip after the other, through the slots of its shared memory."""
    outer, vocab, inner = arrays[0].shape
    across = -(-inner // plan.width)  # strips side by side
    scratch: dict[str, Any] = {
        "x_smem": [plgpu.SMEM((plan.slots * plan.step_rows, plan.width), a.dtype) for a in arrays],
        "landed": [plgpu.Barrier(num_barriers=plan.slots)] * len(arrays),
    }
    if plan.count > 1:
        per_column = plgpu.SMEM((plan.width,), jnp.float32)
        scratch["sent_smem"] = jax.tree.map(lambda _: per_column, formula.reduction.empty)
        scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",))

    def body(x_gmem, *out_gmem, **scratch):
        part = lax.axis_index("part") if plan.count > 1 else jnp.int32(0)
        first = lax.axis_index("cluster")
        turns = lax.div(outer * across - 1 - first, plan.clusters) + 1
        refs = _Refs(x_gmem, out_gmem, **scratch)
        _Cluster(formula, plan, refs, part, first, turns, across, settings["interpret"]).run()

    grid = {"cluster": plan.clusters, "part": plan.count} if plan.count > 1 else {"cluster": plan.clusters}
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
class _Cluster:
    """What a CTA of a cluster does: its part of one strip after the other.

    The loads of a strip are numbered: first come all its steps, then those that have left the slots before they were
    written, from the last one back. A load takes the slot that has been free for the longest, so that slots are taken
    in turn, and it starts when the load that had the slot before is needed no more; see the drawing in `Strips`.

    Attributes:
      formula, plan: as for `launch`.
      refs: what it reads and writes.
      part: number of this CTA in the cluster.
      first: number of the first strip of the cluster, the others of which are `plan.clusters` apart.
      turns: number of strips that the cluster takes.
      across: number of strips side by side.
      interpret: as for `pallas_call`.
    """

    formula: Formula
    plan: Strips
    refs: _Refs
    part: Any
    first: Any
    turns: Any
    across: int
    interpret: Any

    @property
    def writes(self) -> bool:
        """Whether the result has elements, not one number for each row."""
        return self.formula.value is not None

    @property
    def loads(self) -> int:
        """Number of loads of a strip."""
        return self.plan.steps + (self.plan.steps - self.plan.slots if self.writes else 0)

    def run(self) -> None:
        """Takes all strips of the cluster."""
        _repeat(self.plan.slots, lambda slot: self._fetch(0, slot, slot))
        _repeat(self.turns, self._take)

    def _take(self, turn) -> None:
        """Computes a strip, while loads of the next one start."""
        plan, refs, reduction = self.plan, self.refs, self.formula.reduction
        lanes = jax.tree.map(self._filled, reduction.empty)
        lanes = lax.fori_loop(0, plan.steps, lambda step, lanes: self._absorb(turn, step, lanes), lanes)
        total = reduction.across(lanes, 0, self._broadcast)
        if plan.count > 1:
            total = self._merge(total)
        constants = [self._broadcast(constant) for constant in self.formula.constants(total)]
        if self.writes:
            _repeat(plan.steps, lambda i: self._write(turn, i, constants))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._refill(turn, self.loads - 1)
        else:
            outer, _, column = self._place(turn, 0)
            for gmem, y in zip(refs.out_gmem, constants, strict=True):
                # part 0 writes: a line of the other parts is beyond the one of the result
                column_tiles.store(gmem, plan.block, (outer, self.part, column), y, interpret=self.interpret)
        if plan.count > 1:
            plgpu.barrier_wait(refs.met)  # all have read what this CTA sent: it may send again, or leave

    # --- Loads

    def _place(self, turn, step):
        """Index along the outer axis, first line and first column of a step."""
        plan = self.plan
        strip = self.first + turn * plan.clusters
        line = (self.part * plan.steps + step) * plan.step_rows
        return lax.div(strip, self.across), line, lax.rem(strip, self.across) * plan.width

    def _lines(self, gmem, turn, step):
        """A step of an array in device memory. What is beyond the array reads as 0, and is not written."""
        outer, line, column = self._place(turn, step)
        return gmem.at[outer, pl.ds(line, self.plan.step_rows), pl.ds(column, self.plan.width)]

    def _step(self, load):
        """The step that a load brings."""
        return jnp.where(load < self.plan.steps, load, self.loads - 1 - load)

    def _slot(self, turn, load):
        """The slot that a load takes."""
        return lax.rem(turn * self.loads + load, self.plan.slots)

    def _slot_lines(self, slot):
        """The lines of shared memory that a slot has."""
        return pl.ds(slot * self.plan.step_rows, self.plan.step_rows)

    def _fetch(self, turn, load, slot) -> None:
        """Starts a load, one copy for each array."""
        refs, lines = self.refs, self._slot_lines(slot)
        for gmem, smem, landed in zip(refs.x_gmem, refs.x_smem, refs.landed, strict=True):
            plgpu.copy_gmem_to_smem(
                self._lines(gmem, turn, self._step(load)), smem.at[lines], landed.at[slot]
            )

    def _refill(self, turn, load) -> None:
        """Starts the load that takes the slot of this one, which is needed no more: of this strip or the next."""
        following = load + self.plan.slots
        next_strip = jnp.int32(following >= self.loads)

        @pl.when(turn + next_strip < self.turns)
        def _():
            self._fetch(turn + next_strip, following - next_strip * self.loads, self._slot(turn, load))

    def _wait(self, slot) -> None:
        """Waits until a load has arrived."""
        for landed in self.refs.landed:
            plgpu.barrier_wait(landed.at[slot])

    def _blocks(self, slot):
        """For each block of a slot: its lines of shared memory, and the block of each array, in float32."""
        block = self.plan.block
        for start in range(0, self.plan.step_rows, block.rows):
            at = pl.ds(slot * self.plan.step_rows + start, block.rows)
            x = [
                column_tiles.load_smem(smem.at[at], block, interpret=self.interpret)
                for smem in self.refs.x_smem
            ]
            yield at, [a.astype(jnp.float32) for a in x]

    # --- Reduction

    def _broadcast(self, per_column):
        return lax.broadcast_in_dim(per_column, self.plan.block.shape, (1,))

    def _filled(self, value):
        """A float32 block whose elements are all `value`."""
        full = jnp.full(self.plan.block.shape, value, jnp.float32)
        return column_tiles.laid_out(full, self.plan.block, interpret=self.interpret)

    def _absorb(self, turn, step, lanes):
        """Adds a step to the reduction of each lane."""
        plan, formula = self.plan, self.formula
        slot = self._slot(turn, step)
        self._wait(slot)
        terms = [formula.term(*x) for _, x in self._blocks(slot)]
        if plan.count * plan.steps * plan.step_rows != plan.vocab:
            line = lax.broadcasted_iota(jnp.int32, plan.block.shape, 0)
            line = column_tiles.laid_out(line, plan.block, interpret=self.interpret)
            held = plan.vocab - self._place(turn, step)[1]  # lines from this step on that are in the array
            terms = [
                jnp.where(line < held - i * plan.block.rows, term, formula.reduction.neutral)
                for i, term in enumerate(terms)
            ]
        lanes = formula.reduction.absorb(lanes, terms)
        kept = plan.slots if self.writes else 0  # steps at the end that stay in their slots to be written
        if plan.steps > kept:

            @pl.when(step < plan.steps - kept)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                self._refill(turn, step)

        return lanes

    def _merge(self, total):
        """The reductions of the cluster's CTAs merged, in the same order by each of them."""
        block, met = self.plan.block, self.refs.met
        for smem, leaf in zip(jax.tree.leaves(self.refs.sent_smem), jax.tree.leaves(total), strict=True):
            smem[...] = leaf
        plgpu.commit_smem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

        def of_peer(part: int):
            peer: Any = {"part": jnp.int32(part)}
            return jax.tree.map(
                lambda smem: column_tiles.load_per_column(plgpu.cluster_ref(smem, peer), block),
                self.refs.sent_smem,
            )

        total = online.tree(self.formula.reduction.merge, [of_peer(part) for part in range(self.plan.count)])
        plgpu.commit_smem()  # all threads have read: one arrives for all, and then a peer may leave
        plgpu.barrier_arrive(met)
        return total

    # --- Results

    def _write(self, turn, i, constants) -> None:
        """Writes the i-th of the steps, in the order of the slots, and starts a load into the slot before."""
        plan, out_smem = self.plan, self.refs.x_smem[-1]
        load = plan.steps - plan.slots + i
        slot = self._slot(turn, load)
        if plan.steps > plan.slots:
            pl.when(load >= plan.steps)(lambda: self._wait(slot))
        value: Any = self.formula.value
        for at, x in self._blocks(slot):
            column_tiles.store_smem(
                out_smem.at[at], plan.block, value(*x, *constants), interpret=self.interpret
            )
        plgpu.commit_smem()
        written = self._lines(self.refs.out_gmem[0], turn, self._step(load))
        plgpu.copy_smem_to_gmem(out_smem.at[self._slot_lines(slot)], written)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the slot before has been read
        pl.when(i > 0)(lambda: self._refill(turn, load - 1))


def _repeat(count, do) -> None:
    """Calls do(i) for each i below `count`."""

    def step(i, carry):
        do(i)
        return carry

    lax.fori_loop(0, count, step, 0)
