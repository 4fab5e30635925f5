"""Finds the winner of a row: the kept entry with the largest sum of x / temperature and noise.

Noise takes about 90 instructions, and most elements cannot win. If some entry has the sum `goal`, then an element needs
noise of at least goal - x / temperature, and noise is at most `noise_ptx.MOST`, about 16:

    goal     a guess, 2 below logsumexp of the kept entries: the winner is above it in 99.94% of all rows
    low      elements below this x cannot reach the goal
    maxima   if `low` leaves out kept entries, the largest element of each thread gets noise first: the best sum of the
             row is a better goal
    sweep    each warp lists its elements from `low` up, and computes noise for 64 listed ones at a time
    again    if the winner is below the goal, it becomes the goal of another sweep

So the result does not depend on the guess. Only a few words of noise in a row can reach the goal. They are recognized
by u itself: noise is at most -log(1 - u). So only these take two logarithms and a division.
"""

import dataclasses

import numpy as np

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import noise_ptx
from pallas_softmax._src.sample.arrival_ptx import Maxima
from pallas_softmax._src.sample.plan import ELEMENTS_AT_ONCE, NOISE_AT_ONCE, WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, RowProgram
from pallas_softmax._src.sample.search_ptx import Kept

_LOG2_E, _LN2 = 1.4426950408889634, 0.6931471805599453
_GUESS = 2.0
WORDS = "key0", "key1", "high", "low"  # operands: the key, and the words of the place of the first element
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise of a row: element i has place start + i * stride."""

    key: tuple[Value, Value]
    start: Value
    stride: int

    @staticmethod
    def of(p: RowProgram, stride: int) -> "Noise":
        """Returns the noise of the operands `WORDS`."""
        key0, key1, high, low = p.operands("u32", *WORDS)
        return Noise((key0, key1), p.join(low, high), stride)


def find(p: RowProgram, noise: Noise, kept: Kept, cut: Value, maxima: Maxima) -> tuple[Value, Value]:
    """Returns the index of the winner, and the number of its CTA. `cut` is the position of the last kept tie."""
    race = _Race(p, noise, kept, cut)
    low = p.var(race.least_that_reaches())
    upto = p.select(kept.key.equals(KEEP_ALL), LEAST_FINITE, p.of_key(kept.key))
    first = p.var(low > upto)  # whether a better goal is worth while
    slot, index, cta = p.var(p.word(p.plan.best)), p.fresh("s32"), p.fresh("u32")
    with p.loop() as leave:
        race.sweep(p.max(low, upto), p.max(low, p.of_key(kept.key + 1)), first, maxima)
        of_cta = p.each_cta(race.first_best, [race.best, race.index], [-INF, HIGHEST], slot)
        best, winner = race.first_best(of_cta)
        p.set(index, winner)
        p.set(cta, p.first_that(of_cta[1].equals(winner)))
        leave(~first & (best >= race.goal))
        p.set(race.goal, p.max(best, p.select(first, race.goal, -INF)))
        p.set(low, race.least_that_reaches())
        p.set(slot, slot ^ 8)  # other CTAs may still read the last results
        p.set(first, False)
    return index, cta


class _Race:
    """The best sum so far, and how to find a better one."""

    def __init__(self, p: RowProgram, noise: Noise, kept: Kept, cut: Value):
        self.p, self.noise, self.kept, self.cut = p, noise, kept, cut
        self.temperature = p.max(p.temperature, _TINY)
        self.top = p.divide_exactly(p.top, self.temperature)
        _, mass = p.before(kept.mass)
        self.goal = p.var(self.top + p.log2(mass) * _LN2 - _GUESS)
        self.best, self.index = p.var(-INF, "f32"), p.var(HIGHEST, "s32")  # of this thread
        self.list = p.word(p.plan.histogram, p.warp, p.plan.noise_words)

    def first_best(self, values: list[Value]) -> list[Value]:
        """Returns the largest sum of all lanes, and the first index that has it."""
        p, (value, index) = self.p, values
        (best,) = p.over_warp(["max"], [value])
        return [best, p.over_lanes("min", p.select(value.equals(best), index, HIGHEST))]

    def least_that_reaches(self) -> Value:
        """Returns the least x that reaches the goal with the most noise, or a lower one."""
        p = self.p
        missing = self.goal - self.top - noise_ptx.MOST - self._slack(self.goal) * 2.0**-21
        distance = missing * self.temperature
        slack = (p.absolute(p.top) + p.absolute(distance)) * 2.0**-21 + 1e-44
        return p.max(p.top + distance - slack, LEAST_FINITE)

    def _slack(self, goal: Value) -> Value:
        return self.p.absolute(goal) + 32.0

    def sweep(self, upto: Value, after: Value, first: Value, maxima: Maxima) -> None:
        """Finds the best sum of this warp's elements from `upto` up to the cut, and from `after` up after it.

        If `first`, only the maxima take part.
        """
        p = self.p
        listed, at, remaining = p.var(0, "s32"), p.var(p.span), p.var(p.loads)
        with p.when(first):
            self._list_maximum(maxima)
            p.set(listed, LANES)
            p.set(remaining, 0)
        bound = p.var(self.goal)
        with p.loop() as leave:
            p.sync_warp()
            with p.when(remaining > 0):
                self._list(listed, at, remaining, upto, after)
            p.sync_warp()
            with p.loop() as enough:
                enough(listed < p.select(remaining > 0, NOISE_AT_ONCE * LANES, 1, "s32"))
                self._perturb(listed, bound)
            leave(remaining <= 0)

    def _list_maximum(self, maxima: Maxima) -> None:
        """Lists the position of the thread's largest element."""
        p, vec = self.p, self.p.plan.window.vec
        position, end = p.var(0, "u32"), p.span + p.loads.bits("u32") * WARP_LOAD_BYTES
        for i in range(ELEMENTS_AT_ONCE // vec):
            with p.when(maxima.address + WARP_LOAD_BYTES * i < end):
                here = p.position_of(maxima.address).bits("u32") + i * LANES * vec
                for j, x in enumerate(p.floats(p.vector(maxima.address, i))):
                    p.set(position, here + j, when=x.equals(maxima.element))
        p.store(self.list + p.lane * 2, p.convert(position, "u16"))

    def _list(self, listed: Value, at: Value, remaining: Value, upto: Value, after: Value) -> None:
        """Lists the positions of the next elements of the warp that are large enough."""
        p, vec = self.p, self.p.plan.window.vec
        loads, position = ELEMENTS_AT_ONCE // vec, p.position_of(at)
        words = [p.fresh("s32") for _ in range(4 * loads)]
        for i in range(loads):
            p.load_into(words[4 * i : 4 * i + 4], at, offset=WARP_LOAD_BYTES * i, when=remaining > i)
        low, outside = p.select(position > self.cut, after, upto), p.var(0, "u32")
        for x in p.floats(words):  # the first element has the highest bit
            outside = p.append_sign(outside, (x - low).bits("u32"))
        there = p.var(-1, "u32") << p.max(loads - remaining, 0).bits("u32") * vec
        inside = ~outside & there & ((1 << ELEMENTS_AT_ONCE) - 1)
        with p.when(p.any(inside.differs(0))):
            before, number = p.before(p.count_ones(inside))
            to = p.var(self.list + (listed.bits("u32") + before) * 2)
            for i in range(ELEMENTS_AT_ONCE):
                lists = (inside & 1 << ELEMENTS_AT_ONCE - 1 - i).differs(0)
                here = position.bits("u32") + (i // vec * LANES * vec + i % vec)
                p.store(to, p.convert(here, "u16"), when=lists)
                p.increase(to, 2, when=lists)
            p.increase(listed, number)
        p.increase(at, WARP_LOAD_BYTES * loads)
        p.increase(remaining, -loads)

    def _perturb(self, listed: Value, bound: Value) -> None:
        """Takes the last positions off the list and adds noise; `bound` is the best sum of the warp, or the goal."""
        p, noise = self.p, self.noise
        p.increase(listed, -NOISE_AT_ONCE * LANES)
        entries = [listed + p.lane + LANES * i for i in range(NOISE_AT_ONCE)]
        there = [entry >= 0 for entry in entries]
        positions = [self._listed(*of) for of in zip(entries, there)]
        elements = [p.element_at(position) for position in positions]
        indices = [position + p.origin for position in positions]
        places = [p.multiply_add_wide(i.bits("u32"), noise.stride, noise.start) for i in indices]
        ones = [noise_ptx.one_plus_uniform(word) for word in noise_ptx.words_at(p, noise.key, places)]
        p.set(listed, p.max(listed, 0))
        # noise <= -log(1 - u), so a sum that reaches the bound has 1 - u <= exp(x / temperature - bound)
        least = p.multiply_add(self._slack(bound), 2.0**-20, bound * -_LOG2_E)
        reach = [
            there & ~(one < p.var(2.0, "f32") - p.exp2(p.multiply_add(x, p.scale, least)))
            for one, x, there in zip(ones, elements, there)
        ]
        with p.when(p.any(reach[0] if len(reach) == 1 else reach[0] | reach[1])):
            for one, x, position, index, reaches in zip(ones, elements, positions, indices, reach):
                with p.when(reaches):
                    self._compare(one, x, position, index)
            (best,) = p.over_warp(["max"], [self.best])
            p.set(bound, p.max(bound, best))

    def _listed(self, entry: Value, there: Value) -> Value:
        p = self.p
        position = p.load(self.list.bits("s32") + entry * 2, "u16", when=there, default=0)
        return p.convert(position, "u32").bits("s32")

    def _compare(self, one_plus_u: Value, x: Value, position: Value, index: Value) -> None:
        """Makes an entry the best one of this thread, if it is kept and better."""
        p = self.p
        z = p.divide_exactly(x, self.temperature) + noise_ptx.gumbel(p, one_plus_u)
        key = p.key(x)
        kept = (key > self.kept.key) | (key.equals(self.kept.key) & (position <= self.cut))
        better = (z > self.best) | (z.equals(self.best) & (index < self.index))
        wins = better & kept & (x >= LEAST_FINITE)
        p.set(self.best, z, when=wins)
        p.set(self.index, index, when=wins)
