"""The list of a CTA's candidates: how it lies in shared memory, and how it is read and written.

A candidate is an element that may be among the k best of its row. Each candidate has an entry of 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is an int32 that orders elements like lax.top_k (`gpu.sort_keys`). With its sign bit inverted, it has the same
order as an unsigned number. The index counts in the row. A lower index has a larger complement. So an entry, read as
one unsigned 64-bit number, orders the candidates: the larger number is the better candidate, and among equal keys the
lower index wins. No two candidates are equal. An empty entry is 0, and lower than any candidate.

A compact window lists 16-bit positions of its candidates instead, because such a list does not fit next to the row.
When the row is no longer needed, `selection.expand_positions` turns the positions into such a list in the memory of the
row.

`write_candidates` and `ranked_candidates` are JAX, for the interpreter. Functions of a `Program` emit PTX for one
thread.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.gpu.ptx.values import Condition, Program, Value

CANDIDATE_BYTES, POSITION_BYTES = 8, 2
LOWEST_KEY = -(2**31)
_SIGN = np.int32(LOWEST_KEY)


def write_candidates(candidates, at, chosen, key, index):
    """Writes the `chosen` entries of the arrays `key` and `index` to entries `at` of a list, in JAX.

    Numbers beyond the list are dropped.
    """
    capacity = candidates.size // 2
    words = jnp.stack([~index, key ^ _SIGN], axis=1)
    at = jnp.where(chosen, at, capacity)
    candidates[...] = candidates[...].reshape(capacity, 2).at[at].set(words, mode="drop").reshape(-1)


def ranked_candidates(candidates, n):
    """Returns the keys and the indices of all candidates, in JAX. The first n entries are sorted, the best first."""
    index, key = candidates[...].reshape(-1, 2).T
    empty = jnp.arange(index.size) >= n
    _, key, index = lax.sort((empty, ~(key ^ _SIGN), ~index), num_keys=3)
    return ~key, index


def capacity_of(listed) -> int:
    """Returns the capacity of a list of candidates or of positions."""
    return listed.shape[0] if lists_positions(listed) else listed.shape[0] // 2


def lists_positions(listed) -> bool:
    """Returns whether a list holds 16-bit positions."""
    return listed.dtype == np.int16


def store_candidate(
    p: Program, candidates: Value, at: Value, key: Value, index: Value, when: Condition = None
) -> None:
    """Writes a candidate to entry `at` of the list at address `candidates`, in PTX, if `when` holds."""
    address = p.at(candidates, at, CANDIDATE_BYTES)
    p.store(address, candidate_of(p, key, index), when=when)


def candidate_of(p: Program, key: Value, index: Value) -> Value:
    """Returns a candidate as one 64-bit number, in PTX."""
    high, low = key ^ _SIGN, ~index
    return p.join(low, high)


def store_position(p: Program, positions: Value, at: Value, position: Value, when: Condition = None) -> None:
    """Writes a 32-bit position as entry `at` of the list at address `positions`, in PTX, if `when` holds."""
    p.store(p.at(positions, at, POSITION_BYTES), p.convert(position, "u16"), when=when)


def index_and_key(p: Program, candidate: Value) -> tuple[Value, Value]:
    """Returns the index and the key of a candidate, in PTX."""
    low, high = p.split(candidate)
    return ~low, high ^ _SIGN


def store_winners(
    p: Program, winners: Sequence[Value], rank: Value, k: int, padded: int, when: Condition = None
) -> None:
    """Writes candidates with ranks `rank`, rank + 1, ... to <ranked>, in PTX. Ranks from k on are skipped.

    <ranked>  | key of rank 0, 1, ... padded - 1 | index of rank 0, 1, ... padded - 1 |
    """
    at = p.at(p.operand("ranked", "u32"), rank, 4)
    for i, winner in enumerate(winners):
        wins = rank.bits("s32") < k - i if when is None else when & (rank.bits("s32") < k - i)
        index, key = index_and_key(p, winner)
        p.store(at, key, offset=4 * i, when=wins)
        p.store(at, index, offset=4 * (padded + i), when=wins)
