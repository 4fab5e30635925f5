"""Finds the winner of a row: the kept entry with the largest sum of x / temperature and noise.

Noise takes about 90 instructions, and most elements cannot win. If some entry has the sum `goal`, then another element
needs noise of at least goal - x / temperature, and noise is at most `noise_ptx.MOST`, about 16:

    goal     a guess, 2 below logsumexp of the kept entries: the winner is above it in 99.94% of all rows; later the
             best sum so far. The CTAs send it to each other as soon as it is better than their own
    low      elements below this x cannot reach the goal
    sweep    each warp lists its elements from `low` up, and computes noise for 64 listed ones at a time
    maxima   if most elements are listed, the largest element of each thread comes next, for a better goal
    again    if the winner is below the guess, it becomes the goal of another sweep

So the winner does not depend on the guess, or on the order in which sums are found. Only a few words of noise in a row
can reach the goal. They are recognized by u itself: noise is at most -log(1 - u). So only these take two logarithms and
a division.
"""

import dataclasses
import functools
import operator

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import noise_ptx
from pallas_softmax._src.sample.arrival_ptx import Maxima
from pallas_softmax._src.sample.plan import ELEMENTS_AT_ONCE, NOISE_AT_ONCE, WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, TINY, RowProgram
from pallas_softmax._src.sample.search_ptx import Kept

_LOG2_E, _LN2 = 1.4426950408889634, 0.6931471805599453
_GUESS = 2.0
_MOST_ELEMENTS = 0.25  # the share of listed elements from which on maxima come next
_SIGN = 0x80000000
WORDS = "key0", "key1", "high", "low"  # operands: the key, and the words of the place of the first element


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


class Race:
    """The race of a row, and its state in this thread: the goal of the warp, and the best sum of the thread."""

    def __init__(self, p: RowProgram, noise: Noise, kept: Kept, cut: Value):
        """`cut` is the position of the last kept tie."""
        self.p, self.noise, self.kept, self.cut = p, noise, kept, cut
        self.temperature = p.max(p.temperature, TINY)
        self.goal = p.var(p.quotient + p.log2(kept.mass) * _LN2 - _GUESS)
        self.best, self.index = p.var(-INF, "f32"), p.var(HIGHEST, "s32")
        self.list = p.word(p.plan.positions, p.warp, p.plan.noise_words)
        self.published = p.word(p.plan.best)  # the best sum of the row, and its index: see `_publish`

    def run(self, maxima: Maxima) -> Value:
        """Returns a condition: whether this thread has the winner, with the index `index`."""
        p = self.p
        best, winner = p.fresh("f32"), p.fresh("u32")
        guess = p.var(self.goal)
        with p.loop() as leave:
            self._sweep(maxima)
            p.sync_cluster()
            p.load_into([winner, best.bits("u32")], self.published)
            p.set(best, _of_order(best.bits("u32")))
            leave(best >= guess)
            p.set(guess, p.max(best, -INF))  # instead of a NaN
            p.set(self.goal, guess)
            p.sync_cluster()  # all have read the best sum
        return self.index.bits("u32").equals(~winner)

    def _sweep(self, maxima: Maxima) -> None:
        """Finds the best sum of the warp's elements, or a better one of the row."""
        p = self.p
        kept_upto = p.select(self.kept.key.equals(KEEP_ALL), LEAST_FINITE, p.of_key(self.kept.key))
        kept_after = p.of_key(self.kept.key + 1)
        listed, at, remaining, first = p.var(0, "s32"), p.var(p.span), p.var(p.loads), p.var(True, "pred")
        with p.loop() as leave:
            p.sync_warp()
            with p.when(remaining > 0):
                p.set(self.goal, p.max(self.goal, _of_order(p.load(self.published, "u32", offset=4))))
                low, after = self._least_that_reaches(), p.position_of(at) > self.cut
                self._list(listed, at, remaining, p.max(low, p.select(after, kept_after, kept_upto)))
            with p.when(first & (listed >= int(_MOST_ELEMENTS * LANES * p.plan.listed_at_once))):
                self._list_maximum(listed, maxima)
            p.set(first, False)
            p.sync_warp()
            with p.loop() as enough:
                enough(listed < p.select(remaining > 0, NOISE_AT_ONCE * LANES, 1, "s32"))
                self._perturb(listed)
            leave(remaining <= 0)

    def _least_that_reaches(self) -> Value:
        """Returns the least x that reaches the goal with the most noise, or a lower one."""
        p = self.p
        missing = self.goal - p.quotient - noise_ptx.MOST - self._slack() * 2.0**-21
        distance = missing * self.temperature
        slack = (p.absolute(p.top) + p.absolute(distance)) * 2.0**-21 + 1e-44
        return p.max(p.top + distance - slack, LEAST_FINITE)

    def _slack(self) -> Value:
        return self.p.absolute(self.goal) + 32.0

    def _list(self, listed: Value, at: Value, remaining: Value, low: Value) -> None:
        """Lists the positions of the next elements of the warp that are at least `low`."""
        p, vec, count = self.p, self.p.plan.window.vec, self.p.plan.listed_at_once
        loads, position = count // vec, p.position_of(at).bits("u32")
        words = [[p.fresh("s32") for _ in range(4)] for _ in range(loads)]
        inside = p.var(0, "u32")
        for i, of_load in enumerate(words):
            p.load_into(of_load, at, offset=WARP_LOAD_BYTES * i, when=remaining > i)
        for i, of_load in enumerate(words):
            outside = p.var(0, "u32")
            for x in p.floats(of_load):  # the first element has the highest bit
                outside = p.append_sign(outside, (x - low).bits("u32"))
            p.update(inside, "or", (outside ^ (1 << vec) - 1) << (loads - 1 - i) * vec, when=remaining > i)
        with p.when(p.any(inside.differs(0))):
            before, number = p.before(p.count_ones(inside))
            to = p.var(self.list + (listed.bits("u32") + before) * 2)
            for i in range(count):
                lists = (inside & 1 << count - 1 - i).differs(0)
                here = position + (i // vec * LANES * vec + i % vec)
                p.store(to, p.convert(here, "u16"), when=lists)
                p.increase(to, 2, when=lists)
            p.increase(listed, number)
        p.increase(at, WARP_LOAD_BYTES * loads)
        p.increase(remaining, -loads)

    def _list_maximum(self, listed: Value, maxima: Maxima) -> None:
        """Lists the position of the largest element of each thread."""
        p, vec = self.p, self.p.plan.window.vec
        position, end = p.var(0, "u32"), p.span + p.loads.bits("u32") * WARP_LOAD_BYTES
        for i in range(ELEMENTS_AT_ONCE // vec):
            with p.when(maxima.address + WARP_LOAD_BYTES * i < end):
                here = p.position_of(maxima.address).bits("u32") + i * LANES * vec
                for j, x in enumerate(p.floats(p.vector(maxima.address, i))):
                    p.set(position, here + j, when=x.equals(maxima.element))
        p.store(self.list + (listed.bits("u32") + p.lane) * 2, p.convert(position, "u16"))
        p.increase(listed, LANES)

    def _perturb(self, listed: Value) -> None:
        """Takes the last positions off the list, and adds noise to the elements there."""
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
        # noise <= -log(1 - u), so a sum that reaches the goal has 1 - u <= exp(x / temperature - goal)
        least = p.multiply_add(self._slack(), 2.0**-20, self.goal * -_LOG2_E)
        reach = [
            there & ~(one < p.var(2.0, "f32") - p.exp2(p.multiply_add(x, p.scale, least)))
            for one, x, there in zip(ones, elements, there)
        ]
        with p.when(p.any(functools.reduce(operator.or_, reach))):
            for one, x, position, index, reaches in zip(ones, elements, positions, indices, reach):
                with p.when(reaches):
                    self._compare(one, x, position, index)
            self._publish()

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

    def _publish(self) -> None:
        """Sends the best sum of the warp to all CTAs, if it is not below the goal, and makes it the goal.

        A CTA keeps the greatest number: the sum in the upper half, in the order of integers, and the lowest index of
        such a sum in the lower half, inverted.
        """
        p = self.p
        (best,) = p.over_warp(["max"], [self.best])
        index = p.over_lanes("min", p.select(self.best.equals(best), self.index, HIGHEST))
        with p.when((best >= self.goal) & index.differs(HIGHEST) & (p.lane < p.ctas)):
            p.raise_in_cta(self.published, p.lane, p.join((~index).bits("u32"), _order(best)))
        p.set(self.goal, p.max(self.goal, best))


def _order(x: Value) -> Value:
    """Returns an unsigned integer in the order of the floats: above 0, except for a NaN."""
    return flip_negative(x.bits("s32")).bits("u32") ^ _SIGN


def _of_order(number: Value) -> Value:
    """Returns the float of an integer from `_order`; 0 gives a NaN, which no comparison takes."""
    return flip_negative((number ^ _SIGN).bits("s32")).bits("f32")
