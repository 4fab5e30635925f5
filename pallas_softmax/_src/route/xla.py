"""The router and its derivatives in plain JAX: the reference for the kernels.

    logits   (..., E), floats, or integers that float32 may be unable to hold; a row is the last axis
    bias     None, or floats of the rank of the logits that broadcast to them

Arithmetic is in float32, or in the dtype of the logits if that is wider. The softmax of integers is computed from their
exact distances from the largest one.
"""

import jax.numpy as jnp
from jax import lax
from jax.lax import top_k  # as it is at the import, in case a program replaces jax.lax.top_k by ours

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.masks import at, masked
from pallas_softmax._src.normalizers import Normalizer, widen
from pallas_softmax._src.route.formulas import Gate, Groups, RowReductions, score_alone
from pallas_softmax._src.topk.xla import best_order, put

OVER_ROW = RowReductions(
    lambda a: jnp.max(a, -1, keepdims=True, initial=-jnp.inf), lambda a: jnp.sum(a, -1, keepdims=True)
)


def route(logits, bias, *, k, gate: Gate, groups: Groups):
    x = widen(normalizers.to_float(logits, (-1,)))
    is_integer = jnp.issubdtype(logits.dtype, jnp.integer)
    values = logits.astype(x.dtype) if is_integer else x
    normalizer = normalizers.reduce(x)
    if bias is None:
        indices = best_order(logits, None, k)
    else:
        m, d = normalizer
        score = jnp.exp(x - m) / d if gate.score == "softmax" else score_alone(gate.score, values)
        biased = _with_one_nan(score + bias)
        takes_part = None if groups.count == 1 else _in_best_groups(biased, groups)
        _, indices = _best(biased, takes_part, k)
    won = at(x if gate.score == "softmax" else values, indices)
    logsumexp = normalizers.log_of(normalizer)
    if is_integer:  # x are distances
        logsumexp = OVER_ROW.largest(values) + logsumexp
    return gate.weights(won, normalizer, OVER_ROW), indices, logsumexp


def _in_best_groups(x, groups: Groups):
    grouped = x.reshape(*x.shape[:-1], groups.count, x.shape[-1] // groups.count)
    best, _ = _best(grouped, None, groups.best)
    _, chosen = _best(_with_one_nan(jnp.sum(best, -1)), None, groups.top)
    group = lax.broadcasted_iota(chosen.dtype, (*[1] * chosen.ndim, groups.count), chosen.ndim)
    takes_part = jnp.any(chosen[..., None] == group, -2)
    return jnp.broadcast_to(takes_part[..., None], grouped.shape).reshape(x.shape)


def _best(x, where, k):
    """Returns the k best entries of x along the last axis, and their indices; masked positions come last.

    x has no -NaN. A CPU selects floats, and would sort integers. On a GPU, `best_order` also looks for a -NaN.
    """

    def by_value():
        indices = best_order(x, where, k)
        return at(x, indices), indices

    def by_key():
        keys = masked(sort_keys.key(x), where, sort_keys.lowest_key(x.dtype))
        best, indices = top_k(keys, k)
        return sort_keys.from_key(best, x.dtype), indices

    return lax.platform_dependent(cpu=by_value, default=by_key)


def _with_one_nan(x):
    """Replaces all NaNs by +NaN, since platforms differ in the signs of the NaNs that they compute."""
    return jnp.where(jnp.isnan(x), jnp.nan, x)


def route_grad(residuals, g, g_logsumexp, *, gate: Gate, mesh_axes=()):
    """The cotangent of a logit is p rest, and of a winner p rest + direct; see `Gate.cotangents`."""
    del mesh_axes  # a row is never spread by a user
    logits, indices = residuals
    x, p, normalizer = _softmax(logits)
    won, p_won = (at(a, indices) for a in (x, p))
    direct, rest = gate.cotangents(won, normalizer, widen(g), widen(g_logsumexp), OVER_ROW)
    dx = put((p * rest).astype(logits.dtype), indices, (p_won * rest + direct).astype(logits.dtype))
    return (dx,)


def route_tangent(residuals, dx, *, gate: Gate, mesh_axes=()):
    del mesh_axes
    logits, indices = residuals
    x, p, normalizer = _softmax(logits)
    dx = widen(dx)
    mean = jnp.sum(jnp.where(p == 0, 0, p * dx), -1, keepdims=True)
    won, dx_won = (at(a, indices) for a in (x, dx))
    return gate.tangents(won, normalizer, dx_won, mean, OVER_ROW), mean


def _softmax(logits):
    x = widen(normalizers.to_float(logits, (-1,)))
    m = lax.stop_gradient(normalizers.reduce(x).m)  # p does not depend on m
    e = jnp.exp(x - m)
    d = jnp.sum(e, -1, keepdims=True)
    return x, e / d, Normalizer(m, d)
