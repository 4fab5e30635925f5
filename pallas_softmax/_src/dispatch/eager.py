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


def at_once(function: Callable, arrays: tuple, options: tuple) -> Any:
    """Returns function(*arrays, *options) of one program, inside and outside of transformations.

    Args:
      function: the function to call. Its errors are the same either way.
      arrays: arrays, scalars, None, or named tuples of them.
      options: the other arguments. Each combination of them has its own program.
    """
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
    numbers = isinstance(x, jax.Array | np.ndarray | np.generic | int | float) and not is_foreign(x)
    return x is None or (numbers and not is_jet(x))


def is_foreign(x) -> bool:
    """Returns whether `x` has a NumPy dtype that JAX does not support: objects, strings, times, long doubles."""
    return isinstance(x, np.ndarray | np.generic) and x.dtype.char in "OSUMmgG"


def is_jet(x) -> bool:
    """Returns whether `jax.experimental.jet` traces `x`."""
    return isinstance(x, Tracer) and type(x).__name__ == "JetTracer"


def _hashable(options: tuple) -> bool:
    """Returns whether the options can be the key of a compilation. If not, the function itself raises."""
    try:
        hash(options)
    except TypeError:
        return False
    return not any(isinstance(option, Tracer) for option in options)


def _run(function, options, types, capability, arrays):
    """Calls the function. `types` and `capability` only distinguish programs: for 1 and True, and for another GPU."""
    return function(*arrays, *options)


_program = jax.jit(_run, static_argnums=(0, 1, 2, 3))
