"""The draw from a row that lies in shared memory, and its twin in plain JAX, which the interpreter runs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_softmax.implementations import xla_sample
from pallas_softmax.implementations.mosaic_gpu.sample import draw_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window


class Request(NamedTuple):
    """What is asked of a row, in numbers as `xla_sample.sample` takes them.

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


class Place(NamedTuple):
    """Where the part of a CTA lies in the logits, in int32.

    Attributes:
      row: number of the row.
      part: number of the part in it, which is that of the CTA in its cluster.
      origin: index in the row of what is at position 0; it may be negative.
    """

    row: Any
    part: Any
    origin: Any


def draw(
    window: Window, x_smem, scratch, m, scale, request: Request, place: Place, out, *, interpret
) -> None:
    """Draws from a row, and writes its results.

    Args:
      window: how the parts of the row lie in the shared memory of the CTAs.
      x_smem: the elements of this CTA's part, (window.size,); -inf where it has none, or where they are masked.
      scratch: int32 shared memory, of `plan.Scratch(window).words`, with what `arrival.absorb_step` wrote.
      m: (128,) float32, the largest element that each thread has seen, NaN if it has seen one.
      scale: log2(e) / temperature.
      out: references (rows,) to device memory for the index (int32), log probability and log of the kept share
        (float32).
    """
    if not interpret:
        return draw_ptx.draw(window, x_smem, scratch, m, scale, request, place, out)
    del scratch, m, scale  # the twin starts from the elements
    one_row = jax.tree.map(lambda number: jnp.reshape(number, (1, 1)), request)
    index, log_prob, log_mass = xla_sample.sample(x_smem[: window.size][None], None, *one_row)
    index = jnp.where(index < 0, index, index + place.origin)
    for gmem, result in zip(out, (index, log_prob, log_mass), strict=True):
        gmem[place.row] = result[0, 0]
