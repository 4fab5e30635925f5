"""The base of both programs of `sample`: a thread's elements, scratch words, sums over the cluster, the normalizer.

Each thread keeps its largest element m, and the mass d of its elements relative to m. This pair (m, d) is the
normalizer of softmax. The pairs of the lanes combine to one of the warp, and so on; here masses are powers of two:

    lanes     (3, 1.5)  (5, 1.25) ..    each relative to its own m
    warps     (5, 1.625)  (4, 2) ..     1.5 * 2^(3 - 5) + 1.25
    CTAs      (5, 2.625)  (6, 1) ..
    row       (6, 2.3125)

A small top_k also gets a bound: an element that at least top_k elements of the row reach. The share of a CTA is top_k
divided by the number of CTAs. Each CTA gives a bound that its share of elements reaches, and the least of these bounds
is the bound of the row. For a share of 5, the bound of a CTA is the 5th largest of its warps' maxima. If a CTA has
fewer warps than its share, each warp must have several elements. The bound of a warp is then the second, or third, ..
largest of its lanes' maxima, and the CTA takes the least bound of its warps.

This bound is weak if the largest elements of a row lie in one CTA. `bound_of_best` helps there: each CTA gives a bound
for all of top_k, and the best of these bounds is taken. The elements of the warps alternate, so that neighbours are
spread over all warps:

    vectors    0 .. 7 | 8 .. 15 | .. |      16 bytes each: 8 lanes load 128 bytes at once
    warp         0    |    1    | .. | 0    lanes 0 to 7, then lanes 8 to 15, ..
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPS
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.cta import ARRIVE, WAIT, CtaProgram
from pallas_softmax._src.gpu.ptx.elements import MAGNITUDE, Elements, flip_negative
from pallas_softmax._src.gpu.ptx.values import Condition, Value
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample.plan import ELEMENTS_AT_ONCE, RECORD_WORDS, SCRATCH, WARP_LOAD_BYTES, SamplePlan

LEAST_FINITE = float(np.finfo(np.float32).min)  # in float32
TINY = float(np.finfo(np.float32).tiny)
INF = float("inf")
KEEP_ALL = -(2**31)  # a key below the keys of all numbers
HIGHEST = 2**31 - 1  # a key above all others, and an index after all others

_WARP_BITS = log2(WARPS)
_SPARE_BITS = {"f32": 0, "bf16": 16, "f16": 13}  # low bits of a float32 that no element of the dtype uses

# The results of a draw, by their names in the program.
DRAWN = {"index": jnp.int32, "log_prob": jnp.float32, "log_mass": jnp.float32}


def row_operands(row, part, temperature) -> dict[str, Any]:
    """Returns the numbers that a `ClusterProgram` takes, by name."""
    before = jnp.where(temperature > 2.0**120, 0.25, 1.0)  # divisors above 2^126 may give 0
    octaves_per_unit = LOG2_E / jnp.maximum(temperature * before, TINY) * before
    place = {"row": jnp.int32(row), "part": jnp.int32(part)}
    return place | {"temperature": temperature, "octaves_per_unit": octaves_per_unit}


class ClusterProgram(CtaProgram):
    """A program for a row of logits that the CTAs of a cluster share: its scratch words, reductions and results.

    `greedy` is a variable: whether the temperature counts as 0.
    """

    def __init__(self, warps: int, ctas: int, dtype):
        super().__init__(warps, ctas)
        self.elements = Elements(dtype)
        self.scratch = self.operand("scratch", "u32")  # address of the scratch words
        # log2(e) / temperature: one unit further down, the mass of an element is so many octaves (factors of 2) less
        self.octaves_per_unit = self.operand("octaves_per_unit", "f32")
        self.cta = self.operand("part", "u32")  # number of the CTA in its cluster
        self.temperature = self.operand("temperature", "f32")
        self.greedy = self.var(self.temperature.equals(0.0))

    # --- Scratch words

    def word(self, at: int, index: Value | int = 0, size: int = 1) -> Value:
        """Returns the address of record `index`, of `size` words each; record 0 starts at scratch word `at`."""
        if isinstance(index, int):
            return self.scratch + 4 * (at + size * index)
        return self.scratch + index * (4 * size) + 4 * at

    def record_of_warp(self, warp: Value) -> Value:
        return self.word(SCRATCH.warps, warp, RECORD_WORDS)

    def record_of_cta(self, cta: Value) -> Value:
        return self.word(SCRATCH.gathered, cta, RECORD_WORDS)

    def fetched(self, at: Value, cta: Value, count: int, kinds: Sequence[str], neutral: Sequence) -> list[Value]:
        """Returns 1, 2, 4 or 8 words at an address in a CTA, in the first `count` lanes; `neutral` in the others.

        Synchronizes the threads of the CTA. One warp fetches the words: a CTA answers requests one at a time.
        """
        exists = self.lane < count
        with self.when(self.warp.equals(0)):
            words = self.of_cta(at, cta, "u32", len(kinds), when=exists)
            self.store(self.record_of_cta(self.lane), *words, when=exists)
        return self.from_records(kinds, neutral, count)

    def from_records(self, kinds: Sequence[str], neutral: Sequence, count: int) -> list[Value]:
        """Returns what `fetched` returns, from the records in this CTA. Synchronizes its threads."""
        self.barrier()
        out = [self.var(default, kind) for kind, default in zip(kinds, neutral)]
        self.load_into(out, self.record_of_cta(self.lane), when=self.lane < count)
        return out

    # --- Reductions over the CTA and the cluster: `reduce` is a function over a warp, or names of instructions

    def over_each_cta(self, reduce, values: Sequence[Value], neutral: Sequence, at: Value) -> list[Value]:
        """Reduces values over the threads of each CTA, by the words at `at`. Synchronizes the cluster.

        Returns the results of each CTA, in the lane with its number; `neutral` in the other lanes.
        """
        self.over_cta(reduce, values, neutral, at)
        self.sync_cluster()
        unused = (1 << (len(values) - 1).bit_length()) - len(values)
        kinds = [value.kind for value in values] + ["u32"] * unused
        return self.fetched(at, self.lane, self.ctas, kinds, [*neutral, *[0] * unused])[: len(values)]

    def over_cta(self, reduce, values: Sequence[Value], neutral: Sequence, at: Value) -> None:
        """Reduces values over the threads of the CTA, and writes the results to the words at `at`.

        They are there after the next barrier. The CTA must synchronize between two calls.
        """
        over_warp: Any = reduce if callable(reduce) else functools.partial(self.over_warp, reduce)
        own = self.record_of_warp(self.warp)
        for i, value in enumerate(over_warp(values)):
            self.store(own, value, offset=4 * i, when=self.first_lane)
        self.barrier()
        with self.when(self.warp.equals(0)):
            each, exists = self.record_of_warp(self.lane), self.lane < self.warps
            words = [
                self.load(each, value.kind, offset=4 * i, when=exists, default=default)
                for i, (value, default) in enumerate(zip(values, neutral))
            ]
            for i, value in enumerate(over_warp(words)):
                self.store(at, value, offset=4 * i, when=self.first_lane)

    # --- Results

    @contextlib.contextmanager
    def writes(self, cta: Value | int) -> Iterator[Callable[..., None]]:
        """Opens the last block, for one thread of a CTA. Yields write(name=value), which writes a result of the row."""

        def write(**results: Value) -> None:
            offset = self.multiply_wide(self.operand("row", "u32"), 4)
            for name, value in results.items():
                self.store(self.operand(name, "u64") + offset, value)

        if self.ctas > 1:
            self += ARRIVE
        with self.when(self.cta.equals(cta) & self.thread.equals(0)):
            yield write
        if self.ctas > 1:
            self += WAIT  # no CTA exits while another one may read its shared memory


class PartProgram(ClusterProgram):
    """A program for a row in parts, see `SamplePlan`. Positions count the elements of the CTA's part."""

    top: Value  # the largest element of the row, once it is known
    tempered_top: Value  # the same, divided by the temperature

    def __init__(self, plan: SamplePlan, dtype):
        super().__init__(plan.threads // LANES, plan.window.count, dtype)
        self.plan, window = plan, plan.window
        self.spare_bits = _SPARE_BITS[self.elements.name]
        self.x = self.operand("x", "u32")  # address of the part
        self.start = self.operand("start", "s32")  # index in the row of the element at position 0
        self.shift = self.operand("shift", "u32") if window.shifted else None
        first_block = (self.warp >> _WARP_BITS) * window.step_blocks
        loads = self.min(self.max(window.blocks - first_block.bits("s32"), 0), window.step_blocks)
        # Loads of the lower warps: a block has one load for each warp of a warpgroup.
        before = first_block * WARPS + (self.warp & (WARPS - 1)) * loads.bits("u32")
        self.loads = loads  # number of loads of this warp
        # The address of this lane's vector in the first load.
        self.first_vector = self.x + before * WARP_LOAD_BYTES + self.lane * (window.run * self.elements.itemsize)
        self.top_k = self.var(self.operand("top_k", "u32"))
        self.top_p, self.min_p = (self.var(number) for number in self.operands("f32", "top_p", "min_p"))
        self.keep_first(self.greedy)

    def keep_first(self, when: Value) -> None:
        """Lets the filters keep only the first entry, as at temperature 0."""
        for register, number in ((self.top_k, 1), (self.top_p, 1.0), (self.min_p, 0.0)):
            self.set(register, number, when)

    # --- Elements

    def position_of(self, address: Value) -> Value:
        return ((address - self.x) >> log2(self.elements.itemsize)).bits("s32")

    def element(self, address: Value) -> Value:
        address = address if self.shift is None else self.at(address, self.shift, self.elements.itemsize)
        return self.elements.float_of_bits(self, self.elements.load_bits(self, address))

    def vectors(self, address: Value, count: int, when: Sequence[Condition] | None = None) -> list[list[Value]]:
        """Returns the words of the lane's vector in each of some loads, given the address of the first one."""
        addresses = [address + WARP_LOAD_BYTES * i for i in range(count)]
        return self.elements.vectors(self, addresses, self.shift, 4 * LANES, when)

    def floats(self, words: list[Value]) -> list[Value]:
        return self.elements.floats(self, words, marked=False)

    def greatest(self, words: list[Value]) -> Value:
        """Returns the largest of the elements in words; NaN if there is one."""
        return self.elements.best(self, words, None)[0]

    def sweep(self, take: Callable[[list[Value], Value], None]) -> None:
        """Writes GPU loops over the thread's elements, with the code of take(words, address of the first vector).

        The words are one vector from each of several loads. A second loop takes the remaining loads, one at a time: its
        body is written by another call of `take`.
        """
        at, remaining = self.var(self.first_vector), self.var(self.loads)
        for loads in dict.fromkeys((ELEMENTS_AT_ONCE // self.plan.window.vec, 1)):
            with self.loop() as leave:
                leave(remaining < loads)
                take(sum(self.vectors(at, loads), []), at)
                self.increase(at, WARP_LOAD_BYTES * loads)
                self.increase(remaining, -loads)

    def sweep_elements(self, take: Callable[[Value], None]) -> None:
        def take_words(words, _):
            for x in self.floats(words):
                take(x)

        self.sweep(take_words)

    def mass(self, x: Value) -> Value:
        return self.exp2((x - self.top) * self.octaves_per_unit)

    def key(self, x: Value) -> Value:
        """Returns the sort key of the element as a float32, without bits that the dtype never uses."""
        key = flip_negative(x.bits("s32"))
        return key >> self.spare_bits if self.spare_bits else key

    def from_key(self, key: Value) -> Value:
        bits = key << self.spare_bits if self.spare_bits else key
        return flip_negative(bits, MAGNITUDE >> self.spare_bits << self.spare_bits).bits("f32")


# --- The largest element, the mass of the row, and a bound for a small top_k

# The largest top_k that the maxima of threads bound well. For top_k = 50, about 120 keys reach the bound. We have no
# times of other limits.
_SMALL_TOP_K, _SMALL_TOP_K_PER_WARP = 128, 4
_NEIGHBOURS = 8  # lanes that load neighbouring vectors


class LaneNormalizer:
    """The normalizer (m, d) of each lane, in variables."""

    def __init__(self, p: ClusterProgram):
        self._p = p
        self.m, self.d, self._finite_m = p.fresh("f32"), p.fresh("f32"), p.fresh("f32")
        self.clear()

    def clear(self) -> None:
        for register, number in ((self.m, -INF), (self.d, 0.0), (self._finite_m, LEAST_FINITE)):
            self._p.set(register, number)

    def raise_to(self, x: Value) -> None:
        p = self._p
        p.set(self.m, p.op("max.NaN", "f32", self.m, x))
        finite = p.max(self.m, LEAST_FINITE)  # so that the difference from -inf is -inf, not NaN
        p.set(self.d, self.d * _mass(p, self._finite_m, finite))
        p.set(self._finite_m, finite)

    def add(self, elements: list[Value]) -> None:
        """Adds the masses of elements that m is not below."""
        p = self._p
        with p.when(~p.greedy):
            masses = [p.exp2((x - self._finite_m) * p.octaves_per_unit) for x in elements]
            p.set(self.d, self.d + p.reduce("add", masses))
        with p.when(p.greedy):
            for x in elements:
                p.set(self.d, self.d + 1.0, when=x.equals(self._finite_m))


def _mass(p: ClusterProgram, x: Value, m: Value) -> Value:
    """Returns the mass of x below the maximum m. At temperature 0, differences of subnormal numbers count."""
    mass = p.var(p.exp2((x - m) * p.octaves_per_unit))
    p.set(mass, 0, when=p.greedy & x.differs(m))
    return mass


def arrive(p: PartProgram) -> tuple[Value, Value, Value]:
    """Sets p.top to the largest element of the row, or to NaN if the row has a NaN, and `tempered_top`.

    Where `tempered_top` overflows, the row becomes greedy.

    Returns the mass of the row; whether top_k is small; and if so, an element that at least top_k elements reach.
    """
    p.barrier()
    # For bfloat16, the histogram is as fast as a bound.
    small = 0 if p.plan.value_buckets else min(_SMALL_TOP_K, _SMALL_TOP_K_PER_WARP * p.ctas * p.warps)
    small_top_k = p.var((p.top_k <= small) & (p.top_k < p.plan.window.vocab))
    normalizer = LaneNormalizer(p)

    def add(words, _):
        normalizer.raise_to(p.greatest(words))
        normalizer.add(p.floats(words))

    p.sweep(add)
    m, d = normalizer.m, normalizer.d
    # how many elements of each CTA must reach its bound
    share_of_cta = p.op("div", "u32", p.top_k + (p.ctas - 1), p.ctas)
    share_of_warp = p.op("div", "u32", share_of_cta + (p.warps - 1), p.warps)
    rank_in_cta = p.select(share_of_warp > 1, p.warps, share_of_cta)
    ranks = iter([(share_of_warp, LANES), (rank_in_cta, 1 << (p.warps - 1).bit_length())])

    def reduce(values):
        m, d, bounds = values
        largest, d = combine(p, m, d)
        bound, (rank, count) = p.var(largest), next(ranks)
        with p.when(small_top_k & (rank > 1)):
            p.set(bound, _value_of_rank(p, bounds, rank, count))
        return [largest, d, bound]

    p.store(p.word(SCRATCH.threshold), 0, when=p.thread.equals(0))
    tops, d, bound = p.over_each_cta(reduce, [m, d, m], [-INF, 0, -INF], p.word(SCRATCH.normalizer))
    top, total = combine(p, tops, d)
    p.top = top + 0.0  # +0 in place of -0
    (bound,) = p.over_warp(["min"], [p.select(p.lane < p.ctas, bound, INF)])
    p.tempered_top = p.divide_exactly(p.top, p.max(p.temperature, TINY))
    p.update(p.greedy, "or", p.absolute(p.tempered_top).equals(INF))
    p.keep_first(p.greedy)
    return total, small_top_k, bound


def bound_of_best(p: PartProgram) -> Value:
    """Returns the best bound for a small top_k: some CTA has at least top_k elements that reach it."""
    group, lane = p.lane >> log2(_NEIGHBOURS), p.lane & (_NEIGHBOURS - 1)
    first = p.x + ((group * p.warps + p.warp) * _NEIGHBOURS + lane) * ACCESS_BYTES
    end = p.x + p.plan.window.size * p.elements.itemsize
    largest = p.var(LEAST_FINITE, "f32")
    with p.each(first, end, p.plan.threads * ACCESS_BYTES) as at:
        p.set(largest, p.max(largest, p.greatest(*p.elements.vectors(p, [at], p.shift))))
    share_of_warp = p.op("div", "u32", p.top_k + (p.warps - 1), p.warps)
    bound = _value_of_rank(p, largest, share_of_warp, LANES)
    (bound,) = p.over_each_cta(["min"], [bound], [INF], p.word(SCRATCH.counted))
    (best,) = p.over_warp(["max"], [p.select(p.lane < p.ctas, bound, LEAST_FINITE)])
    return best


def _value_of_rank(p: PartProgram, value: Value, rank: Value, count: int) -> Value:
    """Returns the value of a rank (1 is the largest) among the first `count` lanes; `count` is a power of two."""
    own_rank = p.var(1, "u32")
    with p.each(1, count) as other_lane:
        other = p.shuffle(value, "bfly", other_lane)
        equal_before = other.equals(value) & ((p.lane ^ other_lane) < p.lane)
        p.increase(own_rank, 1, equal_before | (other > value))
    return p.shuffle(value, "idx", p.first_that(own_rank.equals(rank)))


def join(p: ClusterProgram, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Combines two normalizers (m, d) of each lane."""
    m = p.op("max.NaN", "f32", a[0], b[0])
    finite = p.max(m, LEAST_FINITE)
    of_a, of_b = (d * _mass(p, p.max(own_m, LEAST_FINITE), finite) for own_m, d in (a, b))
    return [m, of_a + of_b]


def combine(p: ClusterProgram, m: Value, d: Value) -> tuple[Value, Value]:
    """Combines the normalizers of all lanes of the warp."""
    (largest,) = p.over_warp(["max.NaN"], [m])
    d = d * _mass(p, p.max(m, LEAST_FINITE), p.max(largest, LEAST_FINITE))
    (d,) = p.over_warp(["add"], [d])
    return largest, d
