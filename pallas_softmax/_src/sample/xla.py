"""Plain JAX of `sample` and `filter_logits`: the draw, its derivatives, and filtered rows. `rows.py` has the filters.

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

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.masks import at, logits_of, masked, positions, row_at, stored, sum_over
from pallas_softmax._src.sample import rows
from pallas_softmax._src.sample.noise import gumbel_at
from pallas_softmax._src.stats.xla import logits_at
from pallas_softmax._src.temperatures import Temperature, is_zero


def sample(logits, where, words, temperature, top_k, top_p, min_p, *, stride):
    """Draws once from each row of softmax(logits / temperature), restricted by the filters.

    Returns, (..., 1) each: the index in the whole row (int32), log softmax(logits / temperature) there, and the
    `log_mass` of the `Cutoff`. They are -1 and NaN in a row without a draw.
    """
    cut = rows.cutoff(logits, where, temperature, top_k, top_p, min_p)
    indices = jnp.broadcast_to(positions(logits), logits.shape)
    drawn = draw(logits, where, indices, gumbel_at(words, indices, stride), temperature, cut)
    m = cut.top if jnp.issubdtype(logits.dtype, jnp.floating) else jnp.zeros_like(cut.top)
    x = at(rows.elements(logits, where), jnp.maximum(drawn, 0))
    return rows.drawn_results(drawn, x, m, cut, temperature)


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

    def of_one_sign(mass):
        return jnp.where(jnp.any(mass > 0, -1, keepdims=True), jnp.maximum(mass, 0), jnp.maximum(-mass, 0))

    def winner(mass, noise):
        return lax.argmax(jnp.log(mass) + noise, mass.ndim - 1, jnp.int32)[..., None]

    # One sum for both signs: the negative masses are too faint to matter where there are positive ones.
    sums = of_one_sign(jnp.sum(rows.in_chunks(jnp.where(mass > 0, mass, 2.0**-80 * mass)), -1))
    chunk = winner(sums, noise[..., :count])
    index = chunk * size + winner(of_one_sign(row_at(rows.in_chunks(again), chunk)), noise[..., count:])
    return jnp.where(jnp.max(sums, -1, keepdims=True) > 0, index, -1)


def filtered(logits, where, temperature, cut: rows.Cutoff, *, mesh_axes=()):
    """Returns logits / temperature with -inf where an entry is not kept; NaN in rows without a distribution."""
    x = rows.as_float(logits)
    live = rows.is_kept(logits, where, cut.key, cut.index, positions(x, mesh_axes)) & jnp.isfinite(x)
    z = rows.tempered(jnp.where(live, x, 0), cut.top, jnp.where(jnp.isnan(temperature), 1, temperature))
    nothing = (cut.top == -jnp.inf) & ~jnp.isnan(temperature)
    return jnp.where(live, z, jnp.where((cut.index >= 0) | nothing, -jnp.inf, jnp.nan))


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
