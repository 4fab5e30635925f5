"""The kernel that merges lists of winners of a row: lists of its parts, or of its shards on several devices.

A CTA merges up to `lists_per_merge(k)` lists. They lie in device memory one after another, and each is in order:

    list 0                list 1                list 2          n = 3 lists of k keys
    | a0 a1 a2 ... |      | b0 b1 b2 ... |      | c0 c1 ... |   a0 >= a1 >= ..., b0 >= b1 >= ...

A few lists are ranked by binary searches (`search_lists_program`). More lists are merged with a bound that at least k
keys reach, like a row in `window_kernel.py`. Two such keys are known:

  * Let s be k / n, rounded up. The n lists have at least k keys at ranks 1 to s. All of them reach the smallest key at
    rank s.
  * The list with the largest key at rank k has k keys that reach it.

The bound is the greater of these two keys. The keys that reach it are put in order, and the k best are the new list.

A winner's rank is the number of better winners in all lists. A binary search counts them in each list. For k = 4:

    lists     9 6 5 2 | 8 7 5' 1        5' has the larger index, so 5 is better
    rank      0 3 4 6 | 1 2 5  7        6: one better winner in its own list, two in the other
    ranked    9 8 7 6

The operands of both PTX programs:

    <keys>, <indices>       (rows, all winners of a row) int32, device memory
    <row>                   the number of the row
    <candidates>            shared memory for the winners that are ranked
    <ranked>                the k best, see `CandidateList`
    <first>, <n>            with a bound: the first winner in the row, and the number of winners
    <bound>                 with a bound: a key that at least k of them reach
    <counts>, <buckets>     with a bound: scratch in shared memory
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import power_of_two
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.topk.candidates import (
    CANDIDATE_BYTES,
    LOADED_AT_ONCE,
    CandidateList,
    Request,
    WinnerLists,
    candidate_of,
    clear,
    lists_type,
    sort_winners,
    store_winners,
    write_winners,
)
from pallas_softmax._src.topk.plan import SEARCHED_LISTS, SEARCHED_WINNERS, lists_per_merge, padded_winners
from pallas_softmax._src.topk.ranking_ptx import rank
from pallas_softmax._src.topk.xla import TopK

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


def topk_merge(
    count: int, fan_in: int, request: Request, lists_gmem, scale_gmem, *merged_gmem, **smem
) -> None:
    """The kernel: merges up to `fan_in` of the `count` lists of a row into one."""
    memory = _Memory(**smem)
    group = _group(count, fan_in)
    final = fan_in >= count  # whether the merged list is the only one of the row
    scale = scale_gmem[group.row if scale_gmem.shape[0] > 1 else 0]

    normalizer = _combine_normalizers(lists_gmem, group, scale)
    _rank(lists_gmem, memory, group, request, final and _searched(fan_in, request.k))
    number = group.row * -(-count // fan_in) + group.number
    write_winners(WinnerLists(*merged_gmem), number, memory.best, normalizer, scale, request, final)


class _Memory(NamedTuple):
    """References to the shared memory of a CTA."""

    best: Any  # int32, the merged list: keys, then indices from padded_winners(k) on
    buckets: Any  # int32, one word for each candidate
    counts: Any  # (128,) int32
    candidates: Any  # int32, two words for each candidate


class _Group(NamedTuple):
    """The lists that a CTA merges: `held` lists of a row, from number `first` on. They become its list `number`."""

    row: Any
    first: Any
    held: Any
    number: Any


def _group(count: int, fan_in: int) -> _Group:
    """Returns the lists that this CTA merges."""
    row = lax.axis_index("row")
    number = jnp.int32(0) if fan_in >= count else lax.axis_index("merge")
    first = number * fan_in
    return _Group(row, first, jnp.minimum(fan_in, count - first), number)


def _combine_normalizers(lists_gmem: WinnerLists, group: _Group, scale) -> Normalizer:
    """Returns the combined normalizers of the lists. Thread t loads the one of list t."""
    load = functools.partial(blocks.load_from_row, row=group.row, start=group.first, held=group.held)
    lane = Normalizer(load(lists_gmem.m, fill=-jnp.inf), load(lists_gmem.d, fill=0.0))
    return normalizers.combine_lanes(lane, scale=scale)


def _searched(fan_in: int, k: int) -> bool:
    """Returns whether so few lists are ranked by binary searches."""
    return fan_in <= SEARCHED_LISTS and fan_in * k <= SEARCHED_WINNERS


def _rank_in_jax(lists_gmem: WinnerLists, memory: _Memory, group: _Group, request: Request, searched) -> None:
    k, keys = request.k, lists_gmem.values[group.row]
    at = jnp.arange(keys.shape[0])
    inside = (at >= group.first * k) & (at < (group.first + group.held) * k)
    sort_winners(memory.best, keys, lists_gmem.indices[group.row], inside, k)


@twin(_rank_in_jax)
def _rank(lists_gmem: WinnerLists, memory: _Memory, group: _Group, request: Request, searched: bool) -> None:
    """Writes the k best of the lists to `memory.best`, in order. `searched`: by binary searches, else by a bound."""
    k, winners = request.k, lists_gmem.values.shape[1]
    refs = {"candidates": memory.candidates, "ranked": memory.best}
    refs |= {"keys": lists_gmem.values, "indices": lists_gmem.indices}
    if searched:
        insert_ptx(search_lists_program(winners // k, k), refs, {"row": group.row})
        return
    refs |= {"counts": memory.counts, "buckets": memory.buckets}
    bound = _bound(lists_gmem.values, group.row, group.first, group.held, k)
    capacity = memory.buckets.shape[0]
    program = rank_lists_program(winners, capacity, k, jnp.dtype(request.logits_dtype))
    insert_ptx(
        program, refs, {"row": group.row, "first": group.first * k, "n": group.held * k, "bound": bound}
    )


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


# --- Launches -----------------------------------------------------------------------------------------


def merge_rows(won, kept, indices, parts: Normalizer, temperature, k: int, *, log, dtype):
    """Merges the winners of several devices in one launch. Returns the k best and the normalizers of the whole rows.

    Each device's shard of the row has a list of k winners: their logits `won` in float32, their mask `kept` or None,
    and their indices in the row, all (rows, lists * k). `parts` are the normalizers of the shards, (rows, lists).
    `window_kernel.topk_rows` documents the other arguments and the results.
    """
    keys = sort_keys.key32(won)
    if kept is not None:
        keys = jnp.where(kept, keys, sort_keys.lowest_key(won.dtype))
    request = Request(k, won.dtype, kept is not None, log, dtype)
    lists = WinnerLists(keys, indices, parts.m.reshape(-1), parts.d.reshape(-1))
    count = parts.m.shape[1]
    return results(_launch(lists, 1 / temperature, count, count, request))


def merge_lists(lists: WinnerLists, scale, count: int, request: Request) -> tuple[TopK, Normalizer]:
    """Merges the `count` lists of each row, in several launches if needed. Returns winners and normalizers of the rows.

    The lists of row 0 come first. A single list per row is final already. `scale` is 1 / temperature, (1,) or (rows,).
    """
    while count > 1:
        fan_in = min(count, lists_per_merge(request.k))
        lists = _launch(lists, scale, count, fan_in, request)
        count = -(-count // fan_in)
    return results(lists)


def results(lists: WinnerLists) -> tuple[TopK, Normalizer]:
    """Returns the winners (rows, k) and the normalizers (rows, 1), if each row has one final list."""
    return TopK(lists.values, lists.indices), Normalizer(lists.m[:, None], lists.d[:, None])


def _launch(lists: WinnerLists, scale, count: int, fan_in: int, request: Request) -> WinnerLists:
    """Merges groups of `fan_in` of the `count` lists of a row, each into one. The last group may have fewer."""
    k, rows, merges = request.k, len(lists.m) // count, -(-count // fan_in)
    capacity = power_of_two(fan_in * k, 2 * WARPGROUP)
    return gpu_kernel(
        functools.partial(topk_merge, count, fan_in, request),
        grid={"row": rows} if merges == 1 else {"row": rows, "merge": merges},
        out_type=lists_type(rows * merges, request, final=merges == 1),
        scratch_types={
            "best": plgpu.SMEM((2 * padded_winners(k),), jnp.int32),
            "buckets": plgpu.SMEM((capacity,), jnp.int32),
            "counts": plgpu.SMEM((WARPGROUP,), jnp.int32),
            "candidates": plgpu.SMEM((2 * capacity,), jnp.int32),
        },
        name="topk_merge",
        approximate=True,
    )(WinnerLists(*(a.reshape(rows, -1) for a in lists)), scale)


# --- Inline PTX that ranks the winners of several lists


@functools.lru_cache(maxsize=16)
def search_lists_program(lists: int, k: int) -> CtaProgram:
    """Returns the program that ranks a few lists. Each thread handles every 128th winner."""
    p = CtaProgram()
    candidates, ranked = p.operands("u32", "candidates", "ranked")
    turns = range(-(-lists * k // WARPGROUP))
    first = p.multiply_wide(p.operand("row", "u32"), lists * k)
    listed, *keys_and_indices = zip(*_load_winners(p, first, turns, lists * k))
    values = [candidate_of(p, key, index) for key, index in zip(*keys_and_indices)]
    own_candidate = p.at(candidates, p.thread, CANDIDATE_BYTES)
    for i, value in enumerate(values):
        p.store(own_candidate, value, offset=CANDIDATE_BYTES * WARPGROUP * i, when=listed[i])
    p.barrier()
    ranks = [p.var(0, "u32") for _ in turns]
    for number in range(lists):
        _add_better(p, candidates + CANDIDATE_BYTES * k * number, k, values, ranks)
    for value, rank_, is_listed in zip(values, ranks, listed):
        store_winners(p, ranked, [value], rank_, k, when=is_listed)
    p.barrier()
    return p


def _load_winners(
    p: CtaProgram, first: Value, turns: range, n: Value | int
) -> list[tuple[Value, Value, Value]]:
    """Loads winners thread + 128 i of n winners, for each turn i; `first` is the number of the first winner in <keys>.

    Returns for each turn whether there is such a winner, and its key and index.
    """
    own = first + p.convert(p.thread, "u64") << 2  # bytes
    listed = [p.thread + i * WARPGROUP < n for i in turns]
    keys, indices = (
        [
            p.load(own + at, "s32", offset=4 * WARPGROUP * i, when=is_listed, space="global")
            for i, is_listed in zip(turns, listed)
        ]
        for at in p.operands("u64", "keys", "indices")
    )
    return list(zip(listed, keys, indices))


def _add_better(p: CtaProgram, start: Value, k: int, values: list[Value], ranks: list[Value]) -> None:
    """Adds to each value's rank the number of greater entries in a sorted list of k at address `start`."""
    ends = [p.var(start) for _ in values]  # end of the entries that are known to be greater
    step = 1 << k.bit_length() - 1
    while step:
        last = start + CANDIDATE_BYTES * (k - step)
        for end, value in zip(ends, values):
            inside = end <= last
            other = p.load(end, "u64", offset=CANDIDATE_BYTES * (step - 1), when=inside)
            p.increase(end, CANDIDATE_BYTES * step, when=inside & (other > value))
        step //= 2
    for rank_, end in zip(ranks, ends):
        p.increase(rank_, (end - start) >> (CANDIDATE_BYTES.bit_length() - 1))


@functools.lru_cache(maxsize=16)
def rank_lists_program(winners: int, capacity: int, k: int, dtype: np.dtype) -> CtaProgram:
    """Returns the program that ranks the winners that reach a bound: at most `capacity` of them."""
    p = CtaProgram()
    candidates, counts, buckets, ranked = p.operands("u32", "candidates", "counts", "buckets", "ranked")
    clear(p, candidates, CANDIDATE_BYTES * capacity, counts)
    _collect_winners(p, winners, candidates, counts, capacity)
    n = p.load(counts, "u32")
    rank(p, CandidateList(candidates, n, capacity, buckets, ranked, k, dtype, None))
    return p


def _collect_winners(p: CtaProgram, winners: int, candidates: Value, counts: Value, capacity: int) -> None:
    """Loads every 128th winner per thread, eight at a time, and appends the winners that reach <bound> to the list."""
    row, first, n = p.operands("u32", "row", "first", "n")
    bound, each = p.operand("bound", "s32"), capacity // WARPGROUP
    number = p.multiply_wide(row, winners) + p.convert(first, "u64")
    for start in range(0, each, LOADED_AT_ONCE):
        turns = range(start, min(start + LOADED_AT_ONCE, each))
        for is_listed, key, index in _load_winners(p, number, turns, n):
            with p.when(is_listed & (key >= bound)):
                entry = p.take_from(counts, 1)
                p.store(p.at(candidates, entry, CANDIDATE_BYTES), candidate_of(p, key, index))
    p.barrier()
