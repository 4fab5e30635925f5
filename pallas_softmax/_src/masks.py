"""Plain JAX helpers of all operations: masks, positions, sums over rows that a mesh may spread, and non-finite results.

x, logits     the logits, of any rank
where         None, or a boolean of the rank of the logits that broadcasts to them; False leaves a logit out
mesh_axes     the mesh axes that each row is spread over, if any
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.normalizers import widen


def sum_over(x, axes, mesh_axes):
    return lax.psum(jnp.sum(x, axes, keepdims=True), tuple(mesh_axes))


def positions(x, mesh_axes=()):
    """Returns the positions of the elements in their whole rows: int32, (1, ..., V), of the rank of x."""
    first = lax.axis_index(mesh_axes) * x.shape[-1] if mesh_axes else 0
    return first + lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1)


def stored(arrays):
    """Returns a tree of arrays. XLA must store them in memory before it uses them.

    Otherwise XLA may compute an element anew for each use, in fusions that round differently.
    """
    if jax.__version_info__ >= (0, 11):
        return lax.optimization_barrier(arrays)
    stored_array = functools.partial(lax.platform_dependent, cpu=_stored_by_branch, default=lax.optimization_barrier)
    return jax.tree.map(stored_array, arrays)  # each by itself: a branch keeps the mesh axes that an array varies over


def _stored_by_branch(arrays):
    """For jax 0.10, which drops barriers on a CPU before it fuses, but keeps branches. The first branch always runs."""
    other = functools.partial(jax.tree.map, lambda a: ~a if a.dtype == bool else -a)
    return lax.cond(lax.optimization_barrier(True), lambda a: a, other, arrays)


def own_arrays(arrays):
    """Returns a tree of arrays, the inputs or outputs of a kernel. None of them is a slice of a larger array.

    Otherwise XLA (jax 0.11) passes the address of a slice to the kernel, even if it is not aligned, as in
    softmax(x[1:65]) of 1,000 columns. Mosaic GPU refuses addresses that are not multiples of 256 bytes, and Triton
    relies on 16. In a loop that puts outputs into a larger array, XLA may also run the kernel twice. Each array has a
    barrier of its own, because XLA can look through one of several arrays.
    """
    return jax.tree.map(lax.optimization_barrier, arrays)


def stored_on_cpu(x):
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


def is_column(labels: jax.Array, vocab: int) -> jax.Array:
    """Returns which labels are in [0, vocab)."""
    return (labels >= 0) & (labels < vocab)


def at(x, indices, mode="promise_in_bounds", fill_value=None) -> jax.Array:
    """Returns the elements at indices of the last axis. By default all are in bounds: checks take longer on a CPU."""
    if not indices.shape[-1]:  # jax 0.10 refuses this along an Explicit mesh axis
        return jnp.zeros_like(indices, dtype=x.dtype)
    if not is_partly_manual():
        return jnp.take_along_axis(x, indices, -1, mode=mode, fill_value=fill_value)
    return _summed_at(jnp.broadcast_to(x, (*indices.shape[:-1], x.shape[-1])), indices, mode, fill_value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _summed_at(x, indices, mode, fill_value) -> Any:
    """Does what `at` does. If XLA divides the rows and the last axis, it sums what devices found, and does not abort.

    The sum is of bits: a sum of floats would lose the sign of -0, and on a CPU subnormal numbers.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        fill_value = np.array(np.nan if fill_value is None else fill_value, x.dtype).view(_bits(x).dtype)
    return _at_coordinates(_bits(x), indices, mode, fill_value).view(x.dtype)


@_summed_at.defjvp
def _(mode, fill_value, primals, tangents):
    x, indices = primals
    dx = _at_coordinates(tangents[0], indices, mode, 0)
    return _summed_at(x, indices, mode, fill_value), dx


def _bits(x):
    return x.view(f"int{jnp.finfo(x.dtype).bits}") if jnp.issubdtype(x.dtype, jnp.floating) else x


def _at_coordinates(x, indices, mode, fill_value):
    if indices.shape[-1] == 1:  # a gather would still abort in `verify`
        is_there = jnp.arange(x.shape[-1]) == indices
        found = jnp.sum(jnp.where(is_there, x, 0), -1, keepdims=True, dtype=x.dtype)
        is_found = jnp.any(is_there, -1, keepdims=True)
        return found if fill_value is None else jnp.where(is_found, found, fill_value)
    rows = (lax.broadcasted_iota(jnp.int32, indices.shape, i) for i in range(x.ndim - 1))
    return x.at[(*rows, indices)].get(mode=mode, fill_value=fill_value)


def row_at(x, position):
    """Returns the row of each matrix (..., S, n) at a position (..., 1): (..., n). It has no derivative."""
    if not is_partly_manual():
        return jnp.take_along_axis(x, position[..., None], -2, mode="promise_in_bounds")[..., 0, :]
    is_row = jnp.arange(x.shape[-2])[:, None] == position[..., None]
    bits = _bits(x)
    return jnp.sum(jnp.where(is_row, bits, 0), -2, dtype=bits.dtype).view(x.dtype)


def mask_at(where, x, indices) -> Any:
    """Returns the elements of the mask at indices of the last axis of `x`; False beyond it."""
    return None if where is None else at(jnp.broadcast_to(where, x.shape), indices, "fill", False)


def masked(x, where, value):
    return x if where is None else jnp.where(where, x, value)


def logits_of(x, where):
    """Returns logits in the dtype of the arithmetic, with -inf where the mask is False."""
    return masked(widen(x), where, -jnp.inf)
