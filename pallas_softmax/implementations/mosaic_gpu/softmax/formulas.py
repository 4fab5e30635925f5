"""What the softmax kernels compute: a reduction of each row, and what is made of the row by its result.

Plain jax.numpy on blocks in registers (float32), the same for every way in which rows lie over a GPU.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_softmax import online
from pallas_softmax.implementations.mosaic_gpu.device import sort_keys
from pallas_softmax.online import Normalizer, shift


class Reduction(NamedTuple):
    """An associative and commutative reduction of blocks.

    Attributes:
      lift: a block as a state for each of its elements.
      absorb: (state, blocks), the blocks added to the state, lane by lane.
      across: the state's elements merged, all or along an axis; see `online.across`.
      merge: the operator.
      empty: the state of no elements.
      neutral: an element that changes nothing.
    """

    lift: Callable[[Any], Any]
    absorb: Callable[[Any, list], Any]
    across: Callable[..., Any]
    merge: Callable[[Any, Any], Any]
    empty: Any
    neutral: float


ONLINE = Reduction(
    lift=lambda x: Normalizer(x, jnp.ones_like(x)),
    absorb=online.absorb,
    across=online.across,
    merge=online.combine,
    empty=Normalizer(-jnp.inf, 0.0),  # pyright: ignore[reportArgumentType]
    neutral=-jnp.inf,
)
SUM = Reduction(
    lift=lambda x: x,
    absorb=lambda total, blocks: total + online.tree_sum(blocks),
    across=lambda x, axis=None, spread=None: jnp.sum(x, axis),
    merge=operator.add,
    empty=0.0,
    neutral=0.0,
)


class Operation(NamedTuple):
    """A function of the rows of one or two arrays.

    Attributes:
      reduction: of the terms.
      term: of the row's elements; masked ones are neutral.
      constants: what the values need of the reduction's result.
      value: (elements, constants), what is written; None writes the constants, a number a row each.
      masked: what is written at masked positions.
      per_row: the number of constants, where they are what is written.
    """

    reduction: Reduction
    term: Callable[..., Any]
    constants: Callable[[Any], tuple]
    value: Callable[..., Any] | None = None
    masked: float = 0.0
    per_row: int = 0


def _log(d):
    """log(d), accurate near 1, too, where the approximate one is not: d - 1 is what other logits add."""
    u = d - 1
    return jnp.where(jnp.abs(u) < 2**-6, u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4))), jnp.log(d))


def weight(key, dtype, total: Normalizer, scale, *, log: bool, masked: bool):
    """The probability, or its log, of the element of `dtype` with this key; of the lowest key, if `masked`, 0.

    Args:
      total: m, and d, the sum of exp((x - m) scale).
    """
    scaled = (sort_keys.of_key(key, dtype) - total.m) * scale
    value = scaled - _log(total.d) if log else jnp.exp(scaled) / total.d
    return jnp.where(key == sort_keys.lowest_key(dtype), -jnp.inf if log else 0.0, value) if masked else value


def _logsumexp(total: Normalizer) -> tuple:
    m, d = total
    return jnp.where(m == jnp.inf, m, m + _log(d)), m, d  # +inf among numbers: the sum is +inf, not NaN


softmax = Operation(
    ONLINE,
    term=lambda x: x,
    constants=lambda total: (shift(total.m), 1 / total.d),
    value=lambda x, s, scale: jnp.exp(x - s) * scale,
)
log_softmax = Operation(
    ONLINE,
    term=lambda x: x,
    constants=lambda total: (total.m, _log(total.d)),
    value=lambda x, m, log_d: x - m - log_d,
    masked=-jnp.inf,
)
logsumexp = Operation(ONLINE, term=lambda x: x, constants=_logsumexp, per_row=3)
softmax_grad = Operation(
    SUM,
    term=lambda y, dy: y * dy,
    constants=lambda total: (total,),
    value=lambda y, dy, total: y * (dy - total),
)
log_softmax_grad = Operation(
    SUM,
    term=lambda y, dy: dy,
    constants=lambda total: (total,),
    value=lambda y, dy, total: dy - jnp.exp(y) * total,
)

FORMULAS = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "softmax_grad": softmax_grad,
    "log_softmax_grad": log_softmax_grad,
}
