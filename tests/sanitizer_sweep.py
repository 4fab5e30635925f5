"""Run by test_gpu.py under compute-sanitizer: every kernel family over a few shapes, results checked coarsely.

Small on purpose: racecheck slows shared memory accesses down by two orders of magnitude.
"""

import functools

import cases
import jax
import numpy as np
import oracle

from pallas_softmax.mosaic_gpu import softmax_kernel, topk_kernel
from pallas_softmax.mosaic_gpu.launch import Parts

TWO = ("softmax", "softmax_grad")  # where the others would do no more
# (rows, V, dtype, plan, masked, operations). In registers; then in one CTA, clusters, two launches.
SHAPES = [
    (3, 1000, "float32", None, False, oracle.OPERATIONS),
    (3, 127, "bfloat16", None, True, TWO),
    (2, 1024, "float32", Parts(1024, 4, 1, 1, True), False, TWO),
    (3, 1003, "bfloat16", Parts(1003, 8, 2, 1, True), True, oracle.OPERATIONS),
    (2, 1003, "float32", Parts(1003, 4, 1, 2, True), True, oracle.OPERATIONS),
    (2, 2048, "bfloat16", Parts(2048, 8, 1, 4, True), False, TWO),
    (2, 1003, "float32", Parts(1003, 4, 1, 2, False), False, TWO),
]
# Less than an access of every thread; a step that is not full; several steps.
TOPK = [(3, 8, "float32"), (2, 1000, "float32"), (2, 10000, "bfloat16")]


def main():
    for rows, v, dtype, plan, masked, names in SHAPES:
        x = np.random.default_rng(0).standard_normal((rows, v)).astype(dtype)
        where = np.arange(v)[None] % 3 > 0 if masked else None
        for name in names:
            arrays = cases.operands(name, x, where)
            kernel = jax.jit(functools.partial(softmax_kernel.rows, name, axes=(1,), plan=plan))
            got = np.asarray(kernel(arrays, where)[0]).astype("float32")
            want, *_ = oracle.expected(name, arrays, where)
            np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)
    for rows, v, dtype in TOPK:
        x = np.random.default_rng(0).standard_normal((rows, v)).astype(dtype)
        x[0] = 1  # all tied: the exact path
        for k in (1, min(v, 128)):
            topk = jax.jit(functools.partial(topk_kernel.topk_rows, k=k))
            indices = np.asarray(topk(x, np.ones(1, "float32"))[0].indices)
            np.testing.assert_array_equal(indices, np.argsort(-x.astype("float32"), kind="stable")[:, :k])
    print("swept", SHAPES, TOPK)


if __name__ == "__main__":
    main()
