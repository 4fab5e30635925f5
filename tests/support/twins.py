"""Twins in plain JAX of the functions with inline PTX, layouts or clusters: Pallas's interpreter runs these instead.

A twin has its function's arguments and, in effect, its results. It may leave out what only PTX reads.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import INTERPRETER
from pallas_softmax._src.gpu.layout import merged_tile
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.route import xla as route_xla
from pallas_softmax._src.route.kernel import normalizer
from pallas_softmax._src.sample import xla
from pallas_softmax._src.sample.noise import gumbel_at
from pallas_softmax._src.sample.row_ptx import HIGHEST
from pallas_softmax._src.softmax import label_rank
from pallas_softmax._src.topk import xla as topk_xla
from pallas_softmax._src.topk.plan import padded_winners

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams


INTERPRET = InterpretGPUParams()


@contextlib.contextmanager
def interpreted(interpret=INTERPRET):
    """In this context, kernels run in Pallas's interpreter; on a GPU if `interpret` is None."""
    token = INTERPRETER.set((interpret, TWINS))
    try:
        yield
    finally:
        INTERPRETER.reset(token)


def fewer_rows(plan):
    """Returns a tile with fewer rows, so that the few rows of a test take several tiles. For the interpreter only."""
    return dataclasses.replace(plan, rows=min(plan.rows, 4))


# --- Blocks and tiles


def _store_whole(ref, block, layout=None):
    ref[...] = block


def _load_from_row(ref, row, *, start, held, fill, stride=1):
    i = jnp.arange(WARPGROUP)
    return jnp.where(i < held, ref[row][jnp.where(i < held, start + stride * i, 0)], fill)


def _store_to_row(ref, row, *, start, held, block):
    i = jnp.arange(WARPGROUP)
    column = jnp.where(i < held, start + i, ref.shape[1])
    ref[row] = ref[row].at[column].set(block.astype(ref.dtype), mode="drop")


def _load_mask(ref, row, start, held, vec, *, size=None, aligned=False):
    i = jnp.arange(size or WARPGROUP * vec)
    inside = i < held
    return (ref[row][jnp.where(inside & (ref.shape[1] > 1), start + i, 0)] & inside).astype(jnp.int8)


def _load_tile(ref, tile, row, fill=0, *, column=0, held=None, ref_row=None, last_row=None):
    x = ref[...]
    i, j, counts = _indices(tile, row, column, held)
    i = i if last_row is None else jnp.minimum(i, last_row)
    i = ref_row(i) if ref_row else i
    if x.ndim == 1:
        x, j = x[:, None], jnp.zeros_like(j)
    inside = (i < x.shape[0]) & (j < x.shape[1]) & counts
    found = x[jnp.where(inside, i, 0), jnp.where(inside, j, 0)]
    return jnp.where(inside, found, jnp.full_like(found, fill))


def _store_tile(ref, tile, row, value, *, column=0, held=None):
    i, j, counts = _indices(tile, row, column, held)
    j = jnp.where(counts, j, ref.shape[1])
    ref[...] = ref[...].at[i, j].set(value.astype(ref.dtype), mode="drop")


def _indices(tile, row, column, held):
    """Returns row and column numbers of a tile, and which of its columns count."""
    rows, columns = tile.shape
    i, j = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
    return row + i, column if jnp.ndim(column) else column + j, j < (held or columns)


# --- Windows


def _fill_tail(window, part, x_smem, *, infinite=False):
    if window.body == window.smem_size:
        return
    position = jnp.arange(window.body, window.smem_size) - part.shift
    inside = (position >= 0) & (position < part.place.owned)
    x = jnp.where(inside, part.x_gmem[...][jnp.where(inside, part.place.first + position, 0)], -jnp.inf)
    if part.mask is not None:
        mask_gmem, row = part.mask
        column = jnp.where(inside & (mask_gmem.shape[1] > 1), position + part.place.start, 0)
        x = jnp.where(inside & ~mask_gmem[row][column], _masked_element(x_smem.dtype, infinite), x)
    x_smem[window.body :] = x.astype(x_smem.dtype)


def _mask_step(window, part, x_smem, step, keep, *, infinite=False):
    start, size = step * window.step_blocks * window.block_size, len(keep) * window.block_size
    position = start + jnp.arange(size)
    at = pl.ds(start + part.shift, size)
    x, masked = x_smem[at], (position < window.body) & (jnp.concatenate(keep) == 0)
    x_smem[at] = jnp.where(masked, _masked_element(x.dtype, infinite), x)


def _masked_element(dtype, infinite):
    return np.array(-np.inf, dtype) if infinite else sort_keys.lowest(dtype)


# --- Softmax and its statistics


def _add_counts(segment, before, terms, i, size):
    walk = segment.walk
    starts = [i * walk.step_size + at for at in range(0, size, walk.block_size)]
    return before + normalizers.tree_sum(label_rank._count_in_block(segment, start) for start in starts)


# --- Top-k


def _add_step(window, memory, step, count, lane, scale, part):
    """Returns the normalizer, and writes no group_keys."""
    if lane is None:
        return None
    start = step * window.step_blocks * window.block_size + part.shift
    x = memory.x[pl.ds(start, count * window.block_size)]
    x = x.reshape(-1, WARPGROUP, window.run)
    if part.mask is not None:
        x = jnp.where(sort_keys.key32(x) == sort_keys.lowest_key(x.dtype), -jnp.inf, x)
    x = x.astype(jnp.float32)
    m = jnp.maximum(lane.m, jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), (0, 2)))
    s = normalizers.shift(m)
    terms = jnp.exp(normalizers.below(x, s[None, :, None], scale))
    return Normalizer(m, lane.d * jnp.exp(normalizers.below(lane.m, s, scale)) + jnp.sum(terms, (0, 2)))


def _find_winners(window, memory, part, k):
    position, keys = jnp.arange(window.size), sort_keys.key32(memory.x[pl.ds(part.shift, window.size)])
    _sort_winners(memory.group_keys, keys, position + part.place.start, position < part.place.owned, k)
    return memory.group_keys


def _rank_lists(lists_gmem, smem, request, row, first, held):
    k, keys = request.k, lists_gmem.values[row]
    at = jnp.arange(keys.shape[0])
    inside = (at >= first * k) & (at < (first + held) * k)
    _sort_winners(smem["best"], keys, lists_gmem.indices[row], inside, k)


def _sort_winners(ranked, keys, indices, inside, k):
    """Writes the k best of the elements `inside` in the format of `merge_kernel.put_in_shared_memory`."""
    _, keys, indices = lax.sort((~inside, ~keys, indices), num_keys=3)
    padded = padded_winners(k)
    ranked[:k] = ~keys[:k]
    ranked[padded : padded + k] = indices[:k]


def _search_rows(tile, vocab, k, elements, lanes=None):
    in_16_bits = elements.dtype.itemsize == 2
    if in_16_bits:  # the keys of float16 are the same
        elements = sort_keys.key32(lax.bitcast_convert_type(elements, jnp.bfloat16))
    columns = lax.broadcasted_iota(jnp.int32, (tile.rows, vocab), 1)
    key, best = lax.sort((~elements[:, :vocab], columns), num_keys=2)
    padding = (0, 0), (0, merged_tile(tile, k).shape[1] - k)
    return jnp.pad(best[:, :k], padding), jnp.pad(~key[:, :k], padding) if in_16_bits else None


def _select(plan, fill, refs, numbers):
    @pl.when(lax.axis_index("warpgroup") == 0)
    def write():
        row, x = numbers["row"], refs["x"][numbers["row"]]
        kept = jnp.arange(plan.vocab) < numbers["length"]
        if "mask" in refs:
            kept &= refs["mask"][numbers["mask_row"]]
        best = topk_xla.best_order(x, kept, plan.k)
        if not plan.sorted:
            best = best[jnp.lexsort((best, ~kept[best]))]
        refs["values"][row] = x[best] if fill is None else jnp.where(kept[best], x[best], fill)
        refs["indices"][row] = best


# --- Sample


def _draw(plan, stride, refs, numbers, words):
    (x_gmem, _, *out), row = refs.values(), numbers["row"]

    @pl.when((numbers["part"] == 0) & (lax.axis_index("warpgroup") == 0))
    def write():
        x, one = x_gmem[row][None], jnp.reshape(numbers["temperature"], (1, 1))
        words_of_row = jnp.stack([*words.values()])[None]
        results = xla.sample(x, None, words_of_row, one, None, None, None, stride=stride)
        for ref, result in zip(out, results, strict=True):
            ref[row] = result[0, 0]


def _run_program(plan, stride, part, refs, parameters, words, barrier):
    """Synchronizes the warpgroups. One of them computes the results. The row is one part."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    x_smem, _, *out = refs.values()

    @pl.when(lax.axis_index("warpgroup") == 0)
    def write():
        one_row, x = (
            [jnp.reshape(number, (1, 1)) for number in parameters.values()],
            x_smem[pl.ds(part.shift, plan.window.size)][None],
        )
        if not words:
            results = xla.cutoff(x, None, *one_row)
        else:
            results = xla.sample(x, None, jnp.stack([*words.values()])[None], *one_row, stride=stride)
        for gmem, result in zip(out, results, strict=True):
            gmem[part.place.row] = result[0, 0]


# --- Routers and projections


def _exponentials(tile, score, x):
    m, d, e = normalizer(x, tile)
    if score == "softmax":
        return e, m, d, 1 / d
    e = jnp.exp(jnp.minimum(x, 80))
    return e, m, d, 1 / (1 + e)


def _keep_groups(tile, groups, key):
    x = sort_keys.from_key32(key, jnp.float32)
    takes_part = route_xla._in_best_groups(x, groups._replace(best=min(groups.best, x.shape[1] // groups.count)))
    return jnp.where(takes_part, key, sort_keys.lowest_key(jnp.float32))


def _first_of_largest(z, m, column):
    return jnp.min(normalizers.if_largest(column, z, m[:, None]), 1)


def _best_sums(z, notes, numbers, first_row, first_column, *, rows):
    *words, bits = numbers
    words = jnp.stack([lax.bitcast_convert_type(a, jnp.uint32) for a in words], 1)
    t = lax.bitcast_convert_type(bits, jnp.float32)[:, None]
    columns = first_column + lax.broadcasted_iota(jnp.int32, z.shape, 1)
    noisy = z / jnp.where(t == 0, 1, t) + gumbel_at(words, columns, 1) + 0.0
    drawable = jnp.isfinite(z) & (t == t)
    key = jnp.where(drawable, sort_keys.key(jnp.where(t == 0, z, noisy)), sort_keys.key(-jnp.inf * jnp.ones_like(z)))
    best = jnp.argmax(key, 1)[:, None]
    key, x, index, wins = (jnp.take_along_axis(a, best, 1)[:, 0] for a in (key, z, columns, drawable))
    return key, jnp.where(wins, index, HIGHEST), jnp.where(wins, x, -jnp.inf)


def _store_numbers(gmem, at, end, values):
    def store(i, carry):
        @pl.when(at[i] < end[i])
        def _():
            gmem[pl.ds(at[i], 1)] = values[i][None]

        return carry

    lax.fori_loop(0, len(at), store, None)


def _add_logits(moments, xs, scale=None):
    one, zero = jnp.ones_like(moments.m), jnp.zeros_like(moments.m)
    states = [moments, *(normalizers.Moments(x, one, zero) for x in xs)]
    return normalizers.tree(functools.partial(normalizers.combine, scale=scale), states)


def _write_record(reduction, state, records, number):
    """Writes one state for the segment, in place of one for each warp."""
    leaves = jax.tree.leaves(reduction.combine_lanes(state))
    records[pl.ds(number * len(leaves), len(leaves))] = jnp.stack(leaves)


def _merged(reduction, records, segments, ctas):
    structure = jax.tree.structure(reduction.empty)
    leaves = records[pl.ds(0, segments * structure.num_leaves)].reshape(segments, -1).T
    return reduction.combine_lanes(jax.tree.unflatten(structure, [*leaves]))


TWINS = {
    "interpreter.laid_out": lambda value, layout: value,
    "blocks.split": lambda block, vec: [*block.reshape(-1, WARPGROUP, vec).swapaxes(1, 2).reshape(-1, WARPGROUP)],
    "blocks.load_as": lambda ref, layout: ref[...],
    "blocks.store": _store_whole,
    "blocks.store_in_place": _store_whole,
    "blocks.load_from_row": _load_from_row,
    "blocks.store_to_row": _store_to_row,
    "blocks.load_mask": _load_mask,
    "tiles.load": _load_tile,
    "tiles.prefetch": lambda ref, tile, row: None,
    "tiles.store": _store_tile,
    "tiles.spread": lambda per_row, tile, out: jnp.broadcast_to(per_row[:, :1], out.shape),
    "tiles.load_smem": lambda ref, tile: ref[...],
    "window_arrival.fill_tail": _fill_tail,
    "window_arrival.mask_step": _mask_step,
    "states_ptx.add_logits": _add_logits,
    "states_ptx.write_record": _write_record,
    "states_ptx.merged": _merged,
    "label_rank.add_step": _add_counts,
    "label_rank.overcount": lambda segment: blocks.filled(0.0),
    "window_kernel._clear_list": lambda memory: None,
    "window_kernel._add_step": _add_step,
    "window_kernel._find_winners": _find_winners,
    "merge_kernel._rank": _rank_lists,
    "merging.search_rows": _search_rows,
    "kernel._select": _select,
    "stream_kernel._draw": _draw,
    "mosaic_gpu._run_program": _run_program,
    "kernel._exponentials": _exponentials,
    "scores_ptx.keep_groups": _keep_groups,
    "logits_kernel._columns": lambda shape: lax.broadcasted_iota(jnp.int32, shape, 1),
    "logits_kernel._first_of_largest": _first_of_largest,
    "logits_kernel._times": lambda z, factors: z * factors[:, None],
    "draw_ptx.keep_bounds": lambda *args, steps: None,
    "draw_ptx.best_sums": _best_sums,
    "several_labels._labels_at": lambda gmem, at, end: gmem[...][jnp.where(at < end, at, 0)],
    "several_labels._store": _store_numbers,
}
