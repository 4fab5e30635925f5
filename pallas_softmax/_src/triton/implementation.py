"""Implementation `triton`: Triton kernels, launched by jax_triton, for GPUs of compute capability 8.0 and newer.

The functions take what those of `implementations/xla.py` take, for calls that `unsupported` has no objection to. Each
makes rows of its arrays, lets plan.py decide how these lie over the programs of a kernel, launches it once or more,
and gives the results their shapes. Triton is an optional dependency, so the files of kernels, which import it, are
imported where they are launched.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Implementation
from pallas_softmax._src.folding import Mask, fold, fold_topk
from pallas_softmax._src.triton.launch import launch
from pallas_softmax._src.triton.plan import (
    VECTOR_BYTES,
    Block,
    Long,
    Slabs,
    merge_fan_in,
    merge_warps,
    plan_softmax,
    plan_topk,
    power_of_two,
)
from pallas_softmax._src.triton.support import slower, unsupported
from pallas_softmax.online import Candidates, Normalizer


def softmax(x, where, *, axes):
    return softmax_rows("softmax", (x,), where, axes)


def log_softmax(x, where, *, axes):
    return softmax_rows("log_softmax", (x,), where, axes)


def softmax_grad(residuals, where, dy, *, axes):
    return softmax_rows("softmax_grad", (*residuals, dy), where, axes)


def log_softmax_grad(residuals, where, dy, *, axes):
    return softmax_rows("log_softmax_grad", (*residuals, dy), where, axes)


def logsumexp(x, where, *, axes):
    lse, m, d = softmax_rows("logsumexp", (x,), where, axes)
    lse = lse.astype(x.dtype)
    return lse, Normalizer(m, d)


# --- Softmax ------------------------------------------------------------------------------------------


def softmax_rows(op: str, arrays: Sequence[jax.Array], where, axes, plan: Block | Long | None = None):
    """Computes a softmax operation over `axes`.

    Args:
      op: "softmax", "log_softmax", "logsumexp", "softmax_grad" or "log_softmax_grad".
      arrays: x for a forward, y and dy for a backward, of one shape and dtype.
      where: a boolean mask that broadcasts to them, or None.
      axes: the axes of a row.
      plan: how rows lie over programs; None lets `plan_softmax` decide.

    Returns:
      An array like x. For logsumexp a tuple of three float32 arrays in which `axes` have size 1: the result, m and d.
    """
    folded, mask, unfold = fold(arrays, where, axes)
    x = folded[-1]
    rows, vocab = x.shape
    if plan is None:
        plan = plan_softmax(op, rows, vocab, x.dtype, mask is not None)

    mask_array, mask_constants = _mask_arguments(mask, x)
    inputs = folded[0], x, mask_array  # a forward has one array, which takes both places
    constants = {"ROWS": rows, "V": vocab, "OP": op} | mask_constants
    if op == "logsumexp":
        out = jax.ShapeDtypeStruct((3, rows, 1), jnp.float32)
    else:
        out = jax.ShapeDtypeStruct((rows, vocab), x.dtype)

    if isinstance(plan, Block):
        result = _launch_block(plan, inputs, out, constants)
    else:
        result = _launch_long(plan, inputs, out, constants)
    return tuple(map(unfold, result)) if op == "logsumexp" else unfold(result)


def _launch_block(plan: Block, inputs, out: jax.ShapeDtypeStruct, constants) -> jax.Array:
    """Launches the kernel of short rows, with a program for each `plan.rows` of them."""
    from pallas_softmax._src.softmax.triton_kernels import rows_kernel

    grid = (-(-constants["ROWS"] // plan.rows),)
    shape = {"PROGRAM_ROWS": plan.rows, "WIDTH": plan.width}
    (result,) = launch(rows_kernel, inputs, [out], grid, plan.warps, **constants, **shape)
    return result


def _launch_long(plan: Long, inputs, out: jax.ShapeDtypeStruct, constants) -> jax.Array:
    """Launches the kernel of long rows: once, or for rows in several parts once to reduce and once to write."""
    from pallas_softmax._src.softmax.triton_kernels import long_kernel

    rows, x = constants["ROWS"], inputs[1]
    constants = constants | {
        "PARTS": plan.parts,
        "SLOTS": power_of_two(plan.parts),
        "LENGTH": plan.length,
        "DEPTH": plan.depth,
        "WIDTH": plan.width,
        "VECTOR": VECTOR_BYTES // x.dtype.itemsize,
    }

    def launch_phase(normalizers, out, grid, *, reduce: bool, write: bool):
        phase = {"REDUCE": reduce, "WRITE": write}
        arrays = (*inputs, normalizers)
        (result,) = launch(long_kernel, arrays, [out], grid, plan.warps, **constants, **phase)
        return result

    if plan.parts == 1:  # x takes the place of the normalizers, which are not read
        return launch_phase(x, out, (rows, 1), reduce=True, write=True)
    of_parts = jax.ShapeDtypeStruct((2, rows, plan.parts), jnp.float32)
    normalizers = launch_phase(x, of_parts, (rows, plan.parts), reduce=True, write=False)
    writers = 1 if constants["OP"] == "logsumexp" else plan.parts
    return launch_phase(normalizers, out, (rows, writers), reduce=False, write=True)


def _mask_arguments(mask: Mask | None, x: jax.Array) -> tuple[jax.Array, dict]:
    """Returns the array and the constants that tell a kernel which elements count.

    Without a mask the array is x, which the kernel does not read as a mask. WHERE is None without a mask, "row" if
    the mask has an element for each element of a row, and "one" if it has one for the whole row; MASK says which row
    of the mask belongs to a row (`folding.MaskRows`).
    """
    if mask is None:
        return x, {"WHERE": None, "MASK": ()}
    along_row = mask.array.shape[1] > 1
    return mask.array, {"WHERE": "row" if along_row else "one", "MASK": mask.row.terms}


# --- Top-k --------------------------------------------------------------------------------------------


def topk(logits, where, temperature, *, k, log, dtype, plan: Slabs | None = None):
    """Computes the k winners of each row; `plan` says how rows lie over programs, if not as `plan_topk` decides."""
    x, mask, temperatures, unfold = fold_topk(logits, where, temperature)
    rows, vocab = x.shape
    if plan is None:
        plan = plan_topk(rows, vocab, k, x.dtype)

    mask_array, mask_constants = _mask_arguments(mask, x)
    constants = {
        "ROWS": rows,
        "K": k,
        "LOG": log,
        "SCALAR": temperatures.shape == (1,),
        "SLOTS": plan.slots,
        "WHERE": mask_constants["WHERE"],
    }
    found = _launch_slabs(plan, (x, mask_array, temperatures), dtype, constants, mask_constants["MASK"])
    lists = plan.parts
    while lists > 1:
        found, lists = _launch_merge(lists, (x, temperatures), found, dtype, constants)
    values, indices, (m, d) = found
    return Candidates(unfold(values), unfold(indices)), Normalizer(unfold(m), unfold(d))


def _launch_slabs(plan: Slabs, inputs, dtype, constants, mask_terms):
    """Launches the kernel that finds the winners of each part of each row; returns what `_topk_results` describes."""
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
    """Shapes and dtypes of what the kernels of top-k write, for rows whose winners are then in so many lists.

    One list is the result: values and indices (rows, k). Of several, each is written as candidates of 64 bits, two
    int32 for each slot, in the place of the indices, and there are no values yet. The normalizers are (2, rows,
    parts), m and d.
    """
    rows, k, slots = constants["ROWS"], constants["K"], constants["SLOTS"]
    normalizers = jax.ShapeDtypeStruct((2, rows, parts), jnp.float32)
    if parts == 1:
        values = jax.ShapeDtypeStruct((rows, k), dtype)
        return [values, jax.ShapeDtypeStruct((rows, k), jnp.int32), normalizers]
    no_values = jax.ShapeDtypeStruct((), dtype)
    return [no_values, jax.ShapeDtypeStruct((rows, parts, slots, 2), jnp.int32), normalizers]


IMPLEMENTATION = Implementation(
    functions={
        "softmax": softmax,
        "softmax_grad": softmax_grad,
        "log_softmax": log_softmax,
        "log_softmax_grad": log_softmax_grad,
        "logsumexp": logsumexp,
        "topk": topk,
    },
    unsupported=unsupported,
    slower=slower,
)
