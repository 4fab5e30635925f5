"""Pallas's interpreter: tests run kernels in it on the CPU.

The interpreter has no inline PTX, no layouts and no clusters. A twin in plain JAX runs in place of each function that
needs them; tests/support/twins.py has the twins.
"""

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import jax.experimental.pallas.mosaic_gpu as plgpu

F = TypeVar("F", bound=Callable[..., Any])

# The argument `interpret` of `pallas_call`, and the twins by file and name of the function: "blocks.load_as". Tests set
# it. `jax.jit` does not cache by it, so a jitted function must take `interpret()` as a static argument, or run either
# always with it or always without.
INTERPRETER: ContextVar[tuple[Any, Mapping[str, Callable[..., Any]]]] = ContextVar("interpreter")
_ON_GPU = None, {}


def interpret() -> Any:
    """Returns the argument `interpret` of `pallas_call` for a kernel that is traced now."""
    return INTERPRETER.get(_ON_GPU)[0]


def twin(function: F) -> F:
    """Decorates a function for the GPU, which has a twin for the interpreter."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @functools.wraps(function)
    def choose(*args, **keywords):
        interpret, twins = INTERPRETER.get(_ON_GPU)
        return (twins[name] if interpret else function)(*args, **keywords)

    return choose  # pyright: ignore[reportReturnType]


@twin
def laid_out(value, layout: Any):
    return plgpu.layout_cast(value, layout)
