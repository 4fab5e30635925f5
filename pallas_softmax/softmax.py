"""softmax, log_softmax and logsumexp: what they promise, and how their gradients are wired."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_softmax import arguments, execution, online, operations
from pallas_softmax.arguments import Axis, AxisName
from pallas_softmax.call import Choice, describe
from pallas_softmax.choice import choose
from pallas_softmax.implementations import xla
from pallas_softmax.online import Normalizer
from pallas_softmax.varying import sum_cotangents


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> jax.Array:
    """exp(x - max(x)) / sum(exp(x - max(x))) over `axis`, as `jax.nn.softmax`.

    Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.

    Args:
      x: logits of any shape. float16 and bfloat16 are computed in float32 and returned in their own dtype;
        integers are promoted to float.
      axis: the axis, axes or (None) all axes of a row.
      where: boolean, broadcastable to `x`. Masked positions are left out of the row and give 0.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over: each device passes its
        equal shard of `x` and `where`, and gets that shard of the result. Not for complex `x`.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      An array of the shape of `x`. A row with +inf or NaN, or all of -inf, is NaN; a fully masked one is 0.

    Raises:
      TypeError: `x` or `where` is not an array, `x` is boolean, or `axis_name` is no name.
      ValueError: `axis` is out of range or repeated, `where` is not boolean or does not fit, `axis_name` is
        not bound, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    rows = _float_rows("softmax", x, axis, where, axis_name)
    return _softmax(rows.x, rows.where, rows.axes, _choose("softmax", rows, implementation))


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> jax.Array:
    """x - max(x) - log(sum(exp(x - max(x)))) over `axis`, as `jax.nn.log_softmax`.

    Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.

    Args:
      x: logits of any shape, with the dtypes of `softmax`.
      axis: the axis, axes or (None) all axes of a row.
      where: boolean, broadcastable to `x`. Masked positions are left out of the row and give -inf.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over, as for `softmax`.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      An array of the shape of `x`. A row with +inf or NaN, or all of -inf, is NaN; a fully masked one is -inf.

    Raises:
      TypeError, ValueError, NotImplementedError: as `softmax`.
    """
    rows = _float_rows("log_softmax", x, axis, where, axis_name)
    return _log_softmax(rows.x, rows.where, rows.axes, _choose("log_softmax", rows, implementation))


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    *,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> jax.Array:
    """log(sum(exp(a))) over `axis`, as `jax.nn.logsumexp` (without `b` and `return_sign`).

    Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3, lines 1 to 6.

    Args:
      a: logits of any shape, with the dtypes of `softmax`; booleans count as 0 and 1.
      axis: the axis, axes or (None, the default) all axes of a row.
      where: boolean, broadcastable to `a`. Masked positions are left out.
      keepdims: whether the reduced dimensions stay, with size 1.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over. The result is that of
        the whole row, the same on all its devices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      An array of the shape of `a` without the reduced dimensions. An empty or fully masked row, or one of nothing
      but -inf, gives -inf; one with +inf gives +inf, one with NaN NaN.

    Raises:
      TypeError, ValueError, NotImplementedError: as `softmax`.
    """
    rows = arguments.rows("logsumexp", "a", a, axis, where, axis_name, boolean=True)
    rows = rows._replace(x=rows.x.astype(jax.eval_shape(jnp.exp, rows.x).dtype))
    choice = choose(
        describe("logsumexp", rows.x, rows.axes, rows.where, mesh_axes=rows.mesh_axes), implementation
    )
    out, _ = _logsumexp(rows.x, rows.where, rows.axes, Choices(choice, None))
    return (out if keepdims else jnp.squeeze(out, rows.axes)).astype(rows.x.dtype)


class Choices(NamedTuple):
    """The implementations of an operation and of its gradient, which is None where it is always plain JAX."""

    forward: Choice
    gradient: Choice | None


def _float_rows(function: str, x, axis, where, axis_name) -> arguments.Rows:
    """The checked arguments; integer logits become floats with the same softmax."""
    rows = arguments.rows(function, "x", x, axis, where, axis_name)
    return rows._replace(x=online.to_float(rows.x, rows.axes, rows.where, rows.mesh_axes))


def _choose(op: str, rows: arguments.Rows, implementation: str | None) -> Choices:
    """The choices for the operation and for its gradient."""
    gradient = str(operations.TABLE[op].gradient)
    calls = (
        describe(name, rows.x, rows.axes, rows.where, mesh_axes=rows.mesh_axes) for name in (op, gradient)
    )
    return Choices(*(choose(call, implementation) for call in calls))


def _differentiable(op: str, residuals: Callable) -> Callable:
    """A function (x, where, axes, choices) of the operation `op`, with reverse-mode derivatives of any order.

    The forward and its gradient are both `jax.custom_vjp` functions, since kernels have no derivatives of their own:

        forward    run op                      backward: the gradient below
        gradient   run the gradient of op      backward: jax.vjp of its plain JAX form

    Args:
      op: the operation, a key of `operations.TABLE`.
      residuals: (x, y) -> what the gradient needs of the logits and of the result.
    """
    gradient_op = str(operations.TABLE[op].gradient)

    def run(x, where, axes, choices):
        return execution.run(choices.forward, x, where, axes=axes)

    run.__name__ = op  # for profiles
    forward = jax.custom_vjp(run, nondiff_argnums=(2, 3))

    def plain_gradient(axes, choices):
        return functools.partial(
            xla.functions[gradient_op], axes=axes, mesh_axes=choices.forward.call.mesh_axes
        )

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def gradient(saved, where, dy, axes, choices):
        if choices.gradient is None:
            return plain_gradient(axes, choices)(saved, where, dy)
        return execution.run(choices.gradient, saved, where, dy, axes=axes)

    def forward_fwd(x, where, axes, choices):
        y = forward(x, where, axes, choices)
        return y, (residuals(x, y), where)

    def forward_bwd(axes, choices, saved, dy):
        saved, where = saved
        if (
            choices.gradient is None
        ):  # logsumexp: the result is the same on all devices that the row is spread over
            dy = sum_cotangents(dy, choices.forward.call.mesh_axes)
        return gradient(saved, where, dy, axes, choices), None

    def gradient_fwd(saved, where, dy, axes, choices):
        return gradient(saved, where, dy, axes, choices), (saved, where, dy)

    def gradient_bwd(axes, choices, saved, ddx):
        saved, where, dy = saved
        _, vjp = jax.vjp(lambda saved, dy: plain_gradient(axes, choices)(saved, where, dy), saved, dy)
        d_saved, d_dy = vjp(ddx)
        return d_saved, None, d_dy

    forward.defvjp(forward_fwd, forward_bwd)
    gradient.defvjp(gradient_fwd, gradient_bwd)
    return jax.jit(forward, static_argnums=(2, 3))


_softmax = _differentiable("softmax", lambda x, y: (y,))
_log_softmax = _differentiable("log_softmax", lambda x, y: (y,))
# The gradient is elementwise, so XLA fuses it with its neighbours: one read and one write. No derivative depends on
# m, which is a constant here and in d.
_logsumexp = _differentiable("logsumexp", lambda x, y: (x, Normalizer(jax.lax.stop_gradient(y[1].m), y[1].d)))
