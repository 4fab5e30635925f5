"""Top-k of a softmax as Triton kernels: one finds the winners of parts of rows, another merges them.

`topk` and `select` return what the functions with these names in `xla.py` return. Triton is an optional dependency.
So the file of kernels, which imports Triton, is imported where they are launched.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_softmax._src import sort_keys
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold_topk
from pallas_softmax._src.gpu.checks import not_contiguous
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.topk.plan import plan_by
from pallas_softmax._src.topk.xla import TopK, within
from pallas_softmax._src.triton import checks
from pallas_softmax._src.triton.launch import launch, mask_arguments
from pallas_softmax._src.triton.plan import MAX_K, MAX_PARTS, Slabs, merge_fan_in, merge_warps, plan_topk


def plan(call: Call, capability: tuple[int, int]) -> Slabs | Refusal:
    if reason := checks.unsupported(call, capability) or not_contiguous(call):
        return Refusal(reason)
    if call.k is None or not 1 <= call.k <= MAX_K:
        return Refusal(f"k={call.k} is not from 1 to {MAX_K}")
    slabs = plan_topk(call.rows, call.vocab, call.k, call.dtype)
    if slabs.parts > MAX_PARTS:
        return Refusal(f"k={call.k} of a row of {call.vocab}: more than {MAX_PARTS} parts")
    reason = checks.missing()
    return slabs if reason is None else Refusal(reason)


def topk(plan: Slabs, logits, where, temperature, *, k, log, dtype, scaled=True):
    from pallas_softmax._src.topk.triton_kernels import merge_kernel, topk_kernel

    normalized = temperature is not None
    x, mask, temperatures, unfold = fold_topk(logits, where, temperature if normalized else jnp.ones((1, 1)))
    (rows, vocab), slots = x.shape, plan.slots
    mask_array, mask_constants = mask_arguments(mask, x)
    constants = {
        "ROWS": rows, "K": k, "SLOTS": slots, "WHERE": mask_constants["WHERE"],
        "LOG": log if normalized else None, "SCALAR": temperatures.shape == (1,), "SCALED": scaled and normalized,
    }  # fmt: skip

    def run(kernel, inputs, parts, warps, **of_kernel):
        """Launches a kernel. Returns values, indices and normalizers of `parts` lists of winners of each row.

        A single list is the result. Several lists hold candidates of 64 bits, two int32 for each slot, in the place of
        the indices, and there are no values yet. The normalizers are (2, rows, parts), m and d.
        """
        values = jax.ShapeDtypeStruct((rows, k) if parts == 1 else (), dtype)
        indices = jax.ShapeDtypeStruct((rows, k) if parts == 1 else (rows, parts, slots, 2), jnp.int32)
        results = [values, indices, jax.ShapeDtypeStruct((2, rows, parts), jnp.float32)]
        return launch(kernel, inputs, results, (rows, parts), warps, PARTS=parts, **constants, **of_kernel)

    of_row = {
        "V": vocab, "MASK": mask_constants["MASK"],
        "LENGTH": plan.length, "GROUPS": plan.groups, "VEC": plan.vec, "LEVELS": plan.levels,
    }  # fmt: skip
    found = run(topk_kernel, (x, mask_array, temperatures), plan.parts, plan.warps, **of_row)
    lists = plan.parts
    while lists > 1:
        fan_in = merge_fan_in(lists, slots)
        inputs, of_merge = (x, temperatures, *found[1:]), {"LISTS": lists, "FAN_IN": fan_in}
        lists = -(-lists // fan_in)
        found = run(merge_kernel, inputs, lists, merge_warps(fan_in, slots), **of_merge)
    values, indices, (m, d) = found
    normalizer = Normalizer(unfold(m), unfold(d)) if normalized else None
    return TopK(unfold(values), unfold(indices)), normalizer


def select(plan: Slabs, operand, where, lengths, *, k, sorted):
    x = sort_keys.as_floats(operand)
    found, _ = topk(plan, x, within(where, lengths, x), None, k=k, log=False, dtype=x.dtype)
    return found._replace(values=sort_keys.from_floats(found.values, operand.dtype))


KERNELS = {
    "topk": Kernel(plan, topk, checks.slower),
    "top_k": Kernel(functools.partial(plan_by, plan), select, checks.slower),
}
