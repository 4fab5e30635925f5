"""Cutoffs and draws of rows that are spread over a mesh.

    no filters   each device draws from its shard; the draws and the masses of the shards are gathered
    filters      small shards: the devices exchange them, so that each has some whole rows
                 other shards: the best entries of each row are gathered, as by top-k; every device filters them and
                 draws from them. If some row keeps more entries, the devices exchange the shards.

The start of the noise moves with the shard, so tokens equal the tokens of whole rows. Functions have the arguments and
results of `xla.cutoff` and so on: logits and mask are this device's shard, all others are of whole rows.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.mesh_types import merge_over, on_whole_rows
from pallas_softmax._src.masks import at, logits_of, positions
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.sample import rows
from pallas_softmax._src.sample.noise import advance, gumbel_at
from pallas_softmax._src.sample.xla import Best, cutoff_among, draw_by_mass, sample_among, unless_complete
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk.mesh import partial_merge, wide_logits, winners_of_shard
from pallas_softmax._src.topk.operation import MERGE, TOPK
from pallas_softmax._src.topk.xla import lowest_value

_WINNERS = 256  # most entries of a row that devices exchange: common filters keep fewer

# Shards up to this size are exchanged. An exchange takes as long as its bytes take. The best entries of a row are few,
# but whether they are enough is a condition, which the host waits for, on each device. The limit lies between two sizes
# of draws on four H100, in µs, by an exchange and by the best entries; in the last row these were too few (2026-11-27):
#
#                                           8 MiB on each GPU    32 MiB
#     top_k = 50                            123    180           238    227
#     top_p = 0.9, peaked rows              126    172           241    222
#     top_p = 0.9, rows that keep more      138    320           245    487
_EXCHANGED_BYTES = 2**24


def cutoff_on_mesh(run_shard, logits, where, temperature, top_k, top_p, min_p, *, mesh_axes):
    filters = top_k, top_p, min_p
    is_filtered = any(f is not None for f in filters)
    arrays = logits, where, temperature, *filters
    by_exchange = functools.partial(_on_whole_rows, run_shard, arrays, {}, mesh_axes)
    if is_filtered and _is_small(logits):
        return by_exchange()
    n = _WINNERS if is_filtered else 1
    best, totals, length = _best(run_shard, logits, where, temperature, mesh_axes, n)
    cut, complete, is_free = cutoff_among(best, totals, *filters, length)
    return unless_complete(complete | is_free, cut, by_exchange) if is_filtered else cut


def sample_on_mesh(run_shard, logits, where, words, temperature, top_k, top_p, min_p, *, stride, mesh_axes):
    arrays, filters = (logits, where, words, temperature), (top_k, top_p, min_p)
    unfiltered = functools.partial(_unfiltered, run_shard, *arrays, stride, mesh_axes)
    by_exchange = functools.partial(_on_whole_rows, run_shard, (*arrays, *filters), {"stride": stride}, mesh_axes)
    if all(f is None for f in filters):
        return unfiltered()
    if _is_small(logits):
        return by_exchange()
    best, totals, length = _best(run_shard, logits, where, temperature, mesh_axes, _WINNERS)
    found, complete, is_free = sample_among(best, totals, words, temperature, *filters, length, stride=stride)
    return unless_complete(complete, found, lambda: unless_complete(complete | is_free, unfiltered(), by_exchange))


def _is_small(logits) -> bool:
    return isinstance(logits.size, int) and logits.nbytes <= _EXCHANGED_BYTES


def _on_whole_rows(run_shard, arrays, static, mesh_axes):
    """Each device receives some whole rows, and runs the operation on them."""
    logits, where, *per_row = arrays
    where = None if where is None else jnp.broadcast_to(where, (*where.shape[:-1], logits.shape[-1]))
    return on_whole_rows(mesh_axes, lambda row, own: run_shard(None, (*row, *own), static), (logits, where), per_row)


def draw_by_mass_on_mesh(run_shard, mass, again, noise, *, mesh_axes):
    del run_shard, again  # there is no kernel, and XLA stores what is exchanged
    return on_whole_rows(mesh_axes, lambda mass, noise: draw_by_mass(mass, mass, noise), mass, noise)


def _unfiltered(run_shard, logits, where, words, temperature, stride, mesh_axes):
    """Each device draws from its shard; the draws are gathered."""
    start = lax.axis_index(mesh_axes) * logits.shape[-1]
    in_shard = advance(words, start, stride)
    arrays = (logits, where, in_shard, temperature, None, None, None)
    drawn, log_probs, _ = run_shard(None, arrays, {"stride": stride})
    has_draw, drawn = drawn >= 0, jnp.maximum(drawn, 0)

    # A shard without a draw is bad, or it only has -inf: its largest logit tells. A `lax.cond` would only add
    # kernels: XLA for GPUs computes the largest logit anyway.
    largest = jnp.max(logits_of(rows.as_float(logits), where), -1, keepdims=True)
    bad = ~has_draw & (largest != -jnp.inf)
    # The mass of the shard relative to the drawn logit.
    d = jnp.where(bad, jnp.nan, jnp.where(has_draw, jnp.exp(-log_probs), 0))
    noise = gumbel_at(in_shard, drawn, stride)
    x = at(wide_logits(logits), drawn)
    x = jnp.where(has_draw, x, lowest_value(x.dtype))
    index = jnp.where(has_draw, start + drawn, rows.NOWHERE)

    def merge(gathered, temperature):
        noise, index, x, tops, d = gathered
        parts = Normalizer(normalizers.to_float(tops, (-1,)), d)
        _, total = normalizers.combine_parts(parts, Temperature.of(temperature))
        top = normalizers.largest(tops)
        perturbed = rows.tempered(rows.as_float(x), rows.as_float(top), temperature) + noise
        perturbed = jnp.where(index == rows.NOWHERE, -jnp.inf, perturbed)
        greedy = rows.is_greedy(rows.as_float(top), temperature)
        rank = jnp.where(greedy, sort_keys.wide_key(x), sort_keys.key(perturbed))
        # elementwise, so that XLA for GPUs fuses it
        shards = zip(*(jnp.split(a, a.shape[-1], -1) for a in (rank, index, noise, x)))
        _, index, noise, x = functools.reduce(rows.first_of, shards)
        return noise, index, x, top, total

    _, index, x, top, total = merge_over(mesh_axes, merge, (noise, index, x, x, d), temperature)
    m, x = jnp.split(normalizers.to_float(jnp.concatenate([top, x], -1), (-1,)), 2, -1)
    totals = rows.totals_of(rows.as_float(top), m, total, temperature)
    cut = rows.cutoff_of(jnp.zeros_like(index), index, total, totals)
    return rows.drawn_results(index, x, m, cut, temperature)


def _best(run_shard, logits, where, temperature, mesh_axes, n: int):
    """Returns the n best entries of each row, the same on all devices, the totals of the row, and its length."""
    # Each device lists n entries. All lists together have at most an eighth of the row, a limit that was not measured.
    n = max(1, min(n, logits.shape[-1] // 8))
    winners = winners_of_shard(run_shard, TOPK, logits, where, temperature, n, mesh_axes)

    def merge(gathered, temperature):
        won, index, tops, d = gathered
        kept = None if where is None else index >= 0
        position = jnp.broadcast_to(positions(won), won.shape)
        lists = won, kept, position, (tops, d), temperature
        (_, position), (m, total) = run_shard(MERGE, lists, {"k": n, "log": True, "dtype": temperature.dtype})
        won, index = (jnp.take_along_axis(a, position, -1) for a in (won, index))
        return won, index, m, total

    partly = partial_merge(n, where is not None)
    won, index, m, total = merge_over(mesh_axes, merge, winners, temperature, partly)
    best = Best(won.astype(logits.dtype), None if where is None else index >= 0, jnp.maximum(index, ~index))
    top = logits_of(rows.as_float(best.logits), best.where)[..., :1]
    return best, rows.totals_of(top, m, total, temperature), logits.shape[-1] * lax.axis_size(mesh_axes)
