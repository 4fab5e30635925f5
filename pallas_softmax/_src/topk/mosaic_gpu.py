"""`fused_topk` with its gradient, `top_k`, and the merge of winners as Mosaic GPU kernels, on arrays of any rank.

`topk` and `select` return what the functions with these names in `xla.py` return.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import sort_keys
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold_numbers, fold_topk
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.select import kernel as select_kernel
from pallas_softmax._src.select.plan import LIST_SHARE, SHORT_ROW, SelectPlan, plan_selection
from pallas_softmax._src.topk import tile_kernel, window_kernel
from pallas_softmax._src.topk.merge_kernel import Request, merge_rows
from pallas_softmax._src.topk.plan import MAX_K, lists_per_merge, plan_by, plan_topk, plan_topk_grad
from pallas_softmax._src.topk.xla import within

# XLA is faster at thousands of winners of one very long row, measured on an H100.
LONE_ROW = 65_536  # elements of a single row above which XLA may be faster
LONE_ROW_WINNERS = 1_024  # winners of such a row, in float32, above which XLA is faster

MIN_VOCAB_OF_LENGTHS = 4_096  # elements of a row; with fewer, a mask is faster than a selection by lengths
MIN_SELECTED = 129  # winners; with fewer, putting them in order costs little


def _unsupported_winners(call: Call, capability: tuple[int, int]) -> str | None:
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call)
    if reason is None and not 1 <= (call.k or 0) <= MAX_K:
        return f"k={call.k} is not from 1 to {MAX_K}"
    return reason or checks.too_large(call)


def plan(call: Call, capability: tuple[int, int]) -> Any:
    if reason := _unsupported_winners(call, capability):
        return Refusal(reason)
    return plan_topk(call.vocab, call.k or 0, jnp.dtype(call.dtype), capability)


def slower(call: Call) -> str | None:
    lone_row = call.rows == 1 and call.vocab > LONE_ROW and call.dtype == "float32"
    if lone_row and (call.k or 0) > LONE_ROW_WINNERS:
        return f"slower than xla for more than {LONE_ROW_WINNERS} of a single float32 row of more than {LONE_ROW}"
    return None


def topk(plan, logits, where, temperature, *, k, log, dtype, scaled=True):
    x, mask, temperature, unfold = fold_topk(logits, where, temperature)
    kernel: Any = tile_kernel if isinstance(plan, Tile) else window_kernel
    request = Request(k, x.dtype, mask is not None, log, dtype, scaled, temperature is not None)
    return jax.tree.map(unfold, kernel.topk_rows(x, mask, temperature, plan, request))


def plan_select(call: Call, capability: tuple[int, int]) -> Any:
    """Returns a `SelectPlan`, or what `plan` returns.

    A selection reads no more of a row than its length. The other kernels take lengths as a mask, and read whole rows,
    which is faster for short rows. With many winners in order, the other kernels order all candidates, and a selection
    orders the winners. "Selection or another kernel" in benchmarks/results/NOTES.md has the times.
    """
    ordering, k = plan(call, capability), call.k or 0
    has_lengths = call.lengths and call.vocab >= MIN_VOCAB_OF_LENGTHS
    many = k >= MIN_SELECTED and not isinstance(ordering, Tile)
    orders_faster = call.sorted and call.vocab <= SHORT_ROW and LIST_SHARE * k <= call.vocab
    is_better = has_lengths or (many and not orders_faster)
    if not (is_better or isinstance(ordering, Refusal)):
        return ordering
    selection = plan_selection(call, capability)
    return ordering if isinstance(selection, Refusal) and not isinstance(ordering, Refusal) else selection


def slower_select(call: Call) -> str | None:
    return None if (call.k or 0) >= MIN_SELECTED or call.lengths else slower(call)


def select(plan, operand, where, lengths, *, k, sorted):
    x = sort_keys.as_floats(operand)
    if isinstance(plan, SelectPlan):
        rows, mask, _, unfold = fold_topk(x, where, None)
        lengths = None if lengths is None else fold_numbers(lengths, x.shape[:-1])[:, 0]
        fill = None if x.dtype == operand.dtype else np.asarray(sort_keys.lowest(x.dtype))
        found = jax.tree.map(unfold, select_kernel.select_rows(rows, mask, lengths, k, plan, fill=fill))
    else:
        found, _ = topk(plan, x, within(where, lengths, x), None, k=k, log=False, dtype=x.dtype)
    return found._replace(values=sort_keys.from_floats(found.values, operand.dtype))


def plan_grad(call: Call, capability: tuple[int, int]) -> Tile | Refusal:
    if reason := checks.unsupported(call, capability) or checks.not_contiguous(call):
        return Refusal(reason)
    if call.masked:
        return Refusal("no kernel for topk_grad with where")
    tile = plan_topk_grad(call.vocab, jnp.dtype(call.dtype))
    return tile or Refusal(f"no kernel for topk_grad of V={call.vocab}: a row is too long for a warp")


def plan_merge(call: Call, capability: tuple[int, int]) -> None | Refusal:
    if reason := _unsupported_winners(call, capability):
        return Refusal(reason)
    k = call.k or 0
    if call.vocab > (most := lists_per_merge(k)) * k:
        return Refusal(f"{call.vocab // k} lists of {k} are more than the {most} that a CTA merges")
    return None


KERNELS = {
    "topk": Kernel(plan, topk, slower),
    "top_k": Kernel(functools.partial(plan_by, plan_select, of_lengths=plan_selection), select, slower_select),
    "topk_grad": Kernel(plan_grad, tile_kernel.topk_grad_rows),
    "merge": Kernel(plan_merge, merge_rows),
}
