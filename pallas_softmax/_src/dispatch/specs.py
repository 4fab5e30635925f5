"""Common shardings for arrays that share dimensions: the mesh axes of each dimension."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def explicit_axes(mesh) -> set[str]:
    """Returns the Explicit mesh axes. The types of arrays say how arrays are sharded over them."""
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}


def explicit_mesh(arrays: Sequence[jax.Array]) -> Any:
    """Returns the mesh of the first array with Explicit mesh axes in its type; None if there is no such array."""
    meshes = (jax.typeof(a).sharding.mesh for a in arrays)
    return next((mesh for mesh in meshes if explicit_axes(mesh)), None)


def share_sharding(x: jax.Array, *others: Any) -> list:
    """Gives `x` and arrays (or None) that broadcast to it one common sharding, if types say how they are sharded."""
    arrays = [a for a in (x, *others) if a is not None]
    mesh = explicit_mesh(arrays)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return [x, *others]

    def full(a) -> list[bool]:
        return [n == size for n, size in zip(a.shape, x.shape)]

    axes = shared_axes(x.shape, [(jax.typeof(a).sharding.spec, full(a)) for a in arrays], mesh.shape)

    def lay(a):
        if a is None:
            return None
        spec = spec_of(axes, full(a))
        if jax.typeof(a).sharding.spec == spec:
            return a
        return jax.sharding.reshard(a, NamedSharding(mesh, spec))

    return [lay(a) for a in (x, *others)]


def shared_axes(shape: tuple[int, ...], arrays: Sequence[tuple], sizes) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, taken from the first array that is sharded there and divides evenly.

    Args:
      shape: the full shape.
      arrays: for each array, its `PartitionSpec`, and which of its dimensions belong to the full shape.
      sizes: the number of devices along each mesh axis.
    """
    spec, used = [], set()
    for a, n in enumerate(shape):
        entries = [axes_of_entry(of[a]) for of, full in arrays if full[a] and a < len(of)]
        fit = [e for e in entries if e and not used & {*e} and n % math.prod(sizes[name] for name in e) == 0]
        spec.append(fit[0] if fit else ())
        used |= {*spec[-1]}
    return spec


def spec_of(axes: Sequence[tuple[str, ...]], full: Sequence[bool]) -> P:
    """Returns the `PartitionSpec` of an array that has the mesh axes `axes` in its `full` dimensions."""
    return P(*(of or None if carries else None for of, carries in zip(axes, full)))


def axes_of_entry(entry) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a `PartitionSpec`: None, a name, or a tuple of names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
