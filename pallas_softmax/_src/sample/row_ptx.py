"""The base of both programs of `sample`: a thread's elements, scratch words, and sums over the cluster."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPS
from pallas_softmax._src.gpu.ptx.cta import ARRIVE, WAIT, CtaProgram
from pallas_softmax._src.gpu.ptx.elements import MAGNITUDE, Elements, flip_negative
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample.plan import (
    ELEMENTS_AT_ONCE,
    RECORD_WORDS,
    SCRATCH,
    WARP_LOAD_BYTES,
    SamplePlan,
)

LEAST_FINITE = float(np.finfo(np.float32).min)  # in float32
TINY = float(np.finfo(np.float32).tiny)
INF = float("inf")
KEEP_ALL = -(2**31)  # a key below the keys of all numbers
HIGHEST = 2**31 - 1  # a key above all others, and an index after all others
LN2 = math.log(2)

_WARP_BITS = WARPS.bit_length() - 1
_SPARE_BITS = {"f32": 0, "bf16": 16, "f16": 13}  # low bits of a float32 that no element of the dtype uses


# The results of a draw, by their names in the program.
DRAWN = {"index": jnp.int32, "log_prob": jnp.float32, "log_mass": jnp.float32}


def row_operands(row, part, temperature) -> dict[str, Any]:
    """Returns the numbers that a `ClusterProgram` takes, by name; the temperature is float32, at least 0."""
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

    def from_ctas(self, at: Value, kinds: Sequence[str], neutral: Sequence) -> list[Value]:
        """Returns 1, 2, 4 or 8 words from each CTA, in the lane with its number; `neutral` in the other lanes.

        `at` is the address of the words in each CTA. This synchronizes the threads of the CTA. Only one warp fetches
        the words, since a CTA answers the requests of others one at a time.
        """
        with self.when(self.warp.equals(0)):
            exists = self.lane < self.ctas
            words = self.of_cta(at, self.lane, "u32", len(kinds), when=exists)
            self.store(self.gathered(self.lane), *words, when=exists)
        return self.from_gathered(kinds, neutral)

    def gathered(self, cta: Value) -> Value:
        """Returns the address of the words of a CTA that `from_gathered` returns."""
        return self.word(SCRATCH.gathered, cta, RECORD_WORDS)

    def from_gathered(self, kinds: Sequence[str], neutral: Sequence) -> list[Value]:
        """Returns what `from_ctas` returns, once the words of each CTA are in this one. Synchronizes its threads."""
        self.barrier()
        out = [self.var(default, kind) for kind, default in zip(kinds, neutral)]
        self.load_into(out, self.gathered(self.lane), when=self.lane < self.ctas)
        return out

    # --- Reductions over the CTA and the cluster: `reduce` is a function over a warp, or names of instructions

    def over_each_cta(self, reduce, values: Sequence[Value], neutral: Sequence, at: Value) -> list[Value]:
        """Reduces values over the threads of each CTA; returns what `from_ctas` returns. Synchronizes the cluster."""
        self.over_cta(reduce, values, neutral, at)
        self.sync_cluster()
        unused = (1 << (len(values) - 1).bit_length()) - len(values)
        kinds = [value.kind for value in values] + ["u32"] * unused
        return self.from_ctas(at, kinds, [*neutral, *[0] * unused])[: len(values)]

    def over_cta(self, reduce, values: Sequence[Value], neutral: Sequence, at: Value) -> None:
        """Reduces values over the threads of the CTA, and writes the results to the words at `at`.

        The results are there after the next barrier. The CTA must synchronize between two calls.
        """
        over_warp: Callable[..., Any] = (
            reduce if callable(reduce) else functools.partial(self.over_warp, reduce)
        )
        own = self.word(SCRATCH.warps, self.warp, RECORD_WORDS)
        for i, value in enumerate(over_warp(values)):
            self.store(own, value, offset=4 * i, when=self.first_lane)
        self.barrier()
        with self.when(self.warp.equals(0)):
            words = self.from_warps([value.kind for value in values], neutral)
            for i, value in enumerate(over_warp(words)):
                self.store(at, value, offset=4 * i, when=self.first_lane)

    def from_warps(self, kinds: Sequence[str], neutral: Sequence) -> list[Value]:
        """Returns the record of each warp, in the lane with its number; `neutral` in the other lanes."""
        at, exists = self.word(SCRATCH.warps, self.lane, RECORD_WORDS), self.lane < self.warps
        return [
            self.load(at, kind, offset=4 * i, when=exists, default=default)
            for i, (kind, default) in enumerate(zip(kinds, neutral))
        ]

    # --- Results

    @contextlib.contextmanager
    def writes(self, cta: Value | int) -> Iterator[Callable[..., None]]:
        """Opens the last block, for one thread of a CTA, and yields write(name=value), which writes results of the row.

        <row> is the number of the row, and <name> the address of a result in device memory.
        """

        def write(**results: Value) -> None:
            offset = self.multiply_wide(self.operand("row", "u32"), 4)
            for name, value in results.items():
                self.store(self.operand(name, "u64") + offset, value, space="global")

        if self.ctas > 1:
            self += ARRIVE
        with self.when(self.cta.equals(cta) & self.thread.equals(0)):
            yield write
        if self.ctas > 1:
            self += WAIT  # no CTA exits while another one may read its shared memory


class PartProgram(ClusterProgram):
    """A program for a part of a row, see `SamplePlan`. The threads of a CTA share a part; the cluster has the row.

    A temperature of 0 keeps the first entry: the filters are then the same as for top_k = 1.
    """

    top: Value  # the largest element of the row, once it is known
    tempered_top: Value  # the same, divided by the temperature

    def __init__(self, plan: SamplePlan, dtype):
        super().__init__(plan.threads // LANES, plan.window.count, dtype)
        self.plan, window = plan, plan.window
        self.spare_bits = _SPARE_BITS[self.elements.name]
        self.x = self.operand("x", "u32")  # address of the part
        self.origin = self.operand("origin", "s32")  # index in the row of the element at position 0
        first_block = (self.warp >> _WARP_BITS) * window.step_blocks
        loads = self.min(self.max(window.blocks - first_block.bits("s32"), 0), window.step_blocks)
        # Loads of the lower warps: a block has one load for each warp of a warpgroup.
        before = first_block * WARPS + (self.warp & (WARPS - 1)) * loads.bits("u32")
        self.loads = loads  # number of loads of this warp
        # The address of this lane's vector in the first load.
        self.first_vector = self.x + before * WARP_LOAD_BYTES + self.lane * ACCESS_BYTES
        self.top_k = self.var(self.operand("top_k", "u32"))
        self.top_p, self.min_p = (self.var(number) for number in self.operands("f32", "top_p", "min_p"))
        self.keep_first(self.greedy)

    def keep_first(self, when: Value) -> None:
        """Makes the filters keep only the first entry, where `when` holds."""
        for register, number in ((self.top_k, 1), (self.top_p, 1.0), (self.min_p, 0.0)):
            self.set(register, number, when)

    # --- Elements

    def position_of(self, address: Value) -> Value:
        """Returns the position of the element at an address; positions count in the part."""
        return ((address - self.x) >> (self.elements.itemsize.bit_length() - 1)).bits("s32")

    def element(self, address: Value) -> Value:
        """Returns the element at an address as a float."""
        return self.elements.float_of_bits(self, self.elements.load_bits(self, address))

    def element_at(self, position: Value) -> Value:
        """Returns the element at a position as a float."""
        return self.element(self.at(self.x, position, self.elements.itemsize))

    def vector(self, address: Value, load: int = 0) -> list[Value]:
        """Returns the four words of this lane's vector, `load` loads after the address."""
        return self.elements.vector(self, address, WARP_LOAD_BYTES * load)

    def floats(self, words: list[Value]) -> list[Value]:
        """Returns the elements in words as floats."""
        return self.elements.floats(self, words, marked=False)

    def greatest(self, words: list[Value]) -> Value:
        """Returns the largest of the elements in words as a float; NaN if there is one."""
        return self.elements.best(self, words, None)[0]

    def sweep(self, take: Callable[[list[Value], Value], None]) -> None:
        """Writes GPU loops over the thread's elements, with the code of take(words, address of the first vector).

        The words are one vector from each of several loads. A second loop has the remaining loads, one at a time. So
        `take` is called twice, and each call writes the body of one loop.
        """
        at, remaining = self.var(self.first_vector), self.var(self.loads)
        for loads in dict.fromkeys((ELEMENTS_AT_ONCE // self.plan.window.vec, 1)):
            with self.loop() as leave:
                leave(remaining < loads)
                take([word for i in range(loads) for word in self.vector(at, i)], at)
                self.increase(at, WARP_LOAD_BYTES * loads)
                self.increase(remaining, -loads)

    def sweep_elements(self, take: Callable[[Value], None]) -> None:
        """Writes a `sweep` with the code of take(x) for each element as a float."""

        def take_words(words, _):
            for x in self.floats(words):
                take(x)

        self.sweep(take_words)

    def mass(self, x: Value) -> Value:
        """Returns the mass of an element, relative to the largest element of the row."""
        return self.exp2((x - self.top) * self.octaves_per_unit)

    def key(self, x: Value) -> Value:
        """Returns the sort key of an element (see `sort_keys.py`), without the bits that only a float32 has."""
        key = flip_negative(x.bits("s32"))
        return key >> self.spare_bits if self.spare_bits else key

    def from_key(self, key: Value) -> Value:
        """Returns the element with this sort key, as a float."""
        bits = key << self.spare_bits if self.spare_bits else key
        return flip_negative(bits, MAGNITUDE >> self.spare_bits << self.spare_bits).bits("f32")

    def key_of_dtype(self, key: Value) -> Value:
        """Returns the sort key of the elements' own dtype. It differs from `key` for float16 only."""
        if self.elements.name != "f16":
            return key
        bits = self.convert(self.convert(self.from_key(key), "f16").bits("s16"), "s32")
        return self.select(key.equals(KEEP_ALL), KEEP_ALL, self.elements.key(bits))
