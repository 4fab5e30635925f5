"""Derivatives of operations that divide the logits by a temperature: top-k and sample."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src.dispatch.derivatives import Derivatives, Static, derivatives_of
from pallas_softmax._src.dispatch.mesh_types import share_cotangent
from pallas_softmax._src.dispatch.operation import Operation
from pallas_softmax._src.dispatch.specs import explicit_axes


def derivatives_with_temperature(operation: Operation) -> Derivatives:
    """Returns the derivatives of an operation in its logits and its temperature.

    Integer logits have no derivative. Rows may share a temperature; its cotangent is then the sum over these rows.

    Args:
      operation: the operation. The first two arrays that its derivatives take are the logits and the temperature.
    """
    derivatives = derivatives_of(operation)

    def tangent(function: Callable) -> Callable:
        def with_temperature(static: Static, saved, dxs):
            logits, *_ = saved[0]
            dlogits = dxs[:-1] or (jnp.zeros_like(logits, jnp.float32),)
            return function(static, saved, (*dlogits, dxs[-1]))

        return with_temperature

    def cotangent(function: Callable) -> Callable:
        def with_temperature(static: Static, saved, dys):
            logits, temperature, *_ = saved[0]
            dlogits, dt = function(static, saved, dys)
            shared = tuple(a for a, size in enumerate(temperature.shape) if size == 1)
            dt = share_cotangent(jnp.sum(dt, shared, keepdims=True), static.forward.call.mesh_axes)
            return (dlogits, dt) if jnp.issubdtype(logits.dtype, jnp.floating) else (dt,)

        return with_temperature

    return Derivatives(
        tangent(derivatives.tangent),
        cotangent(derivatives.cotangent),
        tangent(_of_whole_rows(derivatives.plain_tangent)),
        cotangent(_of_whole_rows(derivatives.plain_cotangent, logits_first=True)),
    )


def _of_whole_rows(function: Callable, *, logits_first: bool = False) -> Callable:
    """Returns the plain map, which gathers rows that Explicit mesh axes divide: JAX cannot index along such axes.

    Args:
      function: the plain map.
      logits_first: whether the first result has the shape of the logits, and so must be sharded like them.
    """

    def on_whole_rows(static: Static, saved, arrays):
        sharding = jax.typeof(saved[0][0]).sharding
        if not explicit_axes(sharding.mesh) or sharding.spec[-1] is None:
            return function(static, saved, arrays)

        def gathered(array):
            spec = jax.typeof(array).sharding.spec
            return jax.sharding.reshard(array, NamedSharding(sharding.mesh, P(*spec[:-1], None)))

        first, *others = function(static, *jax.tree.map(gathered, (saved, arrays)))
        return (jax.sharding.reshard(first, sharding) if logits_first else first, *others)

    return on_whole_rows
