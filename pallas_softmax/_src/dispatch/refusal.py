"""Operations that can be traced but not lowered. They raise a reason when someone lowers them.

So a call that needs a GPU can be traced on any machine; only a lowering for another platform raises. And a function
without forward mode can be differentiated in reverse mode, which transposes tangents and computes none.
"""

import functools
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_refuse_p = Primitive("pallas_softmax_refuse")
_refuse_p.multiple_results = True


def placeholder(shapes: Any, reason: str) -> Any:
    """Returns results of these shapes (`jax.ShapeDtypeStruct`s) of an operation that raises `reason` when lowered."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, _refuse_p.bind(reason=reason, shapes=tuple(leaves)))


def refuse_unless_cuda(ctx, reason: str | None) -> None:
    """Raises `reason`, if there is one, unless the platforms of the lowering context `ctx` include CUDA."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if reason is not None and "cuda" not in platforms:
        raise NotImplementedError(f"{reason}, but this computation is lowered for {', '.join(platforms)}")


@_refuse_p.def_abstract_eval
def _(*, reason, shapes):
    return [ShapedArray(s.shape, s.dtype, sharding=s.sharding) for s in shapes]


def _refuse_lowering(ctx, *, reason, shapes):
    refuse_unless_cuda(ctx, reason)
    raise NotImplementedError(reason)


mlir.register_lowering(_refuse_p, _refuse_lowering)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def constant(arrays: Any, reason: str) -> Any:
    """Returns the arrays, a tree. To differentiate in them raises NotImplementedError with the reason."""
    return arrays


@constant.defjvp
def _(reason, primals, tangents):
    raise NotImplementedError(reason)


_reverse_only_p = Primitive("pallas_softmax_reverse_only")
_tangent_p = Primitive("pallas_softmax_tangent")


def reverse_only(x: jax.Array, reason: str) -> jax.Array:
    """Returns `x`, an input of a `jax.custom_vjp` function, so that forward mode raises `reason`.

    The tangent of `x` is an operation that has a transpose, for reverse mode, but no value.

    Args:
      x: floating.
      reason: the message of the error.
    """
    return _reverse_only_p.bind(x, reason=reason)


def _reverse_only_jvp(primals, tangents, *, reason):
    (x,), (dx,) = primals, tangents
    dx = dx if type(dx) is ad.Zero else _tangent_p.bind(dx, reason=reason)
    return _reverse_only_p.bind(x, reason=reason), dx


def _no_tangent(*args, reason):
    raise TypeError(reason)


_reverse_only_p.def_impl(lambda x, *, reason: x)
_reverse_only_p.def_abstract_eval(lambda x, *, reason: x)
ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
batching.defvectorized(_reverse_only_p)
mlir.register_lowering(_reverse_only_p, lambda ctx, x, *, reason: [x])

_tangent_p.def_impl(_no_tangent)
_tangent_p.def_abstract_eval(lambda dx, *, reason: dx)
ad.deflinear2(_tangent_p, lambda dy, dx, *, reason: [dy])
# jax.jacfwd batches; reverse mode transposes before it batches.
batching.primitive_batchers[_tangent_p] = _no_tangent
mlir.register_lowering(_tangent_p, _no_tangent)
