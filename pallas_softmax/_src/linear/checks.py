"""Checks the arguments of the linear_* functions, and chooses the implementations of a call."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_softmax._src import arguments
from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName, choose, choose_plain
from pallas_softmax._src.dispatch.mesh_types import laid_like
from pallas_softmax._src.dispatch.operation import Choice, Operation
from pallas_softmax._src.dispatch.refusal import reverse_only
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.derivatives import Static
from pallas_softmax._src.linear.losses import Columns, Head, Tokens, like_labels
from pallas_softmax._src.linear.mesh import describe, lay_out
from pallas_softmax._src.linear.operation import PROJECTION, PROJECTION_GRAD
from pallas_softmax._src.masks import is_column
from pallas_softmax._src.normalizers import widen
from pallas_softmax._src.temperatures import is_zero

WORKSPACE_BYTES = 512 * 2**20
"""The default of `workspace_bytes` in the `linear_*` functions: 536,870,912 bytes, which is 512 MiB."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Options(NamedTuple):
    """The name and the static arguments of a public function. `checked_projection` checks all that are no numbers."""

    function: str
    softcap: float | None
    transpose_w: bool
    workspace_bytes: int
    axis_name: AxisName
    implementation: ImplementationName | None
    beta: float = 0.0
    teacher_softcap: float | None = None


# For each number of a loss: the default, which leaves the loss as it is; which numbers are accepted; the same in words.
_RANGES: dict[str, tuple[float, Callable, str]] = {
    "temperature": (1, formulas.is_temperature, "0, or from 1e-37 to 1e37"),
    "label_smoothing": (0, lambda a: (a >= 0) & (a <= 1), "from 0 to 1"),
    "z_loss": (0, lambda a: (a >= 0) & (a <= 1e37), "from 0 to 1e37"),
}


def _range_of(function: str, name: str) -> tuple[float, Callable, str]:
    if function == "linear_kl_divergence" and name == "temperature":
        # At temperature 0, a divergence would be infinite wherever the largest logits differ.
        return 1, formulas.is_positive, "from 1e-37 to 1e37"
    return _RANGES[name]


# ---- Before `at_once`: checks of numbers that are known


def known_options(function: str, softcap, transpose_w, workspace_bytes: Any, axis_name, implementation) -> Options:
    """Returns the options. Equal numbers of any type become one: programs are compiled for their values."""
    softcap = known_softcap(function, softcap)
    is_whole = isinstance(workspace_bytes, float | np.floating) and workspace_bytes == workspace_bytes // 1
    memory: Any = int(workspace_bytes) if is_whole else workspace_bytes  # 1e9 is an integer too
    return Options(function, softcap, transpose_w, memory, axis_name, implementation)


def known_softcap(function: str, softcap, name: str = "softcap") -> float | None:
    if softcap is None:
        return None
    return static_number(function, name, softcap, formulas.is_positive, "None or from 1e-37 to 1e37")


def static_number(function: str, name: str, value, accepted: Callable, wanted: str) -> float:
    if isinstance(value, Tracer):
        raise TypeError(
            f"{function}: {name} must be {wanted}, got a traced value; pass it through static_argnames of jax.jit"
        )
    value = arguments.in_range(function, name, value, accepted, wanted, per_row=False)
    if np.ndim(value):
        raise ValueError(f"{function}: {name} must be {wanted}, got shape {np.shape(value)}")
    return float(value)


def known_tokens(function: str, labels, label_probs=None, **numbers) -> Tokens:
    """Returns the labels and the numbers of the loss.

    Concrete numbers are checked. A concrete default becomes None, so that the program leaves out its computation.
    """
    for name, value in numbers.items():
        default, accepted, wanted = _range_of(function, name)
        value = arguments.in_range(function, name, value, accepted, wanted)
        is_scalar = arguments.is_known(value) and not np.ndim(value)
        numbers[name] = None if is_scalar and jax.device_get(value) == default else value
    if label_probs is not None:
        label_probs = known_weights(function, "label_probs", label_probs)
        smoothing = numbers.pop("label_smoothing")
        if smoothing is not None and (not arguments.is_known(smoothing) or np.any(jax.device_get(smoothing))):
            raise ValueError(f"{function}: label_smoothing must be 0 with label_probs, got {smoothing}")
    return Tokens(labels, label_probs=label_probs, **numbers)


def known_weights(function: str, name: str, weights) -> Any:
    if weights is None:
        return None
    weights = arguments.parameter(function, name, weights)
    dtype = jnp.result_type(weights)
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{function}: {name} must be None or of real numbers, got dtype {dtype.name}")
    return weights


# ---- While tracing


class Checked(NamedTuple):
    """The checked arguments of a projection."""

    x: jax.Array
    w: jax.Array
    columns: Columns
    head: Head
    workspace_bytes: int
    mesh_axes: tuple[str, ...]
    vocab: int  # the number of columns on all devices

    @property
    def batch(self) -> tuple[int, ...]:  # the shape of the tokens
        return self.x.shape[:-1]

    @property
    def dtype(self) -> Any:  # of the arithmetic
        return widen(self.x).dtype


def checked_call(
    x, w, columns: Columns, where, token_weights, tokens: Tokens, options: Options
) -> tuple[Static, tuple]:
    """Returns the static part of a call and its arrays (x, w, columns, weights, tokens), checked and sharded alike.

    The arguments are as users pass them. Tokens with weight 0 are left out, as if `where` were False there.
    """
    name = options.function
    given = checked_projection(x, w, columns, options)
    x, w, columns, head, workspace_bytes, mesh_axes, vocab = given
    if tokens.teacher_x is not None:
        columns, tokens, head = _with_teacher(given, tokens, options)
    where = kept_tokens(name, where, given)
    weights = token_weights
    if weights is not None:
        weights = _one_per_token(name, "token_weights", weights, given)
        # Not jnp.where(weights != 0, weights, 0): on the CPU, it would make 0 of subnormal weights.
        weights = weights if where is None else jnp.where(where, weights, 0)
        where = ~is_zero(weights)
        weights = jnp.where(where, weights, jax.lax.stop_gradient(weights))
    tokens = checked_tokens(name, tokens, where, given)
    replicated = {"x": x, "where": where, "token_weights": weights, **tokens._replace(kept=None)._asdict()}
    arguments.check_replicated(name, options.axis_name, replicated.items())
    x, w, columns, weights, tokens = lay_out((x, w, columns, weights, tokens), head, mesh_axes)
    reason = (
        f"{name}: forward-mode differentiation (jax.jvp, jax.jacfwd) is not available, only first derivatives in"
        " reverse mode (jax.grad, jax.vjp); for others, compute the logits and call pallas_softmax.logsumexp"
    )
    variables = (x, w, columns, weights, tokens.label_probs)
    x, w, columns, weights, probs = jax.tree.map(lambda a: reverse_only(a, reason), variables)
    tokens = tokens._replace(label_probs=probs)
    forward, gradient = (chosen(operation, given, options) for operation in (PROJECTION, PROJECTION_GRAD))
    return Static(forward, gradient, head, workspace_bytes, vocab), (x, w, columns, weights, tokens)


def chosen(operation: Operation, given: Checked, options: Options) -> Choice:
    call = describe(operation, given.x, given.w, given.head, given.mesh_axes, function=options.function)
    return choose(call, options.implementation) if operation.kernels else choose_plain(call)


def _with_teacher(student: Checked, tokens: Tokens, options: Options):
    arrays = tokens.teacher_x, student.columns.teacher_w, Columns(student.columns.teacher_bias)
    of_teacher = options._replace(softcap=options.teacher_softcap)
    teacher = checked_projection(*arrays, of_teacher, "teacher_")
    if (teacher.batch, teacher.vocab) != (student.batch, student.vocab):
        raise ValueError(
            f"{options.function}: the teacher must have the tokens and columns of the student,"
            f" {student.batch} and V={student.vocab}, got {teacher.batch} and V={teacher.vocab}"
        )
    teacher_x, teacher_w, of_teacher = jax.lax.stop_gradient(teacher[:3])
    head = dataclasses.replace(student.head, beta=options.beta, teacher=teacher.head)
    columns = Columns(student.columns.bias, teacher_w, of_teacher.bias)
    return columns, tokens._replace(teacher_x=teacher_x), head


def checked_projection(x, w, columns: Columns, options: Options, prefix: str = "") -> Checked:
    """Returns the checked arguments. `prefix` begins the names of x, w and bias in messages."""
    name = options.function
    x_name, w_name, bias_name = (prefix + argument for argument in ("x", "w", "bias"))
    x, w = arguments.array(name, x_name, x), arguments.array(name, w_name, w)
    bias = None if columns.bias is None else arguments.array(name, bias_name, columns.bias)
    for argument, a in (x_name, x), (w_name, w), (bias_name, bias):
        if a is not None and a.dtype.name not in _FLOATS:
            raise TypeError(f"{name}: {argument} must be of {', '.join(_FLOATS)}, got {a.dtype.name}")
    if x.dtype != w.dtype:
        dtypes = f"{x.dtype.name} and {w.dtype.name}"
        raise TypeError(f"{name}: {x_name} and {w_name} must have one dtype, got {dtypes}; cast one of them")
    transpose_w = arguments.static_bool(name, "transpose_w", options.transpose_w)
    layout = "(V, D)" if transpose_w else "(D, V)"
    if x.ndim < 1 or w.ndim != 2 or w.shape[1 if transpose_w else 0] != x.shape[-1]:
        raise ValueError(
            f"{name}: {x_name} must be (..., D) and {w_name} {layout} for transpose_w={transpose_w},"
            f" got {x.shape} and {w.shape}"
        )
    wanted = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    head = Head(transpose_w, options.softcap, None if x.dtype.itemsize < 4 else wanted or "highest")
    vocab = head.vocab(w)
    if not isinstance(vocab, int):
        raise NotImplementedError(f"{name}: V={vocab} is symbolic; in jax.export the dimensions of x may be")
    if vocab == 0:
        raise ValueError(f"{name}: {w_name} must have at least one column, got {layout} = {w.shape}")
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"{name}: {bias_name} must have the shape ({vocab},), got {bias.shape}")
    workspace_bytes = arguments.static_int(name, "workspace_bytes", options.workspace_bytes)
    if workspace_bytes <= 0:
        raise ValueError(f"{name}: workspace_bytes must be positive, got {workspace_bytes}")
    mesh_axes = arguments.bound_mesh_axes(name, options.axis_name)
    whole_vocab = vocab * jax.lax.axis_size(mesh_axes)
    return Checked(x, w, columns._replace(bias=bias), head, workspace_bytes, mesh_axes, whole_vocab)


def kept_tokens(name: str, where, given: Checked) -> jax.Array | None:
    if where is None:
        return None
    return laid_like(given.x, jnp.broadcast_to(arguments.mask(name, where, given.batch), given.batch))


def checked_tokens(name: str, tokens: Tokens, where, given: Checked) -> Tokens:
    """Returns the labels and numbers of the tokens, broadcast to one per token.

    Labels become int32. A label out of range becomes -1, and another number out of range NaN.

    Tokens that `where` leaves out get label 0 and default numbers. They could otherwise make a NaN, which
    `jax_debug_nans` and checkify would report.
    """
    found = tokens._asdict() | {"kept": where}
    if (labels := tokens.labels) is not None:
        labels = _labels(name, labels, given, several=tokens.label_probs is not None)
        found["labels"] = labels if where is None else jnp.where(like_labels(where, labels), labels, 0)
        if (probs := tokens.label_probs) is not None:
            probs = arguments.array(name, "label_probs", probs).astype(given.dtype)
            if probs.shape != labels.shape:
                shapes = f"{labels.shape}, got {probs.shape}"
                raise ValueError(f"{name}: label_probs must have the shape of labels, {shapes}")
            probs = laid_like(given.x, probs)
            found["label_probs"] = probs if where is None else jnp.where(where[..., None], probs, 0)
        if labels.shape[len(given.batch) :] == (0,):  # kernels need a label
            one_more = [(0, 0)] * len(given.batch) + [(0, 1)]
            for of in ("labels", "label_probs"):
                found[of] = None if found[of] is None else jnp.pad(found[of], one_more)
    for argument in _RANGES:
        default, accepted, _ = _range_of(name, argument)
        if (value := found[argument]) is not None:
            value = arguments.array(name, argument, value)
            value = value if value.dtype == jnp.float64 else value.astype(given.dtype)
            value = _one_per_token(name, argument, jnp.where(accepted(value), value, jnp.nan), given)
            found[argument] = value if where is None else jnp.where(where, value, default)
    return Tokens(**found)


def _one_per_token(name: str, argument: str, value, given: Checked) -> jax.Array:
    value = arguments.array(name, argument, value)
    try:
        return laid_like(given.x, jnp.broadcast_to(value.astype(given.dtype), given.batch))
    except ValueError:
        raise ValueError(
            f"{name}: {argument} must be a scalar or broadcast to the shape of labels {given.batch}, got {value.shape}"
        ) from None


def _labels(name: str, labels, given: Checked, *, several: bool) -> jax.Array:
    """Returns the labels in int32, and -1 for a label that is not a column. `several`: with label_probs."""
    shape = given.batch
    labels = arguments.array(name, "labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype.name}")
    wanted = {0: str(shape), 1: str((*shape, "K")).replace("'", "")}  # by the number of further dimensions
    if name != "linear_log_probs":
        wanted = {several: wanted[several]}
    if labels.shape[: len(shape)] != shape or labels.ndim - len(shape) not in wanted:
        raise ValueError(
            f"{name}: labels must have the shape of x without its last dimension, {' or '.join(wanted.values())},"
            f" got {labels.shape}"
        )
    if labels.dtype.itemsize < 4:  # a narrow dtype may be unable to hold V or -1
        labels = labels.astype(jnp.int32)
    labels = laid_like(given.x, labels)
    return jnp.where(is_column(labels, given.vocab), labels, -1).astype(jnp.int32)
