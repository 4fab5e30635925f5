"""The functions of a projection and its softmax, linear_*."""

import dataclasses
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_softmax._src.arguments import AxisName, check_array, known_labels, static_bool
from pallas_softmax._src.dispatch.choose import ImplementationName
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.linear import checks, derivatives
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.checks import WORKSPACE_BYTES, Options
from pallas_softmax._src.linear.losses import Columns, Tokens
from pallas_softmax._src.masks import differentiable_if_finite
from pallas_softmax._src.normalizers import widen
from pallas_softmax._src.stats.api import TokenStats

Reduction = Literal["mean", "sum"] | None


def linear_logsumexp(
    x: "ArrayLike",
    w: "ArrayLike",
    *,
    where: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns logsumexp((x @ w + bias) / temperature) of each token, without storing all logits at once.

    Source: Milakov and Gimelshein, arXiv 1805.02867, section 7: the softmax fused with the layer before it. `where`,
    `temperature`, `bias`, `softcap`, `transpose_w`, `workspace_bytes`, `axis_name` and `implementation` are as for
    `linear_cross_entropy`.

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.

    Returns:
      float32 of shape (...), float64 for float64. The logits of a 16-bit `x` are accumulated and kept in float32.
      Differentiable in `x`, `w` and `bias`, once, in reverse mode only. Each gradient has the dtype of its argument,
      and is accumulated in float32, from derivatives in the logits that are rounded to the dtype of `x`. A result that
      is not finite has the derivative 0.

    Raises:
      TypeError: `x`, `w` or `bias` is not a floating array, `x` and `w` differ in dtype, `where` is not an array, a
        static argument is traced, `axis_name` is not a name, or the call is differentiated in forward mode (`jax.jvp`,
        `jax.jacfwd`).
      ValueError: shapes do not fit, `where` is not boolean, `w` has no columns, a number is out of range, `axis_name`
        is not bound, an array that must not differ along it does, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call (the message says why), or a second derivative
        is taken.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> ps.linear_logsumexp(x, w)
      Array([2.408, 2.408], dtype=float32)
    """
    name = "linear_logsumexp"
    tokens = checks.known_tokens(name, None, temperature=temperature)
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _losses(x, w, Columns(bias), where, None, tokens, options)[0]


@overload
def linear_cross_entropy(
    x: ArrayLike, w: ArrayLike, labels: ArrayLike, *, label_probs: ArrayLike | None = ...,
    where: ArrayLike | None = ..., token_weights: ArrayLike | None = ..., temperature: ArrayLike = ...,
    bias: ArrayLike | None = ..., softcap: float | None = ..., label_smoothing: ArrayLike = ...,
    z_loss: ArrayLike = ..., reduction: Reduction = ..., return_logsumexp: Literal[False] = ...,
    transpose_w: bool = ..., workspace_bytes: int = ..., axis_name: AxisName = ...,
    implementation: ImplementationName | None = ...,
) -> jax.Array: ...  # fmt: skip
@overload
def linear_cross_entropy(
    x: ArrayLike, w: ArrayLike, labels: ArrayLike, *, label_probs: ArrayLike | None = ...,
    where: ArrayLike | None = ..., token_weights: ArrayLike | None = ..., temperature: ArrayLike = ...,
    bias: ArrayLike | None = ..., softcap: float | None = ..., label_smoothing: ArrayLike = ...,
    z_loss: ArrayLike = ..., reduction: Reduction = ..., return_logsumexp: Literal[True],
    transpose_w: bool = ..., workspace_bytes: int = ..., axis_name: AxisName = ...,
    implementation: ImplementationName | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    x: ArrayLike, w: ArrayLike, labels: ArrayLike, *, label_probs: ArrayLike | None = ...,
    where: ArrayLike | None = ..., token_weights: ArrayLike | None = ..., temperature: ArrayLike = ...,
    bias: ArrayLike | None = ..., softcap: float | None = ..., label_smoothing: ArrayLike = ...,
    z_loss: ArrayLike = ..., reduction: Reduction = ..., return_logsumexp: bool = ...,
    transpose_w: bool = ..., workspace_bytes: int = ..., axis_name: AxisName = ...,
    implementation: ImplementationName | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def linear_cross_entropy(
    x: "ArrayLike",
    w: "ArrayLike",
    labels: "ArrayLike",
    *,
    label_probs: "ArrayLike | None" = None,
    where: "ArrayLike | None" = None,
    token_weights: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    label_smoothing: "ArrayLike" = 0.0,
    z_loss: "ArrayLike" = 0.0,
    reduction: Reduction = "mean",
    return_logsumexp: bool = False,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the cross entropy of the logits z and labels, without storing all logits at once.

    The logits are z = (x @ w + bias) / temperature, with the softcap if there is one. The loss of a token is
    logsumexp(z) - z[label]; with label smoothing s, logsumexp(z) - (1 - s) z[label] - s mean(z). With `label_probs` q,
    it is the sum of q[k] (logsumexp(z) - z[labels[k]]) over K labels, for example the K best tokens of a teacher.

    A loss that is not differentiated takes one matrix product. A differentiated mean or sum computes its gradients in
    the forward, in three products, or four by kernels with label smoothing. With reduction=None, or in float16, the
    backward computes the logits again, so there are four products.

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      labels: integers of shape (...), 0 <= label < V: columns of the whole w; (..., K) with `label_probs`. A label out
        of this range makes the loss NaN, unless the token is left out or its q is 0.
      label_probs: real numbers q of the shape of `labels`, (..., K). They need not sum to 1, and "mean" does not divide
        by their sum. A row may repeat a label. With them, label_smoothing must be 0.
      where: boolean, broadcastable to (...). False leaves a token out, whatever its other arguments are: its loss is 0,
        and so are its gradients. With at least 1,024 tokens on a device, the matrix products skip most of these tokens.
        There is no `ignore_index`: pass `where=labels != -100` instead.
      token_weights: real numbers, broadcastable to (...), that multiply the losses; None for 1. They may be negative.
        A weight of 0 leaves the token out, like `where`, and the gradient in this weight is 0.
      temperature: 0, a number from 1e-37 to 1e37, or one per token: an array that broadcasts to (...). It divides the
        logits after the softcap. 0 is the limit: the largest logits share the probability, and the gradients are 0. A
        traced one out of range gives NaN. Asking for its gradient raises NotImplementedError.
      bias: (V,), of a floating dtype. Without softcap and label smoothing, a bias of -inf masks a column.
      softcap: number c from 1e-37 to 1e37, known while tracing; the logits are c * tanh((x @ w + bias) / c).
      label_smoothing: number s from 0 to 1, or one per token, in the forms of `temperature`.
      z_loss: number of 0 or more, in the same forms. z_loss * logsumexp(z)**2 is added to the loss of each token.
      reduction: "mean" divides the sum of the weighted losses by the sum of the weights of the tokens that are not left
        out (0 if the sum of the weights is exactly 0). "sum" does not divide. None returns one weighted loss per token.
      return_logsumexp: whether to return logsumexp(z) too, for example to log the z-loss. It takes no product.
      transpose_w: whether `w` is (V, D), like a tied embedding table or the weight of PyTorch's `Linear`. It is not
        copied.
      workspace_bytes: the bound, in bytes, on the logits that are stored at a time: a chunk of at least 8 rows. The
        default is 512 MiB. Kernels that compute the gradient of a bfloat16 `w` may store more: one chunk of 2 D V
        bytes, the size of that gradient, which is written after the chunk is freed; or all rows as one chunk of up to
        4 D V bytes, the size of the float32 sum that the gradients of several chunks need.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the columns are spread over. Each device passes its
        equal shard of `w` and `bias`, in the order of `lax.axis_index`, and the same other arrays. The result is over
        all columns, and is the same on all devices.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      A scalar, or for reduction=None an array of shape (...), in float32 (float64 for float64). Differentiable like
      `linear_logsumexp`, and in `token_weights` and `label_probs`. With return_logsumexp, a pair: this and logsumexp(z)
      of shape (...), without a gradient, and 0 for tokens that are left out or if a mean divides by 0.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_logsumexp`; and if labels are not integers, `token_weights`
        or `label_probs` are not real, shapes do not fit, or the reduction is unknown.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> ps.linear_cross_entropy(x, w, jnp.array([2, 1]), reduction=None)
      Array([0.408, 1.408], dtype=float32)
    """
    name = "linear_cross_entropy"
    return_logsumexp = static_bool(name, "return_logsumexp", return_logsumexp)
    numbers = {"temperature": temperature, "label_smoothing": label_smoothing, "z_loss": z_loss}
    tokens = checks.known_tokens(name, known_labels(name, "labels", labels), label_probs, **numbers)
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    found = _reduced(x, w, Columns(bias), where, token_weights, tokens, options, reduction)
    return found if return_logsumexp else found[0]


def linear_kl_divergence(
    x: "ArrayLike",
    w: "ArrayLike",
    teacher_x: "ArrayLike",
    teacher_w: "ArrayLike",
    *,
    beta: float = 0.0,
    where: "ArrayLike | None" = None,
    token_weights: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    bias: "ArrayLike | None" = None,
    teacher_bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: Reduction = "mean",
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns the divergence of a student from a teacher over the whole vocabulary, without storing all logits.

    The student's probabilities q are the softmax of (x @ w + bias) / temperature. The teacher's probabilities p are the
    softmax of (teacher_x @ teacher_w + teacher_bias) / temperature. Source: Agarwal et al., arXiv 2306.13649.

    A divergence that is not differentiated takes two matrix products. A differentiated mean or sum takes four. With
    reduction=None, or in float16, there are six. `where`, `token_weights`, `softcap`, `reduction`, `transpose_w` and
    `axis_name` are as for `linear_cross_entropy`; the last two are for `teacher_w` and `teacher_bias` too.

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      teacher_x: (..., D'), of any of these dtypes. D' may differ from D.
      teacher_w: (D', V), of the dtype of `teacher_x`.
      beta: number from 0 to 1, known while tracing. 0 gives KL(p || q), the forward KL, and 1 gives KL(q || p), the
        reverse KL. Between them, it is the generalized Jensen-Shannon divergence
        beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.
      temperature: number from 1e-37 to 1e37, or one per token. It divides the logits of both, after the softcap. The
        result is not multiplied by its square. A traced one out of range gives NaN. Asking for its gradient raises
        NotImplementedError.
      bias: (V,), of a floating dtype, the student's. A bias of -inf masks a column.
      teacher_bias: the same of the teacher.
      teacher_softcap: the softcap of the teacher.
      workspace_bytes: the bound, in bytes, on the logits of both that are stored at a time. Kernels that compute the
        gradient of a bfloat16 `w` store more, as for `linear_cross_entropy`.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one, for the student's
        logits. Kernels compute the logits of a teacher in bfloat16 or float16 only.

    Returns:
      A scalar, or for reduction=None an array of shape (...), in float32 (float64 for a float64 `x`). Differentiable in
      `x`, `w`, `bias` and `token_weights`, like `linear_cross_entropy`. The gradients in the teacher's arrays are 0. A
      logit of -inf is a probability of 0. With beta = 0, a token with q = 0 < p is +inf; with beta = 1, one with
      p = 0 < q. A token with a logit of NaN or +inf is NaN. A result that is not finite has the derivative 0.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`; and if the teacher has other tokens or
        columns than the student.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> ps.linear_kl_divergence(x, w, x, 2 * w)
      Array(0.116, dtype=float32)
    """
    name = "linear_kl_divergence"
    beta = checks.static_number(name, "beta", beta, lambda a: (a >= 0) & (a <= 1), "from 0 to 1")
    teacher_softcap = checks.known_softcap(name, teacher_softcap, "teacher_softcap")
    check_array(name, "teacher_x", teacher_x)  # None would mean: no teacher
    tokens = checks.known_tokens(name, None, temperature=temperature)._replace(teacher_x=teacher_x)
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    options = options._replace(beta=beta, teacher_softcap=teacher_softcap)
    columns = Columns(bias, teacher_w, teacher_bias)
    return _reduced(x, w, columns, where, token_weights, tokens, options, reduction)[0]


def linear_log_probs(
    x: "ArrayLike",
    w: "ArrayLike",
    labels: "ArrayLike",
    *,
    where: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """Returns log softmax(z)[label] of each token, without storing all logits at once.

    The logits z, `where`, `temperature`, `bias`, `softcap`, `transpose_w`, `workspace_bytes`, `axis_name` and
    `implementation` are as for `linear_cross_entropy`. A token may have K labels: x (n, D) and labels (n, K) give
    (n, K).

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      labels: integers of shape (...) or (..., K), 0 <= label < V: columns of the whole w. A row may repeat a label; the
        gradients add up.

    Returns:
      float32 (float64 for float64), of the shape of `labels`; NaN for a label out of range and for a token with a logit
      of NaN or +inf. Differentiable like `linear_logsumexp`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> ps.linear_log_probs(x, w, jnp.array([2, 1]))
      Array([-0.408, -1.408], dtype=float32)
    """
    name = "linear_log_probs"
    tokens = checks.known_tokens(name, known_labels(name, "labels", labels), temperature=temperature)
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _log_probs(x, w, Columns(bias), where, tokens, options)


def linear_token_stats(
    x: "ArrayLike",
    w: "ArrayLike",
    labels: "ArrayLike | None" = None,
    *,
    where: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TokenStats:
    """Returns the statistics of `token_stats` for the logits z of each token, without storing all logits at once.

    The logits z, `where`, `temperature`, `bias`, `softcap`, `transpose_w`, `workspace_bytes`, `axis_name` and
    `implementation` are as for `linear_cross_entropy`. The statistics take one matrix product, and four with gradients.

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      labels: integers of shape (...), 0 <= label < V: columns of the whole w; or None.

    Returns:
      TokenStats(log_probs, entropy, logsumexp, argmax), each of shape (...). The first three are float32 (float64 for
      float64), and differentiable like `linear_logsumexp`. A logit of -inf adds 0 to the entropy. A token with a logit
      of NaN or +inf, or with none above -inf, has NaN `entropy` and `log_probs`. A label out of range has NaN.

    Raises:
      TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> stats = ps.linear_token_stats(x, w)
      >>> stats.entropy, stats.argmax
      (Array([0.832, 0.832], dtype=float32), Array([2, 0], dtype=int32))
    """
    name = "linear_token_stats"
    labels = None if labels is None else known_labels(name, "labels", labels)
    tokens = checks.known_tokens(name, labels, temperature=temperature)
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _token_stats(x, w, Columns(bias), where, tokens, options)


# ---- The program of each function


def _reduced(x, w, columns, where, token_weights, tokens: Tokens, options: Options, reduction: Reduction) -> Any:
    """Returns the weighted losses, reduced, and the logsumexp of each token."""
    name = options.function
    if not (reduction is None or (isinstance(reduction, str) and reduction in ("mean", "sum"))):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or None, got {reduction!r}")
    arrays = x, w, columns, where, checks.known_weights(name, "token_weights", token_weights), tokens
    return _losses(*arrays, options) if reduction is None else _total(*arrays, options, reduction)


def _weighted_losses(x, w, columns, where, token_weights, tokens: Tokens, options: Options) -> Any:
    """Returns the weighted loss of each token, and its logsumexp."""
    static, arrays = checks.checked_call(x, w, columns, where, token_weights, tokens, options)
    x, w, columns, weights, tokens = arrays
    labels, one_label = tokens.labels, False
    if tokens.label_probs is None and labels is not None and labels.ndim == x.ndim and labels.shape[-1] == 1:
        # kernels sort several labels
        tokens, one_label = tokens._replace(labels=labels[..., 0]), True
    losses, logsumexp = derivatives.per_token(static, x, w, columns, tokens)
    losses = tokens.zero_if_left_out(differentiable_if_finite(losses[..., None] if one_label else losses))
    losses = losses if weights is None else formulas.product(losses, weights)
    return losses, tokens.zero_if_left_out(jax.lax.stop_gradient(logsumexp))


_losses = at_once("options")(_weighted_losses)


@at_once("options")
def _log_probs(x, w, columns, where, tokens: Tokens, options: Options):
    losses, _ = _weighted_losses(x, w, columns, where, None, tokens, options)
    if jnp.shape(tokens.labels)[-1:] == (0,) and losses.ndim == jnp.ndim(x):
        losses = losses[..., :0]
    return 0 - losses  # not -losses: tokens left out get 0, not -0


@at_once("options")
def _token_stats(x, w, columns, where, tokens: Tokens, options: Options) -> TokenStats:
    static, arrays = checks.checked_call(x, w, columns, where, None, tokens, options)
    x, w, columns, _, tokens = arrays
    static = static._replace(head=dataclasses.replace(static.head, entropy=True))
    *floats, bits = derivatives.per_token(static, x, w, columns, tokens)
    losses, entropy, logsumexp = (tokens.zero_if_left_out(differentiable_if_finite(a)) for a in floats)
    argmax = tokens.zero_if_left_out(jax.lax.bitcast_convert_type(bits, jnp.int32))
    return TokenStats(None if tokens.labels is None else 0 - losses, entropy, logsumexp, argmax)


@at_once("options", "reduction")
def _total(x, w, columns, where, token_weights, tokens: Tokens, options: Options, reduction: Reduction):
    """Returns the weighted sum of the losses, or for "mean" their weighted mean; and the logsumexp of each token."""
    static, arrays = checks.checked_call(x, w, columns, where, token_weights, tokens, options)
    x, w, columns, weights, tokens = arrays
    if weights is None:
        weights = tokens.zero_if_left_out(jnp.ones(x.shape[:-1], widen(x).dtype))
        weights = weights / jnp.maximum(jnp.sum(weights), 1) if reduction == "mean" else weights
    elif reduction == "mean":
        weights = formulas.shares(weights)
    if x.dtype == jnp.float16:  # see `derivatives.total`
        losses, logsumexp = derivatives.per_token(static, x, w, columns, tokens)
        losses = formulas.weighted_sum(differentiable_if_finite(losses), weights)
        total = differentiable_if_finite(losses)
    else:
        total, logsumexp = derivatives.total(static, x, w, columns, tokens, weights)
    return total, jnp.where(weights == 0, 0, jax.lax.stop_gradient(logsumexp))
