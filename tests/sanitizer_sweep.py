"""Run by test_gpu.py under compute-sanitizer: every kernel once over a few shapes, results checked coarsely.

Small on purpose: racecheck slows shared memory accesses down by two orders of magnitude.
"""

import functools

import jax
import numpy as np

from pallas_softmax.mosaic_gpu import softmax_kernel, topk_kernel

# Less than an access of every thread; a step that is not full; several steps.
SHAPES = [(3, 8, "float32"), (2, 1000, "float32"), (2, 10000, "bfloat16")]


def main():
    for rows, v, dtype in SHAPES:
        x = np.random.default_rng(0).standard_normal((rows, v)).astype(dtype)
        x[0] = 1  # all tied: the exact path of top-k
        y = np.asarray(jax.jit(softmax_kernel.softmax_rows)(x))
        np.testing.assert_allclose(y.astype("float32").sum(-1), 1, rtol=0.01)
        dx = np.asarray(jax.jit(softmax_kernel.softmax_grad_rows)(y, x))
        assert np.isfinite(dx.astype("float32")).all()
        for k in (1, min(v, 128)):
            topk = jax.jit(functools.partial(topk_kernel.topk_rows, k=k))
            indices = np.asarray(topk(x, np.ones(1, "float32"))[0].indices)
            np.testing.assert_array_equal(indices, np.argsort(-x.astype("float32"), kind="stable")[:, :k])
    print("swept", SHAPES)


if __name__ == "__main__":
    main()
