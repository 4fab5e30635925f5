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
    """Without a temperature, the values are the winners as they are."""
    normalized = temperature is not None
    x, mask, temperatures, unfold = fold_topk(logits, where, temperature if normalized else jnp.ones((1, 1)))
    rows, vocab = x.shape
    mask_array, mask_constants = mask_arguments(mask, x)
    constants = {
        "ROWS": rows,
        "K": k,
        "LOG": log if normalized else None,
        "SCALAR": temperatures.shape == (1,),
        "SCALED": scaled and normalized,
        "SLOTS": plan.slots,
        "WHERE": mask_constants["WHERE"],
    }
    found = _launch_slabs(plan, (x, mask_array, temperatures), dtype, constants, mask_constants["MASK"])
    lists = plan.parts
    while lists > 1:
        found, lists = _launch_merge(lists, (x, temperatures), found, dtype, constants)
    values, indices, (m, d) = found
    normalizer = Normalizer(unfold(m), unfold(d)) if normalized else None
    return TopK(unfold(values), unfold(indices)), normalizer


def select(plan: Slabs, operand, where, lengths, *, k, sorted):
    x = sort_keys.as_floats(operand)
    found, _ = topk(plan, x, within(where, lengths, x), None, k=k, log=False, dtype=x.dtype)
    return found._replace(values=sort_keys.from_floats(found.values, operand.dtype))


def _launch_slabs(plan: Slabs, inputs, dtype, constants, mask_terms):
    from pallas_softmax._src.topk.triton_kernels import topk_kernel

    rows, vocab = inputs[0].shape
    constants = constants | {
        "V": vocab,
        "MASK": mask_terms,
        "PARTS": plan.parts,
        "LENGTH": plan.length,
        "GROUPS": plan.groups,
        "VEC": plan.vec,
        "LEVELS": plan.levels,
    }
    results = _topk_results(plan.parts, dtype, constants)
    return launch(topk_kernel, inputs, results, (rows, plan.parts), plan.warps, **constants)


def _launch_merge(lists: int, inputs, found, dtype, constants):
    """Launches the kernel that merges the lists of winners of each row; returns fewer lists, and their number."""
    from pallas_softmax._src.topk.triton_kernels import merge_kernel

    _, candidates, normalizers = found
    fan_in = merge_fan_in(lists, constants["SLOTS"])
    parts = -(-lists // fan_in)
    constants = constants | {"LISTS": lists, "FAN_IN": fan_in, "PARTS": parts}
    results = _topk_results(parts, dtype, constants)
    arrays, grid = (*inputs, candidates, normalizers), (constants["ROWS"], parts)
    merged = launch(merge_kernel, arrays, results, grid, merge_warps(fan_in, constants["SLOTS"]), **constants)
    return merged, parts


def _topk_results(parts: int, dtype, constants) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the kernels' results. The winners of each row are in `parts` lists.

    A single list is the result. Several lists hold candidates of 64 bits, two int32 for each slot, in the place of the
    indices, and there are no values yet. The normalizers are (2, rows, parts), m and d.
    """
    rows, k, slots = constants["ROWS"], constants["K"], constants["SLOTS"]
    normalizers = jax.ShapeDtypeStruct((2, rows, parts), jnp.float32)
    if parts == 1:
        values = jax.ShapeDtypeStruct((rows, k), dtype)
        return [values, jax.ShapeDtypeStruct((rows, k), jnp.int32), normalizers]
    no_values = jax.ShapeDtypeStruct((), dtype)
    return [no_values, jax.ShapeDtypeStruct((rows, parts, slots, 2), jnp.int32), normalizers]


KERNELS = {
    "topk": Kernel(plan, topk, checks.slower),
    "top_k": Kernel(functools.partial(plan_by, plan), select, checks.slower),
}
