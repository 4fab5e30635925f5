"""The winners of a list of candidates: their order, their values, and the arrays that a kernel writes them to."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import blocks, sort_keys
from pallas_softmax._src.gpu.arithmetic import log_of_sum
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.topk.plan import padded_winners
from pallas_softmax.online import Normalizer


@dataclasses.dataclass(frozen=True)
class Request:
    """What a call of top-k asks for.

    Attributes:
      k: number of winners of a row.
      logits_dtype: dtype of the logits, whose order the keys have.
      masked: whether there is a mask; then the lowest key stands for a masked element.
      log: whether the values are logs of probabilities.
      dtype: that of the values.
      interpret: None on a GPU; otherwise what `pallas_call` takes to interpret the kernels.
    """

    k: int
    logits_dtype: Any
    masked: bool
    log: bool
    dtype: Any
    interpret: Any


class WinnerLists(NamedTuple):
    """Lists of k winners each, the best first, and the normalizer of what each list was chosen from.

    Attributes:
      values: (lists, k); the probabilities of the winners, or their logs. As long as there are several lists of a
        row to be merged, they are the winners' keys (int32).
      indices: (lists, k) int32; where in the row the winners are.
      m, d: (lists,) float32.
    """

    values: Any
    indices: Any
    m: Any
    d: Any


def lists_type(lists: int, request: Request, final: bool) -> WinnerLists:
    """Returns shape and dtype of the arrays that hold so many lists, `final` or still to be merged."""
    values = jax.ShapeDtypeStruct((lists, request.k), request.dtype if final else jnp.int32)
    indices = jax.ShapeDtypeStruct((lists, request.k), jnp.int32)
    per_list = jax.ShapeDtypeStruct((lists,), jnp.float32)
    return WinnerLists(values, indices, per_list, per_list)


def write_winners(
    lists_gmem: WinnerLists,
    at,
    ranked,
    normalizer: Normalizer,
    scale,
    request: Request,
    final: bool,
):
    """Writes winners in order, and a normalizer, as list number `at`.

    Args:
      lists_gmem: references to the arrays of `lists_type`.
      at: number of the list.
      ranked: the winners in shared memory, as `selection.rank` leaves them, int32 or float32.
      normalizer: of the row, or of the part of it that the candidates are from.
      scale: 1 / temperature of the row.
      request: what the call asks for.
      final: whether to write values, not keys.
    """
    k, interpret = request.k, request.interpret
    for first in range(0, k, WARPGROUP):
        key, index = (
            blocks.load(ranked.at[pl.ds(start, WARPGROUP)], interpret=interpret)
            for start in (first, padded_winners(k) + first)
        )
        if ranked.dtype != jnp.int32:  # in the memory of a row of float32
            key, index = (lax.bitcast_convert_type(a, jnp.int32) for a in (key, index))
        value = key
        if final:
            value = probability(
                key, request.logits_dtype, normalizer, scale, log=request.log, masked=request.masked
            )
        for gmem, block in ((lists_gmem.values, value), (lists_gmem.indices, index)):
            held = min(WARPGROUP, k - first)
            blocks.store_to_row(gmem, row=at, start=first, block=block, held=held, interpret=interpret)
    lists_gmem.m[at], lists_gmem.d[at] = normalizer


def probability(key, dtype, normalizer: Normalizer, scale, *, log: bool, masked: bool):
    """Returns the probability of the element with this key, or its log, in float32.

    Args:
      dtype: that of the logits.
      normalizer: m, and d, the sum of exp((x - m) * scale).
      scale: 1 / temperature.
      log: whether to return the log.
      masked: whether the lowest key stands for a masked element, whose probability is 0.
    """
    scaled = (sort_keys.of_key(key, dtype) - normalizer.m) * scale
    value = scaled - log_of_sum(normalizer.d) if log else jnp.exp(scaled) / normalizer.d
    if not masked:
        return value
    return jnp.where(key == sort_keys.lowest_key(dtype), -jnp.inf if log else 0.0, value)
