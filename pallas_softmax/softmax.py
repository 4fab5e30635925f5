"""softmax, log_softmax and logsumexp: arguments checked, backward wired, implementation chosen."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_softmax import arguments, dispatch, online
from pallas_softmax.arguments import Axis, AxisName
from pallas_softmax.online import Normalizer


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
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over: each device has an
        equal part of it, of `x` and `where`, and gets that part of the result. Not for complex `x`.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      An array of the shape of `x`. A row with +inf or NaN, or all of -inf, is NaN; a fully masked one is 0.

    Raises:
      TypeError: `x` or `where` is not an array, `x` is boolean, or `axis_name` is no name.
      ValueError: `axis` is out of range or repeated, `where` is not boolean or does not fit, `axis_name` is
        not bound, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    logits, mask, axes, names = arguments.rows("softmax", "x", x, axis, where, axis_name)
    logits = online.to_float(logits, axes, mask, names)
    return _softmax(logits, mask, axes, _plan("softmax", logits, mask, axes, names, implementation))


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> jax.Array:
    """x - max(x) - log(sum(exp(x - max(x)))) over `axis`, as `jax.nn.log_softmax`.

    Arguments and errors as for `softmax`. Masked positions, and fully masked rows, give -inf.
    """
    logits, mask, axes, names = arguments.rows("log_softmax", "x", x, axis, where, axis_name)
    logits = online.to_float(logits, axes, mask, names)
    return _log_softmax(logits, mask, axes, _plan("log_softmax", logits, mask, axes, names, implementation))


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

    Arguments and errors as for `softmax`; booleans count as 0 and 1. An empty or fully masked row gives -inf.
    With `axis_name` the result is that of the whole row, the same on all devices that it is spread over.
    """
    logits, mask, axes, names = arguments.rows("logsumexp", "a", a, axis, where, axis_name, boolean=True)
    logits = logits.astype(jax.eval_shape(jnp.exp, logits).dtype)
    choice = dispatch.choose(arguments.call("logsumexp", logits, axes, mask, names=names), implementation)
    out, _ = _logsumexp(logits, mask, axes, (choice, None))
    return (out if keepdims else jnp.squeeze(out, axes)).astype(logits.dtype)


Plan = tuple[dispatch.Choice, dispatch.Choice | None]  # for the operation and for its backward


def _plan(op, x, where, axes, names, implementation) -> Plan:
    """The choices for the operation and for its backward."""
    forward = dispatch.choose(arguments.call(op, x, axes, where, names=names), implementation)
    backward = dispatch.choose(arguments.call(f"{op}_grad", x, axes, where, names=names), implementation)
    return forward, backward


def _differentiable(op, residuals):
    """The operation `op` of the implementations, with `op`_grad(residuals(x, y), where, dy) as backward.

    Without a choice for it the backward is the plain one.
    """

    def plain(plan):
        return dispatch.differentiable(f"{op}_grad", plan[1].call.names if plan[1] else ())

    def run(x, where, axes, plan):
        return dispatch.run(plan[0], x, where, axes=axes)

    run.__name__ = op  # for profiles
    forward = jax.custom_vjp(run, nondiff_argnums=(2, 3))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def backward(saved, where, dy, axes, plan):
        if plan[1] is None:
            return plain(plan)(saved, where, dy, axes=axes)
        return dispatch.run(plan[1], saved, where, dy, axes=axes)

    def forward_fwd(x, where, axes, plan):
        y = forward(x, where, axes, plan)
        return y, (residuals(x, y), where)

    def forward_bwd(axes, plan, saved, dy):
        saved, where = saved
        if plan[1] is None:  # the result is the same on all devices that the row is spread over
            dy = dispatch.summed(dy, plan[0].call.names)
        return backward(saved, where, dy, axes, plan), None

    def backward_fwd(saved, where, dy, axes, plan):
        return backward(saved, where, dy, axes, plan), (saved, where, dy)

    def backward_bwd(axes, plan, saved, ddx):  # kernels have no derivatives: the plain backward's are used
        saved, where, dy = saved
        _, vjp = jax.vjp(lambda saved, dy: plain(plan)(saved, where, dy, axes=axes), saved, dy)
        d_saved, d_dy = vjp(ddx)
        return d_saved, None, d_dy

    forward.defvjp(forward_fwd, forward_bwd)
    backward.defvjp(backward_fwd, backward_bwd)
    return jax.jit(forward, static_argnums=(2, 3))


_softmax = _differentiable("softmax", lambda x, y: (y,))
_log_softmax = _differentiable("log_softmax", lambda x, y: (y,))
# The backward is elementwise, so XLA fuses it with its neighbours: one read and one write. No derivative
# depends on m, which is a constant here and in d.
_logsumexp = _differentiable("logsumexp", lambda x, y: (x, Normalizer(jax.lax.stop_gradient(y[1].m), y[1].d)))
