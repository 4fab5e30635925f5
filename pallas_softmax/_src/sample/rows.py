"""Rows of `sample` in plain JAX: their elements, their totals, and the search for the last entry that the filters keep.

A row is in the order of `lax.top_k`: by value, ties by the lowest index. The filters keep the first entries in this
order, so the last kept entry, as a sort key and an index, determines all kept entries: it is the row's `Cutoff`.

`search` finds it without a sort of the row. The measure of an entry is 1 for top_k, and its mass for top_p. The last
kept entry is the first one, in the row's order, at which the sum of the measures reaches a goal. Two steps find it:

    its key     by bisection on the bits of the sort keys: `_last_entry`
    its index   among the entries with that key: `_index_reaching`

Sorting many short rows is slower ("On a CPU" in benchmarks/results/NOTES.md). `xla.py` explains the arguments.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.masks import logits_of, positions, row_at
from pallas_softmax._src.temperatures import Temperature, is_zero

NOWHERE = jnp.iinfo(jnp.int32).max  # an index after all others; also a top_k that no row reaches
# Elements of a chunk. The search takes the sums of chunks first, so a chunk has about the square root of a vocabulary.
_CHUNK = 256


class Cutoff(NamedTuple):
    """Where the filters cut each row, (..., 1), its largest logit, and two sums of it.

    An entry is kept if its sort key is greater than `key`, or if its key equals `key` and its index is at most `index`.
    If several pairs (key, index) keep the right entries, any of them may be returned. In a row without a draw, the key
    is the greatest integer, the index is -1, and the logarithms are NaN.
    """

    key: Any  # int32; int64 for 64-bit logits
    index: Any
    # The largest logit, floating: -inf in a row with nothing to draw from, NaN or +inf in a row with an unmasked NaN or
    # +inf, any number with a NaN temperature.
    top: Any
    log_total: Any  # of the row's mass, the sum of exp((x - top) / temperature); at temperature 0, the number of ties
    log_mass: Any  # of the share of this mass that is kept


class Totals(NamedTuple):
    """Sums of whole rows, (..., 1). The mass of one of the `elements` x is exp((x - m) / temperature)."""

    top: Any  # the largest logit, floating
    m: Any  # the largest of the elements: `top`, or 0 for integers
    total: Any  # the mass: at least 1, 0 in a row with nothing to draw from, NaN in a row that has failed
    divisor: Temperature
    # Whether only the first entry is kept: at temperature 0, and if top / temperature overflows at a normal
    # temperature. Then only the largest logit and its ties have a mass.
    greedy: Any


# --- Elements


def keys(logits, where):
    """Returns the sort keys of the logits: integers in the order of `lax.top_k`. Masked elements get the least one."""
    key = sort_keys.key(logits)
    return key if where is None else jnp.where(where, key, jnp.iinfo(key.dtype).min)


def is_kept(logits, where, key, index, indices):
    """Returns which entries a cutoff keeps. `indices` are their indices in whole rows."""
    keys = sort_keys.wide_key(logits)
    kept = (keys > key) | (keys == key) & (indices <= index)
    return kept if where is None else kept & where


def as_float(logits):
    return normalizers.widen(logits.astype(normalizers.float_dtype(logits.dtype)))


def elements(logits, where):
    """Returns the logits in the dtype of the arithmetic; integers as distances from the largest; -inf where masked."""
    return logits_of(normalizers.to_float(logits, (-1,), where), where)


def tempered(x, top, temperature):
    """Returns x / temperature, and 0 in greedy rows; `top` is the largest logit of each row.

    If top / temperature overflows, quotients count from `top`, so that ties get different noise.
    """
    greedy = is_greedy(top, temperature)
    divisor, x = Temperature.of(jnp.where(greedy, 1, temperature)), jnp.where(greedy, 0, x)
    overflows = jnp.isinf(divisor.divide(top)) & jnp.isfinite(top)
    return jnp.where(overflows, divisor.distance(x, jnp.where(overflows, top, 0)), divisor.divide(x))


# --- Totals, and the results that follow from them


def totals_of_rows(logits, where, temperature) -> Totals:
    x = elements(logits, where)
    m = jnp.max(x, -1, keepdims=True)
    some_subnormal = jnp.any(jnp.abs(m) < jnp.finfo(m.dtype).tiny)  # a CPU takes them for 0
    m = _on_cpu_if(some_subnormal, functools.partial(normalizers.largest, x), lambda: m, (x,))
    is_float = jnp.issubdtype(logits.dtype, jnp.floating)
    top = m if is_float else jnp.max(logits_of(as_float(logits), where), -1, keepdims=True)
    below = Temperature.of(temperature).distance(x, normalizers.shift(m))
    return totals_of(top, m, sum_of(jnp.exp(below)), temperature)


def totals_of(top, m, total, temperature) -> Totals:
    return Totals(top, m, total, Temperature.of(temperature), is_greedy(top, temperature))


def is_greedy(top, temperature):
    normal = jnp.maximum(temperature, jnp.finfo(top.dtype).tiny)
    return is_zero(temperature) | jnp.isinf(top / normal) & jnp.isfinite(top)


def cutoff_of(key, index, kept_total, totals: Totals) -> Cutoff:
    """Returns the `Cutoff` of kept entries that end at this key and index, and have the mass `kept_total`."""
    drawable = totals.total >= 1
    log_total = jnp.log(totals.total)
    log_mass = jnp.where(totals.greedy, -log_total, jnp.minimum(jnp.log(kept_total / totals.total), 0))
    key = key if key.dtype.itemsize >= 4 else key.astype(jnp.int32)
    return Cutoff(
        jnp.where(drawable, key, jnp.iinfo(key.dtype).max),
        jnp.where(drawable, index, -1),
        jnp.where(jnp.isnan(totals.total), jnp.nan, totals.top),  # on a CPU, the largest may hide a NaN
        jnp.where(drawable, log_total, jnp.nan),
        jnp.where(drawable, log_mass, jnp.nan),
    )


def drawn_results(drawn, x, m, cut: Cutoff, temperature):
    """Returns the results of `xla.sample`. x is the drawn one of the `elements`, m the largest."""
    log_probs = Temperature.of(temperature).distance(x, m) - cut.log_total
    # Rounding must not make `log_mass` less than `log_probs`.
    return jnp.where(cut.index < 0, -1, drawn), log_probs, jnp.maximum(cut.log_mass, log_probs)


def mass_goal(top_p, total):
    """Returns the mass that top_p keeps: at least 1, the mass of the first entry."""
    return jnp.where(top_p < 1, jnp.maximum(top_p * total, 1), jnp.inf)


# --- The search


def search(logits, where, temperature, top_k, top_p, min_p) -> Cutoff:
    key, totals = keys(logits, where), totals_of_rows(logits, where, temperature)
    mass = masses(logits, where, totals)
    indices = positions(key)
    least_key = jnp.full((*key.shape[:-1], 1), jnp.iinfo(key.dtype).min, key.dtype)
    last: Any = least_key, NOWHERE  # keeps everything

    def kept(value):  # by the filters so far; 0 for other entries
        return jnp.where((key > last[0]) | (key == last[0]) & (indices <= last[1]), value, 0)

    if top_k is not None:
        one = jnp.ones((), jnp.int32) if where is None else where.astype(jnp.int32)
        last = _last_entry(key, one, jnp.where(top_k < key.shape[-1], top_k, NOWHERE))
    if top_p is not None:
        found = _last_entry(key, kept(mass), mass_goal(top_p, sum_of(kept(mass))))
        # A top_p of 1 also keeps entries without mass.
        last = first_of(last, tuple(jnp.where(top_p >= 1, *both) for both in zip((least_key, NOWHERE), found)))
    if min_p is not None:
        last = first_of(last, (_least_key(logits, where, min_p, totals), NOWHERE))
    kept_total = sum_of(kept(mass))
    key, index = _first_entries_if_greedy(last, logits, where, totals)
    return cutoff_of(key, index, kept_total, totals)


def masses(logits, where, totals: Totals):
    return jnp.exp(totals.divisor.distance(elements(logits, where), totals.m))


def _first_entries_if_greedy(last, logits, where, totals: Totals):
    """Returns `last`, (key, index); in greedy rows, the first entry of the row's order."""
    # Both branches of a condition return arrays of one shape.
    last = tuple(jnp.broadcast_to(a, totals.greedy.shape) for a in (last[0], jnp.asarray(last[1], jnp.int32)))

    def first():
        key = keys(logits, where)
        best = jnp.max(key, -1, keepdims=True)
        is_best = (key == best) & (masses(logits, where, totals) == 1)
        index = jnp.min(jnp.where(is_best, positions(key), NOWHERE), -1, keepdims=True)
        return tuple(jnp.where(totals.greedy, *both) for both in zip((best, index), last))

    return _on_cpu_if(jnp.any(totals.greedy), first, lambda: last, (logits, where))


def _least_key(logits, where, min_p, totals: Totals):
    """Returns the least key of the entries that min_p keeps. A CPU finds the least of floats three times as fast."""

    def least_kept(numbers, above):
        kept = masses(logits, where, totals) >= min_p
        return jnp.min(jnp.where(kept, numbers, above), -1, keepdims=True)

    def by_key():
        key = keys(logits, where)
        return least_kept(key, jnp.iinfo(key.dtype).max)

    if not jnp.issubdtype(logits.dtype, jnp.floating):
        return by_key()
    least = least_kept(elements(logits, where), jnp.inf)
    # A CPU takes subnormal numbers for 0, and 0 and -0 are equal.
    some_zero = jnp.any(jnp.abs(least) < jnp.finfo(least.dtype).tiny)
    by_value = functools.partial(sort_keys.key, least.astype(logits.dtype))
    return _on_cpu_if(some_zero, by_key, by_value, (logits, where))


def _on_cpu_if(condition, function, other, like):
    """Returns function(); on a CPU, other() unless the condition holds. Results vary over mesh axes like `like`.

    `function` computes its arrays of whole rows itself, so that they take no time unless it runs. On a GPU, a condition
    costs more than it saves.
    """

    def varying(function):
        return lambda: vary_together(function(), like)[0]

    function, other = varying(function), varying(other)
    return lax.platform_dependent(cpu=lambda: lax.cond(condition, function, other), default=function)


def first_of(a, b):
    """Returns the tuple (key, index, ..) of the greater key; if they tie, of the lower index."""
    is_a = (a[0] > b[0]) | (a[0] == b[0]) & (a[1] < b[1])
    return tuple(jnp.where(is_a, *both) for both in zip(a, b))


def _last_entry(key, measure, goal):
    """Returns key and index of the first entry, by key and then index, at which the measures reach a goal.

    A measure is not negative; a scalar is the measure of all entries. The goal is positive. If it is not reached, the
    result keeps all entries with a measure.
    """
    bits = 8 * key.dtype.itemsize

    def find_bit(i, bound):
        higher = bound + lax.shift_left(jnp.ones((), key.dtype), jnp.asarray(bits - 1 - i, key.dtype))
        # the mask is fused with the sum, so it takes no memory
        return jnp.where(sum_of(jnp.where(key >= higher, measure, 0)) >= goal, higher, bound)

    least = jnp.full((*key.shape[:-1], 1), jnp.iinfo(key.dtype).min, key.dtype)
    least, *_ = vary_together(least, goal, key)
    # The highest key such that the entries with at least this key reach the goal; else the least key.
    bound = lax.fori_loop(0, bits, find_bit, least)
    above = sum_of(jnp.where(key > bound, measure, 0))
    return bound, _index_reaching(jnp.where(key == bound, measure, 0), goal - above)


def _index_reaching(measure, goal):
    """Returns the index of the first positive measure at which the sum reaches the goal.

    If rounding keeps the sum below the goal, it is the last positive one. Sums of chunks come first, then one chunk.
    """
    first = 0
    if chunks_of(measure.shape[-1])[0] > 1:
        chunks = in_chunks(measure)
        chunk, goal = _position_reaching(jnp.sum(chunks, -1, dtype=chunks.dtype), goal)
        measure, first = row_at(chunks, chunk), chunk * _CHUNK
    position, _ = _position_reaching(measure, goal)
    return first + position


def chunks_of(vocab) -> tuple:
    """Returns the number of chunks of a row and their size. A row of an unknown size is one chunk."""
    return (-(-vocab // _CHUNK), _CHUNK) if isinstance(vocab, int) and vocab > _CHUNK else (1, vocab)


def in_chunks(a):
    """Returns the chunks of rows (..., V): (..., count, size). The last one ends with zeros."""
    *batch, vocab = a.shape
    count, size = chunks_of(vocab)
    return jnp.pad(a, [(0, 0)] * len(batch) + [(0, count * size - vocab)]).reshape(*batch, count, size)


def _position_reaching(measure, goal):
    """Does so by one cumulative sum. Also returns the goal less the measures before that position."""
    position = positions(measure)
    reached = (jnp.cumsum(measure, -1, dtype=measure.dtype) >= goal) & (measure > 0)
    there = jnp.where(reached, position, measure.shape[-1])
    last = jnp.where(measure > 0, position, 0)
    found = jnp.minimum(jnp.min(there, -1, keepdims=True), jnp.max(last, -1, keepdims=True))
    return found, goal - sum_of(jnp.where(position < found, measure, 0))


def sum_of(x):
    return jnp.sum(x, -1, keepdims=True, dtype=x.dtype)
