"""A call on the arrays of one device: the platform that it is lowered for decides the implementation."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from pallas_softmax._src.dispatch import table as operations
from pallas_softmax._src.dispatch import xla
from pallas_softmax._src.dispatch.choose import choose_again, choose_if_able
from pallas_softmax._src.dispatch.compiled import compiled
from pallas_softmax._src.dispatch.load import load
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.dispatch.operation import Choice, distance
from pallas_softmax._src.dispatch.refusal import placeholder


def run(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Calls the chosen implementation.

    Args:
      choice: what to call.
      arrays: the positional arguments of the operation; see `operations.TABLE`.
      keywords: its static arguments.
    """
    on_cuda = choice.required_cuda()
    operation = choice.call.op

    if on_cuda == choice.elsewhere:
        return load(on_cuda).functions[operation](*arrays, **keywords)

    def implementation(name: str) -> Callable:
        function = functools.partial(load(name).functions[operation], **keywords)
        # Both branches must agree in the mesh axes of `jax.shard_map` that their results vary over: those that an
        # argument varies over. Over the axes that a row is spread over, the function itself decides.
        vary = functools.partial(vary_together, but=keywords.get("mesh_axes", ()))
        return lambda *arrays: jax.tree.map(lambda out: vary(out, *arrays)[0], function(*arrays))

    def refused(*arrays):
        return placeholder(result_shapes(operation, arrays, keywords), str(choice.refusal))

    other = refused if choice.elsewhere is None else implementation(choice.elsewhere)
    cuda, shapes = jax.make_jaxpr(implementation(on_cuda), return_shape=True)(*arrays)
    elsewhere = jax.make_jaxpr(other)(*arrays)
    results = _by_platform_p.bind(*jax.tree.leaves(arrays), cuda=cuda, elsewhere=elsewhere)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


# It is like `lax.platform_dependent`, but in a module for several platforms each branch is lowered for its platforms
# alone. So such a module can have a kernel, which can be lowered for CUDA only.
_by_platform_p = Primitive("pallas_softmax_by_platform")
_by_platform_p.multiple_results = True
_by_platform_p.def_impl(compiled(_by_platform_p.bind, "cuda", "elsewhere"))
_by_platform_p.def_abstract_eval(lambda *_, cuda, elsewhere: cuda.out_avals)
mlir.register_lowering(
    _by_platform_p,
    mlir.lower_fun(lambda *leaves, cuda, elsewhere: jaxpr_as_fun(cuda)(*leaves), multiple_results=True),
    platform="cuda",
)
mlir.register_lowering(
    _by_platform_p,
    mlir.lower_fun(lambda *leaves, cuda, elsewhere: jaxpr_as_fun(elsewhere)(*leaves), multiple_results=True),
)


def run_shard(choice: Choice, operation: str, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs `operation` on what one device has of the arrays, for whose shapes the choice is made anew.

    Args:
      choice: that for the user's whole call.
      operation: the user's, or a step of it.
      arrays, keywords: as for `run`.
    """
    x, axes = jax.tree.leaves(arrays)[0], row_axes(arrays, keywords)
    vocab = math.prod(x.shape[a] for a in axes)
    call = dataclasses.replace(
        choice.call,
        op=operation,
        masked=arrays[1] is not None,
        mesh_axes=(),
        rows=x.size // vocab if vocab else 0,
        vocab=vocab,
        inner=distance(x.shape, axes),
        dtype=x.dtype.name,
        k=keywords.get("k"),
    )
    users_step = operation in (choice.call.op, operations.TABLE[choice.call.op].on_shard)
    choose = choose_again if users_step else choose_if_able
    return run(choose(call, choice.requested), arrays, keywords)


def row_axes(arrays: tuple, keywords: dict[str, Any]) -> tuple[int, ...]:
    """Returns the reduced axes: those that are named, or the last one of an operation that takes no others."""
    return keywords.get("axes", (jax.tree.leaves(arrays)[0].ndim - 1,))


def result_shapes(operation: str, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Returns shapes and dtypes of the operation's results, as `jax.ShapeDtypeStruct`s."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    return jax.eval_shape(functools.partial(xla.functions[operation], **keywords), *shapes)
