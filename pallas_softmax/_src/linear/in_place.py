"""Changes of large arrays without a copy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.dispatch.mesh_types import vary_together


def set_in_place(e: jax.Array, column: jax.Array, values: jax.Array) -> jax.Array:
    """Returns e with e[i, column[i]] = values[i], for (rows,) or (rows, K). A column beyond e changes nothing.

    XLA makes a copy of an array that a `lax.while_loop` returned, except to change it in another loop. A loop of one
    step is no loop for XLA.
    """
    e, column, values = vary_together(e, column, values.astype(e.dtype))  # a loop carries one type
    half, one = -(-len(e) // 2), column.ndim == 1

    def step(i, e):
        rows = i * half + jnp.arange(half)
        columns = column.at[rows].get(mode="fill", fill_value=e.shape[1])
        at = e.at[rows if one else rows[:, None], columns]
        return at.set(
            values.at[rows].get(mode="clip"), mode="drop", unique_indices=one, indices_are_sorted=one
        )

    return lax.fori_loop(0, 2, step, e)


def changed_if(condition: jax.Array, change: Callable[[Any], Any], arrays: Any) -> Any:
    """Returns change(arrays) if the condition holds, else the arrays, which are then neither read nor written.

    A loop of at most one turn, because a loop, unlike a branch, does not copy its operands.
    """

    def once(state):
        return change(state[0]), jnp.zeros_like(state[1])

    return lax.while_loop(lambda state: state[1], once, (arrays, condition))[0]
