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
from pallas_softmax._src.dispatch.mesh_types import (
    explicit_mesh,
    rounded_sum,
    shared_axes,
    spec_of,
    vary_together,
)
from pallas_softmax._src.dispatch.operation import Call, Choice, Operation, symbolic
from pallas_softmax._src.dispatch.partitioner import Dimensions, Division, register
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
      keywords: the static arguments; and, where given, two of this file:
        slices: the vmaps around the operation, the outermost first. Each vmap is a flag for each array: whether the
          array has a leading dimension for the vmap. All results have one.
        given: the specs of x, w and bias before they were gathered; None if they were not.
    """
    if choice.call.mesh_axes or not divisible(jax.tree.leaves(arrays)):
        return _on_shard(choice, arrays, keywords, _Layout(columns=choice.call.mesh_axes))
    return divide(_PROJECTION, choice, arrays, keywords)


def _whole(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs the operation on whole arrays."""
    return _on_shard(choice, arrays, keywords, _Layout())


def _dimensions(choice: Choice, arrays: tuple, keywords: dict[str, Any], results: Any) -> Dimensions:
    options = keywords.get("slices", ()), keywords.get("given")
    own = _DimensionsOfProjection.of(choice.call.operation, arrays, keywords["head"], results, *options)
    return Dimensions(own.arguments, own.results, own.whole, own.lay_out)


def lay_out_arrays(arrays: tuple, head: Head, *, gathered: bool = False) -> tuple:
    """Returns the arrays with shardings that fit together, if their types say how they are sharded.

    x, w and bias get the shardings of their gradients, so that JAX need not reshard the gradients. The other arrays are
    sharded as an operation takes them.

    Args:
      arrays: x, w, bias, and arrays with one number per token; None stays.
      head: the projection.
      gathered: whether x, w and bias also have the sharding that an operation takes.
    """
    leaves, tree = jax.tree.flatten(arrays)
    mesh = explicit_mesh(leaves)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    dimensions = _DimensionsOfProjection.of(PROJECTION, arrays, head, ())
    given = [jax.typeof(a).sharding.spec for a in leaves]
    _, as_taken, as_gradients = dimensions.specs(given, mesh.shape, dimensions.arguments)
    specs = as_taken if gathered else as_gradients
    laid = [jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(leaves, specs)]
    return jax.tree.unflatten(tree, laid)


def given_specs(*arrays: Any) -> tuple[P, ...] | None:
    """Returns the specs of arrays, if their types say how they are sharded; None stays out."""
    leaves = jax.tree.leaves(arrays)
    return None if explicit_mesh(leaves) is None else tuple(jax.typeof(a).sharding.spec for a in leaves)


class _Layout(NamedTuple):
    """The mesh axes of a projection.

    Attributes:
      tokens: they divide the tokens.
      columns: they divide the columns.
      dx: for each dimension of the tokens, the axes of `columns` that divide dx, but not x.
      dw: the axes that divide D in dw, but not in w.
      dv: the axes of `tokens` that divide the columns in dw and dbias, but not in w and bias.
    """

    tokens: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    dx: tuple[tuple[str, ...], ...] = ()
    dw: tuple[str, ...] = ()
    dv: tuple[str, ...] = ()


def _on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], layout: _Layout) -> Any:
    """Runs the operation on one device's shards. Under vmaps, it runs slice by slice."""
    own = {name: value for name, value in keywords.items() if name not in ("slices", "given")}

    def run(arrays, vmaps):
        if not vmaps:
            return _slice_on_shard(choice, arrays, own, layout)
        leaves, tree = jax.tree.flatten(arrays)

        def step(slices):
            each = iter(slices)
            return run(tree.unflatten([next(each) if b else a for a, b in zip(leaves, vmaps[0])]), vmaps[1:])

        return lax.map(step, [a for a, b in zip(leaves, vmaps[0]) if b])

    return run(arrays, keywords.get("slices", ()))


def _slice_on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], layout: _Layout) -> Any:
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
    v = 0 if keywords["head"].transpose_w else 1
    dw = _sum_over_tokens(dw, w.dtype, layout, {1 - v: layout.dw, v: layout.dv}, zero_unless_finite)
    if (own_bias := bias_of(bias)) is not None:
        dbias = _sum_over_tokens(dbias, own_bias.dtype, layout, {0: layout.dv}, zero_unless_finite)
    return *jax.tree.map(unflattened, statistics), dx, dw, dbias


def _is_finite(
    function: str, arrays: tuple, statistics: Statistics, head: Head, layout: _Layout
) -> jax.Array:
    """Returns whether the weighted sum of the losses of all tokens is finite. If not, its gradients are 0."""
    _, w, _, tokens, weights = arrays
    vocab = head.vocab(w) * lax.axis_size(layout.columns)
    total = weighted_sum(token_losses(function, statistics, tokens, vocab), weights)
    return jnp.isfinite(lax.psum(total, layout.tokens))


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
    for i, axes in enumerate(layout.dx):
        if axes:
            dx = lax.psum_scatter(dx, axes, scatter_dimension=i, tiled=True)
    others = tuple(axis for axis in layout.columns if axis not in sum(layout.dx, ()))
    return lax.psum(dx, others) if others else dx


def _sum_over_tokens(part: jax.Array, dtype, layout: _Layout, divided: dict, change: Callable) -> jax.Array:
    """Returns a device's part of the sum of dw or dbias over the devices that hold tokens, rounded to the dtype.

    Args:
      part: what the device adds to the sum, float32 if there are several devices.
      dtype: the dtype of w or bias.
      layout: the mesh axes.
      divided: for each dimension, the mesh axes that divide the sum, but not `part`.
      change: maps each element of the sum, before it is rounded.
    """
    scattered = set()
    for dimension, axes in divided.items():
        for axis in axes:
            if axis in layout.tokens:
                part = lax.psum_scatter(part, axis, scatter_dimension=dimension, tiled=True)
                scattered.add(axis)
            else:
                size = part.shape[dimension] // lax.axis_size(axis)
                part = lax.dynamic_slice_in_dim(part, lax.axis_index(axis) * size, size, dimension)
    others = tuple(axis for axis in layout.tokens if axis not in scattered)
    return rounded_sum(part, dtype, others, change) if others else change(part).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _DimensionsOfProjection:
    """`Dimensions` (`dispatch/partitioner.py`) of a projection, by name.

    The names are "b0", "b1", ... for the tokens; "v"; "d" for D of x, and "e" for D of w, because a mesh may divide
    dw along D where it does not divide dx. Several labels or winners per token add "k", and so does a teacher: it is
    D'. Vmaps add "s0", "s1", ...

    Attributes:
      arguments: for each array, the names of its dimensions.
      results: for each result, the names of its dimensions.
      sizes: the size of each dimension, by name.
      given: as for `over_mesh`.
    """

    arguments: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]
    given: tuple[P, ...] | None = None

    @staticmethod
    def of(
        op: Operation, arrays: tuple, head: Head, result_shapes: Any, slices: tuple = (), given=None
    ) -> "_DimensionsOfProjection":
        """Returns the dimensions of the arguments and results of an operation."""
        leaves, tree = jax.tree.flatten(arrays)
        vmaps = [tuple(f"s{i}" for i, each in enumerate(slices) if each[j]) for j in range(len(leaves))]
        of_slice = [jax.ShapeDtypeStruct(a.shape[len(of) :], a.dtype) for a, of in zip(leaves, vmaps)]
        x, w, bias, *per_token = tree.unflatten(of_slice)
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
        for a, n in [(a, 0) for a in per_token] + [(a, len(slices)) for a in token_results]:
            if a.ndim - n == x.ndim:
                sizes["k"] = a.shape[-1]
        for a, names in zip(leaves, vmaps):
            sizes |= zip(names, a.shape)

        def axes_of(arrays: list, n: int) -> tuple[tuple[str, ...], ...]:
            return tuple((*tokens, "k") if a.ndim - n == x.ndim else tokens for a in arrays)

        own = like_arguments + teacher_axes + axes_of(per_token, 0)
        own_results = axes_of(token_results, len(slices)) + like_arguments[:gradients]
        return _DimensionsOfProjection(
            tuple(of + names for of, names in zip(vmaps, own, strict=True)),
            tuple((*(f"s{i}" for i in range(len(slices))), *names) for names in own_results),
            sizes,
            given,
        )

    def lay_out(self, specs, mesh_sizes) -> tuple[list[P], list[P], _Layout]:
        """As `Dimensions` describes."""
        layout, arguments, results = self.specs(specs, mesh_sizes, self.results)
        return arguments, results, layout

    def specs(self, specs, mesh_sizes, results) -> tuple[_Layout, list[P], list[P]]:
        """Returns the layout, and the specs of the arguments and of `results`.

        Args:
          specs, mesh_sizes: as for `lay_out`.
          results: names like `self.results`. An array with D or V is a gradient.
        """
        if self.given:
            own = [P(*spec[: len(spec) - len(given)], *given) for spec, given in zip(specs, self.given)]
            specs = [*own, *specs[len(own) :]]
        slices, tokens = ([name for name in self.sizes if name[0] == first] for first in "sb")
        given = [*zip(specs, self.arguments)]

        def axes_of(names, taken=()) -> dict[str, tuple[str, ...]]:
            return shared_axes({name: self.sizes[name] for name in names}, given, mesh_sizes, taken)

        by_tokens, by_columns = (axes_of([*slices, *of]) for of in ([*tokens, "v"], ["v", *tokens]))

        def devices(axes) -> int:
            return math.prod(mesh_sizes[axis] for axis in axes)

        # elements of x and w that a device has to hold, if tokens or columns keep the axes that they share
        x_elements = math.prod(self.sizes[name] // devices(by_columns[name]) for name in tokens)
        w_elements = self.sizes["v"] // devices(by_tokens["v"])
        axes = by_columns if x_elements < w_elements else by_tokens
        dx = tuple(tuple(a for a in by_tokens[name] if a not in axes[name]) for name in tokens)
        columns, of_tokens = axes["v"], sum((axes[name] for name in tokens), ())
        dv = tuple(axis for axis in by_columns["v"] if axis in of_tokens)
        if self.sizes["v"] % devices(columns + dv):  # w and bias are divided differently
            dv = ()
        dw = axes_of("e", {*columns, *dv}.union(*(axes[name] for name in slices)))["e"]
        gradient_axes = axes | {"e": dw, "v": columns + dv}
        gradient_axes |= {name: axes[name] + more for name, more in zip(tokens, dx)}
        arguments = [spec_of(own, axes) for own in self.arguments]
        results = [spec_of(own, gradient_axes if {"d", "v"} & {*own} else axes) for own in results]
        return _Layout(of_tokens, columns, dx, dw, dv), arguments, results

    @property
    def whole(self) -> tuple[str, ...]:
        """The dimensions that no mesh axis may divide."""
        return tuple(name for name in ("d", "k") if name in self.sizes)


_PROJECTION = register(Division("projection", _dimensions, _whole, _on_shard))
