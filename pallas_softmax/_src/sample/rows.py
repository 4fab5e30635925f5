"""Rows of `sample` in plain JAX: their elements, their totals, and their cutoff, the last entry that the filters keep.

A row is in the order of `lax.top_k`: by value, ties by the lowest index. The filters keep the first entries in
this order. So the last kept entry, as a sort key and an index, determines all kept entries. `xla.py` explains the
arguments.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.masks import logits_of

NOWHERE = jnp.iinfo(jnp.int32).max  # an index after all others; also a top_k that no row reaches


class Cutoff(NamedTuple):
    """Where the filters cut each row, (..., 1), and two sums of it.

    An entry is kept if its sort key is greater than `key`, or if its key equals `key` and its index is at most `index`.
    If several pairs (key, index) keep the right entries, any of them may be returned.

    Attributes:
      key: int32 (int64 for 64-bit logits). In a row without a draw it is the greatest integer, which keeps nothing.
      index: int32.
      logsumexp: of logits / temperature over the whole row, floating. At temperature 0 its limit: +inf, -inf, or the
        log of the number of ties, by the sign of the largest logit. -inf in a row with nothing to draw from. NaN or
        +inf in a row with an unmasked NaN or +inf, or with a NaN temperature.
      log_mass: the log of the share of the row's mass that is kept, floating. NaN in a row without a draw. At
        temperature 0, -log of the number of ties.
    """

    key: Any
    index: Any
    logsumexp: Any
    log_mass: Any


class Totals(NamedTuple):
    """Sums of whole rows, (..., 1).

    Attributes:
      top: the largest logit, floating.
      m: the largest of the row's `elements` x: `top`, or 0 for integers. The mass of x is exp((x - m) / temperature).
      total: the mass of the row: at least 1, or NaN in a row without a draw.
      divisor: the temperature, but at least the smallest normal number.
      greedy: whether only the first entry is kept. This is so at temperature 0, and if top / temperature overflows:
        then only the largest logit and its ties have a mass.
    """

    top: Any
    m: Any
    total: Any
    divisor: Any
    greedy: Any


@dataclasses.dataclass(frozen=True)
class Row:
    """A row along the last axis, or this device's shard of it if mesh axes divide the row. Results have size 1 there.

    Attributes:
      vocab: the number of elements that this device has; in jax.export it may be symbolic.
      mesh_axes: the mesh axes that the row is spread over.
    """

    vocab: Any
    mesh_axes: tuple[str, ...]

    @staticmethod
    def of(logits, mesh_axes) -> "Row":
        """Returns the row of these logits."""
        return Row(logits.shape[-1], tuple(mesh_axes))

    @property
    def length(self) -> Any:
        """The number of elements of the whole row."""
        return self.vocab * (lax.axis_size(self.mesh_axes) if self.mesh_axes else 1)

    @property
    def start(self):
        """The index in the whole row of this device's first element."""
        return lax.axis_index(self.mesh_axes) * self.vocab if self.mesh_axes else 0

    def indices(self, rank: int):
        """Returns the index of each element in the whole row, for arrays of this rank."""
        return self.start + lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + (self.vocab,), rank - 1)

    def sum(self, x):
        part = jnp.sum(x, -1, keepdims=True, dtype=x.dtype)
        return lax.psum(part, self.mesh_axes) if self.mesh_axes else part

    def max(self, x):
        part = jnp.max(x, -1, keepdims=True)
        return lax.pmax(part, self.mesh_axes) if self.mesh_axes else part

    def min(self, x):
        part = jnp.min(x, -1, keepdims=True)
        return lax.pmin(part, self.mesh_axes) if self.mesh_axes else part

    def at(self, x, index):
        """Returns the elements of x at these indices of the whole row, with unchanged bits even if they are NaN."""
        if not self.mesh_axes:
            return jnp.take_along_axis(x, index, -1)
        index = index - self.start
        own = (index >= 0) & (index < self.vocab)
        found = jnp.take_along_axis(x, jnp.where(own, index, 0), -1)
        word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = jnp.where(own, lax.bitcast_convert_type(found, word), 0)
        bits = lax.psum(bits.astype(jnp.uint32) if word.itemsize < 4 else bits, self.mesh_axes)
        return lax.bitcast_convert_type(bits.astype(word), x.dtype)


def keys(logits, where):
    """Returns the sort keys of the logits: integers in the order of `lax.top_k`. Masked elements get the least one."""
    key = sort_keys.key(logits)
    return key if where is None else jnp.where(where, key, jnp.iinfo(key.dtype).min)


def as_float(logits):
    """Returns the logits in the dtype of the arithmetic."""
    return normalizers.widen(logits.astype(float_dtype(logits)))


def float_dtype(logits):
    """Returns the floating dtype that JAX promotes the logits to."""
    return jax.eval_shape(jnp.exp, logits).dtype


def scaled(x, temperature, greedy):
    """Returns x / temperature, and 0 in greedy rows."""
    return jnp.where(greedy, 0, x) / jnp.where(greedy, 1, temperature)


def is_kept(logits, where, key, index, positions):
    """Returns which entries a cutoff (key, index) keeps. `positions` are their indices in whole rows."""
    keys = wide_keys(logits)
    kept = (keys > key) | (keys == key) & (positions <= index)
    return kept if where is None else kept & where


def wide_keys(logits):
    """Returns the sort keys of the logits, in at least 32 bits."""
    key = sort_keys.key(logits)
    return key if key.dtype.itemsize >= 4 else key.astype(jnp.int32)


def elements(logits, where, row: Row):
    """Returns the logits in the dtype of the arithmetic; integers as distances from the largest; -inf where masked."""
    return logits_of(normalizers.to_float(logits, (-1,), where, row.mesh_axes), where)


def totals_of_rows(logits, where, temperature, row: Row) -> Totals:
    x = elements(logits, where, row)
    m = row.max(x)
    is_float = jnp.issubdtype(logits.dtype, jnp.floating)
    top = m if is_float else row.max(logits_of(as_float(logits), where))
    divisor = jnp.maximum(temperature, jnp.finfo(x.dtype).tiny)
    return totals_of(top, m, row.sum(jnp.exp((x - m) / divisor)), temperature)


def totals_of(top, m, total, temperature) -> Totals:
    """Returns the `Totals` with these first three fields."""
    divisor = jnp.maximum(temperature, jnp.finfo(m.dtype).tiny)
    greedy = (temperature == 0) | jnp.isinf(top / divisor) & jnp.isfinite(top)
    return Totals(top, m, total, divisor, greedy)


def cutoff_of(key, index, kept_total, totals: Totals, temperature) -> Cutoff:
    """Returns the `Cutoff` with this key and index. The kept entries have the mass `kept_total`."""
    top, _, total, divisor, greedy = totals
    drawable = total >= 1  # False where it is NaN
    limit = jnp.where(top == 0, jnp.log(total), jnp.where(top > 0, jnp.inf, -jnp.inf))
    logsumexp = jnp.where(greedy, limit, top / divisor + jnp.log(total))
    nothing = (top == -jnp.inf) & ~jnp.isnan(temperature)
    log_mass = jnp.where(greedy, -jnp.log(total), jnp.minimum(jnp.log(kept_total / total), 0))
    return Cutoff(
        jnp.where(drawable, key, jnp.iinfo(key.dtype).max),
        jnp.where(drawable, index, -1),
        jnp.where(nothing, -jnp.inf, jnp.where(drawable | ~jnp.isfinite(top), logsumexp, jnp.nan)),
        jnp.where(drawable, log_mass, jnp.nan),
    )


def drawn_results(drawn, x, totals: Totals):
    """Returns the results of `xla.draw` for the drawn index. `x` is the drawn one of the row's `elements`."""
    drawable = totals.total >= 1
    log_probs = (x - totals.m) / totals.divisor - jnp.log(totals.total)
    return jnp.where(drawable, drawn, -1), jnp.where(drawable, log_probs, jnp.nan)


def mass_wanted(top_p, total):
    """Returns the mass that top_p keeps of a total: at least 1, the mass of the first entry."""
    return jnp.where(top_p < 1, jnp.maximum(top_p * total, 1), jnp.inf)


def is_free(top_k, top_p, min_p, length):
    """Returns which rows the filters leave whole, whatever their logits are."""
    top_k, top_p, min_p = (
        default if f is None else f for f, default in ((top_k, length), (top_p, 1), (min_p, 0))
    )
    return (top_k >= length) & (top_p >= 1) & (min_p <= 0)
