"""The merge of lists of winners of a row: those of its parts, or those of its shards on several devices.

A CTA merges up to `lists_per_merge(k)` lists, which lie in device memory one behind the other, each in order:

    list 0                list 1                list 2          n = 3 lists of k keys
    | a0 a1 a2 ... |      | b0 b1 b2 ... |      | c0 c1 ... |   a0 >= a1 >= ..., b0 >= b1 >= ...

Few lists are put in order by binary searches (`lists_ptx.py`). Of more, the k best are found as those of a row are
(`window_kernel.py`): by a bound that at least k keys reach. If s is k / n, rounded up, then the first s keys of each
list are k keys or more, so at least k keys reach the smallest of the keys number s. At least k keys also reach the
largest of the keys number k, since one list has k of them. The greater of the two is the bound; the keys that reach it
are put in order, and the k best are the new list.
"""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax._src.gpu import blocks, sort_keys
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import power_of_two
from pallas_softmax._src.topk import selection
from pallas_softmax._src.topk.plan import lists_per_merge, padded_winners, searches_lists
from pallas_softmax._src.topk.winners import Request, WinnerLists, lists_type, write_winners
from pallas_softmax.online import Candidates, Normalizer

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


def merge_rows(won, kept, indices, parts: Normalizer, temperature, k: int, *, log, dtype, interpret=None):
    """Returns the k best of the winners of several devices, and the normalizers of the whole rows, in one launch.

    Args:
      won: (rows, lists * k) float32, logits of the winners of each device's shard of the row.
      kept: the mask of these, or None.
      indices: (rows, lists * k) int32, their indices in the row.
      parts: the normalizers of the shards, (rows, lists).
      temperature: float32, (1,) or (rows,).
      k: number of winners.
      log: whether to return logs of probabilities.
      dtype: that of the values.
      interpret: as for `pallas_call`.

    Returns:
      Candidates (rows, k), and the normalizers (rows, 1).
    """
    keys = sort_keys.key(won)
    if kept is not None:
        keys = jnp.where(kept, keys, sort_keys.lowest_key(won.dtype))
    request = Request(k, won.dtype, kept is not None, log, dtype, interpret)
    lists = WinnerLists(keys, indices, parts.m.reshape(-1), parts.d.reshape(-1))
    count = parts.m.shape[1]
    return results(_launch(lists, 1 / temperature, count, count, request))


def merge(lists: WinnerLists, scale, count: int, request: Request) -> tuple[Candidates, Normalizer]:
    """Returns winners and normalizers of the rows, each of which has `count` lists, by as many launches as it takes.

    Args:
      lists: those of row 0, then those of row 1, ...; of one list a row, what is returned.
      scale: 1 / temperature, (1,) or (rows,).
      count: number of lists of a row.
      request: what the call asks for.
    """
    while count > 1:
        fan_in = min(count, lists_per_merge(request.k))
        lists = _launch(lists, scale, count, fan_in, request)
        count = -(-count // fan_in)
    return results(lists)


def results(lists: WinnerLists) -> tuple[Candidates, Normalizer]:
    """Returns the winners (rows, k) and the normalizers (rows, 1) of one final list a row."""
    return Candidates(lists.values, lists.indices), Normalizer(lists.m[:, None], lists.d[:, None])


def _launch(lists: WinnerLists, scale, count: int, fan_in: int, request: Request) -> WinnerLists:
    """Merges each `fan_in` of the `count` lists of a row into one; the last merge of a row may have fewer."""
    k, interpret = request.k, request.interpret
    rows, merges = len(lists.m) // count, -(-count // fan_in)
    final = merges == 1
    slots = power_of_two(fan_in * k, 2 * WARPGROUP)

    def topk_merge(
        lists_gmem,
        scale_gmem,
        values_gmem,
        indices_gmem,
        m_gmem,
        d_gmem,
        *,
        best_smem,
        buckets_smem,
        counts_smem,
        slots_smem,
    ):
        row = lax.axis_index("row")
        number = jnp.int32(0) if final else lax.axis_index("merge")
        first = number * fan_in
        held = jnp.minimum(fan_in, count - first)
        row_scale = scale_gmem[row if scale.size > 1 else 0]
        load = functools.partial(blocks.load_from_row, row=row, start=first, held=held, interpret=interpret)
        lane = Normalizer(load(lists_gmem.m, fill=-jnp.inf), load(lists_gmem.d, fill=0.0))
        normalizer = online.across(lane, scale=row_scale)
        if final and searches_lists(fan_in, k):
            selection.rank_lists(
                slots_smem,
                best_smem,
                lists_gmem.values,
                lists_gmem.indices,
                row,
                fan_in,
                k,
                interpret=interpret,
            )
        else:
            selection.clear(slots_smem, counts_smem, interpret=interpret)
            bound = _bound(lists_gmem.values, row, first, held, k, interpret)
            selection.collect_winners(
                slots_smem, counts_smem, lists_gmem.values, lists_gmem.indices, row, first * k, held * k, bound,
                interpret=interpret,
            )  # fmt: skip
            n, dtype = counts_smem[0], request.logits_dtype
            selection.rank(slots_smem, n, buckets_smem, best_smem, k, dtype, None, interpret=interpret)
        write_winners(
            WinnerLists(values_gmem, indices_gmem, m_gmem, d_gmem), row * merges + number,
            best_smem, normalizer, row_scale, request, final,
        )  # fmt: skip

    return gpu_kernel(
        topk_merge,
        grid={"row": rows} if final else {"row": rows, "merge": merges},
        out_type=lists_type(rows * merges, request, final),
        scratch_types={
            "best_smem": plgpu.SMEM((2 * padded_winners(k),), jnp.int32),
            "buckets_smem": plgpu.SMEM((slots,), jnp.int32),
            "counts_smem": plgpu.SMEM((WARPGROUP,), jnp.int32),
            "slots_smem": plgpu.SMEM((2 * slots,), jnp.int32),
        },
        approximate=True,
        interpret=interpret,
    )(WinnerLists(*(a.reshape(rows, -1) for a in lists)), scale)


def _bound(keys_gmem, row, first, held, k: int, interpret):
    """Returns a key that at least k keys of `held` lists reach, from list number `first` of a row on.

    Thread t looks at list first + t; there are no more lists than threads.
    """
    load = functools.partial(
        blocks.load_from_row, keys_gmem, row=row, held=held, stride=k, fill=0, interpret=interpret
    )
    share = load(start=first * k + (k + held - 1) // held - 1)
    last = load(start=first * k + k - 1)
    thread = blocks.positions(interpret=interpret)
    listed = thread < held
    return jnp.maximum(
        jnp.min(jnp.where(listed, share, _INT_MAX)), jnp.max(jnp.where(listed, last, _INT_MIN))
    )
