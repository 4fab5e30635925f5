"""Cutoffs and draws of rows that are spread over a mesh.

    no filters   each device draws from its shard; the draws and the masses of the shards are gathered
    filters      the devices exchange their shards, so that each device has some whole rows

An exchange takes as long as its bytes take. The alternative is to gather the best entries of each row. But whether they
are enough is a condition, and the host of each device waits for it. Draws on four H100, in µs (2026-11-27):

                                                           8 MiB on each GPU    32 MiB
    top_k = 50          exchange                           123                  238
                        256 best entries                   180                  227
    top_p = 0.9         exchange                           126 to 138           241 to 245
                        256 best entries, enough of them   172                  222
                        256 best entries, too few          320                  487

The start of the noise moves with the shard, so tokens equal the tokens of whole rows. Functions have the arguments and
results of `rows.cutoff` and so on: logits and mask are this device's shard, all others are of whole rows.
run_shard(operation, arrays, static) returns the operation's results on this device's shard.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.mesh_types import merge_over, on_whole_rows
from pallas_softmax._src.masks import at, logits_of
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.sample import rows
from pallas_softmax._src.sample.noise import advance, gumbel_at
from pallas_softmax._src.sample.xla import draw_by_mass
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk.mesh import partial_merge, wide_logits, winners_of_shard
from pallas_softmax._src.topk.operation import TOPK
from pallas_softmax._src.topk.xla import lowest_value


def cutoff_on_mesh(run_shard, logits, where, temperature, top_k, top_p, min_p, *, mesh_axes):
    if all(f is None for f in (top_k, top_p, min_p)):
        return _unfiltered_cutoff(run_shard, logits, where, temperature, mesh_axes)
    arrays = logits, where, temperature, top_k, top_p, min_p
    return _on_whole_rows(run_shard, arrays, {}, mesh_axes)


def sample_on_mesh(run_shard, logits, where, words, temperature, top_k, top_p, min_p, *, stride, mesh_axes):
    if all(f is None for f in (top_k, top_p, min_p)):
        return _unfiltered_draw(run_shard, logits, where, words, temperature, stride, mesh_axes)
    arrays = logits, where, words, temperature, top_k, top_p, min_p
    return _on_whole_rows(run_shard, arrays, {"stride": stride}, mesh_axes)


def _on_whole_rows(run_shard, arrays, static, mesh_axes):
    """Each device receives some whole rows, and runs the operation on them."""
    logits, where, *per_row = arrays
    where = None if where is None else jnp.broadcast_to(where, (*where.shape[:-1], logits.shape[-1]))

    def run(along_row, own):
        return run_shard(None, (*along_row, *own), static)

    return on_whole_rows(mesh_axes, run, (logits, where), per_row)


def draw_by_mass_on_mesh(run_shard, mass, again, noise, *, mesh_axes):
    del run_shard, again  # there is no kernel, and XLA stores what is exchanged
    return on_whole_rows(mesh_axes, lambda mass, noise: draw_by_mass(mass, mass, noise), mass, noise)


def _unfiltered_cutoff(run_shard, logits, where, temperature, mesh_axes):
    """The largest logit and the mass of each shard are gathered, as by top-k of one winner."""
    winners = winners_of_shard(run_shard, TOPK, logits, where, temperature, 1, mesh_axes)
    merge = partial_merge(1, where is not None)
    first, index, _, total = merge_over(mesh_axes, merge, winners, temperature)
    first, kept = first.astype(logits.dtype), None if where is None else index >= 0
    top = logits_of(rows.as_float(first), kept)
    totals = rows.totals_of(top, top, total, temperature)
    key = rows.keys(first, kept)
    key = jnp.where(totals.greedy, key, jnp.iinfo(key.dtype).min)
    index = jnp.where(totals.greedy, jnp.maximum(index, ~index), rows.NOWHERE)
    return rows.cutoff_of(key, index, total, totals)


def _unfiltered_draw(run_shard, logits, where, words, temperature, stride, mesh_axes):
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
