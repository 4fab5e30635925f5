"""Cutoffs and draws of rows that are spread over a mesh.

    no filters   each device draws from its shard; the draws and the masses of the shards are gathered
    filters      small shards: the devices exchange them, so that each has some whole rows
                 other shards: the best entries of each row are gathered, as by top-k; every device filters them and
                 draws from them. If some row keeps more entries, the devices exchange the shards.
    DRAW         the noise and the cutoff are arguments. Each device finds the winner of its shard; the winners are
                 gathered as without filters.

The start of the noise moves with the shard, so tokens equal the tokens of whole rows. In all functions,
run_shard(operation, arrays, static) returns the operation's results on this device's shard.
"""

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.mesh_types import merge_over, on_whole_rows
from pallas_softmax._src.masks import at, logits_of
from pallas_softmax._src.normalizers import Normalizer, reduce_split, split_if_few
from pallas_softmax._src.sample.noise import advance, gumbel_at
from pallas_softmax._src.sample.rows import (
    NOWHERE,
    Row,
    as_float,
    drawn_results,
    is_greedy,
    is_kept,
    positions,
    tempered,
    totals_of,
    totals_of_rows,
    with_log_mass,
)
from pallas_softmax._src.sample.xla import (
    Best,
    cutoff_among,
    draw_by_mass,
    sample_among,
    unless_complete,
    winner,
)
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk.mesh import largest_logit, partial_merge, wide_logits, winners_of_shard
from pallas_softmax._src.topk.operation import MERGE, TOPK
from pallas_softmax._src.topk.xla import lowest_value

_WINNERS = 256  # most entries of a row that devices exchange: common filters keep fewer

# Shards up to this size are exchanged. An exchange takes as long as its bytes take. The best entries of a row are few,
# but whether they are enough is a condition, which the host waits for, on each device. Draws on four H100, in µs, by an
# exchange and by the best entries; in the last row these were too few (2026-11-27).
# The limit lies between the two sizes that were measured:
#
#                                           8 MiB on each GPU    32 MiB
#     top_k = 50                            123    180           238    227
#     top_p = 0.9, peaked rows              126    172           241    222
#     top_p = 0.9, rows that keep more      138    320           245    487
_EXCHANGED_BYTES = 2**24


def cutoff_on_mesh(run_shard, logits, where, temperature, top_k, top_p, min_p, *, mesh_axes):
    """Returns the `Cutoff` of each row. `xla.cutoff` documents the arguments, here for this device's shard."""
    filters, row = (top_k, top_p, min_p), Row(logits.shape[-1], mesh_axes)
    is_filtered = any(f is not None for f in filters)

    def by_exchange():
        return _on_whole_rows(run_shard, (logits, where, temperature, *filters), {}, mesh_axes)

    if is_filtered and _is_small(logits):
        return by_exchange()
    best, totals = _best(run_shard, logits, where, temperature, row, _WINNERS if is_filtered else 1)
    cut, _, complete, is_free = cutoff_among(best, totals, temperature, *filters, row.length)
    if not is_filtered:
        return cut

    return unless_complete(complete | is_free, cut, by_exchange)


def sample_on_mesh(run_shard, logits, where, words, temperature, top_k, top_p, min_p, *, stride, mesh_axes):
    """Returns the results of `xla.sample`, with the arguments of `cutoff_on_mesh`, and the words of whole rows."""
    filters, row = (top_k, top_p, min_p), Row(logits.shape[-1], mesh_axes)

    def unfiltered():
        in_shard = advance(words, row.start, stride)
        arrays = (logits, where, in_shard, temperature, None, None, None)
        drawn, log_probs, _ = run_shard(None, arrays, {"stride": stride})
        has_draw, drawn = drawn >= 0, jnp.maximum(drawn, 0)

        # A shard without a draw is bad, or it only has -inf: its largest logit tells. A `lax.cond` would only add
        # kernels: XLA for GPUs computes the largest logit anyway.
        largest = jnp.max(logits_of(as_float(logits), where), -1, keepdims=True)
        bad = ~has_draw & (largest != -jnp.inf)
        # The mass of the shard relative to the drawn logit.
        d = jnp.where(bad, jnp.nan, jnp.where(has_draw, jnp.exp(-log_probs), 0))
        noise = gumbel_at(in_shard, drawn, stride)
        return _winner_of_shards(logits, drawn, has_draw, noise, None, d, temperature, row)

    def by_exchange():
        arrays = (logits, where, words, temperature, *filters)
        return _on_whole_rows(run_shard, arrays, {"stride": stride}, mesh_axes)

    if all(f is None for f in filters):
        return unfiltered()
    if _is_small(logits):
        return by_exchange()
    best, totals = _best(run_shard, logits, where, temperature, row, _WINNERS)
    found, complete, is_free = sample_among(
        best, totals, words, temperature, *filters, row.length, stride=stride
    )

    def of_other_rows():
        return unless_complete(complete | is_free, unfiltered(), by_exchange)

    return unless_complete(complete, found, of_other_rows)


def _is_small(logits) -> bool:
    return isinstance(logits.size, int) and logits.nbytes <= _EXCHANGED_BYTES


def _on_whole_rows(run_shard, arrays, static, mesh_axes):
    """Returns the operation's results. Each device receives some whole rows, and runs the operation on them."""
    logits, where, *per_row = arrays
    is_along_row = where is not None and where.shape[-1] > 1

    def run(along_row, own):
        logits, whole = along_row
        where, *per_row = own
        return run_shard(None, (logits, whole if is_along_row else where, *per_row), static)

    along_row = logits, where if is_along_row else None
    return on_whole_rows(mesh_axes, run, along_row, (None if is_along_row else where, *per_row))


def draw_on_mesh(run_shard, logits, where, noise, temperature, key, index, *, mesh_axes):
    """Returns the results of `xla.draw`; its arguments are for this device's shard."""
    row, shard = Row(logits.shape[-1], mesh_axes), Row(logits.shape[-1])
    totals = totals_of_rows(logits, where, temperature)
    kept = is_kept(logits, where, key, index, row.indices(logits.ndim))
    drawn = winner(as_float(logits), shard.indices(logits.ndim), noise, kept, totals.top, temperature)
    drawn = jnp.minimum(drawn, shard.vocab - 1)  # a row with a NaN has no winner
    noise = at(noise, drawn)
    has_draw = jnp.any(kept, -1, keepdims=True)
    return _winner_of_shards(
        logits, drawn, has_draw, noise, largest_logit(logits, where), totals.total, temperature, row
    )[:2]


def draw_by_mass_on_mesh(run_shard, mass, again, noise, *, mesh_axes):
    """Returns the result of `xla.draw_by_mass`; the masses are this device's shard. Devices exchange the shards."""
    del run_shard, again  # there is no kernel, and XLA stores what is exchanged
    return on_whole_rows(mesh_axes, lambda mass, noise: draw_by_mass(mass, mass, noise), mass, noise)


def _winner_of_shards(logits, drawn, has_draw, noise, top, d, temperature, row: Row):
    """Gathers a draw from each device's shard. Returns the results of `xla.sample` without filters.

    Args:
      logits: the shard.
      drawn: the index of the draw in the shard; any index if the shard has no draw.
      has_draw: whether the shard has a draw.
      noise: the noise at that index.
      top: the largest logit of the shard, as `wide_logits` returns it; None for the drawn logit.
      d: the sum of exp((x - top) / temperature) over the shard.
      temperature: as for `xla.draw`.
      row: the row.
    """
    x = at(wide_logits(logits), drawn)
    x = jnp.where(has_draw, x, lowest_value(x.dtype))
    index = jnp.where(has_draw, row.start + drawn, NOWHERE)

    def merge(gathered, temperature):
        noise, index, x, tops, d = gathered
        total = normalizers.combine_parts(
            Normalizer(normalizers.to_float(tops, (-1,)), d), Temperature.of(temperature)
        ).d
        top = normalizers.largest(tops)
        greedy, shards = is_greedy(as_float(top), temperature), split_if_few((noise, index, x))

        def rank(noise, index, x):
            perturbed = jnp.where(
                index == NOWHERE, -jnp.inf, tempered(as_float(x), as_float(top), temperature) + noise
            )
            return jnp.where(greedy, sort_keys.wide_key(x), sort_keys.key(perturbed))

        ranks = [rank(*shard) for shard in shards]
        best = reduce_split(jnp.maximum, ranks)
        firsts = [jnp.where(rank == best, index, NOWHERE) for rank, (_, index, _) in zip(ranks, shards)]
        index = reduce_split(jnp.minimum, firsts)

        def drawn(numbers):  # an index is of one shard only
            lowest = lowest_value(numbers[0].dtype)
            of_index = [jnp.where(first == index, a, lowest) for first, a in zip(firsts, numbers)]
            return normalizers.largest(jnp.concatenate(of_index, -1))

        noise, _, x = zip(*shards)
        return drawn(noise), index, drawn(x), top, total

    parts = noise, index, x, x if top is None else top, d
    _, index, x, top, total = merge_over(row.mesh_axes, merge, parts, temperature)
    m, x_below = jnp.split(normalizers.to_float(jnp.concatenate([top, x], -1), (-1,)), 2, -1)
    totals = totals_of(as_float(top), m, total, temperature)
    index, log_probs = drawn_results(index, x_below, totals)
    # A greedy row keeps only the drawn entry, and log_probs is NaN in a row without a draw.
    log_mass = jnp.where(totals.greedy | (index < 0), log_probs, 0)
    return with_log_mass(index, log_probs, log_mass)


def _best(run_shard, logits, where, temperature, row: Row, n: int):
    """Returns the n best entries of each row, the same on all devices, and the totals of the row."""
    # Each device lists n entries. All lists together have at most an eighth of the row, a limit that was not measured.
    n = max(1, min(n, row.length // (8 * lax.axis_size(row.mesh_axes))))
    lists = winners_of_shard(run_shard, TOPK, logits, where, temperature, n, row.mesh_axes)

    def merge(gathered, temperature):
        won, index, tops, d = gathered
        kept = None if where is None else index >= 0
        position = jnp.broadcast_to(positions(won.ndim, won.shape[-1]), won.shape)
        lists = won, kept, position, (tops, d), temperature
        static = {"k": n, "log": True, "dtype": temperature.dtype}
        # kernels merge lists of k winners only
        merged = MERGE.plain(*lists, **static) if row.vocab < n else run_shard(MERGE, lists, static)
        (_, position), (m, total) = merged
        won, index = (jnp.take_along_axis(a, position, -1) for a in (won, index))
        return won, index, m, total

    partly = partial_merge(n, where is not None)
    won, index, m, total = merge_over(row.mesh_axes, merge, lists, temperature, partly)
    won, kept = won.astype(logits.dtype), None if where is None else index >= 0
    key = sort_keys.wide_key(won)
    key = key if kept is None else jnp.where(kept, key, jnp.iinfo(key.dtype).min)
    value, x = (logits_of(a, kept) for a in (as_float(won), normalizers.to_float(won, (-1,))))
    totals = totals_of(value[..., :1], m, total, temperature)
    return Best(key, jnp.maximum(index, ~index), value, x), totals
