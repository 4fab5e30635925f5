"""Which calls the kernels can run, and which of these XLA runs faster."""

import jax.numpy as jnp

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import Call
from pallas_softmax._src.folding import TRANSPOSED
from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, DTYPES, INT32_LIMIT, SMEM_BYTES
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.linear.plan import TILE_N
from pallas_softmax._src.sample.plan import plan_sample
from pallas_softmax._src.softmax.columns_plan import plan_columns
from pallas_softmax._src.topk.plan import MAX_K, lists_per_merge
from pallas_softmax._src.topk.tile_plan import plan_topk_grad

# The calls on a single row that XLA runs faster, measured on an H100.
LONE_ROW = 65_536  # elements of a single row above which it is too long
LONE_ROW_WINNERS = 1_024  # winners of such a row, in float32, above which they are too many

HOPPER = 9  # major compute capability of the GPUs that have wgmma


def slower(call: Call) -> str | None:
    """Returns why XLA is faster at a call that the kernels can run; None if it is not.

    The kernels are at least as fast at nearly all shapes that were measured (benchmarks/results/launch and
    figure2), but for thousands of winners of one very long row.
    """
    if call.inner != 1:
        return _across_slower(call)
    lone_row = call.rows == 1 and call.vocab > LONE_ROW and call.dtype == "float32"
    if call.op == "topk" and lone_row and (call.k or 0) > LONE_ROW_WINNERS:
        return f"slower than xla for more than {LONE_ROW_WINNERS} of a single float32 row of more than {LONE_ROW}"
    return None


def _across_slower(call: Call) -> str | None:
    """Returns why XLA is faster at rows that lie across memory; None if it is not."""
    if call.inner is None:
        return TRANSPOSED
    outer = call.rows // call.inner
    plan = plan_columns(call.op, outer, call.vocab, call.inner, call.dtype, target.capability())
    if call.masked or plan is None:
        return TRANSPOSED
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Returns why the kernels cannot run a call on a GPU of this compute capability; None if they can."""
    if capability[0] not in SMEM_BYTES:
        majors = " or ".join(map(str, SMEM_BYTES))
        return f"needs a GPU of compute capability {majors}, not {capability[0]}.{capability[1]}"
    if call.dtype not in DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(DTYPES)}"
    if call.depth is not None:
        return _projection_unsupported(call, capability)
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if call.op in ("topk", "topk_grad", "merge", "sample") and call.inner != 1:
        return "the row is not contiguous: its axes are not the last ones"
    if call.op == "sample" and plan_sample(call.rows, call.vocab, call.dtype, capability) is None:
        return f"V={call.vocab} {call.dtype} does not fit into the shared memory of a cluster"
    if call.op == "topk_grad":
        return _topk_grad_unsupported(call)
    if call.op in ("topk", "merge"):
        return _topk_unsupported(call) or _too_large(call)
    return _too_large(call)


def _projection_unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Returns why the kernels cannot run an operation of a projection; None if they can."""
    if capability[0] != HOPPER:
        return f"the matrix product needs compute capability 9.0, not {capability[0]}.{capability[1]}"
    if jnp.dtype(call.dtype).itemsize != 2:
        return f"no matrix product for {call.dtype}, only bfloat16 and float16"
    if 0 in (call.rows, call.vocab, call.depth):
        return "an array is empty"
    # Most of a tile would be for nothing there, and with 1 or 2 columns gradients are wrong on a GPU, which is not
    # understood (tests/gpu/test_linear_kernels.py: test_few_columns, test_one_column).
    if call.vocab < TILE_N:
        return f"V={call.vocab} is less than the {TILE_N} columns of a tile"
    return None


def _topk_unsupported(call: Call) -> str | None:
    """Returns why the kernels cannot find or merge the winners of a call; None if they can."""
    if call.k is None or not 1 <= call.k <= MAX_K:
        return f"k={call.k} is not from 1 to {MAX_K}"
    if call.op == "merge" and call.vocab > lists_per_merge(call.k) * call.k:
        return f"{call.vocab // call.k} lists of {call.k} are more than the {lists_per_merge(call.k)} that a CTA merges"
    return None


def _topk_grad_unsupported(call: Call) -> str | None:
    """Returns why the kernels cannot run the backward of top-k; None if they can."""
    if call.masked:
        return "no kernel for topk_grad with where"
    if plan_topk_grad(call.vocab, call.dtype) is None:
        return f"no kernel for topk_grad of V={call.vocab} {call.dtype}: a row is too long for a warp"
    return None


def _too_large(call: Call) -> str | None:
    """Returns why int32 cannot number the elements of a call's rows, as bulk copies see them; None if it can."""
    vec = ACCESS_BYTES // jnp.dtype(call.dtype).itemsize
    view = aligned_view(call.rows, call.vocab, vec)
    if view[-1] < INT32_LIMIT:
        return None
    if call.vocab >= INT32_LIMIT:
        what = "a row"
    else:
        what = f"rows whose elements are in number no multiple of {vec}"
    return f"{what}, {call.rows} x {call.vocab} {call.dtype}, of 2^31 elements or more"
