"""What the softmax kernels compute: a reduction of each row, and what is made of the row by its result.

These are functions of blocks and tiles in registers, in float32 and plain jax.numpy, and the same for every way
in which rows lie over a GPU.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_softmax import online
from pallas_softmax._src.gpu.arithmetic import log_of_sum
from pallas_softmax.online import Normalizer, shift

F32 = jnp.float32


class Reduction(NamedTuple):
    """An associative and commutative reduction. Its state is one array, or a NamedTuple of arrays.

    Attributes:
      lift: x -> the state of each single element of x.
      absorb: (state, blocks) -> the state with the elements of the blocks added, each thread's to its own.
      across: state -> the state of all its elements together; (state, axis, broadcast) -> the states along an
        axis of a tile, where `broadcast` makes a per-row value as wide as the tile.
      merge: (state, state) -> the state of both, the operator itself.
      empty: the state of no elements.
      neutral: the element that changes no state.
    """

    lift: Callable[[Any], Any]
    absorb: Callable[[Any, list], Any]
    across: Callable[..., Any]
    merge: Callable[[Any, Any], Any]
    empty: Any
    neutral: float


ONLINE = Reduction(
    lift=lambda x: Normalizer(x, jnp.ones_like(x)),  # d is 1 for -inf, too: `across` weighs it by exp(-inf)
    absorb=online.absorb,
    across=online.across,
    merge=online.combine,
    empty=Normalizer(-jnp.inf, 0.0),  # pyright: ignore[reportArgumentType]
    neutral=-jnp.inf,
)
SUM = Reduction(
    lift=lambda x: x,
    absorb=lambda total, blocks: total + online.tree_sum(blocks),
    across=lambda total, axis=None, broadcast=None: jnp.sum(total, axis),
    merge=operator.add,
    empty=0.0,
    neutral=0.0,
)


class Formula(NamedTuple):
    """An operation of the softmax family, on the rows of one or two arrays.

    Attributes:
      reduction: what is reduced along a row.
      term: the elements, one of each array -> the element that is reduced.
      constants: the row's reduction -> the numbers that `value` takes besides the elements.
      value: (*elements, *constants) -> the element that is written. None if the constants themselves are
        written, one number for each row in each of as many arrays.
      masked_value: the element that is written where the mask is False.
      row_dtypes: of the constants, where they are what is written; None is the dtype of the elements.
    """

    reduction: Reduction
    term: Callable[..., Any]
    constants: Callable[[Any], tuple]
    value: Callable[..., Any] | None = None
    masked_value: float = 0.0
    row_dtypes: tuple = ()

    def row_results(self, shape: tuple[int, ...], dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """Returns the constants of all rows, in arrays of this shape; `dtype` is that of the elements."""
        return [jax.ShapeDtypeStruct(shape, own or dtype) for own in self.row_dtypes]


def _logsumexp(total: Normalizer) -> tuple:
    """logsumexp, m and d. With a +inf among the logits the first is +inf, where d is NaN."""
    m, d = total
    return jnp.where(m == jnp.inf, m, m + log_of_sum(d)), m, d


FORMULAS = {
    "softmax": Formula(
        ONLINE,
        term=lambda x: x,
        constants=lambda total: (shift(total.m), 1 / total.d),
        value=lambda x, m, scale: jnp.exp(x - m) * scale,
    ),
    "log_softmax": Formula(
        ONLINE,
        term=lambda x: x,
        constants=lambda total: (total.m, log_of_sum(total.d)),
        value=lambda x, m, log_d: x - m - log_d,
        masked_value=-jnp.inf,
    ),
    "logsumexp": Formula(ONLINE, term=lambda x: x, constants=_logsumexp, row_dtypes=(None, F32, F32)),
    "softmax_grad": Formula(
        SUM,
        term=lambda y, dy: y * dy,
        constants=lambda total: (total,),
        value=lambda y, dy, total: y * (dy - total),
    ),
    "log_softmax_grad": Formula(
        SUM,
        term=lambda y, dy: dy,
        constants=lambda total: (total,),
        value=lambda y, dy, total: dy - jnp.exp(y) * total,
    ),
}
