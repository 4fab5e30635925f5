"""Finds the winner of a row: the kept entry with the largest sum of x / temperature and noise.

Noise takes about 90 instructions, and most elements cannot win. If some entry has the sum `threshold`, another element
needs noise of at least threshold - x / temperature. Noise is at most `noise_ptx.MAX_NOISE`, about 16:

    threshold   a guess, 2 below logsumexp of the kept entries; later the best sum so far, which the CTAs send to each
                other. The winner exceeds the guess with probability 1 - exp(-e^2), in 99.94% of all rows
    low         elements below this x cannot reach the threshold
    sweep       each warp lists its elements from `low` up, and computes noise for 64 listed ones at a time; where most
                elements can win, it lists all of them, which is faster
    again       if the winner is below the guess, its sum becomes the threshold of another sweep

If the filters have listed all that they keep, these lists replace the warps' own lists. The winner depends neither on
the guess nor on the order of the sums.

Even at a listed element, few words of noise reach the threshold. Noise is at most -log(1 - u), a bound that needs no
logarithm: see `WinnerSearch._perturb`. A thread computes the two logarithms and the division only if this bound reaches
the threshold.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample import noise_ptx
from pallas_softmax._src.sample.filter_ptx import Kept
from pallas_softmax._src.sample.plan import NOISE_AT_ONCE, RECORD_WORDS, SCRATCH, WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, LN2, TINY, RowProgram

# Operands: the key, and the words of the counter of the row's first element.
NOISE_OPERANDS = "key0", "key1", "counter_high", "counter_low"
_GUESS_BELOW = 2.0  # how far the first threshold is below logsumexp
# If a larger share of elements can win, all are listed. Other shares were not timed.
_DENSE = 3 / 4
_BATCH = NOISE_AT_ONCE * LANES  # positions that a warp perturbs at once
_SIGN = 0x80000000
# Bounds on rounding errors: 8 and 16 times the relative error of one operation, 2^-24. Near the threshold they are
# relative to |threshold| + 32: noise is between -5 and 16, so |x / temperature| and |noise| together are less.
_SUM_ERROR, _EXPONENT_ERROR, _NOISE_RANGE = 2.0**-21, 2.0**-20, 32.0
_SUBNORMAL_ERROR = 1e-44  # a few of the least subnormal numbers


# --- Ties: the entries with the last kept key


def find_last_tie(p: RowProgram, kept: Kept) -> tuple[Value, Value, Value]:
    """Returns the CTA of the last kept tie, its position in this CTA, and whether any tie is left out.

    The kept ties are the first ones of the row: all of them in lower CTAs, none in higher ones. The filters know how
    many ties each CTA has and keeps.
    """
    is_cut = p.any(kept.equal_kept < kept.equal)
    last = p.last_that(kept.equal_kept > 0)
    position = p.var(p.select(is_cut & (p.cta > last), -1, HIGHEST, "s32"))
    with p.when(is_cut & p.cta.equals(last)):
        p.set(position, _position_of_tie(p, kept.key, p.shuffle(kept.equal_kept, "idx", last)))
    return last, position, is_cut


def _position_of_tie(p: RowProgram, key: Value, number: Value) -> Value:
    """Returns the position of element `number`, from 1, of the CTA's elements with this key.

    Each warp counts its elements with the key. Then the warp that has the element looks for it, load by load.
    """
    equal = p.var(0, "u32")
    for x in p.each_element():
        p.increase(equal, 1, when=p.key(x).equals(key))
    own = p.over_lanes("add", equal)
    p.store(p.word(SCRATCH.warps, p.warp, RECORD_WORDS), own, when=p.first_lane)
    p.barrier()
    (each,) = p.from_warps(["u32"], [0])
    before, _ = p.before(each)
    rest = p.var(number - p.shuffle(before, "idx", p.warp))  # the number among the elements of this warp
    with p.when((rest.bits("s32") > 0) & (rest <= own)):
        at = p.var(p.first_vector)
        with p.repeat() as again:
            elements = p.floats(p.vector(at))
            equal = p.var(0, "u32")
            for x in elements:
                p.increase(equal, 1, when=p.key(x).equals(key))
            before, in_load = p.before(equal)
            missing = in_load < rest
            p.increase(at, WARP_LOAD_BYTES, when=missing)
            p.update(rest, "sub", in_load, when=missing)
            again(missing)
        position, seen = p.position_of(at), p.var(before)
        for i, x in enumerate(elements):
            is_equal = p.key(x).equals(key)
            p.increase(seen, 1, when=is_equal)
            p.store(p.word(SCRATCH.picked), position + i, when=is_equal & seen.equals(rest))
    p.barrier()
    return p.load(p.word(SCRATCH.picked), "s32")


# --- The draw


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise of a row: the element at position i of this CTA has counter start + i * stride, modulo 2^64."""

    schedule: list[tuple[Value, Value]]  # `noise_ptx.key_schedule`
    start: Value
    stride: int

    @staticmethod
    def of_row(p: RowProgram, stride: int) -> "Noise":
        """Returns the noise of the operands."""
        key0, key1, high, low = p.operands("u32", *NOISE_OPERANDS)
        # The product takes the origin as unsigned. If it is negative, the sum is 2^32 * stride too large.
        start = p.multiply_add_wide(p.origin.bits("u32"), stride, p.join(low, high))
        excess = p.select(p.origin < 0, stride, 0, "u32")
        return Noise(noise_ptx.key_schedule(p, key0, key1), start - p.join(p.var(0, "u32"), excess), stride)


class WinnerSearch:
    """The search for the winner, and its state: the threshold of the warp, and the best sum of the thread."""

    def __init__(self, p: RowProgram, noise: Noise, kept: Kept, last_tie: Value):
        """`last_tie` is the position of the last kept tie: ties have the key `kept.key`."""
        self.p, self.noise, self.kept, self.last_tie = p, noise, kept, last_tie
        self.temperature = p.max(p.temperature, TINY)
        self.least_kept = p.select(kept.key.equals(KEEP_ALL), LEAST_FINITE, p.from_key(kept.key))
        self.threshold, self.minus_threshold, self.low = (p.fresh("f32") for _ in range(3))
        self._set_threshold(p.tempered_top + p.log2(kept.mass) * LN2 - _GUESS_BELOW)
        self.best, self.index = p.var(-INF, "f32"), p.var(HIGHEST, "s32")
        self.threshold_of_cta = p.word(SCRATCH.threshold)  # the best sum that the CTA knows, by `_order`

    def run(self) -> tuple[Value, Value]:
        """Returns the index of the winner, and the number of its CTA."""
        p = self.p
        index, cta, guess = p.fresh("s32"), p.fresh("u32"), p.var(self.threshold)
        slot = p.var(p.word(SCRATCH.best))  # one of two
        with p.loop() as leave:
            self._sweep()
            each = p.over_each_cta(self._first_best, [self.best, self.index], [-INF, HIGHEST], slot)
            best, winner = self._first_best(each)
            p.set(index, winner)
            p.set(cta, p.first_that(each[1].equals(winner)))
            leave(best >= guess)
            p.set(guess, best)
            self._set_threshold(best)
            p.set(slot, slot ^ 8)  # other CTAs may still read the last results
        return index, cta

    def _first_best(self, values: Sequence[Value]) -> list[Value]:
        """Returns the largest sum of all lanes, and the lowest index that has it."""
        p, (value, index) = self.p, values
        (best,) = p.over_warp(["max"], [value])
        return [best, p.over_lanes("min", p.select(value.equals(best), index, HIGHEST))]

    def _sweep(self) -> None:
        """Finds the best sum of the warp's elements, unless it is below the threshold."""
        p, kept = self.p, self.kept
        at, remaining = p.var(p.first_vector), p.var(p.select(kept.listed, 0, p.loads))
        share = p.plan.list_size // p.warps  # the filters' list is cut into a share for each warp
        from_share_on = p.load(p.word(SCRATCH.listed), "s32") - p.warp.bits("s32") * share
        listed = p.select(kept.listed, p.min(p.max(from_share_on, 0), share), 0)
        filters_list = p.word(p.plan.key_positions, p.warp, share // 2)
        own_list = p.word(p.plan.positions, p.warp, p.plan.noise_words)
        list_ = p.select(kept.listed, filters_list, own_list)
        end = p.var(list_ + listed.bits("u32") * 2)  # the address after the last listed position
        more, until = p.var(remaining > 0), p.var(list_)
        with p.loop() as leave:
            p.sync_warp()
            with p.loop() as enough:
                enough(end <= until)
                self._perturb(list_, end, more)
            p.sync_warp()
            leave(remaining <= 0)
            # No barrier orders this read and the raises of other warps. An old value will do: it is lower.
            best = _from_order(p.load(self.threshold_of_cta, "u32"))
            with p.when(best > self.threshold):
                self._set_threshold(best)
            self._list(end, at, remaining)
            p.set(more, remaining > 0)
            # A partial batch waits for more positions, until there are none.
            p.set(until, p.select(more, list_ + 2 * (_BATCH - 1), list_))

    def _least_that_reaches(self) -> Value:
        """Returns the least x that reaches the threshold with the most noise, or a lower one."""
        p = self.p
        missing = self.threshold - p.tempered_top - noise_ptx.MAX_NOISE - self._error_scale() * _SUM_ERROR
        distance = missing * self.temperature
        slack = (p.absolute(p.top) + p.absolute(distance)) * _SUM_ERROR + _SUBNORMAL_ERROR
        return p.max(p.top + distance - slack, LEAST_FINITE)

    def _error_scale(self) -> Value:
        """Returns the magnitude of the numbers that add up to the threshold: rounding errors are relative to it."""
        return self.p.absolute(self.threshold) + _NOISE_RANGE

    def _list(self, end: Value, at: Value, remaining: Value) -> None:
        """Lists the warp's next elements from `low` up; after the last kept tie, those above the ties."""
        p, vec, count = self.p, self.p.plan.window.vec, self.p.plan.listed_at_once
        loads = count // vec
        vectors = [[p.fresh("s32") for _ in range(4)] for _ in range(loads)]
        for i, words in enumerate(vectors):
            p.load_into(words, at, offset=WARP_LOAD_BYTES * i, when=remaining > i)
        # If a filter keeps few elements, most of these have none of them. A maximum of packed elements shows it soon.
        may_list = p.any(~(p.greatest(sum(vectors, [])) < self.low)) if p.elements.halves else None
        with contextlib.nullcontext() if may_list is None else p.when(may_list):
            self._list_words(end, p.position_of(at), vectors, remaining)
        p.increase(at, WARP_LOAD_BYTES * loads)
        p.increase(remaining, -loads)

    def _list_words(self, end: Value, position: Value, vectors: list[list[Value]], remaining: Value) -> None:
        """Lists elements of these vectors; the first one has the position. `remaining` of the vectors exist."""
        p, vec, count = self.p, self.p.plan.window.vec, self.p.plan.listed_at_once
        above_ties = p.from_key(self.kept.key + 1)
        least = p.select(position > self.last_tie, p.max(self.low, above_ties), self.low)
        inside = p.var(0, "u32")
        for i, words in enumerate(vectors):  # the last element has the lowest bit
            outside = p.var(0, "u32")
            for x in p.floats(words):
                outside = p.append_sign(outside, (x - least).bits("u32"))
            inside = inside << vec | p.select(remaining > i, ~outside & 2**vec - 1, 0)
        positions = [position.bits("u32") + (i // vec * LANES * vec + i % vec) for i in range(count)]
        number = p.over_lanes("add", p.count_ones(inside))
        lists_all = (number > int(_DENSE * LANES * count)) & (remaining >= len(vectors))
        with p.when(lists_all):
            for i, here in enumerate(positions):
                p.store(end + p.lane * 2, p.convert(here, "u16"), offset=2 * LANES * i)
            p.increase(end, 2 * LANES * count)
        with p.when(~lists_all & (number > 0)):
            before, _ = p.scan(p.count_ones(inside))
            to = p.var(end + before * 2)
            for i, here in enumerate(positions):
                is_inside = (inside & 1 << count - 1 - i).differs(0)
                p.store(to, p.convert(here, "u16"), when=is_inside)
                p.increase(to, 2, when=is_inside)
            p.increase(end, number * 2)

    def _perturb(self, list_: Value, end: Value, more: Value) -> None:
        """Takes the last positions of the list, and adds noise to the elements there.

        `more` is a condition: whether further positions will be listed.
        """
        p, noise = self.p, self.noise
        p.increase(end, -2 * _BATCH)
        first = end + p.lane * 2
        # Entries before the first one are the first one again.
        entries = [p.max(first + 2 * LANES * i, list_) for i in range(NOISE_AT_ONCE)]
        positions = [p.convert(p.load(entry, "u16"), "u32").bits("s32") for entry in entries]
        p.set(end, p.max(end, list_))
        elements = [p.element_at(position) for position in positions]
        counters = [p.multiply_add_wide(i.bits("u32"), noise.stride, noise.start) for i in positions]
        words = noise_ptx.words_at(p, noise.schedule, counters)
        ones_plus_u = [noise_ptx.one_plus_uniform(word) for word in words]
        # Noise is at most -log(1 - u). So the sum reaches the threshold only if 1 - u <= exp(x / temperature -
        # threshold), that is, if 1 + u is at least `needed`.
        two = p.var(2.0, "f32")
        needed = [two - p.exp2(p.multiply_add(x, p.octaves_per_unit, self.minus_threshold)) for x in elements]
        reach = [~(one_plus_u < least) for one_plus_u, least in zip(ones_plus_u, needed)]
        with p.when(p.any(functools.reduce(operator.or_, reach))):
            for one_plus_u, x, position, reaches in zip(ones_plus_u, elements, positions, reach):
                with p.when(reaches):
                    self._compare(one_plus_u, x, position)
            with p.when(more):
                self._publish()

    def _compare(self, one_plus_u: Value, x: Value, position: Value) -> None:
        """Makes an entry the best one of this thread, if it is kept and better."""
        p = self.p
        z = p.divide_exactly(x, self.temperature) + noise_ptx.gumbel(p, one_plus_u)
        key, index = p.key(x), position + p.origin
        kept = (key > self.kept.key) | (key.equals(self.kept.key) & (position <= self.last_tie))
        better = (z > self.best) | (z.equals(self.best) & (index < self.index))
        wins = better & kept & (x >= LEAST_FINITE)
        p.set(self.best, z, when=wins)
        p.set(self.index, index, when=wins)

    def _publish(self) -> None:
        """Makes the best sum of the warp its threshold, and sends it to all CTAs."""
        p = self.p
        (best,) = p.over_warp(["max"], [self.best])
        with p.when(best > self.threshold):
            with p.when(p.lane < p.ctas):
                p.raise_in_cta(self.threshold_of_cta, p.lane, _order(best))
            self._set_threshold(best)

    def _set_threshold(self, threshold: Value) -> None:
        """Sets the threshold and what depends on it.

        `minus_threshold` is -threshold * log2(e), plus a margin for rounding. Elements below `low` do not reach it, or
        are not kept.
        """
        p = self.p
        p.set(self.threshold, threshold)
        p.set(self.minus_threshold, p.multiply_add(self._error_scale(), _EXPONENT_ERROR, threshold * -LOG2_E))
        p.set(self.low, p.max(self._least_that_reaches(), self.least_kept))


def _order(x: Value) -> Value:
    """Returns an unsigned integer in the order of the floats: above 0, except for a NaN."""
    return flip_negative(x.bits("s32")).bits("u32") ^ _SIGN


def _from_order(number: Value) -> Value:
    """Returns the float of an integer from `_order`. 0 gives a NaN, and every comparison with it is false."""
    return flip_negative((number ^ _SIGN).bits("s32")).bits("f32")
