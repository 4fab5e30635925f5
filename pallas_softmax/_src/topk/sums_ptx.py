"""Inline PTX for running sums over the 128 threads of a CTA.

Threads of a warp add by shuffles. Warps exchange their totals through shared memory:

    thread           0  1  2  3 ...  32 33 34 ...          one value v per thread
    lower lanes      0  v0 v0+v1 ...  0 v32 ...            `in_lower_lanes`
    warps            sum of warp 0 | sum of warp 1 | ...   `of_warps`; the last lane of each warp writes
    lower threads    lower lanes + lower warps             `add_lower_warps`
"""

from pallas_softmax._src.gpu.hardware import LANES, WARPS
from pallas_softmax._src.gpu.ptx.values import Program, Value

_LANE_BITS = LANES.bit_length() - 1  # bits of a thread's number that number the lane


def lane_of_thread(p: Program) -> Value:
    """Returns the thread's number in its warp."""
    return p.operand("thread", "u32") & (LANES - 1)


def warp_of_thread(p: Program) -> Value:
    """Returns the number of the thread's warp."""
    return p.operand("thread", "u32") >> _LANE_BITS


def in_lower_lanes(p: Program, value: Value) -> tuple[Value, Value]:
    """Returns the sum of `value` over the lower lanes of the warp, without and with the thread's own."""
    total = p.var(value)
    for lanes in (1, 2, 4, 8, 16):
        other, is_lane = p.shuffle_up(total, lanes)
        p.increase(total, other, when=is_lane)
    return total - value, total


def of_warps(p: Program, values: list[Value], scratch: Value, lane: int) -> list[list[Value]]:
    """Returns each of the values as it is in lane `lane` of every warp.

    The warps exchange the values in shared memory at `scratch`, four words per value. Nothing else may use this memory
    at the same time. The exchange has one barrier.
    """
    writes = lane_of_thread(p).equals(lane)
    of_warp = p.at(scratch, warp_of_thread(p), 4)
    for i, value in enumerate(values):
        p.store(of_warp, value, offset=4 * WARPS * i, when=writes)
    p.barrier()
    return [p.load_vector(scratch, value.kind, WARPS, offset=4 * WARPS * i) for i, value in enumerate(values)]


def add_lower_warps(p: Program, start: Value, totals: list[Value]) -> None:
    """Adds to `start` the totals of the lower warps."""
    warp = warp_of_thread(p)
    for i, total in enumerate(totals[:-1]):
        p.increase(start, total, when=warp > i)
