"""Token statistics as a Mosaic GPU kernel: a formula of the softmax kernels, on arrays of any rank."""

from typing import Any

from pallas_softmax_base._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax_base._src.folding import fold_topk
from pallas_softmax_base._src.gpu import checks
from pallas_softmax_base._src.gpu.layout import Tile
from pallas_softmax_base._src.normalizers import Moments
from pallas_softmax_base._src.softmax import parts_kernel, tile_kernel
from pallas_softmax_base._src.softmax.formulas import FORMULAS, MOST_POSITIONS
from pallas_softmax_base._src.softmax.plan import Parts, approximate, plan_softmax
from pallas_softmax_base._src.stats.xla import RowStats, is_column, label_distance, logits_at


def plan(call: Call, capability: tuple[int, int]) -> Tile | Parts | Refusal:
    """Returns how the rows of a call lie over the GPU."""
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call) or checks.too_large(call)
    if reason is None and call.vocab > MOST_POSITIONS:
        reason = f"the argmax is exact for rows of up to {MOST_POSITIONS} elements, not {call.vocab}"
    if reason is not None:
        return Refusal(reason)
    return plan_softmax(call.op, call.rows, call.vocab, call.dtype, capability, masked=call.masked)


def token_stats(plan: Tile | Parts, logits, where, temperature, labels, *, scaled: bool) -> RowStats:
    """Returns what `xla.token_stats` returns."""
    x, mask, temperatures, unfold = fold_topk(logits, where, temperature)
    kernel: Any = tile_kernel if isinstance(plan, Tile) else parts_kernel
    lse, entropy, *moments, argmax = (
        unfold(a.reshape(-1, 1))
        for a in kernel.launch(
            FORMULAS["token_stats"],
            [x],
            mask,
            plan,
            1 / temperatures if scaled else None,
            name="token_stats_forward",
            approximate=approximate(x.dtype),
        )
    )
    moments = Moments(*moments)
    label_logit = logits_at(labels, logits, where)
    at_label = label_distance(label_logit, moments.m, temperature, is_column(labels, logits.shape[-1]))
    return RowStats(lse, entropy, at_label, moments, argmax)


KERNELS = {"token_stats": Kernel(plan, token_stats)}
