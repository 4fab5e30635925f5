"""Other orders of a row's sums in the kernel of a call: other numbers of lanes, parts or shares."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import Choice, Refusal
from pallas_softmax._src.gpu import hardware
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, MAX_CLUSTER, WARPGROUP
from pallas_softmax._src.gpu.layout import Tile, row_tile
from pallas_softmax._src.sample import plan as sample_plan
from pallas_softmax._src.select.plan import MULTIPROCESSORS
from pallas_softmax._src.softmax import plan as softmax_plan
from pallas_softmax._src.topk import plan as topk_plan

LANE_ELEMENTS = 32  # most elements of a row in a lane
LEAST_PART, LEAST_SEGMENT = 2_048, 400  # fewest elements of a part: of a row in a cluster, and in two launches


def orders(choice: Choice, filtered: bool) -> dict[str, Callable[[], Any]]:
    """Returns orders and their contexts: a call that is traced in one has this order. The planner's own comes first.

    Draws have two plans. `filtered` says whether the first one runs.
    """
    call, capability = choice.call, target.capability()
    found: dict[str, Callable[[], Any]] = {_order(choice.plan, filtered): contextlib.nullcontext}
    for n in (1, 2, 4, 8, 16, LANES, WARPGROUP):
        in_parts = n <= MAX_CLUSTER[capability[0]] and n * LEAST_PART <= call.vocab
        if in_parts or 1 < n <= call.vocab <= n * LANE_ELEMENTS:
            planned = functools.partial(_planned, _in_parts(n, filtered) if in_parts else _in_lanes(n))
            with planned():
                plan = call.operation.kernels["mosaic_gpu"].plan(call, capability)
            tiny = isinstance(plan, softmax_plan.Parts) and plan.cut.shortest < LEAST_SEGMENT
            if not (tiny or isinstance(plan, Refusal)):
                found.setdefault(_order(plan, filtered), planned)
    return found


def _order(plan: Any, filtered: bool) -> str:
    """Says what decides the order of a row's sums."""
    plan = plan[0 if filtered else 1] if isinstance(plan, tuple) else plan
    if isinstance(plan, Tile):
        return f"{plan.lanes} lanes"
    if isinstance(plan, sample_plan.StreamPlan):
        return f"{plan.shares} shares"
    return f"{getattr(plan, 'window', plan).cut.count} parts"


@contextlib.contextmanager
def _planned(replaced: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Replaces parts of the planners. JAX traces all calls again, since it does not know that their plans change."""
    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)
        for module, names in replaced.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        jax.clear_caches()
        yield


def _in_lanes(n: int) -> dict[Any, dict[str, Any]]:
    return {
        softmax_plan: {"short_row_tile": lambda v, size: row_tile(v, math.gcd(v, ACCESS_BYTES // size), n)},
        topk_plan: {"_tile": lambda v, vec, *_: row_tile(v, vec, min(n, LANES))},
    }


def _in_parts(n: int, filtered: bool) -> dict[Any, dict[str, Any]]:
    """Returns planners for n parts or shares. If these do not fit, softmax has two launches, and top-k more parts."""
    no_limits = {"TILE_ELEMENTS": 0, "UNALIGNED_TILE_ELEMENTS": 0}
    plan_of = sample_plan.plan_of
    draws = {"plan_of": lambda v, dtype, count, warpgroups: plan_of(v, dtype, n, warpgroups)}
    return {
        hardware: {"FULL_CLUSTERS": hardware.FULL_CLUSTERS if n == 16 else MULTIPROCESSORS // n},
        softmax_plan: {"_in_cluster": lambda row: row.parts(n), "_reading_again": lambda *_: None, **no_limits},
        topk_plan: {"_parts": lambda *_: n},
        sample_plan: draws if filtered else {"StreamPlan": functools.partial(_Shares, shares=n)},
    }


@dataclasses.dataclass(frozen=True)
class _Shares(sample_plan.StreamPlan):
    shares: int = 1  # a field, so that plans with other shares are not equal
