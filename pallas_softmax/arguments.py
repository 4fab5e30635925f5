"""Checks of the users' arguments; every message names the argument, its value and what is accepted."""

import math
import numbers
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_softmax.dispatch import Call, symbolic, vary_together
from pallas_softmax.partition import lay_together

Axis = int | Sequence[int] | None
AxisName = str | tuple[str, ...] | None


def array(function: str, name: str, x) -> jax.Array:
    """`x` as a JAX array; lists are refused, as jax.nn and jax.numpy refuse them."""
    arrays = jax.Array | np.ndarray | np.generic | numbers.Number
    if not isinstance(x, arrays) and not hasattr(x, "__jax_array__"):
        raise TypeError(f"{function}: {name} must be an array or a scalar, got {x!r} ({type(x).__name__})")
    return jnp.asarray(x)


def mask(function: str, where, shape: tuple[int, ...]) -> jax.Array:
    """`where` as a boolean array that broadcasts to `shape`, with as many dimensions."""
    where = array(function, "where", where)
    if where.dtype != jnp.bool_:
        raise ValueError(f"{function}: where must be None or boolean, got dtype {where.dtype.name}")
    try:
        fits = jnp.broadcast_shapes(where.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{function}: where of shape {where.shape} does not broadcast to the shape {shape}")
    return where.reshape((1,) * (len(shape) - where.ndim) + where.shape)


def rows(
    function: str, name: str, x, axis: Axis, where, axis_name: AxisName, *, boolean: bool = False
) -> tuple:
    """`x` as an array, `where` broadcast against it, the reduced axes in order, and the mesh axes."""
    x = array(function, name, x)
    if x.dtype == jnp.bool_ and not boolean:
        raise TypeError(f"{function}: {name} must be a float, integer or complex array, got bool")
    axes = np.lib.array_utils.normalize_axis_tuple(range(x.ndim) if axis is None else axis, x.ndim, "axis")
    if where is not None:
        where = array(function, "where", where)
        axes = tuple(a - x.ndim for a in axes)  # from the end: `where` may add dimensions in front
        x = jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, where.shape))
        axes = tuple(a + x.ndim for a in axes)
        where = mask(function, where, x.shape)
    names = mesh_axes(function, axis_name)
    if names and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{function}: {name} must be real where axis_name is given, got {x.dtype.name}")
    x, where = vary_together(*lay_together(x, where), over=names)
    return x, where, tuple(sorted(axes)), names


def mesh_axes(function: str, axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes as a tuple, all of them bound by shard_map."""
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{function}: axis_name must be None, a str or a tuple of str, got {axis_name!r}")
    if not set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(
            f"{function}: axis_name must name mesh axes of the jax.shard_map around the call, got {axis_name!r}"
        )
    return names


def call(
    op: str, x: jax.Array, axes: tuple[int, ...], where, k: int | None = None, names: tuple[str, ...] = ()
) -> Call:
    """The call of `op` on the rows of `x`, for `dispatch.choose`."""
    vocab = math.prod(x.shape[a] for a in axes)
    return Call(
        op=op,
        dtype=x.dtype.name,
        rows=math.prod(d for a, d in enumerate(x.shape) if a not in axes),
        vocab=vocab,
        trailing=axes == tuple(range(x.ndim - len(axes), x.ndim)),
        masked=where is not None,
        k=k if k is None else min(k, vocab),
        objection=symbolic(x.shape),
        names=names,
    )


def static_int(function: str, name: str, value) -> int:
    """`value` as an int that is known while tracing."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{function}: {name} must be a static Python int, got a traced value; pass it through "
            f"static_argnames={name!r} of jax.jit, or close over it"
        )
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}") from None
