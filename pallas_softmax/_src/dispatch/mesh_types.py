"""The mesh axes in the types of arrays inside `jax.shard_map`.

With `check_vma`, the type of an array names the mesh axes that the array may vary over, from device to device. Operands
of an operation must vary over the same axes, so this file casts them. Without `check_vma`, types say nothing: each
device holds a copy of a replicated value, and each copy has its own cotangent.
"""

from typing import Any

import jax
from jax import lax


def vary_together(*arrays: Any, over: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> Any:
    """Returns the arrays, cast to vary over each mesh axis that one of them varies over. None stays.

    Args:
      *arrays: trees of arrays.
      over: further mesh axes to vary over.
      but: mesh axes that no array is cast to.
    """
    axes = frozenset(over).union(*map(_varying_axes, jax.tree.leaves(arrays))) - frozenset(but)

    def vary(a):
        missing = tuple(axes - _varying_axes(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(vary, arrays)


def varies(x: Any, mesh_axes: tuple[str, ...]) -> bool:
    """Returns whether the type of the array says that it may differ along these mesh axes."""
    return bool(_varying_axes(x) & set(mesh_axes))


def is_tracked(mesh_axes: tuple[str, ...]) -> bool:
    """Returns whether types track these mesh axes (`check_vma` of `jax.shard_map`)."""
    return _varying_axes(lax.axis_index(mesh_axes)) >= set(mesh_axes)


def sum_cotangents(cotangents: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Sums the cotangents of a value that is replicated over `mesh_axes`, unless types make JAX sum them."""
    return cotangents if not mesh_axes or is_tracked(mesh_axes) else lax.psum(cotangents, mesh_axes)


def share_cotangent(cotangent: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
    """Returns a device's share of the cotangent of a replicated argument. JAX sums the shares over `mesh_axes`."""
    return cotangent if not mesh_axes or is_tracked(mesh_axes) else cotangent / lax.axis_size(mesh_axes)


def _varying_axes(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
