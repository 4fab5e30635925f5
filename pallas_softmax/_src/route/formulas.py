"""The weights of a router and their derivative, stated once for plain JAX and for the kernels.

Let x be the logits of a row, and p = softmax(x) with the normalizer (m, d). The scores are p, sigmoid(x), or the square
root of softplus(x) = log(1 + exp(x)). The weight of a winner is its score, or its share of the winners' scores, times
`scale`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


class Groups(NamedTuple):
    """The groups of experts of a router."""

    count: int  # 1 if all groups take part
    top: int  # the number of groups that take part
    best: int  # the number of best entries that a group's rank adds up


@dataclasses.dataclass(frozen=True)
class Gate:
    """How logits become weights.

    The methods take the logits `x` of the winners, with -inf at places without a winner. They take the `normalizer`
    (m, d) of the row, spread over the winners, and use it if `needs_normalizer`. `over_row` reduces over the winners.
    """

    score: Score  # the name of the score
    renormalize: bool  # whether the weights of the winners are divided by their sum
    scale: float  # the factor of all weights

    @property
    def needs_normalizer(self) -> bool:
        return self.score == "softmax" and not self.renormalize

    def weights(self, x, normalizer: Any, over_row: "RowReductions"):
        if self.renormalize:
            weight = _shares(self.score, x, over_row)
        elif self.score == "softmax":
            m, d = normalizer
            weight = jnp.exp(x - m) / d
        else:
            weight = score_alone(self.score, x)
        return self._scaled(weight)

    def cotangents(self, x, normalizer: Any, g, g_logsumexp, over_row: "RowReductions") -> tuple[Any, Any]:
        """Returns (direct, rest): the cotangent of a logit is p rest, and for a winner p rest + direct.

        g has the cotangents of the winners' weights, 0 at places without a winner. g_logsumexp, spread over the
        winners, has the cotangent of the row's logsumexp.
        """
        if self.renormalize:
            share = _shares(self.score, x, over_row)
            direct = self._scaled(share * (g - over_row.total(g * share)))
        else:
            direct = g * self.weights(x, normalizer, over_row)
        rest = g_logsumexp - over_row.total(direct) if self.needs_normalizer else g_logsumexp
        return self._by_logit(x, direct), rest

    def tangents(self, x, normalizer: Any, dx, mean, over_row: "RowReductions"):
        """Returns the transpose of `cotangents`. `mean` is the sum of p dx over the whole row."""
        dlog = self._by_logit(x, dx)
        if self.renormalize:
            share = _shares(self.score, x, over_row)
            return self._scaled(share * (dlog - over_row.total(share * dlog)))
        return self.weights(x, normalizer, over_row) * (dlog - mean if self.score == "softmax" else dlog)

    def _by_logit(self, x, a):
        """Returns a times the derivative of log(score) in the winner's own logit; of "softmax", with p's sum fixed."""
        if self.score == "softmax":
            return a
        if self.score == "sigmoid":
            return a * lax.logistic(-x)
        # sigmoid(x) / (2 softplus(x))
        return a * (1 / (2 * (1 + jnp.exp(-jnp.abs(x))) * _softplus_ratio(x)))

    def _scaled(self, weight):
        return weight if self.scale == 1 else weight * self.scale


@dataclasses.dataclass(frozen=True)
class RowReductions:
    """Reductions over the winners of each row, spread over the winners."""

    largest: Callable[[Any], Any]
    total: Callable[[Any], Any]


def _shares(score: Score, x, over_row: RowReductions):
    """Returns the winners' scores over their sum. A common factor makes the largest 1, or at least 1/2."""
    top = over_row.largest(x)
    if score == "softmax":
        share = jnp.exp(x - top)
    elif score == "sqrtsoftplus":
        share = jnp.exp((_negative(x) - jnp.minimum(top, 0)) / 2) * _root(_softplus_ratio(x))
    else:  # sigmoid(x) = exp(min(x, 0)) / (1 + exp(-|x|))
        share = jnp.exp(_negative(x) - jnp.minimum(top, 0)) / (1 + jnp.exp(-jnp.abs(x)))
    return share / over_row.total(share)


def score_alone(score: Score, x):
    """Returns the scores, for a score that depends on no other logit."""
    if score == "sigmoid":
        return lax.logistic(x)
    return jnp.exp(_negative(x) / 2) * _root(_softplus_ratio(x))


def _softplus_ratio(x):
    """Returns softplus(x) / exp(min(x, 0)): at least log(2), also where softplus(x) underflows."""
    positive = jnp.where(x < 0, 0, x)
    return positive + _log1p_ratio(jnp.exp(-jnp.abs(x))) * jnp.exp(-positive)


def _negative(x):
    """Returns min(x, 0). At 0 it has the derivative of x > 0. JAX's |x| has that too, and formulas have both."""
    return jnp.where(x < 0, x, 0)


def _log1p_ratio(e):
    """Returns log(1 + e) / e for e from 0 to 1, by the series of 2 artanh(e / (2 + e)) / e.

    It is exact to the last digits at e = 0 as well. A GPU's fast logarithm is not accurate near 1.
    """
    square = (e / (2 + e)) ** 2  # at most 1/9
    terms = 8 if e.dtype == jnp.float32 else 18
    total = jnp.full_like(square, 1 / (2 * terms - 1))
    for n in range(2 * terms - 3, 0, -2):
        total = total * square + 1 / n
    return 2 / (2 + e) * total


def _root(y):
    """The square root of y > 0. Pallas of jax 0.10 has only its reciprocal."""
    return jnp.where(y == jnp.inf, y, y * lax.rsqrt(y))
