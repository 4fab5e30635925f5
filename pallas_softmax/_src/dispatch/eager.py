"""Each public function is one program, also outside of `jax.jit`, where JAX would dispatch each operation.

The program is cached by the function, its static arguments, and the shapes and dtypes of its arrays. So a second eager
call, gradient or vmap compiles nothing, and equal calls inside a larger program share one lowering.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.choose import recording
from pallas_softmax._src.jax_internals import stage_constants
from pallas_softmax._src.misfits import misfit


def at_once(function: Callable, arrays: tuple, options: tuple) -> Any:
    """Returns function(*arrays, *options) of one program, inside and outside of transformations.

    Args:
      function: the function to call. Its errors are the same either way.
      arrays: arrays, scalars, None, or named tuples of them.
      options: the other arguments. Each combination of them has its own program.
    """
    options = _plain(options)
    if not all(map(_accepted, _leaves(arrays))) or not _hashable(options) or recording():
        return function(*arrays, *options)
    # 1, 1.0 and True are equal, but as k only the first is accepted
    types = tuple(map(type, jax.tree.leaves(options)))
    with stage_constants():
        return _program(function, options, types, target.capability(), arrays)


def _leaves(arrays: tuple) -> list:
    """Returns the arrays, with named tuples taken apart. A list stays whole: the function refuses it."""
    return [leaf for a in arrays for leaf in (a if hasattr(a, "_fields") else (a,))]


def _accepted(x) -> bool:
    """Returns whether x is None, or numbers that `jax.jit` takes. If not, the function itself raises."""
    numbers = isinstance(x, jax.Array | np.ndarray | np.generic | int | float) and misfit(x) is None
    return x is None or (numbers and not is_jet(x))


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


def is_jet(x) -> bool:
    """Returns whether `jax.experimental.jet` traces `x`."""
    return isinstance(x, Tracer) and type(x).__name__ == "JetTracer"


def _hashable(options: tuple) -> bool:
    """Returns whether the options can be the key of a compilation. If not, the function itself raises."""
    try:
        hash(options)
    except TypeError:
        return False
    return not any(isinstance(leaf, Tracer | np.generic) for leaf in jax.tree.leaves(options))


def _run(function, options, types, capability, arrays):
    """Calls the function. `types` and `capability` only distinguish programs: for 1 and True, and for another GPU."""
    return function(*arrays, *options)


_program = jax.jit(_run, static_argnums=(0, 1, 2, 3))
