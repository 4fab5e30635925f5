"""The candidates of a CTA, a list in shared memory: what a slot of it holds, and how it is read and written.

A candidate is an element that may be among the k best of its row. It has a slot of 8 bytes:

    byte     0               4               8
             |    ~ index    | key ^ 2^31    |
             '--- low word --'-- high word --'

The key is the int32 in lax.top_k's order of the elements (`device.sort_keys`); with its sign bit turned it has that
order as an unsigned number. The index counts in the row; the lower it is, the larger is its complement. So the slot
as one unsigned number of 64 bits is the candidate's rank: the larger number is the better candidate, and among
equal keys the one of lower index. No two candidates are equal, and an empty slot, which is 0, is below all.

The functions are in pairs: JAX for the interpreter, and text of PTX, which is told the names of its registers.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGN = np.int32(-(2**31))


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


def store_slot(slots: str, at: str, key: str, index: str, predicate: str = "") -> str:
    """Returns PTX that writes a candidate to slot number `at`.

    Args:
      slots: the address of the list.
      at, key, index: registers (b32), which keep what they hold.
      predicate: "@p" to write it if p holds.
    """
    return f"""{{ .reg .b32 address, low, high; .reg .b64 both;
        mad.lo.u32 address, {at}, 8, {slots}; xor.b32 high, {key}, 0x80000000; not.b32 low, {index};
        mov.b64 both, {{low, high}}; {predicate} st.shared.b64 [address], both; }}"""


def split_slot(slot: str, key: str, index: str) -> str:
    """Returns PTX that takes a slot (register b64) apart into key and index (registers b32)."""
    return f"mov.b64 {{{index}, {key}}}, {slot}; not.b32 {index}, {index}; xor.b32 {key}, {key}, 0x80000000;"
