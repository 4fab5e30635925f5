"""Slots: how the list of a CTA's candidates lies in shared memory, and how it is read and written.

A candidate is an element that may be among the k best of its row. Each candidate has a slot of 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is an int32 that orders elements like lax.top_k (`gpu.sort_keys`). With its sign bit inverted, it has the same
order as an unsigned number. The index counts in the row. A lower index has a larger complement. So a slot, read as one
unsigned 64-bit number, orders the candidates: the larger number is the better candidate, and among equal keys the lower
index wins. No two candidates are equal. An empty slot is 0, and lower than any candidate.

A compact window lists 16-bit positions of its candidates instead, because slots do not fit next to the row. When the
row is no longer needed, `selection.fill_slots` turns the positions into slots in the memory of the row.

`write_slots` and `ranked_slots` are JAX, for the interpreter. Functions of a `Program` emit PTX for one thread.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.gpu.ptx.values import Condition, Program, Value

SLOT_BYTES, POSITION_BYTES = 8, 2
LOWEST_KEY = -(2**31)
_SIGN = np.int32(LOWEST_KEY)


def write_slots(slots, at, chosen, key, index):
    """Writes the `chosen` entries of the arrays `key` and `index` to slots `at`, in JAX.

    Slot numbers beyond the list are dropped.
    """
    capacity = slots.size // 2
    words = jnp.stack([~index, key ^ _SIGN], axis=1)
    at = jnp.where(chosen, at, capacity)
    slots[...] = slots[...].reshape(capacity, 2).at[at].set(words, mode="drop").reshape(-1)


def ranked_slots(slots, n):
    """Returns the keys and the indices of all slots, in JAX. The first n slots are sorted, the best first."""
    index, key = slots[...].reshape(-1, 2).T
    empty = jnp.arange(index.size) >= n
    _, key, index = lax.sort((empty, ~(key ^ _SIGN), ~index), num_keys=3)
    return ~key, index


def capacity_of(listed) -> int:
    """Returns the capacity of a list of slots or of positions, in candidates."""
    return listed.shape[0] if lists_positions(listed) else listed.shape[0] // 2


def lists_positions(listed) -> bool:
    """Returns whether a list holds 16-bit positions instead of slots."""
    return listed.dtype == np.int16


def store_slot(p: Program, slots: Value, at: Value, key: Value, index: Value, when: Condition = None) -> None:
    """Writes a candidate to slot number `at` of the list at address `slots`, in PTX, if `when` holds."""
    address = p.at(slots, at, SLOT_BYTES)
    p.store(address, slot_of(p, key, index), when=when)


def slot_of(p: Program, key: Value, index: Value) -> Value:
    """Returns the value of a candidate's slot, in PTX."""
    high, low = key ^ _SIGN, ~index
    return p.join(low, high)


def store_position(p: Program, positions: Value, at: Value, position: Value, when: Condition = None) -> None:
    """Writes a 32-bit position as entry `at` of the list at address `positions`, in PTX, if `when` holds."""
    p.store(p.at(positions, at, POSITION_BYTES), p.convert(position, "u16"), when=when)


def index_and_key(p: Program, slot: Value) -> tuple[Value, Value]:
    """Returns the index and the key of the candidate in a slot, in PTX."""
    low, high = p.split(slot)
    return ~low, high ^ _SIGN
