"""Token statistics and their derivatives in plain JAX: the reference for the kernel.

    logits, where, mesh_axes    as in `masks.py`; a row is the last axis, and no kernel has mesh_axes
    temperature                 (1, ..., 1) or (..., 1), at least 0; the logits of a row are divided by it
    labels                      int32, (..., 1): columns of the whole row

Below, u = (x - m) / temperature, where m is the largest logit. At temperature 0, it is 0 or -inf. m is a constant in
all derivatives: no statistic depends on the number that is subtracted before the exponential.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.masks import at, is_column, logits_of, mask_at, masked, positions, sum_over
from pallas_softmax._src.normalizers import Moments
from pallas_softmax._src.temperatures import Temperature


class RowStats(NamedTuple):
    """The statistics of each row, (..., 1) each, in the dtype of the arithmetic.

    Attributes:
      logsumexp: of the logits, divided by the temperature.
      entropy: of their softmax, in nats.
      at_label: u at the label; NaN for a label that is no column, -inf for a masked one.
      moments: (m, d, t). m is not divided by the temperature. d is the sum of exp(u), and t the sum of u exp(u).
      argmax: int32, the first position of the largest logit.
      rank: int32, as in `api.TokenStats`; 0 for a label that is no column, or a masked one. None unless asked for.
    """

    logsumexp: jax.Array
    entropy: jax.Array
    at_label: jax.Array
    moments: Moments
    argmax: jax.Array
    rank: jax.Array | None = None


def token_stats(logits, where, temperature, labels, *, scaled):
    """Returns the `RowStats` of each row. If not `scaled`, the temperature is 1."""
    x = logits_of(logits, where)
    argmax = first_of_largest(x) if x.shape[-1] else jnp.zeros((*x.shape[:-1], 1), jnp.int32)
    largest = at(x, argmax, "fill", -jnp.inf)
    m = largest if scaled else _maximum(x, largest)
    scale = Temperature.of(temperature) if scaled else None
    u = normalizers.distance(x, jnp.where(jnp.isinf(m), 0, m), scale)
    e = jnp.exp(u)
    m, d = normalizers.mended(m, jnp.sum(e, -1, keepdims=True))
    t = jnp.where(jnp.isnan(d), jnp.nan, jnp.sum(u * e, -1, keepdims=True))
    label_logit = logits_at(labels, logits, where)
    stats = finished(Moments(m, d, t), temperature, labels, label_logit, argmax, logits.shape[-1])
    return stats._replace(moments=Moments(largest, d, t))


def _maximum(x, largest):
    """Returns the maximum of each row; on a CPU, without a wait for the argmax. A maximum flushed to 0 is as good."""
    return lax.platform_dependent(cpu=lambda: jnp.max(x, -1, keepdims=True, initial=-jnp.inf), default=lambda: largest)


def ranked_stats(logits, where, temperature, labels, *, scaled):
    keys, is_ranked = label_keys(labels, logits, where)
    return with_rank(counted_stats(logits, where, temperature, labels, keys, scaled=scaled), is_ranked)


def counted_stats(logits, where, temperature, labels, at_labels, *, scaled):
    """Returns the `RowStats` of each row; in place of the rank, the number of logits before the label.

    The label may be in another shard of the row: it is counted from the start of this shard. `at_labels` is a result of
    `label_keys`.
    """
    keys = sort_keys.wide_key(logits)
    before = (keys > at_labels) | ((keys == at_labels) & (positions(logits) < labels))
    # float32 counts up to 2^24, and XLA for CPUs adds floats faster than integers
    vocab = logits.shape[-1]
    dtype = jnp.float32 if isinstance(vocab, int) and vocab <= 2**24 else jnp.int32
    count = jnp.sum(masked(before, where, False), -1, keepdims=True, dtype=dtype).astype(jnp.int32)
    return token_stats(logits, where, temperature, labels, scaled=scaled)._replace(rank=count)


def label_keys(labels, logits, where, mesh_axes=()):
    """Returns the sort key of the logit at each label, in 32 bits or more, and whether the label has a rank.

    A label has no rank if it is no column, or a masked one. The key of a label that is no column is 0.
    """
    own, columns = _own_columns(labels, logits, mesh_axes)
    at_label = at(logits, columns, "fill", 0)
    keys = jnp.where(own, sort_keys.wide_key(at_label), 0)
    is_ranked = own if where is None else own & mask_at(where, logits, columns)
    if not mesh_axes:
        return keys, is_ranked
    keys, owners = lax.psum((keys, is_ranked.astype(jnp.int32)), mesh_axes)
    return keys, owners > 0


def with_rank(stats: RowStats, is_ranked) -> RowStats:
    """Puts the rank in the place of the count of `counted_stats`."""
    count: Any = stats.rank
    return stats._replace(rank=jnp.where(is_ranked, 1 + count, 0))


def finished(moments: Moments, temperature, labels, label_logit, argmax, vocab: int) -> RowStats:
    """Returns the `RowStats` of whole rows, of `vocab` logits."""
    m, d, _ = moments
    u = Temperature.of(temperature).distance(label_logit, normalizers.shift(m))
    at_label = jnp.where(is_column(labels, vocab), u, jnp.nan)
    logsumexp = jnp.where(m == jnp.inf, m, Temperature.of(temperature).divide(m) + jnp.log(d))
    return RowStats(logsumexp, normalizers.entropy(moments), at_label, moments, argmax)


def first_of_largest(x):
    """Returns the first position of the largest element along the last axis, or of a NaN; int32, (..., 1)."""
    return jnp.argmax(sort_keys.value_key(x), -1, keepdims=True).astype(jnp.int32)


def logits_at(labels, logits, where, mesh_axes=()):
    """Returns the logit at each label; -inf if it is masked, 0 if the label is not in this shard."""
    own, columns = _own_columns(labels, logits, mesh_axes)
    x = normalizers.widen(at(logits, columns, "fill", 0))
    return jnp.where(own, masked(x, mask_at(where, logits, columns), -jnp.inf), 0)


def _own_columns(labels, logits, mesh_axes):
    """Returns which labels are in this shard, and their columns in it, else 0."""
    columns = labels - lax.axis_index(mesh_axes) * logits.shape[-1] if mesh_axes else labels
    own = is_column(columns, logits.shape[-1])
    return own, jnp.where(own, columns, 0)


def token_stats_grad(residuals, where, labels, g_lse, g_entropy, g_label, g_d, g_t, *, scaled, mesh_axes=()):
    """Returns the cotangents of the logits and the temperature, from the cotangents of `RowStats`, d and t.

    It is elementwise: one read and one write. The gradient of a row without an entropy is 0: no result of this row but
    logsumexp is finite, and logsumexp is infinite. In other rows, with p = exp(u) / d and the mean t / d of u,

        dx = (p (g_lse + g_d d + g_t d (1 + u) - g_entropy (u - t / d)) + g_label [label]) / temperature

    `residuals` are logits, temperature, m, d and t. A temperature of 0 has been replaced by 1, and its cotangents by 0.
    """
    logits = residuals[0]
    has_entropy, u, temperature, m, d, t = _harmless(residuals, where, scaled)
    g_lse, g_entropy, g_label, g_d, g_t = (jnp.where(has_entropy, g, 0) for g in (g_lse, g_entropy, g_label, g_d, g_t))
    entropy_factor = g_entropy / d
    constant = g_lse / d + g_d + g_t + entropy_factor * (t / d)
    near, is_label = jnp.maximum(u, normalizers.FAR), positions(logits, mesh_axes) == labels
    dz = masked(jnp.exp(near) * (constant + (g_t - entropy_factor) * near), where, 0)
    at_label = masked(jnp.where(is_label, g_label, 0), where, 0)
    over = Temperature.of(temperature).over
    dx = (over(dz + at_label) if scaled else dz + at_label).astype(logits.dtype)
    dt = sum_over(dz * near + at_label * jnp.where(is_label, u, 0), (-1,), mesh_axes)
    return dx, -over(dt + jnp.where(g_lse == 0, 0, over(g_lse * m)))


def _harmless(residuals, where, scaled):
    """Returns whether each row has an entropy, u, the temperature, m, d and t; if not, numbers that make no NaN."""
    logits, temperature, m, d, t = residuals
    has_entropy = jnp.isfinite(m) & jnp.isfinite(d)
    temperature, m, d, t = (jnp.where(has_entropy, a, other) for a, other in ((temperature, 1), (m, 0), (d, 1), (t, 0)))
    x = logits_of(logits, where)
    # Where x is -inf, u is a constant: its derivative in the temperature would be NaN.
    no_mass = jnp.isneginf(x) | ~has_entropy
    scale = Temperature.of(temperature) if scaled else None
    u = jnp.maximum(normalizers.below(jnp.where(no_mass, 0, x), m, scale), jnp.finfo(m.dtype).min)
    u = jnp.where(no_mass, normalizers.FAR, u)
    return has_entropy, u, temperature, m, d, t


def token_stats_tangent(residuals, where, labels, dx, dt, *, scaled, mesh_axes=()):
    """Returns the tangents of the first three `RowStats`, d and t: the transpose of `token_stats_grad`."""
    _, u, temperature, m, d, t = _harmless(residuals, where, scaled)
    near, is_label = jnp.maximum(u, normalizers.FAR), positions(u, mesh_axes) == labels
    e = jnp.exp(near)
    over, dx = Temperature.of(temperature).over, masked(normalizers.widen(dx), where, 0)
    du = over(dx - near * dt)
    dd = sum_over(e * du, (-1,), mesh_axes)
    dt_of_u = sum_over(e * near * du, (-1,), mesh_axes)
    dlabel = sum_over(jnp.where(is_label, over(dx - jnp.where(is_label, u, 0) * dt), 0), (-1,), mesh_axes)
    dlogsumexp = dd / d - over(jnp.where(dt == 0, 0, over(m * dt)))
    return dlogsumexp, (dd * (t / d) - dt_of_u) / d, dlabel, dd, dd + dt_of_u
