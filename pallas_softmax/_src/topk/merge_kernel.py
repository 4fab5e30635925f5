"""The kernel that merges lists of winners of a row: lists of its parts, or of its shards on several devices.

A CTA merges up to `lists_per_merge(k)` lists. They lie in device memory one after another, and each is in order:

    list 0                list 1                list 2          n = 3 lists of k keys
    | a0 a1 a2 ... |      | b0 b1 b2 ... |      | c0 c1 ... |   a0 >= a1 >= ..., b0 >= b1 >= ...

A few lists are ranked by binary searches (`lists_ptx.py`). More lists are merged with a bound that at least k keys
reach, like a row in `window_kernel.py`. Two such keys are known:

  * Let s be k / n, rounded up. The n lists have at least k keys at places 1 to s. All of them reach the smallest key at
    place s.
  * The list with the largest key at place k has k keys that reach it.

The bound is the greater of these two keys. The keys that reach it are put in order, and the k best are the new list.
"""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.gpu import blocks, sort_keys
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import interpret
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import power_of_two
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.topk.candidates import sort_winners
from pallas_softmax._src.topk.lists_ptx import rank_lists_program, search_lists_program
from pallas_softmax._src.topk.plan import SEARCHED_LISTS, SEARCHED_WINNERS, lists_per_merge, padded_winners
from pallas_softmax._src.topk.winners import Request, WinnerLists, lists_type, write_winners
from pallas_softmax.online import Candidates, Normalizer

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


def merge_rows(won, kept, indices, parts: Normalizer, temperature, k: int, *, log, dtype):
    """Merges the winners of several devices in one launch. Returns the k best and the normalizers of the whole rows.

    Each device's shard of the row has a list of k winners: their logits `won` in float32, their mask `kept` or None,
    and their indices in the row, all (rows, lists * k). `parts` are the normalizers of the shards, (rows, lists).
    `window_kernel.topk_rows` documents the other arguments and the results.
    """
    keys = sort_keys.key(won)
    if kept is not None:
        keys = jnp.where(kept, keys, sort_keys.lowest_key(won.dtype))
    request = Request(k, won.dtype, kept is not None, log, dtype)
    lists = WinnerLists(keys, indices, parts.m.reshape(-1), parts.d.reshape(-1))
    count = parts.m.shape[1]
    return results(_launch(lists, 1 / temperature, count, count, request))


def merge(lists: WinnerLists, scale, count: int, request: Request) -> tuple[Candidates, Normalizer]:
    """Merges the `count` lists of each row, in several launches if needed. Returns winners and normalizers of the rows.

    The lists of row 0 come first. A single list per row is final already. `scale` is 1 / temperature, (1,) or (rows,).
    """
    while count > 1:
        fan_in = min(count, lists_per_merge(request.k))
        lists = _launch(lists, scale, count, fan_in, request)
        count = -(-count // fan_in)
    return results(lists)


def results(lists: WinnerLists) -> tuple[Candidates, Normalizer]:
    """Returns the winners (rows, k) and the normalizers (rows, 1), if each row has one final list."""
    return Candidates(lists.values, lists.indices), Normalizer(lists.m[:, None], lists.d[:, None])


def _launch(lists: WinnerLists, scale, count: int, fan_in: int, request: Request) -> WinnerLists:
    """Merges groups of `fan_in` of the `count` lists of a row, each into one. The last group may have fewer."""
    k = request.k
    rows, merges = len(lists.m) // count, -(-count // fan_in)
    final = merges == 1
    capacity = power_of_two(fan_in * k, 2 * WARPGROUP)

    def topk_merge(
        lists_gmem, scale_gmem, *merged_gmem, best_smem, buckets_smem, counts_smem, candidates_smem
    ):
        row = lax.axis_index("row")
        number = jnp.int32(0) if final else lax.axis_index("merge")
        first = number * fan_in
        held = jnp.minimum(fan_in, count - first)
        row_scale = scale_gmem[row if scale.size > 1 else 0]
        load = functools.partial(blocks.load_from_row, row=row, start=first, held=held)
        lane = Normalizer(load(lists_gmem.m, fill=-jnp.inf), load(lists_gmem.d, fill=0.0))
        normalizer = online.combine_lanes(lane, scale=row_scale)
        refs = {"candidates": candidates_smem, "ranked": best_smem}
        refs |= {"keys": lists_gmem.values, "indices": lists_gmem.indices}
        if interpret():
            keys, number_in_row = lists_gmem.values[row], jnp.arange(count * k)
            inside = (number_in_row >= first * k) & (number_in_row < (first + held) * k)
            sort_winners(best_smem, keys, lists_gmem.indices[row], inside, k)
        elif final and fan_in <= SEARCHED_LISTS and fan_in * k <= SEARCHED_WINNERS:
            insert_ptx(search_lists_program(fan_in, k), refs, {"row": row})
        else:
            refs |= {"counts": counts_smem, "buckets": buckets_smem}
            bound = _bound(lists_gmem.values, row, first, held, k)
            program = rank_lists_program(count * k, capacity, k, jnp.dtype(request.logits_dtype))
            insert_ptx(program, refs, {"row": row, "first": first * k, "n": held * k, "bound": bound})
        merged, number = WinnerLists(*merged_gmem), row * merges + number
        write_winners(merged, number, best_smem, normalizer, row_scale, request, final)

    return gpu_kernel(
        topk_merge,
        grid={"row": rows} if final else {"row": rows, "merge": merges},
        out_type=lists_type(rows * merges, request, final),
        scratch_types={
            "best_smem": plgpu.SMEM((2 * padded_winners(k),), jnp.int32),
            "buckets_smem": plgpu.SMEM((capacity,), jnp.int32),
            "counts_smem": plgpu.SMEM((WARPGROUP,), jnp.int32),
            "candidates_smem": plgpu.SMEM((2 * capacity,), jnp.int32),
        },
        approximate=True,
    )(WinnerLists(*(a.reshape(rows, -1) for a in lists)), scale)


def _bound(keys_gmem, row, first, held, k: int):
    """Returns a key that at least k keys reach in lists `first` to `first + held - 1` of a row.

    Thread t looks at list first + t. There are at most as many lists as threads.
    """
    load = functools.partial(blocks.load_from_row, keys_gmem, row=row, held=held, stride=k, fill=0)
    share = load(start=first * k + (k + held - 1) // held - 1)
    last = load(start=first * k + k - 1)
    listed = blocks.positions() < held
    least_share = jnp.min(jnp.where(listed, share, _INT_MAX))
    return jnp.maximum(least_share, jnp.max(jnp.where(listed, last, _INT_MIN)))
