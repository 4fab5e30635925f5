"""A linear map as one JAX primitive, `linear_p`, with a transpose, a vmap rule and derivatives.

The map is linear in some arrays, and depends on others that the forward has saved. JAX has such a primitive,
`jax.custom_derivatives.linear_call`. But it has no vmap rule, and rejects tangents of the saved arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_softmax._src.dispatch.platform import compiled


class _Level(NamedTuple):
    """One vmap around a linear map. A flag says whether an array has a batch; the batch is its first dimension.

    Attributes:
      saved: flags of the leaves of `saved`.
      inputs: flags of the linear arrays.
      outputs: flags of the results. If False, the result is summed over the batch. That happens in a transpose: a
        cotangent of an input without a batch is the sum of the cotangents of all slices.
    """

    saved: tuple[bool, ...]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """The function that `linear_p` computes. It is hashable, so that equal calls share JAX's caches.

    Attributes:
      tangent: the map: (static, saved, inputs, plain=) -> a tuple of arrays. It may launch a kernel. With plain=True
        it is plain JAX, so that JAX can differentiate it in `saved`.
      cotangent: the transpose of the map, with the same arguments.
      static: the first argument of `tangent` and `cotangent`.
      saved_tree: the structure of `saved`.
      needs_primitive: whether the transpose is one operation, `linear_p`, instead of plain ones.
      levels: the vmaps around the map, the innermost first.
    """

    tangent: Callable
    cotangent: Callable
    static: Any
    saved_tree: Any
    needs_primitive: bool = True
    levels: tuple[_Level, ...] = ()

    @property
    def transposed(self) -> "LinearMap":
        """The transpose of this map."""
        levels = tuple(_Level(level.saved, level.outputs, level.inputs) for level in self.levels)
        return dataclasses.replace(self, tangent=self.cotangent, cotangent=self.tangent, levels=levels)

    def __call__(self, saved: list, linear: list, *, plain: bool = False) -> list:
        """Computes the map, by kernels if its operation has any, or in plain JAX."""

        def on_leaves(saved, linear):
            saved = jax.tree.unflatten(self.saved_tree, saved)
            return list(self.tangent(self.static, saved, tuple(linear), plain=plain))

        for level in self.levels:
            on_leaves = _at_level(on_leaves, level)
        return on_leaves(saved, linear)


def _at_level(function: Callable, level: _Level) -> Callable:
    """Returns a function of two lists of arrays, (saved, linear), under one vmap."""
    axes = ([0 if b else None for b in level.saved], [0 if b else None for b in level.inputs])

    def batched(saved, linear):
        outputs = jax.vmap(function, in_axes=axes)(saved, linear)
        return [out if b else jnp.sum(out, 0) for out, b in zip(outputs, level.outputs)]

    return batched


# Evaluates the map eagerly, as a compiled program. It is cached by the map, since equal maps may have unequal jaxprs.
_program = compiled(lambda saved, linear, *, function: function(saved, linear), "function")

linear_p = Primitive("pallas_softmax_linear")
linear_p.multiple_results = True


def apply(function: LinearMap, saved: list, linear) -> list:
    """Binds `linear_p`. The jaxpr of the map is a parameter, so that JAX and its tools see the operations inside."""
    linear, count = list(linear), len(saved)
    jaxpr = jax.make_jaxpr(lambda *args: function(list(args[:count]), list(args[count:])))(*saved, *linear)
    return linear_p.bind(*saved, *linear, jaxpr=jaxpr, function=function, count=count)


def _jvp(primals, tangents, *, jaxpr, function, count):
    """The tangent in the linear arrays is the map itself. The tangent in `saved` is a JVP of the plain map."""
    primals = list(primals)
    outputs = apply(function, primals[:count], primals[count:])
    sums = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outputs]
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        sums = apply(function, primals[:count], linear)
    moved = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
    if moved:

        def plain(*values):
            saved = primals[:count]
            for i, value in zip(moved, values):
                saved[i] = value
            return function(saved, primals[count:], plain=True)

        _, more = jax.jvp(plain, [primals[i] for i in moved], [tangents[i] for i in moved])
        sums = [ad.add_tangents(a, b) for a, b in zip(sums, more)]
    return outputs, sums


def _transpose(cotangents, *args, jaxpr, function, count):
    cotangents = [
        ad.instantiate_zeros(ad.Zero(aval) if type(ct) is ad.Zero else ct)
        for ct, aval in zip(cotangents, jaxpr.out_avals)
    ]
    saved, transposed = list(args[:count]), function.transposed
    run = functools.partial(apply, transposed) if function.needs_primitive else transposed
    return [None] * count + run(saved, cotangents)


def _batch(args, dims, *, jaxpr, function, count):
    batched = tuple(d is not None for d in dims)
    args = [jnp.moveaxis(a, d, 0) if b else a for a, d, b in zip(args, dims, batched)]
    level = _Level(batched[:count], batched[count:], (True,) * len(jaxpr.out_avals))
    outputs = apply(
        dataclasses.replace(function, levels=(*function.levels, level)), args[:count], args[count:]
    )
    return outputs, [0] * len(outputs)


linear_p.def_impl(
    lambda *args, jaxpr, function, count: _program(list(args[:count]), list(args[count:]), function=function)
)
linear_p.def_abstract_eval(lambda *args, jaxpr, function, count: jaxpr.out_avals)
mlir.register_lowering(
    linear_p,
    mlir.lower_fun(lambda *args, jaxpr, function, count: jaxpr_as_fun(jaxpr)(*args), multiple_results=True),
)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch


def without_gradient(name: str, value: jax.Array, *inputs: jax.Array) -> jax.Array:
    """Returns the value. Reverse mode raises if a loss depends on the inputs through it; its tangent is NaN.

    Args:
      name: the public name of the value, for the error.
      value: a floating array.
      inputs: the arrays that it was computed from.
    """

    @jax.custom_jvp
    def identity(value, inputs):
        return value

    @identity.defjvp
    def _(primals, tangents):
        value, inputs = primals
        floating = [t for x, t in zip(inputs, tangents[1]) if jnp.issubdtype(x.dtype, jnp.inexact)]
        refused = LinearMap(_nan, _refuse, name, jax.tree.structure(()))
        return value, apply(refused, [], [tangents[0], *floating])[0]

    return identity(value, inputs)


def _nan(name: str, saved: tuple, linear: tuple, *, plain: bool) -> list:
    return [jnp.full_like(linear[0], jnp.nan)]


def _refuse(name: str, saved: tuple, linear: tuple, *, plain: bool) -> list:
    raise NotImplementedError(f"{name} has no gradient; wrap it in jax.lax.stop_gradient")
