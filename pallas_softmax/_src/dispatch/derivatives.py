"""Evaluates operations on rows with their derivatives, in both modes and of any order, by one mechanism.

A kernel has no derivatives that JAX could find, and JAX's own `custom_vjp` gives reverse mode only. So JAX computes
ys = f(xs) from xs without derivatives. A `jax.custom_jvp` that returns ys unchanged then adds the derivatives: the
tangents dys are a linear map of dxs, which JAX sees as one operation, `linear_p`. f itself stays outside of the
`custom_jvp`, because some tools do not look into a `custom_jvp`.

    forward mode      evaluates `linear_p`: dys = tangent(saved, dxs)
    reverse mode      JAX transposes `linear_p`: dxs = cotangent(saved, dys), which is the kernel of the gradient
    higher orders     `linear_p` is linear in dxs; in `saved`, the same functions in plain JAX are differentiated

JAX keeps `saved` alone between a forward and its backward, as with `custom_vjp`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_softmax._src.dispatch import linear_map
from pallas_softmax._src.dispatch.choose import choose, choose_if_able, choose_plain, record
from pallas_softmax._src.dispatch.linear_map import LinearMap
from pallas_softmax._src.dispatch.mesh import as_rows, is_visible
from pallas_softmax._src.dispatch.mesh_types import reshard_along, share_cotangent, sum_cotangents
from pallas_softmax._src.dispatch.operation import PER_ROW, Call, Choice, RowOperation
from pallas_softmax._src.temperatures import is_zero


class Static(NamedTuple):
    """Everything about a call that is known while tracing; hashable."""

    forward: Choice
    gradient: Choice
    tangent: Choice
    keywords: tuple[tuple[str, Any], ...]  # the static arguments, as the items of a dictionary

    @property
    def operation(self) -> RowOperation:
        return self.forward.call.row_operation


def choose_all(call: Call, implementation: str | None, **keywords: Any) -> Static:
    """Returns the choices for a call and its derivatives. `keywords` are the static arguments of the operation."""
    operation = call.row_operation
    assert operation.gradient is not None and operation.tangent is not None
    forward = choose(call, implementation)
    if operation.gradient_needs_kernel:
        gradient = choose(call.of(operation.gradient), implementation)
    else:
        gradient = choose_if_able(call.of(operation.gradient), implementation)
        if gradient.cuda != "xla":
            record(gradient)
    is_symmetric = operation.tangent is operation.gradient
    tangent = gradient if is_symmetric else choose_plain(call.of(operation.tangent))
    return Static(forward, gradient, tangent, tuple(keywords.items()))


@functools.partial(jax.jit, static_argnums=0)
def evaluate(static: Static, *arrays: Any) -> Any:
    """Returns the results of a call, with derivatives. `arrays` are the positional arguments of the operation."""
    operation = static.operation
    results = as_rows(static.forward, *jax.tree.map(lax.stop_gradient, arrays), **dict(static.keywords))
    leaves, tree = jax.tree.flatten(results)
    # Only floats get derivatives: JAX has no zero tangent for an integer that varies over axes of `jax.shard_map`.
    named: Any = dict(zip(operation.result_names, leaves, strict=True))
    integers = {name: a for name, a in named.items() if jnp.issubdtype(a.dtype, jnp.integer)}
    floats = {name: a for name, a in named.items() if name not in integers}
    named |= _with_derivatives(static, floats, integers, arrays)
    return jax.tree.unflatten(tree, named.values())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_derivatives(static: Static, results: dict[str, jax.Array], integers: dict, arrays: tuple) -> dict:
    # jet ignores a custom_jvp, and would find derivatives of 0. It has no rule for a name, so it raises.
    return checkpoint_name(results, f"pallas_softmax.{static.operation.name}")


@_with_derivatives.defjvp
def _(static: Static, primals: tuple, tangents: tuple) -> tuple[dict, dict]:
    operation, (_, integers, arrays) = static.operation, primals
    results: Any = _with_derivatives(static, *primals)
    given = dict(zip(operation.argument_names, arrays, strict=True))
    saved, tree = jax.tree.flatten(jax.tree.map((given | results | integers).get, operation.saved))
    tangent_of = dict(zip(operation.argument_names, tangents[2], strict=True))
    dxs = [tangent_of[name] for name in operation.variables if jnp.issubdtype(given[name].dtype, jnp.inexact)]
    # Plain operations that need no wrapper need no primitive either.
    wrapped = not all(is_visible(choice, saved) for choice in (static.gradient, static.tangent))
    dys = linear_map.apply(LinearMap(_tangent, _cotangent, static, tree, wrapped), saved, dxs)
    dys = dict(zip(operation.differentiable, dys, strict=True))
    return results, {name: dys[name] if name in dys else jnp.zeros_like(y) for name, y in results.items()}


def _tangent(static: Static, saved: tuple, dxs: tuple, *, plain: bool) -> tuple:
    """Returns dys. Integer logits have no tangent, so 0 takes its place."""
    if len(dxs) < len(static.operation.variables):
        dxs = (jnp.zeros_like(saved[0][0], jnp.float32), *dxs)
    saved, without_limits = _without_limits(static, saved)
    return without_limits(_derivative(static, static.tangent, saved, dxs, plain))


def _without_limits(static: Static, saved: tuple) -> tuple[tuple, Callable[[tuple], tuple]]:
    """Returns `saved` with 1 in place of temperatures of 0, and a function that sets numbers of these rows to 0.

    The static argument `scaled` says that there are temperatures.
    """
    if not dict(static.keywords).get("scaled", False):
        return saved, lambda numbers: numbers
    (logits, temperature, *residuals), *others = saved
    is_limit = is_zero(temperature)  # where no result depends on the logits or the temperature
    saved = (logits, jnp.where(is_limit, 1, temperature), *residuals), *others
    return saved, lambda numbers: tuple(jnp.where(is_limit, 0, a) for a in numbers)


def _cotangent(static: Static, saved: tuple, dys: tuple, *, plain: bool) -> tuple:
    """Returns dxs. The cotangent of a temperature is a sum over rows that share it."""
    operation, mesh_axes = static.operation, static.forward.call.mesh_axes
    if operation.results == PER_ROW:  # replicated over the mesh axes that a row is spread over
        dys = sum_cotangents(dys, mesh_axes)
    saved, without_limits = _without_limits(static, saved)
    dys = without_limits(dys)
    dxs = _derivative(static, static.gradient, saved, dys, plain)
    if "temperature" not in operation.variables:
        return dxs
    logits, temperature, *_ = saved[0]
    dlogits, dt = dxs
    shared = tuple(a for a, size in enumerate(temperature.shape) if size == 1)
    dt = share_cotangent(jnp.sum(dt, shared, keepdims=True), mesh_axes)
    return (dlogits, dt) if jnp.issubdtype(logits.dtype, jnp.floating) else (dt,)


def _derivative(static: Static, choice: Choice, saved: tuple, arrays: tuple, plain: bool) -> tuple:
    """Runs the gradient or the tangent on `saved` and `arrays`, with the static arguments that it accepts."""
    operation, logits = choice.call.row_operation, saved[0][0]
    accepted = inspect.signature(operation.plain).parameters
    keywords = {name: value for name, value in static.keywords if name in accepted}
    arrays = (*saved, *arrays)
    if plain:
        if not static.operation.divided_by_xla:  # JAX cannot index along rows that Explicit mesh axes divide
            arrays = jax.tree.map(lambda a: reshard_along(a, -1, None), arrays)
        results = operation.plain(*arrays, **keywords, mesh_axes=static.forward.call.mesh_axes)
    else:
        results = as_rows(choice, *arrays, **keywords)
    results = results if isinstance(results, tuple) else (results,)
    if operation.is_gradient and arrays[0][0] is not logits:  # `reshard_along` changed it
        return (jax.sharding.reshard(results[0], jax.typeof(logits).sharding), *results[1:])
    return results
