"""How a batch of `jax.vmap` becomes more rows, and how a call is divided over the devices of a mesh.

    as_rows                  a batch becomes more rows
      divide                   each device takes its shard of sharded arrays
        on_shard                 what devices exchange if a row is spread over them
          platform.by_platform     a kernel or plain JAX, decided when the computation is lowered

All steps take a `Choice`, which is the call and its implementations; the positional arguments of the operation
(`arrays`); and its static arguments (`keywords`). The first array has the full shape. The operations on a projection
x @ w go the same way through `linear/mesh.py`.

Each device takes the rows it holds, or its shard of each row. Rows are gathered only for operations with `whole_rows`,
and where shardings do not fit together. There are three cases:

    inside shard_map, with axis_name=   the shards are at hand: `on_shard`
    Explicit mesh axes                  types say how arrays are sharded: `jax.shard_map` around `on_shard`
    Auto mesh axes                      XLA decides on the sharding, and asks for a device's program: `partitioner.py`
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src.dispatch.choose import choose_if_able, choose_plain, choose_unlisted
from pallas_softmax._src.dispatch.mesh_types import explicit_mesh, shared_axes, spec_of
from pallas_softmax._src.dispatch.operation import PER_ROW, Choice, Operation, sizes_of, symbolic
from pallas_softmax._src.dispatch.partitioner import Dimensions, Division, over_auto_axes, register
from pallas_softmax._src.dispatch.platform import by_platform
from pallas_softmax._src.dispatch.refusal import only_types
from pallas_softmax._src.jax_internals import stage_constants


def as_rows(choice: Choice, *arrays: Any, **static: Any) -> Any:
    """Runs a call. Under a vmap the choice is made anew for all rows, and on a mesh for each device's shard.

    `static` are the keywords of the operation, such as the axes of a row.
    """
    choice.required_cuda()  # raises if the named implementation refuses
    with stage_constants():
        if is_visible(choice, arrays):
            return by_platform(choice, arrays, static)

        @custom_vmap
        def call(*arrays):
            if choice.call.mesh_axes:
                return on_shard(choice, arrays, static, choice.call.mesh_axes)
            if not divisible(jax.tree.leaves(arrays)):
                return by_platform(choice, arrays, static)
            return divide(_ROWS, choice, arrays, static)

        @call.def_vmap
        def _(axis_size, in_batched, *arrays):
            leaves, tree = jax.tree.flatten(arrays)
            batched = jax.tree.leaves(in_batched)
            full = leaves[0].shape[batched[0] :]
            leaves = [a if b else a[None] for a, b in zip(leaves, batched)]
            leaves = [jnp.broadcast_to(a, (axis_size, *full)) if a.shape[1:] == full else a for a in leaves]
            objection = choice.call.objection or symbolic((axis_size,))
            batch = dataclasses.replace(choice.call, rows=choice.call.rows * axis_size, objection=objection)
            shifted = {"axes": tuple(a + 1 for a in static["axes"])} if "axes" in static else {}
            batch_choice = choose_unlisted(batch, choice.requested)
            out = as_rows(batch_choice, *jax.tree.unflatten(tree, leaves), **static | shifted)
            return out, jax.tree.map(lambda _: True, out)

        return call(*arrays)


def is_visible(choice: Choice, arrays: Any) -> bool:
    """Returns whether the call needs no wrapper, so that JAX and its tools see plain operations.

    Plain JAX needs a wrapper only if arrays may be sharded and XLA would divide it less well.
    """
    call, op = choice.call, choice.call.row_operation
    if choice.requested is None:
        stays_plain = call.objection is not None or call.dtype not in op.kernel_dtypes
    else:
        stays_plain = choice.requested == "xla"
    if not stays_plain or call.mesh_axes or op.vmap_adds_rows:
        return False
    if explicit_mesh(jax.tree.leaves(arrays)) is not None:
        return op.divided_by_xla and choice.requested == "xla"
    return op.divided_by_xla or jax.device_count() == 1


def on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], mesh_axes: tuple[str, ...]) -> Any:
    """Runs a call on one device's shard. `choice` is for the whole call.

    A row is spread over `mesh_axes`, which are bound, in the order of `lax.axis_index`; () if rows are whole.
    """
    operation = choice.call.row_operation
    if not mesh_axes:
        return _run_shard(choice, operation, arrays, keywords)
    if operation.on_mesh is None:
        return operation.plain(*arrays, **keywords, mesh_axes=mesh_axes)

    def run_step(step: Operation | None, arrays: tuple, keywords: dict[str, Any]):
        return _run_shard(choice, step or operation.shard_step or operation, arrays, keywords)

    return operation.on_mesh(run_step, *arrays, **keywords, mesh_axes=mesh_axes)


def _run_shard(choice: Choice, operation: Operation, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs the user's operation, or a step of it, on one device's shard. `choice` is for the user's whole call."""
    call = dataclasses.replace(
        choice.call,
        operation=operation,
        **sizes_of(jax.tree.leaves(arrays)[0], _row_axes(arrays, keywords)),
        masked=arrays[1] is not None,
        mesh_axes=(),
        k=keywords.get("k", choice.call.k),  # a gradient has winners, but no argument k
        sorted=keywords.get("sorted", choice.call.sorted),
    )
    is_users = operation in (choice.call.operation, choice.call.row_operation.shard_step)
    choose = choose_unlisted if is_users else choose_if_able
    return by_platform(choose(call, choice.requested), arrays, keywords)


def divide(division: Division, choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs a call on `divisible` arrays, as `division` says."""
    if (mesh := explicit_mesh(jax.tree.leaves(arrays))) is not None:
        return _over_explicit_axes(division, choice, arrays, keywords, mesh)
    if choice.call.objection is not None:  # a symbolic argument: XLA divides plain JAX
        return division.whole(choice, arrays, keywords)
    return over_auto_axes(division, choice, arrays, keywords)


def _row_axes(arrays: tuple, keywords: dict[str, Any]) -> tuple[int, ...]:
    """Returns the reduced axes: the named ones, or the last one for an operation without an `axes` argument."""
    return keywords.get("axes", (jax.tree.leaves(arrays)[0].ndim - 1,))


def _dimensions(choice: Choice, arrays: tuple, keywords: dict[str, Any], results: Any) -> Dimensions:
    """Returns the dimensions of an operation on rows: "x0", "x1", ... of the full shape, the shape of the logits.

    PER_ROW arrays have no full dimension along the row. If devices need whole rows, no array has one. Every other
    dimension has a name of its own, "w0", "w1", ...: no mesh axis divides it.
    """
    operation, shape = choice.call.row_operation, jax.tree.leaves(arrays)[0].shape
    axes_of_row, whole = _row_axes(arrays, keywords), []

    def name(i: int, n: int, kind: str) -> str:
        is_whole = i in axes_of_row and (kind == PER_ROW or operation.whole_rows)
        if n == shape[i] and not is_whole:
            return f"x{i}"
        whole.append(f"w{len(whole)}")
        return whole[-1]

    def names(kinds, tree) -> list[list[str]]:
        kinds = jax.tree.leaves(jax.tree.broadcast(kinds, tree))
        each = zip(jax.tree.leaves(tree), kinds, strict=True)
        return [[name(i, n, kind) for i, n in enumerate(a.shape)] for a, kind in each]

    of_arguments, of_results = names(operation.arguments, arrays), names(operation.results, results)

    def lay_out(specs, mesh_sizes) -> tuple[list[P], list[P], tuple[str, ...]]:
        sizes = {f"x{i}": n for i, n in enumerate(shape)}
        axes = shared_axes(sizes, [*zip(specs, of_arguments)], mesh_sizes)
        in_specs, out_specs = ([spec_of(own, axes) for own in each] for each in (of_arguments, of_results))
        return in_specs, out_specs, tuple(axis for a in axes_of_row for axis in axes[f"x{a}"])

    return Dimensions(of_arguments, of_results, whole, lay_out)


_ROWS = register(Division("rows", _dimensions, by_platform, on_shard))


def _over_explicit_axes(division: Division, choice: Choice, arrays: tuple, keywords: dict[str, Any], mesh) -> Any:
    leaves, tree = jax.tree.flatten(arrays)
    specs = [jax.typeof(a).sharding.spec for a in leaves]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    results = jax.eval_shape(lambda *a: division.whole(choose_plain(choice.call), a, keywords), *shapes)
    in_specs, out_specs, axes = division.dimensions(choice, arrays, keywords, results).lay_out(specs, mesh.shape)
    results, result_tree = jax.tree.flatten(results)
    if not _available(mesh):  # JAX traces the call for a vmap, and uses only the types of its results
        shardings = [NamedSharding(mesh, spec) for spec in out_specs]
        types = [ShapedArray(a.shape, a.dtype, sharding=s) for a, s in zip(results, shardings)]
        return result_tree.unflatten(only_types(types))
    mapped = jax.shard_map(
        lambda *leaves: jax.tree.leaves(division.on_shard(choice, tree.unflatten(leaves), keywords, axes)),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names={*mesh.explicit_axes},
    )
    laid = [jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(leaves, in_specs)]
    return result_tree.unflatten(mapped(*laid))


def divisible(leaves: list[jax.Array]) -> bool:
    """Returns whether a mesh may divide the arrays. It may not where they already are shards."""
    first, context = leaves[0], jax.sharding.get_abstract_mesh()
    known = first.ndim > 0 and all(isinstance(n, int) for n in first.shape) and all(a.size for a in leaves)
    real = not jnp.issubdtype(first.dtype, jnp.complexfloating)
    # the partitioner works neither for arrays without a mesh among Explicit axes, nor with GSPMD
    typed = not context.explicit_axes or explicit_mesh(leaves) is not None
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return known and real and typed and shardy and not context.manual_axes


def _available(mesh) -> bool:
    """Returns whether `jax.shard_map` can take the Explicit axes. It cannot if they divide the batch of a vmap."""
    axes = {*mesh.explicit_axes}
    try:
        jax.eval_shape(jax.shard_map(lambda: jnp.zeros(()), mesh=mesh, in_specs=(), out_specs=P(), axis_names=axes))
    except ValueError:
        return False
    return True
