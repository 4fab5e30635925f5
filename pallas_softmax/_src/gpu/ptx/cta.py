"""Barriers, scans and reductions of the threads of a CTA, and of the CTAs of a cluster.

The lanes of a warp exchange numbers by shuffles. Warps exchange them through shared memory. To add up a number v of
each lower thread:

    thread           0  1  2     ...  32 33      ...
    lower lanes      0  v0 v0+v1 ...  0  v32     ...     `scan`
    warps            sum of warp 0 |  sum of warp 1      `of_warps`
    lower threads    lower lanes + lower warps           `lower_warps` returns the second sum
"""

from collections.abc import Sequence
from typing import Any

from pallas_softmax._src.gpu.hardware import LANES, WARPS
from pallas_softmax._src.gpu.layout import log2, powers_below
from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Condition, Value

# These two synchronize all threads of the cluster, and show them what the others wrote to their own shared memory. The
# fences cover shared memory only: `barrier.cluster.arrive.release` would also wait for device memory. The fences do not
# wait for loads from other CTAs. Such a load may read too late, or read from a CTA that has exited: a launch failure.
# So a warp must write what it loaded, or a result of it, to shared memory. Then its CTA must synchronize, before the
# cluster synchronizes again.
ARRIVE = "fence.release.sync_restrict::shared::cta.cluster; barrier.cluster.arrive.relaxed;"
WAIT = "barrier.cluster.wait.acquire; fence.acquire.sync_restrict::shared::cluster.cluster;"


class CtaProgram(Program):
    """A program that all threads of a CTA run. The CTA may be one of a cluster. `thread` counts in the CTA."""

    def __init__(self, warps: int = WARPS, ctas: int = 1):
        super().__init__()
        self.warps, self.ctas = warps, ctas  # numbers of warps in the CTA, and of CTAs in the cluster
        self.threads = warps * LANES
        # <thread> counts in a warpgroup.
        self.thread = self.operand("thread", "u32") if warps == WARPS else self.special("tid.x")
        self.lane, self.warp = self.thread & (LANES - 1), self.thread >> log2(LANES)
        self.first_lane = self.lane.equals(0)

    # --- Synchronization

    def barrier(self) -> None:
        """Synchronizes all threads of the CTA, in all its warpgroups."""
        self += "bar.sync 0;"

    def sync_cluster(self) -> None:
        """Synchronizes all threads of the cluster, and makes their earlier writes to shared memory visible to all."""
        if self.ctas == 1:
            self.barrier()
        else:
            self += f"{ARRIVE} {WAIT}"

    # --- A warp

    def over_warp(self, ops: Sequence[str], values: Sequence[Value]) -> list[Value]:
        """Reduces value i over the warp by ops[i]. All lanes get the result. Floats are added in a fixed order."""
        out = list(values)
        sums = [i for i, value in enumerate(out) if value.kind == "f32" and ops[i] == "add"]
        for lanes in reversed(powers_below(LANES)):
            others = [self.shuffle(out[i], "bfly", lanes) for i in sums]
            for i, other in zip(sums, others):
                out[i] = out[i] + other
        for i, (op, value) in enumerate(zip(ops, out)):
            if value.kind != "f32":
                out[i] = self.over_lanes(op, value)
            elif op != "add":
                # One integer instruction reduces the sort keys. The NaN that max.NaN returns has the highest key.
                bits = self.over_lanes(op.removesuffix(".NaN"), flip_negative(value.bits("s32")))
                out[i] = flip_negative(bits).bits("f32")
        return out

    def scan(self, value: Value) -> tuple[Value, Value]:
        """Returns the sum of a value over the lower lanes of the warp, and the sum that includes this lane."""
        upto = self.var(value)
        for lanes in powers_below(LANES):
            other, is_lane = self.shuffle_up(upto, lanes)
            self.increase(upto, other, when=is_lane)
        if value.kind != "f32":
            return upto - value, upto
        before, is_lane = self.shuffle_up(upto, 1)  # a difference of floats would be rounded
        self.set(before, 0, when=~is_lane)
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

    # --- The warps of a CTA

    def of_warps(self, values: Sequence[Value], scratch: Value, lane: int) -> list[list[Value]]:
        """Returns each of the values as it is in lane `lane` of every warp. Synchronizes the CTA once.

        The warps exchange the values in shared memory at `scratch`, a word per value and warp. Nothing else may use
        this memory at the same time.
        """
        writes = self.lane.equals(lane)
        own_slot, stride = self.at(scratch, self.warp, 4), 4 * self.warps
        for i, value in enumerate(values):
            self.store(own_slot, value, offset=stride * i, when=writes)
        self.barrier()
        return [self.load_vector(scratch, x.kind, self.warps, offset=stride * i) for i, x in enumerate(values)]

    def lower_warps(self, upto: Value, scratch: Value) -> tuple[Value, Value]:
        """Returns the sums over the lower warps, and over all warps. A warp's summand is `upto` in its last lane.

        Synchronizes the CTA once. `scratch` has a word for each warp; another warp may still read it afterwards.
        """
        self.store(self.at(scratch, self.warp, 4), upto, when=self.lane.equals(LANES - 1))
        self.barrier()
        own = self.load(self.at(scratch, self.lane, 4), "u32", when=self.lane < self.warps, default=0)
        lower = self.select(self.lane < self.warp, own, 0)
        return self.over_lanes("add", lower), self.over_lanes("add", own)

    # --- The CTAs of a cluster

    def raise_in_cta(self, at: Value, cta: Value, number: Value) -> None:
        """Raises a 32-bit integer in shared memory of a CTA of the cluster to a number, if it is less.

        All threads of the cluster see the result after `sync_cluster`; some may see it before.
        """
        if self.ctas == 1:
            self += f"red.relaxed.cta.shared::cta.max.u32 [{at}], {number};"
        else:
            there = self.op("mapa.shared::cluster", "u32", at, cta)
            self += f"red.relaxed.cluster.shared::cluster.max.u32 [{there}], {number}; fence.acq_rel.cluster;"

    def of_cta(self, at: Value, cta: Any, kind: str, count: int = 1, *, when: Condition = None) -> list[Value]:
        """Returns words at this address in a CTA of the cluster, or 0 where `when` does not hold."""
        out = [self.fresh(kind) if when is None else self.var(0, kind) for _ in range(count)]
        if self.ctas > 1:
            at = self.op("mapa.shared::cluster", "u32", at, cta)
        self.load_into(out, at, when=when, space="shared::cluster" if self.ctas > 1 else "")
        return out
