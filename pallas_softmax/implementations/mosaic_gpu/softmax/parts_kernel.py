"""Long rows, in shared memory: each over one CTA, a cluster of them, or, in two launches, over any number.

Device memory is read once and written once, but by the two launches, of which the second reads again.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import memory, staging
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import aligned_view
from pallas_softmax.implementations.mosaic_gpu.device.rows import part_place
from pallas_softmax.implementations.mosaic_gpu.softmax.formulas import Operation
from pallas_softmax.implementations.mosaic_gpu.softmax.plan import EDGE, EDGE_WALK, Parts


def run(op: Operation, name: str, arrays, mask: Mask | None, plan: Parts, **settings):
    """`op` on the rows of the arrays (rows, vocab): a list of its results, whose shapes are theirs or (rows,).

    Args:
      name: of the kernel.
      mask: of the elements, or None.
      plan: how the rows are cut into parts.
      **settings: as for `gpu_kernel`.
    """
    launched = functools.partial(_launch, op, arrays, mask, plan, **settings)
    if plan.cluster:
        return launched(name)
    leaves = launched(f"{name}_reduce", to_totals=True)
    structure = jax.tree.structure(op.reduction.empty)
    total = op.reduction.across(jax.tree.unflatten(structure, leaves), 1, lambda per_row: per_row[:, None])
    return op.constants(total) if op.value is None else launched(name, totals=jax.tree.leaves(total))


class _Part:
    """The part of a row that this CTA holds: where it lies, and its elements in registers."""

    def __init__(self, plan: Parts, shape, view, mask, interpret, *, backwards):
        self.plan, self.mask, self.interpret = plan, mask, interpret
        self.row = staging.Row(plan.walk, interpret)
        self.edge = staging.Row(EDGE_WALK, interpret)
        self.place = part_place(plan.cut, view, rows=shape[0], backwards=backwards)
        self.r, self.index, self.start, self.owned, _, self.first = self.place
        self.inner = (
            EDGE - self.first % plan.vec if plan.edges else 0
        )  # element of the part: the body's first

    def of_row(self, gmem):
        """The row of the view with this part."""
        return self.place.in_view(gmem)

    def ends(self, x_gmem, mask_gmem):
        """First and last elements: where, the blocks, the mask, and which of them only this block counts."""
        if not self.plan.edges:
            return
        lane, tail = self.edge.positions(), self.plan.length - EDGE
        after_body = (lane + tail >= self.inner + self.plan.body) & (lane + tail < self.owned)
        for at, own in ((0, lane < self.inner), (tail, after_body)):
            x = [
                staging.load(self.of_row(gmem).at[pl.ds(self.first + at, EDGE)], self.edge.layout)
                for gmem in x_gmem
            ]
            keep = None if self.mask is None else self._mask(mask_gmem, at, EDGE, 1) != 0
            yield at, [block.astype(jnp.float32) for block in x], keep, own

    def elements(self, smem, i, size, fill):
        """The blocks of a step of the body, of each array."""
        return zip(*(self.row.load(s, i, size, fill) for s in smem), strict=True)

    def mask_blocks(self, mask_gmem, i):
        """The mask of a step of the body, as blocks of int8; of no step, zeros. None without a mask."""
        walk = self.plan.walk
        if self.mask is None:
            return [None] * walk.group
        starts = [i * walk.step + b * walk.block for b in range(walk.group)]
        return [self._mask(mask_gmem, self.inner + at, walk.vocab - at, walk.vec) for at in starts]

    def _mask(self, mask_gmem, at, held, vec):
        row, start = self.mask.row(self.r), self.start + at
        return memory.load_mask_block(mask_gmem, row, start, held, vec, interpret=self.interpret)


def _launch(
    op: Operation, arrays, mask, plan: Parts, name, *, totals=(), to_totals=False, interpret, **settings
):
    """One launch: reduce, merge over the cluster, write.

    Args:
      totals: the rows' reductions, if known.
      to_totals: whether to write the parts' reductions, and not what becomes of the row.
    """
    rows, vocab = shape = arrays[0].shape
    dtype, count, walk = arrays[-1].dtype, plan.count, plan.walk
    structure, fill = jax.tree.structure(op.reduction.empty), op.reduction.neutral
    view = aligned_view(rows, vocab, plan.vec)
    clustered = plan.cluster and count > 1
    inputs = [a.reshape(view) for a in arrays] + ([] if mask is None else [mask.array]) + list(totals)
    if to_totals:
        out_type = [jax.ShapeDtypeStruct((rows, count), jnp.float32)] * structure.num_leaves
    elif op.value is None:
        out_type = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * op.per_row
    else:
        out_type = [jax.ShapeDtypeStruct(view, dtype)]
    scratch = {
        "smem": [plgpu.SMEM((walk.padded,), a.dtype) for a in arrays],
        "landed": [plgpu.Barrier(num_barriers=walk.steps)] * len(arrays),
    }
    if clustered:
        scratch["sent"] = [plgpu.SMEM((EDGE,), jnp.float32)] * structure.num_leaves
        scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",))

    def body(*refs, smem, landed, sent: Any = None, met: Any = None):
        x_gmem, out_gmem = refs[: len(arrays)], refs[len(inputs) :]
        mask_gmem = None if mask is None else refs[len(arrays)]
        totals_gmem = refs[len(inputs) - len(totals) : len(inputs)]
        part = _Part(plan, shape, view, mask, interpret, backwards=bool(totals))  # first what L2 read last
        for gmem, s, barriers in zip(x_gmem, smem, landed, strict=True):
            part.row.copy_in(part.of_row(gmem), s, barriers, part.first + part.inner)
        ends = list(part.ends(x_gmem, mask_gmem))

        def term(x, *conditions):
            t = op.term(*x)
            for condition in conditions:
                t = t if condition is None else jnp.where(condition, t, fill)
            return t

        def kept(blocks):
            return [None if block is None else block != 0 for block in blocks]

        def absorb(i, size, state):
            total, blocks = state
            keeps, following = kept(blocks), part.mask_blocks(mask_gmem, i + 1)  # a step ahead
            for barriers in landed:
                plgpu.barrier_wait(barriers.at[i])
            terms = []
            for (at, _), x, keep in zip(part.row.blocks(i, size), part.elements(smem, i, size, fill), keeps):
                terms.append(term(x, keep))
                if keep is not None and op.value is not None:  # so that the mask is read once
                    smem[-1][at] = jnp.where(keep, x[-1], fill).astype(dtype)
            return op.reduction.absorb(total, terms), following

        def reduce():
            lanes = jax.tree.map(part.row.full, op.reduction.empty)
            lanes, _ = part.row.sweep(absorb, (lanes, part.mask_blocks(mask_gmem, 0)))
            total = op.reduction.across(lanes)
            if not ends:
                return total
            side = jax.tree.map(part.edge.full, op.reduction.empty)
            side = op.reduction.absorb(side, [term(x, keep, own) for _, x, keep, own in ends])
            return op.reduction.merge(total, op.reduction.across(side))

        def merge(total):
            """⊕ over the cluster, in the same order in every CTA."""
            for ref, leaf in zip(sent, jax.tree.leaves(total), strict=True):
                ref[...] = part.edge.full(leaf)
            plgpu.commit_smem()
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            peers = [
                [
                    staging.load(plgpu.cluster_ref(ref, {"part": jnp.int32(j)}), part.edge.layout)
                    for ref in sent
                ]
                for j in range(count)
            ]
            total = online.tree(op.reduction.merge, [jax.tree.unflatten(structure, peer) for peer in peers])
            total = jax.tree.map(jnp.max, total)  # every lane has the same; all threads have read now
            plgpu.barrier_arrive(met)
            return total

        def write(total, masked):
            constants = op.constants(total)
            formula: Any = op.value

            def value(x, keep):
                y = formula(*x, *constants)
                return y if keep is None else jnp.where(keep, y, op.masked)

            def values(i, size):
                keeps = kept(part.mask_blocks(mask_gmem, i)) if masked else [None] * walk.group
                return (value(x, keep) for x, keep in zip(part.elements(smem, i, size, fill), keeps))

            (out,) = out_gmem
            for at, x, keep, _ in ends:
                block = value(x, keep).astype(dtype)
                staging.store(part.of_row(out).at[pl.ds(part.first + at, EDGE)], block, interpret)
            part.row.write(values, smem[-1], part.of_row(out), part.first + part.inner)

        if totals:
            total = jax.tree.unflatten(structure, [t[part.r] for t in totals_gmem])
            for barriers in landed:
                for i in range(walk.steps):
                    plgpu.barrier_wait(barriers.at[i])
            write(total, masked=mask is not None)
            return
        total = reduce()
        if to_totals:
            for gmem, leaf in zip(out_gmem, jax.tree.leaves(total), strict=True):
                gmem[part.r, part.index] = leaf
            return
        if clustered:
            total = merge(total)
        if op.value is None:
            for gmem, constant in zip(out_gmem, op.constants(total), strict=True):
                gmem[part.r] = constant
        elif mask is None:
            write(total, masked=False)
        else:  # masked elements are neutral in shared memory: enough, unless they meet a NaN or infinity
            finite = functools.reduce(jnp.logical_and, (jnp.abs(x) < jnp.inf for x in jax.tree.leaves(total)))
            lax.cond(finite, lambda: write(total, masked=False), lambda: write(total, masked=True))
        if clustered:
            plgpu.barrier_wait(met)  # nobody leaves while a peer reads its shared memory

    body.__name__ = name
    return gpu_kernel(
        body,
        grid={"row": rows, "part": count} if count > 1 else {"row": rows},
        cluster=count if clustered else 1,
        out_type=out_type,
        scratch_types=scratch,
        interpret=interpret,
        **settings,
    )(*inputs)
