"""Token statistics as a Mosaic GPU kernel: a formula of the softmax kernels, on arrays of any rank."""

import jax.numpy as jnp

from pallas_softmax._src import sort_keys
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold_numbers, fold_topk
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.normalizers import Moments, encoded_scale
from pallas_softmax._src.softmax import rows_kernel
from pallas_softmax._src.softmax.formulas import FORMULAS, MOST_POSITIONS, Job, Label
from pallas_softmax._src.softmax.plan import Parts, plan_softmax
from pallas_softmax._src.stats.xla import RowStats, finished, label_keys, logits_at, with_rank
from pallas_softmax._src.temperatures import is_zero


def plan(call: Call, capability: tuple[int, int]) -> Tile | Parts | Refusal:
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call) or checks.too_large(call)
    if reason is None and call.vocab > MOST_POSITIONS:
        reason = f"the argmax is exact for rows of up to {MOST_POSITIONS} elements, not {call.vocab}"
    if reason is not None:
        return Refusal(reason)
    return plan_softmax("token_stats", call.rows, call.vocab, call.dtype, capability, masked=call.masked)


def token_stats(plan: Tile | Parts, logits, where, temperature, labels, at_labels=None, *, scaled: bool) -> RowStats:
    """Returns what `xla.token_stats` returns; with `at_labels`, what `xla.counted_stats` returns."""
    label = None
    if at_labels is not None:
        key = jnp.maximum(at_labels, jnp.iinfo(jnp.int32).min + 1)
        numbers = labels, key, sort_keys.widened_key(key, logits.dtype)
        label = Label(*(fold_numbers(a, logits.shape[:-1])[:, 0] for a in numbers))
    x, mask, temperatures, unfold = fold_topk(logits, where, temperature)
    formula = FORMULAS["token_stats" if label is None else "counted_stats"]
    scale = encoded_scale(temperatures) if scaled else None
    results = rows_kernel.launch(Job(formula, [x], plan, "token_stats_forward", mask, scale, label))
    lse, entropy, m, d, t, argmax, *count = map(unfold, results)
    label_logit = logits_at(labels, logits, where)
    stats = finished(Moments(m, d, t), temperature, labels, label_logit, argmax, logits.shape[-1])
    if scaled:  # at temperature 0 the `Scale` of the kernel is only large
        lse = jnp.where(is_zero(temperature), stats.logsumexp, lse)
    return stats._replace(logsumexp=lse, entropy=entropy, rank=count[0] if count else None)


def ranked_stats(plan: Tile | Parts, logits, where, temperature, labels, *, scaled: bool) -> RowStats:
    """Returns what `xla.ranked_stats` returns."""
    keys, is_ranked = label_keys(labels, logits, where)
    return with_rank(token_stats(plan, logits, where, temperature, labels, keys, scaled=scaled), is_ranked)


KERNELS = {
    "token_stats": Kernel(plan, token_stats),
    "ranked_stats": Kernel(plan, ranked_stats),
    "counted_stats": Kernel(plan, token_stats),
}
