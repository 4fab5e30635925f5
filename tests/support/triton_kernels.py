"""The kernels of triton, with a given plan or with the plan that the package chooses."""

import jax

from pallas_softmax._src.folding import fold, fold_topk
from pallas_softmax._src.softmax import triton as softmax_kernels
from pallas_softmax._src.topk import triton as topk_kernels
from pallas_softmax._src.triton.plan import plan_softmax, plan_topk


def softmax_rows(op, arrays, where, axes, plan=None):
    """Returns the kernel's result for arrays of the same shape; of logsumexp, the result, m and d."""
    folded, mask, _ = fold(arrays, where, axes)
    plan = plan or plan_softmax(op, *folded[-1].shape, folded[-1].dtype, mask is not None)
    results = jax.tree.leaves(softmax_kernels.softmax_rows(op, plan, tuple(arrays), where, axes=axes))
    return results if op == "logsumexp" else results[0]


def topk(x, where, temperature, *, k, log, dtype, plan=None, scaled=True):
    rows, *_ = fold_topk(x, where, temperature)
    plan = plan or plan_topk(*rows.shape, k, rows.dtype)
    return topk_kernels.topk(plan, x, where, temperature, k=k, log=log, dtype=dtype, scaled=scaled)
