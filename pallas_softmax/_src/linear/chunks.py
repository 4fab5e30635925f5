"""How the rows of a projection are taken: in chunks, so that the stored logits stay within a bound.

All chunks have the same size. If they do not divide the rows, the last chunk overlaps the one before it, and its
repeated rows do not count again.

Rows that are left out do not take part in the products (`on_kept_rows`):

    rows      a . c . . f . h     "." is left out
    gather    a c f h . . . .     kept rows first
    compute   a c f h .           the first rows only: the smallest of a few sizes that holds the kept rows
    scatter   A . C . . F . H     results in their places
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim

from pallas_softmax._src.dispatch.mesh_types import vary_together

_ROWS = 128  # the rows of a chunk are a multiple of this, if so many fit: the rows of a kernel's tile
# Otherwise a multiple of this, even if 8 do not fit: the rows of an atom (`plan.ATOM_ROWS`).
_FEWEST_ROWS = 8

# With rows left out, this many 64ths of the rows may be computed. A program contains the code for each size, and the
# GPU's host picks one while the program runs. Sizes are a little above the quarters: a random mask keeps a few rows
# more or less than half. For fewer rows, the sizes would save little time.
_PARTS = (17, 33, 49)
_WHOLE = 64
_FEWEST_ROWS_TO_LEAVE_OUT = 1024


def chunk_rows(rows: int, vocab: int, bytes_per_logit: float, workspace_bytes: float) -> int:
    """Returns the number of rows of a chunk: as few chunks as fit, and as even as multiples of `_ROWS` allow."""
    fit = max(_FEWEST_ROWS, math.floor(workspace_bytes / (max(1, vocab) * max(bytes_per_logit, 1e-9))))
    if not isinstance(rows, int):  # a symbolic dimension of jax.export
        return min_dim(rows, fit)
    if rows <= fit:
        return rows
    unit = _ROWS if fit >= _ROWS else _FEWEST_ROWS
    chunks = -(-rows // (fit // unit * unit))
    even = -(-rows // chunks)
    return min(rows, -(-even // unit) * unit)


class Chunk(NamedTuple):
    """Some consecutive rows."""

    start: Any  # the first row; None if the chunk is all rows
    rows: int
    seen: Any  # how many rows, at the start of this chunk, belong to the chunk before it

    def slice(self, arrays):
        if self.start is None:
            return arrays
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, self.start, self.rows), arrays)

    def zero_if_seen(self, part):
        """Returns `part`, a number for each of these rows, with 0 in rows of the chunk before."""
        if self.start is None:
            return part
        return jnp.where(lax.iota(jnp.int32, self.rows) < self.seen, 0, part)


def is_one_chunk(n: int, rows: int) -> bool:
    return rows is n or rows == n  # in `jax.export`, both may be symbolic


def over_chunks(n: int, rows: int, step: Callable[[Chunk, Any], Any], *, with_sums: bool) -> tuple[Any, Any]:
    """Returns the results of all n rows, and sums over them, computed in chunks of `rows`; both change in place.

    `step` maps a chunk, and the sums of the chunks before, to a tree of the results of its rows, and the new sums. The
    sums are None before the first chunk, and without `with_sums` always.
    """
    if is_one_chunk(n, rows):
        return step(Chunk(None, rows, 0), None)

    def body(i, carry):
        results, sums = carry
        start = jnp.minimum(i * rows, n - rows)
        parts, sums = step(Chunk(start, rows, i * rows - start), sums)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(put, results, parts), sums

    def empty(part):
        return vary_together(lax.empty((n, *part.shape[1:]), part.dtype, out_sharding=part.sharding), part)[0]

    first = jnp.int32(0)
    parts, _ = jax.eval_shape(lambda: step(Chunk(first, rows, 0), None))
    carry = jax.tree.map(empty, parts), None
    if with_sums:
        carry = body(first, carry)
        # XLA must not know the length of the loop. A loop of one step would become no loop, and XLA would store the
        # logits of two chunks at a time.
        first = lax.optimization_barrier(first + 1)
    return lax.fori_loop(first, -(-n // rows), body, carry)


def on_kept_rows(function: Callable[[Any], tuple[Any, Any]], kept, rows, left_out) -> tuple[Any, Any]:
    """Returns function(rows), computed from the kept rows.

    Args:
      function: (rows) -> (results of each row, sums over the rows). Rows that are left out must not change the sums.
      kept: boolean (n,), or None for all rows.
      rows: a tree of arrays (n, ...).
      left_out: a number for all results of rows that are left out, or one for each subtree. Some of these rows get
        results of `function` instead, so callers must not use them.
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    if kept is None or not isinstance(n, int) or n < _FEWEST_ROWS_TO_LEAVE_OUT:
        return function(rows)

    def on_first(size: int, rows):
        first = jnp.argsort(~kept, stable=True)[:size]  # kept rows first
        unique = {"mode": "promise_in_bounds", "unique_indices": True}

        def whole(part, number):
            return jnp.full_like(part, number, shape=(n, *part.shape[1:])).at[first].set(part, **unique)

        per_row, sums = function(jax.tree.map(lambda a: a.at[first].get(**unique), rows))
        return jax.tree.map(whole, per_row, jax.tree.broadcast(left_out, per_row)), sums

    sizes = [-(-n * part // _WHOLE // _ROWS) * _ROWS for part in _PARTS]
    too_small = sum((jnp.sum(kept) > size).astype(jnp.int32) for size in sizes)
    return lax.switch(too_small, [*(functools.partial(on_first, size) for size in sizes), function], rows)


# ---- Changes of large arrays without a copy


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
        return at.set(values.at[rows].get(mode="clip"), mode="drop", unique_indices=one, indices_are_sorted=one)

    return lax.fori_loop(0, 2, step, e)


def changed_if(condition: jax.Array, change: Callable[[Any], Any], arrays: Any) -> Any:
    """Returns change(arrays) if the condition holds, else the arrays, which are then neither read nor written.

    A loop of at most one turn, because a loop, unlike a branch, does not copy its operands.
    """

    def once(state):
        return change(state[0]), jnp.zeros_like(state[1])

    return lax.while_loop(lambda state: state[1], once, (arrays, condition))[0]
