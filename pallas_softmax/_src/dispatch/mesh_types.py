"""The mesh axes in the types of arrays: Explicit axes, and inside `jax.shard_map` the axes that arrays vary over.

Arrays that share dimensions need one sharding over Explicit axes, so this file finds a common one.

Inside `jax.shard_map` with `check_vma`, the type of an array names the mesh axes that the array may vary over, from
device to device. Operands of an operation must vary over the same axes, so this file casts them. Without `check_vma`,
types say nothing: each device holds a copy of a replicated value, and each copy has its own cotangent.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# --- Explicit axes --------------------------------------------------------------------------------------


def explicit_mesh(arrays: Sequence[jax.Array]) -> Any:
    """Returns the mesh of the first array with Explicit mesh axes in its type; None if there is no such array."""
    meshes = (jax.typeof(a).sharding.mesh for a in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def share_sharding(x: jax.Array, *others: Any) -> list:
    """Gives `x` and arrays (or None) that broadcast to it one common sharding, if types say how they are sharded."""
    arrays = jax.tree.leaves((x, others))
    mesh = explicit_mesh(arrays)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return [x, *others]

    def full(a) -> list[int | None]:
        return [i if n == x.shape[i] else None for i, n in enumerate(a.shape)]

    specs = [(jax.typeof(a).sharding.spec, full(a)) for a in arrays]
    axes = shared_axes(dict(enumerate(x.shape)), specs, mesh.shape)

    def lay(a):
        spec = spec_of(full(a), axes)
        is_laid = jax.typeof(a).sharding.spec == spec
        return a if is_laid else jax.sharding.reshard(a, NamedSharding(mesh, spec))

    return jax.tree.map(lay, [x, *others])


def shared_axes(
    sizes: Mapping[Any, int], arrays: Sequence[tuple], mesh_sizes: Mapping[str, int], taken: Iterable[str] = ()
) -> dict[Any, tuple[str, ...]]:
    """Returns the mesh axes of each dimension, from the first array that is sharded there and divides evenly.

    Earlier dimensions keep the mesh axes that they share with later ones.

    Args:
      sizes: the dimensions by name.
      arrays: pairs of a `PartitionSpec` and the names of the array's dimensions.
      mesh_sizes: the numbers of devices along the mesh axes.
      taken: mesh axes that no dimension gets.
    """
    axes, used = {}, {*taken}
    for name, n in sizes.items():
        entries = [axes_of_entry(dict(zip(names, spec)).get(name)) for spec, names in arrays]
        free = [tuple(axis for axis in entry if axis not in used) for entry in entries]
        fit = [of for of in free if of and n % math.prod(mesh_sizes[axis] for axis in of) == 0]
        axes[name] = fit[0] if fit else ()
        used |= {*axes[name]}
    return axes


def spec_of(names: Sequence[Any], axes: Mapping[Any, tuple[str, ...]]) -> P:
    return P(*(axes.get(name) or None for name in names))


def reshard_along(x: jax.Array, dimension: int, entry: Any) -> jax.Array:
    """Returns `x` with this entry of the `PartitionSpec` for a dimension, if types say how `x` is sharded.

    Mesh axes that divide another dimension of `x` already stay there.
    """
    sharding = jax.typeof(x).sharding
    spec = [*sharding.spec]
    used = {name for e in spec for name in axes_of_entry(e)} & {*axes_of_entry(entry)}
    if not sharding.mesh.explicit_axes or not spec or spec[dimension] == entry or used:
        return x
    spec[dimension] = entry
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(*spec)))


def laid_like(x: jax.Array, a: Any) -> Any:
    """Returns an array with the mesh axes of `x` in the dimensions that it shares with the first ones of `x`."""
    for i, n in enumerate(jnp.shape(a)):
        a = reshard_along(a, i, jax.typeof(x).sharding.spec[i] if n == x.shape[i] else None)
    return a


def with_auto_axes(function: Callable, specs: Any, *arrays: Any) -> Any:
    """Returns function(*arrays), divided by XLA: Explicit mesh axes become Auto axes. Results get the `specs`."""
    mesh = explicit_mesh(jax.tree.leaves(arrays))
    if mesh is None:
        return function(*arrays)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)(*arrays)


def axes_of_entry(entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


# --- Axes of shard_map ----------------------------------------------------------------------------------


def vary_together(*arrays: Any, over: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> Any:
    """Returns the trees of arrays, cast to vary over `over` and each mesh axis that one varies over, except `but`."""
    axes = frozenset(over).union(*map(_varying_axes, jax.tree.leaves(arrays))) - frozenset(but)

    def vary(a):
        missing = tuple(axes - _varying_axes(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(vary, arrays)


def varies(x: Any, mesh_axes: tuple[str, ...]) -> bool:
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


def rounded_sum(
    x: jax.Array, dtype: Any, mesh_axes: tuple[str, ...], change: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """Returns change(the sum over the devices), on all of them: the sum in the dtype of `x`, rounded to `dtype`.

    `change` works element by element.
    """
    divisible = [i for i, n in enumerate(x.shape) if n % lax.axis_size(mesh_axes) == 0]
    if x.dtype == dtype or not divisible:
        return change(lax.psum(x, mesh_axes)).astype(dtype)
    # Three quarters of the bytes of an all-reduce of float32 numbers: rounded numbers come back.
    axis = divisible[0]
    part = change(lax.psum_scatter(x, mesh_axes, scatter_dimension=axis, tiled=True)).astype(dtype)
    return _all_gather(part, mesh_axes, axis)


def _all_gather(x: jax.Array, mesh_axes: tuple[str, ...], axis: int = 0) -> jax.Array:
    to = "invarying" if is_tracked(mesh_axes) else "varying"
    # tiled, because JAX cannot lower the other form with symbolic dimensions
    return lax.all_gather(x, mesh_axes, axis=axis, tiled=True, to=to)


def _varying_axes(x: Any) -> frozenset[str]:
    is_abstract = isinstance(x, jax.ShapeDtypeStruct) and x.manual_axis_type is not None
    return (x if is_abstract else jax.typeof(x)).manual_axis_type.varying


# Up to so many devices, one all-gather is faster than two collectives. Beyond, it would grow with the devices.
GATHERED_DEVICES = 8


def merge_over(axes: tuple[str, ...], merge: Callable, parts: tuple, own: Any, partly: Callable | None = None) -> Any:
    """Returns merge(gathered, own): each device's numbers of a row, merged to results of the whole row.

    It merges over one mesh axis after the other, the last one first. Along an axis of more than `GATHERED_DEVICES`
    devices, each device merges its share of the rows, and the results are gathered. So the bytes that a device receives
    do not grow with the number of devices.

    `merge` maps arrays (..., devices * n) and `own` to a tree of arrays (..., n). `parts` are (..., n); `own` is the
    same on all devices, (..., n) or (1, ..., n). `partly` takes the place of `merge` over each axis except the first,
    and returns numbers like `parts`.
    """
    for axis in axes[:0:-1]:
        parts = tuple(merge_over((axis,), partly or merge, parts, own))
    rows, devices = math.prod(parts[0].shape[:-1]), lax.axis_size(axes[0])
    # with one or two rows, an exchange sends no less
    if devices <= GATHERED_DEVICES or not isinstance(rows, int) or rows <= 2:
        words = _all_gather(_pack(parts)[None], axes[:1])
        return merge(_unpack(jnp.moveaxis(words, 0, -2), parts), own)

    def merged(words, own):
        return merge(_unpack(words.reshape(len(words), devices, -1), parts), own)

    return on_whole_rows(axes[:1], merged, _pack(parts), own)


def on_whole_rows(axes: tuple[str, ...], function: Callable, along_row: Any, own: Any) -> Any:
    """Returns function(along_row, own): each device runs it on its share of the rows, and the results are gathered.

    With many rows, a device receives about as many elements as it holds. `function` maps whole rows (rows, row length)
    and (rows, n) to a tree of arrays (rows, n). `along_row` are shards (..., V), and `own` is the same on all devices,
    (..., n). Dimensions of the batch may be 1, except in the first array of `along_row`.
    """
    batch, devices = jax.tree.leaves(along_row)[0].shape[:-1], lax.axis_size(axes)
    rows = math.prod(batch)
    if not isinstance(rows, int):  # a symbolic batch of jax.export cannot be divided
        return function(jax.tree.map(lambda a: _all_gather(a, axes, len(batch)), along_row), own)
    size = -(-rows // devices)

    def padded(a):
        a = jnp.broadcast_to(a, (*batch, a.shape[-1])).reshape(rows, -1)
        return jnp.pad(a, ((0, devices * size - rows), (0, 0)), mode="edge")

    def exchanged(a):
        shards = lax.all_to_all(padded(a).reshape(devices, size, -1), axes, 0, 0)
        return jnp.moveaxis(shards, 0, 1).reshape(size, -1)

    def share(a):
        if a.size == a.shape[-1]:
            return a.reshape(1, -1)
        return lax.dynamic_slice_in_dim(padded(a), lax.axis_index(axes) * size, size)

    results, tree = jax.tree.flatten(function(jax.tree.map(exchanged, along_row), jax.tree.map(share, own)))
    words = _all_gather(_pack(results), axes)[:rows, None]
    return tree.unflatten([a.reshape(*batch, -1) for a in _unpack(words, results)])


def _pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the bits of arrays (..., n) side by side, as words of 32 bits. A 16-bit number takes a word."""
    words = [a.view(jnp.uint16).astype(jnp.uint32) if a.dtype.itemsize == 2 else a.view(jnp.uint32) for a in arrays]
    return jnp.concatenate(words, -1)


def _unpack(words: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays (..., devices * n) of the words (..., devices, all words of a device)."""
    sizes = [a.shape[-1] * max(1, a.dtype.itemsize // 4) for a in like]
    out = []
    for a, bits in zip(like, jnp.split(words, list(itertools.accumulate(sizes))[:-1], -1)):
        bits = bits.reshape(*bits.shape[:-2], bits.shape[-2] * bits.shape[-1])
        bits = bits.astype(jnp.uint16) if a.dtype.itemsize == 2 else bits
        out.append(bits.view(a.dtype))
    return out
