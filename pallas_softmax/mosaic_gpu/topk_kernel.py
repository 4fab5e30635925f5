"""Softmax fused with top-k, of rows in shared memory: each over one CTA or a cluster. The logits are read once.

While the row arrives, each thread keeps its normalizer and the largest of each small group of its elements.
The k-th largest of these bounds the k-th best element from below, and only a few more than k elements reach
it: they are collected, and put in order. When too many reach it (ties), the bound is made exact by bisection
over the keys, and the ties at it are taken in order of their indices.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax import dispatch, online
from pallas_softmax.mosaic_gpu import direct, launch, operations, pieces, selection, selection_ptx
from pallas_softmax.mosaic_gpu.launch import WARPGROUP, Window
from pallas_softmax.online import Candidates, Normalizer

_LOG2_E = float(1 / np.log(2))


def topk_rows(x, mask, temperature, k: int, *, log, dtype, plan=None, interpret=None):
    """The winners (rows, k) of the rows of x (rows, vocab), values and indices, and the normalizers (rows, 1).

    Args:
      mask: direct.Mask of the elements, or None.
      temperature: float32, (1,) or (rows,).
      log, dtype: of the values.
      plan: what `launch.topk_plan` chooses otherwise.
    """
    rows, vocab = x.shape
    plan = plan or launch.topk_plan(rows, vocab, k, x.dtype, dispatch.capability())
    settings: dict[str, Any] = {"log": log, "dtype": dtype, "interpret": interpret}
    values, indices, m, d = _launch(x, mask, temperature, k, plan, **settings)
    if plan.clustered or plan.count == 1:
        return Candidates(values, indices), Normalizer(m[:, None], d[:, None])
    lists = plan.count
    while lists > 1:
        group = min(lists, launch.merged(k))
        values, indices, m, d = _merge(
            values, indices, m, d, mask is not None, temperature, k, lists, group, x.dtype, **settings
        )
        lists = -(-lists // group)
    return Candidates(values, indices), Normalizer(m[:, None], d[:, None])


def _merge(keys, indices, m, d, masked, temperature, k, lists: int, group: int, x_dtype, *, log, dtype, interpret):
    """The best k of each `group` of a row's lists, as `_launch` returns them."""
    rows, groups = len(m) // lists, -(-lists // group)
    whole = groups == 1
    slots = launch.power_of_two(group * k, WARPGROUP)
    settings = {"interpret": interpret}

    def topk_merge(keys_gmem, indices_gmem, m_gmem, d_gmem, scale_gmem, *out, slots, counts, best):
        r = lax.axis_index("row")
        first = lax.axis_index("group") * group if groups > 1 else jnp.int32(0)
        held = jnp.minimum(group, lists - first)
        scale = scale_gmem[r if temperature.size > 1 else 0]
        selection.clear(slots, counts, **settings)
        selection.enlist(slots, keys_gmem, indices_gmem, r, first * k, held * k, **settings)
        state = [
            direct.load_block(ref, row=r, start=first, held=held, fill=fill, **settings)
            for ref, fill in ((m_gmem, -jnp.inf), (d_gmem, 0.0))
        ]
        total = pieces.across(Normalizer(*state), scale=scale)
        selection.rank(slots, held * k, best, k, **settings)
        _write(out, r * groups + first // group, best, k, total, scale if whole else None, log, x_dtype, masked, interpret)

    return pieces.kernel(
        topk_merge,
        grid={"row": rows, "group": groups} if groups > 1 else {"row": rows},
        out_type=_results(rows * groups, k, dtype if whole else jnp.int32),
        scratch_types={
            "slots": plgpu.SMEM((2 * slots,), jnp.int32),
            "counts": plgpu.SMEM((WARPGROUP,), jnp.int32),
            "best": plgpu.SMEM((2 * launch.padded(k),), jnp.int32),
        },
        approximate=launch.approximate(x_dtype, "topk"),
        interpret=interpret,
    )(*(a.reshape(rows, -1) for a in (keys, indices, m, d)), 1 / temperature)


def _results(rows, k, dtype):
    """Values, indices, m and d."""
    shapes = ((rows, k), dtype), ((rows, k), jnp.int32), ((rows,), jnp.float32), ((rows,), jnp.float32)
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def _write(out, row, best, k, total, scale, log, x_dtype, masked, interpret):
    """The winners and the normalizer to a row of the results; without a scale, keys for values."""
    m, d = total
    layout = None if interpret else plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
    for at in range(0, k, WARPGROUP):
        key, index = (pieces.load(best.at[pl.ds(i, WARPGROUP)], layout) for i in (at, launch.padded(k) + at))
        value = key
        if scale is not None:
            value = (pieces.of_key(key, x_dtype) - m) * scale
            value = value - operations.log(d) if log else jnp.exp(value) / d
            if masked:
                value = jnp.where(key == pieces.lowest_key(x_dtype), -jnp.inf if log else 0.0, value)
        for ref, block in zip(out, (value, index)):
            direct.store_block(
                ref, row=row, start=at, block=block, held=min(WARPGROUP, k - at), interpret=interpret
            )
    out[2][row], out[3][row] = m, d


def _launch(x, mask: direct.Mask | None, temperature, k: int, plan: Window, *, log, dtype, interpret):
    """Values and indices (rows, k), and m and d (rows,), of the rows of x, or of all parts of each row.

    The values of the parts are keys.
    """
    rows, vocab = x.shape
    view = launch.aligned_view(rows, vocab, plan.vec)
    whole = plan.count == 1 or plan.clustered
    results = rows if whole else rows * plan.count
    inputs = [x.reshape(view), 1 / temperature] + ([] if mask is None else [mask.array])
    scratch: dict[str, Any] = {
        "smem": plgpu.SMEM((plan.size,), x.dtype),
        "landed": plgpu.Barrier(num_barriers=max(1, len(plan.copies()))),
        "groups": plgpu.SMEM((launch.group_words(plan, k),), jnp.int32),
        "hits": plgpu.SMEM((launch.capacity(k),), jnp.int32),
        "slots": plgpu.SMEM((2 * launch.capacity(k),), jnp.int32),
        "counts": plgpu.SMEM((WARPGROUP,), jnp.int32),
    }

    def softmax_topk(x_gmem, scale_gmem, *refs, **scratch):
        mask_gmem, out = (None, refs) if mask is None else (refs[0], refs[1:])
        part = _Part(plan, k, rows, view, x_gmem, mask, mask_gmem, scratch, interpret)
        scale = scale_gmem[part.r if temperature.size > 1 else 0]
        lane = part.arrive(scale)
        total, bound = part.agree(lane, scale)
        part.collect(bound, all_groups=False)
        part.meet()
        n = part.number()
        n = lax.cond((n < k) | (n > launch.capacity(k)), lambda: part.exact(bound), lambda: n)

        def write():
            selection.rank(part.slots, n, part.groups, k, interpret=interpret)
            row = part.r if whole else part.r * plan.count + part.index
            _write(out, row, part.groups, k, total, scale if whole else None, log, x.dtype, mask is not None, interpret)

        def stay():
            selection_ptx.meet(wait=False)
            write()
            selection_ptx.meet(arrive=False)

        if plan.clustered:  # the first CTA, which stays until all have read its number
            lax.cond(part.index == 0, stay, lambda: None)
        else:
            write()

    return pieces.kernel(
        softmax_topk,
        grid={"row": rows, "part": plan.count} if plan.count > 1 else {"row": rows},
        cluster=plan.count if plan.clustered else 1,
        out_type=_results(results, k, dtype if whole else jnp.int32),
        scratch_types=scratch,
        approximate=launch.approximate(x.dtype, "topk"),
        interpret=interpret,
    )(*inputs)


class _Part:
    """The part of a row that this CTA holds, and the search in it."""

    def __init__(self, plan: Window, k, rows, view, x_gmem, mask, mask_gmem, scratch, interpret):
        self.plan, self.k, self.interpret = plan, k, interpret
        self.smem, self.landed, self.groups, self.hits, self.slots, self.counts = (
            scratch[name] for name in ("smem", "landed", "groups", "hits", "slots", "counts")
        )
        self.layout = None if interpret else plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
        self.lowest = pieces.lowest_key(self.smem.dtype)
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

    def _block(self, value, dtype=jnp.float32):
        return self._laid_out(jnp.full((WARPGROUP,), value, dtype))

    def _laid_out(self, block):
        return block if self.layout is None else plgpu.layout_cast(block, self.layout)

    def arrive(self, scale) -> Normalizer:
        """The part comes to shared memory; each thread's normalizer, and the best of its groups."""
        plan, smem = self.plan, self.smem
        for i, (at, size) in enumerate(plan.copies()):
            plgpu.copy_gmem_to_smem(
                self.gmem.at[pl.ds(self.first + self.inner + (at - plan.head), size)],
                smem.at[pl.ds(at, size)],
                self.landed.at[i],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )
        selection.fill(plan, self.gmem, self.first, smem, self.extent, self.mask, interpret=self.interpret)
        selection.clear(self.slots, self.counts, interpret=self.interpret)

        def absorb(i, blocks, copied, carry):
            lane, keep = carry
            following = self._mask_blocks(i + 1)  # a step ahead
            if copied:
                plgpu.barrier_wait(self.landed.at[i])
            if self.mask is not None:
                selection.mark(plan, smem, i, [*keep[:blocks]], interpret=self.interpret)
            lane = selection.absorb(
                plan, smem, self.groups, i, blocks, lane, scale * _LOG2_E,
                marked=self.mask is not None, interpret=self.interpret,
            )  # fmt: skip
            return lane, following

        carry = Normalizer(self._block(-jnp.inf), self._block(0.0)), self._mask_blocks(0)
        if plan.full:
            step = functools.partial(absorb, blocks=plan.group, copied=True)
            carry = lax.fori_loop(0, plan.full, lambda i, carry: step(i, carry=carry), carry)
        if plan.rest:
            carry = absorb(jnp.int32(plan.full), plan.rest, len(plan.copies()) > plan.full, carry)
        return carry[0]

    def _mask_blocks(self, i):
        """The mask of step i, as blocks of int8; past the body it is 0."""
        if self.mask is None:
            return ()
        plan = self.plan
        starts = [(i * plan.group + b) * plan.block for b in range(max(plan.group, plan.rest))]
        load = functools.partial(direct.load_mask_block, *self.mask, vec=plan.vec, interpret=self.interpret)
        return tuple(
            load(
                start=at + self.extent.origin,
                held=plan.head + plan.body - at,
                skip=plan.head - jnp.minimum(at, plan.head),
            )
            for at in starts
        )

    def agree(self, lane: Normalizer, scale):
        """The row's normalizer, and a key that at least k of its elements reach."""
        plan, size = self.plan, self.plan.pools * WARPGROUP
        total = pieces.across(lane, scale=scale)

        def bound(k):
            enough = size >= k
            return (
                selection.threshold(self.groups, size, k, interpret=self.interpret)
                if enough
                else jnp.int32(self.lowest)
            )

        if not plan.clustered:
            return total, bound(self.k)
        # each part has its share at the one bound, and some part has all at the other
        values = (*total, bound(-(-self.k // plan.count)), bound(self.k))
        m, d, share, whole = self._exchange(values, (-np.inf, 0, ~self.lowest, self.lowest))
        total = pieces.across(Normalizer(m, d), scale=scale)
        return total, jnp.maximum(jnp.min(share), jnp.max(whole))

    def _exchange(self, values, neutrals):
        """The values of each CTA of the cluster, as blocks with an element for each."""
        return selection_ptx.exchange(self.hits, values, neutrals, self.plan.count)

    def meet(self):
        """All CTAs of the cluster have come so far."""
        if self.plan.clustered:
            selection_ptx.meet()

    def collect(self, bound, *, all_groups):
        """Candidates: all elements that reach the bound, if there is room for them."""
        selection.collect(
            self.plan, self.smem, self.groups, self.hits, self.slots, self.counts, bound, self.extent,
            all_groups=all_groups, interpret=self.interpret,
        )  # fmt: skip

    def number(self):
        """Of the candidates of the row, more than there is room for if there are too many."""
        return selection.number(self.plan, self.counts)

    def exact(self, guess):
        """Collects again, neither too few nor too many: the number of candidates."""
        k, capacity, dtype = self.k, launch.capacity(self.k), self.smem.dtype

        def here(q):
            """How many elements of this part reach the key q, and exceed it."""
            least, more = selection.reaching(self.plan, self.smem, q, interpret=self.interpret)
            around = self.plan.size - self.owned  # positions, which hold -inf
            neg_inf = pieces.key_of(-np.inf, dtype)
            return least - jnp.where(neg_inf >= q, around, 0), more - jnp.where(neg_inf > q, around, 0)

        def everywhere(q):
            """The same of the whole row, and the keys q in earlier parts."""
            least, more = here(q)
            if not self.plan.clustered:
                return least, more, 0
            least, more = self._exchange((least, more), (0, 0))
            earlier = (lax.broadcasted_iota(jnp.int32, (WARPGROUP,), 0) < self.index).astype(jnp.int32)
            out = jnp.sum(least), jnp.sum(more), jnp.sum((least - more) * self._laid_out(earlier))
            self.meet()
            return out

        def open_(state):
            low, high, least, more, _ = state
            return (least > capacity) & (more >= k) & (low != high)

        def halve(state):
            low, high, least, more, i = state
            gap = high - low  # as unsigned: it may exceed 2^31
            middle = low + lax.shift_right_logical(gap, jnp.int32(1)) + (gap & 1)
            for j, likely in enumerate((guess, pieces.key_of(np.nan, dtype), pieces.key_of(-np.nan, dtype))):
                middle = jnp.where((i == j) & (likely > low) & (likely <= high), likely, middle)
            at_least, above, _ = everywhere(middle)
            enough = at_least >= k
            return (
                jnp.where(enough, middle, low),
                jnp.where(enough, high, middle - 1),
                jnp.where(enough, at_least, least),
                jnp.where(enough, above, more),
                i + 1,
            )

        vocab = jnp.int32(self.plan.vocab if self.plan.clustered else self.owned)
        state = jnp.int32(self.lowest), jnp.int32(~self.lowest), vocab, vocab, jnp.int32(0)
        bound, _, least, *_ = lax.while_loop(open_, halve, state)
        few = least <= capacity
        _, more, earlier = everywhere(bound)
        selection.clear(self.slots, self.counts, interpret=self.interpret)
        self.meet()
        lax.cond(
            few | (more > 0),
            lambda: self.collect(jnp.where(few, bound, bound + 1), all_groups=True),
            lambda: None,
        )

        def ties():
            selection.ties(
                self.plan, self.smem, self.hits, self.slots, self.counts, bound, self.extent, more + earlier, k,
                interpret=self.interpret,
            )  # fmt: skip

        lax.cond(few, lambda: None, ties)
        self.meet()
        return jnp.where(few, least, k)
