"""softmax, log_softmax and logsumexp: what they promise, and how their gradients are wired."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_softmax._src import arguments, normalizers
from pallas_softmax._src.arguments import Axis, AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName, check_name
from pallas_softmax._src.dispatch.derivatives import choose_all, evaluate
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.operation import RowOperation, describe
from pallas_softmax._src.softmax.operation import LOG_SOFTMAX, LOGSUMEXP, SOFTMAX

# Kept from when this file is imported, in case a program puts our function in its place later. It is typed Any, since
# its own types take return_sign as a literal only.
_jax_logsumexp: Any = jax.nn.logsumexp


@at_once("axis", "axis_name", "implementation")
def softmax(
    x: "ArrayLike",
    axis: Axis = -1,
    where: "ArrayLike | None" = None,
    *,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns exp(x - max(x)) / sum(exp(x - max(x))) over `axis`, like `jax.nn.softmax`.

    It is a drop-in replacement for that function. Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.

    Args:
      x: logits of any shape. float16 and bfloat16 are computed in float32 and returned in their own dtype;
        integers are promoted to float.
      axis: the axis or axes of a row. None means all axes.
      where: boolean, broadcastable to `x`. Masked positions are left out of the row and give 0. If `where` has more
        dimensions than `x`, `x` is broadcast to it first, and `axis` refers to that shape.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over. Each device passes its
        equal shard of `x` and `where`, and gets that shard of the result. Not for complex `x`.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu", "triton" or "xla" names one.

    Returns:
      An array of the shape of `x`. A row with +inf or NaN gives NaN, and so does a row of only -inf. A fully masked
      row gives 0. Differentiable in `x`, in forward and reverse mode and to any order. `jax.experimental.jet` is not
      supported; nest `jax.jvp` instead.

    Raises:
      TypeError: `x` or `where` is not an array, `x` is boolean, or `axis_name` is not a name.
      ValueError: `axis` is out of range or repeated, `where` is not boolean or does not fit, `axis_name` is
        not bound, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.

    Examples:
      >>> x = jnp.array([0.0, 1.0, 2.0])
      >>> ps.softmax(x)
      Array([0.09 , 0.245, 0.665], dtype=float32)
      >>> ps.softmax(x, where=x > 0)
      Array([0.   , 0.269, 0.731], dtype=float32)
    """
    return evaluate(*_of_floats(SOFTMAX, x, axis, where, axis_name, implementation))


@at_once("axis", "axis_name", "implementation")
def log_softmax(
    x: "ArrayLike",
    axis: Axis = -1,
    where: "ArrayLike | None" = None,
    *,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns x - max(x) - log(sum(exp(x - max(x)))) over `axis`, like `jax.nn.log_softmax`.

    It is a drop-in replacement for that function. Source: Milakov and Gimelshein, arXiv 1805.02867, algorithm 3.

    Args:
      x: logits of any shape, with the dtypes of `softmax`.
      axis: the axis or axes of a row. None means all axes.
      where: boolean, as for `softmax`. Masked positions are left out of the row and give -inf.
      axis_name: as for `softmax`.
      implementation: as for `softmax`.

    Returns:
      An array of the shape of `x`. A row with +inf or NaN gives NaN, and so does a row of only -inf. A fully masked
      row gives -inf. Differentiable like `softmax`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `softmax`.

    Examples:
      >>> x = jnp.array([0.0, 1.0, 2.0])
      >>> ps.log_softmax(x)
      Array([-2.408, -1.408, -0.408], dtype=float32)
    """
    return evaluate(*_of_floats(LOG_SOFTMAX, x, axis, where, axis_name, implementation))


@overload
def logsumexp(
    a: ArrayLike, axis: Axis = ..., b: ArrayLike | None = ..., keepdims: bool = ...,
    return_sign: Literal[False] = ..., where: ArrayLike | None = ..., *, axis_name: AxisName = ...,
    implementation: ImplementationName | None = ...,
) -> jax.Array: ...  # fmt: skip
@overload
def logsumexp(
    a: ArrayLike, axis: Axis = ..., b: ArrayLike | None = ..., keepdims: bool = ...,
    *, return_sign: Literal[True], where: ArrayLike | None = ..., axis_name: AxisName = ...,
    implementation: ImplementationName | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def logsumexp(
    a: ArrayLike, axis: Axis = ..., b: ArrayLike | None = ..., keepdims: bool = ...,
    return_sign: bool = ..., where: ArrayLike | None = ..., *, axis_name: AxisName = ...,
    implementation: ImplementationName | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip


@at_once("axis", "keepdims", "return_sign", "axis_name", "implementation", known=arguments.known_numbers)
def logsumexp(
    a: "ArrayLike",
    axis: Axis = None,
    b: "ArrayLike | None" = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: "ArrayLike | None" = None,
    *,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns log(sum(exp(a))) over `axis`, like `jax.nn.logsumexp`.

    It is a drop-in replacement for that function and for `jax.scipy.special.logsumexp`. Source: Milakov and Gimelshein,
    arXiv 1805.02867, algorithm 3, lines 1 to 6.

    Args:
      a: logits of any shape, with the dtypes of `softmax`; booleans count as 0 and 1.
      axis: the axis or axes of a row. None, the default, means all axes.
      b: factors of the exponentials, which broadcast like `where`. A call with `b`, with `return_sign` or with complex
        `a` runs `jax.nn.logsumexp`, in float32 for 16-bit logits. It accepts no `axis_name`, and only "xla" as
        `implementation`.
      keepdims: whether the reduced dimensions stay, with size 1.
      return_sign: whether to return (log(abs(sum)), sign of the sum), so that negative sums have a logarithm.
      where: boolean, as for `softmax`. Masked positions are left out.
      axis_name: as for `softmax`. The result covers the whole row, the same on all its devices.
      implementation: as for `softmax`.

    Returns:
      An array of the shape of `a` without the reduced dimensions. A row that is empty, fully masked or only -inf gives
      -inf. A row with NaN gives NaN; another row with +inf gives +inf. Differentiable like `softmax`. As in JAX, the
      gradient of a row with one +inf is NaN there and 0 elsewhere.

    Raises:
      TypeError, ValueError, NotImplementedError: as `softmax`, except that `a` may be boolean. TypeError also if
        `keepdims` or `return_sign` is not a bool.

    Examples:
      >>> x = jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
      >>> ps.logsumexp(x, axis=-1)
      Array([2.408, 2.408], dtype=float32)
    """
    name = "logsumexp"
    keepdims = arguments.static_bool(name, "keepdims", keepdims)
    return_sign = arguments.static_bool(name, "return_sign", return_sign)
    if b is not None or return_sign or jnp.iscomplexobj(arguments.array(name, "a", a)):
        check_name(name, implementation)
        arguments.check_axis_name(name, axis_name)
        only_by_jax = "with b, return_sign or complex a, got"
        if implementation not in (None, "xla"):
            raise NotImplementedError(f"{name}: implementation must be None or 'xla' {only_by_jax} {implementation!r}")
        if axis_name is not None:
            raise NotImplementedError(f"{name}: axis_name must be None {only_by_jax} {axis_name!r}")
        return _by_jax(name, a, axis, b, keepdims, return_sign, where)
    rows = arguments.rows(name, "a", a, axis, where, axis_name, boolean=True)
    dtype = normalizers.float_dtype(rows.x.dtype)
    # A conversion would give the gradient the weak type of x. The gradient of jax.nn.logsumexp has no weak type.
    rows = rows if rows.x.dtype == dtype else rows._replace(x=rows.x.astype(dtype))
    out, _ = evaluate(*_of_rows(LOGSUMEXP, rows, implementation))
    return out if keepdims else jnp.squeeze(out, rows.axes)


def _by_jax(name: str, a, axis, b, keepdims: bool, return_sign: bool, where):
    """Computes by `jax.nn.logsumexp` what no kernel has: b, return_sign, complex a; 16-bit numbers in float32."""
    if b is not None:
        a, b = arguments.array(name, "a", a), arguments.array(name, "b", b)
        if jnp.issubdtype(b.dtype, jax.dtypes.extended):
            raise TypeError(f"{name}: b must be of numbers, got dtype {b.dtype}")
        a = arguments.broadcast(name, "a", a, "b", b)
        b = jnp.broadcast_to(b, a.shape)
    a, axes, where, _ = arguments.rows(name, "a", a, axis, where, None, boolean=True)
    factors = () if b is None else (b,)
    try:
        common = jnp.result_type(a, *factors)
    except ValueError as error:
        dtypes = " and ".join(f"{of} of {x.dtype.name}" for of, x in zip("ab", (a, *factors)))
        raise ValueError(f"{name}: {dtypes} have no common dtype; cast one of them") from error
    out_dtype = normalizers.float_dtype(common)
    wide = out_dtype if jnp.finfo(out_dtype).bits >= 32 else jnp.float32
    a, *factors = (x.astype(wide) if jnp.isrealobj(x) else x for x in (a, *factors))
    out = _jax_logsumexp(a, axes, *(factors or (None,)), keepdims, return_sign, where)
    return out if wide == out_dtype else jax.tree.map(lambda x: x.astype(out_dtype), out)


def _of_floats(operation: RowOperation, x, axis, where, axis_name, implementation: str | None) -> tuple:
    """Returns the arguments of `evaluate`. Integer logits become floats with the same softmax."""
    rows = arguments.rows(operation.name, "x", x, axis, where, axis_name)
    x = normalizers.to_float(rows.x, rows.axes, rows.where, rows.mesh_axes)
    # A cast to the same dtype gives the gradient the weak type of x, as in JAX.
    return _of_rows(operation, rows._replace(x=x.astype(x.dtype)), implementation)


def _of_rows(operation: RowOperation, rows: arguments.Rows, implementation: str | None) -> tuple:
    call = describe(operation, *rows, function=operation.name)
    return choose_all(call, implementation, axes=rows.axes), rows.x, rows.where
