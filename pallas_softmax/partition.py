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
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
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
    args: tuple,
    *,
    shapes: Callable,
    whole: Callable,
    part: Callable,
    none: Callable,
    refusal: str | None,
) -> Any:
    """whole(*args), or on each device of a mesh `part` of what it has of them, with the mesh axes along the row.

    Args:
      op: the operation.
      axes: those of the row.
      args: arrays of one rank, the first of the full shape.
      shapes: a function with the results of `whole`, for their shapes.
      whole: of arrays that are not sharded.
      part: of what a device has, and `names`.
      none: results of given shapes, which nobody may ask for.
      refusal: why `whole` and `part` cannot be lowered for other platforms than CUDA, or None.
    """
    leaves, tree = jax.tree.flatten(args)
    first = leaves[0]
    if not _divisible(leaves):
        return whole(*args)
    along_in, along_out = _ALONG[op]
    out = jax.eval_shape(
        shapes, *jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves])
    )
    out_leaves, out_tree = jax.tree.flatten(out)

    def carries(shape: tuple[int, ...], along: bool) -> list[bool]:
        """Which dimensions of an array are those of the full shape."""
        return [n == full and (along or a not in axes) for a, (n, full) in enumerate(zip(shape, first.shape))]

    of_in = [carries(a.shape, along) for a, along in zip(leaves, _leaves(along_in, args))]
    of_out = [carries(a.shape, along) for a, along in zip(out_leaves, _leaves(along_out, out))]

    def layout(shardings, sizes) -> Any:
        """The specs of the arguments and of the results, and the mesh axes along the row."""
        spec = _shared(first.shape, [(getattr(s, "spec", ()), of) for s, of in zip(shardings, of_in)], sizes)
        specs = (
            [P(*(s or None if c else None for s, c in zip(spec, of))) for of in ofs]
            for ofs in (of_in, of_out)
        )
        return *specs, tuple(name for a in axes for name in spec[a])

    def local(names, *leaves):
        return jax.tree.leaves(part(*jax.tree.unflatten(tree, leaves), names=names))

    shardings = [jax.typeof(a).sharding for a in leaves]
    mesh = next((s.mesh for s in shardings if explicit(s.mesh)), None)
    if mesh is not None:
        if not _free(mesh, explicit(mesh)):  # of what is called for a vmap, only the shapes are used
            return none(out)
        specs, out_specs, names = layout(shardings, mesh.shape)
        leaves = [jax.sharding.reshard(a, NamedSharding(mesh, s)) for a, s in zip(leaves, specs)]
        mapped = jax.shard_map(
            functools.partial(local, names),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=out_specs,
            axis_names=explicit(mesh),
        )
        return jax.tree.unflatten(out_tree, mapped(*leaves))

    def flat(*leaves):
        return jax.tree.leaves(whole(*jax.tree.unflatten(tree, leaves)))

    def partition(mesh, arg_shapes, _):
        shardings = [a.sharding for a in arg_shapes]
        if mesh.empty:  # nothing in the program names one: then what is sharded nevertheless is gathered
            devices = sorted(shardings[0].device_set, key=lambda device: device.id)
            mesh, shardings = Mesh(np.array(devices), ("devices",)), [None] * len(shardings)
        specs, out_specs, names = layout(shardings, mesh.shape)
        in_shardings, out_shardings = ([NamedSharding(mesh, s) for s in each] for each in (specs, out_specs))
        return mesh, functools.partial(local, names), out_shardings, tuple(in_shardings)

    function = custom_partitioning(flat)
    rule, own = _rule(of_in, of_out)
    function.def_partition(partition, sharding_rule=rule, need_replication_factors=own)
    divided = jax.make_jaxpr(function)(*leaves)
    return jax.tree.unflatten(
        out_tree, _divided_p.bind(*leaves, whole=flat, divided=divided, refusal=refusal)
    )


# custom_partitioning, but in jax.export, which cannot keep Python functions: there XLA divides the whole.
_divided_p = Primitive("pallas_softmax_divided")
_divided_p.multiple_results = True
_divided_p.def_impl(lambda *leaves, divided, **_: jax.jit(jaxpr_as_fun(divided))(*leaves))


@_divided_p.def_abstract_eval
def _(*_, divided, **__):
    return divided.out_avals


def _lower(ctx, *leaves, whole, divided, refusal):
    refuse(ctx, refusal)  # here, for an error in a partition is XLA's
    exported = ctx.module_context.lowering_parameters.for_export
    function = whole if exported else jaxpr_as_fun(divided)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves)


mlir.register_lowering(_divided_p, _lower)


def refuse(ctx, reason: str | None) -> None:
    """Raises the reason, if there is one, unless the computation is lowered for CUDA too."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if reason is not None and "cuda" not in platforms:
        raise NotImplementedError(f"{reason}, but this computation is lowered for {', '.join(platforms)}")


def _divisible(leaves: list[jax.Array]) -> bool:
    """Whether a mesh may divide the arrays: not where their parts are in hand already."""
    first, context = leaves[0], jax.sharding.get_abstract_mesh()
    known = first.ndim > 0 and all(isinstance(n, int) for n in first.shape) and all(a.size for a in leaves)
    real = not jnp.issubdtype(first.dtype, jnp.complexfloating)
    # custom_partitioning is not for arrays without a mesh among Explicit axes, nor for the older partitioner
    typed = not explicit(context) or any(explicit(jax.typeof(a).sharding.mesh) for a in leaves)
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    return known and real and typed and shardy and not context.manual_axes


def explicit(mesh) -> set[str]:
    """Its Explicit axes."""
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}


def lay_together(x: jax.Array, *others: Any) -> list:
    """Arrays (or None) that broadcast to the first, of its rank, sharded alike where types say how they are."""
    arrays = [a for a in (x, *others) if a is not None]
    mesh = next((m for m in (jax.typeof(a).sharding.mesh for a in arrays) if explicit(m)), None)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return [x, *others]
    of = {id(a): [n == full for n, full in zip(a.shape, x.shape)] for a in arrays}
    shared = _shared(x.shape, [(jax.typeof(a).sharding.spec, of[id(a)]) for a in arrays], mesh.shape)

    def lay(a):
        spec = P(*(names or None if carries else None for names, carries in zip(shared, of[id(a)])))
        sharding = NamedSharding(mesh, spec)
        return a if jax.typeof(a).sharding.spec == sharding.spec else jax.sharding.reshard(a, sharding)

    return [None if a is None else lay(a) for a in (x, *others)]


def _shared(shape: tuple[int, ...], arrays: list[tuple], sizes) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension: those of the first array that is sharded there, if it divides by them.

    Args:
      shape: the full one.
      arrays: the spec of each, and which of its dimensions are those of the full shape.
      sizes: of the mesh axes.
    """
    spec, used = [], set()
    for a, n in enumerate(shape):
        entries = [_names(of_array[a]) for of_array, carries in arrays if carries[a] and a < len(of_array)]
        fit = [e for e in entries if e and not used & {*e} and n % math.prod(sizes[name] for name in e) == 0]
        spec.append(fit[0] if fit else ())
        used |= {*spec[-1]}
    return spec


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
