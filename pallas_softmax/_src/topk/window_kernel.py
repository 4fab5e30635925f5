"""The kernel of softmax fused with top-k for longer rows, with each row or part of a row in a CTA's shared memory.

The logits are read once from device memory. An example of how a CTA finds the k best of its part, for k = 3 and groups
of 4:

    arrive      5 1 0 2 | 3 9 4 1 | 0 2 2 1 | 8 6 7 3 | 1 0 1 0     each thread adds its elements to its normalizer,
    group_keys     5         9         2         8         1        and keeps the largest key of each of its groups

    bound       5, the 3rd largest of the group_keys: three groups have an element >= 5, so the three best
                elements of all are >= 5

    collect     5 | 9 | 8 6 7     the candidates: the elements >= 5. Only groups with group_keys >= 5 are searched.

    rank        9 8 7             the 3 best of the candidates, in order

Random logits have few more than k candidates. If there are too many for the list, or fewer than k, bisection over the
keys finds another bound (see `search.py`).

If rows have several parts, more launches merge winners and normalizers (see `merge_kernel.py`). `gpu/window.py` has a
drawing of windows, blocks, steps and groups. `candidates.py` has a drawing of the list of candidates.
"""

import dataclasses
import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import blocks, window_arrival
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import interpret
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.gpu.window import Window
from pallas_softmax._src.topk import merge_kernel
from pallas_softmax._src.topk.plan import REDUCTION_BYTES, group_words, listed_items
from pallas_softmax._src.topk.search import SearchMemory, add_step, clear, find_winners, pieces
from pallas_softmax._src.topk.winners import Request, WinnerLists, lists_type, write_winners
from pallas_softmax.online import Candidates, Normalizer


def softmax_topk(
    window: Window,
    mask: Mask | None,
    rows: int,
    request: Request,
    x_gmem,
    scale_gmem,
    mask_gmem,
    *lists_gmem,
    groups_smem,
    arrived,
    lists_smem,
    x_smem,
) -> None:
    """The kernel: writes the winners of a row, or of a part of a row, and the normalizer."""
    part = window_arrival.part_of(window, x_gmem.shape, rows, x_gmem, mask, mask_gmem)
    memory = _memory(window, request.k, x_smem, groups_smem, lists_smem)
    scale = scale_gmem[part.place.row if scale_gmem.shape[0] > 1 else 0]

    normalizer = _arrive(window, part, memory, arrived, scale)  # and the largest key of each group
    ranked_smem = find_winners(window, memory, part, request.k)  # bound, collect, rank
    number = part.place.row * window.count + part.place.index
    lists, final = WinnerLists(*lists_gmem), window.count == 1
    write_winners(lists, number, ranked_smem, normalizer, scale, request, final)


def topk_rows(
    x, mask: Mask | None, temperature, k: int, plan: Window, *, log, dtype
) -> tuple[Candidates, Normalizer]:
    """Returns the k best of each row, (rows, k), and the normalizers (rows, 1): d sums up exp((x - m) / temperature).

    x has the logits, (rows, vocab). The mask says which elements count. The temperature is float32, (1,) or (rows,).
    The values have the `dtype`; with `log`, they are logs of probabilities.
    """
    request = Request(k, x.dtype, mask is not None, log, dtype)
    scale = 1 / temperature
    lists = _launch(x, mask, scale, plan, request)
    return merge_kernel.merge(lists, scale, plan.count, request)


def _launch(x, mask: Mask | None, scale, window: Window, request: Request) -> WinnerLists:
    """Returns a list of winners for each part of each row."""
    (rows, vocab), k, final = x.shape, request.k, window.count == 1
    if interpret():
        window = dataclasses.replace(window, compact=False)  # the interpreter never lists positions
    item = jnp.int16 if window.compact else jnp.int32
    return gpu_kernel(
        functools.partial(softmax_topk, window, mask, rows, request),
        grid={"row": rows} if final else {"row": rows, "part": window.count},
        out_type=lists_type(rows * window.count, request, final),
        scratch_types={
            "groups_smem": plgpu.SMEM((group_words(window, k) + WARPGROUP,), jnp.int32),
            "arrived": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "lists_smem": plgpu.SMEM((sum(listed_items(window, k)),), item),
            "x_smem": plgpu.SMEM((window.size,), x.dtype),
        },
        name="softmax_topk",
        approximate=True,
        reduction_bytes=REDUCTION_BYTES,
    )(x.reshape(aligned_view(rows, vocab, window.vec)), scale, None if mask is None else mask.array)


def _memory(window: Window, k: int, x_smem, groups_smem, lists_smem) -> SearchMemory:
    """Returns the shared memory of the search, in pieces."""
    group_keys_smem, counts_smem = pieces(groups_smem, group_words(window, k), WARPGROUP)
    candidates_smem, hits_smem = pieces(lists_smem, *listed_items(window, k))
    return SearchMemory(x_smem, group_keys_smem, candidates_smem, hits_smem, counts_smem)


def _arrive(window: Window, part: window_arrival.Part, memory: SearchMemory, arrived, scale) -> Normalizer:
    """Copies the part to shared memory. Returns its normalizer, and writes the largest key of each group."""
    window_arrival.start_copies(window, part, memory.x, arrived)
    window_arrival.fill_edges(window, part, memory.x)
    clear(memory)

    def take_step(i, carry, count, copied):
        lane, keep = carry
        # Its loads are in flight during this step.
        next_keep = window_arrival.mask_of_step(window, part, i + 1)
        if copied:
            plgpu.barrier_wait(arrived.at[i])
        if part.mask is not None:
            window_arrival.mask_step(window, memory.x, i, [*keep[:count]])
        masked = part.mask is not None
        lane = add_step(window, memory, i, count, lane, scale * online.LOG2_E, masked)
        return lane, next_keep

    empty = [blocks.filled(x) for x in (-jnp.inf, 0)]
    carry = Normalizer(*empty), window_arrival.mask_of_step(window, part, 0)
    if window.full:
        full_step = functools.partial(take_step, count=window.step_blocks, copied=True)
        carry = lax.fori_loop(0, window.full, full_step, carry)
    if window.rest:
        carry = take_step(jnp.int32(window.full), carry, window.rest, len(window.copies()) > window.full)
    return online.combine_lanes(carry[0], scale=scale)
