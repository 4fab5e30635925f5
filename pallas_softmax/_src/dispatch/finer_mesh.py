"""Reads XLA's shardings as `PartitionSpec`s, on the coarsest mesh that can express them.

XLA knows the device of each tile, but no mesh. It may also split one axis of the program's mesh over two dimensions. On
a mesh of 8 devices, a reshape from (2, 64) to (2, 4, 16) does so:

    mesh axes   shape        PartitionSpec
    d=8         (2, 64)      (None, d)
    d=8         (2, 4, 16)   there is none for 4 x 2 tiles
    a=4, b=2    (2, 4, 16)   (None, a, b)

The mesh has the devices of the program in the same order. Only its axes may differ.
"""

import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P


def decode(
    devices: int, arrays: Sequence[Sequence[Sequence[int]] | None], ranks: Sequence[int]
) -> tuple[AbstractMesh, list[P]]:
    """Returns a mesh, and how each array is sharded on it. `arrays` are the results of `jax_internals.tiles`."""
    tiles = [np.array(of or np.zeros((rank, devices)), int) for of, rank in zip(arrays, ranks)]
    sizes, axes = common_axes(devices, tiles)
    names = tuple(f"axis{i}" for i in range(len(sizes)))
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    return mesh, [P(*(tuple(names[i] for i in of) or None for of in each)) for each in axes]


def common_axes(devices: int, arrays: Sequence[np.ndarray]) -> tuple[tuple[int, ...], list[list[tuple[int, ...]]]]:
    """Returns the axis sizes of a mesh, and the mesh axes of each dimension of each array, as numbers.

    `arrays` hold the index of each device's tile, (dimensions, devices). An array is replicated if no mesh can express
    its tiling together with the tilings of the arrays before it.
    """
    sizes, fitting = (devices,), []
    for tiles in arrays:
        trial = [*fitting, tiles]
        trial_sizes = _split(np.concatenate(trial))
        if all(_axes_of(each, trial_sizes) is not None for each in trial):
            sizes, fitting = trial_sizes, trial
    # a tiling that did not fit may fit the mesh of later ones
    return sizes, [_axes_of(tiles, sizes) or [()] * len(tiles) for tiles in arrays]


def _split(tiles: np.ndarray) -> tuple[int, ...]:
    """Returns the sizes of mesh axes: along each, the tiles ascend in equal steps."""
    sizes = []  # the last mesh axis first
    while (devices := tiles.shape[1]) > 1:
        even = (tiles == tiles[:, 1:2] * np.arange(devices)).all(0)
        size = devices if even.all() else int(even.argmin())
        if not size or devices % size:  # no mesh fits, as `_axes_of` finds out
            size = devices
        sizes.append(size)
        tiles = tiles[:, ::size]
    return tuple(sizes[::-1]) or (1,)


def _axes_of(tiles: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Returns the mesh axes of each dimension, or None if tiles are not in the order of any mesh axes."""
    positions = np.indices(sizes).reshape(len(sizes), -1)
    axes = []
    for numbering in tiles:
        steps = {axis: numbering[math.prod(sizes[axis + 1 :])] for axis, size in enumerate(sizes) if size > 1}
        major_first = sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis])
        index = np.zeros_like(numbering)
        for axis in major_first:
            index = index * sizes[axis] + positions[axis]
        if (index != numbering).any():
            return None
        axes.append(tuple(major_first))
    return axes
