"""The kernel that merges lists of winners of a row: lists of its parts, or of its shards on several devices.

A CTA merges up to `lists_per_merge(k)` lists. They lie in device memory one after another, and each is in order:

    list 0                list 1                list 2          n = 3 lists of k keys
    | a0 a1 a2 ... |      | b0 b1 b2 ... |      | c0 c1 ... |   a0 >= a1 >= ..., b0 >= b1 >= ...

The lists are merged with a bound that at least k keys reach, like a row in `window_kernel.py`. Two such keys are known:

  * Let s be k / n, rounded up. The n lists have at least k keys at ranks 1 to s. All of them reach the smallest key at
    rank s.
  * The list with the largest key at rank k has k keys that reach it.

The bound is the greater of these two keys. The keys that reach it are put in order, and the k best are the new list. If
a row has more lists than a CTA merges, the CTAs write fewer lists, and the next launch merges these.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.folding import fold_topk
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import cta_number, gpu_kernel, number_of_row
from pallas_softmax._src.gpu.layout import power_of_two
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.ranking import CANDIDATE_BYTES, LOADED_AT_ONCE, CandidateList, candidate_of, clear
from pallas_softmax._src.gpu.ptx.values import Condition, Value
from pallas_softmax._src.normalizers import Normalizer, Scale, encoded_scale, log_of_sum, scale_of
from pallas_softmax._src.topk.plan import lists_per_merge, padded_winners
from pallas_softmax._src.topk.xla import TopK

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Request:
    """The settings of a call of top-k, and the values of its winners."""

    k: int  # number of winners of a row
    logits_dtype: Any  # the keys order numbers of this dtype
    masked: bool  # whether there is a mask; then the lowest key means a masked element
    log: bool  # whether the values are logs of probabilities
    dtype: Any  # dtype of the values
    scaled: bool = False  # whether the temperature may differ from 1, and so may be 0
    normalized: bool = True  # whether the values are probabilities; if not, they are the winners as they are

    def scale(self, scales, row) -> Any:
        """Returns 1 / temperature of a row, a number or, if `scaled`, a `Scale`; None if nothing is normalized."""
        scale = number_of_row(scales, row)
        return scale_of(scale) if self.scaled and scale is not None else scale

    def values(self, key, normalizer: Normalizer | None, scale):
        """Returns the values of winners, in float32. d of the normalizer is the sum of exp((x - m) * scale).

        With a mask, the lowest key means a masked element, with probability 0 or logit -inf.
        """
        if normalizer is None:
            value, masked = sort_keys.from_key(key, self.logits_dtype), -jnp.inf
        else:
            scaled = normalizers.below(sort_keys.from_key32(key, self.logits_dtype), normalizer.m, scale)
            if isinstance(scale, Scale):  # at temperature 0, any negative number is -inf
                scaled = jnp.where(scale.is_limit & (scaled < 0), -jnp.inf, scaled)
            masked = -jnp.inf if self.log else 0.0
            value = scaled - log_of_sum(normalizer.d) if self.log else jnp.exp(scaled) / normalizer.d
        if not self.masked:
            return value
        return jnp.where(key == sort_keys.lowest_key(self.logits_dtype), jnp.full_like(value, masked), value)


def topk_merge(count: int, fan_in: int, request: Request, lists_gmem, scale_gmem, *merged_gmem, **smem) -> None:
    """The kernel: a CTA merges up to `fan_in` of the `count` lists of a row into one.

    The lists stay in device memory. Only the winners that reach the bound are copied to shared memory.
    """
    merges = -(-count // fan_in)
    row, merge = lax.axis_index("row"), cta_number("merge", merges)
    first = merge * fan_in  # this CTA merges `held` lists from here on
    held = jnp.minimum(fan_in, count - first)
    final = merges == 1  # the merged list is the only one of the row: write values instead of keys
    scale = request.scale(scale_gmem, row)

    normalizer = None
    if request.normalized:  # thread t loads the normalizer of list t
        load = functools.partial(blocks.load_from_row, row=row, start=first, held=held)
        lane = Normalizer(load(lists_gmem.m, fill=-jnp.inf), load(lists_gmem.d, fill=0.0))
        normalizer = normalizers.combine_lanes(lane, scale=scale)
    _rank(lists_gmem, smem, request, row, first, held)  # bound, collect, rank
    number = row * merges + merge  # of the merged list
    write_winners(WinnerLists(*merged_gmem), number, smem["best"], normalizer, scale, request, final)


class WinnerLists(NamedTuple):
    """Lists of k winners, the best first, and the normalizers of the rows or parts that they came from.

    Until the lists of a row are merged into one, `values` are the winners' keys (int32).
    """

    values: Any  # (lists, k)
    indices: Any  # (lists, k) int32, in the row
    m: Any = None  # (lists,) float32, the normalizers' maxima; None if nothing is normalized
    d: Any = None  # (lists,) float32, the normalizers' sums; None if nothing is normalized


@twin
def _rank(lists_gmem: WinnerLists, smem: dict[str, Any], request: Request, row, first, held) -> None:
    """Writes the k best of `held` lists, from number `first` on, to smem["best"]."""
    k, keys, capacity = request.k, lists_gmem.values, smem["buckets"].shape[0]
    refs = {"candidates": smem["candidates"], "ranked": smem["best"], "keys": keys}
    refs |= {"indices": lists_gmem.indices, "counts": smem["counts"], "buckets": smem["buckets"]}
    # The bound. Thread t looks at list first + t: there are at most as many lists as threads.
    load = functools.partial(blocks.load_from_row, keys, row=row, held=held, stride=k, fill=0)
    at_rank_s = load(start=first * k + (k + held - 1) // held - 1)
    last = load(start=first * k + k - 1)
    listed = blocks.positions() < held
    least_at_s = jnp.min(jnp.where(listed, at_rank_s, _INT_MAX))
    bound = jnp.maximum(least_at_s, jnp.max(jnp.where(listed, last, _INT_MIN)))
    numbers = {"row": row, "first": first * k, "n": held * k, "bound": bound}
    insert_ptx(rank_lists_program(keys.shape[1], capacity, k, jnp.dtype(request.logits_dtype)), refs, numbers)


def merge_rows(plan: None, won, kept, indices, parts, temperature, *, k, log, dtype, scaled=True):
    """Returns what `xla.merge` returns, for lists of k winners. It takes one launch."""
    x, _, temperature, unfold = fold_topk(won, None, temperature)
    kept, indices, *parts = jax.tree.map(lambda a: a.reshape(len(x), -1), (kept, indices, *parts))
    request = Request(k, x.dtype, kept is not None, log, dtype, scaled, bool(parts))
    keys = sort_keys.key32(x)
    if kept is not None:
        keys = jnp.where(kept, keys, sort_keys.lowest_key(x.dtype))
    scale = encoded_scale(temperature) if parts else None
    lists, count = WinnerLists(keys, indices, *(a.reshape(-1) for a in parts)), x.shape[1] // k
    return jax.tree.map(unfold, _results(_launch(lists, scale, count, count, request)))


def merge_lists(lists: WinnerLists, scale, count: int, request: Request) -> tuple[TopK, Normalizer | None]:
    """Merges the `count` lists of each row, in several launches if needed. The lists of row 0 come first.

    A single list per row is final already. `scale` is `normalizers.encoded_scale`.
    """
    while count > 1:
        fan_in = min(count, lists_per_merge(request.k))
        lists = _launch(lists, scale, count, fan_in, request)
        count = -(-count // fan_in)
    return _results(lists)


def _results(lists: WinnerLists) -> tuple[TopK, Normalizer | None]:
    normalizer = None if lists.m is None else Normalizer(lists.m[:, None], lists.d[:, None])
    return TopK(lists.values, lists.indices), normalizer


def _launch(lists: WinnerLists, scale, count: int, fan_in: int, request: Request) -> WinnerLists:
    k, rows, merges = request.k, lists.indices.size // (count * request.k), -(-count // fan_in)
    capacity = power_of_two(fan_in * k, 2 * WARPGROUP)
    return gpu_kernel(
        functools.partial(topk_merge, count, fan_in, request),
        grid={"row": rows, "merge": merges},
        out_type=lists_type(rows * merges, request, final=merges == 1),
        scratch_types={
            "best": plgpu.SMEM((2 * padded_winners(k),), jnp.int32),
            "buckets": plgpu.SMEM((capacity,), jnp.int32),
            "counts": plgpu.SMEM((WARPGROUP,), jnp.int32),
            "candidates": plgpu.SMEM((2 * capacity,), jnp.int32),
        },
        name="topk_merge",
    )(jax.tree.map(lambda a: a.reshape(rows, -1), lists), scale)


# --- Lists of winners, which other kernels write too


def put_in_shared_memory(p: Program, ranked: Value, k: int) -> Callable[..., None]:
    """Returns `CandidateList.put` that writes to the address `ranked`:

    <ranked>  | key of rank 0, 1, ... padded_winners(k) - 1 | index of rank 0, 1, ... |
    """

    def put(rank: Value, key: Value, index: Value, when: Condition) -> None:
        at = p.at(ranked, rank, 4)
        p.store(at, key, when=when)
        p.store(at, index, offset=4 * padded_winners(k), when=when)

    return put


def lists_type(lists: int, request: Request, final: bool) -> WinnerLists:
    values = jax.ShapeDtypeStruct((lists, request.k), request.dtype if final else jnp.int32)
    indices = jax.ShapeDtypeStruct((lists, request.k), jnp.int32)
    per_list = jax.ShapeDtypeStruct((lists,), jnp.float32) if request.normalized else None
    return WinnerLists(values, indices, per_list, per_list)


def write_winners(
    lists_gmem: WinnerLists, at, ranked, normalizer: Normalizer | None, scale, request: Request, final: bool
):
    """Writes ranked winners and the normalizer of their row, or part of a row, as list number `at`.

    `ranked` has the format of `put_in_shared_memory`. The winners' values are written if `final`, otherwise their keys.
    """
    k = request.k
    for first in range(0, k, WARPGROUP):
        key, index = (blocks.load(ranked.at[pl.ds(start, WARPGROUP)]) for start in (first, padded_winners(k) + first))
        if ranked.dtype != jnp.int32:  # `ranked` is in the memory of a float32 row
            key, index = (lax.bitcast_convert_type(a, jnp.int32) for a in (key, index))
        value = request.values(key, normalizer, scale) if final else key
        for gmem, block in ((lists_gmem.values, value), (lists_gmem.indices, index)):
            blocks.store_to_row(gmem, row=at, start=first, block=block, held=min(WARPGROUP, k - first))
    if normalizer is not None:
        lists_gmem.m[at], lists_gmem.d[at] = normalizer


@functools.lru_cache(maxsize=16)
def rank_lists_program(winners: int, capacity: int, k: int, dtype: np.dtype) -> CtaProgram:
    """Returns the program that ranks the winners that reach <bound>: at most `capacity` of them.

    <keys> and <indices> have the winners of all rows. This CTA merges <n> winners of row <row>, from <first> on.
    """
    p = CtaProgram()
    candidates, counts, buckets, ranked = p.operands("u32", "candidates", "counts", "buckets", "ranked")
    row, first, n = p.operands("u32", "row", "first", "n")
    bound, each = p.operand("bound", "s32"), capacity // WARPGROUP
    clear(p, candidates, CANDIDATE_BYTES * capacity, counts)
    number = p.multiply_wide(row, winners) + p.convert(first, "u64")
    for start in range(0, each, LOADED_AT_ONCE):
        turns = range(start, min(start + LOADED_AT_ONCE, each))  # a thread loads every 128th winner
        own = number + p.convert(p.thread, "u64") << 2  # bytes
        listed = [p.thread + i * WARPGROUP < n for i in turns]
        keys, indices = (
            [p.load(own + at, "s32", offset=4 * WARPGROUP * i, when=is_listed) for i, is_listed in zip(turns, listed)]
            for at in p.operands("u64", "keys", "indices")
        )
        for is_listed, key, index in zip(listed, keys, indices):
            with p.when(is_listed & (key >= bound)):
                entry = p.take_from(counts, 1)
                p.store(p.at(candidates, entry, CANDIDATE_BYTES), candidate_of(p, key, index))
    p.barrier()
    n = p.load(counts, "u32")
    put = put_in_shared_memory(p, ranked, k)
    CandidateList(p, candidates, n, capacity, buckets, ranked, put, k, dtype, None).rank()
    return p
