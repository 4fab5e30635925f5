"""How the rows of a router lie in registers: pure functions of shape, k and dtype.

Without a bias, the experts are the k best logits, in the tile of top-k. With a bias, the sort keys order float32
numbers for all dtypes. With groups, a row is cut into pieces so that lanes hold whole groups, or groups hold whole
lanes:

    64 experts in 8 groups,  4 lanes    lane 0 has groups 0 and 1, lane 1 has groups 2 and 3, ...
    128 experts in 8 groups, 8 lanes    lane 0 has group 0, lane 1 has group 1, ...
    256 experts in 8 groups, 16 lanes   lanes 0 and 1 have group 0, lanes 2 and 3 have group 1, ...
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Refusal
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.layout import Tile, row_tile
from pallas_softmax._src.topk.plan import LANE_ELEMENTS, MANY_LANES, MAX_LANE_ELEMENTS, plan_tile, plan_topk_grad

MOST_GROUP_BEST = 4  # with more entries of a group in its rank, the lists of the best take too many registers
MAX_EXPERTS = 1_024  # more elements of a float32 row do not fit into the registers of a warp
_FLOAT_BYTES = 4

# With groups, a lane of a row over 8 or 16 lanes has fewer elements than in top-k, because the ranks need registers.
# Times of 131072 rows with the gate of DeepSeek-V3, relative to `fused_topk`, on an H100, by the lanes of a row:
#
#     256 experts    8 lanes of 32: 1.66    16 lanes of 16: 1.35
#     384 experts    16 lanes of 24: 1.28   32 lanes of 12: 1.44
GROUPED_LANE_ELEMENTS = 24


def plan(call: Call, capability: tuple[int, int]) -> Tile | Refusal:
    if reason := _unsupported(call, capability):
        return Refusal(reason)
    if call.groups > 1 and call.group_best > MOST_GROUP_BEST:
        return Refusal(f"group_best={call.group_best} is more than {MOST_GROUP_BEST}")
    if call.groups > 1:
        tile = _grouped_tile(call.vocab, call.groups)
    else:
        tile = plan_tile(call.vocab, call.k or 0, _FLOAT_BYTES if call.masked else jnp.dtype(call.dtype).itemsize)
    return tile or Refusal(f"no kernel for {call.vocab} experts in {call.groups} groups")


def plan_grad(call: Call, capability: tuple[int, int]) -> Tile | Refusal:
    if reason := _unsupported(call, capability):
        return Refusal(reason)
    tile = plan_topk_grad(call.vocab, jnp.dtype(call.dtype))
    assert tile is not None  # for so few experts
    return tile


def _unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    if (reason := checks.unsupported(call, capability)) is not None:
        return reason
    if not call.k:
        return "k is 0"
    return None if call.vocab <= MAX_EXPERTS else f"{call.vocab} experts are more than {MAX_EXPERTS}"


def _grouped_tile(experts: int, groups: int) -> Tile | None:
    """Returns the tile with the fewest lanes where no lane has parts of different groups; None if there is none."""
    if groups & (groups - 1) or groups > experts:
        return None
    for lanes in (2, 4, 8, 16, LANES):
        most = LANE_ELEMENTS[_FLOAT_BYTES] if lanes < MANY_LANES else GROUPED_LANE_ELEMENTS
        most = most if lanes < LANES else MAX_LANE_ELEMENTS
        if experts % lanes == 0 and experts // lanes <= most:
            vec = math.gcd(4, experts // groups, experts // lanes)
            return dataclasses.replace(row_tile(experts, vec, lanes), pieces=min(groups, lanes))
    return None
