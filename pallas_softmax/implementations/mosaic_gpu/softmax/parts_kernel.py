"""Long rows, in shared memory: each over one CTA, a cluster of CTAs, or, in two launches, any number of CTAs.

A row of one CTA, or of a cluster, is read from device memory once, and written once:

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
from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import blocks
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import aligned_view
from pallas_softmax.implementations.mosaic_gpu.device.rows import StagedRow, part_place
from pallas_softmax.implementations.mosaic_gpu.softmax.formulas import Formula
from pallas_softmax.implementations.mosaic_gpu.softmax.plan import EDGE, Parts


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
      row, float32 arrays (rows,).
    """
    job = _Job(formula, arrays, mask, parts, approximate, interpret)
    if formula.value is None:
        results = [jax.ShapeDtypeStruct((job.rows,), jnp.float32)] * formula.results_per_row
    else:
        results = [jax.ShapeDtypeStruct(job.view, job.dtype)]
    if parts.cluster:
        return job.launch(_compute, name, results)

    structure = jax.tree.structure(formula.reduction.empty)
    of_parts = [jax.ShapeDtypeStruct((job.rows, parts.count), jnp.float32)] * structure.num_leaves
    reductions = jax.tree.unflatten(structure, job.launch(_reduce_only, f"{name}_reduce", of_parts))
    if formula.value is None:
        totals = formula.reduction.across(reductions, 1, lambda per_row: per_row[:, None])
        return list(formula.constants(totals))
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
    def clustered(self) -> bool:
        """Whether a row is over several CTAs that merge their reductions in the kernel."""
        return self.parts.cluster and self.parts.count > 1

    def launch(
        self, kernel, name: str, out_type: list[jax.ShapeDtypeStruct], reductions=None
    ) -> list[jax.Array]:
        """The results of a launch, with a CTA for each part of each row, whose body is kernel(part).

        Args:
          kernel: a function of a `_Part`.
          name: the kernel's name in profiles.
          out_type: shapes and dtypes of the results.
          reductions: those of the parts, arrays (rows, parts), if they are known. Then the CTAs take the rows from
            the last one on, since the L2 cache holds what the launch before read last.
        """
        walk, count = self.parts.walk, self.parts.count
        scratch: dict[str, Any] = {
            "x_smem": [plgpu.SMEM((walk.padded_length,), a.dtype) for a in self.arrays],
            "landed": [plgpu.Barrier(num_barriers=walk.steps)] * len(self.arrays),
        }
        if self.clustered:
            reduction_smem = plgpu.SMEM((EDGE,), jnp.float32)
            scratch["sent_smem"] = jax.tree.map(lambda _: reduction_smem, self.formula.reduction.empty)
            scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",))

        def body(x_gmem, mask_gmem, reductions_gmem, *out_gmem, **scratch):
            refs = _Refs(x_gmem, mask_gmem, reductions_gmem, out_gmem, **scratch)
            kernel(_Part(self, refs, backwards=reductions is not None))

        inputs = [a.reshape(self.view) for a in self.arrays]
        return gpu_kernel(
            body,
            grid={"row": self.rows, "part": count} if count > 1 else {"row": self.rows},
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
      landed: for each array, a barrier for each step of the body, which completes when the step has arrived.
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


def _compute(part: "_Part") -> None:
    """All in one launch: a CTA, or a cluster, has the whole row."""
    total = part.reduce()
    if part.job.clustered:
        total = part.merge_over_cluster(total)
    if part.job.formula.value is None:
        part.write_constants(total)
    else:
        part.write(total)
    if part.job.clustered:
        plgpu.barrier_wait(part.refs.met)  # no CTA leaves while another one may read its shared memory


def _reduce_only(part: "_Part") -> None:
    """The first of two launches: writes the reduction of each part."""
    total = part.reduce()
    for gmem, leaf in zip(part.refs.out_gmem, jax.tree.leaves(total), strict=True):
        gmem[part.place.row, part.place.index] = leaf


def _write_only(part: "_Part") -> None:
    """The second of two launches: writes the elements, when it has merged the reductions of the row's parts."""
    total = part.merge_from_device_memory()
    for landed in part.refs.landed:
        part.body.wait(landed)
    part.write_elements(total, read_mask=part.job.mask is not None)


class _Part:
    """The part of a row that this CTA holds: its body in shared memory, its edges in registers; see `Parts`."""

    def __init__(self, job: _Job, refs: _Refs, *, backwards: bool):
        """Starts the copies of the body, and loads the edges."""
        self.job, self.refs = job, refs
        self.place = part_place(job.parts.cut, job.view, rows=job.rows, backwards=backwards)
        self.body_start = job.parts.body_start(self.place.first)  # element of the part
        self.body = StagedRow(job.parts.walk, job.interpret)
        for x_gmem, x_smem, landed in zip(refs.x_gmem, refs.x_smem, refs.landed, strict=True):
            self.body.copy_in(self.place.in_view(x_gmem), x_smem, landed, self.place.first + self.body_start)
        self.edges = self._load_edges() if job.parts.edges else []

    # --- Loads

    def _load_edges(self) -> list["_Edge"]:
        """The first and the last EDGE elements of the part, in registers."""
        parts, interpret = self.job.parts, self.job.interpret
        position, last = blocks.positions(interpret=interpret), parts.length - EDGE
        after_body = position + last >= self.body_start + parts.body
        owned_after_body = after_body & (position + last < self.place.owned)
        before_body = position < self.body_start
        edges = []
        for at, counted in ((0, before_body), (last, owned_after_body)):
            where = pl.ds(self.place.first + at, EDGE)
            x = [
                blocks.load(self.place.in_view(x_gmem).at[where], interpret=interpret)
                for x_gmem in self.refs.x_gmem
            ]
            keep = None if self.job.mask is None else self._load_mask(at, EDGE, 1) != 0
            edges.append(_Edge(at, [block.astype(jnp.float32) for block in x], keep, counted))
        return edges

    def _load_body(self, i, size: int):
        """The blocks of step i of the body: for each block, those of all arrays."""
        fill = self.job.formula.reduction.neutral
        return zip(*(self.body.load(x_smem, i, size, fill) for x_smem in self.refs.x_smem), strict=True)

    def _load_body_mask(self, i) -> list:
        """The mask of each block of step i of the body, as int8; 0 after its end. None, without a mask."""
        walk = self.job.parts.walk
        if self.job.mask is None:
            return [None] * walk.step_blocks
        starts = [i * walk.step_size + block * walk.block_size for block in range(walk.step_blocks)]
        return [self._load_mask(self.body_start + at, walk.length - at, walk.vec) for at in starts]

    def _load_mask(self, at, held, vec: int):
        """A block of the mask, from element `at` of the part on, of which the first `held` are in the row."""
        mask: Any = self.job.mask
        return blocks.load_mask(
            self.refs.mask_gmem,
            mask.row(self.place.row),
            self.place.start + at,
            held,
            vec,
            interpret=self.job.interpret,
        )

    # --- Reduction

    def reduce(self):
        """The reduction of the part's elements, each counted once: that of the body, step by step, and the edges."""
        reduction = self.job.formula.reduction
        lanes = jax.tree.map(self.body.filled, reduction.empty)
        masks = [self._load_body_mask(i) for i in range(self.job.parts.mask_steps_ahead)]
        lanes, _ = self.body.sweep(self._absorb_step, (lanes, masks))
        total = reduction.across(lanes)
        if not self.edges:
            return total
        lanes = jax.tree.map(lambda x: blocks.filled(x, interpret=self.job.interpret), reduction.empty)
        terms = [self._term(edge.x, edge.keep, edge.counted) for edge in self.edges]
        return reduction.merge(total, reduction.across(reduction.absorb(lanes, terms)))

    def _absorb_step(self, i, size: int, state):
        """Adds step i of the body to the reduction of each lane. Its mask was loaded some steps before."""
        lanes, (mask_blocks, *next_masks) = state
        formula, x_smem = self.job.formula, self.refs.x_smem
        next_masks.append(self._load_body_mask(i + len(next_masks) + 1))
        keeps = _as_conditions(mask_blocks)
        for landed in self.refs.landed:
            plgpu.barrier_wait(landed.at[i])
        xs = list(zip(self._load_body(i, size), keeps))
        if self.job.mask is not None and formula.value is not None:  # for `write`, which need not read it then
            kept = [jnp.where(keep, x[-1], formula.reduction.neutral) for x, keep in xs]
            self.body.store(x_smem[-1], i, size, kept)
        terms = [self._term(x, keep) for x, keep in xs]
        return formula.reduction.absorb(lanes, terms), next_masks

    def _term(self, x, *conditions):
        """What is reduced of the blocks x, one of each array; neutral where a condition is False."""
        term = self.job.formula.term(*x)
        for condition in conditions:
            if condition is not None:
                term = jnp.where(condition, term, self.job.formula.reduction.neutral)
        return term

    def merge_over_cluster(self, total):
        """The reductions of the cluster's CTAs merged: thread i takes that of CTA i, and the threads of each CTA
        merge them in the same order.
        """
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
        """The reductions of the row's parts, which the launch before has written, merged."""
        reduction, count = self.job.formula.reduction, self.job.parts.count

        def of_parts(first: int):
            def load(gmem, empty):
                return blocks.load_from_row(
                    gmem, self.place.row, start=first, held=count - first, fill=empty, interpret=self.job.interpret
                )

            return jax.tree.map(load, self.refs.reductions_gmem, reduction.empty)

        lanes = [of_parts(first) for first in range(0, count, EDGE)]
        return reduction.across(online.tree(reduction.merge, lanes))

    # --- Results

    def write_constants(self, total) -> None:
        """Writes the numbers of the row."""
        for gmem, constant in zip(self.refs.out_gmem, self.job.formula.constants(total), strict=True):
            gmem[self.place.row] = constant

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
      x: a float32 block of each array.
      keep: the mask, a boolean block, or None.
      counted: which of them the reduction takes from here, and not from the body or the next part.
    """

    start: int
    x: list[jax.Array]
    keep: jax.Array | None
    counted: jax.Array


def _as_conditions(mask_blocks: list) -> list:
    """Blocks of a mask as booleans; None stays None."""
    return [None if block is None else block != 0 for block in mask_blocks]
