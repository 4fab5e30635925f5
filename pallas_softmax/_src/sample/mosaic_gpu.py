"""The draw of `sample` as a Mosaic GPU kernel, on arrays of any rank."""

import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold_mask
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.sample.draw import SamplingParams
from pallas_softmax._src.sample.kernel import sample_rows
from pallas_softmax._src.sample.plan import SamplePlan, plan_sample


def plan(call: Call, capability: tuple[int, int]) -> SamplePlan | Refusal:
    """Returns how the rows of a call lie over the GPU."""
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call)
    if reason is not None:
        return Refusal(reason)
    chosen = plan_sample(call.rows, call.vocab, jnp.dtype(call.dtype), capability)
    if chosen is None:
        return Refusal(f"V={call.vocab} {call.dtype} does not fit into the shared memory of a cluster")
    reason = checks.too_large(call)
    return chosen if reason is None else Refusal(reason)


def sample(plan: SamplePlan, logits, where, u, temperature, top_k, top_p, min_p):
    """Returns what `xla.sample` returns."""
    *batch, vocab = logits.shape

    def per_row(numbers, default, dtype):
        numbers = jnp.asarray(default if numbers is None else numbers, dtype)
        return jnp.broadcast_to(numbers, (*batch, 1)).reshape(-1) if numbers.size > 1 else numbers.reshape(1)

    numbers = SamplingParams(
        per_row(u, None, jnp.float32),
        per_row(temperature, None, jnp.float32),
        per_row(top_k, vocab, jnp.int32),
        per_row(top_p, 1, jnp.float32),
        per_row(min_p, 0, jnp.float32),
    )
    mask = fold_mask(where, logits.shape, len(batch))
    results = sample_rows(logits.reshape(-1, vocab), mask, numbers, plan)
    return tuple(result.reshape(*batch, 1) for result in results)


KERNEL = Kernel(plan, sample)
