"""Candidates and winners: how they lie in shared memory, and how kernels read and write them.

A candidate is an element that may be among the k best of its row. Each candidate has an entry of 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is an int32 that orders elements like lax.top_k (`sort_keys.py`). With its sign bit inverted, it has the same
order as an unsigned number. The index counts in the row. A lower index has a larger complement. So an entry, read as
one unsigned 64-bit number, orders the candidates: the larger number is the better candidate, and among equal keys the
lower index wins. No two candidates are equal. An empty entry is 0, and lower than any candidate.

A compact window lists 16-bit positions instead, because entries of 8 bytes would not fit next to the row. When the row
is no longer needed, `candidates_ptx.expand_positions` turns the positions into candidates in the memory of the row.

The k best candidates are the winners. `write_winners` writes their values and indices to the output arrays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import sort_keys
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Condition, Value
from pallas_softmax._src.normalizers import Normalizer, Scale, log_of_sum, scale_of
from pallas_softmax._src.normalizers import scaled as times
from pallas_softmax._src.topk.plan import padded_winners

CANDIDATE_BYTES, POSITION_BYTES = 8, 2
LOADED_AT_ONCE = 8  # loads that a thread has in flight, an estimate
LOWEST_KEY = -(2**31)  # its only bit is the sign, which entries invert


@dataclasses.dataclass(frozen=True)
class CandidateList:
    """A list of candidates, and what it takes to put them in order."""

    address: Value  # of the first entry
    n: Value  # number of candidates; entries from number n on are empty
    capacity: int  # number of entries
    buckets: Value  # the address of scratch, one word for each entry
    ranked: Value  # the address where the k best go, in order: keys, then indices from padded_winners(k) on
    k: int  # number of winners
    dtype: Any  # dtype of the logits
    vocab: int | None  # an exclusive upper bound of the indices, or None

    def at(self, p: Program, entry: Value) -> Value:
        """Returns the address of an entry."""
        return p.at(self.address, entry, CANDIDATE_BYTES)


def clear(p: CtaProgram, address: Value, size: int, counts: Value) -> None:
    """Sets a list of `size` bytes to 0, 16 bytes per thread at a time, and the first two words of `counts`."""
    p.barrier()
    at, turn = p.at(address, p.thread, ACCESS_BYTES), p.var(p.thread)
    with p.repeat() as again:
        p.store(at, 0, 0, 0, 0)
        p.increase(at, ACCESS_BYTES * WARPGROUP)
        p.increase(turn, WARPGROUP)
        again(turn < size // ACCESS_BYTES)
    p.store(counts, 0, 0, when=p.thread.equals(0))
    p.barrier()


def candidate_of(p: Program, key: Value, index: Value) -> Value:
    """Returns a candidate as one 64-bit number."""
    return p.join(~index, key ^ LOWEST_KEY)


def store_winners(
    p: Program, ranked: Value, winners: Sequence[Value], rank: Value, k: int, when: Condition = None
) -> None:
    """Writes candidates with ranks `rank`, rank + 1, ... to the address `ranked`. Ranks from k on are skipped.

    <ranked>  | key of rank 0, 1, ... padded_winners(k) - 1 | index of rank 0, 1, ... |
    """
    at = p.at(ranked, rank, 4)
    for i, winner in enumerate(winners):
        wins = rank.bits("s32") < k - i if when is None else when & (rank.bits("s32") < k - i)
        low, high = p.split(winner)
        p.store(at, high ^ LOWEST_KEY, offset=4 * i, when=wins)
        p.store(at, ~low, offset=4 * (padded_winners(k) + i), when=wins)


def sort_winners(ranked, keys, indices, inside, k: int) -> None:
    """Writes the k best of the elements `inside` to `ranked` in the same format; only the interpreter runs this."""
    _, keys, indices = lax.sort((jnp.logical_not(inside), ~keys, indices), num_keys=3)
    padded = padded_winners(k)
    ranked[:k] = ~keys[:k]
    ranked[padded : padded + k] = indices[:k]


# --- Winners


@dataclasses.dataclass(frozen=True)
class Request:
    """The settings of a call of top-k."""

    k: int  # number of winners of a row
    logits_dtype: Any  # the keys order numbers of this dtype
    masked: bool  # whether there is a mask; then the lowest key means a masked element
    log: bool  # whether the values are logs of probabilities
    dtype: Any  # dtype of the values
    scaled: bool = False  # whether the temperature may differ from 1, and so may be 0
    normalized: bool = True  # whether the values are probabilities; if not, they are the winners as they are

    def scale(self, reciprocals, row) -> Any:
        """Returns 1 / temperature of a row as the formulas take it; None if nothing is normalized."""
        if reciprocals is None:
            return None
        reciprocal = reciprocals[row if reciprocals.shape[0] > 1 else 0]
        return scale_of(reciprocal) if self.scaled else reciprocal


class WinnerLists(NamedTuple):
    """Lists of k winners, the best first, and for each list the normalizer of the row or part that it came from.

    `values` are the probabilities of the winners, their logs, or the winners as they are. Until the lists of a row are
    merged into one, they are the winners' keys (int32).
    """

    values: Any  # (lists, k)
    indices: Any  # (lists, k) int32, in the row
    m: Any = None  # (lists,) float32, the normalizers' maxima; None if nothing is normalized
    d: Any = None  # (lists,) float32, the normalizers' sums; None if nothing is normalized


def lists_type(lists: int, request: Request, final: bool) -> WinnerLists:
    """Returns the shapes and dtypes of the arrays for `lists` lists. `final` lists have values instead of keys."""
    values = jax.ShapeDtypeStruct((lists, request.k), request.dtype if final else jnp.int32)
    indices = jax.ShapeDtypeStruct((lists, request.k), jnp.int32)
    if not request.normalized:
        return WinnerLists(values, indices)
    per_list = jax.ShapeDtypeStruct((lists,), jnp.float32)
    return WinnerLists(values, indices, per_list, per_list)


def write_winners(
    lists_gmem: WinnerLists, at, ranked, normalizer: Normalizer | None, scale, request: Request, final: bool
):
    """Writes ranked winners and the normalizer of their row, or part of a row, as list number `at`.

    `lists_gmem` refers to the arrays of `lists_type`. `ranked` refers to shared memory in the format of
    `CandidateList.ranked`, as int32 or float32. `scale` belongs to the row. If `final`, the winners' values are written
    instead of their keys. The normalizer and the scale are None if nothing is normalized.
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
    if normalizer is not None:
        lists_gmem.m[at], lists_gmem.d[at] = normalizer


def probability(key, dtype, normalizer: Normalizer | None, scale, *, log: bool, masked: bool):
    """Returns the probability of the element with this key, or its log, in float32; `dtype` is the logits' dtype.

    d of the normalizer is the sum of exp((x - m) * scale). If `masked`, the lowest key means a masked element, with
    probability 0. Without a normalizer, returns the element itself, -inf if masked.
    """
    if normalizer is None:
        value = sort_keys.element_of_key32(key, dtype)
        if not masked:
            return value
        return jnp.where(key == sort_keys.lowest_key(dtype), jnp.full_like(value, -jnp.inf), value)
    scaled = times(sort_keys.from_key32(key, dtype) - normalizer.m, scale)
    if isinstance(scale, Scale):  # at temperature 0, any negative number is -inf
        scaled = jnp.where((scale.again > 1) & (scaled < 0), -jnp.inf, scaled)
    value = scaled - log_of_sum(normalizer.d) if log else jnp.exp(scaled) / normalizer.d
    if not masked:
        return value
    return jnp.where(key == sort_keys.lowest_key(dtype), -jnp.inf if log else 0.0, value)
