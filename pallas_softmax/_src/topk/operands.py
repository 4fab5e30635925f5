"""`top_k` by the kernels of `fused_topk`: without a normalizer, integers as floats, and lengths as a mask."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_softmax._src import sort_keys
from pallas_softmax._src.dispatch.operation import Call, Refusal
from pallas_softmax._src.sort_keys import INTEGERS_AS_FLOATS
from pallas_softmax._src.topk.xla import TopK, within


def plan_by(plan: Callable, call: Call, capability: tuple[int, int]) -> Any:
    """Returns the result of `plan`, the planner of a kernel of `fused_topk`, for a call of `top_k`."""
    if call.dtype not in INTEGERS_AS_FLOATS:
        return plan(call, capability)
    if call.masked or call.lengths:  # the least integer would count as masked
        return Refusal(f"no kernel for {call.dtype} with where or lengths")
    return plan(dataclasses.replace(call, dtype=INTEGERS_AS_FLOATS[call.dtype]), capability)


def select_by(topk: Callable, plan: Any, operand, where, lengths, *, k: int, sorted: bool) -> TopK:
    """Returns what `xla.select` returns, by `topk`, which runs a kernel of `fused_topk`. Its winners are in order."""
    where = within(where, lengths, operand)
    integers = operand.dtype.name in INTEGERS_AS_FLOATS
    x = sort_keys.as_floats(operand) if integers else operand
    winners, _ = topk(plan, x, where, None, k=k, log=False, dtype=x.dtype)
    return (
        winners._replace(values=sort_keys.from_floats(winners.values, operand.dtype)) if integers else winners
    )
