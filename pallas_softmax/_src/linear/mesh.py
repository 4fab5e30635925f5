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
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src.dispatch.choose import choose_unlisted
from pallas_softmax._src.dispatch.mesh import divide, divisible
from pallas_softmax._src.dispatch.mesh_types import explicit_mesh, rounded_sum, shared_axes, spec_of, vary_together
from pallas_softmax._src.dispatch.operation import Call, Choice, Operation, symbolic
from pallas_softmax._src.dispatch.operation import describe as describe_rows
from pallas_softmax._src.dispatch.partitioner import Dimensions, Division, register
from pallas_softmax._src.dispatch.platform import by_platform
from pallas_softmax._src.dispatch.refusal import constant
from pallas_softmax._src.jax_internals import stage_constants
from pallas_softmax._src.linear.chunks import changed_if
from pallas_softmax._src.linear.losses import Head, token_losses, weighted_sum
from pallas_softmax._src.linear.operation import PROJECTION, PROJECTION_GRAD

_ONE_DERIVATIVE = (
    "linear_cross_entropy, linear_kl_divergence, linear_log_probs, linear_logsumexp and linear_token_stats have first"
    " derivatives only; for second ones compute the logits and call pallas_softmax.logsumexp or token_stats"
)


def as_tokens(choice: Choice, *arrays: Any, **static: Any) -> Any:
    """Runs an operation of a projection on x, w, columns, and arrays with one number per token.

    Slices of a vmap that share w and bias become one call with more tokens. Other slices run one by one, as do all
    slices of a gradient: each has its own dw. A mesh divides slices as it divides tokens.

    Two static arguments are for this file. `given` is the specs of x, w and bias before they were gathered, or None.
    `slices` is the vmaps around the operation, the outermost first. Each vmap is a flag for each array: whether the
    array has a leading dimension for the vmap. All results have one.
    """
    choice.required_cuda()  # raises if the named implementation refuses
    with stage_constants():
        once: Any = constant(arrays, _ONE_DERIVATIVE)  # a derivative of this operation would be a second one
        return _under_vmap(choice, static, once)


def _under_vmap(choice: Choice, static: dict[str, Any], arrays: tuple) -> Any:
    @custom_vmap
    def call(*arrays):
        if choice.call.mesh_axes or not divisible(jax.tree.leaves(arrays)):
            return _on_shard(choice, arrays, static, _Layout(columns=choice.call.mesh_axes))
        return divide(_PROJECTION, choice, arrays, static)

    @call.def_vmap
    def _(axis_size, in_batched, *arrays):
        _, w, columns, *_ = arrays
        slices = static.get("slices", ())
        if slices or choice.call.operation is PROJECTION_GRAD or any(jax.tree.leaves(in_batched[1:3])):
            slices = tuple(jax.tree.leaves(in_batched)), *slices
            out = _under_vmap(choice, static | {"slices": slices}, arrays)
        else:
            x, *per_token = jax.tree.map(
                lambda a, b: a if b else jnp.broadcast_to(a, (axis_size, *a.shape)),
                [arrays[0], *arrays[3:]],
                [in_batched[0], *in_batched[3:]],
            )
            out = call(x, w, columns, *per_token)
        return out, jax.tree.map(lambda _: True, out)

    return call(*arrays)


def describe(operation: Operation, x, w, head: Head, mesh_axes: tuple[str, ...] = (), *, function: str) -> Call:
    logits: Any = jax.ShapeDtypeStruct((*x.shape[:-1], head.vocab(w)), x.dtype)
    call = describe_rows(operation, logits, (x.ndim - 1,), None, mesh_axes, function=function)
    return dataclasses.replace(call, depth=x.shape[-1], objection=symbolic(x.shape + w.shape))


def lay_out(arrays: tuple, head: Head, mesh_axes: tuple[str, ...], *, gathered: bool = False) -> tuple:
    """Returns x, w, bias and the arrays of tokens with types that fit together: shardings, or axes of `shard_map`.

    x, w and bias get the shardings of their gradients, so that JAX need not reshard the gradients. The other arrays are
    sharded as an operation takes them. So are all, if `gathered`.
    """
    leaves, tree = jax.tree.flatten(arrays)
    mesh = explicit_mesh(leaves)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
        x, w, columns, *per_token = vary_together(*arrays, but=mesh_axes)
        return x, *vary_together(w, columns, over=mesh_axes), *per_token
    names, _, sizes = _names(PROJECTION, arrays, {"head": head}, ())
    specs = [jax.typeof(a).sharding.spec for a in leaves]
    as_taken, as_gradients, _ = _specs_and_layout(names, names, sizes, None, specs, mesh.shape)
    specs = as_taken if gathered else as_gradients
    laid = [jax.sharding.reshard(a, NamedSharding(mesh, spec)) for a, spec in zip(leaves, specs)]
    return jax.tree.unflatten(tree, laid)


def given_specs(*arrays: Any) -> tuple[P, ...] | None:
    leaves = jax.tree.leaves(arrays)
    return None if explicit_mesh(leaves) is None else tuple(jax.typeof(a).sharding.spec for a in leaves)


_Axes = tuple[str, ...]


class _Layout(NamedTuple):
    """The mesh axes of a projection."""

    tokens: _Axes = ()  # they divide the tokens
    columns: _Axes = ()  # they divide the columns
    dx: tuple[_Axes, ...] = ()  # for each dimension of the tokens: the axes of `columns` that divide dx, not x
    dw: _Axes = ()  # they divide D in dw, but not in w
    dv: _Axes = ()  # the axes of `tokens` that divide the columns of dw and dbias, not of w and bias


_WHOLE = _Layout()


def _on_shard(choice: Choice, arrays: tuple, keywords: dict[str, Any], layout: _Layout = _WHOLE) -> Any:
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
    """Runs the operation on one device's shards. The implementation is chosen again, for their shapes."""
    x, w, columns, *per_token = arrays
    batch, op = x.shape[:-1], choice.call.operation
    rows = math.prod(batch)

    def flattened(a):
        return a.reshape(rows, *a.shape[len(batch) :])

    def unflattened(a):
        return a.reshape(*batch, *a.shape[1:])

    flat = (flattened(x), w, columns, *jax.tree.map(flattened, per_token))
    call = describe(op, x, w, keywords["head"], function=choice.call.function)
    on_shard = choose_unlisted(call, choice.requested)
    keywords = {**keywords, "mesh_axes": layout.columns}
    if op is not PROJECTION_GRAD:  # numbers of each token only
        return jax.tree.map(unflattened, by_platform(on_shard, flat, keywords))
    keywords |= {"partial_dw": bool(layout.tokens), "partial_dx": any(layout.dx)}
    statistics, dx, dw, dbias = by_platform(on_shard, flat, keywords)
    finite: Any = True  # whether the weighted sum of all losses is finite. If not, its gradients are 0
    _, _, _, tokens, weights, *known = flat
    if not known:  # otherwise, these are the gradients of one loss per token: there is no sum
        vocab = call.vocab * lax.axis_size(layout.columns)
        total = weighted_sum(token_losses(call.function, statistics, tokens, vocab), weights)
        finite = jnp.isfinite(lax.psum(total, layout.tokens))
    statistics, gradients = jax.tree.map(unflattened, statistics), (unflattened(dx), dw, dbias)
    if layout == _WHOLE:
        if finite is not True:  # the loop does not read finite gradients
            gradients = changed_if(~finite, functools.partial(jax.tree.map, jnp.zeros_like), gradients)
        return statistics, *gradients

    # On several devices each host would wait for the loop's condition. So they select: the sums of dx and dw do it in
    # the pass that rounds.
    def zero_unless_finite(gradient):
        if finite is True:
            return gradient
        condition, gradient = vary_together(finite, gradient)
        return jnp.where(condition, gradient, 0)

    dx, dw, dbias = gradients
    v = 0 if keywords["head"].transpose_w else 1
    over_columns = layout.columns if any(layout.dx) else ()
    dx = _sum_over(dx, x.dtype, over_columns, dict(enumerate(layout.dx)), zero_unless_finite)
    dw = _sum_over(dw, w.dtype, layout.tokens, {1 - v: layout.dw, v: layout.dv}, zero_unless_finite)
    if dbias is not None:
        dbias = _sum_over(dbias, columns.bias.dtype, layout.tokens, {0: layout.dv}, zero_unless_finite)
    return statistics, dx, dw, dbias


def _sum_over(part: jax.Array, dtype, axes: tuple[str, ...], divided: dict, change: Callable) -> jax.Array:
    """Returns a device's part of the sum of a gradient over the mesh axes `axes`, rounded to `dtype`.

    `part` is what the device adds, in float32 if there are several devices. `divided` has the mesh axes that divide
    each dimension of the sum, but not of `part`. `change` maps each element of the sum, before it is rounded.
    """
    scattered = set()
    for dimension, of_dimension in divided.items():
        for axis in of_dimension:
            if axis in axes:
                part = lax.psum_scatter(part, axis, scatter_dimension=dimension, tiled=True)
                scattered.add(axis)
            else:
                size = part.shape[dimension] // lax.axis_size(axis)
                part = lax.dynamic_slice_in_dim(part, lax.axis_index(axis) * size, size, dimension)
    others = tuple(axis for axis in axes if axis not in scattered)
    return rounded_sum(part, dtype, others, change) if others else change(part).astype(dtype)


def _dimensions(choice: Choice, arrays: tuple, keywords: dict[str, Any], results: Any) -> Dimensions:
    arguments, of_results, sizes = _names(choice.call.operation, arrays, keywords, results)
    undivided = [name for name in ("d", "k") if name in sizes]
    specs = functools.partial(_specs_and_layout, arguments, of_results, sizes, keywords.get("given"))
    return Dimensions(arguments, of_results, undivided, specs)


_Names = list[tuple[str, ...]]


def _names(operation: Operation, arrays: tuple, keywords: dict[str, Any], results: Any) -> tuple[_Names, _Names, dict]:
    """Returns the names of the dimensions of each array and of each result, and the size of each dimension.

    The names are "b0", "b1", ... for the tokens; "v"; "d" for D of x, and "e" for D of w, because a mesh may divide
    dw along D where it does not divide dx. A further dimension of a token's numbers is "k": labels, winners,
    weights, noise, filters, or D' of a teacher. Its size may differ, because no mesh divides it. Vmaps add "s0", ...
    """
    slices = keywords.get("slices", ())
    leaves, tree = jax.tree.flatten(arrays)
    vmaps = [tuple(f"s{i}" for i, each in enumerate(slices) if each[j]) for j in range(len(leaves))]
    ranks = [a.ndim - len(of) for a, of in zip(leaves, vmaps)]
    rank, _, columns, *per_token = tree.unflatten(ranks)
    tokens = tuple(f"b{i}" for i in range(rank - 1))
    # "e" is D of w, "k" is D' of the teacher's w
    w, teacher_w = (("v", d) if keywords["head"].transpose_w else (d, "v") for d in "ek")

    def of_tokens(ranks) -> _Names:
        return [(*tokens, "k") if n == rank else tokens for n in ranks]

    of_columns = [teacher_w if n == 2 else ("v",) for n in jax.tree.leaves(columns)]
    own = [(*tokens, "d"), w, *of_columns, *of_tokens(jax.tree.leaves(per_token))]
    gradients = (2 if columns.bias is None else 3) if operation is PROJECTION_GRAD else 0
    results = jax.tree.leaves(results)
    of_results = of_tokens(a.ndim - len(slices) for a in results[: len(results) - gradients])
    of_vmaps = tuple(f"s{i}" for i in range(len(slices)))
    of_arguments = [of + names for of, names in zip(vmaps, own, strict=True)]
    of_results = [of_vmaps + names for names in [*of_results, *own[:gradients]]]
    sizes: dict[str, int] = {}
    for names, a in zip(of_arguments + of_results, leaves + results):
        sizes |= zip(names, a.shape)
    return of_arguments, of_results, sizes


def _specs_and_layout(
    arguments: _Names, results: _Names, sizes: dict[str, int], before_gather, specs, mesh_sizes
) -> tuple[list[P], list[P], _Layout]:
    """Returns the specs of the arguments and of `results`, and the layout. A result with D or V is a gradient.

    The first arrays have the specs `before_gather`, if there are any, in place of `specs`.
    """
    if before_gather:
        own = [P(*spec[: len(spec) - len(given)], *given) for spec, given in zip(specs, before_gather)]
        specs = [*own, *specs[len(own) :]]
    slices, tokens = ([name for name in sizes if name[0] == first] for first in "sb")
    given = [*zip(specs, arguments)]

    def axes_of(names, taken=()) -> dict[str, tuple[str, ...]]:
        return shared_axes({name: sizes[name] for name in names}, given, mesh_sizes, taken)

    by_tokens, by_columns = (axes_of([*slices, *of]) for of in ([*tokens, "v"], ["v", *tokens]))

    def devices(axes) -> int:
        return math.prod(mesh_sizes[axis] for axis in axes)

    # elements of x and w that a device has to hold, if tokens or columns keep the axes that they share
    x_elements = math.prod(sizes[name] // devices(by_columns[name]) for name in tokens)
    w_elements = sizes["v"] // devices(by_tokens["v"])
    axes = by_columns if x_elements < w_elements else by_tokens
    dx = tuple(tuple(a for a in by_tokens[name] if a not in axes[name]) for name in tokens)
    columns, of_tokens = axes["v"], sum((axes[name] for name in tokens), ())
    dv = tuple(axis for axis in by_columns["v"] if axis in of_tokens)
    if sizes["v"] % devices(columns + dv):  # w and bias are divided differently
        dv = ()
    dw = axes_of("e", {*columns, *dv}.union(*(axes[name] for name in slices)))["e"]
    gradient_axes = axes | {"e": dw, "v": columns + dv}
    gradient_axes |= {name: axes[name] + more for name, more in zip(tokens, dx)}
    of_arguments = [spec_of(own, axes) for own in arguments]
    of_results = [spec_of(own, gradient_axes if {"d", "v"} & {*own} else axes) for own in results]
    return of_arguments, of_results, _Layout(of_tokens, columns, dx, dw, dv)


_PROJECTION = register(Division("projection", _dimensions, _on_shard, _on_shard))
