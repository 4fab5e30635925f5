"""Integer operands of `top_k`. The kernels take floats, so integers become floats in the same order."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_softmax._src import sort_keys
from pallas_softmax._src.dispatch.operation import Call, Refusal
from pallas_softmax._src.sort_keys import INTEGERS_AS_FLOATS
from pallas_softmax._src.topk.xla import TopK


def plan_by(plan: Callable, call: Call, capability: tuple[int, int]) -> Any:
    """Returns what `plan`, which knows floats only, returns for the call with its operand as floats."""
    if call.dtype not in INTEGERS_AS_FLOATS:
        return plan(call, capability)
    if call.masked or call.lengths:  # the least integer would count as masked
        return Refusal(f"no kernel for {call.dtype} with where or lengths")
    return plan(dataclasses.replace(call, dtype=INTEGERS_AS_FLOATS[call.dtype]), capability)


def floats_of(operand) -> tuple[Any, Callable[[TopK], TopK]]:
    """Returns the operand as floats, and a function that turns their winners into winners of the operand."""
    if operand.dtype.name not in INTEGERS_AS_FLOATS:
        return operand, lambda found: found
    x = sort_keys.as_floats(operand)
    return x, lambda found: found._replace(values=sort_keys.from_floats(found.values, operand.dtype))
