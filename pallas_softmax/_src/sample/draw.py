"""The parameters of a row of `sample`, and the draw from a row in plain JAX: a twin, which the interpreter runs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_softmax._src.sample import xla as xla_sample


class SamplingParams(NamedTuple):
    """The parameters of a row, as numbers that `xla_sample.sample` takes.

    A filter that is not wanted has a number that filters nothing: a top_k of the row's length, a top_p of 1, a min_p
    of 0.

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
    """Draws from the row that a CTA has, as the program of `draw_ptx` does.

    Args:
      x: the elements at all positions; -inf where there is none, or where they are masked.
      params: what is asked of the row.

    Returns:
      Scalars: the position drawn or -1, its log probability, and the log of the share of the mass that is kept.
    """
    one_row = jax.tree.map(lambda number: jnp.reshape(number, (1, 1)), params)
    return tuple(result[0, 0] for result in xla_sample.sample(x[None], None, *one_row))
