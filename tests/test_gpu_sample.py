"""The distribution of a million draws of a peaked vocabulary, on the GPU: pytest -m gpu -n 0 tests/test_gpu_sample.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax import sample
from tests.support import cases, oracle
from tests.support.draws import chi_square

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("filters", [{}, {"top_k": 2000}, {"top_p": 0.99}, {"min_p": 1e-5}], ids=str)
def test_the_distribution_of_a_peaked_vocabulary(filters):
    x = cases.rows(["peaked"], cases.LARGE[0])[0] / 4
    _, mass = oracle.sample_terms(x[None], None, 1.0)
    mass = np.where(oracle.sample_kept(x[None], **filters), mass, 0)[0]
    draw = jax.jit(lambda key, x: sample(key, jnp.broadcast_to(x, (1000, x.size)), **filters).indices)
    counts = np.zeros(x.size)
    for key in jax.random.split(jax.random.key(7), 1000):
        counts += np.bincount(draw(key, x), minlength=x.size)
    assert abs(chi_square(counts, mass / mass.sum())) < 5
