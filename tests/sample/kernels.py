"""The kernel of sample with a given plan."""

import jax.numpy as jnp

from pallas_softmax._src.sample import mosaic_gpu
from pallas_softmax._src.sample.plan import plan_sample
from tests.support.plans import HOPPER
from tests.support.twins import INTERPRET, interpreted


def sample_rows(x, words, parameters, where=None, plan=None, interpret=INTERPRET):
    """Returns index, log probability and log of the kept share of a draw from each row; without words its `Cutoff`."""
    x, where = jnp.asarray(x), None if where is None else jnp.asarray(where)
    plan = plan or plan_sample(x.shape[-1], x.dtype, HOPPER)
    noise = () if words is None else (jnp.asarray(words), 1)
    with interpreted(interpret):
        results = mosaic_gpu.sample_rows(plan, x, where, *(jnp.asarray(a)[:, None] for a in parameters), *noise)
    return [result[:, 0] for result in results]
