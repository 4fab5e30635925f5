"""Pallas's interpreter: tests run kernels in it on the CPU.

The interpreter has no inline PTX, no layouts and no clusters. A function that needs them names a twin in plain JAX
(`twin`), and the interpreter runs the twin instead. A context variable says whether the interpreter runs the kernels
(`interpreted`). It is read while kernels are traced.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import jax.experimental.pallas.mosaic_gpu as plgpu

_interpret: ContextVar[Any] = ContextVar("interpret", default=None)
F = TypeVar("F", bound=Callable[..., Any])


@contextlib.contextmanager
def interpreted(interpret: Any) -> Iterator[None]:
    """In this context, kernels are traced with this value of the `interpret` argument of `pallas_call`.

    None or False is for the GPU. `jax.jit` does not cache by the context. So use a jitted function either in this
    context or outside of it, but not in both.
    """
    token = _interpret.set(interpret)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpret() -> Any:
    """Returns the argument `interpret` of `pallas_call` for a kernel that is traced now; None on a GPU."""
    return _interpret.get()


def twin(plain: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a function for the GPU. The interpreter runs `plain` in its place, with the same arguments."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def choose(*args, **keywords):
            return (plain if interpret() else function)(*args, **keywords)

        return choose  # pyright: ignore[reportReturnType]

    return decorate


@twin(lambda value, layout: value)
def laid_out(value, layout: Any):
    """Returns an array in this layout; unchanged in the interpreter."""
    return plgpu.layout_cast(value, layout)
