"""Plain JAX helpers of all operations: masks, sums over rows that a mesh may spread, and results that are not finite.

x, logits     the logits, of any rank
where         None, or a boolean of the rank of the logits that broadcasts to them; False leaves a logit out
mesh_axes     the mesh axes that each row is spread over, if any
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.normalizers import widen


def sum_over(x, axes, mesh_axes):
    """Returns the sum over `axes`, which keep size 1, and over the mesh axes that the row is spread over."""
    part = jnp.sum(x, axes, keepdims=True)
    return lax.psum(part, tuple(mesh_axes)) if mesh_axes else part


def stored(x):
    """Returns x. On a CPU, XLA must store x in memory before it uses x.

    Otherwise XLA puts a sum over rows and the formula that uses the sum in one loop, which is slower than two ("On a
    CPU" in benchmarks/results/NOTES.md).
    """
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def differentiable_if_finite(x):
    """Returns x. The derivative of an element that is not finite is 0, whatever its tangent or its cotangent is."""
    return jnp.where(jnp.isfinite(x), x, lax.stop_gradient(x))


def is_partly_manual() -> bool:
    """Returns whether a `jax.shard_map` around this leaves Auto mesh axes, so that XLA may divide arrays over them.

    XLA aborts the process if it divides a gather along two dimensions there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes and mesh.auto_axes)


def at(x, indices, mode="promise_in_bounds", fill_value=None):
    """Returns the elements at indices of the last axis. By default all are in bounds: checks take longer on a CPU."""
    if not is_partly_manual():
        return jnp.take_along_axis(x, indices, -1, mode=mode, fill_value=fill_value)
    # XLA would abort the process if it divided the rows and the last axis.
    x = jnp.broadcast_to(x, (*indices.shape[:-1], x.shape[-1]))
    rows = (lax.broadcasted_iota(jnp.int32, indices.shape, i) for i in range(x.ndim - 1))
    return x.at[(*rows, indices)].get(mode=mode, fill_value=fill_value)


def mask_at(where, x, indices):
    """Returns the elements of the mask, which broadcasts to `x`, at indices of the last axis."""
    return at(jnp.broadcast_to(where, x.shape), indices, "fill")


def masked(x, where, value):
    """Returns x, with `value` where the mask is False."""
    return x if where is None else jnp.where(where, x, value)


def logits_of(x, where):
    """Returns logits in the dtype of the arithmetic, with -inf where the mask is False."""
    return masked(widen(x), where, -jnp.inf)
