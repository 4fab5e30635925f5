"""Winners: how a kernel turns ranked candidates into values and indices, and writes them to its output arrays."""

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
    """The settings of a call of top-k."""

    k: int  # number of winners of a row
    logits_dtype: Any  # the keys order numbers of this dtype
    masked: bool  # whether there is a mask; then the lowest key means a masked element
    log: bool  # whether the values are logs of probabilities
    dtype: Any  # dtype of the values


class WinnerLists(NamedTuple):
    """Lists of k winners, the best first, and for each list the normalizer of the row or part that it came from.

    `values` are the probabilities of the winners, or their logs. Until the lists of a row are merged into one, they are
    the winners' keys (int32).
    """

    values: Any  # (lists, k)
    indices: Any  # (lists, k) int32, in the row
    m: Any  # (lists,) float32, the normalizers' maxima
    d: Any  # (lists,) float32, the normalizers' sums


def lists_type(lists: int, request: Request, final: bool) -> WinnerLists:
    """Returns the shapes and dtypes of the arrays for `lists` lists. `final` lists have values instead of keys."""
    values = jax.ShapeDtypeStruct((lists, request.k), request.dtype if final else jnp.int32)
    indices = jax.ShapeDtypeStruct((lists, request.k), jnp.int32)
    per_list = jax.ShapeDtypeStruct((lists,), jnp.float32)
    return WinnerLists(values, indices, per_list, per_list)


def write_winners(
    lists_gmem: WinnerLists, at, ranked, normalizer: Normalizer, scale, request: Request, final: bool
):
    """Writes ranked winners and the normalizer of their row, or part of a row, as list number `at`.

    `lists_gmem` refers to the arrays of `lists_type`. `ranked` refers to shared memory in the format of
    `CandidateList.ranked`, as int32 or float32. `scale` is 1 / temperature of the row. If `final`, the winners' values
    are written instead of their keys.
    """
    k = request.k
    for first in range(0, k, WARPGROUP):
        key, index = (
            blocks.load(ranked.at[pl.ds(start, WARPGROUP)]) for start in (first, padded_winners(k) + first)
        )
        if ranked.dtype != jnp.int32:  # `ranked` is in the memory of a float32 row
            key, index = (lax.bitcast_convert_type(a, jnp.int32) for a in (key, index))
        value = key
        if final:
            value = probability(
                key, request.logits_dtype, normalizer, scale, log=request.log, masked=request.masked
            )
        for gmem, block in ((lists_gmem.values, value), (lists_gmem.indices, index)):
            held = min(WARPGROUP, k - first)
            blocks.store_to_row(gmem, row=at, start=first, block=block, held=held)
    lists_gmem.m[at], lists_gmem.d[at] = normalizer


def probability(key, dtype, normalizer: Normalizer, scale, *, log: bool, masked: bool):
    """Returns the probability of the element with this key, or its log, in float32; `dtype` is the logits' dtype.

    d of the normalizer is the sum of exp((x - m) * scale). If `masked`, the lowest key means a masked element, with
    probability 0.
    """
    scaled = (sort_keys.of_key(key, dtype) - normalizer.m) * scale
    value = scaled - log_of_sum(normalizer.d) if log else jnp.exp(scaled) / normalizer.d
    if not masked:
        return value
    return jnp.where(key == sort_keys.lowest_key(dtype), -jnp.inf if log else 0.0, value)
