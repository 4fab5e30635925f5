"""How a call divides over the devices of a mesh, under jit.

Each device takes the rows, or the part of each, that it has: nothing is gathered. Arrays sharded by Auto mesh axes
go through `custom_partitioning`, those of Explicit axes, which it does not take, through `shard_map`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# Which of an operation's arguments, and of its results, lie along the row; the others have something of each row.
_ALONG = {
    "softmax": ((True, True), True),
    "log_softmax": ((True, True), True),
    "logsumexp": ((True, True), False),
    "softmax_grad": (((True,), True, True), True),
    "log_softmax_grad": (((True,), True, True), True),
    "topk": ((True, True, False), False),
    "topk_grad": (((True, False, False, False, False), True, False), (True, False)),
}


def divided(
    op: str,
    axes: tuple[int, ...],
    plain: Callable,
    none: Callable,
    whole: Callable,
    part: Callable,
    args: tuple,
) -> Any:
    """whole(*args), or on each device of a mesh `part` of what it has of them, with the mesh axes along the row.

    Args:
      op: the operation.
      axes: those of the row.
      plain: a function with the results of `whole`, for their shapes.
      none: results of given shapes, which nobody may ask for.
      whole: of arrays that are not sharded.
      part: of what a device has, and `names`.
      args: arrays of one rank, the first of the full shape.
    """
    first = jax.tree.leaves(args)[0]
    if not _divisible(first):
        return whole(*args)
    along_in, along_out = _ALONG[op]
    out = jax.eval_shape(
        plain, *(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), a) for a in args)
    )
    along = _leaves(along_in, args), _leaves(along_out, out)
    leaves, tree = jax.tree.flatten(args)
    out_leaves, out_tree = jax.tree.flatten(out)

    def carries(shape: tuple[int, ...], along: bool) -> list[bool]:
        """Which dimensions of an array are those of the full shape."""
        return [n == full and (along or a not in axes) for a, (n, full) in enumerate(zip(shape, first.shape))]

    of_in = [carries(a.shape, along) for a, along in zip(leaves, along[0])]
    of_out = [carries(a.shape, along) for a, along in zip(out_leaves, along[1])]

    def layout(sharding_spec, sizes) -> Any:
        """The specs of the arguments and of the results, and the mesh axes along the row, by the first's spec."""
        spec = [_names(entry) for entry in (*sharding_spec, *[None] * first.ndim)[: first.ndim]]
        spec = [
            names if n % math.prod(sizes[name] for name in names) == 0 else ()
            for names, n in zip(spec, first.shape)
        ]
        specs = (
            [P(*(s or None if c else None for s, c in zip(spec, of))) for of in ofs]
            for ofs in (of_in, of_out)
        )
        return *specs, tuple(name for a in axes for name in spec[a])

    def local(names, *leaves):
        return jax.tree.leaves(part(*jax.tree.unflatten(tree, leaves), names=names))

    sharding = jax.typeof(first).sharding
    explicit = _explicit(sharding.mesh)
    if explicit:
        if not _free(sharding.mesh, explicit):  # of what is called for a vmap, only the shapes are used
            return none(out)
        specs, out_specs, names = layout(sharding.spec, sharding.mesh.shape)
        leaves = [jax.sharding.reshard(a, NamedSharding(sharding.mesh, s)) for a, s in zip(leaves, specs)]
        mapped = jax.shard_map(
            functools.partial(local, names),
            mesh=sharding.mesh,
            in_specs=tuple(specs),
            out_specs=out_specs,
            axis_names=explicit,
        )
        return jax.tree.unflatten(out_tree, mapped(*leaves))

    def flat(*leaves):
        return jax.tree.leaves(whole(*jax.tree.unflatten(tree, leaves)))

    def partition(mesh, arg_shapes, _):
        specs, out_specs, names = layout(arg_shapes[0].sharding.spec, mesh.shape)
        in_shardings, out_shardings = ([NamedSharding(mesh, s) for s in each] for each in (specs, out_specs))
        return mesh, functools.partial(local, names), out_shardings, tuple(in_shardings)

    function = custom_partitioning(flat)
    rule, own = _rule(of_in, of_out)
    function.def_partition(partition, sharding_rule=rule, need_replication_factors=own)
    divided = jax.make_jaxpr(function)(*leaves)
    return jax.tree.unflatten(out_tree, _divided_p.bind(*leaves, whole=flat, divided=divided))


# custom_partitioning, but in jax.export, which cannot keep Python functions: there XLA divides the whole.
_divided_p = Primitive("pallas_softmax_divided")
_divided_p.multiple_results = True


@_divided_p.def_abstract_eval
def _(*_, whole, divided):
    return divided.out_avals


def _lower(ctx, *leaves, whole, divided):
    exported = ctx.module_context.lowering_parameters.for_export
    function = whole if exported else jaxpr_as_fun(divided)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves)


mlir.register_lowering(_divided_p, _lower)
_divided_p.def_impl(jax.jit(_divided_p.bind, static_argnames=("whole", "divided")))


def _divisible(x: jax.Array) -> bool:
    """Whether a mesh may divide the array: not where its parts are in hand already."""
    known = x.ndim > 0 and all(isinstance(n, int) for n in x.shape) and x.size > 0
    real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
    return known and real and not jax.sharding.get_abstract_mesh().manual_axes


def _explicit(mesh) -> set[str]:
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}


def _free(mesh, names: set[str]) -> bool:
    """Whether shard_map may have the axes: not those that divide the batch of a vmap around."""
    try:
        jax.eval_shape(
            jax.shard_map(lambda: jnp.zeros(()), mesh=mesh, in_specs=(), out_specs=P(), axis_names=names)
        )
    except ValueError:
        return False
    return True


def _names(entry) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _leaves(along, tree) -> list[bool]:
    """A bool for each leaf of the tree, of which `along` is a prefix."""
    return jax.tree.leaves(jax.tree.map(lambda a, sub: jax.tree.map(lambda _: a, sub), along, tree))


def _rule(of_in: list[list[bool]], of_out: list[list[bool]]) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule, a factor for each dimension of the full shape, and the factors of other dimensions."""
    own = []

    def factors(of: list[bool]) -> str:
        names = []
        for a, carries in enumerate(of):
            if not carries:
                own.append(f"w{len(own)}")
            names.append(f"x{a}" if carries else own[-1])
        return " ".join(names)

    sides = (", ".join(factors(of) for of in ofs) for ofs in (of_in, of_out))
    return " -> ".join(sides), tuple(own)
