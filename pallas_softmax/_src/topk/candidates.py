"""The list of a CTA's candidates: how it lies in shared memory, and how PTX reads and writes it.

A candidate is an element that may be among the k best of its row. Each candidate has an entry of 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is an int32 that orders elements like lax.top_k (`gpu.sort_keys`). With its sign bit inverted, it has the same
order as an unsigned number. The index counts in the row. A lower index has a larger complement. So an entry, read as
one unsigned 64-bit number, orders the candidates: the larger number is the better candidate, and among equal keys the
lower index wins. No two candidates are equal. An empty entry is 0, and lower than any candidate.

A compact window lists 16-bit positions instead, because entries of 8 bytes would not fit next to the row. When the row
is no longer needed, `collect_ptx.expand_positions` turns the positions into candidates in the memory of the row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Condition, Value
from pallas_softmax._src.topk.plan import padded_winners

CANDIDATE_BYTES, POSITION_BYTES = 8, 2
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
