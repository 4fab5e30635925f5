"""Derivatives of operations on rows, in both modes and of any order, by one mechanism.

A kernel has no derivatives that JAX could find, and JAX's own `custom_vjp` gives reverse mode only. So JAX computes
ys = f(xs) from xs without derivatives. A `jax.custom_jvp` that returns ys unchanged then adds the derivatives: the
tangents dys are a linear map of dxs, which JAX sees as one operation, `linear_p`. f itself stays outside of the
`custom_jvp`, because some tools do not look into one.

    forward mode      evaluates `linear_p`: dys = tangent(saved, dxs)
    reverse mode      JAX transposes `linear_p`: dxs = cotangent(saved, dys), which is the kernel of the gradient
    higher orders     `linear_p` is linear in dxs; in `saved`, the same functions in plain JAX are differentiated

JAX keeps `saved` alone between a forward and its backward, as with `custom_vjp`.

`linear_p` is home-made: `jax.custom_derivatives.linear_call` has no vmap rule, and rejects tangents of its residuals.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_softmax._src.dispatch.choose import choose, choose_if_able, choose_plain, record
from pallas_softmax._src.dispatch.compiled import compiled
from pallas_softmax._src.dispatch.mesh_types import sum_cotangents
from pallas_softmax._src.dispatch.operation import PER_ROW, Call, Choice, Operation
from pallas_softmax._src.dispatch.vmap import as_rows, is_visible


class Static(NamedTuple):
    """Everything about a call that is known while tracing; hashable.

    Attributes:
      forward: the choice for the operation.
      gradient: the choice for its gradient.
      tangent: the choice for its tangent.
      keywords: the static arguments of the operation, as the items of a dictionary.
      shared: the static arguments that its gradient and its tangent also take.
    """

    forward: Choice
    gradient: Choice
    tangent: Choice
    keywords: tuple[tuple[str, Any], ...]
    shared: tuple[tuple[str, Any], ...]


def choose_all(
    call: Call, implementation: str | None, *, own: dict[str, Any] | None = None, **shared: Any
) -> Static:
    """Returns the choices for a call and its derivatives.

    The gradient is chosen like the call. If a named implementation cannot run it, plain JAX does, unless the operation
    says `gradient_needs_kernel`. The tangent is plain JAX, unless it is the gradient.

    Args:
      call: the call.
      implementation: the name that the user gave, or None.
      own: static arguments of the operation that its derivatives do not take.
      **shared: the other ones.
    """
    operation = call.operation
    assert operation.gradient is not None and operation.tangent is not None
    forward, gradient, tangent = (call, call.of(operation.gradient), call.of(operation.tangent))
    chosen = choose(forward, implementation)
    if operation.gradient_needs_kernel:
        backward = choose(gradient, implementation)
    else:
        backward = choose_if_able(gradient, implementation)
        if backward.cuda != "xla":
            record(backward)
    symmetric = operation.tangent is operation.gradient
    return Static(
        chosen,
        backward,
        backward if symmetric else choose_plain(tangent),
        tuple({**shared, **(own or {})}.items()),
        tuple(shared.items()),
    )


@dataclasses.dataclass(frozen=True)
class Derivatives:
    """The tangent of an operation and its transpose. All take (static, saved, arrays) and return a tuple of arrays.

    Attributes:
      tangent: dxs -> dys. It may launch a kernel.
      cotangent: dys -> dxs, the transpose. It may launch a kernel.
      plain_tangent: the same as `tangent` in plain JAX, which can be differentiated in `saved`.
      plain_cotangent: the same as `cotangent` in plain JAX.
    """

    tangent: Callable
    cotangent: Callable
    plain_tangent: Callable
    plain_cotangent: Callable

    @property
    def transposed(self) -> "Derivatives":
        """The same with tangent and cotangent exchanged."""
        return Derivatives(self.cotangent, self.tangent, self.plain_cotangent, self.plain_tangent)


def derivatives_of(operation: Operation) -> Derivatives:
    """Returns the derivatives of an operation, run like every operation, and in plain JAX."""
    gradient, tangent = operation.gradient, operation.tangent
    assert gradient is not None and tangent is not None
    replicated = operation.results == PER_ROW  # over the mesh axes that a row is spread over

    def evaluate(static: Static, choice: Choice, saved, arrays):
        return _as_tuple(as_rows(choice, *saved, *arrays, **dict(static.shared)))

    def evaluate_plain(static: Static, operation: Operation, saved, arrays):
        mesh_axes = static.forward.call.mesh_axes
        return _as_tuple(operation.plain(*saved, *arrays, **dict(static.shared), mesh_axes=mesh_axes))

    def whole(static: Static, cotangents):
        return sum_cotangents(cotangents, static.forward.call.mesh_axes) if replicated else cotangents

    return Derivatives(
        lambda static, saved, dxs: evaluate(static, static.tangent, saved, dxs),
        lambda static, saved, dys: evaluate(static, static.gradient, saved, whole(static, dys)),
        lambda static, saved, dxs: evaluate_plain(static, tangent, saved, dxs),
        lambda static, saved, dys: evaluate_plain(static, gradient, saved, whole(static, dys)),
    )


def _as_tuple(out) -> tuple:
    return out if isinstance(out, tuple) else (out,)


def differentiable(operation: Operation, primal: Callable, derivatives: Derivatives) -> Callable:
    """Returns a jitted function (static, xs, constants) -> (ys, others) of an operation, with its derivatives.

    `operation.save` maps (xs, constants, ys, others) to the leading arguments of the derivatives.

    Args:
      operation: the operation.
      primal: (static, xs, constants) -> (ys, others), tuples of arrays. Only ys have derivatives, in xs. `others`
        (floating arrays) and `constants` (arrays or None) are treated as constants.
      derivatives: the derivatives of ys in xs.
    """
    save = operation.save
    assert save is not None

    def unchanged(static, results, xs, constants):
        # jet ignores a custom_jvp, and would find derivatives of 0. It has no rule for a name, so it raises.
        return checkpoint_name(results, f"pallas_softmax.{operation.name}")

    with_derivatives = jax.custom_jvp(unchanged, nondiff_argnums=(0,))

    @with_derivatives.defjvp
    def _(static, primals, tangents):
        _, xs, constants = primals
        ys, others = with_derivatives(static, *primals)
        saved, tree = jax.tree.flatten(save(xs, constants, ys, others))
        dxs = [dx for x, dx in zip(xs, tangents[1]) if jnp.issubdtype(x.dtype, jnp.inexact)]
        dys = _linear(_LinearMap(derivatives, static, tree), saved, dxs)
        return (ys, others), (tuple(dys), tuple(map(jnp.zeros_like, others)))

    def call(static, xs, constants):
        return with_derivatives(static, primal(static, lax.stop_gradient(xs), constants), xs, constants)

    call.__name__ = operation.name
    return jax.jit(call, static_argnums=0)


# ---- A value without a derivative

_refused_tangent_p = Primitive("pallas_softmax_refused_tangent")


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
        return value, _refused_tangent_p.bind(tangents[0], *floating, name=name)

    return identity(value, inputs)


def _refuse_transpose(cotangent, *_, name):
    raise NotImplementedError(f"{name} has no gradient; wrap it in jax.lax.stop_gradient")


def _refuse_batch(args, dims, *, name):
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    first = (
        jnp.broadcast_to(args[0], (size, *args[0].shape))
        if dims[0] is None
        else jnp.moveaxis(args[0], dims[0], 0)
    )
    return _refused_tangent_p.bind(first, *args[1:], name=name), 0


_refused_tangent_p.def_impl(lambda like, *_, name: jnp.full_like(like, jnp.nan))
_refused_tangent_p.def_abstract_eval(lambda like, *_, name: like)
mlir.register_lowering(
    _refused_tangent_p,
    mlir.lower_fun(lambda like, *_, name: jnp.full_like(like, jnp.nan), multiple_results=False),
)
ad.primitive_jvps[_refused_tangent_p] = lambda primals, tangents, *, name: (
    _refused_tangent_p.bind(*primals, name=name),
    _refused_tangent_p.bind(*map(ad.instantiate_zeros, tangents), name=name),
)
ad.primitive_transposes[_refused_tangent_p] = _refuse_transpose
batching.primitive_batchers[_refused_tangent_p] = _refuse_batch


# ---- A linear map as one operation


class _Level(NamedTuple):
    """One vmap around a linear map. Each flag says whether the batch is the first dimension of an array.

    Attributes:
      saved: flags of the leaves of `saved`.
      inputs: flags of the linear arrays.
      outputs: flags of the results. A result without a batch is the sum over it: the transpose of a shared input.
    """

    saved: tuple[bool, ...]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class _LinearMap:
    """The function that `linear_p` computes. It is hashable, so that equal calls share JAX's caches.

    Attributes:
      derivatives: a linear map and its transpose; this one computes `derivatives.tangent`.
      static: their first argument.
      saved_tree: the structure of `saved`.
      levels: the vmaps around it, the innermost first.
    """

    derivatives: Derivatives
    static: Any
    saved_tree: Any
    levels: tuple[_Level, ...] = ()

    @property
    def transposed(self) -> "_LinearMap":
        """The transpose of this map."""
        levels = tuple(_Level(level.saved, level.outputs, level.inputs) for level in self.levels)
        return dataclasses.replace(self, derivatives=self.derivatives.transposed, levels=levels)

    def __call__(self, saved: list, linear: list) -> list:
        """Computes the map, by kernels if its operation has any."""
        return self._batched(self.derivatives.tangent)(saved, linear)

    def plain(self, saved: list, linear: list) -> list:
        """Computes the map in plain JAX."""
        return self._batched(self.derivatives.plain_tangent)(saved, linear)

    def _batched(self, function: Callable) -> Callable:
        def on_leaves(saved, linear):
            return list(function(self.static, jax.tree.unflatten(self.saved_tree, saved), tuple(linear)))

        for level in self.levels:
            on_leaves = _at_level(on_leaves, level)
        return on_leaves


def _at_level(function: Callable, level: _Level) -> Callable:
    """Returns the function (saved, linear) of two lists of arrays under one vmap."""
    axes = ([0 if b else None for b in level.saved], [0 if b else None for b in level.inputs])

    def batched(saved, linear):
        outputs = jax.vmap(function, in_axes=axes)(saved, linear)
        return [out if b else jnp.sum(out, 0) for out, b in zip(outputs, level.outputs)]

    return batched


# The map as a program. Equal maps share it, although their jaxprs differ.
_apply = compiled(lambda saved, linear, *, function: function(saved, linear), "function")

linear_p = Primitive("pallas_softmax_linear")
linear_p.multiple_results = True


def _linear(function: _LinearMap, saved: list, linear) -> list:
    """Binds the map as one operation. Its jaxpr is a parameter, so that JAX sees what is inside."""
    linear, count = list(linear), len(saved)
    jaxpr = jax.make_jaxpr(lambda *args: function(list(args[:count]), list(args[count:])))(*saved, *linear)
    return linear_p.bind(*saved, *linear, jaxpr=jaxpr, function=function, count=count)


def _evaluate(*args, jaxpr, function, count):
    return jaxpr_as_fun(jaxpr)(*args)


def _abstract(*args, jaxpr, function, count):
    return jaxpr.out_avals


def _jvp(primals, tangents, *, jaxpr, function, count):
    """The tangent in the linear arrays is the map itself; in `saved` it is the derivative of the plain map."""
    primals = list(primals)
    outputs = _linear(function, primals[:count], primals[count:])
    sums = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outputs]
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        sums = _linear(function, primals[:count], linear)
    moved = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
    if moved:

        def plain(*values):
            saved = primals[:count]
            for i, value in zip(moved, values):
                saved[i] = value
            return function.plain(saved, primals[count:])

        _, more = jax.jvp(plain, [primals[i] for i in moved], [tangents[i] for i in moved])
        sums = [ad.add_tangents(a, b) for a, b in zip(sums, more)]
    return outputs, sums


def _transpose(cotangents, *args, jaxpr, function, count):
    cotangents = [
        ad.instantiate_zeros(ad.Zero(aval) if type(ct) is ad.Zero else ct)
        for ct, aval in zip(cotangents, jaxpr.out_avals)
    ]
    saved, transposed = list(args[:count]), function.transposed
    if all(is_visible(choice, saved) for choice in (function.static.gradient, function.static.tangent)):
        return [None] * count + transposed(saved, cotangents)
    return [None] * count + list(_linear(transposed, saved, cotangents))


def _batch(args, dims, *, jaxpr, function, count):
    batched = tuple(d is not None for d in dims)
    args = [jnp.moveaxis(a, d, 0) if b else a for a, d, b in zip(args, dims, batched)]
    level = _Level(batched[:count], batched[count:], (True,) * len(jaxpr.out_avals))
    outputs = _linear(
        dataclasses.replace(function, levels=(*function.levels, level)), args[:count], args[count:]
    )
    return outputs, [0] * len(outputs)


linear_p.def_impl(
    lambda *args, jaxpr, function, count: _apply(list(args[:count]), list(args[count:]), function=function)
)
linear_p.def_abstract_eval(_abstract)
mlir.register_lowering(linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
