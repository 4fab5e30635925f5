"""An operation that can be traced but not lowered: it raises a reason when, and only where, someone lowers it.

So a call that needs a GPU can be traced on any machine, and the error comes only from a lowering for another platform.
"""

from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

_refuse_p = Primitive("pallas_softmax_refuse")
_refuse_p.multiple_results = True


def placeholder(shapes: Any, reason: str) -> Any:
    """Returns the results of an operation that raises when it is lowered.

    Args:
      shapes: shapes and dtypes of the results, a tree of `jax.ShapeDtypeStruct`s.
      reason: the message of the error.
    """
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, _refuse_p.bind(reason=reason, shapes=tuple(leaves)))


def refuse_unless_cuda(ctx, reason: str | None) -> None:
    """Raises `reason`, if there is one, unless the lowering context `ctx` is for CUDA, too."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if reason is not None and "cuda" not in platforms:
        raise NotImplementedError(f"{reason}, but this computation is lowered for {', '.join(platforms)}")


@_refuse_p.def_abstract_eval
def _(*, reason, shapes):
    return [ShapedArray(s.shape, s.dtype) for s in shapes]


def _refuse_lowering(ctx, *, reason, shapes):
    refuse_unless_cuda(ctx, reason)
    raise NotImplementedError(reason)


mlir.register_lowering(_refuse_p, _refuse_lowering)
