"""Columns that are read twice, the second time from the L2 cache: see `columns_plan.CachedStrips`.

A CTA takes a ticket, which says what it does with which part of a strip:

    reduce:  load -> reduce -> write the part's reduction -> merge those of all parts, if it is the last one
    write:   load -> wait for the strip's merged reduction -> write

Parts are merged in groups, each by the CTA that has reduced the last part of the group; and groups likewise:

    parts    0   1   2   3 │ 4   5   6   7 │ 8   9        level 0
    groups          0      │       1       │   2          level 1
    strip                          0                      its constants

Tickets are taken in order, whatever the order in which CTAs start; and what a CTA waits for are lower tickets, whose
CTAs wait for none but even lower ones. So all of them end, however few CTAs the GPU runs at a time.
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
from pallas_softmax.implementations.mosaic_gpu.device import column_tiles, counters
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.softmax.columns_plan import CachedStrips
from pallas_softmax.implementations.mosaic_gpu.softmax.formulas import Formula

# Blocks that a thread reduces at a time: more take more registers, 167 in place of 120 of a part of 16 blocks.
BLOCKS_AT_A_TIME = 4


def launch(formula: Formula, arrays: list[jax.Array], plan: CachedStrips, settings: dict[str, Any]) -> list:
    """Computes a formula along the middle axis of the arrays, as `columns_kernel.launch` does.

    Args:
      settings: those of `gpu_kernel`, the results' types among them.
    """
    outer, _, inner = arrays[0].shape
    results = settings["out_type"]
    across = -(-inner // plan.width)  # strips side by side
    strips = outer * across
    per_column = jax.ShapeDtypeStruct((outer, 1, inner), jnp.float32)
    constants = jax.eval_shape(formula.constants, formula.reduction.empty)
    per_group = [jax.ShapeDtypeStruct((outer, count, inner), jnp.float32) for count in plan.levels]
    out_type = {
        "out_gmem": [] if formula.value is None else results,
        "constants_gmem": [per_column] * len(constants),
        "levels_gmem": [jax.tree.map(lambda _, a=a: a, formula.reduction.empty) for a in per_group],
    }
    flat_types, structure = jax.tree.flatten(out_type)

    def body(x_gmem, *out_gmem, mail_smem):
        counts = counters.counters(1 + strips * plan.counters, interpret=settings["interpret"])
        refs = _Refs(x_gmem, **jax.tree.unflatten(structure, out_gmem), counts=counts, mail_smem=mail_smem)
        ticket = counters.take(
            counts, 0, mail_smem, in_order=lax.axis_index("ticket"), interpret=settings["interpret"]
        )
        writes, part = plan.task(ticket) if formula.value else (False, ticket)
        strip = lax.div(part, plan.parts)
        task = _Task(
            formula,
            plan,
            refs,
            strip,
            lax.rem(part, plan.parts),
            outer=lax.div(strip, across),
            column=lax.rem(strip, across) * plan.width,
            interpret=settings["interpret"],
        )
        exists = (part >= 0) & (strip < strips)
        pl.when(exists & jnp.logical_not(writes))(task.reduce)
        if formula.value:
            pl.when(exists & writes)(task.write)

    out = gpu_kernel(
        body,
        grid={"ticket": plan.tickets(strips) if formula.value else strips * plan.parts},
        scratch_types={"mail_smem": plgpu.SMEM((1,), jnp.int32)},
        **{**settings, "out_type": flat_types},
    )(arrays)
    named = jax.tree.unflatten(structure, out)
    return named["constants_gmem"] if formula.value is None else named["out_gmem"]


class _Refs(NamedTuple):
    """What a CTA reads and writes.

    Attributes:
      x_gmem: the arrays (outer, vocab, inner).
      out_gmem: the result, if one of that shape is written.
      constants_gmem: the constants of each column, (outer, 1, inner).
      levels_gmem: for each level, the reductions of each column, (outer, parts or groups, inner).
      counts: the counter of tickets; then for each strip those of `CachedStrips`.
      mail_smem: an int32, for `counters`.
    """

    x_gmem: list
    out_gmem: list
    constants_gmem: list
    levels_gmem: list
    counts: Any
    mail_smem: Any


@dataclasses.dataclass(frozen=True)
class _Task:
    """What a CTA does: it reduces a part of a strip, or writes it.

    Attributes:
      formula, plan: as for `launch`.
      refs: what it reads and writes.
      strip: number of the strip.
      part: number of the part in the strip.
      outer: index of the strip along the outer axis.
      column: first column of the strip.
      interpret: as for `pallas_call`.
    """

    formula: Formula
    plan: CachedStrips
    refs: _Refs
    strip: Any
    part: Any
    outer: Any
    column: Any
    interpret: Any

    def reduce(self) -> None:
        """Reduces the part, and merges what is complete with it."""
        self._reduce(self._load(read_again=True))

    def write(self) -> None:
        """Writes the part by the constants of its columns, once they are written; its loads are under way meanwhile."""
        self._write(self._load(read_again=False))

    # --- Reduction

    def _reduce(self, x: list[list]) -> None:
        reduction = self.formula.reduction
        lanes = self._filled(reduction.empty)
        for i in range(0, len(x), BLOCKS_AT_A_TIME):
            blocks = [_float32(of_block) for of_block in x[i : i + BLOCKS_AT_A_TIME]]
            lanes = reduction.absorb(lanes, [self.formula.term(*of_block) for of_block in blocks])
        self._pass_on(0, self.part, lanes)

    def _pass_on(self, level: int, number, lanes) -> None:
        """Writes the reduction of a part or a group, of which each lane has some; the last of a group merges these."""
        total = self.formula.reduction.across(lanes, 0, self._broadcast)
        if level == len(self.plan.levels):
            self._store(self.refs.constants_gmem, 0, [*self.formula.constants(total)])
            self._tell(self.plan.first_counter(level), in_order=0)
            return
        self._store(self.refs.levels_gmem[level], number, total)
        group, place = lax.div(number, self.plan.group), lax.rem(number, self.plan.group)
        size = jnp.minimum(self.plan.group, self.plan.levels[level] - group * self.plan.group)
        before = self._tell(self.plan.first_counter(level) + group, in_order=place)
        pl.when(before == size - 1)(lambda: self._merge(level, group))

    def _merge(self, level: int, group) -> None:
        """Merges the reductions of a group, in an order that is always the same."""
        reduction, block = self.formula.reduction, self.plan.block
        first = group * self.plan.group
        states = [
            self._load_states(level, first + i * block.rows) for i in range(self.plan.group // block.rows)
        ]
        lanes = self._filled(reduction.empty)
        for i in range(0, len(states), BLOCKS_AT_A_TIME):
            lanes = reduction.merge(lanes, online.tree(reduction.merge, states[i : i + BLOCKS_AT_A_TIME]))
        self._pass_on(level + 1, group, lanes)

    # --- Results

    def _write(self, x: list[list]) -> None:
        value: Any = self.formula.value
        (out_gmem,) = self.refs.out_gmem
        merged = self._counter(self.plan.first_counter(len(self.plan.levels)))
        counters.wait(self.refs.counts, merged, 1, interpret=self.interpret)
        constants = [
            column_tiles.load_line(
                gmem, self.plan.block, (self.outer, 0, self.column), interpret=self.interpret
            )
            for gmem in self.refs.constants_gmem
        ]
        for at, of_block in zip(self._places(), x, strict=True):
            y = value(*_float32(of_block), *constants)
            column_tiles.store(out_gmem, self.plan.block, at, y, streamed=True, interpret=self.interpret)

    # --- Memory

    def _places(self) -> list[tuple]:
        """Where the blocks of the part are in the arrays."""
        first = self.part * self.plan.part_rows
        return [(self.outer, first + i * self.plan.block.rows, self.column) for i in range(self.plan.blocks)]

    def _load(self, *, read_again: bool) -> list[list]:
        """For each block of the part: that of each array."""
        load = functools.partial(
            column_tiles.load,
            tile=self.plan.block,
            fill=self.formula.reduction.neutral,
            streamed=not read_again,
            interpret=self.interpret,
        )
        return [[load(gmem, at=at) for gmem in self.refs.x_gmem] for at in self._places()]

    def _load_states(self, level: int, first):
        """A block of the reductions of parts or groups, from number `first` on; that of nothing beyond the last."""
        return jax.tree.map(
            lambda gmem, empty: column_tiles.load(
                gmem, self.plan.block, (self.outer, first, self.column), empty, interpret=self.interpret
            ),
            self.refs.levels_gmem[level],
            self.formula.reduction.empty,
        )

    def _store(self, tree_gmem, line, tree) -> None:
        """Writes numbers of the columns to a line of each array."""
        for gmem, leaf in zip(jax.tree.leaves(tree_gmem), jax.tree.leaves(tree), strict=True):
            at = self.outer, line, self.column
            column_tiles.store_line(
                gmem, self.plan.block, at, self._broadcast(leaf), interpret=self.interpret
            )

    def _counter(self, number):
        """The number of a counter of this strip."""
        return 1 + self.strip * self.plan.counters + number

    def _tell(self, number, *, in_order):
        """Counts in a counter of the strip what this CTA has written; returns what it was."""
        return counters.tell(
            self.refs.counts,
            self._counter(number),
            self.refs.mail_smem,
            in_order=in_order,
            interpret=self.interpret,
        )

    # --- Registers

    def _broadcast(self, per_column):
        return lax.broadcast_in_dim(per_column, self.plan.block.shape, (1,))

    def _filled(self, tree):
        """Float32 blocks whose elements are all the number in the tree."""
        block = self.plan.block
        return jax.tree.map(
            lambda value: column_tiles.laid_out(
                jnp.full(block.shape, value, jnp.float32), block, interpret=self.interpret
            ),
            tree,
        )


def _float32(of_block: list) -> list:
    return [a.astype(jnp.float32) for a in of_block]
