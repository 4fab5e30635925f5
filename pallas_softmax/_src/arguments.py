"""Checks the arguments that users pass, and brings them into one form.

Every error message names the argument, its value and the accepted values. `function` is the public function and `name`
the argument, for messages. A function "for `at_once`" checks a number as the user passed it, before JAX traces it.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.errors import InconclusiveDimensionOperation

from pallas_softmax._src.dispatch.mesh_types import share_sharding, varies, vary_together
from pallas_softmax._src.dispatch.operation import Call, RowOperation, describe
from pallas_softmax._src.masks import stored
from pallas_softmax._src.misfits import check_static, has_wide_integers, is_jet, is_known, misfit
from pallas_softmax._src.temperatures import is_zero, times_power

Axis = int | Sequence[int] | None
AxisName = str | tuple[str, ...] | None
_INT32 = np.iinfo(np.int32)


class Rows(NamedTuple):
    """Checked logits, and what makes a row of them."""

    x: jax.Array  # sharded like the mask, and varying over the same mesh axes
    axes: tuple[int, ...]  # ascending, not negative
    where: jax.Array | None  # of the rank of `x`
    mesh_axes: tuple[str, ...]


def array(function: str, name: str, x) -> jax.Array:
    return jnp.asarray(check_array(function, name, x))


def real_array(function: str, name: str, x, wanted: str = "a float or integer array") -> jax.Array:
    x = array(function, name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{function}: {name} must be {wanted}, got {x.dtype.name}")
    return x


def integers(function: str, name: str, x, shape: tuple[int, ...], of_shape: str = "the shape") -> jax.Array:
    """Returns `x`, checked, in int32. Integers below -1 become -1, and those above the int32 maximum this maximum.

    `of_shape` says in words what the shape is.
    """
    x = array(function, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{function}: {name} must be integers, got {x.dtype.name}")
    if x.shape != shape:
        raise ValueError(f"{function}: {name} must have {of_shape} {shape}, got {x.shape}")
    return to_int32(x, -1)


def to_int32(x: Any, least: int) -> Any:
    """Returns integers of NumPy or JAX in int32. Below `least` they become `least`, above the maximum the maximum."""
    x = x if x.dtype.itemsize >= 4 else x.astype(np.int32)  # int8 cannot hold the bounds
    return x.clip(least if np.iinfo(x.dtype).min else 0, _INT32.max).astype(np.int32)


def real_rows(function: str, name: str, x, axis) -> tuple[jax.Array, int]:
    """Returns `x` as a JAX array of real numbers, and `axis` as a nonnegative number."""
    x = real_array(function, name, x)
    axis = static_int(function, "axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{function}: axis {axis} is out of bounds for {name} of shape {x.shape}")
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)  # XLA cannot sort narrower integers
    return x, axis % x.ndim


def check_array(function: str, name: str, x, *, any_integer: bool = False) -> Any:
    """Returns `x`, an array or a scalar. With `any_integer`, it may hold integers that JAX would wrap."""
    arrays = jax.Array | np.ndarray | np.generic | int | float | complex
    if not isinstance(x, arrays) and not hasattr(x, "__jax_array__"):
        raise TypeError(f"{function}: {name} must be an array or a scalar, got {x!r} ({type(x).__name__})")
    if (found := misfit(x, any_integer=any_integer)) is not None:
        error, wanted = found
        raise error(f"{function}: {name} must be {wanted}")
    if is_jet(x):
        raise NotImplementedError(
            f"{function}: jax.experimental.jet knows no kernels; nest jax.jvp for higher derivatives, or use jax.nn"
        )
    return x


def known_labels(function: str, name: str, labels) -> Any:
    """Returns the labels for `at_once`. Labels of 64 bits that JAX would wrap become int32, as by `integers`."""
    check_array(function, name, labels, any_integer=not isinstance(labels, int))
    return to_int32(np.asarray(labels), -1) if has_wide_integers(labels) else labels


def real_numbers(function: str, name: str, x) -> Any:
    """Returns `x` for `at_once`; a Python int, and NumPy's integers that JAX would wrap, become floats."""
    check_array(function, name, x, any_integer=True)
    if type(x) is int:
        try:
            return float(x)
        except OverflowError:
            raise ValueError(f"{function}: {name} must be within the range of floats, got {x}") from None
    return x if misfit(x) is None else np.asarray(x).astype(np.float64)


def parameter(function: str, name: str, value) -> Any:
    """Returns numbers for rows, such as a temperature, as `real_numbers`. Objects that JAX converts become arrays."""
    value = real_numbers(function, name, value)
    if jnp.issubdtype(getattr(value, "dtype", float), jax.dtypes.extended):
        raise TypeError(f"{function}: {name} must be of real numbers, got dtype {value.dtype}")
    to_array = None if isinstance(value, jax.Array) else getattr(value, "__jax_array__", None)
    return to_array() if to_array else value


def in_range(
    function: str, name: str, value, accepted: Callable, wanted: str, *, integer: bool = False, per_row: bool = True
) -> Any:
    """Returns one number, or one per row, for `at_once`; raises if a known number is not `accepted`.

    `wanted` says in words which numbers are. Integers above the int32 maximum are clamped to it.
    """
    given = value
    if integer and type(value) is int:  # may exceed int64
        value = max(min(value, _INT32.max), _INT32.min)
    elif integer and has_wide_integers(value):
        check_array(function, name, value, any_integer=True)
    else:
        value = parameter(function, name, value)
    number: Any = np.asarray(jax.device_get(value)) if is_known(value) else value
    is_integer = jnp.issubdtype(number.dtype, jnp.integer)
    if not is_integer and (integer or not jnp.issubdtype(number.dtype, jnp.floating)):
        kind = ("an integer" if integer else "a real number") + ", or one per row" * per_row
        raise TypeError(f"{function}: {name} must be {kind}, got {number.dtype.name}")
    if not is_known(value):
        return value
    # in float16, 1e-37 would be 0
    if not np.all(accepted(number if integer else number.astype(np.float64))):
        raise ValueError(f"{function}: {name} must be {wanted}, got {given}")
    stays = not integer or (isinstance(value, jax.Array) and not has_wide_integers(value))  # on the device
    return value if stays else to_int32(number, _INT32.min)


def known_temperature(function: str, temperature, logits) -> Any:
    """Returns the temperature for `at_once`, checked if it is known; None if it is known to be 1."""
    temperature = in_range(function, "temperature", temperature, lambda t: t >= 0, "at least 0")
    if not is_known(temperature):
        return temperature
    known = np.asarray(jax.device_get(temperature))
    if known.ndim == 0 and known == 1:
        return None
    # A positive temperature is neither 0 nor infinite, whatever its dtype becomes.
    is_wide = jax.config.jax_enable_x64 and getattr(getattr(logits, "dtype", None), "itemsize", 8) == 8
    limits = np.finfo(np.float64 if is_wide else np.float32)
    fitted = np.where(known > 0, np.clip(known.astype(np.float64), limits.smallest_subnormal, limits.max), known)
    return fitted if np.any(fitted != known) else temperature


_LARGEST_TOP_P = 1 + 1e-6  # sums of float32 probabilities may exceed 1 by rounding
# For each filter of `sample`: which numbers are accepted, the same in words, and which filter nothing in any row.
FILTERS: dict[str, tuple[Callable, str, Callable]] = {
    "top_k": (lambda k: k >= -1, "at least 1, or 0 or -1 for no filter", lambda k: k <= 0),
    "top_p": (lambda p: (p >= 0) & (p <= _LARGEST_TOP_P), "from 0 to 1", lambda p: p >= 1),
    "min_p": (lambda p: (p >= 0) & (p <= 1), "from 0 to 1", lambda p: p == 0),
}

# For further numbers, how `known_numbers` checks them: (function, name, value) -> the checked value
_NUMBERS: dict[str, Callable] = {
    "key": check_array,
    **dict.fromkeys(("a", "b"), real_numbers),
    "bias": parameter,
    **dict.fromkeys(("labels", "draft_tokens"), known_labels),
    "lengths": functools.partial(in_range, accepted=lambda n: True, wanted="an integer", integer=True),
    **{
        name: functools.partial(in_range, accepted=accepted, wanted=wanted, integer=name == "top_k")
        for name, (accepted, wanted, _) in FILTERS.items()
    },
}


def known_numbers(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers among the arguments of a function of logits, checked for `at_once`.

    A filter that is known to filter nothing becomes None.
    """
    found = {}
    if "temperature" in given:
        found["temperature"] = known_temperature(function, given["temperature"], given["logits"])
    for name, check in _NUMBERS.items():
        if given.get(name) is not None:
            found[name] = check(function, name, given[name])
    for name, (*_, is_off) in FILTERS.items():
        number = found.get(name)
        if number is not None and is_known(number) and not np.ndim(number) and is_off(jax.device_get(number)):
            found[name] = None
    return found


def row_temperature(function: str, temperature, shape: tuple[int, ...], axis: int, dtype) -> jax.Array:
    """Returns a result of `known_temperature` like `per_row`; NaN where it is negative. `dtype` is the softmax's."""
    t = per_row(function, "temperature", 1.0 if temperature is None else temperature, shape, axis)
    if jnp.finfo(dtype).bits == 64 and jnp.issubdtype(t.dtype, jnp.floating) and t.dtype.itemsize <= 4:
        t = t.astype(jnp.float32)  # On a CPU, a wider subnormal number would be 0.
        t = jnp.where(t < 1, times_power(t, 2.0**64).astype(dtype) * 2.0**-64, t.astype(dtype))
    t = t.astype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)
    t = jnp.where(is_zero(t), 0, jnp.where(jnp.signbit(t), jnp.nan, t))
    return jnp.where(t == jnp.inf, jnp.finfo(t.dtype).max, t)


def mask(function: str, where, shape: tuple[int, ...]) -> jax.Array:
    """Returns `where` as a boolean array that broadcasts to `shape`, with as many dimensions."""
    where = array(function, "where", where)
    if where.dtype != jnp.bool_:
        raise ValueError(f"{function}: where must be None or boolean, got dtype {where.dtype.name}")
    if not broadcasts(where.shape, shape):
        raise ValueError(f"{function}: where of shape {where.shape} does not broadcast to the shape {shape}")
    return where.reshape((1,) * (len(shape) - where.ndim) + where.shape)


def per_row(function: str, name: str, value, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns `value` for logits of this shape and axis: one number for all rows, (1, ..., 1), or batch + (1,)."""
    value = array(function, name, value)
    batch, given = shape[:axis] + shape[axis + 1 :], value.shape
    if value.ndim == len(shape) and value.shape[axis] == 1:
        value = jnp.squeeze(value, axis)
    if not broadcasts(value.shape, batch):
        raise ValueError(f"{function}: {name} must be a scalar or broadcast to the batch shape {batch}, got {given}")
    value = value.reshape(()) if value.size == 1 else jnp.broadcast_to(value, batch)
    return value.reshape(*(batch if value.ndim else (1,) * len(batch)), 1)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(n in (1, full) for n, full in zip(shape[::-1], to[::-1]))


def rows(function: str, name: str, x, axis: Axis, where, axis_name: AxisName, *, boolean: bool = False) -> Rows:
    x = array(function, name, x)
    if not jnp.issubdtype(x.dtype, jnp.number) and not (boolean and x.dtype == jnp.bool_):
        raise TypeError(f"{function}: {name} must be a float, integer or complex array, got {x.dtype.name}")
    if where is not None:
        where = array(function, "where", where)
        x = broadcast(function, name, x, "where", where)  # `where` may add dimensions in front
        where = mask(function, where, x.shape)
    axes = normalized_axes(function, axis, x.ndim)
    mesh_axes = bound_mesh_axes(function, axis_name)
    if mesh_axes and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{function}: {name} must be real where axis_name is given, got {x.dtype.name}")
    x, where = vary_together(*share_sharding(x, where), over=mesh_axes)
    return Rows(x, tuple(sorted(axes)), where, mesh_axes)


def last_axis(
    operation: RowOperation, function: str, x: jax.Array, axis: int, where, axis_name, per_row, k=None
) -> tuple[Call, list]:
    """Returns a call of an operation on rows along one axis, and its arrays with this axis last.

    `x` and `axis` are as `real_rows` returns them. `per_row` has (name for messages, array or None) of each further
    array. All arrays get one sharding, and vary over the same mesh axes. Only x and the mask vary over the mesh axes
    that a row is spread over.
    """
    mesh_axes = bound_mesh_axes(function, axis_name)
    where = None if where is None else mask(function, where, x.shape)
    x, where = stored((x, where))  # plain forms compare several readings of an element
    where = None if where is None else jnp.moveaxis(where, axis, -1)
    check_replicated(function, axis_name, per_row)
    call = describe(operation, x, (axis,), where, mesh_axes, k, function=function)
    arrays = share_sharding(jnp.moveaxis(x, axis, -1), where, *(a for _, a in per_row))
    arrays = vary_together(*arrays, but=mesh_axes)
    return call, [*vary_together(*arrays[:2], over=mesh_axes), *arrays[2:]]


def check_replicated(function: str, axis_name: AxisName, arrays: Iterable[tuple[str, Any]]) -> None:
    """Raises if an array, given as (name for messages, array or None), may differ along a bound `axis_name`."""
    mesh_axes = check_axis_name(function, axis_name)
    for name, a in arrays:
        if a is not None and varies(a, mesh_axes):
            raise ValueError(f"{function}: {name} must be the same on all devices of axis_name={axis_name!r}")


def broadcast(function: str, name: str, x: jax.Array, other_name: str, other: jax.Array) -> jax.Array:
    try:
        return jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, other.shape))
    except ValueError:
        raise ValueError(
            f"{function}: {other_name} of shape {other.shape} and {name} of shape {x.shape} do not broadcast"
        ) from None


def normalized_axes(function: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Returns the reduced axes, as nonnegative numbers; raises numpy's AxisError if one is out of range."""
    check_static(function, "axis", "None, an int or a sequence of ints", axis)
    try:
        return np.lib.array_utils.normalize_axis_tuple(range(ndim) if axis is None else axis, ndim, function)
    except np.exceptions.AxisError:
        raise
    except ValueError:
        raise ValueError(f"{function}: axis must name each axis once, got {axis!r}") from None
    except TypeError:
        raise TypeError(f"{function}: axis must be None, an int or a sequence of ints, got {axis!r}") from None
    except OverflowError:
        raise ValueError(f"{function}: axis {axis} is out of bounds for {ndim} dimensions") from None


def check_axis_name(function: str, axis_name: AxisName) -> tuple[str, ...]:
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{function}: axis_name must be None, a str or a tuple of str, got {axis_name!r}")
    return names


def bound_mesh_axes(function: str, axis_name: AxisName) -> tuple[str, ...]:
    """Returns the mesh axes that `axis_name` names. A `jax.shard_map` around the call must bind each of them."""
    names = check_axis_name(function, axis_name)
    if len(set(names)) < len(names):
        raise ValueError(f"{function}: axis_name must name each mesh axis once, got {axis_name!r}")
    if not set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(
            f"{function}: axis_name must name mesh axes of the jax.shard_map around the call, got {axis_name!r}"
        )
    return names


def static_int(function: str, name: str, value) -> int:
    check_static(function, name, "a static Python int", value)
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}") from None


def winners(function: str, k, length) -> int:
    """Returns `k`, from 0 to the row's length: an int, or a symbolic dimension of `jax.export`."""
    number: Any = k if export.is_symbolic_dim(k) else static_int(function, "k", k)
    wanted = f"{function}: k must be from 0 to the row's length {length}, got {k}"
    try:
        if 0 <= number <= length:
            return number
    except InconclusiveDimensionOperation as error:
        raise ValueError(
            f"{wanted}, which is not known to be; say so in the constraints of jax.export.symbolic_shape"
        ) from error
    raise ValueError(wanted)


def static_bool(function: str, name: str, value) -> bool:
    check_static(function, name, "a static Python bool", value)
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")
    return bool(value)
