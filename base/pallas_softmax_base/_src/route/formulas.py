"""The weights of a router and their derivative, stated once for plain JAX and for the kernels.

Let x be the logits of a row, and p = softmax(x) with the normalizer (m, d). The scores are p or sigmoid(x). The weight
of a winner is its score, or its share of the winners' scores, times `scale`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

Score = Literal["softmax", "sigmoid"]
SCORES = ("softmax", "sigmoid")


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
        """Whether the weights depend on logits that did not win."""
        return self.score == "softmax" and not self.renormalize

    def weights(self, x, normalizer: Any, over_row: "RowReductions"):
        """Returns the weights of the winners."""
        if self.renormalize:
            weight = _shares(self.score, x, over_row)
        elif self.score == "softmax":
            m, d = normalizer
            weight = jnp.exp(x - m) / d
        else:
            weight = lax.logistic(x)
        return self._scaled(weight)

    def cotangents(self, x, normalizer: Any, g, g_logsumexp, over_row: "RowReductions") -> tuple[Any, Any]:
        """Returns (direct, rest): the cotangent of a logit is p rest, and for a winner p rest + direct.

        g has the cotangents of the winners' weights, 0 at places without a winner. g_logsumexp has the cotangent of the
        row's logsumexp, spread over the winners.
        """
        if self.renormalize:
            share = _shares(self.score, x, over_row)
            direct = self._scaled(share * (g - over_row.total(g * share)))
            return (direct if self.score == "softmax" else direct * lax.logistic(-x)), g_logsumexp
        direct = g * self.weights(x, normalizer, over_row)
        if self.score == "softmax":
            return direct, g_logsumexp - over_row.total(direct)
        return direct * lax.logistic(-x), g_logsumexp

    def tangents(self, x, normalizer: Any, dx, mean, over_row: "RowReductions"):
        """Returns the tangents of the weights: the transpose of `cotangents`.

        dx has the tangents of the winners' logits. `mean` is the sum of p dx over the whole row.
        """
        dlog = dx if self.score == "softmax" else dx * lax.logistic(-x)
        if self.renormalize:
            share = _shares(self.score, x, over_row)
            return self._scaled(share * (dlog - over_row.total(share * dlog)))
        return self.weights(x, normalizer, over_row) * (dlog - mean if self.score == "softmax" else dlog)

    def _scaled(self, weight):
        """Returns weights, or their derivatives, times `scale`."""
        return weight if self.scale == 1 else weight * self.scale


@dataclasses.dataclass(frozen=True)
class RowReductions:
    """Reductions over the winners of each row. Each returns one number per row, spread over the winners."""

    largest: Callable[[Any], Any]
    total: Callable[[Any], Any]


def _shares(score: Score, x, over_row: RowReductions):
    """Returns the winners' scores over their sum. A common factor makes the largest 1, or at least 1/2."""
    top = over_row.largest(x)
    if score == "softmax":
        share = jnp.exp(x - top)
    else:  # sigmoid(x) = exp(min(x, 0)) / (1 + exp(-|x|))
        share = jnp.exp(jnp.minimum(x, 0) - jnp.minimum(top, 0)) / (1 + jnp.exp(-jnp.abs(x)))
    return share / over_row.total(share)
