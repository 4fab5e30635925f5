"""Plain JAX of `sample` and `filter_logits`: where the filters cut each row, and the draw.

    logits        of any rank, floats or integers; a row is the last axis
    where         None, or a boolean of the rank of the logits that broadcasts to them
    temperature   0, or a positive normal number with a normal reciprocal, or NaN: then the row has no draw. 0 keeps the
                  first entry in the order of `lax.top_k`, whatever the filters.
    top_k         int32, at least 1; or None. At the row's length or more it filters nothing.
    top_p         in [0, 1], or None. 0 keeps the first entry, 1 keeps all that top_k keeps.
    min_p         in [0, 1], or None
    mesh_axes     the mesh axes that each row is spread over, if any

The temperature and the filters have the rank of the logits. Their size is 1 in the last dimension, and 1 or the size of
the logits in the others.
"""

import jax.numpy as jnp

from pallas_softmax._src.sample import noise as noise_of
from pallas_softmax._src.sample.best import by_best, cutoff_among, sample_among
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
    totals_of_rows,
)
from pallas_softmax._src.sample.search import search


def cutoff(logits, where, temperature, top_k, top_p, min_p, *, mesh_axes=()):
    """Returns where the filters cut each row, a `Cutoff`."""
    filters, row = (top_k, top_p, min_p), Row.of(logits, mesh_axes)

    def by_search(logits):
        return search(logits, where, temperature, *filters, row)

    def of_best(best, totals):
        cut, _, complete = cutoff_among(best, totals, temperature, *filters, row.length)
        return cut, complete | is_free(*filters, row.length)

    return by_best(logits, where, temperature, top_k, row, of_best, by_search)


def draw(logits, where, noise, temperature, key, index, *, mesh_axes=()):
    """Draws once from each row: returns the kept entry with the largest sum of logits / temperature and noise.

    Args:
      logits, where, temperature, mesh_axes: see the top of this file.
      noise: floating, in the shape of the logits.
      key, index: the fields of a `Cutoff`.

    Returns:
      Each (..., 1): the index in the whole row (int32), and log softmax(logits / temperature) there, over all entries.
      They are -1 and NaN in a row without a draw.
    """
    row = Row.of(logits, mesh_axes)
    totals = totals_of_rows(logits, where, temperature, row)
    kept = is_kept(logits, where, key, index, row.indices(logits.ndim))
    perturbed = jnp.where(kept, scaled(as_float(logits), temperature, totals.greedy) + noise, -jnp.inf)
    drawn = row.min(jnp.where(perturbed == row.max(perturbed), row.indices(logits.ndim), NOWHERE))
    return drawn_results(drawn, row.at(elements(logits, where, row), drawn), totals)


def sample(logits, where, noise, temperature, top_k, top_p, min_p, *, stride, mesh_axes=()):
    """Draws once from each row of softmax(logits / temperature), restricted by the filters.

    Args:
      logits, where, temperature, top_k, top_p, min_p, mesh_axes: see the top of this file.
      noise, stride: the words of each row's noise, and their stride, as in `noise.py`.

    Returns:
      The results of `draw`, and the `log_mass` of the `Cutoff`.
    """
    filters, row = (top_k, top_p, min_p), Row.of(logits, mesh_axes)

    def by_search(logits):
        cut = search(logits, where, temperature, *filters, row)
        gumbel = noise_of.at(noise, jnp.broadcast_to(row.indices(logits.ndim), logits.shape), stride)
        drawn = draw(logits, where, gumbel, temperature, cut.key, cut.index, mesh_axes=mesh_axes)
        return *drawn, cut.log_mass

    def of_best(best, totals):
        return sample_among(best, totals, noise, temperature, *filters, row.length, stride=stride)

    return by_best(logits, where, temperature, top_k, row, of_best, by_search)


def filtered(logits, where, temperature, cut: Cutoff, *, positions=None, mesh_axes=()):
    """Returns logits / temperature with -inf where an entry is not kept; NaN in rows without a distribution.

    The logits are whole rows, or, with `positions`, the elements at these indices of the rows.
    """
    x = as_float(logits)
    positions = Row.of(logits, mesh_axes).indices(logits.ndim) if positions is None else positions
    greedy = (temperature == 0) | jnp.isinf(cut.logsumexp)
    live = is_kept(logits, where, cut.key, cut.index, positions) & jnp.isfinite(x)
    z = scaled(jnp.where(live, x, 0), jnp.where(jnp.isnan(temperature), 1, temperature), greedy)
    failed = jnp.isnan(cut.log_mass) & (cut.logsumexp != -jnp.inf)
    return jnp.where(failed, jnp.nan, jnp.where(live, z, -jnp.inf))
