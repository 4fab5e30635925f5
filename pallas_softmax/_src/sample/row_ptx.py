"""The base of all stages of the program of `sample`: a thread's elements, and sums over warps, CTAs and the cluster."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPS
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.values import Condition, Program, Value
from pallas_softmax._src.sample.plan import CHUNK_BYTES, Layout

LEAST_FINITE = float(np.finfo(np.float32).min)  # in float32
INF = float("inf")
KEEP_ALL = -(2**31)  # a key below the keys of all numbers

# These two synchronize all threads of the cluster, and show them what the others wrote to their own shared memory. The
# fences cover shared memory only: `barrier.cluster.arrive.release` would also wait for device memory. The fences do not
# wait for loads from other CTAs. Such a load may read too late, or read from a CTA that has exited: a launch failure.
# So a warp must write what it loaded, or a result of it, to shared memory. Then its CTA must synchronize, before the
# cluster synchronizes again.
ARRIVE = "fence.release.sync_restrict::shared::cta.cluster; barrier.cluster.arrive.relaxed;"
WAIT = "barrier.cluster.wait.acquire; fence.acquire.sync_restrict::shared::cluster.cluster;"

_LANE_BITS, _WARP_BITS = LANES.bit_length() - 1, WARPS.bit_length() - 1
_SPARE_BITS = {"f32": 0, "bf16": 16, "f16": 13}  # low bits of a float32 that no element of the dtype uses


class RowProgram(Program):
    """A program for the part of a row that `Layout` draws. The threads of a CTA share a part; the cluster has the row.

    Attributes:
      layout: how the part lies in shared memory.
      elements: writes programs for elements of the dtype.
      ctas, warps: number of CTAs in the cluster, and of warps in a CTA.
      x, scratch: the addresses of the part and of the scratch words.
      thread, lane, warp, cta: number of the thread in its CTA, of its lane and warp, and of the CTA.
      first_lane: whether the lane is the first of its warp.
      scale: log2(e) / temperature.
      top: the largest element of the row, once it is known.
    """

    top: Value

    def __init__(self, layout: Layout, dtype):
        super().__init__()
        self.layout, self.elements = layout, Elements(dtype)
        self.ctas, self.warps = layout.window.count, layout.threads // LANES
        self.x, self.scratch = self.operands("u32", "x", "scratch")
        self.scale, self.cta = self.operand("scale", "f32"), self.operand("part", "u32")
        self.thread = self.special("tid.x")
        self.lane, self.warp = self.thread & (LANES - 1), self.thread >> _LANE_BITS
        self.first_lane = self.lane.equals(0)
        self.span, self.chunks = self.span_of(self.warp)

    # --- Elements

    def span_of(self, warp: Value) -> tuple[Value, Value]:
        """Returns the address of this lane's vector in the first chunk of a warp, and the number of its chunks."""
        window = self.layout.window
        first = (warp >> _WARP_BITS) * window.step_blocks
        chunks = self.min(self.max(window.blocks - first.bits("s32"), 0), window.step_blocks)
        before = first * WARPS + (warp & (WARPS - 1)) * chunks.bits("u32")
        return self.x + before * CHUNK_BYTES + self.lane * ACCESS_BYTES, chunks

    def vector(self, address: Value, chunk: int = 0) -> list[Value]:
        """Returns the four words of this lane's vector, `chunk` chunks after the address."""
        return self.elements.vector(self, address, CHUNK_BYTES * chunk)

    def floats(self, words: list[Value]) -> list[Value]:
        """Returns the elements in words as floats."""
        return self.elements.floats(self, words, marked=False)

    def greatest(self, words: list[Value]) -> Value:
        """Returns the largest of the elements in words as a float; NaN if there is one."""
        if self.elements.halves:
            pairs = [word.bits(f"{self.elements.name}x2") for word in words]
            words = [self.reduce("max.NaN", pairs).bits("s32")]
        return self.reduce("max.NaN", self.floats(words))

    def sweep(self, body: Callable[[list[Value], Value], object]) -> None:
        """Calls body(words, address), which writes what a thread does with its next elements.

        The words are one vector from each of `chunks_at_once` chunks. The remaining chunks come one at a time.
        """
        at, left = self.var(self.span), self.var(self.chunks)
        for chunks in dict.fromkeys((self.layout.chunks_at_once, 1)):
            with self.loop() as leave:
                leave(left < chunks)
                body([word for i in range(chunks) for word in self.vector(at, i)], at)
                self.increase(at, CHUNK_BYTES * chunks)
                self.increase(left, -chunks)

    def weight(self, x: Value) -> Value:
        """Returns the mass of an element, relative to the largest element of the row."""
        return self.exp2((x - self.top) * self.scale)

    def key(self, x: Value) -> Value:
        """Returns the sort key of an element (see `gpu.sort_keys`), without the bits that only a float32 has."""
        key = _flipped(x.bits("s32"))
        spare = _SPARE_BITS[self.elements.name]
        return key >> spare if spare else key

    def of_key(self, key: Value) -> Value:
        """Returns the element with this sort key, as a float."""
        spare = _SPARE_BITS[self.elements.name]
        bits = key << spare if spare else key
        return (bits ^ (bits.sign() & (0x7FFFFFFF >> spare << spare))).bits("f32")

    # --- Scratch words

    def word(self, at: int, index: Value | int = 0, each: int = 1) -> Value:
        """Returns the address of the scratch word at + each * index."""
        if isinstance(index, int):
            return self.scratch + 4 * (at + each * index)
        return self.scratch + index * (4 * each) + 4 * at

    def of_cta(
        self, at: Value, cta: Any, kind: str, count: int = 1, *, when: Condition = None
    ) -> list[Value]:
        """Returns words at this address in a CTA of the cluster, or 0 where `when` does not hold."""
        out = [self.fresh(kind) if when is None else self.var(0, kind) for _ in range(count)]
        if self.ctas == 1:
            self.load_vector_into(out, at, when=when)
        else:
            self.load_vector_into(out, self.in_cta(at, cta), when=when, space="shared::cluster")
        return out

    def of_ctas(self, at: int, count: int) -> list[Value]:
        """Returns 1, 2, 4 or 8 scratch words of all CTAs; synchronizes the threads of this CTA.

        Each lane gets the words of the CTA with its number, in registers "u32"; 0 if there is no such CTA. Only one
        warp fetches the words, since a CTA answers the requests of others one at a time.
        """
        inside = self.lane < self.ctas
        local = self.word(self.layout.gathered, self.lane, self.layout.gathered_words)
        with self.when(self.warp.equals(0)):
            self.store(local, *self.of_cta(self.word(at), self.lane, "u32", count, when=inside), when=inside)
        self.barrier()
        out = [self.var(0, "u32") for _ in range(count)]
        self.load_vector_into(out, local, when=inside)
        return out

    # --- Warps, CTAs and the cluster

    def barrier(self) -> None:
        """Synchronizes all threads of the CTA, in all its warpgroups."""
        self += "bar.sync 0;"

    def sync_cluster(self) -> None:
        """Synchronizes all threads of the cluster, and makes their earlier writes to shared memory visible to all."""
        if self.ctas == 1:
            self.barrier()
        else:
            self += f"{ARRIVE} {WAIT}"

    def over_warp(self, ops: Sequence[str], values: Sequence[Value]) -> list[Value]:
        """Reduces each value over the lanes of a warp by its instruction, in a fixed order; for all lanes."""
        out = list(values)
        sums = [i for i, value in enumerate(out) if value.kind == "f32" and ops[i] == "add"]
        for lanes in (16, 8, 4, 2, 1):
            others = [self.shuffle(out[i], "bfly", lanes) for i in sums]
            for i, other in zip(sums, others):
                out[i] = out[i] + other
        for i, (op, value) in enumerate(zip(ops, out)):
            if value.kind != "f32":
                out[i] = self.over_lanes(op, value)
            elif op != "add":
                # One integer instruction reduces the sort keys. The NaN that max.NaN returns has the highest key.
                bits = self.over_lanes(op.removesuffix(".NaN"), _flipped(value.bits("s32")))
                out[i] = _flipped(bits).bits("f32")
        return out

    def over_cta(self, ops: Sequence[str], values: Sequence[Value], neutral: Sequence, at: int) -> None:
        """Reduces values over the threads of the CTA; after the next barrier, the results are in the words at `at`.

        The CTA must synchronize between two calls.
        """
        layout = self.layout
        own = self.word(layout.warps, self.warp, layout.warp_words)
        for i, value in enumerate(self.over_warp(ops, values)):
            self.store(own, value, offset=4 * i, when=self.first_lane)
        self.barrier()
        with self.when(self.warp.equals(0)):
            inside = self.lane < self.warps
            of_warp = self.word(layout.warps, self.lane, layout.warp_words)
            mine = [
                self.load(of_warp, v.kind, offset=4 * i, when=inside, default=n)
                for i, (v, n) in enumerate(zip(values, neutral))
            ]
            for i, value in enumerate(self.over_warp(ops, mine)):
                self.store(self.word(at), value, offset=4 * i, when=self.first_lane)

    def sum_of_warp(self) -> Value:
        """Returns the first value of the last `over_cta`, reduced over the warp with this lane's number."""
        at, inside = self.word(self.layout.warps, self.lane, self.layout.warp_words), self.lane < self.warps
        return self.load(at, "f32", when=inside, default=0)

    def scan(self, value: Value) -> tuple[Value, Value]:
        """Returns the sum of a value over the lower lanes of the warp, and over those and this one."""
        upto = self.var(value)
        for lanes in (1, 2, 4, 8, 16):
            other, inside = self.shuffle_up(upto, lanes)
            self.increase(upto, other, when=inside)
        before, inside = self.shuffle_up(upto, 1)
        self.set(before, 0, when=~inside)
        return before, upto

    def before(self, value: Value) -> tuple[Value, Value]:
        """Returns the sum of a value over the lower lanes of the warp, and over all lanes."""
        before, upto = self.scan(value)
        return before, self.shuffle(upto, "idx", LANES - 1)

    def first_that(self, condition: Value) -> Value:
        """Returns the number of the first lane where the condition holds; the last lane if there is none."""
        return self.min(self.lowest_bit(self.ballot(condition)), LANES - 1)

    def last_that(self, condition: Value) -> Value:
        """Returns the number of the last lane where the condition holds; 0 if there is none."""
        return self.max(self.highest_bit(self.ballot(condition)).bits("s32"), 0).bits("u32")


def _flipped(bits: Value) -> Value:
    """Returns the sort key of a float's bits, or the bits of a sort key."""
    return bits ^ (bits.sign() & 0x7FFFFFFF)
