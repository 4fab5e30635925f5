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
    """Has each cluster take a strip, through its shared memory."""
    outer, _, inner = arrays[0].shape
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
        strip = lax.axis_index("strip")
        part = lax.axis_index("part") if plan.count > 1 else jnp.int32(0)
        place = lax.div(strip, across), part, lax.rem(strip, across) * plan.width
        _Part(formula, plan, _Refs(x_gmem, out_gmem, **scratch), *place, settings["interpret"]).compute()

    grid = {"strip": outer * across, "part": plan.count} if plan.count > 1 else {"strip": outer * across}
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
    """What a CTA does: some lines of a strip, step by step.

    Attributes:
      formula, plan: as for `launch`.
      refs: what it reads and writes.
      outer: index of the strip along the outer axis.
      part: number of this CTA in the cluster.
      column: first column of the strip.
      interpret: as for `pallas_call`.
    """

    formula: Formula
    plan: Strips
    refs: _Refs
    outer: Any
    part: Any
    column: Any
    interpret: Any

    def compute(self) -> None:
        """Load, reduce, merge with the other CTAs, write."""
        plan, refs, reduction = self.plan, self.refs, self.formula.reduction
        _repeat(plan.slots, self._fetch)
        lanes = jax.tree.map(self._filled, reduction.empty)
        lanes = lax.fori_loop(0, plan.steps, self._absorb, lanes)
        total = reduction.across(lanes, 0, self._broadcast)
        if plan.count > 1:
            total = self._merge(total)
        constants = [self._broadcast(constant) for constant in self.formula.constants(total)]
        if self.formula.value is None:
            for gmem, y in zip(refs.out_gmem, constants, strict=True):
                # the result has one line, which part 0 writes: what the others have lies beyond it
                at = self.outer, self.part, self.column
                column_tiles.store(gmem, plan.block, at, y, interpret=self.interpret)
        else:
            _repeat(plan.steps, lambda step: self._write(step, constants))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if plan.count > 1:
            plgpu.barrier_wait(refs.met)  # no CTA leaves while another one may read its shared memory

    # --- Loads

    def _first_line(self, step):
        """The line of the array at which a step starts."""
        return (self.part * self.plan.steps + step) * self.plan.step_rows

    def _lines(self, gmem, step):
        """A step of an array in device memory. What is beyond the array reads as 0, and is not written."""
        lines = pl.ds(self._first_line(step), self.plan.step_rows)
        return gmem.at[self.outer, lines, pl.ds(self.column, self.plan.width)]

    def _slot(self, step):
        """The lines of shared memory that a step has: the slots are taken in turn."""
        return pl.ds(lax.rem(step, self.plan.slots) * self.plan.step_rows, self.plan.step_rows)

    def _fetch(self, step) -> None:
        """Starts the copies of a step, one of each array."""
        refs, slot = self.refs, lax.rem(step, self.plan.slots)
        for gmem, smem, landed in zip(refs.x_gmem, refs.x_smem, refs.landed, strict=True):
            plgpu.copy_gmem_to_smem(self._lines(gmem, step), smem.at[self._slot(step)], landed.at[slot])

    def _blocks(self, step):
        """For each block of a step: its lines of shared memory, and the block of each array, in float32."""
        block = self.plan.block
        for start in range(0, self.plan.step_rows, block.rows):
            at = pl.ds(self._slot(step).start + start, block.rows)
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

    def _absorb(self, step, lanes):
        """Adds a step to the reduction of each lane, and starts the one that takes its slot, if any."""
        plan, formula = self.plan, self.formula
        for landed in self.refs.landed:
            plgpu.barrier_wait(landed.at[lax.rem(step, plan.slots)])
        terms = [formula.term(*x) for _, x in self._blocks(step)]
        if plan.lines_beyond:
            line = lax.broadcasted_iota(jnp.int32, plan.block.shape, 0)
            line = column_tiles.laid_out(line, plan.block, interpret=self.interpret)
            held = plan.vocab - self._first_line(step)  # lines from this step on that are in the array
            terms = [
                jnp.where(line < held - i * plan.block.rows, term, formula.reduction.neutral)
                for i, term in enumerate(terms)
            ]
        lanes = formula.reduction.absorb(lanes, terms)
        if plan.steps > plan.slots:

            @pl.when(step + plan.slots < plan.steps)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                self._fetch(step + plan.slots)

        return lanes

    def _merge(self, total):
        """The reductions of the cluster's CTAs merged, in the same order by each of them.

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

    def _write(self, step, constants) -> None:
        """Writes a step, through its slot."""
        value: Any = self.formula.value
        (out_gmem,), out_smem = self.refs.out_gmem, self.refs.x_smem[-1]
        for at, x in self._blocks(step):
            y = value(*x, *constants)
            column_tiles.store_smem(out_smem.at[at], self.plan.block, y, interpret=self.interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[self._slot(step)], self._lines(out_gmem, step))


def _repeat(count: int, do) -> None:
    """Calls do(i) for each i below `count`."""

    def step(i, carry):
        do(i)
        return carry

    lax.fori_loop(0, count, step, 0)
