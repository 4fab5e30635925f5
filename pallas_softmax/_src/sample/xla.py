"""Plain JAX of `sample` and `filter_logits`: where the filters cut each row, the draw, and its derivatives.

    logits        of any rank, floats or integers; a row is the last axis
    where         None, or a boolean of the rank of the logits that broadcasts to them
    temperature   at least 0, or NaN: then the row has no draw. 0 keeps the first entry in the order of `lax.top_k`,
                  whatever the filters.
    top_k         int32, at least 1; or None. At the row's length or more it filters nothing.
    top_p         in [0, 1], or None. 0 keeps the first entry, 1 keeps all that top_k keeps.
    min_p         in [0, 1], or None
    words         uint32 (..., 4): with a stride, the noise of each row, as in `noise.py`
    mesh_axes     the mesh axes that each row is spread over, if any

The temperature and the filters have the rank of the logits. Their size is 1 in the last dimension, and 1 or the size of
the logits in the others.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.masks import at, logits_of, mask_at, masked, positions, row_at, stored, sum_over
from pallas_softmax._src.sample import rows
from pallas_softmax._src.sample.noise import gumbel_at
from pallas_softmax._src.stats.xla import logits_at
from pallas_softmax._src.temperatures import Temperature, is_zero
from pallas_softmax._src.topk.xla import best_order

# The number of candidates of a row on a CPU, and the shortest rows that have candidates ("On a CPU" in
# benchmarks/results/NOTES.md).
_CANDIDATES, _LONG_ROW = 128, 2**14


def cutoff(logits, where, temperature, top_k, top_p, min_p):
    filters = top_k, top_p, min_p
    by_search = functools.partial(rows.search, logits, where, temperature, *filters)

    def among(best, totals):
        cut, complete, is_free = cutoff_among(best, totals, *filters, logits.shape[-1])
        return cut, complete | is_free

    return _by_candidates(logits, where, temperature, top_k, among, by_search)


def sample(logits, where, words, temperature, top_k, top_p, min_p, *, stride):
    """Draws once from each row of softmax(logits / temperature), restricted by the filters.

    Returns, (..., 1) each: the index in the whole row (int32), log softmax(logits / temperature) there, and the
    `log_mass` of the `Cutoff`. They are -1 and NaN in a row without a draw.
    """
    filters = top_k, top_p, min_p

    def by_search():
        cut = rows.search(logits, where, temperature, *filters)
        indices = jnp.broadcast_to(positions(logits), logits.shape)
        drawn = draw(logits, where, indices, gumbel_at(words, indices, stride), temperature, cut)
        m = cut.top if jnp.issubdtype(logits.dtype, jnp.floating) else jnp.zeros_like(cut.top)
        x = at(rows.elements(logits, where), jnp.maximum(drawn, 0))
        return rows.drawn_results(drawn, x, m, cut, temperature)

    def among(best, totals):
        return sample_among(best, totals, words, temperature, *filters, logits.shape[-1], stride=stride)[:2]

    return _by_candidates(logits, where, temperature, top_k, among, by_search)


def draw(logits, where, indices, noise, temperature, cut: rows.Cutoff, mesh_axes=()):
    """Returns the index of the kept entry with the largest sum of logits / temperature and noise, (..., 1).

    It is the lowest such index; -1 in a row without a draw. `indices` are the indices of the logits in whole rows.
    """
    kept = rows.is_kept(logits, where, cut.key, cut.index, indices)
    # The sums are compared with their maximum, so they must not be computed twice.
    perturbed = rows.tempered(rows.as_float(logits), cut.top, temperature) + noise
    sums = stored(jnp.where(kept, perturbed, -jnp.inf))
    largest = jnp.max(sums, -1, keepdims=True)
    largest = lax.pmax(largest, mesh_axes) if mesh_axes else largest
    first = jnp.min(jnp.where(sums == largest, indices, rows.NOWHERE), -1, keepdims=True)
    return jnp.where(cut.index < 0, -1, lax.pmin(first, mesh_axes) if mesh_axes else first)


def noise_of_mass(vocab):
    return sum(rows.chunks_of(vocab))


def draw_by_mass(mass, again, noise):
    """Draws once from each row in proportion to masses: first a chunk of neighbours, then one of them.

    Both steps draw as `jax.random.categorical` does, without an array of V elements. Negative masses count, without
    their sign, if a row or the drawn chunk has no positive ones.

    `again` are the same masses. If the caller computes them a second time, XLA stores neither of the two. They may
    round differently; a chunk with a mass must keep one. `noise` are `noise_of_mass(V)` Gumbel numbers of each row.
    Returns -1 in a row with NaN, or with zeros only.
    """
    count, size = rows.chunks_of(mass.shape[-1])

    def winner(mass, noise):
        far = 2 * jnp.finfo(mass.dtype).maxexp  # greater than all differences of logarithms and noise
        score = jnp.log(jnp.abs(mass)) + noise - jnp.where(mass > 0, 0, far)
        return lax.argmax(score, mass.ndim - 1, jnp.int32)[..., None]

    # One sum for both signs: the negative masses are too faint to matter where there are positive ones.
    sums = jnp.sum(rows.in_chunks(jnp.where(mass > 0, mass, 2.0**-80 * mass)), -1)
    chunk = winner(sums, noise[..., :count])
    index = chunk * size + winner(row_at(rows.in_chunks(again), chunk), noise[..., count:])
    return jnp.where(jnp.abs(at(sums, chunk)) > 0, index, -1)


def filtered(logits, where, temperature, cut: rows.Cutoff, *, mesh_axes=()):
    """Returns logits / temperature with -inf where an entry is not kept; NaN in rows without a distribution."""
    x = rows.as_float(logits)
    live = rows.is_kept(logits, where, cut.key, cut.index, positions(x, mesh_axes)) & jnp.isfinite(x)
    z = rows.tempered(jnp.where(live, x, 0), cut.top, jnp.where(jnp.isnan(temperature), 1, temperature))
    nothing = (cut.top == -jnp.inf) & ~jnp.isnan(temperature)
    return jnp.where(live, z, jnp.where((cut.index >= 0) | nothing, -jnp.inf, jnp.nan))


# --- The best entries of each row only: candidates on a CPU, and what the devices of a mesh exchange
#
# On a CPU, `lax.top_k` of a few elements of a long row is faster than the search, and only these elements need noise.


class Best(NamedTuple):
    """The best entries of each row, (..., n), the best first, masked ones last."""

    logits: Any
    where: Any  # None if none is masked
    index: Any  # in the whole row


def cutoff_among(best: Best, totals: rows.Totals, top_k, top_p, min_p, length):
    """Returns the cutoff, whether the row is complete, and whether it is free. The cutoff is right in such rows.

    A row is complete if it keeps only listed entries: the list ends with an entry that is left out, or is the whole
    row. A row without a draw is complete as well. A row is free if the filters keep all of it, whatever its logits are.
    """
    key, n = rows.keys(best.logits, best.where), best.index.shape[-1]
    position, mass = positions(key), rows.masses(best.logits, best.where, totals)
    # `known`: whether the listed entries tell where top_k ends.
    kept, known, kept_total = jnp.ones(mass.shape, bool), True, totals.total
    is_free = ~totals.greedy
    if top_k is not None:
        is_all = top_k >= length
        kept = position < jnp.broadcast_to(top_k, mass.shape)
        known = (top_k < n) | is_all
        kept_total = jnp.where(is_all, totals.total, rows.sum_of(jnp.where(kept, mass, 0)))
        is_free &= is_all
    if top_p is not None:
        before = jnp.cumsum(jnp.where(kept, mass, 0), -1)
        before = jnp.pad(before, [(0, 0)] * (before.ndim - 1) + [(1, 0)])[..., :-1]
        kept &= before < rows.mass_goal(top_p, kept_total)
        is_free &= top_p >= 1
    if min_p is not None:
        kept &= mass >= min_p
        is_free &= min_p <= 0
    kept = jnp.where(totals.greedy, position == 0, kept)
    count = jnp.sum(kept, -1, keepdims=True, dtype=jnp.int32)
    complete = (n == length) | known & (count < n) | totals.greedy | ~(totals.total >= 1)
    key, index = (jnp.take_along_axis(a, jnp.maximum(count - 1, 0), -1) for a in (key, best.index))
    key, index = jnp.where(is_free, jnp.iinfo(key.dtype).min, key), jnp.where(is_free, rows.NOWHERE, index)
    kept_total = jnp.where(is_free, totals.total, rows.sum_of(jnp.where(kept, mass, 0)))
    return rows.cutoff_of(key, index, kept_total, totals), complete, is_free


def sample_among(best: Best, totals: rows.Totals, words, temperature, top_k, top_p, min_p, length, *, stride):
    """Returns the results of `sample`, valid in complete rows; which rows are complete; and which are free."""
    cut, complete, is_free = cutoff_among(best, totals, top_k, top_p, min_p, length)
    drawn = draw(*best, gumbel_at(words, best.index, stride), temperature, cut)
    x = normalizers.largest(jnp.where(best.index == drawn, rows.elements(best.logits, best.where), -jnp.inf))
    return rows.drawn_results(drawn, x, totals.m, cut, temperature), complete, is_free


def _by_candidates(logits, where, temperature, top_k, among, by_search):
    """Returns the first result of among(best, totals), on a CPU for long rows with a top_k; else by_search().

    The second one says which rows are complete. If some row is not, the search runs for all rows.
    """
    vocab = logits.shape[-1]
    is_float32 = jnp.issubdtype(logits.dtype, jnp.floating) and rows.as_float(logits).dtype == jnp.float32
    if top_k is None or not is_float32 or not isinstance(vocab, int) or vocab < _LONG_ROW:
        return by_search()

    def by_candidates():
        index = best_order(logits, where, _CANDIDATES)
        best = Best(at(logits, index), mask_at(where, logits, index), index)
        found, complete = among(best, rows.totals_of_rows(logits, where, temperature))
        # The search computes its arrays of whole rows itself, so that they take memory only if it runs.
        return unless_complete(complete, found, by_search)

    return lax.platform_dependent(cpu=by_candidates, default=by_search)


def unless_complete(complete, found, other):
    """Returns `found`; other() in rows that are not complete. `other` runs only if there is such a row."""
    others = lax.cond(jnp.all(complete), lambda: found, other)
    return jax.tree.map(lambda *both: jnp.where(complete, *both), found, others)


# --- Derivatives of the log-probability of a draw


def sample_grad(residuals, where, g, *, mesh_axes=()):
    """Returns the derivatives of log_probs of a draw in the logits and in the temperature; g is its cotangent.

    They are 0 in rows without a draw, and at temperature 0. Elsewhere dx = g ([drawn] - p) / T, and -sum(s dx).
    """
    has_derivative, temperature, s, residue = _softmax_of_draw(residuals, where, mesh_axes)
    dx = temperature.over(jnp.where(has_derivative, g, 0) * residue)
    dtype = residuals[0].dtype if jnp.issubdtype(residuals[0].dtype, jnp.floating) else dx.dtype
    return dx.astype(dtype), -sum_over(s * dx, (-1,), mesh_axes)


def sample_tangent(residuals, where, dx, dt, *, mesh_axes=()):
    has_derivative, temperature, s, residue = _softmax_of_draw(residuals, where, mesh_axes)
    ds = temperature.over(masked(normalizers.widen(dx), where, 0) - s * dt)
    return jnp.where(has_derivative, sum_over(residue * ds, (-1,), mesh_axes), 0)


def _softmax_of_draw(residuals, where, mesh_axes):
    """Returns which rows have a derivative, the `Temperature` T, s = (x - the drawn x) / T, and [drawn] - p.

    p = exp(s + log_probs) is the softmax. s is 0 where p is 0, and rows without a derivative get numbers without NaN.
    """
    logits, temperature, index, log_probs = residuals
    has_derivative = jnp.isfinite(log_probs) & ~is_zero(temperature)
    divisor = Temperature.of(jnp.where(has_derivative, temperature, 1))
    logits = jnp.where(has_derivative, logits, 0)
    x = logits_of(normalizers.to_float(logits, (-1,), where, mesh_axes), where)
    drawn = lax.psum(logits_at(index, x, None, mesh_axes), mesh_axes)  # 0 without a draw
    has_mass = has_derivative & (divisor.distance(x, drawn) > -jnp.inf)
    s = divisor.distance(*(jnp.where(has_mass, a, 0) for a in (x, drawn)))
    p = jnp.where(has_mass, jnp.exp(s + jnp.where(has_derivative, log_probs, 0)), 0)
    return has_derivative, divisor, s, jnp.where(positions(x, mesh_axes) == index, 1 - p, -p)
