"""Pallas's interpreter: tests run kernels in it on the CPU.

The interpreter has no inline PTX, no layouts and no clusters. A twin in plain JAX runs in place of each function that
needs them; tests/support/twins.py has the twins.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import jax.experimental.pallas.mosaic_gpu as plgpu

F = TypeVar("F", bound=Callable[..., Any])

# The argument `interpret` of `pallas_call`, and the twins by file and name of the function: "blocks.load_as".
_interpreter: ContextVar[tuple[Any, Mapping[str, Callable[..., Any]]]] = ContextVar("interpreter")
_ON_GPU = None, {}


@contextlib.contextmanager
def interpreted(interpret: Any, twins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """In this context, kernels are traced with this argument `interpret` of `pallas_call`; None is for the GPU.

    `jax.jit` does not cache by the context. So use a jitted function in this context or outside of it, not in both.
    """
    token = _interpreter.set((interpret, twins))
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpret() -> Any:
    """Returns the argument `interpret` of `pallas_call` for a kernel that is traced now."""
    return _interpreter.get(_ON_GPU)[0]


def twin(function: F) -> F:
    """Decorates a function for the GPU, which has a twin for the interpreter."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @functools.wraps(function)
    def choose(*args, **keywords):
        interpret, twins = _interpreter.get(_ON_GPU)
        return (twins[name] if interpret else function)(*args, **keywords)

    return choose  # pyright: ignore[reportReturnType]


@twin
def laid_out(value, layout: Any):
    return plgpu.layout_cast(value, layout)
