"""Calls outside of `jax.jit`: the whole call becomes one compiled program, where JAX would dispatch each operation."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from pallas_softmax._src.dispatch.choose import recording


def at_once(function: Callable, arrays: tuple, options: tuple) -> Any:
    """Returns function(*arrays, *options), compiled as one program if no array is traced.

    Args:
      function: the function to call. Its errors are the same either way.
      arrays: arrays, scalars, None, or named tuples of them.
      options: the other arguments. Each combination of them has its own compilation.
    """
    if all(map(_concrete, _leaves(arrays))) and _hashable(options) and not recording():
        # 1, 1.0 and True are equal, but as k only the first is accepted
        return _compiled(function, options, tuple(map(type, jax.tree.leaves(options))), arrays)
    return function(*arrays, *options)


def _leaves(arrays: tuple) -> list:
    """Returns the arrays, with named tuples taken apart. A list stays whole: the function refuses it."""
    return [leaf for a in arrays for leaf in (a if hasattr(a, "_fields") else (a,))]


def _concrete(x) -> bool:
    """Returns whether x is None, or known numbers that no transformation traces."""
    return x is None or (
        isinstance(x, jax.Array | np.ndarray | np.generic | int | float)
        and not isinstance(x, Tracer)
        and not is_foreign(x)
    )


def is_foreign(x) -> bool:
    """Returns whether `x` has a NumPy dtype that JAX does not support: objects, strings, times, long doubles."""
    return isinstance(x, np.ndarray | np.generic) and x.dtype.char in "OSUMmgG"


def _hashable(options: tuple) -> bool:
    """Returns whether the options can be the key of a compilation. If not, the function itself raises."""
    try:
        hash(options)
    except TypeError:
        return False
    return not any(isinstance(option, Tracer) for option in options)


def _run(function, options, types, arrays):
    """Calls the function. `types` distinguishes compilations for options that are equal, such as 1 and True."""
    return function(*arrays, *options)


_compiled = jax.jit(_run, static_argnums=(0, 1, 2))
