"""Runs each of the paper's algorithms once. A profiler counts the bytes, and the sanitizers run it too.

python -m tests.programs.paper_traffic [ROWS V K]
"""

import sys

import jax
import jax.numpy as jnp

from pallas_softmax import paper

SHAPE = (4000, 64512)  # the rows in flight take about 300 MB, more than any cache


def main(rows=SHAPE[0], vocab=SHAPE[1], k=5):
    x = jax.random.uniform(jax.random.key(0), (rows, vocab), jnp.float32)
    for algorithm in paper.SOFTMAX.values():
        jax.block_until_ready(jax.jit(algorithm.kernel)(x))
    for algorithm in paper.TOPK.values():
        jax.block_until_ready(jax.jit(algorithm.kernel, static_argnums=1)(x, k))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
