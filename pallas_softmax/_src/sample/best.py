"""Filters and draws that look at the best entries of each row only.

On a CPU, `lax.top_k` of a few elements of a long row is faster than the search for a cutoff, and only these elements
need noise. On a mesh, devices exchange the best entries instead of searching together.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.sample import noise as noise_of
from pallas_softmax._src.sample.rows import (
    NOWHERE,
    Cutoff,
    Row,
    Totals,
    as_float,
    cutoff_of,
    drawn_results,
    elements,
    is_free,
    keys,
    mass_wanted,
    scaled,
    totals_of_rows,
)

# The number of candidates of a row on a CPU, and the shortest rows that have candidates. On two CPU cores, `lax.top_k`
# takes 13 ms for 128 elements of each of 64 rows of 128,256, and 39 ms for 1,024 elements. A draw from each of 64 rows
# took, in ms (jax 0.11.2, 2026-11-23):
#
#                                       V = 4,096   8,192   16,384
#   top_k = 50              search            1.4     2.7      5.6
#                           candidates        3.1     3.8      4.8
#   top_k = 50 and a top_p  search            2.4     4.5      8.6
#                           candidates        3.1     3.9      5.0
_CANDIDATES, _LONG_ROW = 128, 2**14


class Best(NamedTuple):
    """The best entries of each row, (..., n), the best first.

    Attributes:
      key: their sort keys, as `wide_keys` returns them.
      index: their indices in the whole row.
      value: the logits, in the dtype of the arithmetic.
      x: the same; for integers, distances from the largest.
    """

    key: Any
    index: Any
    value: Any
    x: Any


def cutoff_among(best: Best, totals: Totals, temperature, top_k, top_p, min_p, length):
    """Returns the cutoff, which of the best entries are kept, and whether the row keeps no others.

    The row keeps no others if the list ends with an entry that is left out, or if the list is the whole row. A row
    without a draw also counts as complete. The cutoff is right in complete rows, and in rows that the filters leave
    whole.
    """
    n = best.key.shape[-1]
    position = lax.broadcasted_iota(jnp.int32, (1,) * (best.key.ndim - 1) + (n,), best.key.ndim - 1)
    mass = jnp.exp((best.x - totals.m) / totals.divisor)
    kept = jnp.ones(mass.shape, bool) if top_k is None else position < jnp.broadcast_to(top_k, mass.shape)
    known, kept_total = True, totals.total
    if top_k is not None:
        known = (top_k < n) | (top_k >= length)
        kept_total = jnp.where(top_k >= length, totals.total, _sum(jnp.where(kept, mass, 0)))
    if top_p is not None:
        before = jnp.cumsum(jnp.where(kept, mass, 0), -1)
        before = jnp.pad(before, [(0, 0)] * (before.ndim - 1) + [(1, 0)])[..., :-1]
        kept &= before < mass_wanted(top_p, kept_total)
    if min_p is not None:
        kept &= mass >= min_p
    kept = jnp.where(totals.greedy, position == 0, kept)
    count = jnp.sum(kept, -1, keepdims=True, dtype=jnp.int32)
    complete = (n == length) | known & (count < n) | totals.greedy | ~(totals.total >= 1)
    key, index = (jnp.take_along_axis(a, jnp.maximum(count - 1, 0), -1) for a in (best.key, best.index))
    free = is_free(top_k, top_p, min_p, length) & ~totals.greedy
    key, index = jnp.where(free, jnp.iinfo(key.dtype).min, key), jnp.where(free, NOWHERE, index)
    kept_total = jnp.where(free, totals.total, _sum(jnp.where(kept, mass, 0)))
    return cutoff_of(key, index, kept_total, totals, temperature), kept, complete


def sample_among(best: Best, totals: Totals, noise, temperature, top_k, top_p, min_p, length, *, stride):
    """Returns the results of `xla.sample`, and whether they are right: the row keeps no entries other than the best."""
    cut, kept, complete = cutoff_among(best, totals, temperature, top_k, top_p, min_p, length)
    perturbed = scaled(best.value, temperature, totals.greedy) + noise_of.at(noise, best.index, stride)
    perturbed = jnp.where(kept, perturbed, -jnp.inf)
    winner = perturbed == jnp.max(perturbed, -1, keepdims=True)
    drawn = jnp.min(jnp.where(winner, best.index, NOWHERE), -1, keepdims=True)
    x = jnp.max(jnp.where(best.index == drawn, best.x, -jnp.inf), -1, keepdims=True)
    return (*drawn_results(drawn, x, totals), cut.log_mass), complete


def by_best(logits, where, temperature, top_k, row: Row, of_best, by_search):
    """Returns the first result of of_best(best, totals), on a CPU for long rows with a top_k; else by_search(logits).

    The second result of `of_best` says which rows are complete. If some row is not, the search runs for all rows.
    """
    is_long = isinstance(row.vocab, int) and row.vocab >= _LONG_ROW
    if top_k is None or row.mesh_axes or as_float(logits).dtype != jnp.float32 or not is_long:
        return by_search(logits)

    def by_candidates(logits):
        best, listed = _best(logits, where, row)
        totals = totals_of_rows(logits, where, temperature, row)
        found, complete = of_best(best, totals)
        complete &= listed | ~(totals.total >= 1)
        # The search computes its arrays of whole rows itself, so that they take memory only if it runs.
        others = lax.cond(jnp.all(complete), lambda _: found, by_search, logits)
        chosen = [jnp.where(complete, *both) for both in zip(found, others)]
        return Cutoff(*chosen) if isinstance(found, Cutoff) else tuple(chosen)

    return lax.platform_dependent(logits, cpu=by_candidates, default=by_search)


def _best(logits, where, row: Row):
    """Returns the candidates of whole rows, in order, and whether these are really the best entries.

    They are not if `lax.top_k` orders entries differently than their keys: on a CPU, XLA treats denormal numbers as
    zeros. The second result depends on the row alone, so that a draw does not depend on other rows.
    """
    x = elements(logits, where, row)
    mask = None if where is None else jnp.broadcast_to(where, x.shape)
    _, index = lax.top_k(x.reshape(-1, row.vocab), _CANDIDATES)
    index = index.reshape(*x.shape[:-1], _CANDIDATES)
    key = keys(*(None if a is None else jnp.take_along_axis(a, index, -1) for a in (logits, mask)))
    lowest_first, index = lax.sort((~key, index), num_keys=2)
    last, last_index = ~lowest_first[..., -1:], index[..., -1:]

    def number(keys, indices):
        """Returns how many entries are up to the last candidate. A CPU adds floats five times as fast as integers."""
        before = (keys > last) | (keys == last) & (indices <= last_index)
        return jnp.sum(jnp.where(before, 1.0, 0.0), -1, keepdims=True)

    listed = number(keys(logits, where), row.indices(x.ndim)) == _CANDIDATES
    value, x = (jnp.take_along_axis(a, index, -1) for a in (as_float(logits), x))
    return Best((~lowest_first).astype(jnp.int32), index, value, x), listed


def _sum(x):
    return jnp.sum(x, -1, keepdims=True)
