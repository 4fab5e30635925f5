"""The kernel of softmax fused with top-k for longer rows, with each row or part of a row in a CTA's shared memory.

The logits are read once from device memory. An example of how a CTA finds the k best of its part, for k = 3 and groups
of 4. A group has elements of one thread only; here the groups are drawn side by side:

    load        5 1 0 2 | 3 9 4 1 | 0 2 2 1 | 8 6 7 3 | 1 0 1 0     each thread adds its elements to its normalizer,
    group_keys     5         9         2         8         1        and keeps the largest key of each of its groups

    bound       5, about the 3rd largest of the group_keys: three groups have an element >= 5, so the three
                best elements of all are >= 5

    collect     5 | 9 | 8 6 7     the candidates: the elements >= 5. Only groups with group_keys >= 5 are searched.

    rank        9 8 7             the 3 best of the candidates, in order

Random logits have up to about 1.6 k candidates. Their count reveals failure. Then `_exact_bound` counts all elements:
first at the same bound, because ties are the usual cause, then by bisection over the keys. There are two kinds of
failure:

  * More elements reach the bound than the list has room for, or more groups than `hits` has room for. Either many
    elements are equal, or the best ones are concentrated in a few groups.
  * Fewer than k elements reach the bound. One cause is that group maxima count a NaN as the highest key, and a masked
    element as -inf, while the elements' own keys may be lower. The other cause is a large k. The bound is then one that
    about 1.4 k elements should reach (`plan.bound_rank`). If many groups share the best elements, fewer than k do.

The bisection counts over all elements. It ends as soon as at least k elements reach the bound, and one more condition
holds: the elements that reach the bound fit into the list, or fewer than k exceed it.

    key     low                 middle                high
             |--------------------|--------------------|         at least k elements reach low,
             >= k elements        how many?            < k       fewer than k reach high + 1

If they fit, the elements that reach the bound are the candidates. Otherwise there are ties at the bound. Then the
candidates are the elements above it, fewer than k, and the ties with the lowest indices, to make k.

If rows have several parts, `merge_kernel.py` merges winners and normalizers. `layout.Window` has a drawing of windows,
blocks, steps and groups, and `gpu/ptx/ranking.py` of the list of candidates.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import blocks, window_arrival
from pallas_softmax._src.gpu.hardware import WARPGROUP, WARPS
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Window, aligned_view
from pallas_softmax._src.gpu.ptx import ranking
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.gpu.window_arrival import WindowPart
from pallas_softmax._src.normalizers import Normalizer, Scale
from pallas_softmax._src.softmax import states_ptx
from pallas_softmax._src.topk import candidates_ptx, merge_kernel
from pallas_softmax._src.topk.candidates_ptx import SCRATCH_BYTE, WindowProgram
from pallas_softmax._src.topk.merge_kernel import Request, WinnerLists, lists_type, write_winners
from pallas_softmax._src.topk.plan import REDUCTION_BYTES, bound_rank, group_words, listed_items, ordering_words
from pallas_softmax._src.topk.xla import TopK


def softmax_topk(
    window: Window, mask: Mask | None, request: Request, x_gmem, scale_gmem, mask_gmem, *lists_gmem, **smem
) -> None:
    """The kernel: a CTA holds a row, or a part of a row, in shared memory. It writes the winners and the normalizer."""
    part = window_arrival.part_of(window, x_gmem, mask, mask_gmem)
    group_keys, counts = split(smem["groups"], group_words(window, request.k), WARPGROUP)
    candidates, hits = split(smem["lists"], *listed_items(window, request.k))
    memory = SearchMemory(smem["x"], group_keys, candidates, hits, counts)
    scale = request.scale(scale_gmem, part.place.row)

    normalizer = _load_and_reduce(window, part, memory, smem["arrived"], scale)  # also writes the group_keys
    ranked_smem = _find_winners(window, memory, part, request.k)  # bound, collect, rank
    number = part.place.row * window.count + part.place.index  # of the list
    final = window.count == 1  # no merge follows: write values instead of keys
    write_winners(WinnerLists(*lists_gmem), number, ranked_smem, normalizer, scale, request, final)


class SearchMemory(NamedTuple):
    """References to shared memory. `plan.listed_items` has the lengths of `candidates` and `hits`."""

    # (window.smem_size,), the elements of the part, and -inf after them. Masked elements are floats of the lowest key.
    x: Any
    # int32, the largest key of each group. A NaN counts as the highest key. Later the winners, unless compact.
    group_keys: Any
    candidates: Any  # the list of candidates, int32; in a compact window a list of positions, int16
    hits: Any  # scratch of the same dtype: the numbers of the groups that reach the bound
    counts: Any  # (128,) int32: the numbers of candidates and of groups in `hits`; the rest is scratch


def topk_rows(x, mask: Mask | None, temperature, plan: Window, request: Request) -> tuple[TopK, Normalizer | None]:
    """Returns the k best of each row, (rows, k), and the normalizers (rows, 1), or None without a temperature.

    x has the logits, (rows, vocab). The temperature is (1,) or (rows,).
    """
    (rows, vocab), k = x.shape, request.k
    scale = None if temperature is None else normalizers.encoded_scale(temperature)
    lists = gpu_kernel(
        functools.partial(softmax_topk, plan, mask, request),
        grid={"row": rows, "part": plan.count},
        out_type=lists_type(rows * plan.count, request, final=plan.count == 1),
        scratch_types={
            "groups": plgpu.SMEM((group_words(plan, k) + WARPGROUP,), jnp.int32),
            "arrived": plgpu.Barrier(num_barriers=max(1, len(plan.copies()))),
            "lists": plgpu.SMEM((sum(listed_items(plan, k)),), jnp.int16 if plan.compact else jnp.int32),
            "x": plgpu.SMEM((plan.smem_size,), x.dtype),
        },
        name="softmax_topk" if request.normalized else "top_k",
        reduction_bytes=REDUCTION_BYTES,
    )(x.reshape(aligned_view(rows, vocab, plan.vec)), scale, None if mask is None else mask.array)
    return merge_kernel.merge_lists(lists, scale, plan.count, request)


def _load_and_reduce(window: Window, part: WindowPart, memory: SearchMemory, arrived, scale) -> Normalizer | None:
    """Copies the part to shared memory, and reduces each step once it has arrived: writes the group_keys.

    Returns the normalizer of the part; None without a scale.
    """
    window_arrival.start_copies(window, part, memory.x, arrived)
    window_arrival.fill_tail(window, part, memory.x)
    _clear_list(memory)

    def take_step(i, carry, count, copied):
        lane, keep = carry
        # Its loads are in flight during this step.
        next_keep = window_arrival.mask_of_step(window, part, i + 1)
        if window.shifted:  # the step ends in the next copy
            pl.when(i + 1 < len(window.copies()))(lambda: plgpu.barrier_wait(arrived.at[i + 1]))
        elif copied:
            plgpu.barrier_wait(arrived.at[i])
        if part.mask is not None:
            if window.shifted:  # a thread may still read a word that this masks, with the last element before it
                plgpu.commit_smem()
            window_arrival.mask_step(window, part, memory.x, i, [*keep[:count]])
            if window.shifted:  # other threads read what this masks
                plgpu.commit_smem()
        return _add_step(window, memory, i, count, lane, scale, part), next_keep

    if window.shifted and window.copies():
        plgpu.barrier_wait(arrived.at[0])
    lane = None if scale is None else Normalizer(*[blocks.filled(x) for x in (-jnp.inf, 0)])
    carry = lane, window_arrival.mask_of_step(window, part, 0)
    if window.full:
        full_step = functools.partial(take_step, count=window.step_blocks, copied=True)
        carry = lax.fori_loop(0, window.full, full_step, carry)
    if window.rest:
        carry = take_step(jnp.int32(window.full), carry, window.rest, len(window.copies()) > window.full)
    lane, _ = carry
    return None if lane is None else normalizers.combine_lanes(lane, scale=scale)


@twin
def _clear_list(memory: SearchMemory) -> None:
    p, size = CtaProgram(), memory.candidates.shape[0] * jnp.dtype(memory.candidates.dtype).itemsize
    ranking.clear(p, p.operand("candidates", "u32"), size, p.operand("counts", "u32"))
    insert_ptx(p, {"candidates": memory.candidates, "counts": memory.counts})


@twin
def _add_step(
    window: Window, memory: SearchMemory, step, count: int, lane: Normalizer | None, scale, part: WindowPart
) -> Normalizer | None:
    """Adds each thread's elements of a step of `count` blocks to its normalizer, and writes the step's group_keys.

    All elements of a thread share one rescaling of d:

    new_m = max(m, x...)                                max ignores a NaN; the NaN still makes d NaN
    s     = 0 if new_m is -inf, else new_m              so that -inf - s is -inf, not NaN
    new_d = d * 2^((m - s) a) + sum of 2^((x - s) a)

    `lane` has the normalizer of each thread (128,) before the step; None if nothing is normalized. a is log2(e) /
    temperature; a `Scale` has three factors, the first for m, x and s. If there is a mask, elements with the lowest key
    count as -inf.
    """
    element, p, masked = Elements(memory.x.dtype), Program(), part.mask is not None
    thread, step_, x_at, keys_at = p.operands("u32", "thread", "step", "x", "group_keys")
    block_bytes = window.block_size * element.itemsize
    keys_of_step = window.step_blocks // window.group_blocks * WARPGROUP
    x_at = p.at(p.at(x_at, step_, window.step_blocks * block_bytes), thread, window.run * element.itemsize)
    keys_at = p.at(p.at(keys_at, step_, 4 * keys_of_step), thread, 4)
    shift = p.operand("shift", "u32") if window.shifted else None
    vectors = element.vectors(p, [x_at + b * block_bytes for b in range(count)], shift, 4 * WARPGROUP)
    # If some elements are masked, their floats differ from the words.
    floats = [element.floats(p, words, marked=True) for words in vectors] if masked else None
    largest = []
    for i, start in enumerate(range(0, count, window.group_blocks)):
        group = slice(start, start + window.group_blocks)
        value, key = element.best(p, sum(vectors[group], []), sum(floats[group], []) if floats else None)
        p.store(keys_at, key, offset=i * 4 * WARPGROUP)
        largest.append(value)
    refs = {"x": memory.x, "group_keys": memory.group_keys}
    if lane is None:
        insert_ptx(p, refs, {"step": step, "shift": part.shift})
        return None
    m, d, new_m, new_d = p.operands("f32", "m", "d", "new_m", "new_d")
    p.set(new_m, p.max(p.reduce("max", largest), m))
    scaled = isinstance(scale, Scale)
    s = states_ptx.shift(p, scaled, new_m)

    def exponential(x):
        return p.exp2(states_ptx.octaves(p, scaled, x, s))

    terms = []
    for b, words in enumerate(vectors):
        for x in floats[b] if floats else element.floats(p, words, marked=False):
            terms.append(exponential(x))
    p.set(new_d, p.multiply_add(d, exponential(m), p.reduce("add", terms)))
    numbers = {"m": lane.m, "d": lane.d, "step": step, "shift": part.shift, **states_ptx.factors(scale)}
    return Normalizer(*insert_ptx(p, refs, numbers, {"new_m": "f32", "new_d": "f32"}))


@twin
def _find_winners(window: Window, memory: SearchMemory, part: WindowPart, k: int):
    """Puts the k best of the part in order. Returns a reference to them (`put_in_shared_memory`)."""
    program = search_program(window, jnp.dtype(memory.x.dtype), k)
    insert_ptx(program, memory._asdict(), {"owned": part.place.owned, "start": part.place.start, "shift": part.shift})
    return split(memory.x, *ordering_words(k))[2] if window.compact else memory.group_keys


def split(ref, *sizes: int) -> list:
    return [ref.at[pl.ds(end - size, size)] for size, end in zip(sizes, itertools.accumulate(sizes))]


# --- The PTX program of the search: `candidates_ptx` has the bound and the candidates, `ranking` their order


@functools.lru_cache(maxsize=16)
def search_program(window: Window, dtype: np.dtype, k: int) -> WindowProgram:
    """Returns the program. The k best go to <group_keys>; if compact, to the last array of `ordering_words` in <x>."""
    p = WindowProgram(window, dtype, k)
    lowest = sort_keys.lowest_key(dtype)
    bound_at = bound_rank(window, k, p.capacity)
    all_keys = p.var(lowest, "s32"), p.var(~lowest, "s32")
    bound, highest = candidates_ptx.find_bound(p, bound_at) if window.groups >= bound_at else all_keys
    candidates_ptx.collect(p, bound)
    n = p.var(p.load(p.counts, "u32"))
    with p.when((n < k) | (n > p.capacity)):
        _find_exactly(p, bound, highest, n)
    if window.compact:  # the list replaces the row
        words, bucket_words, _ = ordering_words(k)
        buckets = p.x + 4 * words
        ranked = buckets + 4 * bucket_words
        room = p.x, n, words // 2, buckets, ranked
    else:
        ranked = p.group_keys
        room = p.candidates, n, p.capacity, p.hits, ranked
    put = merge_kernel.put_in_shared_memory(p, ranked, k)
    listed = ranking.CandidateList(p, *room, put, k, dtype, window.vocab)
    if window.compact:
        candidates_ptx.expand_positions(p, listed)
    listed.rank()
    return p


def _find_exactly(p: WindowProgram, failed: Value, highest: Value, n: Value) -> None:
    """Collects again with an exact bound, and sets `n`."""
    bound, reach, exceed = _exact_bound(p, failed, highest)
    all_fit = p.var(reach <= p.capacity)
    ranking.clear(p, p.candidates, p.list_bytes, p.counts)
    with p.when(all_fit | (exceed > 0)):
        candidates_ptx.collect(p, p.select(all_fit, bound, bound + 1), all_groups=True)
    with p.when(~all_fit):
        candidates_ptx.collect_ties(p, bound, exceed)
    p.set(n, p.select(all_fit, reach, p.k).bits("u32"))


def _exact_bound(p: WindowProgram, failed: Value, highest: Value) -> tuple[Value, Value, Value]:
    """Returns an exact bound, how many elements reach it, and how many exceed it. No element exceeds `highest`.

    Most failures are ties at the bound that failed, so it is tried first. If fewer than k elements reach it, there are
    NaNs, or masked elements, which have the lowest key. If at least k exceed it, bisection finds a higher bound.
    """
    nan, lowest = sort_keys.key_of_number(np.nan, p.element.dtype), sort_keys.lowest_key(p.element.dtype)
    bound, high, turn = p.var(failed), p.var(highest), p.var(0, "u32")
    with p.loop() as leave:
        reach, exceed = _count(p, bound, turn)
        p.increase(turn, 1)
        leave(reach >= p.k)
        p.set(high, bound - 1)
        p.set(bound, p.select(bound > nan, nan, lowest, "s32"))
    with p.loop() as leave:
        leave((reach <= p.capacity) | (exceed < p.k))
        gap = (high - bound).bits("u32")  # it may exceed 2^31
        middle = bound + ((gap >> 1) + (gap & 1)).bits("s32")
        reach_middle, exceed_middle = _count(p, middle, turn)
        enough = reach_middle >= p.k
        for register, found in ((bound, middle), (reach, reach_middle), (exceed, exceed_middle)):
            p.set(register, found, when=enough)
        p.set(high, middle - 1, when=~enough)
        p.increase(turn, 1)
    return bound, reach, exceed


def _count(p: WindowProgram, bound: Value, turn: Value) -> tuple[Value, Value]:
    """Returns how many elements of the part reach the bound, and how many exceed it. `turn` numbers the calls.

    Skips a group if its largest key is below the bound.
    """
    window, element = p.window, p.element
    reach, exceed = p.var(0, "s32"), p.var(0, "s32")
    address, group = p.at(p.x, p.thread, window.run * element.itemsize), p.at(p.group_keys, p.thread, 4)
    blocks_left = p.var(window.blocks, "u32")
    with p.repeat() as next_group:
        largest = p.load(group, "s32")
        blocks = p.min(blocks_left, window.group_blocks)
        p.update(blocks_left, "sub", blocks)
        with p.block() as counted:
            with p.when(largest < bound):
                p.set(address, p.at(address, blocks, p.block_bytes))
                counted()
            with p.repeat() as next_block:
                for key in element.keys(p.vectors(address)):
                    p.increase(reach, 1, when=key >= bound)
                    p.increase(exceed, 1, when=key > bound)
                p.increase(address, p.block_bytes)
                p.update(blocks, "sub", 1)
                next_block(blocks.differs(0))
        p.increase(group, 4 * WARPGROUP)
        next_group(blocks_left.differs(0))
    counts = [p.over_lanes("add", reach), p.over_lanes("add", exceed)]
    # Calls alternate between two parts of the scratch, so that each needs one barrier only.
    scratch = p.at(p.counts + SCRATCH_BYTE, turn & 1, 2 * 4 * WARPS)
    reaches, exceeds = p.of_warps(counts, scratch, lane=0)
    # Positions outside the part hold -inf, and are counted as well.
    around, neg_inf = window.size - p.owned, sort_keys.key_of_number(-np.inf, element.dtype)
    outside_reach = p.select(bound <= neg_inf, around, 0)
    outside_exceed = p.select(bound < neg_inf, around, 0)
    return p.reduce("add", reaches) - outside_reach, p.reduce("add", exceeds) - outside_exceed
