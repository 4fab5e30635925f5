"""How an operation of ours is evaluated where JAX evaluates operations one by one."""

from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable, *static: str) -> Callable:
    """Returns the function as a compiled program, which it is under `jax.disable_jit`, too.

    There the function, which binds an operation, would otherwise be called again to evaluate that operation, forever.

    Args:
      function: binds an operation that has no other evaluation than its lowering.
      *static: the names of its static arguments.
    """
    program = jax.jit(function, static_argnames=static)

    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return program(*args, **kwargs)

    return call
