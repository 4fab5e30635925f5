"""Calls outside of `jax.jit`: the whole call becomes one compiled program, where JAX would dispatch each operation."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from pallas_softmax._src.dispatch.choose import recording
from pallas_softmax._src.misfits import misfit


def at_once(function: Callable, arrays: tuple, options: tuple) -> Any:
    """Returns function(*arrays, *options), compiled as one program if no array is traced.

    Args:
      function: the function to call. Its errors are the same either way.
      arrays: arrays, scalars, None, or named tuples of them.
      options: the other arguments. Each combination of them has its own compilation.
    """
    options = _plain(options)
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
        and misfit(x) is None
    )


def _plain(option) -> Any:
    """Returns an option with Python numbers in place of NumPy's: one compilation for both.

    JAX also compares options of different calls, and a NumPy number has no boolean `==` with a tuple.
    """
    if isinstance(option, np.generic):
        return option.item()
    if isinstance(option, tuple):
        parts = map(_plain, option)
        return option._make(parts) if hasattr(option, "_make") else tuple(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return option


def _hashable(options: tuple) -> bool:
    """Returns whether the options can be the key of a compilation. If not, the function itself raises."""
    try:
        hash(options)
    except TypeError:
        return False
    return not any(isinstance(leaf, Tracer | np.generic) for leaf in jax.tree.leaves(options))


def _run(function, options, types, arrays):
    """Calls the function. `types` distinguishes compilations for options that are equal, such as 1 and True."""
    return function(*arrays, *options)


_compiled = jax.jit(_run, static_argnums=(0, 1, 2))
