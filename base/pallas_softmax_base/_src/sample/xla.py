"""Plain JAX of `sample`: a draw from each row, restricted by top-k, top-p and min-p, without a sort of the row.

The filters keep the first entries of a row in the order of `lax.top_k`: by value, ties by the lowest index. An entry is
kept until the weights reach a target: top_k counts entries, top_p adds up their mass. Two steps find the last entry:

    the value   by bisection on the bits of integers that are ordered like the values: `_value_reaching`
    the index   among the ties of that value, where the sum in the order of the row reaches the rest of the target:
                `_index_reaching`

The draw also uses `_index_reaching`, as the inverse of the cumulative kept mass. A row that is spread over a mesh is
searched in the same way, with sums over its devices: a round finds 4 bits instead of one.

On a CPU, `lax.top_k` of a few elements of a long row is faster than that search. So a small top_k there takes the best
elements of a row as candidates, in order, and the other filters work on the candidates: `_candidates`. The search runs
only if some row may have too few candidates.

If there are many short rows, sorting each of them is slower than searching it ("On a CPU" in
benchmarks/results/NOTES.md).
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_softmax_base._src import normalizers, sort_keys
from pallas_softmax_base._src.dispatch.mesh_types import is_tracked, vary_together

# Elements of a block. The search takes the sums of blocks first, so a block has about the square root of a vocabulary.
_BLOCK = 256
# The number of candidates of a row on a CPU, and the shortest rows that have candidates. On two CPU cores, `lax.top_k`
# takes 13 ms for 128 elements of each of 64 rows of 128,256, and 39 ms for 1,024 elements. A draw from each of 64 rows
# takes, in ms (jax 0.11.2, 2026-11-23):
#
#                                       V = 4,096   8,192   16,384
#   top_k = 50              search            1.4     2.7      5.6
#                           candidates        3.1     3.8      4.8
#   top_k = 50 and a top_p  search            2.4     4.5      8.6
#                           candidates        3.1     3.9      5.0
_CANDIDATES, _LONG_ROW = 128, 2**14
_NOWHERE = jnp.iinfo(jnp.int32).max  # larger than any index or number of entries


def sample(logits, where, u, temperature, top_k, top_p, min_p, *, mesh_axes=()):
    """Draws once from each row of softmax(logits / temperature), restricted by the filters.

    Args:
      logits: (..., vocab), floats or integers.
      where: None, or a boolean of the rank of the logits that broadcasts to them.
      u: float32 in [0, 1). The draw is the first kept entry, in the order of the row, where the cumulative kept mass
        exceeds u times the kept mass. This and the next four have the rank of the logits. Their size is 1 in the last
        dimension, and 1 or the size of the logits in the others.
      temperature: 0, or a positive normal number with a normal reciprocal, or NaN. 0 takes the first entry in the order
        of lax.top_k, whatever the filters and u. A row with NaN gives -1, NaN and NaN.
      top_k: int32, at least 1; or None. At the row's length or more it filters nothing.
      top_p: in [0, 1], or None. 0 keeps the first entry, 1 keeps all that top_k keeps.
      min_p: in [0, 1], or None.
      mesh_axes: the mesh axes that each row is spread over, if any.

    Returns:
      Each of shape (..., 1): the index in the whole row (int32), log softmax(logits / temperature) there, and the log
      of the share of the mass that the filters keep. A row gives -1, NaN and NaN if it has an unmasked NaN or +inf, if
      all its elements are -inf, or if its temperature is NaN.
    """
    row = _Row(logits.shape[-1], tuple(mesh_axes))

    def elements(logits):
        x = normalizers.widen(normalizers.to_float(logits, (-1,), where, mesh_axes))
        return x if where is None else jnp.where(where, x, -jnp.inf)

    x = elements(logits)
    divisor = jnp.maximum(temperature, jnp.finfo(x.dtype).tiny)
    m = row.max(x)
    total = row.sum(jnp.exp((x - m) / divisor))
    drawable = total >= 1  # False where it is NaN

    def by_search(logits):
        mass = jnp.exp((elements(logits) - m) / divisor)
        return _by_search(_keys(logits, where), mass, where, u, temperature, top_k, top_p, min_p, row)

    def by_candidates(logits):
        index, complete = _candidates(logits, where, elements(logits), top_k, row)
        mass = jnp.exp((jnp.take_along_axis(elements(logits), index, -1) - m) / divisor)
        found = _among_candidates(index, mass, u, temperature, top_k, top_p, min_p)
        # The search computes its arrays of whole rows itself, so that they take memory only if it runs.
        others = lax.cond(jnp.all(complete | ~drawable), lambda _: found, by_search, logits)
        return tuple(jnp.where(complete, *both) for both in zip(found, others))

    is_long = isinstance(row.vocab, int) and row.vocab >= _LONG_ROW
    if top_k is not None and not mesh_axes and x.dtype == jnp.float32 and is_long:
        drawn, kept_total = lax.platform_dependent(logits, cpu=by_candidates, default=by_search)
    else:
        drawn, kept_total = by_search(logits)
    log_probs = (row.at(x, drawn) - m) / divisor - jnp.log(total)
    log_mass = jnp.where(temperature == 0, log_probs, jnp.minimum(jnp.log(kept_total / total), 0))
    return (
        jnp.where(drawable, drawn, -1),
        jnp.where(drawable, log_probs, jnp.nan),
        jnp.where(drawable, log_mass, jnp.nan),
    )


def _keys(logits, where):
    """Returns integers in the order of `lax.top_k`; masked elements get the least one."""
    key = sort_keys.key(logits)
    return key if where is None else jnp.where(where, key, jnp.iinfo(key.dtype).min)


def _by_search(key, mass, where, u, temperature, top_k, top_p, min_p, row: "_Row"):
    """Returns the drawn index and the kept mass.

    Args:
      key: the sort keys of all elements.
      mass: the masses of all elements, relative to the largest element.
      where, u, temperature, top_k, top_p, min_p: as for `sample`.
      row: the row that the keys belong to.
    """
    kept = mass
    if top_k is not None:
        one = jnp.ones((), jnp.int32) if where is None else where.astype(jnp.int32)
        wanted = jnp.where(top_k < row.length, top_k, _NOWHERE)
        kept = jnp.where(_first_entries(key, one, wanted, row), kept, 0)
    kept_total = row.sum(kept)
    if top_p is not None:
        kept = jnp.where(_first_entries(key, kept, _mass_wanted(top_p, kept_total), row), kept, 0)
    if min_p is not None:
        kept = jnp.where(mass >= min_p, kept, 0)
    if top_p is not None or min_p is not None:
        kept_total = row.sum(kept)
    drawn = _index_reaching(kept, u.astype(kept_total.dtype) * kept_total, operator.gt, row)
    first = (key == row.max(key)) & (mass == 1)  # masked elements have mass 0
    first = row.min(jnp.where(first, row.indices(key.ndim), _NOWHERE))
    return jnp.where(temperature == 0, first, drawn), kept_total


def _candidates(logits, where, x, top_k, row: "_Row"):
    """Returns the indices of each row's best elements, the best first, and whether they include all that top_k keeps.

    The second result is False for a larger top_k. It is also False where `lax.top_k` and the keys order differently: on
    a CPU, XLA takes denormal numbers for zeros. It depends on the row alone, so that a draw does not depend on other
    rows.
    """
    mask = None if where is None else jnp.broadcast_to(where, x.shape)
    _, index = lax.top_k(x.reshape(-1, row.vocab), _CANDIDATES)
    index = index.reshape(*x.shape[:-1], _CANDIDATES)
    key = _keys(*(None if a is None else jnp.take_along_axis(a, index, -1) for a in (logits, mask)))
    lowest_first, index = lax.sort((~key, index), num_keys=2)
    last, last_index = ~lowest_first[..., -1:], index[..., -1:]

    def number(keys, indices):
        """Returns the number of entries up to the last candidate. A CPU adds floats five times as fast as integers."""
        before = (keys > last) | (keys == last) & (indices <= last_index)
        return jnp.sum(jnp.where(before, 1.0, 0.0), -1, keepdims=True)

    complete = number(_keys(logits, where), row.indices(x.ndim)) == _CANDIDATES
    return index, complete & (top_k <= _CANDIDATES)


def _among_candidates(index, mass, u, temperature, top_k, top_p, min_p):
    """Returns the drawn index and the kept mass, from the indices and masses of the best elements, the best first."""
    kept = jnp.where(lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1) < top_k, mass, 0)
    kept_total = jnp.sum(kept, -1, keepdims=True)
    if top_p is not None:
        before = jnp.pad(jnp.cumsum(kept, -1), [(0, 0)] * (kept.ndim - 1) + [(1, 0)])[..., :-1]
        kept = jnp.where(before < _mass_wanted(top_p, kept_total), kept, 0)
    if min_p is not None:
        kept = jnp.where(mass >= min_p, kept, 0)
    kept_total = jnp.sum(kept, -1, keepdims=True)
    in_order, kept = lax.sort((index, kept), num_keys=1)
    position, _ = _position_reaching(kept, u * kept_total, operator.gt)
    drawn = jnp.take_along_axis(in_order, position, -1)
    return jnp.where(temperature == 0, index[..., :1], drawn), kept_total


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row along the last axis, or this device's shard of it if mesh axes divide the row. Results have size 1 there.

    Attributes:
      vocab: the number of elements that this device has; in jax.export it may be symbolic.
      mesh_axes: the mesh axes that the row is spread over.
    """

    vocab: Any
    mesh_axes: tuple[str, ...]

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
        """Returns the element of x that has this index in the whole row."""
        if not self.mesh_axes:
            return jnp.take_along_axis(x, index, -1)
        index = index - self.start
        own = (index >= 0) & (index < self.vocab)
        found = jnp.take_along_axis(x, jnp.where(own, index, 0), -1)
        return lax.psum(jnp.where(own, found, 0), self.mesh_axes)


def _mass_wanted(top_p, total):
    """Returns the mass that top_p keeps of a total: at least 1, the mass of the first entry."""
    return jnp.where(top_p < 1, jnp.maximum(top_p * total, 1), jnp.inf)


def _first_entries(key, weight, target, row: _Row):
    """Returns which entries come first, by key and then index, up to where their weights reach a target.

    Args:
      key: signed integers.
      weight: not negative; of the shape of the keys, or one scalar for all of them.
      target: positive. If the weights do not reach it, all entries are kept.
      row: the row that the keys belong to.
    """
    bound = _value_reaching(key, weight, target, row)
    above = row.sum(jnp.where(key > bound, weight, 0))
    last = _index_reaching(jnp.where(key == bound, weight, 0), target - above, operator.ge, row)
    return (key > bound) | (key == bound) & (row.indices(key.ndim) <= last)


def _value_reaching(key, weight, target, row: _Row):
    """Returns the highest key at which the weights of all entries from it up reach the target; else the least key."""
    bits = 4 if row.mesh_axes else 1
    rounds = 8 * key.dtype.itemsize // bits
    digits = jnp.arange(1, 2**bits, dtype=key.dtype).reshape((1,) * (key.ndim - 1) + (-1,))

    def find_digit(i, bound):
        """Finds the bits of one round, from the weights at and above each bound that the bits can give."""
        shift = jnp.asarray(bits * (rounds - 1 - i), key.dtype)
        higher = bound + lax.shift_left(digits, shift)
        at_least = key[..., None, :] >= higher[..., None]  # fused with the sum, so it takes no memory
        each = jnp.where(at_least, jnp.expand_dims(weight, -2) if weight.ndim else weight, 0)
        weights = jnp.sum(each, -1, dtype=weight.dtype)
        weights = lax.psum(weights, row.mesh_axes) if row.mesh_axes else weights
        digit = jnp.sum(weights >= target, -1, keepdims=True, dtype=key.dtype)
        return bound + lax.shift_left(digit, shift)

    least = jnp.full((*key.shape[:-1], 1), jnp.iinfo(key.dtype).min, key.dtype)
    least, *_ = vary_together(least, target, key, but=row.mesh_axes)
    return lax.fori_loop(0, rounds, find_digit, least)


def _index_reaching(weight, target, reached: Callable, row: _Row):
    """Returns the index of the first positive weight at which the sum, in the order of the row, reaches the target.

    If rounding keeps the sum below the target, the result is the index of the last positive weight. The search goes
    over the sums of the devices, then over the blocks of one device, and then over the elements of one block.

    Args:
      weight: not negative.
      target: a number for each row.
      reached: (sum, target) -> whether the sum reaches the target.
      row: the row that the weights belong to.
    """
    own = True
    if row.mesh_axes:
        sums = jnp.sum(weight, -1, keepdims=True, dtype=weight.dtype)
        to = "invarying" if is_tracked(row.mesh_axes) else "varying"
        sums = jnp.concatenate(list(lax.all_gather(sums, row.mesh_axes, to=to)), -1)
        device, target = _position_reaching(sums, target, reached)
        own = device == lax.axis_index(row.mesh_axes)

    first = 0
    if isinstance(row.vocab, int) and row.vocab > _BLOCK:  # other rows are one block
        count = -(-row.vocab // _BLOCK)
        padding = [(0, 0)] * (weight.ndim - 1) + [(0, count * _BLOCK - row.vocab)]
        blocks = jnp.pad(weight, padding).reshape(*weight.shape[:-1], count, _BLOCK)
        block, target = _position_reaching(jnp.sum(blocks, -1, dtype=blocks.dtype), target, reached)
        weight, first = jnp.take_along_axis(blocks, block[..., None], -2)[..., 0, :], block * _BLOCK
    position, _ = _position_reaching(weight, target, reached)
    index = first + position
    return lax.pmin(jnp.where(own, row.start + index, _NOWHERE), row.mesh_axes) if row.mesh_axes else index


def _position_reaching(weight, target, reached: Callable):
    """Returns the position, as `_index_reaching` by one cumulative sum, and the rest of the target there."""
    n = weight.shape[-1]
    position = lax.broadcasted_iota(jnp.int32, (1,) * (weight.ndim - 1) + (n,), weight.ndim - 1)
    there = jnp.where(reached(jnp.cumsum(weight, -1, dtype=weight.dtype), target) & (weight > 0), position, n)
    last = jnp.where(weight > 0, position, 0)
    found = jnp.minimum(jnp.min(there, -1, keepdims=True), jnp.max(last, -1, keepdims=True))
    before = jnp.sum(jnp.where(position < found, weight, 0), -1, keepdims=True, dtype=weight.dtype)
    return found, target - before
