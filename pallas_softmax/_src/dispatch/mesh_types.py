"""Mesh axes in the types of arrays: over which an array varies inside `jax.shard_map`, and its cotangents with it.

Inside `shard_map` the type of an array says over which mesh axes its value may differ from device to device
(`check_vma`). Operands of an operation must agree in that, so what varies over fewer axes is cast. Where `check_vma`
is off, types say nothing, and each device holds a copy, with a cotangent of its own, of what is the same on all.
"""

from typing import Any

import jax
from jax import lax


def vary_together(*arrays: Any, over: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> Any:
    """Returns the arrays (None stays), cast to vary over each mesh axis that one of them varies over.

    Args:
      *arrays: trees of arrays.
      over: further mesh axes that they are cast to vary over.
      but: mesh axes that none is cast to vary over.
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
    """Returns whether types say what varies over these mesh axes: `check_vma` of `jax.shard_map`."""
    return _varying_axes(lax.axis_index(mesh_axes)) >= set(mesh_axes)


def sum_cotangents(cotangents: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Sums over `mesh_axes` the cotangents of a value that is replicated there, unless types make JAX do so."""
    return cotangents if not mesh_axes or is_tracked(mesh_axes) else lax.psum(cotangents, mesh_axes)


def share_cotangent(cotangent: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
    """Returns a device's share of the cotangent of an argument that is replicated over `mesh_axes`: JAX sums these."""
    return cotangent if not mesh_axes or is_tracked(mesh_axes) else cotangent / lax.axis_size(mesh_axes)


def _varying_axes(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
