"""The first derivatives of the linear_* functions, in reverse mode.

per_token    The forward saves the statistics of each token. The backward computes the logits again.
total        The forward already computes the gradients of a weighted sum. The backward multiplies them by the
             cotangent of the sum, one number. In float16, gradients that are rounded before could overflow or become 0.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import share_cotangent, sum_cotangents, vary_together
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.losses import Columns, Head, Statistics, Tokens
from pallas_softmax._src.linear.mesh import as_tokens, given_specs, lay_out
from pallas_softmax._src.masks import is_column

# Any: pyright does not see what the functions return
_differentiable: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


class Static(NamedTuple):
    """Everything about a call that is known while tracing; hashable."""

    forward: Choice  # computes the statistics
    gradient: Choice
    head: Head
    workspace_bytes: int
    vocab: int  # the number of columns of a whole row

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return self.forward.call.mesh_axes

    def run(self, choice: Choice, *arrays, **keywords):
        keywords |= {"head": self.head, "workspace_bytes": self.workspace_bytes}
        return as_tokens(choice, *arrays, **keywords)

    def losses(self, statistics: Statistics, tokens: Tokens) -> jax.Array:
        return formulas.token_losses(self.forward.call.function, statistics, tokens, self.vocab)

    def share(self, cotangent) -> Any:
        """Returns a device's share of the cotangent of an argument that is the same on all devices; None stays."""
        return jax.tree.map(lambda a: share_cotangent(a, self.mesh_axes), cotangent)

    def cotangents(self, dx, dw, dbias, dprobs) -> tuple:
        """Returns the cotangents of x, w, columns and tokens. A teacher has none."""
        dtokens = None if dprobs is None else Tokens(None, label_probs=self.share(dprobs))
        return self.share(dx), dw, Columns(dbias), dtokens

    def label_cotangents(self, statistics: Statistics, tokens: Tokens, weights) -> jax.Array | None:
        """Returns the gradient of sum(weights * losses) in label_probs, if there are any; 0 where it is not finite."""
        if tokens.label_probs is None:
            return None
        each = formulas.losses(statistics, tokens._replace(label_probs=None, z_loss=None), self.vocab)
        valid = is_column(tokens.labels, self.vocab) & jnp.isfinite(each)
        weights = tokens.at_0(0, weights)[..., None]
        return jnp.where(valid & (weights != 0), each, 0) * weights


# ---- The losses or statistics of each token


@_differentiable
def per_token(static: Static, x, w, columns: Columns, tokens: Tokens) -> Any:
    """Returns the loss of each token, and its logsumexp, which has no derivative.

    If the projection has `Head.entropy`, it returns the loss, the entropy, the logsumexp, all with derivatives, and the
    argmax: a float32 with the bits of the int32.
    """
    return _values(static, static.run(static.forward, x, w, columns, tokens), tokens)


def _values(static: Static, statistics: Statistics, tokens: Tokens) -> Any:
    losses, logsumexp = static.losses(statistics, tokens), formulas.logsumexp(statistics, tokens)
    if statistics.argmax is None:
        return losses, logsumexp
    bits = jax.lax.bitcast_convert_type(statistics.argmax, jnp.float32)
    return losses, normalizers.entropy(statistics.normalizer), logsumexp, bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The residuals of `per_token`: the arguments, their statistics, and whether dw is wanted."""

    arguments: tuple
    statistics: Statistics
    with_dw: bool = dataclasses.field(metadata={"static": True})
    given: Any = dataclasses.field(metadata={"static": True})  # the `given_specs` of x, w and columns


def _per_token_forward(static: Static, *primals):
    arrays, with_dw = _arrays(static, *primals)
    given = given_specs(*arrays[:3])
    arrays = lay_out(arrays, static.head, static.mesh_axes, gathered=True)  # once, for both passes
    tokens, statistics = arrays[3], static.run(static.forward, *arrays)
    return _values(static, statistics, tokens), _Saved(arrays, statistics, with_dw, given)


def _per_token_backward(static: Static, saved: _Saved, cotangents):
    *of_floats, _ = cotangents  # the last result has no derivative
    if static.head.entropy:
        zeros = jnp.zeros_like(saved.statistics.normalizer.m)
        of_floats = [zeros if isinstance(g, SymbolicZero) else g for g in of_floats]
    weights, *others = sum_cotangents(of_floats, static.mesh_axes)
    if others:
        # not jnp.stack: JAX cannot batch it along Explicit axes
        weights = jnp.concatenate([g[..., None] for g in vary_together(weights, *others)], -1)
    arrays = (*saved.arguments, weights, saved.statistics)
    _, dx, dw, dbias = static.run(static.gradient, *arrays, with_dw=saved.with_dw, given=saved.given)
    dprobs = static.label_cotangents(saved.statistics, saved.arguments[3], weights)
    return static.cotangents(dx, dw, dbias, dprobs)


per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)


# ---- A weighted sum of the losses


@_differentiable
def total(static: Static, x, w, columns: Columns, tokens: Tokens, weights):
    """Returns the sum of weights * losses, and the logsumexp of each token, which has no derivative.

    A loss of weight 0 may be NaN; the gradient in its weight is 0. A cotangent of 0 gives gradients of 0, even where 0
    times the saved gradient is NaN. The derivatives of a sum that is not finite are 0.
    """
    statistics = static.run(static.forward, x, w, columns, tokens)
    value = formulas.weighted_sum(static.losses(statistics, tokens), weights)
    return value, formulas.logsumexp(statistics, tokens)


def _total_forward(static: Static, *primals):
    arrays, with_dw = _arrays(static, *primals)
    tokens, weights = arrays[3:]
    statistics, *gradients = static.run(static.gradient, *arrays, with_dw=with_dw)
    losses = static.losses(statistics, tokens)
    dweights = jnp.where(weights == 0, 0, losses) if primals[4].perturbed else None
    probs = primals[3].label_probs
    is_wanted = probs is not None and probs.perturbed
    dprobs = static.label_cotangents(statistics, tokens, weights) if is_wanted else None
    value = formulas.weighted_sum(losses, weights)
    finite = jnp.isfinite(value)
    # The operation returned gradients of 0 if the sum is not finite. They are not made 0 in the backward: there, XLA
    # can leave out the product with a cotangent of 1 only if it is a constant.
    dweights, dprobs = jax.tree.map(lambda g: jnp.where(finite, g, 0), (dweights, dprobs))
    return (value, formulas.logsumexp(statistics, tokens)), ((*gradients, dweights, dprobs), finite)


def _total_backward(static: Static, saved, cotangents):
    gradients, finite = saved
    dtotal, _ = cotangents
    dtotal = sum_cotangents(dtotal, static.mesh_axes)
    dtotal = jnp.where(jnp.isfinite(dtotal) | finite, dtotal, 0)

    def times_dtotal(g):
        left_out, wide = dtotal == 0, normalizers.widen(g)
        return jnp.where(left_out, 0, wide * dtotal.astype(wide.dtype)).astype(g.dtype)

    dx, dw, dbias, dweights, dprobs = jax.tree.map(times_dtotal, gradients)
    return *static.cotangents(dx, dw, dbias, dprobs), static.share(dweights)


total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


def _arrays(static: Static, *primals) -> tuple[tuple[Any, ...], bool]:
    """Returns the arrays of a forward's `primals`, trees of `CustomVJPPrimal`s, and whether dw is wanted."""
    _, w, _, tokens, *_ = primals
    for name, number in tokens._asdict().items():
        if number is not None and name not in ("labels", "label_probs") and number.perturbed:
            raise NotImplementedError(
                f"{static.forward.call.function}: there is no gradient in {name}; wrap it in jax.lax.stop_gradient"
            )
    arrays = jax.tree.map(lambda a: a.value, primals, is_leaf=lambda a: isinstance(a, CustomVJPPrimal))
    return arrays, w.perturbed
