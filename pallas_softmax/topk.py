"""fused_topk: what it promises, and how its gradient is wired."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from pallas_softmax import arguments, execution
from pallas_softmax.arguments import AxisName
from pallas_softmax.call import describe
from pallas_softmax.choice import choose, choose_plain
from pallas_softmax.implementations import xla
from pallas_softmax.sharding.specs import lay_together
from pallas_softmax.varying import share_cotangent, sum_cotangents, varies, vary_together


class TopK(NamedTuple):
    """The winners of each row, best first.

    Attributes:
      values: their probabilities, or the logs of these; the shape of the logits, with k along the axis of the row.
      indices: int32, their positions in the row; the same shape.
    """

    values: jax.Array
    indices: jax.Array


def fused_topk(
    logits: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    log: bool = False,
    dtype: DTypeLike | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> TopK:
    """The k largest entries of p = softmax(logits / temperature), normalised over the whole row.

    Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 4; the order is that of `jax.lax.top_k`.

    Args:
      logits: real array of any shape with at least one dimension.
      k: static int, 0 <= k <= logits.shape[axis].
      axis: the axis of a row; in the result it has size k.
      where: boolean, broadcastable to `logits`. A masked position has probability 0 and is chosen only
        when fewer than k are unmasked.
      temperature: positive scalar, or one per row (shape of `logits` without `axis`). One that is traced
        and not positive gives NaN values. It is kept to where its reciprocal is a normal number.
      log: return log p instead of p.
      dtype: floating dtype of `values`; by default that of `logits` (float32 for integers).
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over: each device passes its
        equal shard of `logits` and `where`, in the order of `lax.axis_index`. `k` and the indices are those of the
        whole row; the result is the same on all its devices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      TopK(values, indices). `indices` (int32) are exactly those of `lax.top_k(logits, k)`: descending by
      +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN, equal values by the lowest index first. Masked
      winners have value 0 (log: -inf); a row with an unmasked NaN or +inf has NaN values.
      Differentiable (reverse mode) in `logits` and `temperature`.

    Raises:
      TypeError: `logits` is no real array, `k` is traced or not an integer, `axis` is not an int, or
        `dtype` is not floating.
      ValueError: `k` or `axis` is out of range, `temperature` is not positive or does not fit, `where` is
        not boolean or does not fit, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    name = "fused_topk"
    x = arguments.array(name, "logits", logits)
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: logits must be a float or integer array, got {x.dtype.name}")
    k = arguments.static_int(name, "k", k)
    axis = arguments.static_int(name, "axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{name}: axis {axis} is out of bounds for logits of shape {x.shape}")
    axis %= x.ndim
    mesh_axes = arguments.bound_mesh_axes(name, axis_name)
    length = x.shape[axis] * (jax.lax.axis_size(mesh_axes) if mesh_axes else 1)
    if not 0 <= k <= length:
        raise ValueError(f"{name}: k must be from 0 to the row's length {length}, got {k}")
    mask = None if where is None else jnp.moveaxis(arguments.mask(name, where, x.shape), axis, -1)
    floating = jax.eval_shape(jnp.exp, x).dtype
    t = _temperature(name, temperature, x.shape[:axis] + x.shape[axis + 1 :], floating)
    out_dtype = jnp.dtype(floating if dtype is None else jax.dtypes.canonicalize_dtype(dtype))
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(f"{name}: dtype must be floating, got {out_dtype.name}")

    if varies(t, mesh_axes):
        raise ValueError(f"{name}: temperature must be the same on all devices of axis_name={axis_name!r}")

    choice = choose(describe("topk", x, (axis,), mask, k, mesh_axes), implementation)
    x, mask, t = lay_together(jnp.moveaxis(x, axis, -1), mask, t)
    x, mask, t = vary_together(x, mask, t, but=mesh_axes)  # the temperature is the same for the whole row
    x, mask = vary_together(x, mask, over=mesh_axes)
    (values, indices), _ = _jitted_topk(x, mask, t, k, bool(log), out_dtype, choice)
    return TopK(jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis))


def _temperature(name: str, temperature, batch: tuple[int, ...], dtype) -> jax.Array:
    """The checked temperature, of shape (1, ..., 1) or batch + (1,); NaN where a traced one is not positive."""
    t = arguments.array(name, "temperature", temperature)
    if jnp.issubdtype(t.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: temperature must be real, got {t.dtype.name}")
    if not isinstance(temperature, Tracer) and not np.all(np.asarray(temperature) > 0):
        raise ValueError(f"{name}: temperature must be positive, got {temperature}")
    if t.shape not in ((), batch):
        raise ValueError(f"{name}: temperature must be a scalar or of the batch shape {batch}, got {t.shape}")
    t = t.astype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)
    t = t.reshape(*(batch if t.ndim else (1,) * len(batch)), 1)
    tiny = jnp.finfo(
        t.dtype
    ).tiny  # beyond tiny and 1 / tiny, 1 / t is no normal number: 0 times an infinite x is NaN
    return jnp.clip(jnp.where(t > 0, t, jnp.nan), tiny, 1 / tiny)


# Like the functions of softmax.py, top-k and its gradient are both `jax.custom_vjp` functions.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _topk(logits, where, temperature, k, log, dtype, choice):
    """TopK of the last axis, and the normalizer of the logits."""
    stored = (
        dtype if jnp.finfo(dtype).bits >= 16 else jnp.dtype(jnp.float32)
    )  # kernels store no narrower floats
    winners, normalizer = execution.run(choice, logits, where, temperature, k=k, log=log, dtype=stored)
    return TopK(winners.values.astype(dtype), winners.indices), normalizer


def _topk_fwd(logits, where, temperature, k, log, dtype, choice):
    out: Any = _topk(logits, where, temperature, k, log, dtype, choice)
    (_, indices), (m, d) = out
    # p does not depend on m, which is a constant here and in d
    return out, (logits, where, temperature, jax.lax.stop_gradient(m), d, indices)


def _topk_bwd(k, log, dtype, choice, saved, cotangents):
    """The cotangents of logits and temperature; see `implementations.xla.topk_grad`."""
    logits, where, temperature, m, d, indices = saved
    floating = jnp.issubdtype(logits.dtype, jnp.floating)
    if not k:  # without winners nothing depends on the logits
        return jnp.zeros_like(logits) if floating else None, None, jnp.zeros_like(temperature)
    (g, _), (_, g_d) = cotangents
    mesh_axes = choice.call.mesh_axes
    residuals = logits, temperature, m, d, indices
    gradient: Any = _gradient(residuals, where, sum_cotangents((g, g_d), mesh_axes), log, choice)
    dlogits, dt = gradient
    one_for_all = tuple(a for a, size in enumerate(temperature.shape) if size == 1)
    dt = share_cotangent(jnp.sum(dt, one_for_all, keepdims=True), mesh_axes)
    return dlogits if floating else None, None, dt


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gradient(residuals, where, cotangents, log, choice):
    gradient = dataclasses.replace(choice.call, op="topk_grad")
    return execution.run(choose_plain(gradient), residuals, where, cotangents, log=log)


def _gradient_fwd(residuals, where, cotangents, log, choice):
    return _gradient(residuals, where, cotangents, log, choice), (residuals, where, cotangents)


def _gradient_bwd(log, choice, saved, dd):
    (logits, temperature, m, d, indices), where, cotangents = saved

    def gradient(logits, temperature, d, cotangents):
        residuals = logits, temperature, m, d, indices
        return xla.topk_grad(residuals, where, cotangents, log=log, mesh_axes=choice.call.mesh_axes)

    _, vjp = jax.vjp(gradient, logits, temperature, d, cotangents)
    d_logits, d_temperature, d_d, d_cotangents = vjp(dd)
    return (d_logits, d_temperature, None, d_d, None), None, d_cotangents


_gradient.defvjp(_gradient_fwd, _gradient_bwd)
_topk.defvjp(_topk_fwd, _topk_bwd)
_jitted_topk = jax.jit(_topk, static_argnums=(3, 4, 5, 6))
