"""The race of a row: which entry has the largest sum of x / temperature and noise.

Noise takes 78 instructions, 68 of them threefry, and most elements cannot win. If some entry has the sum `threshold`,
another element needs noise of at least threshold - x / temperature. Noise is at most `noise_ptx.MAX_NOISE`, about 16:

    threshold   the best sum that the warp knows; with filters, a guess at first. The CTAs send each other better ones
    low         elements below this x cannot reach the threshold, so they need no noise
    needed      even above `low`, most noise is too small. Noise is at most -log(1 - u), a bound that needs
                no logarithm: see `Race.enter`. A thread computes the two logarithms and the division only if this bound
                reaches the threshold

The winner does not depend on the thresholds: ties go to the lowest index.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample import noise_ptx
from pallas_softmax._src.sample.plan import SCRATCH
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, LEAST_FINITE, TINY, ClusterProgram

# Operands: the key, and the words of the counter of the row's first element.
NOISE_OPERANDS = "key0", "key1", "counter_high", "counter_low"
_SIGN = 0x80000000
# Bounds on rounding errors: 8 and 16 times the relative error of one operation, 2^-24. Near the threshold they are
# relative to |threshold| + 32: noise is between -5 and 16, so |x / temperature| and |noise| together are less.
_SUM_ERROR, _EXPONENT_ERROR, _NOISE_RANGE = 2.0**-21, 2.0**-20, 32.0
_SUBNORMAL_ERROR = 1e-44  # a few of the least subnormal numbers


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise of a row: the element with index i has counter start + i * stride, modulo 2^64."""

    p: ClusterProgram
    schedule: list[tuple[Value, Value]]  # `noise_ptx.key_schedule`
    start: Value
    stride: int

    @staticmethod
    def of_row(p: ClusterProgram, stride: int) -> "Noise":
        """Returns the noise of the operands."""
        key0, key1, high, low = p.operands("u32", *NOISE_OPERANDS)
        return Noise(p, noise_ptx.key_schedule(p, key0, key1), p.join(low, high), stride)

    def from_origin(self, origin: Value) -> "Noise":
        """Returns the same noise, with elements counted from the index `origin`, which may be negative."""
        p = self.p
        # The product takes the origin as unsigned. If it is negative, the sum is 2^32 * stride too large.
        start = p.multiply_add_wide(origin.bits("u32"), self.stride, self.start)
        excess = p.select(origin < 0, self.stride, 0, "u32")
        return dataclasses.replace(self, start=start - p.join(p.var(0, "u32"), excess))

    def keyed(self, numbers: Sequence[Value]) -> list[tuple[Value, Value]]:
        """Returns both halves of the counters of elements, with the first keys added."""
        p, (key0, key1) = self.p, self.schedule[0]
        counters = [p.multiply_add_wide(i.bits("u32"), self.stride, self.start) for i in numbers]
        return [(high + key0, low + key1) for low, high in map(p.split, counters)]


class Segment:
    """A stretch of a row with the same upper half of all counters: nearly always the whole row.

    `first` and `end` are indices in the row.
    """

    def __init__(self, noise: Noise, vocab: int):
        p = noise.p
        self.schedule, self._noise, self._vocab = noise.schedule, noise, vocab
        low, _ = p.split(noise.start)
        self._keyed_low = low + noise.schedule[0][1]
        self._keyed_high, self.first, self.end = (p.fresh("u32") for _ in range(3))

    def start_at(self, first: Value | int) -> None:
        """Starts with this element, and goes as far as possible."""
        p, stride = self._noise.p, self._noise.stride
        p.set(self.first, first)
        low, high = p.split(p.multiply_add_wide(self.first, stride, self._noise.start))
        p.set(self._keyed_high, high + self.schedule[0][0])
        room = p.op("not", "u32", low)  # how much the lower half may grow
        room = room if stride == 1 else p.op("div", "u32", room, stride)
        last = p.op("sub", "u32", self._vocab - 1, self.first)
        p.set(self.end, self.first + 1 + p.min(room, last))

    def keyed(self, numbers: Sequence[Value]) -> list[tuple[Value, Value]]:
        """Does what `Noise.keyed` does, for indices in this stretch."""
        stride = self._noise.stride
        scaled = [i.bits("u32") if stride == 1 else i.bits("u32") * stride for i in numbers]
        return [(self._keyed_high, i + self._keyed_low) for i in scaled]


class Race:
    """The race: the thresholds of the warp, and the best sum of the thread, with its index and its element."""

    def __init__(
        self,
        p: ClusterProgram,
        noise: Noise | Segment,
        least: Value | float = LEAST_FINITE,
        is_kept: Callable[[Value, Value], Value] | None = None,
        origin: Value | int = 0,
    ):
        """Entries below `least` do not take part, nor those where is_kept(element, number) is false.

        The number of an entry is its index less the origin.
        """
        self.p, self.noise, self.least, self.is_kept, self.origin = p, noise, least, is_kept, origin
        self.temperature = p.max(p.temperature, TINY)
        self.threshold, self.minus_threshold, self.low = (p.fresh("f32") for _ in range(3))
        self.best, self.index, self.x = p.fresh("f32"), p.fresh("s32"), p.fresh("f32")
        self.threshold_of_cta = p.word(SCRATCH.threshold)  # the best sum that the CTA knows, by `_order`

    def start(self, threshold: Value | float = -INF, *, silent: Value | None = None) -> None:
        """Starts with this threshold; where `silent` holds, no finite entry takes part, and `low` stays infinite."""
        p = self.p
        for register, number in ((self.best, -INF), (self.index, HIGHEST), (self.x, -INF)):
            p.set(register, number)
        self.set_threshold(p.var(threshold, "f32"))
        if silent is not None:
            p.set(self.threshold, INF, when=silent)
            p.set(self.low, INF, when=silent)

    def catch_up(self) -> None:
        """Takes the threshold of the CTA, if it is better."""
        # No barrier orders this read and the raises of other warps. An old value will do: it is lower.
        best = _from_order(self.p.load(self.threshold_of_cta, "u32"))
        with self.p.when(best > self.threshold):
            self.set_threshold(best)

    def enter(self, elements: Sequence[Value], numbers: Sequence[Value], more: Value) -> None:
        """Adds noise to entries of each lane. `more` is a condition: whether further ones will follow."""
        p, noise = self.p, self.noise
        words = noise_ptx.words_at(p, noise.schedule, noise.keyed(numbers))
        ones_plus_u = [noise_ptx.one_plus_uniform(p, word) for word in words]
        # Noise is at most -log(1 - u). So the sum reaches the threshold only if 1 - u <= exp(x / temperature -
        # threshold), that is, if 1 + u is at least `needed`.
        two = p.var(2.0, "f32")
        needed = [two - p.exp2(p.multiply_add(x, p.octaves_per_unit, self.minus_threshold)) for x in elements]
        reach = [~(one_plus_u < least) for one_plus_u, least in zip(ones_plus_u, needed)]
        with p.when(p.any(functools.reduce(operator.or_, reach))):
            for one_plus_u, x, number, reaches in zip(ones_plus_u, elements, numbers, reach):
                with p.when(reaches):
                    self._compare(one_plus_u, x, number)
            with p.when(more):
                self._publish()

    @staticmethod
    def first_best(p: ClusterProgram, best: Value, index: Value, x: Value) -> list[Value]:
        """Returns the largest sum of all lanes, the lowest index that has it, and the element there; +0 is above -0."""
        (largest,) = p.over_warp(["max"], [best])
        index = p.select(best.bits("s32").equals(largest.bits("s32")), index, HIGHEST)
        first = p.over_lanes("min", index)
        return [largest, first, p.shuffle(x, "idx", p.first_that(index.equals(first)))]

    def set_threshold(self, threshold: Value) -> None:
        """Sets the threshold and what depends on it.

        `minus_threshold` is -threshold * log2(e), plus a margin for rounding. Elements below `low` do not reach it, or
        do not take part.
        """
        p = self.p
        scale = p.absolute(threshold) + _NOISE_RANGE
        p.set(self.threshold, threshold)
        p.set(self.minus_threshold, p.multiply_add(scale, _EXPONENT_ERROR, threshold * -LOG2_E))
        low = (threshold - noise_ptx.MAX_NOISE - scale * _SUM_ERROR) * self.temperature
        low = low - (p.absolute(low) * _SUM_ERROR + _SUBNORMAL_ERROR)
        p.set(self.low, p.max(low, self.least))

    def _compare(self, one_plus_u: Value, x: Value, number: Value) -> None:
        """Makes an entry the best one of this thread, if it takes part and is better."""
        p = self.p
        z = p.divide_exactly(x, self.temperature) + noise_ptx.gumbel(p, one_plus_u) + 0.0  # +0 in place of -0
        index = number if isinstance(self.origin, int) else number + self.origin
        wins = (z > self.best) | (z.equals(self.best) & (index < self.index))
        wins = wins & (p.absolute(x) < INF)
        if self.is_kept is not None:
            wins = wins & self.is_kept(x, number)
        for register, value in ((self.best, z), (self.index, index), (self.x, x)):
            p.set(register, value, when=wins)

    def _publish(self) -> None:
        """Makes the best sum of the warp its threshold, and sends it to all CTAs."""
        p = self.p
        (best,) = p.over_warp(["max"], [self.best])
        with p.when(best > self.threshold):
            with p.when(p.lane < p.ctas):
                p.raise_in_cta(self.threshold_of_cta, p.lane, _order(best))
            self.set_threshold(best)


def _order(x: Value) -> Value:
    """Returns an unsigned integer in the order of the floats: above 0, except for the NaN with all bits set."""
    return flip_negative(x.bits("s32")).bits("u32") ^ _SIGN


def _from_order(number: Value) -> Value:
    """Returns the float of an integer from `_order`. 0 gives a NaN, and every comparison with it is false."""
    return flip_negative((number ^ _SIGN).bits("s32")).bits("f32")
