"""Runs each public function as one jitted program, even if the user calls it outside of `jax.jit`.

Without that, JAX would dispatch the operations of an eager call one by one. The program is cached by the function, its
static arguments, and the shapes and dtypes of its arrays. So a second eager call, gradient or vmap compiles nothing.
Equal calls inside a larger program share one lowering.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.choose import is_recording
from pallas_softmax._src.jax_internals import stage_constants
from pallas_softmax._src.misfits import is_jet, misfit

F = TypeVar("F", bound=Callable)


def at_once(*static: str, known: Callable[[str, dict[str, Any]], dict] = lambda *_: {}) -> Callable[[F], F]:
    """Returns a decorator that jits a function.

    Arguments that `jax.jit` would reject go to the function itself, without jit: its own checks raise better errors.

    Args:
      *static: the names of the static arguments. The others are arrays, scalars, None, or named tuples of them.
      known: checks numbers before JAX traces or truncates them. It takes the name of the function, and all arguments by
        name, as the user passed them. It returns those that it replaces.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        arrays = [name for name in parameters if name not in static]

        @functools.wraps(function)
        def call(*args, **kwargs):
            given = defaults | dict(zip(positional, args)) | kwargs
            is_repeated = not kwargs.keys().isdisjoint(positional[: len(args)])
            if is_repeated or len(args) > len(positional) or given.keys() != parameters.keys():
                return function(*args, **kwargs)  # Python raises its TypeError, with the function's name
            given |= known(function.__name__, given)
            options = tuple([_plain(given[name]) for name in static])
            given |= zip(static, options)
            is_accepted = all([_accepted(given[name]) for name in arrays])
            if not is_accepted or not _hashable(options) or is_recording():
                return function(**given)
            # 1, 1.0 and True are equal, so jax.jit would not tell them apart; but as k only 1 is accepted
            types = tuple(map(type, jax.tree.leaves(options)))
            with stage_constants():
                # JAX's own cache ignores this setting, which changes the noise of `sample` and `verify`.
                settings = target.capability(), jax.config.jax_high_dynamic_range_gumbel
                return _program(function, static, types, settings)(**given)

        return call  # pyright: ignore[reportReturnType]

    return decorate


@functools.cache
def _program(function: Callable, static: tuple[str, ...], types: tuple, settings: tuple) -> Callable:
    # `types` and `settings` are only keys of the cache.
    # jax.jit caches by the function that it is given, so each program needs its own partial
    return jax.jit(functools.partial(function), static_argnames=static)


def _accepted(x) -> bool:
    """Returns whether x is None, numbers that `jax.jit` takes, or a named tuple. If not, the function itself raises."""
    if hasattr(x, "_fields"):
        return all(map(_accepted, x))
    numbers = isinstance(x, jax.Array | np.ndarray | np.generic | int | float) and misfit(x) is None
    return x is None or (numbers and not is_jet(x))


def _plain(option) -> Any:
    """Returns an option with Python numbers in place of NumPy numbers, so that both share one compilation.

    JAX also compares the options of different calls by `==`. Between a NumPy number and a tuple, that is no bool.
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
