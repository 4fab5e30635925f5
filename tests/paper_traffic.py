"""Run by test_gpu.py under the profiler: each of the paper's algorithms once, K=5."""

import jax
import jax.numpy as jnp

from pallas_softmax import paper

SHAPE = (4000, 64512)  # the rows under way together are some 300 MB, more than any cache holds


def main():
    x = jax.random.uniform(jax.random.key(0), SHAPE, jnp.float32)
    for algorithm in paper.SOFTMAX.values():
        jax.block_until_ready(jax.jit(algorithm.kernel)(x))
    for algorithm in paper.TOPK.values():
        jax.block_until_ready(jax.jit(algorithm.kernel, static_argnums=1)(x, 5))


if __name__ == "__main__":
    main()
