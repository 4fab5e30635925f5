"""The search of a CTA for the k best of its part: a bound and candidates, and bisection where these fail.

`window_kernel.py` shows the usual way on an example. It fails, which the number of candidates shows, if

  * more elements reach the bound than the list has slots for: many are alike, or the best of them are together
    in few groups; or
  * fewer than k do: among the largest keys of groups a NaN is the highest key of all, and a masked element that of
    -inf, though their own keys may be lower; or k is so large that the bound is one that about 1.4 k elements
    reach (`plan.bound_rank`), and few of them are together.

Then bisection finds a bound that is exact. It counts over all elements, and ends as soon as the bound
is reached by at least k elements and either by no more than there are slots, or exceeded by fewer than k:

    key     low                 middle                high
             |--------------------|--------------------|         at least k elements reach low,
             >= k elements        how many?            < k       fewer than k reach high + 1

In the first case the elements that reach the bound are the candidates. In the second, ties are the cause: the
elements above the bound are fewer than k, and those equal to it that have the lowest indices make up k.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax._src.gpu import blocks, sort_keys
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.topk import selection
from pallas_softmax._src.topk.plan import Window, bound_rank
from pallas_softmax._src.topk.slots import capacity_of


class _Bracket(NamedTuple):
    """Two keys between which the bisection looks, and what is known of the lower one; all int32.

    Attributes:
      low: a key that at least k elements reach.
      high: a key not below it; fewer than k elements reach high + 1.
      reach: number of elements that reach low.
      exceed: number of elements that exceed low; while low is the lowest key, which is not counted, of all elements.
      turn: number of keys that were tried so far.
    """

    low: Any
    high: Any
    reach: Any
    exceed: Any
    turn: Any


@dataclasses.dataclass(frozen=True)
class Search:
    """A part in shared memory, and the memory that the search in it uses; `selection.py` describes both.

    Attributes:
      window: layout of the part.
      extent: where in the window the part lies.
      owned: number of its elements.
    """

    window: Window
    extent: selection.Extent
    owned: Any
    counts_smem: Any
    group_keys_smem: Any
    hits_smem: Any
    slots_smem: Any
    x_smem: Any
    interpret: Any

    def find(self, k: int):
        """Collects candidates, among which the k best are, and returns their number: at least k."""
        capacity = capacity_of(self.slots_smem)
        bound = self._usual_bound(bound_rank(self.window, k, capacity))
        self._collect(bound)
        n = self.counts_smem[0]
        return lax.cond((n < k) | (n > capacity), lambda: self._find_exactly(bound, k, capacity), lambda: n)

    def _usual_bound(self, rank: int):
        """Returns a key that the largest elements of at least `rank` groups reach; if there are fewer, the lowest."""
        groups = self.window.groups
        if groups < rank:
            return jnp.int32(sort_keys.lowest_key(self.x_smem.dtype))
        return selection.bound(
            self.group_keys_smem, self.slots_smem, self.counts_smem, groups, rank, interpret=self.interpret
        )

    def _collect(self, bound, *, all_groups=False):
        """Appends to the candidates the elements that reach the bound."""
        selection.collect(
            self.window, self.x_smem, self.group_keys_smem, self.hits_smem, self.slots_smem, self.counts_smem,
            bound, self.extent, all_groups=all_groups, interpret=self.interpret,
        )  # fmt: skip

    def _find_exactly(self, failed, k: int, capacity: int):
        """Collects again, neither too few candidates nor too many; returns their number.

        Args:
          failed: the bound that the usual way took.
          capacity: number of slots of the list.
        """
        found = self._bisect(failed, k, capacity)
        bound, all_fit = found.low, found.reach <= capacity
        _, above = self._count(bound)  # `found.exceed` is no count where low is still the lowest key
        selection.clear(self.slots_smem, self.counts_smem, interpret=self.interpret)
        lax.cond(
            all_fit | (above > 0),
            lambda: self._collect(jnp.where(all_fit, bound, bound + 1), all_groups=True),
            lambda: None,
        )
        lax.cond(all_fit, lambda: None, lambda: self._collect_ties(bound, above, k))
        return jnp.where(all_fit, found.reach, k)

    def _bisect(self, failed, k: int, capacity: int) -> _Bracket:
        """Returns a bracket whose low no more elements reach than there are slots, or fewer than k exceed."""
        dtype = self.x_smem.dtype
        lowest = sort_keys.lowest_key(dtype)
        # Each of these keys, tried first, ends the bisection at once in a case that is not rare: ties at the
        # bound, fewer than k elements that are not masked, NaNs.
        likely_keys = failed, lowest + 1, sort_keys.key_of(np.nan, dtype), sort_keys.key_of(-np.nan, dtype)

        def is_open(bracket: _Bracket):
            too_many = (bracket.reach > capacity) & (bracket.exceed >= k)
            return too_many & (bracket.low != bracket.high)

        def halve(bracket: _Bracket):
            low, high, reach, exceed, turn = bracket
            gap = high - low  # unsigned: it may be more than 2^31
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
        around = self.window.size - self.owned  # positions that hold -inf, and no element
        neg_inf = sort_keys.key_of(-np.inf, self.x_smem.dtype)
        return reach - jnp.where(neg_inf >= bound, around, 0), exceed - jnp.where(neg_inf > bound, around, 0)

    def _collect_ties(self, bound, first, k: int):
        """Fills the slots from `first` to k - 1 with elements equal to the bound, those of lowest index."""
        selection.collect_ties(
            self.window, self.x_smem, self.hits_smem, self.slots_smem, bound, self.extent, first, k,
            interpret=self.interpret,
        )  # fmt: skip
