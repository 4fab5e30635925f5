"""How a call is divided over the devices of a mesh.

Each device takes the rows it holds, or its shard of each row. Nothing is gathered. There are three cases:

    inside shard_map, with axis_name=   the shards are at hand: `on_shard`
    Explicit mesh axes                  types say how arrays are sharded: `jax.shard_map` around `on_shard`
    Auto mesh axes                      XLA decides on the sharding, and asks for a device's program: `partitioner.py`

Arrays that no mesh divides go to `platform.by_platform`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src.dispatch.choose import choose_plain
from pallas_softmax._src.dispatch.mesh_types import explicit_axes, explicit_mesh, shared_axes, spec_of
from pallas_softmax._src.dispatch.operation import PER_ROW, Choice, Operation
from pallas_softmax._src.dispatch.partitioner import Division, over_auto_axes, register
from pallas_softmax._src.dispatch.platform import by_platform, row_axes, run_shard
from pallas_softmax._src.dispatch.refusal import only_types


def over_mesh(choice: Choice, keywords: dict[str, Any], *arrays: Any) -> Any:
    """Runs a call on arrays of one rank that may be sharded."""
    operation = choice.call.row_operation
    if choice.call.mesh_axes:
        return on_shard(choice, arrays, keywords, choice.call.mesh_axes)
    leaves = jax.tree.leaves(arrays)
    left_to_xla = choice.requested == "xla" and operation.divided_by_xla
    if left_to_xla or not divisible(leaves):
        return by_platform(choice, arrays, keywords)

    return divide(_ROWS, choice, arrays, keywords)


def on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], mesh_axes: tuple[str, ...]) -> Any:
    """Runs a call on one device's shard of the arrays. `choice` is for the whole call.

    `mesh_axes` are the bound mesh axes that a row is spread over, in the order of `lax.axis_index`.
    """
    operation = choice.call.row_operation
    if not mesh_axes:
        return run_shard(choice, operation, arrays, keywords)
    if operation.on_mesh is None:
        return operation.plain(*arrays, **keywords, mesh_axes=mesh_axes)

    def run_step(step: Operation | None, arrays: tuple, keywords: dict[str, Any]):
        return run_shard(choice, step or operation.shard_step or operation, arrays, keywords)

    return operation.on_mesh(run_step, *arrays, **keywords, mesh_axes=mesh_axes)


def divide(division: Division, choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    mesh = explicit_mesh(jax.tree.leaves(arrays))
    if mesh is None and choice.call.objection is not None:  # a symbolic argument: XLA divides plain JAX
        return division.whole(choice, arrays, keywords)
    if mesh is None:
        return over_auto_axes(division, choice, arrays, keywords)
    return _over_explicit_axes(division, choice, arrays, keywords, mesh)


class _DimensionsOfRows:
    """`Dimensions` of an operation on rows. The dimensions of the full shape, the shape of the logits, share mesh axes.

    PER_ROW arrays have no full dimension along the row. If devices need whole rows, no array has one.
    """

    def __init__(self, choice: Choice, arrays: tuple, keywords: dict[str, Any], results: Any):
        operation = choice.call.row_operation
        shape, axes = jax.tree.leaves(arrays)[0].shape, row_axes(arrays, keywords)

        def full(kinds, tree) -> list[list[bool]]:
            kinds = jax.tree.leaves(jax.tree.broadcast(kinds, tree))
            return [
                [
                    n == size and (i not in axes or not (kind == PER_ROW or operation.whole_rows))
                    for i, (n, size) in enumerate(zip(a.shape, shape))
                ]
                for a, kind in zip(jax.tree.leaves(tree), kinds, strict=True)
            ]

        self.shape, self.row_axes = shape, axes
        self.arguments, self.results = full(operation.arguments, arrays), full(operation.results, results)

    def lay_out(self, specs, mesh_sizes) -> tuple[list[P], list[P], tuple[str, ...]]:
        axes = shared_axes(self.shape, [*zip(specs, self.arguments)], mesh_sizes)
        arguments, results = (
            [spec_of(axes, full) for full in each] for each in (self.arguments, self.results)
        )
        return arguments, results, tuple(name for a in self.row_axes for name in axes[a])

    def sharding_rule(self) -> tuple[str, tuple[str, ...]]:
        others = []

        def factors(full: list[bool]) -> str:
            names = []
            for i, is_full in enumerate(full):
                if not is_full:
                    others.append(f"w{len(others)}")
                names.append(f"x{i}" if is_full else others[-1])
            return " ".join(names)

        sides = (", ".join(factors(full) for full in each) for each in (self.arguments, self.results))
        return " -> ".join(sides), tuple(others)


_ROWS = register(Division("rows", _DimensionsOfRows, by_platform, on_shard))


def _over_explicit_axes(
    division: Division, choice: Choice, arrays: tuple, keywords: dict[str, Any], mesh
) -> Any:
    leaves, tree = jax.tree.flatten(arrays)
    specs = [jax.typeof(a).sharding.spec for a in leaves]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    results = jax.eval_shape(lambda *a: division.whole(choose_plain(choice.call), a, keywords), *shapes)
    in_specs, out_specs, axes = division.dimensions(choice, arrays, keywords, results).lay_out(
        specs, mesh.shape
    )
    results, result_tree = jax.tree.flatten(results)
    if not _available(mesh):  # JAX traces the call for a vmap, and uses only the types of its results
        typed = [s.update(sharding=NamedSharding(mesh, spec)) for s, spec in zip(results, out_specs)]
        return result_tree.unflatten(only_types(typed))
    mapped = jax.shard_map(
        lambda *leaves: jax.tree.leaves(division.on_shard(choice, tree.unflatten(leaves), keywords, axes)),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names=explicit_axes(mesh),
    )
    laid = [jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(leaves, in_specs)]
    return result_tree.unflatten(mapped(*laid))


def divisible(leaves: list[jax.Array]) -> bool:
    """Returns whether a mesh may divide the arrays. It may not where they already are shards."""
    first, context = leaves[0], jax.sharding.get_abstract_mesh()
    known = first.ndim > 0 and all(isinstance(n, int) for n in first.shape) and all(a.size for a in leaves)
    real = not jnp.issubdtype(first.dtype, jnp.complexfloating)
    # the partitioner works neither for arrays without a mesh among Explicit axes, nor with GSPMD
    typed = not explicit_axes(context) or explicit_mesh(leaves) is not None
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return known and real and typed and shardy and not context.manual_axes


def _available(mesh) -> bool:
    """Returns whether `jax.shard_map` can take the Explicit axes. It cannot if they divide the batch of a vmap."""
    probe = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(), out_specs=P(), axis_names=explicit_axes(mesh)
    )
    try:
        jax.eval_shape(probe(lambda: jnp.zeros(())))
    except ValueError:
        return False
    return True
