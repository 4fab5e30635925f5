"""fused_topk and top_k: what they promise, and how their gradients are wired."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_softmax._src import arguments
from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName, choose
from pallas_softmax._src.dispatch.derivatives import choose_all, evaluate
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.mesh import as_rows
from pallas_softmax._src.jax_internals import as_weak_as
from pallas_softmax._src.misfits import misfit
from pallas_softmax._src.normalizers import float_dtype
from pallas_softmax._src.topk.operation import SELECT, TOPK
from pallas_softmax._src.topk.xla import TopK


@at_once("k", "axis", "log", "dtype", "axis_name", "implementation", known=arguments.known_numbers)
def fused_topk(
    logits: "ArrayLike",
    k: int | np.integer,
    *,
    axis: int = -1,
    where: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    log: bool = False,
    dtype: "DTypeLike | None" = None,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TopK:
    """Returns the k largest entries of p = softmax(logits / temperature), normalized over the whole row.

    It replaces `jax.lax.top_k` of a softmax, and returns the same indices. Source: Milakov and Gimelshein, arXiv
    1805.02867, algorithm 4.

    Args:
      logits: real array of any shape with at least one dimension.
      k: static int, 0 <= k <= logits.shape[axis]; or a symbolic dimension of `jax.export` known to be in these bounds.
        Under `jax.vmap` all slices have the same k; to map over k raises TypeError.
      axis: the axis of a row; in the result it has size k.
      where: boolean, broadcastable to `logits`. A masked position has probability 0 and is chosen only
        when fewer than k are unmasked.
      temperature: a scalar of at least 0, or one per row: an array that broadcasts to the shape of `logits` without
        `axis`, or with size 1 there. 0 is the limit: the tied largest entries share the probability, all others have 0,
        and the gradients of the row are 0. A traced temperature that is negative gives NaN values.
      log: return log p instead of p.
      dtype: floating dtype of `values`; by default the dtype of `logits` (float32 for integers). Without
        jax_enable_x64, float64 gives float32 values and a warning, as elsewhere in JAX.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over. Each device passes its equal
        shard of `logits` and `where`, in the order of `lax.axis_index`. `k` and the indices count in the whole row. The
        result is the same on all devices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      TopK(values, indices). `indices` (int32) equal the indices of `lax.top_k(logits, k)` exactly: descending by
      +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN, equal values by the lowest index first. Masked winners come last,
      by the lowest index, with value 0 (log: -inf). So a fully masked row has the indices 0 to k - 1. A row with an
      unmasked NaN or +inf has NaN values.
      Differentiable in `logits` and `temperature`, in both modes and to any order.

    Raises:
      TypeError: `logits` or `temperature` is not a real array, `where` is not an array, `k` is traced, mapped by
        `jax.vmap` or not an integer, `axis` is not an int, `log` is not a bool, `dtype` is not floating, or `axis_name`
        is not a name.
      ValueError: `k` or `axis` is out of range; `temperature` is negative, does not fit or differs along
        `axis_name`; `where` is not boolean or does not fit; `axis_name` is not bound; or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.

    Examples:
      >>> ps.fused_topk(jnp.array([0.0, 1.0, 2.0]), 2)
      TopK(values=Array([0.665, 0.245], dtype=float32), indices=Array([2, 1], dtype=int32))
    """
    name = "fused_topk"
    x, axis = arguments.real_rows(name, "logits", logits, axis)
    mesh_axes = arguments.bound_mesh_axes(name, axis_name)
    k = arguments.winners(name, k, x.shape[axis] * lax.axis_size(mesh_axes))
    floating = float_dtype(x.dtype)
    t = arguments.row_temperature(name, temperature, x.shape, axis, floating)
    out_dtype = jnp.dtype(floating if dtype is None else _as_stored(name, dtype))
    # kernels store no floats of 8 bits
    stored = out_dtype if jnp.finfo(out_dtype).bits >= 16 else jnp.dtype(jnp.float32)
    log = arguments.static_bool(name, "log", log)
    x = x.astype(x.dtype)  # so that the gradient has the weak type of the logits, as of `jax.nn.softmax`
    call, (x, mask, t) = arguments.last_axis(TOPK, name, x, axis, where, axis_name, [("temperature", t)], k)
    static = choose_all(call, implementation, k=k, dtype=stored, log=log, scaled=temperature is not None)
    if k == 0:  # no winner depends on anything
        x, t = lax.stop_gradient((x, t))
    (values, indices), _ = evaluate(static, x, mask, t)
    return TopK(jnp.moveaxis(values.astype(out_dtype), -1, axis), jnp.moveaxis(indices, -1, axis))


@at_once("k", "axis", "is_stable", "sorted", "axis_name", "implementation", known=arguments.known_numbers)
def top_k(
    operand: "ArrayLike",
    k: int | np.integer,
    *,
    axis: int = -1,
    is_stable: bool = True,
    where: "ArrayLike | None" = None,
    lengths: "ArrayLike | None" = None,
    sorted: bool = True,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TopK:
    """Returns the k largest entries of each row and their indices, like `jax.lax.top_k`.

    Args:
      operand: array of floats, integers or booleans, of any shape with at least one dimension.
      k: static int, 0 <= k <= operand.shape[axis]; or a symbolic dimension, as for `fused_topk`.
      axis: the axis of a row; in the result it has size k.
      is_stable: accepted as in `jax.lax.top_k`. Among equal entries, the lower index comes first in any case.
      where: boolean, broadcastable to `operand`. A masked position is chosen only when fewer than k are unmasked.
      lengths: integers that broadcast to the shape of `operand` without `axis`: only the first so many entries of a row
        count, as if `where` were False after them. A negative length is 0.
      sorted: whether the winners must be in order. With False, which is faster for a large k, they may be in any order.
      axis_name: as for `fused_topk`. Lengths count in the whole row, like the indices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      TopK(values, indices), in the order +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN, the largest first. `values`
      have the dtype of `operand`; `indices` are int32. Masked winners come last, by the lowest index. Their values are
      -inf, the least number of a dtype without -inf, or False. Values of floats are differentiable in `operand`, in
      both modes and to any order: the cotangents go to the unmasked winners.

    Raises:
      TypeError, NotImplementedError: as `fused_topk`. TypeError also if `lengths` are not integers, or `is_stable` or
        `sorted` is not a bool.
      ValueError: as `fused_topk`, or `operand` is complex, or `lengths` do not fit or differ along `axis_name`.

    Examples:
      >>> ps.top_k(jnp.array([3, 9, 7]), 2)
      TopK(values=Array([9, 7], dtype=int32), indices=Array([1, 2], dtype=int32))
    """
    name = "top_k"
    operand = arguments.array(name, "operand", operand)
    if jnp.iscomplexobj(operand):  # a TypeError elsewhere, a ValueError in jax.lax.top_k
        raise ValueError(f"{name}: operand must be real, got {operand.dtype.name}")
    dtype, is_bool = operand.dtype, operand.dtype == jnp.bool_
    x, axis = arguments.real_rows(name, "operand", operand.astype(jnp.int8) if is_bool else operand, axis)
    mesh_axes = arguments.bound_mesh_axes(name, axis_name)
    k = arguments.winners(name, _as_int(k), x.shape[axis] * lax.axis_size(mesh_axes))
    arguments.static_bool(name, "is_stable", is_stable)
    if lengths is not None:
        lengths = arguments.to_int32(arguments.per_row(name, "lengths", lengths, x.shape, axis), 0)
    call, arrays = arguments.last_axis(SELECT, name, x, axis, where, axis_name, [("lengths", lengths)], k)
    keywords = {"k": k, "sorted": arguments.static_bool(name, "sorted", sorted)}
    call = dataclasses.replace(call, inner=1, sorted=keywords["sorted"], lengths=lengths is not None)
    if jnp.issubdtype(x.dtype, jnp.integer):  # without derivatives
        values, indices = as_rows(choose(call, implementation), *arrays, **keywords)
        values = values > 0 if is_bool else jnp.maximum(values, jnp.iinfo(dtype).min).astype(dtype)
    else:
        values, indices = evaluate(choose_all(call, implementation, **keywords), *arrays)
    return TopK(*(as_weak_as(jnp.moveaxis(a, -1, axis), operand) for a in (values, indices)))


def _as_int(k) -> Any:
    """Returns k, as an int if it is a bool or a float with the value of an integer: `jax.lax.top_k` takes these."""
    is_whole = isinstance(k, bool | np.bool_ | float | np.floating) and float(k).is_integer()
    return int(k) if is_whole else k


def _as_stored(name: str, dtype):
    """Returns the dtype that JAX gives to an array of dtype `dtype`. Warns, like JAX, if 64 bits become 32."""
    try:
        wanted = None if isinstance(dtype, jax.Array) else np.dtype(dtype)
    except (TypeError, ValueError):
        wanted = None
    if wanted is None or not jnp.issubdtype(wanted, jnp.floating) or misfit(np.zeros((), wanted)):
        raise TypeError(f"{name}: dtype must be None or a floating dtype, got {dtype!r}")
    got = jax.dtypes.canonicalize_dtype(wanted)
    if got != wanted and dtype is not float:
        warnings.warn(
            f"{name}: dtype {wanted.name} is not available without jax_enable_x64; the values are {got.name}",
            stacklevel=2,
        )
    return got
