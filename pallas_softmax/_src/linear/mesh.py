"""How a mesh divides the operations of a projection, under jit.

    x       (..., D)           tokens over some mesh axes, as x or labels are sharded; D stays whole
    w       (D, V) or (V, D)   columns over other mesh axes, as w is sharded; D is gathered, as in fully sharded
                               data parallelism; a teacher's w likewise

If tokens and columns share a mesh axis, as with sequence and tensor parallelism together, the smaller one of x
and w is gathered over it. Devices exchange

    that hold columns of the same rows         two numbers and a logit per row, and a sum for dx
    that hold rows of the same columns         a sum for dw

Sums are in float32, and rounded once. Where the argument is sharded and was gathered, the sum is a reduce-scatter.
Explicit mesh axes go through `jax.shard_map`, Auto ones through XLA's partitioner, as for all other operations
(`dispatch/mesh.py`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src.dispatch.choose import choose_unlisted
from pallas_softmax._src.dispatch.mesh import divide, divisible
from pallas_softmax._src.dispatch.mesh_types import axes_of_entry, explicit_mesh, rounded_sum, vary_together
from pallas_softmax._src.dispatch.operation import Call, Choice, Operation, symbolic
from pallas_softmax._src.dispatch.partitioner import Division, register
from pallas_softmax._src.dispatch.platform import by_platform
from pallas_softmax._src.linear.in_place import changed_if
from pallas_softmax._src.linear.losses import Columns, Head, Statistics, bias_of, token_losses, weighted_sum
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
        return _on_shard(choice, arrays, keywords, _Layout(columns=choice.call.mesh_axes))
    return divide(_PROJECTION, choice, arrays, keywords)


def _whole(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs the operation on whole arrays."""
    return _on_shard(choice, arrays, keywords, _Layout())


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


class _Layout(NamedTuple):
    """The mesh axes of a projection.

    Attributes:
      tokens: they divide the tokens.
      columns: they divide the columns.
      dx: for each dimension of the tokens, the axes of `columns` that divide dx, but not x.
      dw: the axes that divide D in dw, but not in w.
    """

    tokens: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    dx: tuple[tuple[str, ...], ...] = ()
    dw: tuple[str, ...] = ()


def _on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], layout: _Layout) -> Any:
    """Runs the operation on one device's shards. The implementation is chosen again, for their shapes.

    Args:
      choice: the choice for the user's call.
      arrays: the device's shards of x, w, bias and the arrays with one number per token.
      keywords: the static arguments.
      layout: the mesh axes.
    """
    x, w, bias, *per_token = arrays
    batch, op = x.shape[:-1], choice.call.operation
    rows = math.prod(batch)

    def flattened(a):
        return a.reshape(rows, *a.shape[len(batch) :])

    def unflattened(a):
        return a.reshape(*batch, *a.shape[1:])

    flat = (flattened(x), w, bias, *jax.tree.map(flattened, per_token))
    call = describe(op, x, w, keywords["head"], function=choice.call.function)
    on_shard = choose_unlisted(call, choice.requested)
    keywords = {**keywords, "mesh_axes": layout.columns}
    if op not in GRADIENTS:
        return jax.tree.map(unflattened, by_platform(on_shard, flat, keywords))
    keywords |= {"partial_dw": bool(layout.tokens), "partial_dx": any(layout.dx)}
    *statistics, dx, dw, dbias = by_platform(on_shard, flat, keywords)
    # Without statistics, these are the gradients of one loss per token: there is no total.
    finite = _is_finite(call.function, flat, statistics[0], keywords["head"], layout) if statistics else True
    if layout == _Layout():
        gradients = _zeros_unless(finite, (unflattened(dx), dw, dbias))
        return *jax.tree.map(unflattened, statistics), *gradients

    # On several devices each host would wait for the loop's condition. So they select: the sums of dx and dw do it in
    # the pass that rounds.
    def zero_unless_finite(gradient):
        if finite is True or gradient is None:
            return gradient
        condition, gradient = vary_together(finite, gradient)
        return jnp.where(condition, gradient, 0)

    dx = zero_unless_finite(_sum_dx(unflattened(dx), layout)).astype(x.dtype)
    dw = _sum_dw(dw, w.dtype, layout, 1 if keywords["head"].transpose_w else 0, zero_unless_finite)
    if dbias is not None and layout.tokens:
        dbias = lax.psum(dbias, layout.tokens).astype(bias_of(bias).dtype)
    return *jax.tree.map(unflattened, statistics), dx, dw, zero_unless_finite(dbias)


def _is_finite(
    function: str, arrays: tuple, statistics: Statistics, head: Head, layout: _Layout
) -> jax.Array:
    """Returns whether the weighted sum of the losses of all tokens is finite. If not, its gradients are 0."""
    _, w, _, tokens, weights = arrays
    vocab = head.vocab(w) * (lax.axis_size(layout.columns) if layout.columns else 1)
    total = weighted_sum(token_losses(function, statistics, tokens, vocab), weights)
    return jnp.isfinite(lax.psum(total, layout.tokens) if layout.tokens else total)


def _zeros_unless(finite, gradients: tuple) -> tuple:
    """Returns the gradients, or zeros: by a loop of at most one turn, which does not read finite gradients."""
    if finite is True:
        return gradients

    def zeros(gradients):
        return jax.tree.map(lambda g: vary_together(jnp.zeros_like(g), g)[0], gradients)

    return changed_if(~finite, zeros, gradients)


def _sum_dx(dx: jax.Array, layout: _Layout) -> jax.Array:
    """Returns a device's rows of the sum of dx over the devices that hold the columns of a row."""
    if not any(layout.dx):
        return dx
    if others := tuple(axis for axis in layout.columns if axis not in sum(layout.dx, ())):
        dx = lax.psum(dx, others)
    for i, axes in enumerate(layout.dx):
        if axes:
            dx = lax.psum_scatter(dx, axes, scatter_dimension=i, tiled=True)
    return dx


def _sum_dw(dw: jax.Array, dtype, layout: _Layout, depth: int, change: Callable) -> jax.Array:
    """Returns a device's part of the sum of dw over the devices that hold tokens, rounded to the dtype.

    Args:
      dw: the device's part of the sum, float32 if there are several devices.
      dtype: the dtype of w.
      layout: the mesh axes.
      depth: the dimension of dw that is D.
      change: maps each element of the sum, before it is rounded.
    """
    for axis in layout.dw:
        if axis in layout.tokens:
            dw = lax.psum_scatter(dw, axis, scatter_dimension=depth, tiled=True)
        else:
            size = dw.shape[depth] // lax.axis_size(axis)
            dw = lax.dynamic_slice_in_dim(dw, lax.axis_index(axis) * size, size, depth)
    others = tuple(axis for axis in layout.tokens if axis not in layout.dw)
    return rounded_sum(dw, dtype, others, change) if others else change(dw).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _DimensionsOfProjection:
    """`Dimensions` (`dispatch/partitioner.py`) of a projection, by name.

    The names are "b0", "b1", ... for the tokens; "v"; "d" for D of x, and "e" for D of w, because a mesh may divide
    dw along D where it does not divide dx. Several labels or winners per token add "k". So does a teacher: it is D'.

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
        w_axes = ("v", "e") if head.transpose_w else ("e", "v")
        bias_axes = () if bias_of(bias) is None else (("v",),)
        like_arguments = ((*tokens, "d"), w_axes, *bias_axes)
        teacher_axes: tuple[tuple[str, ...], ...] = ()
        if isinstance(bias, Columns):
            teacher_axes = (("v", "k") if head.transpose_w else ("k", "v"),)
            teacher_axes += () if bias.teacher_bias is None else (("v",),)
        gradients = len(like_arguments) if op in GRADIENTS else 0
        results = jax.tree.leaves(result_shapes)
        per_token = jax.tree.leaves(per_token)
        token_results = results[: len(results) - gradients]
        sizes = dict(zip((*tokens, "d", "v", "e"), (*x.shape, head.vocab(w), x.shape[-1])))
        for a in (*per_token, *token_results):
            if a.ndim == x.ndim:
                sizes["k"] = a.shape[-1]

        def axes_of(arrays: list) -> tuple[tuple[str, ...], ...]:
            return tuple((*tokens, "k") if a.ndim == x.ndim else tokens for a in arrays)

        return _DimensionsOfProjection(
            like_arguments + teacher_axes + axes_of(per_token),
            axes_of(token_results) + like_arguments[:gradients],
            result_shapes,
            sizes,
        )

    def lay_out(self, specs, mesh_sizes) -> tuple[list[P], list[P], _Layout]:
        """As `Dimensions` describes."""
        tokens = [name for name in self.sizes if name[0] == "b"]
        by_tokens, by_columns = (
            self._axes(specs, mesh_sizes, order) for order in ([*tokens, "v"], ["v", *tokens])
        )

        def devices(axes) -> int:
            return math.prod(mesh_sizes[axis] for axis in axes)

        # elements of x and w that a device has to hold, if tokens or columns keep the axes that they share
        x_elements = math.prod(self.sizes[name] // devices(by_columns[name]) for name in tokens)
        w_elements = self.sizes["v"] // devices(by_tokens["v"])
        axes = by_columns if x_elements < w_elements else by_tokens
        dx = tuple(tuple(a for a in by_tokens[name] if a not in axes[name]) for name in tokens)
        columns = axes["v"]
        dw = self._free_axes(specs, mesh_sizes, "e", {*columns})
        arguments = [self._spec(own, axes) for own in self.arguments]
        gradient_axes = axes | {"e": dw} | {name: axes[name] + more for name, more in zip(tokens, dx)}
        results = [self._spec(own, gradient_axes if {"d", "e"} & {*own} else axes) for own in self.results]
        return arguments, results, _Layout(sum((axes[name] for name in tokens), ()), columns, dx, dw)

    def _axes(self, specs, mesh_sizes, names: list[str]) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes of some dimensions. Earlier names keep the axes that they share with later ones."""
        axes, used = {}, set()
        for name in names:
            axes[name] = self._free_axes(specs, mesh_sizes, name, used)
            used |= {*axes[name]}
        return axes

    def _free_axes(self, specs, mesh_sizes, name: str, used: set[str]) -> tuple[str, ...]:
        """Returns the mesh axes of a dimension without the used ones, from the first argument that is divided there."""
        for spec, own in zip(specs, self.arguments):
            entry = dict(zip(own, spec)).get(name)
            axes = tuple(axis for axis in axes_of_entry(entry) if axis not in used)
            if axes and self.sizes[name] % math.prod(mesh_sizes[axis] for axis in axes) == 0:
                return axes
        return ()

    def _spec(self, own: tuple[str, ...], axes: dict[str, tuple[str, ...]]) -> P:
        return P(*(axes.get(name) or None for name in own))

    @property
    def whole(self) -> tuple[str, ...]:
        """The dimensions that no mesh axis may divide."""
        return tuple(name for name in ("d", "k") if name in self.sizes)

    def sharding_rule(self) -> tuple[str, tuple[str, ...]]:
        """Returns the rule that `Dimensions` describes: tokens and columns may be divided."""
        sides = (", ".join(" ".join(names) for names in each) for each in (self.arguments, self.results))
        return " -> ".join(sides), self.whole


_PROJECTION = register(Division("projection", _dimensions, _whole, _on_shard))
