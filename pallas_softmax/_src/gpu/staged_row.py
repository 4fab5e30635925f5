"""Long rows: which part of a row a CTA works on, and how the part passes through shared memory."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.kernel import cta_number
from pallas_softmax._src.gpu.layout import Cut, Walk


class PartPlace(NamedTuple):
    """The part of a row that this CTA works on, and its place in an `aligned_view`. In softmax, a part is one segment.

    In this example 6 rows have a view of shape (2, 3 * vocab), and each row is cut into two parts. For part 1 of row 4,
    view_row is 1 and first is vocab + start:

        view row 0    | row 0           | row 1           | row 2           |
        view row 1    | row 3           | row 4           | row 5           |
                                        | part 0 | part 1 |
    """

    row: Any  # number of the row in the array (rows, vocab)
    index: Any  # number of the part in the row
    start: Any  # first element of the part, counted from the start of the row
    owned: Any  # number of elements of the part
    view_row: Any  # number of the row of the view that holds the part; None if the view is one-dimensional
    first: Any  # first element of the part, counted from the start of that row of the view

    def in_view(self, gmem):
        return gmem if self.view_row is None else gmem.at[self.view_row]


def part_place(
    cut: Cut,
    view: tuple[int, ...],
    *,
    rows: int,
    backwards: bool = False,
    row: Any = None,
    per_cta: int = 1,
    number: Any = 0,
) -> PartPlace:
    """Returns the place of this CTA's part. The grid has the axis "row" and, if a row has several CTAs, "part".

    `view` is the shape of the arrays, from `aligned_view`. If `backwards`, the CTAs take the rows and their parts in
    reverse order. A CTA that takes several rows passes the number of the `row`. A CTA that has several neighbouring
    parts, `per_cta`, passes the `number` of one of them.
    """
    row = lax.axis_index("row") if row is None else row
    index = cta_number("part", cut.count // per_cta) * per_cta + number
    if backwards:
        row, index = rows - 1 - row, cut.count - 1 - index
    start = cut.start(index)
    owned = cut.start(index + 1) - start
    joined_rows = view[-1] // cut.vocab
    view_row = row // joined_rows if len(view) > 1 else None
    return PartPlace(row, index, start, owned, view_row, row % joined_rows * cut.vocab + start)


@dataclasses.dataclass(frozen=True)
class StagedRow:
    """Elements of a segment that pass through shared memory, in the steps of a `Walk`.

    Each step uses a slot of shared memory, and the barrier with the slot's number. By default, step i uses slot
    steps_before + i. If a CTA takes several rows in turn, the slots form a ring: the steps of all rows use them in
    turn. If a row has more steps than there are slots, its first steps come `again` after the last one, with the
    numbers that follow. With 5 slots and 7 steps, the first 2 steps come again as steps 7 and 8:

        row 0, step 0 | row 0, step 1 | row 0, step 2 | row 0, step 3 | row 0, step 4
        row 0, step 5 | row 0, step 6 | row 0, step 0 | row 0, step 1 | row 1, step 0
        row 1, step 1 | ...
    """

    walk: Walk
    slots: int | None = None  # number of slots of a ring; None if each step has its own slot
    steps_before: Any = 0  # number of steps that the CTA takes before the first one of these
    start: Any = 0  # the place of the first element in shared memory, if each step has its own slot
    # For a ring only:
    freed: Callable[[Any], None] = lambda i: None  # called as soon as the slot of step i may be filled again
    again: int = 0  # number of steps that come twice

    def slot(self, i):
        number = self.steps_before + i
        return number if self.slots is None else lax.rem(jnp.int32(number), jnp.int32(self.slots))

    def _place(self, i):
        return self.walk.step_size * (i if self.slots is None else self.slot(i)) + self.start

    def _position(self, i):
        return (lax.rem(jnp.int32(i), jnp.int32(self.walk.steps)) if self.again else i) * self.walk.step_size

    def copy_in(self, gmem, smem, arrived, start, i) -> None:
        """Starts the copy of step i of the elements of `gmem` from `start` on, which is at a 16-byte boundary.

        The barrier `arrived` of the step's slot completes when the step is in `smem`.
        """
        walk = self.walk

        def copy(size: int) -> None:
            plgpu.copy_gmem_to_smem(
                gmem.at[pl.ds(start + self._position(i), size)],
                smem.at[pl.ds(self._place(i), size)],
                arrived.at[self.slot(i)],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        if walk.full_steps:
            full = i < walk.full_steps
            pl.when(full | (i >= walk.steps) if self.again else full)(lambda: copy(walk.step_size))
        if walk.rest:
            pl.when(i == walk.full_steps)(lambda: copy(walk.rest))

    def sweep(self, take_step: Callable, state, first: int = 0):
        """Calls state = take_step(i, size, state) for each step i; `size`, a static int, is its number of elements.

        It begins with step `first`. The earlier steps come last, when they are in shared memory again.
        """
        walk = self.walk

        def take_full(i, state):
            return take_step(i, walk.step_size, state)

        if walk.full_steps:
            state = lax.fori_loop(first, walk.full_steps, take_full, state)
        if walk.rest:
            state = take_step(walk.full_steps, walk.rest, state)
        return lax.fori_loop(walk.steps, walk.steps + first, take_full, state) if first else state

    def blocks(self, i, size: int) -> Iterator[Any]:
        for start in range(0, size, self.walk.block_size):
            yield pl.ds(self._place(i) + start, self.walk.block_size)

    def load(self, smem, i, size: int) -> Iterator[jax.Array]:
        """Yields the blocks of step i, in float32. After `size` elements they hold anything."""
        for at in self.blocks(i, size):
            yield blocks.load(smem.at[at], self.walk.vec).astype(jnp.float32)

    def store(self, smem, i, size: int, values: Iterable[jax.Array]) -> None:
        layout = blocks.layout(self.walk.vec)
        values = [block.astype(smem.dtype) for block in values]
        for at, block in zip(self.blocks(i, size), values, strict=True):
            blocks.store_in_place(smem.at[at], block, layout)

    def write(self, values: Callable[..., Iterable[jax.Array]], smem, gmem, start) -> None:
        """Writes the blocks values(i, size) of each step i through `smem` to `gmem`, from its element `start` on.

        It begins with the last steps, which are still in shared memory, and ends with the steps that come again.
        """

        def free_slot(i, in_flight: int) -> None:
            """Waits until step i has left its slot; `in_flight` later steps may still be leaving theirs."""
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            self.freed(i)

        def write_step(i, size, carry):
            self.store(smem, i, size, values(i, size))
            plgpu.commit_smem()
            source = smem.at[pl.ds(self._place(i), size)]
            plgpu.copy_smem_to_gmem(source, gmem.at[pl.ds(start + self._position(i), size)])
            if self.slots is not None:
                pl.when(jnp.int32(i) > self.again)(functools.partial(free_slot, i - 1, 1))
            return carry

        self.sweep(write_step, (), self.again)
        # The CTA may exit as soon as shared memory has been read. The end of the kernel completes the writes.
        free_slot(self.walk.steps + self.again - 1, 0)
