"""The derivatives of the log-probability of a draw, in plain JAX."""

import jax.numpy as jnp
from jax import lax

from pallas_softmax_base._src import normalizers
from pallas_softmax_base._src.masks import logits_of
from pallas_softmax_base._src.topk.xla import indices_in_shard, topk_grad, topk_tangent


def sample_grad(residuals, where, g, *, mesh_axes=()):
    """Returns the derivatives of log_probs of a draw in the logits and in the temperature.

    They are 0 in rows without a draw, and at temperature 0. In other rows, they are the results of `topk_grad` with
    log=True and the drawn index as winner. g is the cotangent of log_probs.
    """
    g = jnp.where(_has_derivative(residuals), g, 0)
    residuals = _drawn_as_winner(residuals, where, mesh_axes)
    return topk_grad(residuals, where, g, jnp.zeros_like(g), log=True, mesh_axes=mesh_axes)


def sample_tangent(residuals, where, dx, dt, *, mesh_axes=()):
    """Returns the tangent of log_probs of a draw: the transpose of `sample_grad`."""
    winner = _drawn_as_winner(residuals, where, mesh_axes)
    dlog_probs, _ = topk_tangent(winner, where, dx, dt, log=True, mesh_axes=mesh_axes)
    return jnp.where(_has_derivative(residuals), dlog_probs, 0)


def _has_derivative(residuals):
    """Returns which rows have a draw, at another temperature than 0."""
    _, temperature, _, log_probs = residuals
    return jnp.isfinite(log_probs) & (temperature != 0)


def _drawn_as_winner(residuals, where, mesh_axes):
    """Returns the residuals of `topk_grad` for a draw; m is the drawn logit, so that d is exp(-log_probs).

    Below e^-60 m is larger, so that neither d nor exp((x - m) / temperature) overflows. Rows without a draw get numbers
    that make no NaN.
    """
    logits, temperature, index, log_probs = residuals
    has_draw = jnp.isfinite(log_probs)
    logits, log_probs = jnp.where(has_draw, logits, 0), jnp.where(has_draw, log_probs, 0)
    x = logits_of(normalizers.to_float(logits, (-1,), where, mesh_axes), where)
    temperature = jnp.where(has_draw & (temperature != 0), temperature, 1)
    if mesh_axes:
        in_shard, own = indices_in_shard(index, logits.shape[-1], mesh_axes)
        at_index = jnp.take_along_axis(x, in_shard, -1, mode="fill", fill_value=0)
        drawn = lax.psum(jnp.where(own, at_index, 0), mesh_axes)
    else:
        drawn = jnp.take_along_axis(x, jnp.maximum(index, 0), -1)  # -1: no draw
    excess = jnp.maximum(-log_probs - 60, 0)
    return logits, temperature, drawn + temperature * excess, jnp.exp(-log_probs - excess), index
