"""token_stats on a GPU: numbers and gradients of short and long rows, and very long ones."""

import functools

import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.softmax.plan import plan_softmax
from tests.support import stats

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]
run = stats.stats_and_gradient(functools.partial(ps.token_stats, implementation="mosaic_gpu"))

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
    x = stats.rows(v, dtype)
    labels, g, where, temperature = stats.operands(v)
    where, temperature = (where, temperature) if options else (None, 1.0)
    got, dx = run(x, labels, where, temperature, g)
    stats.assert_stats(got, x, labels, where, temperature)
    stats.assert_gradient(dx, x, labels, g, where, temperature)


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
