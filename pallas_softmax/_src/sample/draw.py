"""The sampling parameters of a row, and a plain-JAX draw from one row, which the interpreter runs instead of PTX."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_softmax._src.sample import xla as xla_sample


class SamplingParams(NamedTuple):
    """The parameters of a row, as numbers that `xla_sample.sample` takes.

    A filter that is off has a value that filters nothing: top_k is the row's length, top_p is 1, min_p is 0.

    Attributes:
      u, temperature, top_p, min_p: float32.
      top_k: int32.
    """

    u: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


def draw(x, params: SamplingParams) -> tuple[jax.Array, ...]:
    """Draws from the row of one CTA; the plain-JAX twin of the program in `draw_ptx`.

    Args:
      x: the elements at all positions. Positions without an element and masked positions hold -inf.
      params: the parameters of the row.

    Returns:
      Scalars: the drawn position or -1, its log probability, and the log of the kept share of the mass.
    """
    one_row = jax.tree.map(lambda number: jnp.reshape(number, (1, 1)), params)
    return tuple(result[0, 0] for result in xla_sample.sample(x[None], None, *one_row))
