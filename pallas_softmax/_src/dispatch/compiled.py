"""Evaluation of a primitive of this package where JAX evaluates operations one by one."""

from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable, *static: str) -> Callable:
    """Returns the function as a program that is compiled even under `jax.disable_jit`.

    The function binds an operation. Without a compilation, JAX would call the function again to evaluate that
    operation, without end.

    Args:
      function: binds an operation that can only be lowered.
      *static: the names of its static arguments.
    """
    program = jax.jit(function, static_argnames=static)

    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return program(*args, **kwargs)

    return call
