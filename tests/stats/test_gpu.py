"""token_stats on a GPU: numbers and gradients of short and long rows, and very long ones."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.softmax.plan import plan_softmax
from tests.support import oracle, stats

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]
check = stats.check_of(functools.partial(ps.token_stats, implementation="mosaic_gpu", rank=True))

# Rows in registers, in one CTA, in clusters, in two launches.
CASES = [
    (1, "float32", False),
    (127, "float16", True),
    (1000, "bfloat16", False),
    (1003, "float16", True),
    (5000, "float32", False),
    (25000, "bfloat16", True),
    (50257, "float32", True),
    (128256, "bfloat16", False),
    (262144, "float32", False),
    (3000001, "float32", False),
]


@pytest.mark.parametrize(("v", "dtype", "options"), CASES)
def test_numbers_and_gradients(v, dtype, options):
    """With options, there are a mask and temperatures."""
    check(v, dtype, masked=options, scaled=options)


@pytest.mark.parametrize("v", [25000, 50257, 128256, 262144])
def test_plans_of_many_rows(v):
    x, labels = stats.rows(v, "bfloat16"), stats.operands(v)[0]
    plan = plan_softmax("token_stats", 4000, v, "bfloat16", (9, 0))
    stats.assert_stats(stats.kernel_stats(plan, x, labels), x, labels)


@pytest.mark.parametrize("v", [127, 1000, 25000, 262144])
def test_argmax_of_subnormal_numbers(v):
    x = np.full((4, v), -1, "float32")
    x[0, [0, v // 2, v - 1]] = 0, 2.0**-130, 2.0**-129
    x[1, [0, v // 3, v - 1]] = -(2.0**-130), -0.0, 0
    x[2, [0, v // 3, v - 1]] = -(2.0**-129), -(2.0**-130), -(2.0**-130)
    x[3, [1, v // 2]] = 2.0**-130
    got = ps.token_stats(x, implementation="mosaic_gpu").argmax
    np.testing.assert_array_equal(got, [v - 1, v // 3, v // 3, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("v", [127, 1000, 25000, 50257, 262144, 3000001])
def test_ranks(v, dtype):
    """Ties, zeros, NaNs and -inf before and after the label, in every place of a vector and of a row."""
    rng = np.random.default_rng(v)
    x = np.round(2 * rng.standard_normal((24, v))).astype("float32")
    x[:4, ::2] = -0.0
    x[4:7, ::3], x[7:10, ::3], x[10:13, ::3] = np.nan, -np.nan, -np.inf
    labels = rng.integers(0, v, 24)
    labels[13:21], labels[21:] = np.arange(8) * (v // 8), (v - 1, -1, v)
    x, where = np.asarray(jnp.asarray(x, dtype)), rng.random((24, v)) < 0.7
    for mask in (None, where):
        got = ps.token_stats(x, labels, where=mask, rank=True, implementation="mosaic_gpu")
        np.testing.assert_array_equal(got.rank, oracle.rank(x, labels, mask))


@pytest.mark.parametrize("v", [127, 1000, 25000, 50257, 262144, 3000001])
def test_differences_of_subnormal_numbers_at_temperature_0(v):
    """They count: only equal values tie."""
    x = np.full((3, v), -1, "float32")
    x[0, [0, v // 2, v - 1]] = 2.0**-130, 2.0**-149 + 2.0**-130, 2.0**-130
    x[1, [0, v // 3, v - 1]] = -(2.0**-149), 0, -0.0
    x[2, [1, v // 2]] = 1
    labels = np.array([0, v - 1, v // 2])
    got = ps.token_stats(x, labels, temperature=np.zeros(3, "float32"), implementation="mosaic_gpu")
    log_2 = np.log(2)
    np.testing.assert_allclose(got.entropy, [0, log_2, log_2], rtol=1e-6)
    np.testing.assert_allclose(got.log_probs, [-np.inf, -log_2, -log_2], rtol=1e-6)
    np.testing.assert_allclose(got.logsumexp, [np.inf, log_2, np.inf], rtol=1e-6)
