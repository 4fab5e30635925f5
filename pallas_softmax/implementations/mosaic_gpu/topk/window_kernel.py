"""Softmax fused with top-k: each row, or each part of a longer one, in the shared memory of a CTA.

While the row arrives, each thread keeps its normalizer and the largest of each small group of its elements.
The k-th largest of these bounds the k-th best element from below, and only a few more than k elements reach
it: they are collected, and put in order. When too many reach it (ties), the bound is made exact by bisection
over the keys, and the ties at it are taken in order of their indices.

The winners and the normalizers of the parts of a row are merged by a second launch.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations.folding import Mask
from pallas_softmax.implementations.mosaic_gpu.device import memory, sort_keys, staging
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.kernel import gpu_kernel
from pallas_softmax.implementations.mosaic_gpu.device.layout import aligned_view
from pallas_softmax.implementations.mosaic_gpu.softmax import formulas
from pallas_softmax.implementations.mosaic_gpu.topk import selection
from pallas_softmax.implementations.mosaic_gpu.topk.plan import (
    Window,
    candidate_slots,
    group_words,
    lists_per_merge,
    padded_winners,
    power_of_two,
)
from pallas_softmax.online import Candidates, Normalizer, sort_key

_LOG2_E = float(1 / np.log(2))


def topk_rows(x, mask: Mask | None, temperature, k: int, plan: Window, *, log, dtype, interpret=None):
    """The winners (rows, k) of the rows of x (rows, vocab), values and indices, and the normalizers (rows, 1).

    Args:
      mask: of the elements, or None.
      temperature: float32, (1,) or (rows,).
      log, dtype: of the values.
    """
    out = _Output(k, x.dtype, mask is not None, log, dtype, interpret)
    scale = 1 / temperature
    lists = _select(x, mask, scale, plan, out)
    count = plan.count
    while count > 1:
        group = min(count, lists_per_merge(k))
        lists = _merge(lists, scale, count, group, out)
        count = -(-count // group)
    values, indices, m, d = lists
    return Candidates(values, indices), Normalizer(m[:, None], d[:, None])


def merge_rows(won, kept, indices, parts: Normalizer, temperature, k: int, *, log, dtype, interpret=None):
    """As `topk_rows`, of the k float32 winners of each part of each row, (rows, parts * k), and the normalizers."""
    keys = sort_key(won)
    if kept is not None:
        keys = jnp.where(kept, keys, sort_keys.lowest_key(won.dtype))
    out = _Output(k, won.dtype, kept is not None, log, dtype, interpret)
    count = parts.m.shape[1]
    lists = keys, indices, parts.m.reshape(-1), parts.d.reshape(-1)
    values, indices, m, d = _merge(lists, 1 / temperature, count, count, out)
    return Candidates(values, indices), Normalizer(m[:, None], d[:, None])


class _Output:
    """What becomes of winners, k from each list of candidates.

    A list is four arrays, with a row for each list: keys, or when all is merged the values in their place;
    indices; m; and d.
    """

    def __init__(self, k, logits_dtype, masked, log, dtype, interpret):
        self.k, self.logits_dtype, self.masked = k, logits_dtype, masked
        self.log, self.dtype, self.interpret = log, dtype, interpret

    def types(self, rows, final):
        """Of the lists."""
        wide, one = (rows, self.k), (rows,)
        value = self.dtype if final else jnp.int32
        shapes = (wide, value), (wide, jnp.int32), (one, jnp.float32), (one, jnp.float32)
        return [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def write(self, refs, row, slots, n, best, total: Normalizer, scale, final):
        """The k best of the first n slots, in order, and the normalizer, to a row of the lists."""
        k, interpret = self.k, self.interpret
        selection.rank(slots, n, best, k, interpret=interpret)
        for at in range(0, k, WARPGROUP):
            key, index = (
                staging.load(best.at[pl.ds(start, WARPGROUP)], staging.per_thread(interpret))
                for start in (at, padded_winners(k) + at)
            )
            value = key
            if final:
                value = formulas.weight(
                    key, self.logits_dtype, total, scale, log=self.log, masked=self.masked
                )
            for ref, block in zip(refs, (value, index)):
                held = min(WARPGROUP, k - at)
                memory.store_block(ref, row=row, start=at, block=block, held=held, interpret=interpret)
        refs[2][row], refs[3][row] = total

    def kernel(self, body, grid, rows, final, scratch_types):
        """`gpu_kernel` with lists for results."""
        return gpu_kernel(
            body,
            grid={name: size for name, size in grid.items() if size > 1 or name == "row"},
            out_type=self.types(rows, final),
            scratch_types=scratch_types,
            approximate=True,
            interpret=self.interpret,
        )


def _select(x, mask, scale, plan: Window, out: _Output):
    """The lists of the parts of the rows of x."""
    rows, vocab = x.shape
    k, capacity, final = out.k, candidate_slots(out.k), plan.count == 1
    view = aligned_view(rows, vocab, plan.vec)

    def softmax_topk(x_gmem, scale_gmem, *refs, slots, **scratch):
        mask_gmem, refs = (None, refs) if mask is None else (refs[0], refs[1:])
        part = _Part(plan, x_gmem, view, mask, mask_gmem, slots, interpret=out.interpret, **scratch)
        r_scale = scale_gmem[part.r if scale.size > 1 else 0]
        total = part.arrive(r_scale)
        bound = part.threshold(k)
        part.collect(bound)
        n = part.counts[0]
        n = lax.cond((n < k) | (n > capacity), lambda: part.exact(bound, k, capacity), lambda: n)
        out.write(refs, part.r * plan.count + part.index, slots, n, part.groups, total, r_scale, final)

    scratch = {
        "smem": plgpu.SMEM((plan.size,), x.dtype),
        "landed": plgpu.Barrier(num_barriers=max(1, len(plan.copies()))),
        "groups": plgpu.SMEM((group_words(plan, k),), jnp.int32),
        "hits": plgpu.SMEM((capacity,), jnp.int32),
        "slots": plgpu.SMEM((2 * capacity,), jnp.int32),
        "counts": plgpu.SMEM((WARPGROUP,), jnp.int32),
    }
    inputs = [x.reshape(view), scale] + ([] if mask is None else [mask.array])
    grid = {"row": rows, "part": plan.count}
    return out.kernel(softmax_topk, grid, rows * plan.count, final, scratch)(*inputs)


class _Part:
    """The part of a row that this CTA holds, and the search in it."""

    def __init__(
        self, plan, x_gmem, view, mask, mask_gmem, slots, *, smem, landed, groups, hits, counts, interpret
    ):
        self.plan, self.smem, self.landed, self.groups = plan, smem, landed, groups
        self.hits, self.slots, self.counts, self.interpret = hits, slots, counts, interpret
        self.r = lax.axis_index("row")
        self.index = lax.axis_index("part") if plan.count > 1 else jnp.int32(0)
        start = plan.start(self.index)
        self.owned = plan.start(self.index + 1) - start
        together = view[-1] // plan.vocab  # rows in a row of the view
        self.gmem = x_gmem if len(view) == 1 else x_gmem.at[self.r // together]
        self.first = self.r % together * plan.vocab + start  # element of the view's row
        self.inner = (-self.first) % plan.vec if plan.head else 0  # elements before the body
        low = plan.head - self.inner
        self.extent = selection.Extent(*(jnp.int32(i) for i in (low, low + self.owned, start - low)))
        self.mask = None if mask is None else (mask_gmem, mask.row(self.r))

    def arrive(self, scale) -> Normalizer:
        """The part comes to shared memory; its normalizer, and the best of its groups."""
        plan, smem, interpret = self.plan, self.smem, self.interpret
        for i, (at, size) in enumerate(plan.copies()):
            plgpu.copy_gmem_to_smem(
                self.gmem.at[pl.ds(self.first + self.inner + (at - plan.head), size)],
                smem.at[pl.ds(at, size)],
                self.landed.at[i],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )
        selection.fill(plan, self.gmem, self.first, smem, self.extent, self.mask, interpret=interpret)
        selection.clear(self.slots, self.counts, interpret=interpret)

        def absorb(i, blocks, copied, carry):
            lane, keep = carry
            following = self._mask_blocks(i + 1)  # a step ahead
            if copied:
                plgpu.barrier_wait(self.landed.at[i])
            if self.mask is not None:
                selection.mark(plan, smem, i, [*keep[:blocks]], interpret=interpret)
            lane = selection.absorb(
                plan, smem, self.groups, i, blocks, lane, scale * _LOG2_E,
                marked=self.mask is not None, interpret=interpret,
            )  # fmt: skip
            return lane, following

        empty = [staging.laid_out(jnp.full((WARPGROUP,), x, jnp.float32), interpret) for x in (-jnp.inf, 0)]
        carry = Normalizer(*empty), self._mask_blocks(0)
        if plan.full:
            step = functools.partial(absorb, blocks=plan.group, copied=True)
            carry = lax.fori_loop(0, plan.full, lambda i, carry: step(i, carry=carry), carry)
        if plan.rest:
            carry = absorb(jnp.int32(plan.full), plan.rest, len(plan.copies()) > plan.full, carry)
        return online.across(carry[0], scale=scale)

    def _mask_blocks(self, i):
        """The mask of step i, as blocks of int8; beside the body it is 0."""
        if self.mask is None:
            return ()
        plan = self.plan
        load = functools.partial(memory.load_mask_block, *self.mask, vec=plan.vec, interpret=self.interpret)
        starts = [(i * plan.group + b) * plan.block for b in range(max(plan.group, plan.rest))]
        return tuple(
            load(
                start=at + self.extent.origin,
                held=plan.head + plan.body - at,
                skip=plan.head - jnp.minimum(at, plan.head),
            )
            for at in starts
        )

    def threshold(self, k):
        """A key that at least k elements reach, unless there is a NaN."""
        size = self.plan.pools * WARPGROUP
        if size < k:
            return jnp.int32(sort_keys.lowest_key(self.smem.dtype))
        return selection.threshold(self.groups, self.hits, size, k, interpret=self.interpret)

    def collect(self, bound, *, all_groups=False):
        """Candidates: all elements that reach the bound, if there is room for them."""
        selection.collect(
            self.plan, self.smem, self.groups, self.hits, self.slots, self.counts, bound, self.extent,
            all_groups=all_groups, interpret=self.interpret,
        )  # fmt: skip

    def _best(self):
        """A key that no element exceeds."""

        def load(i):
            return staging.load(
                self.groups.at[pl.ds(i * WARPGROUP, WARPGROUP)], staging.per_thread(self.interpret)
            )

        best = lax.fori_loop(1, self.plan.pools, lambda i, best: jnp.maximum(best, load(i)), load(0))
        return jnp.max(best)

    def exact(self, guess, k, capacity):
        """Collects again, neither too few nor too many; the number of candidates."""
        dtype = self.smem.dtype
        lowest = sort_keys.lowest_key(dtype)

        def reaching(q):
            """How many elements reach the key q, and exceed it."""
            least, more = selection.reaching(self.plan, self.smem, self.groups, q, interpret=self.interpret)
            around = self.plan.size - self.owned  # positions, which hold -inf
            neg_inf = sort_keys.key_of(-np.inf, dtype)
            return least - jnp.where(neg_inf >= q, around, 0), more - jnp.where(neg_inf > q, around, 0)

        def open_(state):
            low, high, least, more, _ = state
            return (least > capacity) & (more >= k) & (low != high)

        def halve(state):
            """low is reached by `least` >= k elements and exceeded by `more`, high + 1 reached by fewer than k."""
            low, high, least, more, i = state
            gap = high - low  # as unsigned: it may exceed 2^31
            middle = low + lax.shift_right_logical(gap, jnp.int32(1)) + (gap & 1)
            for j, likely in enumerate(guesses):
                middle = jnp.where((i == j) & (likely > low) & (likely <= high), likely, middle)
            at_least, above = reaching(middle)
            enough = at_least >= k
            return (
                jnp.where(enough, middle, low),
                jnp.where(enough, high, middle - 1),
                jnp.where(enough, at_least, least),
                jnp.where(enough, above, more),
                i + 1,
            )

        # what fails first: ties at the bound, fewer than k that are not masked, NaNs
        guesses = guess, lowest + 1, sort_keys.key_of(np.nan, dtype), sort_keys.key_of(-np.nan, dtype)
        state = jnp.int32(lowest), self._best(), self.owned, self.owned, jnp.int32(0)
        bound, _, least, *_ = lax.while_loop(open_, halve, state)
        few = least <= capacity
        _, more = reaching(bound)
        selection.clear(self.slots, self.counts, interpret=self.interpret)
        lax.cond(
            few | (more > 0),
            lambda: self.collect(jnp.where(few, bound, bound + 1), all_groups=True),
            lambda: None,
        )

        def ties():
            selection.ties(
                self.plan, self.smem, self.hits, self.slots, bound, self.extent, more, k,
                interpret=self.interpret,
            )  # fmt: skip

        lax.cond(few, lambda: None, ties)
        return jnp.where(few, least, k)


def _merge(lists, scale, count: int, group: int, out: _Output):
    """The lists of each `group` of a row's `count` lists."""
    k, interpret = out.k, out.interpret
    rows, groups = len(lists[2]) // count, -(-count // group)
    slots = power_of_two(group * k, WARPGROUP)

    def topk_merge(keys_gmem, indices_gmem, m_gmem, d_gmem, scale_gmem, *refs, slots, counts, best):
        r = lax.axis_index("row")
        g = lax.axis_index("group") if groups > 1 else jnp.int32(0)
        first = g * group
        held = jnp.minimum(group, count - first)
        r_scale = scale_gmem[r if scale.size > 1 else 0]
        load = functools.partial(memory.load_block, row=r, held=held, interpret=interpret)
        selection.clear(slots, counts, interpret=interpret)
        # each list has its share at the one bound, and some list has all at the other
        share = load(keys_gmem, start=first * k + (k + held - 1) // held - 1, stride=k, fill=0)
        whole = load(keys_gmem, start=first * k + k - 1, stride=k, fill=0)
        listed = staging.laid_out(lax.broadcasted_iota(jnp.int32, (WARPGROUP,), 0), interpret) < held
        bound = jnp.maximum(
            jnp.min(jnp.where(listed, share, 2**31 - 1)), jnp.max(jnp.where(listed, whole, -(2**31)))
        )
        selection.enlist(
            slots, counts, keys_gmem, indices_gmem, r, first * k, held * k, bound, interpret=interpret
        )
        lane = Normalizer(load(m_gmem, start=first, fill=-jnp.inf), load(d_gmem, start=first, fill=0.0))
        total = online.across(lane, scale=r_scale)
        out.write(refs, r * groups + g, slots, counts[0], best, total, r_scale, groups == 1)

    scratch = {
        "slots": plgpu.SMEM((2 * slots,), jnp.int32),
        "counts": plgpu.SMEM((WARPGROUP,), jnp.int32),
        "best": plgpu.SMEM((2 * padded_winners(k),), jnp.int32),
    }
    inputs = [a.reshape(rows, -1) for a in lists]
    grid = {"row": rows, "group": groups}
    return out.kernel(topk_merge, grid, rows * groups, groups == 1, scratch)(*inputs, scale)
