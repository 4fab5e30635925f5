"""The race of a row: which entry has the largest sum of x / temperature and noise.

Noise takes 78 instructions, 68 of them threefry, and most elements cannot win. If some entry has the sum `threshold`,
another element needs noise of at least threshold - x / temperature. Noise is at most `MAX_NOISE`, about 16:

    threshold   the best sum that the warp knows; with filters, a guess at first. The CTAs send each other better ones
    low         elements below this x cannot reach the threshold, so they need no noise
    needed      even above `low`, most noise is too small. Noise is at most -log(1 - u). One exp2 tells whether this
                bound reaches the threshold (`Race.enter`). Only then does a thread compute the two logarithms and the
                division

The winner does not depend on the thresholds: ties go to the lowest index. With filters, `WinnerSearch` runs the race
over a row in shared memory. Each warp lists the elements that take part:

    threshold   at first a guess, 2 below logsumexp of the kept entries. The winner exceeds the guess with probability
                1 - exp(-e^2), in 99.94% of all rows
    sweep       each warp lists its elements from `Race.low` up, and enters 64 listed ones at a time; where most
                elements can win, it lists all of them, which is faster
    again       if the winner is below the guess, its sum becomes the threshold of another sweep; if no sum was found,
                that sweep takes all elements

If the filters have listed all that they keep, these lists replace the warps' own lists.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample.filter_ptx import Kept
from pallas_softmax._src.sample.plan import NOISE_AT_ONCE, SCRATCH, WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, LEAST_FINITE, TINY, ClusterProgram, PartProgram

# Operands: the random key, and the words of the counter of the row's first element.
NOISE_OPERANDS = "key0", "key1", "counter_high", "counter_low"
_SIGN = 0x80000000
_LN2 = math.log(2)
# Bounds on rounding errors: 8 and 16 times the relative error of one operation, 2^-24. Near the threshold they are
# relative to |threshold| + 32: noise is between -5 and 16, so |x / temperature| and |noise| together are less.
_SUM_ERROR, _EXPONENT_ERROR, _NOISE_RANGE = 2.0**-21, 2.0**-20, 32.0
_SUBNORMAL_ERROR = 1e-44  # a few of the least subnormal numbers


class Race:
    """The race: the thresholds of the warp, and the best sum of the thread, with its index and its element."""

    def __init__(
        self,
        p: ClusterProgram,
        stride: int,
        least: Value | float = LEAST_FINITE,
        is_kept: Callable[[Value, Value], Value] | None = None,
    ):
        """Entries below `least` do not take part, nor those where is_kept(element, index) is false."""
        self.p, self.least, self.is_kept = p, least, is_kept
        self.noise = Noise(p, p.operands("u32", *NOISE_OPERANDS), stride)
        self.temperature = p.max(p.temperature, TINY)
        self.threshold, self.minus_threshold, self.low = (p.fresh("f32") for _ in range(3))
        self.best, self.index, self.x = p.fresh("f32"), p.fresh("s32"), p.fresh("f32")
        self.threshold_of_cta = p.word(SCRATCH.threshold)  # the best sum that the CTA knows, by `order`

    def start(self, threshold: Value | float) -> None:
        p = self.p
        p.set(self.best, -INF)
        p.set(self.index, HIGHEST)
        p.set(self.x, -INF)
        self.set_threshold(p.var(threshold, "f32"))

    def catch_up(self) -> None:
        """Takes the threshold of the CTA, if it is better. No barrier is needed: an old value is lower."""
        best = from_order(self.p.load(self.threshold_of_cta, "u32"))
        with self.p.when(best > self.threshold):
            self.set_threshold(best)

    def enter(self, elements: Sequence[Value], indices: Sequence[Value], more: Value) -> None:
        """Adds noise to entries of each lane. `more` says whether further ones will follow."""
        p = self.p
        ones_plus_u = self.noise.ones_plus_uniform(indices)
        # Noise is at most -log(1 - u). So the sum reaches the threshold only if 1 - u <= exp(x / temperature -
        # threshold), that is, if 1 + u is at least `needed`.
        two = p.var(2.0, "f32")
        needed = [two - p.exp2(p.multiply_add(x, p.octaves_per_unit, self.minus_threshold)) for x in elements]
        reach = [~(one_plus_u < least) for one_plus_u, least in zip(ones_plus_u, needed)]
        with p.when(p.any(functools.reduce(operator.or_, reach))):
            for one_plus_u, x, index, reaches in zip(ones_plus_u, elements, indices, reach):
                with p.when(reaches):
                    self._compare(one_plus_u, x, index)
            with p.when(more):
                (best,) = p.over_warp(["max"], [self.best])
                with p.when(best > self.threshold):
                    with p.when(p.lane < p.ctas):
                        p.raise_in_cta(self.threshold_of_cta, p.lane, order(best))
                    self.set_threshold(best)

    @staticmethod
    def first_best(p: ClusterProgram, best: Value, index: Value, x: Value) -> list[Value]:
        """Returns the largest sum of all lanes, the lowest index that has it, and the element there; +0 is above -0."""
        (largest,) = p.over_warp(["max"], [best])
        index = p.select(best.bits("s32").equals(largest.bits("s32")), index, HIGHEST)
        first = p.over_lanes("min", index)
        return [largest, first, p.shuffle(x, "idx", p.first_that(index.equals(first)))]

    def set_threshold(self, threshold: Value) -> None:
        """Sets the threshold and what depends on it, with margins for rounding.

        `minus_threshold` is -threshold * log2(e).
        """
        p = self.p
        scale = p.absolute(threshold) + _NOISE_RANGE
        p.set(self.threshold, threshold)
        p.set(self.minus_threshold, p.multiply_add(scale, _EXPONENT_ERROR, threshold * -LOG2_E))
        low = (threshold - MAX_NOISE - scale * _SUM_ERROR) * self.temperature
        low = low - (p.absolute(low) * _SUM_ERROR + _SUBNORMAL_ERROR)
        p.set(self.low, p.max(low, self.least))

    def _compare(self, one_plus_u: Value, x: Value, index: Value) -> None:
        p = self.p
        z = p.divide_exactly(x, self.temperature) + gumbel(p, one_plus_u) + 0.0  # +0 in place of -0
        wins = (z > self.best) | (z.equals(self.best) & (index < self.index))
        wins = wins & (p.absolute(x) < INF)
        if self.is_kept is not None:
            wins = wins & self.is_kept(x, index)
        for register, value in ((self.best, z), (self.index, index), (self.x, x)):
            p.set(register, value, when=wins)


def order(x: Value) -> Value:
    """Returns an unsigned integer in the order of the floats: above 0, except for the NaN with all bits set."""
    return flip_negative(x.bits("s32")).bits("u32") ^ _SIGN


def from_order(number: Value) -> Value:
    """Returns the float of an integer from `order`. 0 gives a NaN, and every comparison with it is false."""
    return flip_negative((number ^ _SIGN).bits("s32")).bits("f32")


# --- The race of a row with filters

_GUESS_BELOW = 2.0  # how far the first threshold is below logsumexp
# If a larger share of elements can win, all are listed. Other shares were not timed.
_DENSE = 3 / 4
_BATCH = NOISE_AT_ONCE * LANES  # positions that a warp enters at once


class WinnerSearch:
    """The search for the winner: it lists elements for the race, or takes the lists of the filters.

    `last_tie` is the position of the last kept entry with `kept.last_key`.
    """

    def __init__(self, p: PartProgram, stride: int, kept: Kept, last_tie: Value):
        self.p, self.kept, self.last_tie = p, kept, last_tie
        least = p.select(kept.keeps_all(), LEAST_FINITE, p.from_key(kept.last_key))
        self.race = Race(p, stride, least, self._is_kept)

    def run(self) -> tuple[Value, Value]:
        """Returns the index of the winner, and the element there."""
        p, race = self.p, self.race
        index, x = p.fresh("s32"), p.fresh("f32")
        guess = p.var(p.tempered_top + p.log2(self.kept.mass) * _LN2 - _GUESS_BELOW)
        slot = p.var(p.word(SCRATCH.best))  # one of two
        race.start(guess)
        with p.loop() as leave:
            self._sweep()
            values, neutral = [race.best, race.index, race.x], [-INF, HIGHEST, -INF]
            each = p.over_each_cta(lambda values: race.first_best(p, *values), values, neutral, slot)
            best, winner, element = race.first_best(p, *each)
            p.set(index, winner)
            p.set(x, element)
            leave(best >= guess)
            p.set(guess, best)
            race.set_threshold(best)
            p.set(slot, slot ^ 16)  # other CTAs may still read the last results
        return index, x

    def _is_kept(self, x: Value, index: Value) -> Value:
        key, position = self.p.key(x), index - self.p.start
        return (key > self.kept.last_key) | (key.equals(self.kept.last_key) & (position <= self.last_tie))

    def _sweep(self) -> None:
        """Finds the best sum of the warp's elements, unless it is below the threshold."""
        p, kept = self.p, self.kept
        at, remaining = p.var(p.first_vector), p.var(p.select(kept.listed, 0, p.loads))
        share = p.plan.list_size // p.warps  # the filters' list is cut into a share for each warp
        from_share_on = p.load(p.word(SCRATCH.listed), "s32") - p.warp.bits("s32") * share
        listed = p.select(kept.listed, p.min(p.max(from_share_on, 0), share), 0)
        filters_list = p.word(p.plan.key_positions, p.warp, share // 2)
        own_list = p.word(p.plan.positions, p.warp, p.plan.list_words)
        list_ = p.select(kept.listed, filters_list, own_list)
        end = p.var(list_ + listed.bits("u32") * 2)  # the address after the last listed position
        more, until = p.var(remaining > 0), p.var(list_)
        with p.loop() as leave:
            p.sync_warp()
            with p.loop() as enough:
                enough(end <= until)
                self._enter_listed(list_, end, more)
            p.sync_warp()
            leave(remaining <= 0)
            self.race.catch_up()
            self._list(end, at, remaining)
            p.set(more, remaining > 0)
            # A partial batch waits for more positions, until there are none.
            p.set(until, p.select(more, list_ + 2 * (_BATCH - 1), list_))

    def _list(self, end: Value, at: Value, remaining: Value) -> None:
        """Lists the warp's next elements from `low` up; after the last kept tie, those above the ties."""
        p, vec, count = self.p, self.p.plan.window.vec, self.p.plan.listed_at_once
        loads = count // vec
        run, vectors = p.plan.window.run, p.vectors(at, loads, [remaining > i for i in range(loads)])
        # If a filter keeps few elements, most of these have none of them. A maximum of packed elements shows it soon.
        may_list = p.any(~(p.greatest(sum(vectors, [])) < self.race.low)) if p.elements.halves else None
        with contextlib.nullcontext() if may_list is None else p.when(may_list):
            position = p.position_of(at)
            above_ties = p.from_key(self.kept.last_key + 1)
            least = p.select(position > self.last_tie, p.max(self.race.low, above_ties), self.race.low)
            inside = p.var(0, "u32")
            for i, words in enumerate(vectors):  # the last element has the lowest bit
                outside = p.var(0, "u32")
                for x in p.floats(words):  # appends the sign
                    outside = p.write("shf.l.clamp.b32", "u32", (x - least).bits("u32"), outside, 1)
                inside = inside << vec | p.select(remaining > i, ~outside & 2**vec - 1, 0)
            positions = [position.bits("u32") + (i // run * LANES * run + i % run) for i in range(count)]
            number = p.over_lanes("add", p.count_ones(inside))
            lists_all = (number > int(_DENSE * LANES * count)) & (remaining >= loads)
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
        p.increase(at, WARP_LOAD_BYTES * loads)
        p.increase(remaining, -loads)

    def _enter_listed(self, list_: Value, end: Value, more: Value) -> None:
        """Enters the last positions of the list in the race, and removes them from the list."""
        p = self.p
        p.increase(end, -2 * _BATCH)
        first = end + p.lane * 2
        # Entries before the first one are the first one again.
        entries = [p.max(first + 2 * LANES * i, list_) for i in range(NOISE_AT_ONCE)]
        positions = [p.convert(p.load(entry, "u16"), "u32").bits("s32") for entry in entries]
        p.set(end, p.max(end, list_))
        elements = [p.element(p.at(p.x, position, p.elements.itemsize)) for position in positions]
        self.race.enter(elements, [position + p.start for position in positions], more)


# --- The noise of `jax.random.gumbel` in inline PTX: threefry2x32 of the counter of an element, and -log(-log(u))
#
#     counter   the number of an element in the array of noise, 64 bits
#     word      the bits of `jax.random.bits` there: both halves of threefry2x32(key, counter), combined by xor
#     1 + u     a float32 with the upper 23 bits of the word as its fraction
#     noise     -log(-log(u)), float32, where u = 0 counts as the smallest normal number; at most `MAX_NOISE`
#
# The logarithm repeats the one of CUDA's libdevice, which XLA calls, so that the noise has the same bits on a GPU.

MAX_NOISE = 15.9424  # the noise of the largest u, 1 - 2^-23, rounded up

_ONE = 0x3F800000  # the bits of 1.0
# Constants of threefry2x32 (Salmon et al., 2011), as in `jax.random`.
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_TWO_THIRDS = 0x3F2AAAAB  # the bits of 2/3: the logarithm takes a number as m 2^e, with m from there to 4/3
_EXPONENT = 0xFF800000  # the bits of the sign and the exponent
# libdevice's coefficients, the highest power first, for Horner's rule: log(1 + f) = f + f^2 (-1/2 + f (..)).
_SERIES = (0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78, 0xBF000000)


class Noise:
    """The noise of a row: `words` are its key, and the counter of its first element, as `noise.words` returns them.

    The element with index i has the counter first_counter + i * stride, modulo 2^64.
    """

    def __init__(self, p: Program, words: Sequence[Value], stride: int):
        key0, key1, high, low = words
        self.p, self.stride = p, stride
        self.schedule, self.first_counter = key_schedule(p, key0, key1), p.join(low, high)

    def ones_plus_uniform(self, indices: Sequence[Value]) -> list[Value]:
        """Returns 1 + u of each element; `gumbel` makes noise of it."""
        p, (key0, key1) = self.p, self.schedule[0]
        counters = [p.multiply_add_wide(i.bits("u32"), self.stride, self.first_counter) for i in indices]
        keyed = [(high + key0, low + key1) for low, high in map(p.split, counters)]
        return [one_plus_uniform(p, word) for word in words_at(p, self.schedule, keyed)]


def key_schedule(p: Program, key0: Value, key1: Value) -> list[tuple[Value, Value]]:
    """Returns what is added to both words of a counter: at the start, and after every four rounds."""
    keys = [key0, key1, p.bitwise3(lambda a, b, c: a ^ b ^ c, key0, key1, p.var(_PARITY, "u32"))]
    return [(keys[i % 3], keys[(i + 1) % 3] + i if i else keys[1]) for i in range(6)]


def words_at(p: Program, schedule: list[tuple[Value, Value]], halves: list[tuple[Value, Value]]) -> list[Value]:
    """Returns the word of each counter; `halves` are its upper and its lower half, with the first keys added.

    Counters take turns, so that no instruction waits for the last one.
    """
    for rotations, (first, second) in zip(_ROTATIONS * 3, schedule[1:]):
        for by in rotations:
            halves = [(x + y, y) for x, y in halves]
            halves = [(x, p.write("shf.l.wrap.b32", "u32", y, y, by) ^ x) for x, y in halves]
        halves = [(x + first, y + second) for x, y in halves]
    return [x ^ y for x, y in halves]


def one_plus_uniform(p: Program, word: Value) -> Value:
    return p.write("shf.l.wrap.b32", "u32", word, _ONE >> 23, 23, of=("b32", "b32", "i32")).bits("f32")


def gumbel(p: Program, one_plus_u: Value) -> Value:
    u = p.max(one_plus_u - 1.0, TINY)
    return log(p, log(p, u) * -1.0) * -1.0


def log_prob_of(p: ClusterProgram, x: Value, top: Value, total: Value) -> Value:
    return (x - top) * p.octaves_per_unit * _LN2 - log(p, total)


def log(p: Program, x: Value) -> Value:
    """Returns log(x) of a positive normal number, accurate to one unit in the last place."""
    bits = x.bits("u32")
    exponent = (bits - _TWO_THIRDS) & _EXPONENT
    f = (bits - exponent).bits("f32") - 1.0
    first, *others = np.array(_SERIES, np.uint32).view(np.float32).tolist()
    series = p.var(first, "f32")
    for coefficient in others:
        series = p.multiply_add(series, f, coefficient)
    log_of_m = p.multiply_add(f * series, f, f)
    return p.multiply_add(p.convert(exponent.bits("s32"), "f32") * 2.0**-23, _LN2, log_of_m)
