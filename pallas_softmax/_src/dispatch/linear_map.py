"""A linear map as one JAX primitive, `linear_p`, with a transpose, a vmap rule and derivatives.

The map is linear in some arrays, and depends on others that the forward has saved. JAX has such a primitive,
`jax.custom_derivatives.linear_call`. But it has no vmap rule, and rejects tangents of the saved arrays.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_softmax._src.dispatch.platform import compiled


class _Level(NamedTuple):
    """One vmap around a linear map: the axis of the batch in each array, 0 or None.

    A result without a batch is summed over it. That happens in a transpose: a cotangent of an input without a batch is
    the sum of the cotangents of all slices.
    """

    saved: tuple[int | None, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """The function that `linear_p` computes. It is hashable, so that equal calls share JAX's caches."""

    # The map: (static, saved, inputs, plain=) -> a tuple of arrays. It may launch a kernel. With plain=True it is plain
    # JAX, so that JAX can differentiate it in `saved`.
    tangent: Callable
    cotangent: Callable  # the transpose of the map
    static: Any  # the first argument of both; hashable
    saved_tree: Any
    needs_primitive: bool = True  # whether the transpose is one operation, `linear_p`, instead of plain ones
    levels: tuple[_Level, ...] = ()  # the vmaps around the map, the innermost first

    @property
    def transposed(self) -> "LinearMap":
        levels = tuple(_Level(level.saved, level.outputs, level.inputs) for level in self.levels)
        return dataclasses.replace(self, tangent=self.cotangent, cotangent=self.tangent, levels=levels)

    def split(self, args: Sequence) -> tuple[Any, Any]:
        """Returns the leaves of `saved`, and the linear arrays."""
        count = self.saved_tree.num_leaves
        return args[:count], args[count:]

    def __call__(self, saved: Sequence, linear: Sequence, *, plain: bool = False) -> list:
        def on_leaves(saved, linear):
            saved = jax.tree.unflatten(self.saved_tree, saved)
            return list(self.tangent(self.static, saved, linear, plain=plain))

        for level in self.levels:
            on_leaves = _at_level(on_leaves, level)
        return on_leaves(tuple(saved), tuple(linear))


def _at_level(function: Callable, level: _Level) -> Callable:
    def batched(saved, linear):
        outputs = jax.vmap(function, in_axes=(level.saved, level.inputs))(saved, linear)
        return [jnp.sum(out, 0) if axis is None else out for out, axis in zip(outputs, level.outputs)]

    return batched


# Evaluates the map eagerly, as a compiled program. It is cached by the map, since equal maps may have unequal jaxprs.
_program = compiled(lambda *args, function: function(*function.split(args)), "function")

linear_p = Primitive("pallas_softmax_linear")
linear_p.multiple_results = True


def apply(function: LinearMap, saved: Sequence, linear: Sequence) -> list:
    """Binds `linear_p`. The jaxpr of the map is a parameter, so that JAX and its tools see the operations inside."""
    jaxpr = jax.make_jaxpr(lambda *args: function(*function.split(args)))(*saved, *linear)
    return linear_p.bind(*saved, *linear, jaxpr=jaxpr, function=function)


def _jvp(primals, tangents, *, jaxpr, function):
    """The tangent in the linear arrays is the map itself. The tangent in `saved` is a JVP of the plain map."""
    saved, linear = function.split(primals)
    dsaved, dlinear = function.split(tangents)
    outputs = apply(function, saved, linear)
    sums = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outputs]
    if any(type(t) is not ad.Zero for t in dlinear):
        sums = apply(function, saved, [ad.instantiate_zeros(t) for t in dlinear])
    moved = [i for i, t in enumerate(dsaved) if type(t) is not ad.Zero]
    if moved:

        def plain(*values):
            replaced = dict(zip(moved, values))
            return function([replaced.get(i, a) for i, a in enumerate(saved)], linear, plain=True)

        _, more = jax.jvp(plain, [saved[i] for i in moved], [dsaved[i] for i in moved])
        sums = [ad.add_tangents(a, b) for a, b in zip(sums, more)]
    return outputs, sums


def _transpose(cotangents, *args, jaxpr, function):
    cotangents = [
        ad.instantiate_zeros(ad.Zero(aval) if type(ct) is ad.Zero else ct)
        for ct, aval in zip(cotangents, jaxpr.out_avals)
    ]
    saved, _ = function.split(args)
    transposed = function.transposed
    run = functools.partial(apply, transposed) if function.needs_primitive else transposed
    return [None] * len(saved) + run(saved, cotangents)


def _batch(args, dims, *, jaxpr, function):
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims)]
    of_saved, of_inputs = function.split(tuple(None if d is None else 0 for d in dims))
    level = _Level(of_saved, of_inputs, (0,) * len(jaxpr.out_avals))
    outputs = apply(dataclasses.replace(function, levels=(*function.levels, level)), *function.split(args))
    return outputs, [0] * len(outputs)


linear_p.def_impl(lambda *args, jaxpr, function: _program(*args, function=function))
linear_p.def_abstract_eval(lambda *args, jaxpr, function: jaxpr.out_avals)
mlir.register_lowering(
    linear_p, mlir.lower_fun(lambda *args, jaxpr, function: jaxpr_as_fun(jaxpr)(*args), multiple_results=True)
)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_gradient(name: str, value: jax.Array, *inputs: jax.Array) -> jax.Array:
    """Returns the value, floating. Reverse mode raises if a loss depends on the inputs through it; its tangent is NaN.

    `name` is the name of the function, for the error.
    """
    return value


@without_gradient.defjvp
def _(name, primals, tangents):
    floating = [t for x, t in zip(primals, tangents) if jnp.issubdtype(x.dtype, jnp.inexact)]
    refused = LinearMap(_nan, _refuse, name, jax.tree.structure(()))
    return primals[0], apply(refused, [], floating)[0]


def _nan(name: str, saved: tuple, linear: tuple, *, plain: bool) -> list:
    return [jnp.full_like(linear[0], jnp.nan)]


def _refuse(name: str, saved: tuple, linear: tuple, *, plain: bool) -> list:
    raise NotImplementedError(f"{name} has no gradient; wrap it in jax.lax.stop_gradient")
