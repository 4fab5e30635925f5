"""How a CTA finds the k best of its part of a row: by a bound and candidates, with bisection as the fallback.

`window_kernel.py` shows the usual way on an example. The candidate count reveals failure. There are two kinds:

  * More elements reach the bound than the list has room for. Either many elements are equal, or the best ones are
    concentrated in a few groups.
  * Fewer than k elements reach the bound. One cause is that group maxima count a NaN as the highest key, and a masked
    element as -inf, while the elements' own keys may be lower. The other cause is a k so large that the bound is
    chosen for about 1.4 k elements (`plan.bound_rank`), in a row that spreads its best elements over many groups.

Then bisection finds an exact bound. It counts over all elements. It ends as soon as at least k elements reach the
bound, and one more condition holds: the elements that reach the bound fit into the list, or fewer than k exceed it.

    key     low                 middle                high
             |--------------------|--------------------|         at least k elements reach low,
             >= k elements        how many?            < k       fewer than k reach high + 1

If they fit, the elements that reach the bound are the candidates. Otherwise there are ties at the bound. Then the
candidates are the elements above it, fewer than k, and the ties with the lowest indices, to make k.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_softmax._src.gpu import sort_keys
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Program
from pallas_softmax._src.gpu.window import Window
from pallas_softmax._src.gpu.window_arrival import Part
from pallas_softmax._src.topk import candidates
from pallas_softmax._src.topk.plan import ordering_words
from pallas_softmax._src.topk.search_ptx import search_program
from pallas_softmax.online import Normalizer, shift


class SearchMemory(NamedTuple):
    """References to the shared memory of a search. `plan.listed_items` has the lengths of `candidates` and `hits`."""

    # (window.size,), the elements of the part, and -inf around them. Masked elements are floats of the lowest key.
    x: Any
    # int32, the largest key of each group. A NaN counts as the highest key. Later the winners, unless compact.
    group_keys: Any
    candidates: Any  # the list of candidates, int32; in a compact window a list of positions, int16
    hits: Any  # scratch of the same dtype: the numbers of the groups that reach the bound
    counts: Any  # (128,) int32: the numbers of candidates and of groups in `hits`; the rest is scratch


@twin(lambda memory: None)
def clear(memory: SearchMemory) -> None:
    """Empties the list of candidates."""
    p, size = CtaProgram(), memory.candidates.shape[0] * jnp.dtype(memory.candidates.dtype).itemsize
    candidates.clear(p, p.operand("candidates", "u32"), size, p.operand("counts", "u32"))
    insert_ptx(p, {"candidates": memory.candidates, "counts": memory.counts})


def _add_step_in_jax(window: Window, memory: SearchMemory, step, count: int, lane: Normalizer, scale, masked):
    """Returns the normalizer that `add_step` returns, and writes no group_keys."""
    x = memory.x[pl.ds(step * window.step_blocks * window.block, count * window.block)]
    x = x.reshape(count, WARPGROUP, window.vec)
    if masked:
        x = jnp.where(sort_keys.key(x) == sort_keys.lowest_key(x.dtype), -jnp.inf, x)
    x = x.astype(jnp.float32)
    m = jnp.maximum(lane.m, jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), (0, 2)))
    s = shift(m)
    terms = jnp.exp2((x - s[:, None]) * scale)
    return Normalizer(m, lane.d * jnp.exp2((lane.m - s) * scale) + jnp.sum(terms, (0, 2)))


@twin(_add_step_in_jax)
def add_step(
    window: Window,
    memory: SearchMemory,
    step,
    count: int,
    lane: Normalizer,
    scale,
    masked: bool,
) -> Normalizer:
    """Adds each thread's elements of a step of `count` blocks to its normalizer, and writes the step's group_keys.

    Thread t has vector t of every block. All its elements share one rescaling of d:

    new_m = max(m, x...)                                max ignores a NaN; the NaN still makes d NaN
    s     = 0 if new_m is -inf, else new_m              so that -inf - s is -inf, not NaN
    new_d = d * 2^((m - s) scale) + sum of 2^((x - s) scale)

    `lane` has the normalizer of each thread (128,) before the step. If there is a mask (`masked`), an element with the
    lowest key is masked, and counts as -inf.
    """
    element, p = Elements(memory.x.dtype), Program()
    m, d, scale_of_row, new_m, new_d = p.operands("f32", "m", "d", "scale", "new_m", "new_d")
    thread, step_, x_at, keys_at = p.operands("u32", "thread", "step", "x", "group_keys")
    block_bytes = window.block * element.itemsize
    keys_of_step = window.step_blocks // window.group_blocks * WARPGROUP
    x_at = p.at(p.at(x_at, step_, window.step_blocks * block_bytes), thread, ACCESS_BYTES)
    keys_at = p.at(p.at(keys_at, step_, 4 * keys_of_step), thread, 4)
    vectors = [element.vector(p, x_at, b * block_bytes) for b in range(count)]
    # If some elements are masked, their floats differ from the words.
    floats = [element.floats(p, words, marked=True) for words in vectors] if masked else None
    largest = []
    for i, start in enumerate(range(0, count, window.group_blocks)):
        group = slice(start, start + window.group_blocks)
        value, key = element.best(p, sum(vectors[group], []), sum(floats[group], []) if floats else None)
        p.store(keys_at, key, offset=i * 4 * WARPGROUP)
        largest.append(value)
    p.set(new_m, p.max(p.reduce("max", largest), m))
    s = p.select(new_m.equals(-math.inf), 0.0, new_m)
    terms = []
    for b, words in enumerate(vectors):
        for x in floats[b] if floats else element.floats(p, words, marked=False):
            terms.append(p.exp2((x - s) * scale_of_row))
    rescale = p.exp2((m - s) * scale_of_row)
    p.set(new_d, p.multiply_add(d, rescale, p.reduce("add", terms)))
    new = insert_ptx(
        p,
        {"x": memory.x, "group_keys": memory.group_keys},
        {"step": step, "scale": scale},
        {"m": lane.m, "d": lane.d},
        {"new_m": "f32", "new_d": "f32"},
    )
    return Normalizer(*new)


def _find_winners_in_jax(window: Window, memory: SearchMemory, part: Part, k: int):
    position, keys = jnp.arange(window.size), sort_keys.key(memory.x[: window.size])
    inside = (position >= part.low) & (position < part.high)
    candidates.sort_winners(memory.group_keys, keys, position + part.origin, inside, k)
    return memory.group_keys


@twin(_find_winners_in_jax)
def find_winners(window: Window, memory: SearchMemory, part: Part, k: int):
    """Puts the k best of the part in order. Returns a reference to them: keys, then indices from padded_winners(k) on.

    All steps of the row must have arrived in `memory.x` and `memory.group_keys`, and the list must be empty.
    """
    program = search_program(window, jnp.dtype(memory.x.dtype), k)
    insert_ptx(program, memory._asdict(), {"low": part.low, "high": part.high, "origin": part.origin})
    return pieces(memory.x, *ordering_words(k))[2] if window.compact else memory.group_keys


def pieces(ref, *sizes: int) -> list:
    """Returns references to consecutive pieces of a one-dimensional array, with these lengths."""
    return [ref.at[pl.ds(end - size, size)] for size, end in zip(sizes, itertools.accumulate(sizes))]
