"""Functions and operations that raise a reason only if someone differentiates or lowers them.

So a call that needs a GPU can be traced on any machine; only a lowering for another platform raises. And a function
without forward mode can be differentiated in reverse mode, which transposes tangents and computes none.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refuse_unless_cuda(ctx, reason: str | None) -> None:
    """Raises `reason`, if there is one, unless the platforms of the lowering context `ctx` include CUDA."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if reason is not None and "cuda" not in platforms:
        raise NotImplementedError(f"{reason}, but this computation is lowered for {', '.join(platforms)}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def constant(arrays: Any, reason: str) -> Any:
    """Returns the arrays, a tree. To differentiate in them raises NotImplementedError with the reason."""
    return arrays


@constant.defjvp
def _(reason, primals, tangents):
    raise NotImplementedError(reason)


def reverse_only(x: jax.Array, reason: str) -> jax.Array:
    """Returns `x`, floating, an input of a `jax.custom_vjp` function, so that forward mode raises TypeError."""
    return _reverse_only_p.bind(x, reason=reason)


def _reverse_only_jvp(primals, tangents, *, reason):
    (x,), (dx,) = primals, tangents
    dx = dx if type(dx) is ad.Zero else _tangent_p.bind(dx, reason=reason)
    return reverse_only(x, reason), dx


def _no_tangent(*args, reason):
    raise TypeError(reason)


# Not a `jax.custom_jvp`: a vmap in a gradient would batch the tangent, like `jax.jacfwd`.
_reverse_only_p = Primitive("pallas_softmax_reverse_only")
_reverse_only_p.def_impl(lambda x, *, reason: x)
_reverse_only_p.def_abstract_eval(lambda x, *, reason: x)
ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
batching.defvectorized(_reverse_only_p)
mlir.register_lowering(_reverse_only_p, lambda ctx, x, *, reason: [x])

_tangent_p = Primitive("pallas_softmax_tangent")  # it has a transpose, for reverse mode, but no value
_tangent_p.def_impl(_no_tangent)
_tangent_p.def_abstract_eval(lambda dx, *, reason: dx)
ad.deflinear2(_tangent_p, lambda dy, dx, *, reason: [dy])
batching.primitive_batchers[_tangent_p] = _no_tangent  # only `jax.jacfwd` batches it
mlir.register_lowering(_tangent_p, _no_tangent)


def only_types(types: Sequence[ShapedArray]) -> list[jax.Array]:
    """Returns arrays of these types for a trace that uses nothing else. They cannot be lowered."""
    return _types_p.bind(types=tuple(types))


_types_p = Primitive("pallas_softmax_types")
_types_p.multiple_results = True
_types_p.def_abstract_eval(lambda *, types: list(types))
