"""sample and filter_logits: their contracts, their parameters as one number per row, and their derivatives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from pallas_softmax._src import arguments, normalizers
from pallas_softmax._src.arguments import FILTERS, AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName, choose
from pallas_softmax._src.dispatch.derivatives import choose_all, evaluate
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.linear_map import without_gradient
from pallas_softmax._src.dispatch.mesh import as_rows
from pallas_softmax._src.dispatch.operation import Call, describe
from pallas_softmax._src.masks import differentiable_if_finite, positions
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.operation import CUTOFF, SAMPLE
from pallas_softmax._src.sample.rows import Cutoff, as_float
from pallas_softmax._src.sample.xla import draw, filtered
from pallas_softmax._src.stats.operation import TOKEN_STATS

_INT32_MAX = np.iinfo(np.int32).max


class Sample(NamedTuple):
    """A draw from each row, as three arrays of the shape of the logits without the axis of the row.

    Attributes:
      indices: int32, the positions drawn; -1 where there was nothing to draw from.
      log_probs: log softmax(logits / temperature) at the drawn positions, over the whole row.
      log_mass: the log of the share of the row's mass that the filters kept. The probability of the draw was
        exp(log_probs - log_mass), which is never above 1.
    """

    indices: jax.Array
    log_probs: jax.Array
    log_mass: jax.Array


@at_once("axis", "mode", "axis_name", "implementation", known=arguments.known_numbers)
def sample(
    key: jax.Array | np.ndarray,
    logits: "ArrayLike",
    *,
    axis: int = -1,
    temperature: "ArrayLike" = 1.0,
    top_k: "ArrayLike | None" = None,
    top_p: "ArrayLike | None" = None,
    min_p: "ArrayLike | None" = None,
    where: "ArrayLike | None" = None,
    mode: str | None = None,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> Sample:
    """Draws once from each row of softmax(logits / temperature), restricted by the filters top_k, top_p and min_p.

    It replaces filters and `jax.random.categorical` in a decoder, and draws the same tokens as
    `jax.random.categorical(key, filter_logits(logits, ...), axis, mode=mode)`, unless the two best sums of logit and
    noise differ by a few units in the last place. `top_p` is also called nucleus sampling.

    A row is ordered like `jax.lax.top_k`: descending, equal logits by the lowest index. The filters apply in this
    order, as in Hugging Face's transformers:

      1. `top_k` keeps the first entries.
      2. `top_p` normalizes the rest again. It keeps an entry if its predecessors have less than `top_p` of the mass, so
         it keeps at least one.
      3. `min_p` keeps entries with at least `min_p` times the largest probability.

    Each filter, like `temperature`, is a scalar or has one number per row, static or traced.

    Args:
      key: one key, typed or raw, as `jax.random` takes it; or an array of typed keys, one per row, so that a draw does
        not depend on the other rows. With one key, the noise of an element is `jax.random.gumbel` at the
        element's place in an array of the shape of the logits; with a key for each row, at its place in the row.
      logits: real array of any shape with at least one dimension, which is not empty along `axis`.
      axis: the axis of a row.
      temperature: 0 or positive. 0 takes the first entry of the row's order.
      top_k: integer, at least -1. None, 0, -1, and the row's length or more filter nothing.
      top_p: from 0 to 1; None or 1 filters nothing, 0 keeps one entry. A value above 1 by at most 1e-6 counts as 1.
      min_p: from 0 to 1; None or 0 filters nothing.
      where: boolean, broadcastable to `logits`. A masked position is never drawn.
      mode: "low", "high" or "highest": the resolution of the noise, as for `jax.random.gumbel`. None is "high" if
        jax_high_dynamic_range_gumbel is set, else "low". Kernels draw in the mode "low", with threefry keys.
      axis_name: as for `fused_topk`. Arguments other than `logits` and `where` are the same on all devices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      Sample(indices, log_probs, log_mass). The last two are float32 (float64 for float64 logits). A row gives -1, NaN
      and NaN if it has an unmasked NaN or +inf, nothing to draw from, or a traced parameter out of range.
      `log_probs` is differentiable in `logits` and `temperature` at the drawn index, in both modes and to any order.
      At temperature 0, and in a row without a draw, its derivative is 0. `log_mass` has no derivative: reverse mode
      raises NotImplementedError if a loss depends on it (use `jax.lax.stop_gradient`), and forward mode gives NaN.

    Raises:
      TypeError: an argument has the wrong dtype or is not an array, `axis` is not an int, or `axis_name` is not a name.
      ValueError: an argument is out of range or does not fit, `mode` is unknown, `axis_name` is not bound, an argument
        other than `logits` and `where` differs along `axis_name`, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.

    Examples:
      >>> x = jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
      >>> drawn = ps.sample(jax.random.key(0), x, top_p=0.5)  # keeps one entry of each row
      >>> drawn.indices, jnp.exp(drawn.log_mass)
      (Array([2, 0], dtype=int32), Array([0.665, 0.665], dtype=float32))
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    x, axis = checked_rows("sample", logits, axis)
    batch = x.shape[:axis] + x.shape[axis + 1 :]
    key = typed_keys("sample", key, batch)
    mode = checked_mode("sample", mode)
    mesh_axes = arguments.bound_mesh_axes("sample", axis_name)
    length = x.shape[axis] * lax.axis_size(mesh_axes)
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    dtype = jax.eval_shape(as_float, x).dtype
    if noise.has_words(key, shape, dtype, mode):
        words = noise.words(key, shape, axis)
        call, arrays = _call(SAMPLE, "sample", x, axis, where, axis_name, given, words)
        (x, mask, t, *filters), words = arrays[:-4], jnp.concatenate(arrays[-4:], -1)
        static = choose_all(call, implementation, stride=noise.stride(key, shape, axis))
        indices, log_probs, log_mass = evaluate(static, x, mask, words, t, *filters)
    else:
        x, mask, t, cut = cut_rows("sample", x, axis, where, axis_name, implementation, **given)
        gumbel = noise.gumbel_array(key, shape, axis, dtype, mode)
        if mesh_axes:
            start = lax.axis_index(mesh_axes) * x.shape[-1]
            gumbel = lax.dynamic_slice_in_dim(gumbel, start, x.shape[-1], -1)
        x, mask, gumbel = arguments.share_sharding(x, mask, gumbel)
        arrays = lax.stop_gradient((x, mask, positions(x, mesh_axes), gumbel, t, cut))
        indices = draw(*arrays, mesh_axes)
        call = describe(TOKEN_STATS, x, (x.ndim - 1,), mask, mesh_axes=mesh_axes, function="sample")
        of_softmax = normalizers.to_float(x, (-1,), mask, mesh_axes)
        stats = evaluate(choose_all(call, "xla", scaled=True), of_softmax, mask, t, indices)
        log_probs = stats.at_label - jnp.log(stats.moments.d)
        log_mass = jnp.maximum(cut.log_mass, lax.stop_gradient(log_probs))  # despite rounding
    log_mass = without_gradient("sample: log_mass", log_mass, x, t)
    return Sample(*(a.reshape(batch) for a in (indices, differentiable_if_finite(log_probs), log_mass)))


@at_once("axis", "axis_name", "implementation", known=arguments.known_numbers)
def filter_logits(
    logits: "ArrayLike",
    *,
    axis: int = -1,
    temperature: "ArrayLike" = 1.0,
    top_k: "ArrayLike | None" = None,
    top_p: "ArrayLike | None" = None,
    min_p: "ArrayLike | None" = None,
    where: "ArrayLike | None" = None,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns logits / temperature, with -inf where an entry is masked or the filters leave it out.

    So its softmax is the distribution that `sample` draws from. The filters are as in `sample`. Another order of the
    filters is a composition, as in `filter_logits(filter_logits(x, min_p=m), top_p=p)`.

    Args:
      logits: real array of any shape with at least one dimension.
      axis: the axis of a row.
      temperature: as for `sample`, and so are `top_k`, `top_p` and `min_p`. At temperature 0 the first entry of the
        row's order gets 0, and the others -inf.
      where: boolean, broadcastable to `logits`. A masked position gets -inf.
      axis_name: as for `fused_topk`, but the result is this device's shard.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      An array of the shape of `logits`, float32 (float64 for float64 logits). A row with an unmasked NaN or +inf, or
      with a traced parameter out of range, is NaN everywhere. It is differentiable in `logits` and `temperature`: the
      kept set counts as fixed. At temperature 0 the derivative is 0.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `sample`.

    Examples:
      >>> ps.filter_logits(jnp.array([0.0, 1.0, 2.0]), top_k=2)
      Array([-inf,   1.,   2.], dtype=float32)
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    x, axis = checked_rows("filter_logits", logits, axis)
    mesh_axes = arguments.bound_mesh_axes("filter_logits", axis_name)
    rows = cut_rows("filter_logits", x, axis, where, axis_name, implementation, **given)
    return jnp.moveaxis(filtered(*rows, mesh_axes=mesh_axes), -1, axis)


def cut_rows(
    function: str, x: jax.Array, axis: int, where, axis_name, implementation: str | None, **given: Any
) -> tuple[jax.Array, jax.Array | None, jax.Array, Cutoff]:
    """Returns the arguments of `xla.filtered`, with the axis of a row last; `given` are the parameters."""
    call, (x, mask, t, *filters) = _call(CUTOFF, function, x, axis, where, axis_name, given)
    arrays = lax.stop_gradient((x, mask, t, *filters))
    return x, mask, t, Cutoff(*as_rows(choose(call, implementation), *arrays))


def checked_rows(function: str, logits: ArrayLike, axis: int) -> tuple[jax.Array, int]:
    """Returns the logits and their axis, from 0 up, after checks."""
    x, axis = arguments.real_rows(function, "logits", logits, axis)
    if x.shape[axis] == 0:
        raise ValueError(f"{function}: logits of shape {x.shape} have nothing to draw along axis {axis}")
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
        x = x.astype(jnp.float16)  # the same numbers; sort keys have integer dtypes, of 8 bits or more
    # A cast to the same dtype gives the gradient the weak type of the logits, like `jax.nn.log_softmax`.
    return x.astype(x.dtype), axis


def _call(
    operation, function: str, x, axis: int, where, axis_name, given: dict[str, Any], words=()
) -> tuple[Call, list]:
    per_row = [*parameters(function, x, axis, **given), *words]
    named = [("key, temperature, top_k, top_p and min_p", a) for a in per_row]
    return arguments.last_axis(operation, function, x, axis, where, axis_name, named)


def parameters(function: str, x: Any, axis: int, **given: Any) -> list:
    """Returns the temperature, top_k, top_p and min_p of each row, with size 1 in place of the row, or None.

    The temperature is NaN where a parameter is out of range. A top_k that filters nothing becomes int32's maximum.
    """
    wide = jax.eval_shape(as_float, x).dtype
    t = arguments.row_temperature(function, given["temperature"], x.shape, axis, wide)
    filters: list[Any] = []
    for name, (accepted, *_) in FILTERS.items():
        number = given[name]
        if number is not None:
            number = arguments.per_row(function, name, number, x.shape, axis)
            number = arguments.to_int32(number, -2) if name == "top_k" else number.astype(wide)  # -2 is out of range
            t = jnp.where(accepted(number), t, jnp.nan)
        filters.append(number)
    k, top_p, min_p = filters
    k = None if k is None else jnp.where(k > 0, k, _INT32_MAX)
    top_p = None if top_p is None else jnp.minimum(top_p, 1)
    return [t, k, top_p, min_p]


def checked_mode(function: str, mode: str | None) -> str:
    """Returns the mode of the noise. A change of JAX's setting makes another program: see `at_once`."""
    if mode is None:
        mode = "high" if jax.config.jax_high_dynamic_range_gumbel else "low"
    if not isinstance(mode, str) or mode not in noise.MODES:
        raise ValueError(f"{function}: mode must be None or one of {noise.MODES}, got {mode!r}")
    return mode


def typed_keys(function: str, key, batch: tuple[int, ...]) -> jax.Array:
    key = arguments.array(function, "key", key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim > 1:
            raise TypeError(
                f"{function}: an array of keys must be typed, got {jax.typeof(key)}; convert raw keys by "
                "key = jax.random.wrap_key_data(key)"
            )
        try:
            key = jax.random.wrap_key_data(key)
        except (TypeError, ValueError):
            raise TypeError(f"{function}: key must be a key of jax.random, got {jax.typeof(key)}") from None
    if key.ndim and key.shape != batch:
        raise ValueError(f"{function}: key must be one key or have the batch shape {batch}, got {key.shape}")
    return key
