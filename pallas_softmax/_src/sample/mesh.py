"""Cutoffs and draws of rows that are spread over a mesh: devices exchange numbers of each row, never logits.

    no filters   each device draws from its shard; the draws and the masses of the shards are gathered and merged
    filters      the best entries of each row are gathered, as by top-k; every device filters them and draws from them.
                 If some row keeps more entries, the devices search together, in plain JAX.
    DRAW         the noise and the cutoff are arguments. Each device finds the winner of its shard; the winners are
                 merged as without filters.

The start of the noise moves with the shard, so tokens equal the tokens of whole rows.
"""

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.mesh_types import merge_over
from pallas_softmax._src.masks import logits_of, mask_at
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.sample import noise as noise_of
from pallas_softmax._src.sample import xla
from pallas_softmax._src.sample.best import Best, cutoff_among, sample_among
from pallas_softmax._src.sample.rows import (
    NOWHERE,
    Cutoff,
    Row,
    as_float,
    drawn_results,
    elements,
    is_free,
    is_kept,
    scaled,
    totals_of,
    wide_keys,
)
from pallas_softmax._src.topk.mesh import wide_logits
from pallas_softmax._src.topk.operation import MERGE, TOPK

_WINNERS = 256  # most entries of a row that devices exchange: common filters keep fewer


def cutoff_on_mesh(run_shard, logits, where, temperature, top_k, top_p, min_p, *, mesh_axes):
    """Returns the `Cutoff` of each row. `xla.cutoff` documents the arguments, here for this device's shard.

    run_shard(operation, arrays, static) returns the operation's results on this device's shard.
    """
    filters, row = (top_k, top_p, min_p), Row.of(logits, mesh_axes)
    is_filtered = any(f is not None for f in filters)
    best, totals = _best(run_shard, logits, where, temperature, row, _WINNERS if is_filtered else 1)
    cut, _, complete = cutoff_among(best, totals, temperature, *filters, row.length)
    if not is_filtered:
        return cut
    complete |= is_free(*filters, row.length)

    def by_search(_):
        return xla.cutoff(logits, where, temperature, *filters, mesh_axes=mesh_axes)

    return Cutoff(*_unless(complete, cut, by_search))


def sample_on_mesh(run_shard, logits, where, noise, temperature, top_k, top_p, min_p, *, stride, mesh_axes):
    """Returns the results of `xla.sample`, with the arguments of `cutoff_on_mesh`, and the noise of whole rows."""
    filters, row = (top_k, top_p, min_p), Row.of(logits, mesh_axes)

    def unfiltered(_):
        return _unfiltered(run_shard, logits, where, noise, temperature, row, stride)

    if all(f is None for f in filters):
        return unfiltered(None)
    best, totals = _best(run_shard, logits, where, temperature, row, _WINNERS)
    found, complete = sample_among(best, totals, noise, temperature, *filters, row.length, stride=stride)
    free = is_free(*filters, row.length) & ~totals.greedy & ~complete
    found = _unless(~free, found, unfiltered)

    def by_search(_):
        return xla.sample(logits, where, noise, temperature, *filters, stride=stride, mesh_axes=mesh_axes)

    return _unless(complete | free, found, by_search)


def draw_on_mesh(run_shard, logits, where, noise, temperature, key, index, *, mesh_axes):
    """Returns the results of `xla.draw`; its arguments are for this device's shard."""
    row, shard = Row.of(logits, mesh_axes), Row.of(logits, ())
    x = elements(logits, where, shard)
    m = shard.max(x)
    divisor = jnp.maximum(temperature, jnp.finfo(x.dtype).tiny)
    d = jnp.where(m == -jnp.inf, 0, shard.sum(jnp.exp((x - m) / divisor)))
    top = jnp.max(wide_logits(logits), -1, keepdims=True, where=where, initial=_lowest(logits))
    kept = is_kept(logits, where, key, index, row.indices(logits.ndim))
    perturbed = jnp.where(kept, scaled(as_float(logits), temperature, temperature == 0) + noise, -jnp.inf)
    best = shard.max(perturbed)
    drawn = shard.min(jnp.where(perturbed == best, shard.indices(x.ndim), shard.vocab - 1))
    at_drawn = jnp.take_along_axis(wide_logits(logits), drawn, -1)
    return _merge(best, drawn, at_drawn, Normalizer(top, d), temperature, row)[:2]


def _unfiltered(run_shard, logits, where, noise, temperature, row: Row, stride: int):
    """Returns the results of `xla.sample` without filters, by one draw on each device."""
    noise = noise_of.advance(noise, row.start, stride)
    arrays = (logits, where, noise, temperature, None, None, None)
    drawn, log_probs, _ = run_shard(None, arrays, {"stride": stride})
    has_draw = drawn >= 0

    def largest(_):
        return jnp.max(logits_of(as_float(logits), where), -1, keepdims=True) != -jnp.inf

    # A shard without a draw is bad, or it only has -inf. Its largest logit tells; it is computed only if needed.
    bad = ~has_draw & lax.cond(jnp.all(has_draw), lambda _: ~has_draw, largest, None)
    drawn = jnp.maximum(drawn, 0)
    at_drawn = jnp.where(has_draw, jnp.take_along_axis(wide_logits(logits), drawn, -1), _lowest(logits))
    value = jnp.take_along_axis(as_float(logits), drawn, -1)
    greedy = (temperature == 0) | jnp.isinf(value / jnp.where(temperature == 0, 1, temperature))
    perturbed = scaled(value, temperature, greedy) + noise_of.at(noise, drawn, stride)
    perturbed = jnp.where(has_draw, perturbed, -jnp.inf)
    d = jnp.where(bad, jnp.nan, jnp.where(has_draw, jnp.exp(-log_probs), 0))  # relative to the drawn logit
    return _merge(perturbed, drawn, at_drawn, Normalizer(at_drawn, d), temperature, row)


def _merge(perturbed, drawn, x, part: Normalizer, temperature, row: Row):
    """Merges a draw from each device's shard. Returns the results of `xla.sample` without filters.

    Args:
      perturbed: the drawn entry's x / temperature plus its noise; -inf in a shard without a draw.
      drawn: the drawn entry's index in the shard.
      x: the drawn logit, as `wide_logits` returns it.
      part: the shard's largest logit m, as `wide_logits` returns it, and the sum d of exp((x - m) / temperature).
      temperature: as for `xla.draw`.
      row: the row.
    """

    def merge(gathered, temperature):
        perturbed, index, x, tops, d = gathered
        floats = normalizers.to_float(jnp.concatenate([tops, x], -1), (-1,))
        float_tops, float_x = jnp.split(floats, 2, -1)
        m = jnp.max(float_tops, -1, keepdims=True)
        divisor = jnp.maximum(temperature, jnp.finfo(m.dtype).tiny)
        total = normalizers.combine_parts(Normalizer(float_tops, d), divisor).d
        totals = totals_of(jnp.max(as_float(tops), -1, keepdims=True), m, total, temperature)
        rank = jnp.where(totals.greedy, wide_keys(x), sort_keys.key(perturbed))
        first = jnp.where(rank == jnp.max(rank, -1, keepdims=True), index, NOWHERE)
        at = jnp.argmin(first, -1, keepdims=True)
        index, log_probs = drawn_results(*(jnp.take_along_axis(a, at, -1) for a in (index, float_x)), totals)
        return index, log_probs, jnp.where(totals.greedy | (index < 0), log_probs, 0)

    return merge_over(row.mesh_axes, merge, (perturbed, row.start + drawn, x, *part), temperature)


def _best(run_shard, logits, where, temperature, row: Row, n: int):
    """Returns the n best entries of each row, the same on all devices, and the totals of the row."""
    # Each device lists n entries, so that all lists together have at most an eighth of the row.
    n = max(1, min(n, row.length // (8 * lax.axis_size(row.mesh_axes))))
    of_shard = {"k": min(n, row.vocab), "log": False, "dtype": jnp.dtype(jnp.float32)}
    divisor = jnp.maximum(temperature, jnp.finfo(as_float(logits).dtype).tiny)
    (_, index), (top, d) = run_shard(TOPK, (logits, where, divisor), of_shard)
    if jnp.issubdtype(logits.dtype, jnp.integer):  # their normalizers count from the largest of the shard
        top = wide_logits(jnp.max(logits, -1, keepdims=True, where=where, initial=_lowest(logits)))
    won = wide_logits(jnp.take_along_axis(logits, index, -1))
    position = row.start + index
    if where is not None:  # the complement, which is negative, says that the position is masked
        position = jnp.where(mask_at(where, logits, index), position, ~position)

    def merge(gathered, divisor):
        won, position, tops, d = gathered
        kept = None if where is None else position >= 0
        place = jnp.broadcast_to(lax.broadcasted_iota(jnp.int32, won.shape, won.ndim - 1), won.shape)
        lists, static = (won, kept, place, (tops, d), divisor), {"k": n, "log": True, "dtype": divisor.dtype}
        # kernels merge lists of k winners only
        merged = MERGE.plain(*lists, **static) if row.vocab < n else run_shard(MERGE, lists, static)
        (_, place), (m, total) = merged
        won, position = (jnp.take_along_axis(a, place, -1) for a in (won, position))
        return won, position, m, total

    won, position, m, total = merge_over(row.mesh_axes, merge, (won, position, top, d), divisor)
    won, masked = won.astype(logits.dtype), position < 0
    key = jnp.where(masked, jnp.iinfo(wide_keys(won).dtype).min, wide_keys(won))
    value, x = (
        logits_of(a, None if where is None else ~masked)
        for a in (as_float(won), normalizers.to_float(won, (-1,)))
    )
    return Best(key, jnp.maximum(position, ~position), value, x), totals_of(
        value[..., :1], m, total, temperature
    )


def _lowest(logits):
    """Returns the largest logit of an empty set."""
    return jnp.iinfo(logits.dtype).min if jnp.issubdtype(logits.dtype, jnp.integer) else -jnp.inf


def _unless(complete, found, other):
    """Returns `found` in complete rows, and other(None) elsewhere. `other` runs only if some row is not complete."""
    others = lax.cond(jnp.all(complete), lambda _: tuple(found), lambda _: tuple(other(None)), None)
    return [jnp.where(complete, *both) for both in zip(found, others)]
