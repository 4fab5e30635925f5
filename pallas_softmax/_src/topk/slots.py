"""The candidates of a CTA, a list in shared memory: what a slot of it holds, and how it is read and written.

A candidate is an element that may be among the k best of its row. It has a slot of 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is the int32 in lax.top_k's order of the elements (`device.sort_keys`); with its sign bit turned it has that
order as an unsigned number. The index counts in the row; the lower it is, the larger is its complement. So the slot
as one unsigned number of 64 bits is the candidate's rank: the larger number is the better candidate, and among
equal keys the one of lower index. No two candidates are equal, and an empty slot, which is 0, is below all.

A compact window lists the positions of its candidates instead, as numbers of 16 bits, since there is no room for slots
as long as the row is needed. Then `selection.fill_slots` makes slots of them where the row was.

`write_slots` and `ranked_slots` are JAX, for the interpreter; functions of a `Program` are PTX, for one thread.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.gpu.ptx.values import Condition, Program, Value

SLOT_BYTES, POSITION_BYTES = 8, 2
LOWEST_KEY = -(2**31)
_SIGN = np.int32(LOWEST_KEY)


def write_slots(slots, at, chosen, key, index):
    """Writes candidates to the list, in JAX: those of the arrays `key` and `index` that are `chosen`, to slots `at`.

    A slot number beyond the list is not written.
    """
    capacity = slots.size // 2
    words = jnp.stack([~index, key ^ _SIGN], axis=1)
    at = jnp.where(chosen, at, capacity)
    slots[...] = slots[...].reshape(capacity, 2).at[at].set(words, mode="drop").reshape(-1)


def ranked_slots(slots, n):
    """Returns the keys and the indices of all slots, in JAX: those of the first n slots in order, the best first."""
    index, key = slots[...].reshape(-1, 2).T
    empty = jnp.arange(index.size) >= n
    _, key, index = lax.sort((empty, ~(key ^ _SIGN), ~index), num_keys=3)
    return ~key, index


def capacity_of(listed) -> int:
    """Returns how many candidates a list has room for, of slots or of positions."""
    return listed.shape[0] if lists_positions(listed) else listed.shape[0] // 2


def lists_positions(listed) -> bool:
    """Returns whether a list has positions of 16 bits, and not slots."""
    return listed.dtype == np.int16


def store_slot(p: Program, slots: Value, at: Value, key: Value, index: Value, when: Condition = None) -> None:
    """Writes a candidate to slot number `at` of the list that starts at address `slots`, in PTX, where `when` holds."""
    address = p.at(slots, at, SLOT_BYTES)
    p.store(address, slot_of(p, key, index), when=when)


def slot_of(p: Program, key: Value, index: Value) -> Value:
    """Returns what the slot of a candidate holds, in PTX."""
    high, low = key ^ _SIGN, ~index
    return p.join(low, high)


def store_position(p: Program, positions: Value, at: Value, position: Value, when: Condition = None) -> None:
    """Writes a position of 32 bits as number `at` of the list that starts at address `positions`, in PTX."""
    p.store(p.at(positions, at, POSITION_BYTES), p.convert(position, "u16"), when=when)


def index_and_key(p: Program, slot: Value) -> tuple[Value, Value]:
    """Returns index and key of the candidate in a slot, in PTX."""
    low, high = p.split(slot)
    return ~low, high ^ _SIGN
