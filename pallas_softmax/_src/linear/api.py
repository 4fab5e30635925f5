"""The functions of a projection and its softmax, linear_*: their contract, and their first derivatives."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import ArrayLike

from pallas_softmax._src import arguments, normalizers
from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName, choose
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.mesh_types import share_cotangent, sum_cotangents, varies, vary_together
from pallas_softmax._src.dispatch.operation import Choice, Operation
from pallas_softmax._src.dispatch.refusal import reverse_only
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.losses import Head, Statistics, Tokens
from pallas_softmax._src.linear.mesh import describe, lay_out_arrays
from pallas_softmax._src.linear.operation import PROJECTION, PROJECTION_GRAD, PROJECTION_WITH_GRAD
from pallas_softmax._src.linear.vmap import as_tokens
from pallas_softmax._src.masks import differentiable_if_finite
from pallas_softmax._src.stats.api import TokenStats

Reduction = Literal["mean", "sum"] | None

WORKSPACE_BYTES = 512 * 2**20
"""The default of `workspace_bytes` in the `linear_*` functions: 536,870,912 bytes, which is 512 MiB."""


def linear_logsumexp(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns logsumexp(x @ w + bias) over the columns of w, without storing all logits at once.

    Source: Milakov and Gimelshein, arXiv 1805.02867, section 7: the softmax fused with the layer before it.

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      bias: (V,), of a floating dtype. Without softcap and label smoothing, a bias of -inf masks a column.
      softcap: number c from 1e-37 to 1e37; the logits are c * tanh((x @ w + bias) / c).
      transpose_w: whether `w` is (V, D), like a tied embedding table or the weight of PyTorch's `Linear`. No
        transposed copy is made.
      workspace_bytes: the bound, in bytes, on the logits that are stored at a time: a chunk of at least 8 rows. The
        default is 512 MiB. Kernels that compute the gradient of a bfloat16 `w` may store more. One chunk may take 2 D V
        bytes, the size of that gradient, which is written after the chunk is freed. Or all rows may be one chunk of up
        to 4 D V bytes, the size of the float32 sum that the gradients of several chunks need.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the columns are spread over. Each device passes its
        equal shard of `w` and `bias`, in the order of `lax.axis_index`, and the same `x`. The result is over all
        columns, and is the same on all devices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      float32 of shape (...), float64 for float64. The logits of a 16-bit `x` are accumulated and kept in float32.
      Differentiable in `x`, `w` and `bias`, once, in reverse mode only. Each gradient has the dtype of its argument. It
      is accumulated in float32. The derivatives in the logits are rounded to the dtype of `x`. A result that is
      not finite has the derivative 0.

    Raises:
      TypeError: `x`, `w` or `bias` is not a floating array, `x` and `w` differ in dtype, a static argument is traced,
        `axis_name` is not a name, or the call is differentiated in forward mode (`jax.jvp`, `jax.jacfwd`).
      ValueError: shapes do not fit, `w` has no columns, a number is out of range, `axis_name` is not bound, `x` differs
        along it, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call (the message says why), or a second derivative
        is taken.
    """
    name = "linear_logsumexp"
    softcap = known_softcap(name, softcap)
    options = Options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return at_once(_per_token_of, (x, w, bias, None, None, Tokens(None)), (options,))


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    token_weights: ArrayLike | None = None,
    softcap: float | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    reduction: Reduction = "mean",
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns the cross entropy of the logits z = x @ w + bias and labels, without storing all logits at once.

    The loss of a token is logsumexp(z) - z[label]; with label smoothing s, logsumexp(z) - (1 - s) z[label] - s mean(z).
    The source is given in `linear_logsumexp`.

    A loss that is not differentiated takes one matrix product. A differentiated mean or sum computes its gradients in
    the forward, in three products, or four by kernels with label smoothing. With reduction=None, or in float16, the
    backward computes the logits again, so there are four products.

    `x`, `w`, `bias`, `softcap`, `transpose_w`, `workspace_bytes`, `axis_name` and `implementation` are as for
    `linear_logsumexp`.

    Args:
      labels: integers of the shape of `x` without its last dimension, 0 <= label < V: columns of the whole w. A label
        out of this range makes the loss NaN, unless `where` or a weight of 0 leaves the token out.
      where: boolean, broadcastable to `labels`. False leaves a token out, whatever its `x` and its label are: its loss
        and its gradient are 0. With at least 1,024 tokens on a device, the matrix products skip most of these tokens.
        There is no `ignore_index`: pass `where=labels != -100` instead.
      token_weights: real numbers, broadcastable to `labels`, that multiply the losses; None for 1. They may be
        negative. A weight of 0 leaves the token out, like `where`, and the gradient in this weight is 0. In all other
        weights the loss is differentiable.
      label_smoothing: number s from 0 to 1, or one per token: an array that broadcasts to `labels`. It may be traced,
        and a traced one out of range gives NaN. It has no gradient: asking for one raises NotImplementedError.
      z_loss: number of 0 or more, in the same forms. z_loss * logsumexp(z)**2 is added to the loss of each token.
      reduction: "mean" divides the sum of the weighted losses by the sum of the weights of the tokens that are not left
        out (0 if the sum of the weights is exactly 0). "sum" does not divide. None returns one weighted loss per token.

    Returns:
      A scalar, or for reduction=None an array of the shape of `labels`, in float32 (float64 for float64).
      Differentiable like `linear_logsumexp`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_logsumexp`; and if labels are not integers or do not fit,
        `where` is not boolean or does not fit, `token_weights` are not real or do not fit, or the reduction is unknown.
    """
    name = "linear_cross_entropy"
    if not (reduction is None or (isinstance(reduction, str) and reduction in ("mean", "sum"))):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or None, got {reduction!r}")
    labels = arguments.known_labels(name, labels)
    tokens = Tokens(
        labels,
        label_smoothing=_number(
            name, "label_smoothing", label_smoothing, 0, lambda s: (s >= 0) & (s <= 1), "from 0 to 1"
        ),
        z_loss=_number(
            name, "z_loss", z_loss, 0, lambda z: (z >= 0) & (z < np.inf), "a finite number of 0 or more"
        ),
    )
    softcap = known_softcap(name, softcap)
    options = Options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    arrays = (x, w, bias, where, _token_weights(name, token_weights), tokens)
    if reduction is None:
        return at_once(_per_token_of, arrays, (options,))
    return at_once(_total_of, arrays, (options, reduction))


def linear_log_probs(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns log softmax(z / temperature)[label] of each token, without storing all logits at once.

    The logits are z = x @ w + bias, with the softcap if there is one. The source is given in `linear_logsumexp`.

    A token may have K labels, for example the K best tokens of a teacher. x (n, D) and labels (n, K) give (n, K). With
    K > 1, kernels store float32 logits, of as many tokens at a time as `workspace_bytes` holds.

    `x`, `w`, `bias`, `softcap`, `transpose_w`, `workspace_bytes`, `axis_name` and `implementation` are as for
    `linear_logsumexp`.

    Args:
      labels: integers, of the shape of `x` without its last dimension, or of this shape with one more dimension K. A
        row may repeat a label; the gradients add up.
      where: boolean, broadcastable to the shape of `x` without its last dimension. False leaves a token out, whatever
        its `x` and its labels are.
      temperature: number from 1e-37 to 1e37, or one per token: an array that broadcasts to the shape of `x` without
        its last dimension. It may be traced, and a traced one out of range gives NaN. It has no gradient: asking for
        one raises NotImplementedError.

    Returns:
      float32 (float64 for float64), of the shape of `labels`; NaN for a label out of range and for a token with a logit
      of NaN or +inf, 0 where `where` is False. Differentiable like `linear_logsumexp`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`.
    """
    name = "linear_log_probs"
    labels = arguments.known_labels(name, labels)
    tokens = Tokens(labels, _temperature(name, temperature))
    softcap = known_softcap(name, softcap)
    options = Options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return at_once(_log_probs_of, (x, w, bias, where, None, tokens), (options,))


def linear_token_stats(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TokenStats:
    """Returns the statistics of `token_stats` for the logits z / temperature, without storing all logits at once.

    The logits are z = x @ w + bias, with the softcap if there is one. The statistics take one matrix product, and four
    with gradients. There is no `where`: mask the results.

    `x`, `w`, `bias`, `softcap`, `transpose_w`, `workspace_bytes`, `axis_name` and `implementation` are as for
    `linear_logsumexp`, and `temperature` is as for `linear_log_probs`.

    Args:
      labels: integers of the shape of `x` without its last dimension, 0 <= label < V: columns of the whole w; or None.

    Returns:
      TokenStats(log_probs, entropy, logsumexp, argmax), each of the shape of `x` without its last dimension. The first
      three are float32 (float64 for float64), and differentiable like `linear_logsumexp`. A logit of -inf adds 0 to the
      entropy. A token with a logit of NaN or +inf, or with none above -inf, has NaN `entropy` and `log_probs`. A label
      out of range has NaN.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`.
    """
    name = "linear_token_stats"
    if labels is not None:
        labels = arguments.known_labels(name, labels)
    softcap = known_softcap(name, softcap)
    options = Options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return at_once(_token_stats_of, (x, w, bias, Tokens(labels, _temperature(name, temperature))), (options,))


class Options(NamedTuple):
    """The static arguments of a public function and its name. All but `softcap` are as users pass them."""

    function: str
    softcap: float | None
    transpose_w: bool
    workspace_bytes: int
    axis_name: AxisName
    implementation: ImplementationName | None


class _Static(NamedTuple):
    """Everything about a call that is known while tracing, like `derivatives.Static`; hashable.

    Attributes:
      function: the public function, for messages.
      forward: the choice for the operation that computes the statistics.
      gradient: the choice for the operation that computes the gradients.
      head: the static arguments of the projection.
      workspace_bytes: the bound on the stored logits.
      vocab: the number of columns of a whole row.
    """

    function: str
    forward: Choice
    gradient: Choice
    head: Head
    workspace_bytes: int
    vocab: int

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that the columns are spread over."""
        return self.forward.call.mesh_axes

    def project(self, choice: Choice, *arrays, **keywords):
        """Runs `forward` or `gradient`."""
        keywords |= {"head": self.head, "workspace_bytes": self.workspace_bytes}
        return as_tokens(choice, *arrays, **keywords)

    def values(self, statistics: Statistics, tokens: Tokens) -> jax.Array:
        """Returns the loss of each token, NaN for a label out of range; without labels, its logsumexp.

        With a logit of +inf, logsumexp is +inf and so are losses. Log-probs are then NaN, as in `log_softmax`.
        """
        if tokens.labels is None:
            return normalizers.log_of(statistics.normalizer)
        losses = formulas.losses(statistics, tokens, self.vocab)
        valid = (tokens.labels >= 0) & (tokens.labels < self.vocab)
        d = statistics.normalizer.d
        if self.function != "linear_cross_entropy":
            valid = valid & _like_labels(d == d, losses)
        return jnp.where(valid, losses, jnp.nan)

    def unwrap(self, arrays: tuple) -> tuple[tuple[Any, ...], Any]:
        """Returns the arrays that the forward of a custom_vjp gets, and whether the gradient of w is wanted.

        The second result is () for yes and None for no. JAX makes arrays of the leaves of a tree that a forward saves.
        () and None have no leaves, so they stay static; True and False would not.

        Args:
          arrays: x, w, bias, tokens and perhaps weights, as trees of `CustomVJPPrimal`s.

        Raises:
          NotImplementedError: a gradient in a temperature, label_smoothing or z_loss is wanted.
        """
        for name, number in arrays[3]._asdict().items():
            if number is not None and name != "labels" and number.perturbed:
                raise NotImplementedError(
                    f"{self.function}: there is no gradient in {name}; wrap it in jax.lax.stop_gradient"
                )
        values = jax.tree.map(lambda a: a.value, arrays, is_leaf=lambda a: isinstance(a, CustomVJPPrimal))
        return values, () if arrays[1].perturbed else None


# ---- One value for each token: the backward computes the logits again


def _log_probs_of(*arrays_and_options):
    return 0 - _per_token_of(*arrays_and_options)  # not -values: tokens left out get 0, not -0


def _per_token_of(x, w, bias, where, token_weights, tokens: Tokens, options: Options) -> Any:
    static, arrays = _checked(x, w, bias, where, token_weights, tokens, options, PROJECTION_GRAD)
    x, w, bias, weights, tokens = arrays
    labels, kept = tokens.labels, tokens.kept
    if labels is not None and labels.ndim == x.ndim and labels.shape[-1] == 1:
        # the kernels need not store logits for a single label
        of_one: Any = _per_token(static, x, w, bias, tokens._replace(labels=labels[..., 0]))
        values = of_one[..., None]
    else:
        values: Any = _per_token(static, x, w, bias, tokens)
    values = differentiable_if_finite(values)
    values = values if kept is None else jnp.where(_like_labels(kept, values), values, 0)
    return values if weights is None else formulas.product(values, weights)


def _like_labels(per_token: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns an array with one element per token, with one more dimension if the labels have one."""
    return per_token if per_token.ndim == labels.ndim else per_token[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_token(static: _Static, x, w, bias, tokens: Tokens):
    """Returns the value of each token."""
    return static.values(static.project(static.forward, x, w, bias, tokens), tokens)


def _per_token_forward(static: _Static, *arrays):
    (x, w, bias, tokens), with_dw = static.unwrap(arrays)
    statistics = static.project(static.forward, x, w, bias, tokens)
    return static.values(statistics, tokens), (x, w, bias, tokens, statistics, with_dw)


def _per_token_backward(static: _Static, saved, dvalues):
    x, w, bias, tokens, statistics, with_dw = saved
    weights = sum_cotangents(dvalues, static.mesh_axes)
    arrays = (x, w, bias, tokens, weights, statistics)
    dx, dw, dbias = static.project(static.gradient, *arrays, with_dw=with_dw is not None)
    return share_cotangent(dx, static.mesh_axes), dw, dbias, None


_per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)


# ---- The statistics of each token: the same way


def _token_stats_of(x, w, bias, tokens: Tokens, options: Options) -> TokenStats:
    static, arrays = _checked(x, w, bias, None, None, tokens, options, PROJECTION_GRAD)
    x, w, bias, _, tokens = arrays
    static = static._replace(head=dataclasses.replace(static.head, entropy=True))
    found: Any = _stats(static, x, w, bias, tokens)
    *floats, bits = found
    log_probs, entropy, logsumexp = map(differentiable_if_finite, floats)
    argmax = jax.lax.bitcast_convert_type(bits, jnp.int32)
    return TokenStats(None if tokens.labels is None else log_probs, entropy, logsumexp, argmax)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(static: _Static, x, w, bias, tokens: Tokens):
    """Returns log-probs (or 0), entropies and logsumexp, and the argmax as floats with the same bits."""
    return _stats_values(static, static.project(static.forward, x, w, bias, tokens), tokens)


def _stats_values(static: _Static, statistics: Statistics, tokens: Tokens):
    entropy, logsumexp = normalizers.entropy(statistics.moments), normalizers.log_of(statistics.normalizer)
    assert statistics.argmax is not None
    bits = jax.lax.bitcast_convert_type(statistics.argmax, jnp.float32)
    if tokens.labels is None:
        return jnp.zeros_like(entropy), entropy, logsumexp, bits
    return 0 - static.values(statistics, tokens), entropy, logsumexp, bits


def _stats_forward(static: _Static, *arrays):
    (x, w, bias, tokens), with_dw = static.unwrap(arrays)
    statistics = static.project(static.forward, x, w, bias, tokens)
    return _stats_values(static, statistics, tokens), (x, w, bias, tokens, statistics, with_dw)


def _stats_backward(static: _Static, saved, cotangents):
    *residuals, statistics, with_dw = saved
    zeros = jnp.zeros_like(statistics.t)
    given = [zeros if isinstance(g, SymbolicZero) else g for g in cotangents[:3]]
    of_label, of_entropy, of_logsumexp = sum_cotangents(given, static.mesh_axes)
    weights = jnp.stack(vary_together(-of_label, of_entropy, of_logsumexp), -1)
    dx, dw, dbias = static.project(
        static.gradient, *residuals, weights, statistics, with_dw=with_dw is not None
    )
    return share_cotangent(dx, static.mesh_axes), dw, dbias, None


_stats.defvjp(_stats_forward, _stats_backward, symbolic_zeros=True)


# ---- A mean or sum of the values: the forward computes the gradients


def _total_of(x, w, bias, where, token_weights, tokens: Tokens, options: Options, reduction: Reduction):
    static, arrays = _checked(x, w, bias, where, token_weights, tokens, options, PROJECTION_WITH_GRAD)
    x, w, bias, weights, tokens = arrays
    if weights is None:
        weights = jnp.ones_like(tokens.labels, normalizers.widen(x).dtype)
        weights = weights if tokens.kept is None else jnp.where(tokens.kept, weights, 0)
    if reduction == "mean":
        weights = formulas.shares(weights)
    if x.dtype == jnp.float16:
        values = differentiable_if_finite(_per_token(static, x, w, bias, tokens))
        return differentiable_if_finite(_weighted(values, weights))
    return differentiable_if_finite(_total(static, x, w, bias, tokens, weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(static: _Static, x, w, bias, tokens: Tokens, weights):
    """Returns the sum of weights * losses. A loss of weight 0 may be NaN; the gradient in its weight is 0.

    A cotangent of 0 gives gradients of 0, even where they would be NaN. The sum of a NaN loss has such a cotangent.
    """
    return _weighted(static.values(static.project(static.forward, x, w, bias, tokens), tokens), weights)


def _total_forward(static: _Static, *arrays):
    (x, w, bias, tokens, weights), with_dw = static.unwrap(arrays)
    to_gradient = (x, w, bias, tokens, weights)
    statistics, *gradients = static.project(static.gradient, *to_gradient, with_dw=with_dw is not None)
    losses = static.values(statistics, tokens)
    of_weights = jnp.where(weights == 0, 0, losses) if arrays[4].perturbed else None
    return _weighted(losses, weights), (*gradients, of_weights)


def _weighted(losses, weights):
    return jnp.sum(formulas.product(jnp.where(weights == 0, 0, losses), weights))


def _total_backward(static: _Static, gradients, dtotal):
    dtotal = sum_cotangents(dtotal, static.mesh_axes)

    def of_total(g):
        return jnp.where(dtotal == 0, 0, normalizers.widen(g) * dtotal).astype(g.dtype)

    dx, dw, dbias, dweights = jax.tree.map(of_total, gradients)
    dweights = None if dweights is None else share_cotangent(dweights, static.mesh_axes)
    return share_cotangent(dx, static.mesh_axes), dw, dbias, None, dweights


_total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


# ---- Checks of the arguments

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _number(function: str, name: str, value, default: float, accepted: Callable, wanted: str) -> Any:
    """Returns a number of the loss, checked if it is known; None for a known scalar that equals the default."""
    value = arguments.in_range(function, name, value, accepted, wanted)
    is_scalar = arguments.is_known(value) and not np.ndim(value)
    return None if is_scalar and np.asarray(value) == default else value


def _temperature(function: str, temperature) -> Any:
    """Returns the temperature, checked if it is known; None for a known 1."""
    return _number(
        function, "temperature", temperature, 1, lambda t: (t >= 1e-37) & (t <= 1e37), "from 1e-37 to 1e37"
    )


def _token_weights(function: str, weights) -> Any:
    """Returns the weights of the losses, checked to be real numbers; None for none."""
    if weights is None:
        return None
    weights = arguments.parameter(function, "token_weights", weights)
    dtype = jnp.result_type(weights)
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{function}: token_weights must be None or of real numbers, got dtype {dtype.name}")
    return weights


def _checked(
    x, w, bias, where, token_weights, tokens: Tokens, options: Options, gradient: Operation
) -> tuple[_Static, tuple]:
    """Returns the static part of a call and its arrays, checked and sharded alike.

    Labels become int32, and -1 where they are out of range. A token of weight 0 becomes one that `where` leaves out.
    Tokens that are left out get harmless numbers, and weight 0.

    Args:
      x, w, bias, where, token_weights, tokens: as users pass them.
      options: as users pass them.
      gradient: the operation that computes the gradients. In float16 PROJECTION_GRAD replaces it: a forward would
        round the gradients before they are multiplied by the cotangent, and they could overflow or become 0.
    """
    name = options.function
    x, w, bias, head, workspace_bytes = checked_projection(x, w, bias, options)
    mesh_axes = arguments.bound_mesh_axes(name, options.axis_name)
    vocab = head.vocab(w) * (jax.lax.axis_size(mesh_axes) if mesh_axes else 1)
    batch = x.shape[:-1]
    if where is not None:
        where = jnp.broadcast_to(arguments.mask(name, where, batch), batch)
    weights = token_weights
    if weights is not None:
        weights = _one_per_token(name, "token_weights", weights, batch, normalizers.widen(x).dtype)
        # Not jnp.where(weights != 0, weights, 0): on the CPU, it would make 0 of subnormal weights.
        weights = weights if where is None else jnp.where(where, weights, 0)
        where = ~formulas.is_zero(weights)
        weights = jnp.where(where, weights, jax.lax.stop_gradient(weights))
    tokens = _checked_tokens(name, tokens, where, batch, normalizers.widen(x).dtype, vocab)
    per_token = tokens._replace(kept=None)._asdict().items()
    for of, a in (("x", x), ("where", where), ("token_weights", weights), *per_token):
        if a is not None and varies(a, mesh_axes):
            raise ValueError(
                f"{name}: {of} must be the same on all devices of axis_name={options.axis_name!r}"
            )
    arrays = lay_out_arrays((x, w, bias, weights, tokens), head)
    x, w, bias, weights, tokens = vary_together(*arrays, but=mesh_axes)
    w, bias = vary_together(w, bias, over=mesh_axes)
    reason = (
        f"{name}: forward-mode differentiation (jax.jvp, jax.jacfwd) is not available, only first derivatives in"
        " reverse mode (jax.grad, jax.vjp); for others, compute the logits and call pallas_softmax.logsumexp"
    )
    x, w = reverse_only(x, reason), reverse_only(w, reason)
    bias = None if bias is None else reverse_only(bias, reason)
    weights = None if weights is None else reverse_only(weights, reason)

    def chosen(op: Operation) -> Choice:
        return choose(describe(op, x, w, head, mesh_axes, function=name), options.implementation)

    gradient = PROJECTION_GRAD if x.dtype == jnp.float16 else gradient
    static = _Static(name, chosen(PROJECTION), chosen(gradient), head, workspace_bytes, vocab)
    return static, (x, w, bias, weights, tokens)


def checked_projection(
    x, w, bias, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array | None, Head, int]:
    """Returns x, w and bias, the static arguments of the projection, and workspace_bytes, all checked."""
    name = options.function
    x, w = arguments.array(name, "x", x), arguments.array(name, "w", w)
    bias = None if bias is None else arguments.array(name, "bias", bias)
    for of, a in ("x", x), ("w", w), ("bias", bias):
        if a is not None and a.dtype.name not in _FLOATS:
            raise TypeError(f"{name}: {of} must be of {', '.join(_FLOATS)}, got {a.dtype.name}")
    if x.dtype != w.dtype:
        raise TypeError(
            f"{name}: x and w must have one dtype, got {x.dtype.name} and {w.dtype.name}; cast one of them"
        )
    transpose_w = arguments.static_bool(name, "transpose_w", options.transpose_w)
    layout = "(V, D)" if transpose_w else "(D, V)"
    if x.ndim < 1 or w.ndim != 2 or w.shape[1 if transpose_w else 0] != x.shape[-1]:
        raise ValueError(
            f"{name}: x must be (..., D) and w {layout} for transpose_w={transpose_w}, got {x.shape} and {w.shape}"
        )
    head = Head(transpose_w, options.softcap, _precision(x.dtype))
    vocab = head.vocab(w)
    if not isinstance(vocab, int):
        raise NotImplementedError(f"{name}: V={vocab} is symbolic; in jax.export the dimensions of x may be")
    if vocab == 0:
        raise ValueError(f"{name}: w must have at least one column, got {layout} = {w.shape}")
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"{name}: bias must have the shape ({vocab},), got {bias.shape}")
    workspace_bytes = arguments.static_int(name, "workspace_bytes", options.workspace_bytes)
    if workspace_bytes <= 0:
        raise ValueError(f"{name}: workspace_bytes must be positive, got {workspace_bytes}")
    return x, w, bias, head, workspace_bytes


def known_softcap(function: str, softcap) -> float | None:
    """Returns the softcap as a Python number, because kernels are compiled for it."""
    if softcap is None:
        return None
    wanted = "None or from 1e-37 to 1e37"
    if isinstance(softcap, Tracer):
        raise TypeError(
            f"{function}: softcap must be {wanted}, got a traced value; pass it through static_argnames of jax.jit"
        )
    softcap = arguments.in_range(function, "softcap", softcap, lambda c: (c >= 1e-37) & (c <= 1e37), wanted)
    if np.ndim(softcap):
        raise ValueError(f"{function}: softcap must be {wanted}, got shape {np.shape(softcap)}")
    return float(softcap)


def _precision(dtype) -> Any:
    """Returns the precision of the products: for float32, `jax.default_matmul_precision` or else full precision."""
    if dtype.itemsize < 4:
        return None
    return jax.config.jax_default_matmul_precision or "highest"  # pyright: ignore[reportAttributeAccessIssue]


def _checked_tokens(name: str, tokens: Tokens, where, shape: tuple[int, ...], dtype, vocab: int) -> Tokens:
    """Returns the numbers of the tokens, each of this shape. A token that is left out gets label 0 and default numbers.

    Then it cannot make a NaN, which `jax_debug_nans` and checkify would report.
    """

    def per_token(of: str, value, default: float, accepted: Callable) -> Any:
        if value is None:
            return None
        value = _one_per_token(name, of, value, shape, dtype)
        value = jnp.where(accepted(value), value, jnp.nan)
        return value if where is None else jnp.where(where, value, default)

    labels = tokens.labels
    if labels is not None:
        labels = _labels(name, labels, shape, vocab)
        labels = labels if where is None else jnp.where(_like_labels(where, labels), labels, 0)
    return Tokens(
        labels,
        per_token("temperature", tokens.temperature, 1, lambda t: (t >= 1e-37) & (t <= 1e37)),
        per_token("label_smoothing", tokens.label_smoothing, 0, lambda s: (s >= 0) & (s <= 1)),
        per_token("z_loss", tokens.z_loss, 0, lambda z: (z >= 0) & (z < jnp.inf)),
        where,
    )


def _one_per_token(name: str, of: str, value, shape: tuple[int, ...], dtype) -> jax.Array:
    """Returns a number, or one per token, as an array of this shape and dtype."""
    value = arguments.array(name, of, value)
    try:
        return jnp.broadcast_to(value.astype(dtype), shape)
    except ValueError:
        raise ValueError(
            f"{name}: {of} must be a scalar or broadcast to the shape of labels {shape}, got {value.shape}"
        ) from None


def _labels(name: str, labels, shape: tuple[int, ...], vocab: int) -> jax.Array:
    """Returns the labels in int32, and -1 for a label that is not a column."""
    labels = arguments.array(name, "labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype.name}")
    several = name == "linear_log_probs" and labels.ndim > len(shape)
    if labels.shape[: len(shape)] != shape or labels.ndim > len(shape) + several:
        also = f" or {(*shape, 'K')}".replace("'", "") if name == "linear_log_probs" else ""
        raise ValueError(
            f"{name}: labels must have the shape of x without its last dimension, {shape}{also}, got {labels.shape}"
        )
    if labels.dtype.itemsize < 4:  # 8 and 16 bits may hold neither V nor -1
        labels = labels.astype(jnp.int32)
    return jnp.where((labels >= 0) & (labels < vocab), labels, -1).astype(jnp.int32)
