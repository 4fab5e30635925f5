"""The kernel of softmax fused with top-k for longer rows, with each row or part of a row in a CTA's shared memory.

The logits are read once from device memory. An example of how a CTA finds the k best of its part, for k = 3 and groups
of 4:

    arrive      5 1 0 2 | 3 9 4 1 | 0 2 2 1 | 8 6 7 3 | 1 0 1 0     each thread adds its elements to its normalizer,
    group_keys     5         9         2         8         1        and keeps the largest key of each of its groups

    bound       5, the 3rd largest of the group_keys: three groups have an element >= 5, so the three best
                elements of all are >= 5

    collect     5 | 9 | 8 6 7     the candidates: the elements >= 5. Only groups with group_keys >= 5 are searched.

    rank        9 8 7             the 3 best of the candidates, in order

Random logits have few more than k candidates. If there are more than the list has room for, or fewer than k, bisection
over the keys finds another bound (see `search.py`). Both cases happen.

A second launch merges the winners and normalizers of the parts of a row (see `merge_kernel.py`). `plan.py` has a
drawing of windows, blocks, steps and groups. `candidates.py` has a drawing of the list of candidates.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.gpu.staged_row import part_place
from pallas_softmax._src.topk import merge_kernel, selection
from pallas_softmax._src.topk.plan import REDUCTION_BYTES, Window, group_words, listed_items, ordering_words
from pallas_softmax._src.topk.search import WindowSearch
from pallas_softmax._src.topk.winners import Request, WinnerLists, lists_type, write_winners
from pallas_softmax.online import Candidates, Normalizer


def topk_rows(
    x, mask: Mask | None, temperature, k: int, plan: Window, *, log, dtype, interpret=None
) -> tuple[Candidates, Normalizer]:
    """Returns the k best of each row, and the normalizers of the rows.

    Args:
      x: (rows, vocab), the logits.
      mask: which elements count, or None.
      temperature: float32, (1,) or (rows,).
      k: number of winners.
      plan: how a row lies over CTAs and in shared memory.
      log: whether the values are logs of probabilities.
      dtype: dtype of the values.
      interpret: as for `pallas_call`.

    Returns:
      Candidates (rows, k), with values and indices. Normalizers (rows, 1): d is the sum of
      exp((x - m) / temperature).
    """
    request = Request(k, x.dtype, mask is not None, log, dtype, interpret)
    scale = 1 / temperature
    lists = _launch(x, mask, scale, plan, request)
    return merge_kernel.merge(lists, scale, plan.count, request)


def _launch(x, mask: Mask | None, scale, window: Window, request: Request) -> WinnerLists:
    """Returns a list of winners for each part of each row."""
    rows, vocab = x.shape
    k, interpret, final = request.k, request.interpret, window.count == 1
    if interpret:
        window = dataclasses.replace(window, compact=False)  # the interpreter never lists positions
    view = aligned_view(rows, vocab, window.vec)

    def softmax_topk(
        x_gmem, scale_gmem, mask_gmem, values_gmem, indices_gmem, m_gmem, d_gmem, *,
        groups_smem, arrived, lists_smem, x_smem,
    ):  # fmt: skip
        part = part_of(window, view, rows, x_gmem, mask, mask_gmem)
        group_keys_smem, counts_smem = _pieces(groups_smem, words, WARPGROUP)
        candidates_smem, hits_smem = _pieces(lists_smem, *listed_items(window, k))
        search = WindowSearch(
            window, part.extent, part.owned, counts_smem, group_keys_smem, hits_smem, candidates_smem, x_smem, interpret
        )  # fmt: skip
        row_scale = scale_gmem[part.row if scale.size > 1 else 0]
        normalizer = _arrive(part, search, arrived, row_scale)
        n = search.find(k)
        buckets_smem, ranked_smem = hits_smem, group_keys_smem
        if window.compact:
            positions_smem = candidates_smem
            candidates_smem, buckets_smem, ranked_smem = _pieces(x_smem, *ordering_words(k))
            selection.expand_positions(x_smem, positions_smem, candidates_smem, n, part.extent.origin)
        number = part.row * window.count + part.index
        selection.rank(candidates_smem, n, buckets_smem, ranked_smem, k, x.dtype, vocab, interpret=interpret)
        write_winners(
            WinnerLists(values_gmem, indices_gmem, m_gmem, d_gmem), number, ranked_smem, normalizer, row_scale,
            request, final,
        )  # fmt: skip

    words, item = group_words(window, k), jnp.int16 if window.compact else jnp.int32
    return gpu_kernel(
        softmax_topk,
        grid={"row": rows} if final else {"row": rows, "part": window.count},
        out_type=lists_type(rows * window.count, request, final),
        scratch_types={
            "groups_smem": plgpu.SMEM((words + WARPGROUP,), jnp.int32),
            "arrived": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "lists_smem": plgpu.SMEM((sum(listed_items(window, k)),), item),
            "x_smem": plgpu.SMEM((window.size,), x.dtype),
        },
        approximate=True,
        reduction_bytes=REDUCTION_BYTES,
        interpret=interpret,
    )(x.reshape(view), scale, None if mask is None else mask.array)


def _pieces(ref, *sizes: int) -> list:
    """Returns references to consecutive pieces of a one-dimensional array, with these lengths."""
    return [ref.at[pl.ds(end - size, size)] for size, end in zip(sizes, itertools.accumulate(sizes))]


class Part(NamedTuple):
    """The part of a row that this CTA holds.

    Attributes:
      row: number of the row.
      index: number of the part in it.
      owned: number of elements.
      x_gmem: one-dimensional device memory. The part starts at element `first`.
      first: see x_gmem.
      body: number of the element in x_gmem where the body starts.
      extent: where in the window the part lies.
      mask: None, or (reference to the mask, its row).
    """

    row: Any
    index: Any
    owned: Any
    x_gmem: Any
    first: Any
    body: Any
    extent: selection.Extent
    mask: Any


def part_of(window: Window, view, rows: int, x_gmem, mask: Mask | None, mask_gmem) -> Part:
    """Returns the part of this CTA, for rows in device memory with the shape `view`."""
    place = part_place(window.cut, view, rows=rows)
    before_body = (-place.first) % window.vec if window.head else 0  # elements
    low = window.head - before_body
    extent = selection.Extent(*(jnp.int32(i) for i in (low, low + place.owned, place.start - low)))
    return Part(
        place.row, place.index, place.owned, place.in_view(x_gmem), place.first, place.first + before_body, extent,
        None if mask is None else (mask_gmem, mask.row(place.row)),
    )  # fmt: skip


def start_copies(window: Window, part: Part, x_smem, arrived) -> None:
    """Starts the bulk copies of the part's body to shared memory."""
    for i, (position, size) in enumerate(window.copies()):
        plgpu.copy_gmem_to_smem(
            part.x_gmem.at[pl.ds(part.body + (position - window.head), size)],
            x_smem.at[pl.ds(position, size)],
            arrived.at[i],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )


def _arrive(part: Part, search: WindowSearch, arrived, scale) -> Normalizer:
    """Copies the part to shared memory. Returns its normalizer, and writes the largest key of each group."""
    window, x_smem, interpret = search.window, search.x_smem, search.interpret
    start_copies(window, part, x_smem, arrived)
    selection.fill_edges(window, part.x_gmem, part.first, x_smem, part.extent, part.mask, interpret=interpret)
    selection.clear(search.candidates_smem, search.counts_smem, interpret=interpret)

    def add_step(i, blocks, copied, carry):
        lane, keep = carry
        next_keep = mask_of_step(window, part, i + 1, interpret)  # its loads are in flight during this step
        if copied:
            plgpu.barrier_wait(arrived.at[i])
        if part.mask is not None:
            selection.mask_step(window, x_smem, i, [*keep[:blocks]], interpret=interpret)
        lane = selection.add_step(
            window, x_smem, search.group_keys_smem, i, blocks, lane, scale * online.LOG2_E,
            masked=part.mask is not None, interpret=interpret,
        )  # fmt: skip
        return lane, next_keep

    empty = [blocks.filled(x, interpret=interpret) for x in (-jnp.inf, 0)]
    carry = Normalizer(*empty), mask_of_step(window, part, 0, interpret)
    if window.full:
        full_step = functools.partial(add_step, blocks=window.step_blocks, copied=True)
        carry = lax.fori_loop(0, window.full, lambda i, carry: full_step(i, carry=carry), carry)
    if window.rest:
        carry = add_step(jnp.int32(window.full), window.rest, len(window.copies()) > window.full, carry)
    return online.combine_lanes(carry[0], scale=scale)


def mask_of_step(window: Window, part: Part, i, interpret) -> tuple:
    """Returns the mask of each block of step i, (block,) int8 and 0 outside the body; or () without a mask."""
    if part.mask is None:
        return ()
    mask_gmem, mask_row = part.mask

    def load(b):
        position = (i * window.step_blocks + b) * window.block
        return blocks.load_mask(
            mask_gmem,
            mask_row,
            start=position + part.extent.origin,
            held=window.head + window.body - position,
            vec=window.vec,
            skip=window.head - jnp.minimum(position, window.head),
            interpret=interpret,
        )

    return tuple(load(b) for b in range(max(window.step_blocks, window.rest)))
