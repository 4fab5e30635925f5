"""Sums over the 128 threads of a CTA, in inline PTX.

What the threads of a warp have goes from lane to lane, what the warps have through shared memory:

    thread           0  1  2  3 ...  32 33 34 ...       a value of each
    lower lanes      0  v0 v0+v1 ...  0 v32 ...         `in_lower_lanes`
    warps            all of warp 0 | all of warp 1 ...  `of_warps`, which the last lane of each warp writes
    lower threads    lower lanes + lower warps          `add_lower_warps`
"""

from pallas_softmax._src.gpu.hardware import LANES, WARPS
from pallas_softmax._src.gpu.ptx.values import Program, Value

_LANE_BITS = LANES.bit_length() - 1  # of the number of a thread


def lane_of_thread(p: Program) -> Value:
    """Returns the thread's number in its warp."""
    return p.operand("thread", "u32") & (LANES - 1)


def warp_of_thread(p: Program) -> Value:
    """Returns the number of the thread's warp."""
    return p.operand("thread", "u32") >> _LANE_BITS


def in_lower_lanes(p: Program, value: Value) -> tuple[Value, Value]:
    """Returns the sum of the values of the lower lanes of the warp, and that sum with the thread's own value."""
    total = p.var(value)
    for lanes in (1, 2, 4, 8, 16):
        other, is_lane = p.shuffle_up(total, lanes)
        p.increase(total, other, when=is_lane)
    return total - value, total


def of_warps(p: Program, values: list[Value], scratch: Value, lane: int) -> list[list[Value]]:
    """Returns, for each of the values, what this lane of each warp has in it.

    The warps meet in shared memory at `scratch`, four words for each value, which nothing reads or writes meanwhile.
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
