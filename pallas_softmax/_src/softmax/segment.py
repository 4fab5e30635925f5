"""A segment of a row that a CTA holds: how it is loaded, reduced and written; and how the segments are merged.

`rows_kernel.py` calls these stages in their order. `plan.Parts` draws segments, and `gpu.layout.Walk` draws steps.

    load      load; or copy_in (a step of the body) and load_edges
    reduce    reduce: each thread reduces its own elements of the segment, and each warp writes its state to a record
    merge     merged_row: the segments of all CTAs; or after a first launch, combine_from_device_memory
    write     write (elements), write_constants (numbers per row), or write_reduction (for a second launch, or for
              plain JAX)

A `Reduction` is the operator. The reduction of a segment or a row is its value, which `states_ptx` calls a state.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.kernel import PartPlace, number_of_row
from pallas_softmax._src.softmax import label_rank, states_ptx
from pallas_softmax._src.softmax.formulas import Job, Located, Reduction
from pallas_softmax._src.softmax.plan import EDGE, Parts


class Refs(NamedTuple):
    """The memory and barriers that a CTA uses."""

    x_gmem: list  # the input arrays, in the shape `Parts.view`; or (outer, vocab, inner) for columns
    out_gmem: tuple  # the results
    # For each array, the bodies of the CTA's segments, or slots. The memory of the last array also stages the output.
    x_smem: list
    # For each array, one barrier per step, or per slot. It completes when the step has arrived.
    arrived: list
    sent_smem: Any = None  # of columns, in a cluster: the reduction of each column, which the other CTAs read
    cluster_barrier: Any = None  # in a cluster, the barrier that synchronizes its CTAs
    mask_gmem: Any = None  # the mask, (mask rows, vocab or 1), or None
    scale_gmem: Any = None  # `normalizers.encoded_scale`, (rows,) or (1,), or None
    label_gmem: Any = None  # the `Label` of each row, (rows,), or None
    reductions_gmem: Any = None  # the reductions of the segments, as references (rows, segments), or None
    records_smem: Any = None  # the records of this CTA's segments, see `states_ptx`


class Segment:
    """A segment of a row that this CTA holds: the body in shared memory, the edges in registers; see `Parts`.

    Step i is copied and written from the start of the body. It is reduced from the start of the middle, `before_middle`
    elements later. A `position` counts from there.

    The body passes through shared memory in the steps of `Parts.walk`. Each step uses a slot of shared memory, and the
    barrier with the slot's number. By default, step i uses slot steps_before + i. If a CTA takes several rows in turns,
    the slots form a ring: the steps of all rows use them in turn. If a row has more steps than there are slots, its
    first steps come again after the last one, with the numbers that follow. With 5 slots and 7 steps, the first 2 steps
    come again as steps 7 and 8:

        row 0, step 0 | row 0, step 1 | row 0, step 2 | row 0, step 3 | row 0, step 4
        row 0, step 5 | row 0, step 6 | row 0, step 0 | row 0, step 1 | row 1, step 0
        row 1, step 1 | ...
    """

    def __init__(self, job: Job, refs: Refs, place: PartPlace, steps_before=0, *, smem_start=0, freed=None):
        self.job, self.refs, self.place = job, refs, place
        self.parts: Parts = job.plan
        self.walk, self.slots, self.again = self.parts.walk, self.parts.slots, self.parts.again
        self.steps_before: Any = steps_before  # how many steps the CTA takes before these
        self.smem_start: Any = smem_start  # where the body is in shared memory, if each step has its own slot
        # Called as soon as the slot of step i may be filled again.
        self.freed: Callable[[Any], None] = freed or (lambda i: None)
        self.middle_start = EDGE if self.parts.has_edges else 0  # in the segment
        self.before_middle = self.parts.before_middle(place.row, place.start)
        self.body_start = self.middle_start - self.before_middle
        self.vec = self.parts.read_vec
        self.edges: list[_Edge] = []  # empty before `load_edges`, or if the segment has no edges
        self.formula = job.formula.scaled(number_of_row(refs.scale_gmem, place.row))
        # Number of elements of the middle that count here. The last ones of a shorter segment belong to the next one.
        self.held = place.owned if self.parts.overlaps else self.parts.middle
        # The number of the segment's first step in the row. The edges count as one more step.
        self.first_step = place.index * self.parts.all_steps

    # --- The body in shared memory

    def _slot(self, i):
        number = self.steps_before + i
        return number if self.slots is None else lax.rem(jnp.int32(number), jnp.int32(self.slots))

    def _in_smem(self, i):
        return self.parts.slot_size * (i if self.slots is None else self._slot(i)) + self.smem_start

    def _in_body(self, i):
        return (lax.rem(jnp.int32(i), jnp.int32(self.walk.steps)) if self.again else i) * self.walk.step_size

    def copy_in(self, i) -> None:
        """Starts the copies of step i, one from each array. The slot's barriers complete when they have arrived.

        All but the last step come with the start of the next one, `Parts.margin`.
        """
        walk, start = self.walk, self.place.first + self.body_start

        def copy(size: int, x_gmem, x_smem, arrived) -> None:
            plgpu.copy_gmem_to_smem(
                self.place.in_view(x_gmem).at[pl.ds(start + self._in_body(i), size)],
                x_smem.at[pl.ds(self._in_smem(i), size)],
                arrived.at[self._slot(i)],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        for refs in zip(self.refs.x_gmem, self.refs.x_smem, self.refs.arrived, strict=True):
            last = walk.steps - 1
            if last:
                pl.when(i != last)(functools.partial(copy, self.parts.slot_size, *refs))
            pl.when(i == last)(functools.partial(copy, walk.rest or walk.step_size, *refs))

    def load(self) -> None:
        """Starts to load the whole segment."""
        for i in range(self.walk.steps):
            self.copy_in(i)
        self.load_edges()

    def wait(self, i) -> None:
        """Waits for the copies of step i."""
        for arrived in self.refs.arrived:
            plgpu.barrier_wait(arrived.at[self._slot(i)])

    def _sweep(self, take_step: Callable, state, first: int = 0):
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

    def _blocks(self, i, size: int, start=0) -> Iterator[Any]:
        for at in range(0, size, self.walk.block_size):
            yield pl.ds(self._in_smem(i) + start + at, self.walk.block_size)

    def _load(self, i, size: int, vec: int, start=0) -> Iterator[tuple]:
        """Yields the blocks of step i in float32, one from each array, from element `start` of the step on.

        After `size` elements they hold anything. A thread has `vec` neighbours at a time.
        """
        for at in self._blocks(i, size, start):
            yield tuple(blocks.load(x_smem.at[at], vec).astype(jnp.float32) for x_smem in self.refs.x_smem)

    def load_at(self, position, x_smem):
        """Returns the block of the middle at `position`, a multiple of its size, for the reduction."""
        margins = position // self.walk.step_size * self.parts.margin
        start = self.smem_start + self.before_middle + position + margins
        return blocks.load(x_smem.at[pl.ds(start, self.walk.block_size)], self.vec)

    def positions(self):
        """Returns the positions of a block of the middle, counted from its start."""
        return blocks.positions(self.vec, self.walk.block_size)

    def _store(self, i, size: int, values: Iterable[jax.Array]) -> None:
        """Stores blocks in the place of step i of the last array."""
        x_smem, layout = self.refs.x_smem[-1], blocks.layout(self.walk.vec)
        values = [block.astype(x_smem.dtype) for block in values]
        for at, block in zip(self._blocks(i, size), values, strict=True):
            blocks.store_in_place(x_smem.at[at], block, layout)

    # --- Edges and mask

    def load_edges(self) -> None:
        if not self.parts.has_edges:
            return
        place, last = self.place, self.parts.length - EDGE
        for at, counted in ((0, None), (last, blocks.positions() + last < place.owned)):
            where = pl.ds(place.first + at, EDGE)
            arrays = [blocks.load(place.in_view(x).at[where]) for x in self.refs.x_gmem]
            mask = None if self.job.mask is None else self._load_mask(at, EDGE, 1, EDGE)
            self.edges.append(_Edge(at, arrays, mask, counted))

    def _load_masks(self, i, start, length: int, vec: int) -> list:
        """Returns the mask of each block of step i, as int8, 0 after its end. Without a mask: Nones.

        The steps take `length` elements, from element `start` of the segment on.
        """
        walk = self.walk
        if self.job.mask is None:
            return [None] * walk.step_blocks
        places = [i * walk.step_size + block * walk.block_size for block in range(walk.step_blocks)]
        return [self._load_mask(start + at, length - at, vec, walk.block_size) for at in places]

    def load_mask_at(self, position):
        """Returns the mask of the block of the middle at `position`, for the reduction."""
        at, held = self.middle_start + position, self.held - position
        return self._load_mask(at, held, self.vec, self.walk.block_size)

    def _load_mask(self, at, held, vec: int, size: int):
        """Returns `size` elements of the mask, from element `at` of the segment on; 0 after the first `held` elements.

        If the mask has the shape of the arrays, its bodies are aligned to vec bytes. Then a vector is a single load,
        and nothing waits for it until its step is reduced. Other masks need two words, and shifting these together
        waits for both loads.
        """
        mask: Any = self.job.mask
        row, start = mask.row(self.place.row), self.place.start + at
        is_whole = mask.array.shape == self.job.arrays[0].shape
        return blocks.load_mask(self.refs.mask_gmem, row, start, held, vec, size=size, aligned=vec == 1 or is_whole)

    # --- Reduction

    def reduce(self, number) -> None:
        """Reduces the segment, and writes its record. `number` is the number of the segment in its CTA.

        Each thread adds its elements of each step when it arrives, then of the edges.
        """
        reduction = self.formula.reduction
        lanes = jax.tree.map(blocks.filled, reduction.empty)
        if self.formula.locates:
            lanes = lanes._replace(at=blocks.filled(jnp.float32(self.first_step)))
        masks = [self._load_middle_masks(i) for i in range(self.parts.mask_steps_ahead)]
        lanes, _ = self._sweep(self._absorb_step, (lanes, masks))
        if self.edges:
            lanes = reduction.add(lanes, self._edge_terms(), self.first_step + self.walk.steps)
            if self.formula.counts:
                lanes = lanes._replace(before=lanes.before + label_rank.in_edges(self))
        if self.formula.counts and self.vec > 1:  # a vector of one element has none after the label
            lanes = lanes._replace(before=lanes.before - label_rank.overcount(self))
        states_ptx.write_record(reduction, lanes, self.refs.records_smem, number)

    def _load_middle_masks(self, i) -> list:
        return self._load_masks(i, self.middle_start, self.parts.middle, self.vec)

    def _edge_terms(self) -> list:
        return [self._term(edge.x, edge.keep, edge.counted) for edge in self.edges]

    def _absorb_step(self, i, size: int, state):
        """Adds step i of the middle. `state` has the reduction of each lane, and the masks of the next steps."""
        lanes, (mask_blocks, *next_masks) = state
        formula, ahead = self.formula, self.parts.mask_steps_ahead
        all_loaded = ahead == self.walk.steps
        # If all masks are loaded, the same one again keeps the length of the carry.
        next_masks.append(mask_blocks if all_loaded else self._load_middle_masks(i + ahead))
        self.wait(i)
        xs = list(zip(self._load(i, size, self.vec, self.before_middle), _as_conditions(mask_blocks)))
        inside = self._inside(i, size)
        if self._writes_masked:
            self._store(i, size, [jnp.where(keep, x[-1], formula.reduction.neutral) for x, keep in xs])
        terms = [self._term(x, keep, here) for (x, keep), here in zip(xs, inside)]
        terms = [x for term in terms for x in blocks.split(term, self.vec)]
        lanes = formula.reduction.add(lanes, terms, self.first_step + i)
        if formula.counts:
            lanes = lanes._replace(before=label_rank.add_step(self, lanes.before, terms, i, size))
        if self.again:

            @pl.when(i < self.again)
            def _():
                plgpu.commit_smem()  # all threads have read the slot
                self.freed(i)

        return lanes, next_masks

    def _inside(self, i, size: int) -> list:
        """Returns for each block of step i which elements of the middle count here; None where all do."""
        walk, conditions = self.walk, []
        # The last elements of the body may not count: they are after the middle, or belong to the next segment.
        # If segments overlap, one element marks the last block.
        surplus = walk.length - self.parts.middle + self.parts.overlaps
        complete = size == walk.step_size and walk.full_steps * size <= walk.length - surplus  # of the full steps
        for start in range(0, size, walk.block_size):
            end, left = start + walk.block_size, self.held - i * walk.step_size - start
            is_cut = end > size - surplus and not complete
            conditions.append(self.positions() < left if is_cut else None)
        return conditions

    def located(self, total: Located) -> Located:
        """Returns the reduction of the row with the position of its largest element, which is in this segment.

        The blocks of step `total.at` are read again. If the last step has fewer blocks, blocks before it are read too.
        """
        walk, (x_smem,) = self.walk, self.refs.x_smem
        terms, places = self._edge_terms(), [blocks.positions() + edge.start for edge in self.edges]
        held_blocks = walk.padded_length // walk.block_size
        count = min(walk.step_blocks, held_blocks)
        step = total.at.astype(jnp.int32) - self.first_step
        first = jnp.minimum(step * walk.step_blocks, held_blocks - count)
        for block in range(count):
            at = (first + block) * walk.block_size
            x = self.load_at(at, x_smem)
            keep = None if self.job.mask is None else self.load_mask_at(at) != 0
            term = self._term([x.astype(jnp.float32)], keep, self.positions() < self.held - at)
            terms += blocks.split(term, self.vec)
            places += blocks.split(self.positions() + (self.middle_start + at), self.vec)
        found = [normalizers.if_largest(at, x, total.moments.m) for at, x in zip(places, terms, strict=True)]
        at = jnp.min(normalizers.tree(jnp.minimum, found))
        return total._replace(at=(self.place.start + at).astype(jnp.float32))

    def _term(self, x, *conditions):
        """Returns the terms to reduce, from a block of each array; neutral where a condition is False."""
        term = self.formula.term(*x)
        for condition in conditions:
            if condition is not None:
                term = jnp.where(condition, term, self.formula.reduction.neutral)
        return term

    @property
    def _writes_masked(self) -> bool:
        """Whether `reduce` writes masked elements: if each thread reduces the elements that it writes later."""
        return self.job.mask is not None and self.formula.value is not None and not self.parts.has_edges

    def combine_from_device_memory(self):
        """Merges the reductions of the row's segments, which the first launch wrote."""
        reduction, count = self.formula.reduction, self.parts.count

        def load(first: int):
            read = functools.partial(blocks.load_from_row, row=self.place.row, start=first, held=count - first)
            return jax.tree.map(lambda gmem, empty: read(gmem, fill=empty), self.refs.reductions_gmem, reduction.empty)

        lanes = [load(first) for first in range(0, count, WARPGROUP)]
        return reduction.combine_lanes(normalizers.tree(reduction.combine, lanes))

    # --- Results

    def write_reduction(self, total) -> None:
        """Writes the reduction of the segment, for a second launch or for plain JAX."""
        for gmem, leaf in zip(self.refs.out_gmem, jax.tree.leaves(total), strict=True):
            gmem[self.place.row, self.place.index] = leaf

    def write_constants(self, total) -> None:
        for gmem, constant in zip(self.refs.out_gmem, self.formula.constants(total), strict=True):
            gmem[self.place.row] = constant.astype(gmem.dtype)

    def write(self, total) -> None:
        """Writes the elements of the segment.

        If `_writes_masked`, `reduce` has made the masked elements neutral in shared memory. For these, the formula
        gives the masked value, so the mask need not be read again. The exception is a NaN or an infinity in the row's
        reduction.
        """
        write = functools.partial(self.write_elements, total)
        if not self._writes_masked:
            write(read_mask=self.job.mask is not None)
            return
        finite = functools.reduce(jnp.logical_and, (jnp.abs(leaf) < jnp.inf for leaf in jax.tree.leaves(total)))
        lax.cond(finite, lambda: write(read_mask=False), lambda: write(read_mask=True))

    def write_elements(self, total, *, read_mask: bool) -> None:
        """Writes the elements of the segment; `read_mask` says whether to read the mask for the body."""
        formula, refs, place = self.formula, self.refs, self.place
        constants, elements = formula.constants(total), formula.value
        y_gmem = place.in_view(*refs.out_gmem)

        def value(x, keep):
            y = elements(*x, *constants)  # pyright: ignore[reportOptionalCall]
            return jnp.where(keep, y, formula.masked_value) if read_mask else y

        def values(i, size):
            if self.again:
                pl.when(i >= self.walk.steps)(functools.partial(self.wait, i))
            masks = [None] * self.walk.step_blocks
            if read_mask:
                masks = self._load_masks(i, self.body_start, self.walk.length, self.walk.vec)
            xs = self._load(i, size, self.walk.vec)
            return (value(x, keep) for x, keep in zip(xs, _as_conditions(masks)))

        def free_slot(i, in_flight: int) -> None:
            """Waits until step i has left its slot; `in_flight` later steps may still be leaving theirs."""
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            self.freed(i)

        def write_step(i, size, carry):
            self._store(i, size, values(i, size))
            plgpu.commit_smem()
            source = refs.x_smem[-1].at[pl.ds(self._in_smem(i), size)]
            plgpu.copy_smem_to_gmem(source, y_gmem.at[pl.ds(start + self._in_body(i), size)])
            if self.slots is not None:  # step `again` is written first: no step before it has to leave its slot
                pl.when(jnp.int32(i) > self.again)(functools.partial(free_slot, i - 1, 1))
            return carry

        for edge in self.edges:
            block = value(edge.x, edge.keep).astype(self.job.dtype)
            blocks.store(y_gmem.at[pl.ds(place.first + edge.start, EDGE)], block)
        start = place.first + self.body_start
        # The last steps come first, since they are still in shared memory; then the steps that come again.
        self._sweep(write_step, (), self.again)
        # The CTA may exit as soon as shared memory has been read. The end of the kernel completes the writes.
        free_slot(self.walk.steps + self.again - 1, 0)


class _Edge(NamedTuple):
    """The first or the last EDGE elements of a segment, in registers, one for each thread."""

    start: int  # the position of the first of these elements in the segment
    arrays: list[jax.Array]  # a block from each array, as loaded: converting it early would wait for the load
    mask: jax.Array | None  # as int8
    counted: jax.Array | None  # which elements count here, and not in the next segment; None: all

    @property
    def x(self) -> list[jax.Array]:
        return [block.astype(jnp.float32) for block in self.arrays]

    @property
    def keep(self):
        return None if self.mask is None else self.mask != 0


def merged_row(job: Job, refs: Refs, reduction: Reduction):
    """Returns the reduction of the row, given the records of its segments.

    All CTAs of a cluster get the same bits. At the end they arrive at the cluster's barrier once more: they must call
    `wait_for_peers` before they exit or write other records.
    """
    ctas = job.plan.ctas
    if ctas > 1:
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.cluster_barrier)
        plgpu.barrier_wait(refs.cluster_barrier)
    total = states_ptx.merged(reduction, refs.records_smem, ctas * job.plan.per_cta, ctas)
    if ctas > 1:
        plgpu.barrier_arrive(refs.cluster_barrier)  # all threads have read: the total depends on each read
    return total


def wait_for_peers(job: Job, refs: Refs) -> None:
    """Waits until all CTAs of the cluster have merged."""
    if job.plan.ctas > 1:
        plgpu.barrier_wait(refs.cluster_barrier)


def _as_conditions(mask_blocks: list) -> list:
    return [None if block is None else block != 0 for block in mask_blocks]
