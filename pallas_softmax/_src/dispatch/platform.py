"""Runs a call on one device. The platform that the computation is lowered for decides the implementation.

`by_platform` runs the implementation that was chosen for the whole call. `run_shard` runs a call on one device's shard:
it chooses again for the shapes of the shard, and then calls `by_platform`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from pallas_softmax._src.dispatch.choose import choose_if_able, choose_unlisted
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.dispatch.operation import Choice, Operation, distance
from pallas_softmax._src.dispatch.refusal import refuse_unless_cuda


def compiled(function: Callable, *static: str) -> Callable:
    """Returns the function, with these static arguments, as a program that is compiled even under `jax.disable_jit`.

    The function binds an operation that can only be lowered. Without a compilation, JAX would call the function again
    to evaluate that operation, without end.
    """
    program = jax.jit(function, static_argnames=static)

    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return program(*args, **kwargs)

    return call


def by_platform(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs a call on the arrays of one device by the implementation that was chosen for the platform."""
    on_cuda, op = choice.required_cuda(), choice.call.operation

    def implementation(name: str) -> Callable:
        run = op.plain if name == "xla" else functools.partial(op.kernel(name).run, choice.plan)
        function = functools.partial(run, **keywords)
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return function
        # Both branches must agree on the mesh axes of `jax.shard_map` that their results vary over: the axes that an
        # argument varies over. (`jnp.where` of empty arrays loses them.) The function itself decides for the axes that
        # a row is spread over.
        vary = functools.partial(vary_together, but=keywords.get("mesh_axes", ()))
        return lambda *arrays: jax.tree.map(lambda out: vary(out, *arrays)[0], function(*arrays))

    if on_cuda == choice.elsewhere:
        return implementation("xla")(*arrays)

    cuda, shapes = jax.make_jaxpr(implementation(on_cuda), return_shape=True)(*arrays)
    elsewhere = choice.elsewhere and jax.make_jaxpr(implementation(choice.elsewhere))(*arrays)
    results = _by_platform_p.bind(
        *jax.tree.leaves(arrays), cuda=cuda, elsewhere=elsewhere, refusal=choice.refusal
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


# Like `lax.platform_dependent`, except that a module for several platforms lowers each branch for its own platforms
# only. So such a module can contain a kernel, which lowers for CUDA only.
_by_platform_p = Primitive("pallas_softmax_by_platform")
_by_platform_p.multiple_results = True
_by_platform_p.def_impl(compiled(_by_platform_p.bind, "cuda", "elsewhere", "refusal"))
_by_platform_p.def_abstract_eval(lambda *_, cuda, elsewhere, refusal: cuda.out_avals)


@functools.partial(mlir.register_lowering, _by_platform_p, platform="cuda")
def _lower_for_cuda(ctx, *leaves, cuda, elsewhere, refusal):
    return mlir.lower_fun(jaxpr_as_fun(cuda), multiple_results=True)(ctx, *leaves)


@functools.partial(mlir.register_lowering, _by_platform_p)
def _lower_elsewhere(ctx, *leaves, cuda, elsewhere, refusal):
    refuse_unless_cuda(ctx, refusal)
    return mlir.lower_fun(jaxpr_as_fun(elsewhere), multiple_results=True)(ctx, *leaves)


def run_shard(choice: Choice, operation: Operation, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs the user's operation, or a step of it, on one device's shard. `choice` is for the user's whole call."""
    x, axes = jax.tree.leaves(arrays)[0], row_axes(arrays, keywords)
    vocab = math.prod(x.shape[a] for a in axes)
    call = dataclasses.replace(
        choice.call,
        operation=operation,
        masked=arrays[1] is not None,
        mesh_axes=(),
        rows=x.size // vocab if vocab else 0,
        vocab=vocab,
        inner=distance(x.shape, axes),
        dtype=x.dtype.name,
        k=keywords.get("k", choice.call.k),  # a gradient has winners, but no argument k
        sorted=keywords.get("sorted", choice.call.sorted),
    )
    is_users = operation in (choice.call.operation, choice.call.row_operation.shard_step)
    choose = choose_unlisted if is_users else choose_if_able
    return by_platform(choose(call, choice.requested), arrays, keywords)


def row_axes(arrays: tuple, keywords: dict[str, Any]) -> tuple[int, ...]:
    """Returns the reduced axes: the named ones, or the last one for an operation without an `axes` argument."""
    return keywords.get("axes", (jax.tree.leaves(arrays)[0].ndim - 1,))
