"""The first derivatives of the linear_* functions, in reverse mode.

per_token    The forward saves the statistics of each token. The backward computes the logits again.
total        The forward already computes the gradients of a weighted sum. The backward multiplies them by the
             cotangent of the sum, one number.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from pallas_softmax_base._src import normalizers
from pallas_softmax_base._src.dispatch.mesh_types import share_cotangent, sum_cotangents, vary_together
from pallas_softmax_base._src.dispatch.operation import Choice
from pallas_softmax_base._src.linear import losses as formulas
from pallas_softmax_base._src.linear.losses import Head, Statistics, Tokens
from pallas_softmax_base._src.linear.vmap import as_tokens


class Static(NamedTuple):
    """Everything about a call that is known while tracing; hashable.

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

    def run(self, choice: Choice, *arrays, **keywords):
        """Runs `forward` or `gradient`."""
        keywords |= {"head": self.head, "workspace_bytes": self.workspace_bytes}
        return as_tokens(choice, *arrays, **keywords)

    def losses(self, statistics: Statistics, tokens: Tokens) -> jax.Array:
        """Returns the loss of each token, NaN for a label out of range; without labels, its logsumexp.

        With a logit of +inf, logsumexp and cross entropy are +inf. The loss of another function is then NaN, so that
        its log-prob is NaN, as in `log_softmax`.
        """
        if tokens.labels is None:
            return normalizers.log_of(statistics.normalizer)
        losses = formulas.losses(statistics, tokens, self.vocab)
        valid = (tokens.labels >= 0) & (tokens.labels < self.vocab)
        d = statistics.normalizer.d
        if self.function != "linear_cross_entropy":  # d is NaN with a logit of +inf
            valid = valid & formulas.like_labels(d == d, losses)
        return jnp.where(valid, losses, jnp.nan)


# ---- The losses or statistics of each token


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def per_token(static: Static, x, w, bias, tokens: Tokens) -> Any:
    """Returns the loss of each token, or its statistics if the projection has `Head.entropy`.

    The statistics are log-probs (0 without labels), entropies, logsumexp and argmax. The argmax has the bits of its
    int32 in a float32.
    """
    return _values(static, static.run(static.forward, x, w, bias, tokens), tokens)


def _values(static: Static, statistics: Statistics, tokens: Tokens) -> Any:
    if not static.head.entropy:
        return static.losses(statistics, tokens)
    entropy, logsumexp = normalizers.entropy(statistics.moments), normalizers.log_of(statistics.normalizer)
    assert statistics.argmax is not None
    bits = jax.lax.bitcast_convert_type(statistics.argmax, jnp.float32)
    without_labels = tokens.labels is None
    log_probs = jnp.zeros_like(entropy) if without_labels else 0 - static.losses(statistics, tokens)
    return log_probs, entropy, logsumexp, bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The residuals of `per_token`: the arguments, their statistics, and whether dw is wanted."""

    arguments: tuple
    statistics: Statistics
    with_dw: bool = dataclasses.field(metadata={"static": True})


def _per_token_forward(static: Static, *primals):
    (x, w, bias, tokens), with_dw = _arrays(static, *primals)
    statistics = static.run(static.forward, x, w, bias, tokens)
    return _values(static, statistics, tokens), _Saved((x, w, bias, tokens), statistics, with_dw)


def _per_token_backward(static: Static, saved: _Saved, cotangents):
    if static.head.entropy:
        zeros = jnp.zeros_like(saved.statistics.moments.t)
        cotangents = [zeros if isinstance(g, SymbolicZero) else g for g in cotangents[:3]]
    weights = sum_cotangents(cotangents, static.mesh_axes)
    if static.head.entropy:
        dlog_prob, dentropy, dlogsumexp = weights
        weights = jnp.stack(vary_together(-dlog_prob, dentropy, dlogsumexp), -1)
    arrays = (*saved.arguments, weights, saved.statistics)
    dx, dw, dbias = static.run(static.gradient, *arrays, with_dw=saved.with_dw)
    return share_cotangent(dx, static.mesh_axes), dw, dbias, None


per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)


# ---- A weighted sum of the losses


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(static: Static, x, w, bias, tokens: Tokens, weights):
    """Returns the sum of weights * losses. A loss of weight 0 may be NaN; the gradient in its weight is 0.

    A cotangent of 0 gives gradients of 0, even where 0 times the saved gradient is NaN. A sum that is not finite gets
    the cotangent 0 from `differentiable_if_finite`.
    """
    return weighted_sum(static.losses(static.run(static.forward, x, w, bias, tokens), tokens), weights)


def weighted_sum(losses, weights):
    """Returns the sum of weights * losses without the losses of weight 0."""
    return jnp.sum(formulas.product(jnp.where(weights == 0, 0, losses), weights))


def _total_forward(static: Static, *primals):
    (x, w, bias, tokens, weights), with_dw = _arrays(static, *primals)
    statistics, *gradients = static.run(static.gradient, x, w, bias, tokens, weights, with_dw=with_dw)
    losses = static.losses(statistics, tokens)
    dweights = jnp.where(weights == 0, 0, losses) if primals[4].perturbed else None
    return weighted_sum(losses, weights), (*gradients, dweights)


def _total_backward(static: Static, gradients, dtotal):
    dtotal = sum_cotangents(dtotal, static.mesh_axes)

    def times_dtotal(g):
        return jnp.where(dtotal == 0, 0, normalizers.widen(g) * dtotal).astype(g.dtype)

    dx, dw, dbias, dweights = jax.tree.map(times_dtotal, gradients)
    dweights = None if dweights is None else share_cotangent(dweights, static.mesh_axes)
    return share_cotangent(dx, static.mesh_axes), dw, dbias, None, dweights


total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


def _arrays(static: Static, *primals) -> tuple[tuple[Any, ...], bool]:
    """Returns the arrays of a forward's `primals`, trees of `CustomVJPPrimal`s, and whether dw is wanted.

    Raises:
      NotImplementedError: a gradient in a temperature, label_smoothing or z_loss is wanted.
    """
    _, w, _, tokens, *_ = primals
    for name, number in tokens._asdict().items():
        if number is not None and name != "labels" and number.perturbed:
            raise NotImplementedError(
                f"{static.function}: there is no gradient in {name}; wrap it in jax.lax.stop_gradient"
            )
    arrays = jax.tree.map(lambda a: a.value, primals, is_leaf=lambda a: isinstance(a, CustomVJPPrimal))
    return arrays, w.perturbed
