"""sample: what it promises, and how its parameters become one number for each row."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from pallas_softmax import arguments, execution
from pallas_softmax.arguments import AxisName
from pallas_softmax.call import Choice, describe, distance
from pallas_softmax.choice import ImplementationName, choose
from pallas_softmax.eager import at_once
from pallas_softmax.sharding.specs import lay_together
from pallas_softmax.varying import varies, vary_together

_INT32_MAX = np.iinfo(np.int32).max


class Sample(NamedTuple):
    """A draw from each row, as three arrays of the shape of the logits without the axis of the row.

    Attributes:
      indices: int32, the positions drawn; -1 where there was nothing to draw from.
      log_probs: log softmax(logits / temperature) at these, over the whole row.
      log_mass: the log of the share of the row's mass that the filters kept: a draw had the probability
        exp(log_probs - log_mass).
    """

    indices: jax.Array
    log_probs: jax.Array
    log_mass: jax.Array


export.register_namedtuple_serialization(Sample, serialized_name="pallas_softmax.Sample")


def sample(
    key: jax.Array | np.ndarray,
    logits: ArrayLike,
    *,
    axis: int = -1,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    where: ArrayLike | None = None,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> Sample:
    """Draws once from each row of softmax(logits / temperature), restricted by the filters top_k, top_p and min_p.

    The order of a row is that of `jax.lax.top_k`: descending, equal logits by the lowest index. The filters apply one
    after the other: `top_k` keeps the first entries; `top_p`, of what is left, normalised again, keeps each entry whose
    predecessors have less than `top_p` of the mass, and so at least one; `min_p` keeps entries of at least `min_p`
    times the largest probability. Each is a scalar or has one number for each row, as `temperature`, static or traced.
    The filters and their order are those of Hugging Face's transformers; the draw is by inversion of the kept masses.

    Args:
      key: one key, typed or raw, as `jax.random` takes it; or an array of typed keys, one for each row, so that a draw
        does not depend on the other rows. A row draws u = `jax.random.uniform` of its key, in float32 (one key for all:
        of the shape of the batch), and takes the first kept entry, in the order of the row's indices, whose cumulative
        kept mass exceeds u times the kept mass.
      logits: real array of any shape with at least one dimension, which is not empty along `axis`.
      axis: the axis of a row.
      temperature: 0 or positive. 0 takes the first entry of the row's order. One whose reciprocal is no normal number
        is replaced by the nearest that has one.
      top_k: integer, at least 1; None, or one that is at least the row's length, filters nothing.
      top_p: from 0 to 1; None or 1 filters nothing, 0 keeps one entry.
      min_p: from 0 to 1; None or 0 filters nothing.
      where: boolean, broadcastable to `logits`. A masked position is never drawn.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over: each device passes its equal
        shard of `logits` and `where`, and the same of all else; the result, of the whole row, is the same on all.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      Sample(indices, log_probs, log_mass), in float32 (float64 for float64 logits) but for the indices. A row with an
      unmasked NaN or +inf, with nothing to draw from, or with a traced parameter out of range gives -1, NaN and NaN.
      There are no derivatives: differentiate `log_softmax` at the index.

    Raises:
      TypeError: an argument has the wrong dtype or is no array, `axis` is not an int, or `axis_name` is no name.
      ValueError: an argument is out of range or does not fit, `axis_name` is not bound, an argument other than `logits`
        and `where` differs along it, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    name = "sample"
    arguments.check_array(name, "key", key)
    temperature = _concrete("temperature", temperature, lambda t: t >= 0, "0 or positive")
    temperature = arguments.normal_temperature(temperature, logits)
    top_p, min_p = (
        _concrete(of, value, lambda p: (p >= 0) & (p <= 1), "from 0 to 1")
        for of, value in (("top_p", top_p), ("min_p", min_p))
    )
    top_k = _concrete("top_k", top_k, lambda k: k >= 1, "at least 1", integer=True)
    arrays = (key, logits, where, temperature, top_k, top_p, min_p)
    return at_once(_sample_of, arrays, (axis, axis_name, implementation))


def _concrete(name: str, value: Any, accepted: Callable, wanted: str, *, integer: bool = False) -> Any:
    """Returns a parameter, or raises if its numbers, where they are known and not only traced, are not accepted.

    Integers above those of int32 become the largest of these, which no row is longer than.

    Args:
      name: that of the parameter.
      value: the parameter; None is no filter.
      accepted: whether each of its numbers is in range.
      wanted: the range, in words.
      integer: whether the numbers must be integers.
    """
    if value is None and name != "temperature":
        return None
    if integer and type(value) is int:  # of any length
        value = min(value, _INT32_MAX)
    else:
        value = arguments.parameter("sample", name, value)
    number = np.asarray(value) if arguments.is_known(value) else value
    if not jnp.issubdtype(number.dtype, jnp.integer) and (
        integer or not jnp.issubdtype(number.dtype, jnp.floating)
    ):
        kind = "an integer" if integer else "a real number"
        raise TypeError(f"sample: {name} must be {kind}, or one for each row, got {number.dtype.name}")
    if not arguments.is_known(value):
        return value
    if not np.all(accepted(number)):
        raise ValueError(f"sample: {name} must be {wanted}, got {value}")
    return np.minimum(number, np.int64(_INT32_MAX)).astype(np.int32) if integer else value


def _sample_of(
    key, logits, where, temperature, top_k, top_p, min_p, axis, axis_name, implementation
) -> Sample:
    name = "sample"
    x, axis = arguments.real_rows(name, "logits", logits, axis)
    if x.shape[axis] == 0:
        raise ValueError(f"{name}: logits of shape {x.shape} have nothing to draw along axis {axis}")
    mesh_axes = arguments.bound_mesh_axes(name, axis_name)
    mask = None if where is None else jnp.moveaxis(arguments.mask(name, where, x.shape), axis, -1)
    x = lax.stop_gradient(x)
    batch, inner = x.shape[:axis] + x.shape[axis + 1 :], distance(x.shape, (axis,))
    u = _uniform(key, batch)[..., None]

    parameters = _parameters(x, axis, temperature, top_k, top_p, min_p)
    x, mask, *parameters = lay_together(jnp.moveaxis(x, axis, -1), mask, u, *parameters)
    if any(varies(a, mesh_axes) for a in parameters if a is not None):
        raise ValueError(
            f"{name}: key, temperature, top_k, top_p and min_p must be the same on all devices of "
            f"axis_name={axis_name!r}"
        )
    x, mask, *parameters = vary_together(x, mask, *parameters, but=mesh_axes)
    x, mask = vary_together(x, mask, over=mesh_axes)
    call = describe("sample", x, (x.ndim - 1,), mask, mesh_axes=mesh_axes, function=name)
    call = dataclasses.replace(call, inner=inner)
    results = _sample(choose(call, implementation), x, mask, *parameters)
    return Sample(*(a.reshape(batch) for a in results))


def _parameters(x: jax.Array, axis: int, temperature, top_k, top_p, min_p) -> list:
    """Returns the temperature, top_k, top_p and min_p of each row, with size 1 in place of the row, or None.

    The temperature is NaN where one of them is out of range, which gives a row without a draw; and beyond tiny and
    1 / tiny, where its reciprocal is no normal number, it is one of these.
    """
    floating = jax.eval_shape(jnp.exp, x).dtype
    wide = floating if jnp.finfo(floating).bits >= 32 else jnp.dtype(jnp.float32)

    def per_row(name: str, value) -> Any:
        if value is None:
            return None
        value = lax.stop_gradient(arguments.per_row("sample", name, value, x.shape, axis))
        return value if name == "top_k" else value.astype(wide)

    t, k = per_row("temperature", temperature), per_row("top_k", top_k)
    shares = per_row("top_p", top_p), per_row("min_p", min_p)
    good = t >= 0
    if k is not None:
        k = (jnp.minimum(k, _INT32_MAX) if jnp.iinfo(k.dtype).max > _INT32_MAX else k).astype(jnp.int32)
        good &= k >= 1
    for share in shares:
        good = good if share is None else good & (share >= 0) & (share <= 1)
    tiny = jnp.finfo(wide).tiny
    t = jnp.where(good, jnp.where(t == 0, 0, jnp.clip(t, tiny, 1 / tiny)), jnp.nan)
    return [t, k, *shares]


def _run(choice: Choice, *arrays: Any) -> Any:
    """Runs the operation. It is jitted, so that equal calls are traced once."""
    return execution.run(choice, *arrays)


_run.__name__ = "sample"  # in profiles
_sample = jax.jit(_run, static_argnums=0)


def _uniform(key, batch: tuple[int, ...]) -> jax.Array:
    """Returns a float32 in [0, 1) for each row, from one key for all of them, or from one key each."""
    key = arguments.array("sample", "key", key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim > 1:
            raise TypeError(
                f"sample: an array of keys must be typed, as of jax.random.key, got {jax.typeof(key)}"
            )
        try:
            key = jax.random.wrap_key_data(key)
        except (TypeError, ValueError):
            raise TypeError(f"sample: key must be a key of jax.random, got {jax.typeof(key)}") from None
    if key.ndim == 0:
        return jax.random.uniform(key, batch, jnp.float32)
    if key.shape != batch:
        raise ValueError(f"sample: key must be one key or have the batch shape {batch}, got {key.shape}")

    def draw(key):
        return jax.random.uniform(key, (), jnp.float32)

    # a vmap of other generators than threefry draws all numbers from the first key
    if str(jax.random.key_impl(key)) != "threefry2x32":
        return lax.map(draw, key.reshape(-1)).reshape(batch)
    return functools.reduce(lambda each, _: jax.vmap(each), batch, draw)(key)
