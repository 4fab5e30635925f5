"""Runs a call on one device. The platform that the computation is lowered for decides the implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.dispatch.refusal import refuse_unless_cuda


def compiled(function: Callable, *static: str) -> Callable:
    """Returns the function, with these static arguments, as a program that is compiled even under `jax.disable_jit`.

    The function binds an operation that can only be lowered. Without a compilation, JAX would call the function again
    to evaluate that operation, without end.
    """
    return jax.disable_jit(False)(jax.jit(function, static_argnames=static))


def by_platform(choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs a call on the arrays of one device by the implementation that was chosen for the platform."""
    on_cuda, op = choice.required_cuda(), choice.call.operation

    def implementation(name: str) -> Callable:
        run = op.plain if name == "xla" else functools.partial(op.kernels[name].run, choice.plan)
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
    results = _by_platform_p.bind(*jax.tree.leaves(arrays), cuda=cuda, elsewhere=elsewhere, refusal=choice.refusal)
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
    refuse_unless_cuda(ctx, refusal)  # only with a refusal, `elsewhere` is None
    return mlir.lower_fun(jaxpr_as_fun(elsewhere), multiple_results=True)(ctx, *leaves)
