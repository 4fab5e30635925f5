"""Runs a call on one device. The platform that the computation is lowered for decides the implementation."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.dispatch.refusal import refuse_unless_cuda
from pallas_softmax._src.jax_internals import stage_constants


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

    leaves, tree = jax.tree.flatten(arrays)
    jaxpr, shapes = jax.make_jaxpr(implementation(choice.elsewhere or on_cuda), return_shape=True)(*arrays)
    cuda = elsewhere = jaxpr_as_fun(jaxpr)
    if choice.elsewhere is not None:
        # Kernels take long to trace, so they are traced when a program is lowered for CUDA. Plain JAX tells the types.
        run = in_this_context(implementation(on_cuda))
        cuda = lambda *leaves: jax.tree.leaves(run(*tree.unflatten(leaves)))  # noqa: E731
    results = _by_platform_p.bind(
        *leaves, types=tuple(jaxpr.out_avals), cuda=cuda, elsewhere=elsewhere, refusal=choice.refusal
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


# The settings of JAX that change what a function computes, and their contexts.
_SETTINGS: dict[str, Callable] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_threefry_partitionable": jax.threefry_partitionable,
}


def settings() -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


@contextlib.contextmanager
def context_of(settings: tuple[Any, ...], mesh: AbstractMesh):
    """Restores the `settings` of JAX and the abstract mesh that a call was traced with."""
    with contextlib.ExitStack() as contexts:
        for setting, value in zip(_SETTINGS.values(), settings):
            contexts.enter_context(setting(value))
        contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
        contexts.enter_context(stage_constants())
        yield


def in_this_context(function: Callable) -> Callable:
    """Returns the function, which JAX may trace later, as if it traced the function now."""
    context = settings(), jax.sharding.get_abstract_mesh()

    def run(*arrays):
        with context_of(*context):
            return function(*arrays)

    return run


# Like `lax.platform_dependent`, except that a module for several platforms lowers each branch for its own platforms
# only. So such a module can contain a kernel, which lowers for CUDA only.
_by_platform_p = Primitive("pallas_softmax_by_platform")
_by_platform_p.multiple_results = True
_by_platform_p.def_impl(compiled(_by_platform_p.bind, "types", "cuda", "elsewhere", "refusal"))
_by_platform_p.def_abstract_eval(lambda *_, types, **__: list(types))


@functools.partial(mlir.register_lowering, _by_platform_p, platform="cuda")
def _lower_for_cuda(ctx, *leaves, types, cuda, elsewhere, refusal):
    return mlir.lower_fun(cuda, multiple_results=True)(ctx, *leaves)


@functools.partial(mlir.register_lowering, _by_platform_p)
def _lower_elsewhere(ctx, *leaves, types, cuda, elsewhere, refusal):
    refuse_unless_cuda(ctx, refusal)  # only with a refusal, `elsewhere` is the kernel
    return mlir.lower_fun(elsewhere, multiple_results=True)(ctx, *leaves)
