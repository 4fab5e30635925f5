"""Columns: rows of elements that lie apart, reduced where they are, with threads along the contiguous dimension.

An array (outer, vocab, inner) has outer * inner rows, and the elements of each are `inner` apart in memory: the rows
are its columns. A CTA, or a cluster of CTAs, takes a strip of neighbouring columns; see `columns_plan`.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations.mosaic_gpu.device import column_tiles, tiles
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
      plan: a tile that holds a strip of columns in registers, or strips in shared memory.
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
    return (_launch_tile if isinstance(plan, Tile) else _launch_strips)(
        formula, arrays, plan, out_type, name=name, approximate=approximate, interpret=interpret
    )


def _launch_tile(formula, arrays, tile: Tile, out_type, *, name, approximate, interpret) -> list[jax.Array]:
    """A strip of whole columns in the registers of a CTA: the rows of the tile are those of the strip."""
    outer, _, inner = arrays[0].shape
    strips = -(-inner // tile.shape[1])

    def broadcast(per_column):
        return lax.broadcast_in_dim(per_column, tile.shape, (1,))

    def body(x_gmem, *out_gmem):
        strip = lax.axis_index("strip")
        at = strip // strips, jnp.int32(0), strip % strips * tile.shape[1]
        fill = formula.reduction.neutral
        x = [column_tiles.load(gmem, tile, at, fill, interpret=interpret).astype(jnp.float32) for gmem in x_gmem]
        total = formula.reduction.across(formula.reduction.lift(formula.term(*x)), 0, broadcast)
        results = constants = [broadcast(constant) for constant in formula.constants(total)]
        if formula.value is not None:
            results = [formula.value(*x, *constants)]
        for gmem, y in zip(out_gmem, results, strict=True):
            column_tiles.store(gmem, tile, at, y, interpret=interpret)

    return gpu_kernel(
        body,
        grid={"strip": outer * strips},
        out_type=out_type,
        name=name,
        approximate=approximate,
        interpret=interpret,
    )(arrays)


def _launch_strips(formula, arrays, plan: Strips, out_type, *, name, approximate, interpret) -> list[jax.Array]:
    """Strips of columns in the shared memory of clusters, of whose CTAs each has some of the rows."""
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
    strips = outer * across
    clusters = min(plan.clusters or strips, strips)

    def body(x_gmem, *out_gmem, **refs):
        ring = _Ring(formula, plan, across, vocab, x_gmem, out_gmem, interpret, **refs)
        first = lax.axis_index("cluster")
        turns = lax.div(strips - 1 - first, clusters) + 1
        ring.run(lambda turn: first + turn * clusters, turns)

    return gpu_kernel(
        body,
        grid={"cluster": clusters, "part": plan.count} if plan.count > 1 else {"cluster": clusters},
        cluster=plan.count,
        out_type=out_type,
        scratch_types=scratch,
        name=name,
        approximate=approximate,
        interpret=interpret,
    )(arrays)


class _Ring:
    """What a CTA does: its part of one strip after the other, in steps, through the slots of shared memory."""

    def __init__(
        self, formula, plan, across, vocab, x_gmem, out_gmem, interpret, *, x_smem, landed, sent_smem=None, met=None
    ):
        self.formula: Formula = formula
        self.plan: Strips = plan
        self.across, self.vocab = across, vocab
        self.x_gmem, self.out_gmem = x_gmem, out_gmem
        self.interpret = interpret
        self.x_smem, self.landed, self.sent_smem, self.met = x_smem, landed, sent_smem, met
        self.part = lax.axis_index("part") if plan.count > 1 else jnp.int32(0)
        self.writes = formula.value is not None
        # Of each strip, all steps are loaded, and, if they are needed again, those that have left the slots.
        self.loads = plan.steps + (plan.steps - plan.slots if self.writes else 0)

    def run(self, strip_of, turns) -> None:
        """Takes the strips strip_of(0) to strip_of(turns - 1)."""
        self.strip_of, self.turns = strip_of, turns

        def start(load, carry):
            self._fetch(0, load, load)
            return carry

        lax.fori_loop(0, self.plan.slots, start, 0)

        def take(turn, carry):
            self._take(turn)
            return carry

        lax.fori_loop(0, turns, take, 0)

    def _take(self, turn) -> None:
        """Computes the strip of a turn, while the loads of the next one start."""
        plan, reduction = self.plan, self.formula.reduction
        lanes = jax.tree.map(self._filled, reduction.empty)
        lanes = lax.fori_loop(0, plan.steps, lambda step, lanes: self._absorb(turn, step, lanes), lanes)
        total = reduction.across(lanes, 0, self._broadcast)
        if plan.count > 1:
            total = self._merge(total)
        constants = [self._broadcast(constant) for constant in self.formula.constants(total)]
        if plan.count > 1:
            plgpu.commit_smem()  # for all threads: one of them arrives, and then others may leave or send anew
            plgpu.barrier_arrive(self.met)
        if self.writes:
            lax.fori_loop(0, plan.steps, lambda i, carry: self._write(turn, i, constants, carry), 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._refill(turn, self.loads - 1)
        else:
            outer, _, column = self._at(turn, 0)
            for gmem, y in zip(self.out_gmem, constants, strict=True):
                at = outer, self.part, column  # there is one row, that of part 0
                column_tiles.store(gmem, plan.block, at, y, interpret=self.interpret)
        if plan.count > 1:
            plgpu.barrier_wait(self.met)  # what this CTA sent has been read: it may send again, or leave

    # --- Loads

    def _at(self, turn, step):
        """Index along the outer axis, first row and first column of a step of the strip of a turn."""
        plan, strip = self.plan, self.strip_of(turn)
        row = (self.part * plan.steps + step) * plan.step_rows
        return lax.div(strip, self.across), row, lax.rem(strip, self.across) * plan.width

    def _piece(self, gmem, turn, step):
        """The rows and columns of a step."""
        outer, row, column = self._at(turn, step)
        return gmem.at[outer, pl.ds(row, self.plan.step_rows), pl.ds(column, self.plan.width)]

    def _step(self, load):
        """The step that a load of a strip has: all of them in their order, then those needed again, backwards."""
        return jnp.where(load < self.plan.steps, load, self.loads - 1 - load)

    def _slot(self, turn, load):
        """The slot of a load: they are taken in turn."""
        return lax.rem(turn * self.loads + load, self.plan.slots)

    def _fetch(self, turn, load, slot) -> None:
        rows = pl.ds(slot * self.plan.step_rows, self.plan.step_rows)
        for gmem, smem, landed in zip(self.x_gmem, self.x_smem, self.landed, strict=True):
            plgpu.copy_gmem_to_smem(self._piece(gmem, turn, self._step(load)), smem.at[rows], landed.at[slot])

    def _refill(self, turn, load) -> None:
        """Starts the next load into the slot of a load that is needed no more."""
        later = load + self.plan.slots
        next_strip = (later >= self.loads).astype(jnp.int32) if not isinstance(later, int) else int(later >= self.loads)

        @pl.when(turn + next_strip < self.turns)
        def _():
            self._fetch(turn + next_strip, later - next_strip * self.loads, self._slot(turn, load))

    def _wait(self, slot) -> None:
        for landed in self.landed:
            plgpu.barrier_wait(landed.at[slot])

    def _blocks(self, slot):
        """For each block of a slot: where its rows are in shared memory, and the block of each array."""
        block = self.plan.block
        for start in range(0, self.plan.step_rows, block.rows):
            at = pl.ds(slot * self.plan.step_rows + start, block.rows)
            x = [column_tiles.load_smem(smem.at[at], block, interpret=self.interpret) for smem in self.x_smem]
            yield at, [a.astype(jnp.float32) for a in x]

    # --- Reduction

    def _broadcast(self, per_column):
        return lax.broadcast_in_dim(per_column, self.plan.block.shape, (1,))

    def _laid_out(self, tile):
        return tile if self.interpret else plgpu.layout_cast(tile, tiles.layout(self.plan.block))

    def _filled(self, value):
        return self._laid_out(jnp.full(self.plan.block.shape, value, jnp.float32))

    def _absorb(self, turn, step, lanes):
        """Adds a step to the reduction of each lane."""
        plan, formula = self.plan, self.formula
        slot = self._slot(turn, step)
        self._wait(slot)
        terms = [formula.term(*x) for _, x in self._blocks(slot)]
        if plan.count * plan.steps * plan.step_rows != self.vocab:
            row = self._laid_out(lax.broadcasted_iota(jnp.int32, plan.block.shape, 0))
            held = self.vocab - self._at(turn, step)[1]
            terms = [
                jnp.where(row < held - i * plan.block.rows, term, formula.reduction.neutral)
                for i, term in enumerate(terms)
            ]
        lanes = formula.reduction.absorb(lanes, terms)
        if not self.writes or plan.steps > plan.slots:
            kept = plan.slots if self.writes else 0

            @pl.when(step < plan.steps - kept)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                self._refill(turn, step)

        return lanes

    def _merge(self, total):
        """The reductions of the cluster's CTAs merged, in the same order by each of them."""
        for smem, leaf in zip(jax.tree.leaves(self.sent_smem), jax.tree.leaves(total), strict=True):
            smem[...] = leaf
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

        def of_peer(part: int):
            peer = {"part": jnp.int32(part)}
            return jax.tree.map(
                lambda smem: column_tiles.load_per_column(plgpu.cluster_ref(smem, peer), self.plan.block),
                self.sent_smem,
            )

        return online.tree(self.formula.reduction.merge, [of_peer(part) for part in range(self.plan.count)])

    # --- Results

    def _write(self, turn, i, constants, carry):
        """Writes a step, through its slot, and starts a load into the slot that was written before it."""
        plan, out_smem = self.plan, self.x_smem[-1]
        load = plan.steps - plan.slots + i
        slot = self._slot(turn, load)
        if plan.steps > plan.slots:
            pl.when(load >= plan.steps)(lambda: self._wait(slot))
        for at, x in self._blocks(slot):
            y = self.formula.value(*x, *constants)
            column_tiles.store_smem(out_smem.at[at], plan.block, y, interpret=self.interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            out_smem.at[pl.ds(slot * plan.step_rows, plan.step_rows)],
            self._piece(self.out_gmem[0], turn, self._step(load)),
        )
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(i > 0)(lambda: self._refill(turn, load - 1))
        return carry
