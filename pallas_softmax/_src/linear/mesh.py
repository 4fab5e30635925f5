"""How a mesh divides the operations of a projection, under jit.

    x       (..., D)           tokens over some mesh axes, as x or labels are sharded; D stays whole
    w       (D, V) or (V, D)   columns over other mesh axes, as w is sharded; D is gathered, as in fully sharded
                               data parallelism; columns over a mesh axis that divides the tokens are gathered

Devices that hold columns of the same row exchange two numbers and a logit per row, and a sum for dx. Devices that hold
the same columns of w exchange a sum for dw. Explicit mesh axes go through `jax.shard_map`, Auto ones through XLA's
partitioner, as for all other operations (`dispatch/mesh.py`).
"""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src.dispatch.choose import choose_again
from pallas_softmax._src.dispatch.mesh import divide, divisible
from pallas_softmax._src.dispatch.operation import Call, Choice, Operation, symbolic
from pallas_softmax._src.dispatch.partitioner import Division, register
from pallas_softmax._src.dispatch.platform import by_platform
from pallas_softmax._src.dispatch.specs import explicit_mesh, shared_axes
from pallas_softmax._src.linear.losses import Head
from pallas_softmax._src.linear.operation import GRADIENTS, PROJECTION


def describe(
    operation: Operation, x, w, head: Head, mesh_axes: tuple[str, ...] = (), *, function: str
) -> Call:
    """Returns the `Call` of an operation on the rows x @ w, for a user's call of `function`."""
    return Call(
        operation=operation,
        dtype=x.dtype.name,
        rows=math.prod(x.shape[:-1]),
        vocab=head.vocab(w),
        depth=x.shape[-1],
        objection=symbolic(x.shape + w.shape),
        mesh_axes=mesh_axes,
        function=function,
    )


def over_mesh(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs an operation of a projection on arrays that may be sharded.

    Args:
      choice: the call and its implementations.
      arrays: x, w, bias, and arrays with one number per token, in the shape of the tokens.
      keywords: the static arguments.
    """
    if choice.call.mesh_axes or not divisible(jax.tree.leaves(arrays)):
        return _on_shard(choice, arrays, keywords, ((), choice.call.mesh_axes))
    return divide(_PROJECTION, choice, arrays, keywords)


def _whole(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs the operation on whole arrays."""
    return _on_shard(choice, arrays, keywords, ((), ()))


def _dimensions(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> "_DimensionsOfProjection":
    """Returns the dimensions of the arguments and results of a call."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    results = jax.eval_shape(lambda *arrays: _whole(choice, arrays, keywords), *shapes)
    return _DimensionsOfProjection.of(choice.call.operation, arrays, keywords["head"], results)


def lay_out_arrays(arrays: tuple, head: Head) -> tuple:
    """Returns the arrays, sharded as an operation takes them, if their types say how they are sharded.

    Args:
      arrays: x, w, bias, and arrays with one number per token; None stays.
      head: the projection.
    """
    leaves, tree = jax.tree.flatten(arrays)
    mesh = explicit_mesh(leaves)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    dimensions = _DimensionsOfProjection.of(PROJECTION, arrays, head, ())
    specs, *_ = dimensions.lay_out([jax.typeof(a).sharding.spec for a in leaves], mesh.shape)
    laid = [jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(leaves, specs)]
    return jax.tree.unflatten(tree, laid)


def _on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], axes: tuple) -> Any:
    """Runs the operation on one device's shards. The implementation is chosen again, for their shapes.

    Args:
      choice: the choice for the user's call.
      arrays: the device's shards of x, w, bias and the arrays with one number per token.
      keywords: the static arguments.
      axes: two tuples, the mesh axes that divide the tokens, and the mesh axes that divide the columns.
    """
    x, w, bias, *per_token = arrays
    tokens, columns = axes
    batch, op = x.shape[:-1], choice.call.operation
    rows = math.prod(batch)

    def flattened(a):
        return a.reshape(rows, *a.shape[len(batch) :])

    def unflattened(a):
        return a.reshape(*batch, *a.shape[1:])

    flat = (flattened(x), w, bias, *jax.tree.map(flattened, per_token))
    call = describe(op, x, w, keywords["head"], function=choice.call.function)
    on_shard = choose_again(call, choice.requested)
    out = by_platform(on_shard, flat, {**keywords, "mesh_axes": columns})
    if op not in GRADIENTS:
        return jax.tree.map(unflattened, out)
    *statistics, dx, dw, dbias = out
    statistics = jax.tree.map(unflattened, statistics)
    dw, dbias = lax.psum((dw, dbias), tokens) if tokens else (dw, dbias)
    return *statistics, dx.reshape(x.shape), dw, dbias


@dataclasses.dataclass(frozen=True)
class _DimensionsOfProjection:
    """`Dimensions` (`dispatch/mesh.py`) of a projection, by name: "b0", "b1", ... for the tokens, "d" and "v".

    Several labels or winners per token add "k".

    Attributes:
      arguments: for each array, the names of its dimensions.
      results: for each result, the names of its dimensions.
      result_shapes: the results, as a tree of `jax.ShapeDtypeStruct`s.
      sizes: the size of each dimension, by name.
    """

    arguments: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    result_shapes: Any
    sizes: dict[str, int]

    @staticmethod
    def of(op: Operation, arrays: tuple, head: Head, result_shapes: Any) -> "_DimensionsOfProjection":
        """Returns the dimensions of the arguments and results of an operation."""
        x, w, bias, *per_token = arrays
        tokens = tuple(f"b{i}" for i in range(x.ndim - 1))
        of_w = ("v", "d") if head.transpose_w else ("d", "v")
        of_bias = () if bias is None else (("v",),)
        like_arguments = ((*tokens, "d"), of_w, *of_bias)
        gradients = len(like_arguments) if op in GRADIENTS else 0
        results = jax.tree.leaves(result_shapes)
        per_token = jax.tree.leaves(per_token)
        of_token = results[: len(results) - gradients]
        sizes = dict(zip((*tokens, "d", "v"), (*x.shape, head.vocab(w))))
        for a in (*per_token, *of_token):
            if a.ndim == x.ndim:
                sizes["k"] = a.shape[-1]

        def of_tokens(arrays: list) -> tuple[tuple[str, ...], ...]:
            return tuple((*tokens, "k") if a.ndim == x.ndim else tokens for a in arrays)

        return _DimensionsOfProjection(
            like_arguments + of_tokens(per_token),
            of_tokens(of_token) + like_arguments[:gradients],
            result_shapes,
            sizes,
        )

    def lay_out(self, specs, mesh_sizes) -> tuple[list[P], list[P], Any]:
        """As `Dimensions` describes. The third result is two tuples: the mesh axes of tokens and of columns."""
        names = [name for name in self.sizes if name not in self.whole]
        given = []
        for spec, own in zip(specs, self.arguments):
            entries = dict(zip(own, spec))
            given.append(([entries.get(name) for name in names], [name in own for name in names]))
        axes = dict(zip(names, shared_axes(tuple(self.sizes[name] for name in names), given, mesh_sizes)))
        arguments, results = (
            [P(*(axes.get(name) or None for name in own)) for own in each]
            for each in (self.arguments, self.results)
        )
        *tokens, columns = axes.values()
        return arguments, results, (sum(tokens, ()), columns)

    @property
    def whole(self) -> tuple[str, ...]:
        """The dimensions that no mesh axis may divide."""
        return tuple(name for name in ("d", "k") if name in self.sizes)

    def sharding_rule(self) -> tuple[str, tuple[str, ...]]:
        """Returns the rule that `Dimensions` describes: tokens and columns may be divided."""
        sides = (", ".join(" ".join(names) for names in each) for each in (self.arguments, self.results))
        return " -> ".join(sides), self.whole


_PROJECTION = register(Division("projection", _dimensions, _whole, _on_shard))
