"""How a CTA finds the k best of its part: by a bound and candidates, with bisection as the fallback.

`window_kernel.py` shows the usual way on an example. The candidate count reveals failure. There are two kinds:

  * More elements reach the bound than the list has room for. Either many elements are equal, or the best ones are
    concentrated in a few groups.
  * Fewer than k elements reach the bound. One cause is that group maxima count a NaN as the highest key, and a masked
    element as -inf, while the elements' own keys may be lower. The other cause is a k so large that the bound is
    chosen for about 1.4 k elements (`plan.bound_rank`), in a row that spreads its best elements over many groups.

Then bisection finds an exact bound. It counts over all elements. It ends as soon as at least k elements reach the
bound, and one more condition holds: the elements that reach the bound fit into the list, or fewer than k exceed
it.

    key     low                 middle                high
             |--------------------|--------------------|         at least k elements reach low,
             >= k elements        how many?            < k       fewer than k reach high + 1

If they fit, the elements that reach the bound are the candidates. Otherwise there are ties at the bound. Then the
candidates are the elements above it, fewer than k, and the ties with the lowest indices, to make k.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.gpu import blocks, sort_keys
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.window import Extent, Window
from pallas_softmax._src.topk import selection
from pallas_softmax._src.topk.candidates import capacity_of
from pallas_softmax._src.topk.plan import bound_rank


class _Bracket(NamedTuple):
    """The interval of keys that the bisection narrows, and counts for its lower end. All fields are int32.

    Attributes:
      low: a key that at least k elements reach.
      high: a key not below low. Fewer than k elements reach high + 1.
      reach: number of elements that reach low.
      exceed: number of elements that exceed low. For the initial low, which is not counted, the number of all elements.
      turn: number of keys tried so far.
    """

    low: Any
    high: Any
    reach: Any
    exceed: Any
    turn: Any


@dataclasses.dataclass(frozen=True)
class WindowSearch:
    """A part in shared memory, and the scratch memory of its search. `selection.py` describes these arrays.

    Attributes:
      window: layout of the part.
      extent: where in the window the part lies.
      owned: number of elements in the part.
    """

    window: Window
    extent: Extent
    owned: Any
    counts_smem: Any
    group_keys_smem: Any
    hits_smem: Any
    candidates_smem: Any
    x_smem: Any
    interpret: Any

    def find(self, k: int):
        """Collects candidates that include the k best. Returns their number, at least k."""
        capacity = capacity_of(self.candidates_smem)
        bound = self._usual_bound(bound_rank(self.window, k, capacity))
        self._collect(bound)
        n = self.counts_smem[0]
        return lax.cond((n < k) | (n > capacity), lambda: self._find_exactly(bound, k, capacity), lambda: n)

    def _usual_bound(self, rank: int):
        """Returns a key that the maxima of at least `rank` groups reach, or the lowest key if groups are fewer."""
        groups = self.window.groups
        if groups < rank:
            return jnp.int32(sort_keys.lowest_key(self.x_smem.dtype))
        return selection.bound(
            self.group_keys_smem,
            self.candidates_smem,
            self.counts_smem,
            groups,
            rank,
            interpret=self.interpret,
        )

    def _collect(self, bound, *, all_groups=False):
        """Appends the elements that reach the bound to the candidates."""
        selection.collect(
            self.window, self.x_smem, self.group_keys_smem, self.hits_smem, self.candidates_smem, self.counts_smem,
            bound, self.extent, all_groups=all_groups, interpret=self.interpret,
        )  # fmt: skip

    def _find_exactly(self, failed, k: int, capacity: int):
        """Collects again with an exact bound, so that the candidates are enough and fit. Returns their number.

        Args:
          failed: the bound of the usual way.
          capacity: number of entries of the list.
        """
        found = self._bisect(failed, k, capacity)
        bound, all_fit = found.low, found.reach <= capacity
        _, above = self._count(bound)  # `found.exceed` was not counted if low is still the lowest key
        selection.clear(self.candidates_smem, self.counts_smem, interpret=self.interpret)
        lax.cond(
            all_fit | (above > 0),
            lambda: self._collect(jnp.where(all_fit, bound, bound + 1), all_groups=True),
            lambda: None,
        )
        lax.cond(all_fit, lambda: None, lambda: self._collect_ties(bound, above, k))
        return jnp.where(all_fit, found.reach, k)

    def _bisect(self, failed, k: int, capacity: int) -> _Bracket:
        """Returns a bracket with an exact low: at most `capacity` elements reach it, or fewer than k exceed it."""
        dtype = self.x_smem.dtype
        lowest = sort_keys.lowest_key(dtype)
        # These keys are tried first. Each ends the bisection at once in a case that is not rare: ties at the bound,
        # fewer than k unmasked elements, or NaNs.
        likely_keys = failed, lowest + 1, sort_keys.key_of(np.nan, dtype), sort_keys.key_of(-np.nan, dtype)

        def is_open(bracket: _Bracket):
            too_many = (bracket.reach > capacity) & (bracket.exceed >= k)
            return too_many & (bracket.low != bracket.high)

        def halve(bracket: _Bracket):
            low, high, reach, exceed, turn = bracket
            gap = high - low  # to be read as unsigned: it may exceed 2^31
            middle = low + lax.shift_right_logical(gap, jnp.int32(1)) + (gap & 1)
            for i, likely in enumerate(likely_keys):
                middle = jnp.where((turn == i) & (likely > low) & (likely <= high), likely, middle)
            reach_middle, exceed_middle = self._count(middle)
            enough = reach_middle >= k
            return _Bracket(
                jnp.where(enough, middle, low),
                jnp.where(enough, high, middle - 1),
                jnp.where(enough, reach_middle, reach),
                jnp.where(enough, exceed_middle, exceed),
                turn + 1,
            )

        start = _Bracket(jnp.int32(lowest), self._highest_key(), self.owned, self.owned, jnp.int32(0))
        return lax.while_loop(is_open, halve, start)

    def _highest_key(self):
        """Returns a key that no element exceeds."""

        def load(i):
            block = self.group_keys_smem.at[pl.ds(i * WARPGROUP, WARPGROUP)]
            return blocks.load(block, interpret=self.interpret)

        of_thread = lax.fori_loop(
            1, self.window.groups_per_thread, lambda i, best: jnp.maximum(best, load(i)), load(0)
        )
        return jnp.max(of_thread)

    def _count(self, bound):
        """Returns how many elements reach the bound, and how many exceed it."""
        reach, exceed = selection.count(
            self.window, self.x_smem, self.group_keys_smem, bound, interpret=self.interpret
        )
        around = self.window.size - self.owned  # positions without an element, which hold -inf
        neg_inf = sort_keys.key_of(-np.inf, self.x_smem.dtype)
        return reach - jnp.where(neg_inf >= bound, around, 0), exceed - jnp.where(neg_inf > bound, around, 0)

    def _collect_ties(self, bound, first, k: int):
        """Fills entries `first` to k - 1 with the elements that equal the bound, in order of index."""
        selection.collect_ties(
            self.window, self.x_smem, self.hits_smem, self.candidates_smem, bound, self.extent, first, k,
            interpret=self.interpret,
        )  # fmt: skip
