"""The Mosaic GPU kernels of routers in Pallas's interpreter, against the oracle.

The interpreter replaces inline PTX by a twin in plain JAX; test_ptx.py and test_gpu.py run the PTX itself.
"""

import numpy as np
import pytest

from tests.route import kernels
from tests.support import cases, routing
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first
from tests.support.routing import GATES

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = [
    ("sigmoid, bias, groups", 64, 6, F32),
    ("softmax", 64, 6, BF16),
    ("sigmoid, renormalized", 100, 3, F32),
    ("softmax, bias", 384, 8, F32),
    ("softmax, groups", 8, 2, F16),
    ("sigmoid", 33, 33, F16),
    ("softmax, renormalized", 8, 1, F32),
    ("sigmoid, bias", 1000, 6, BF16),
    ("sigmoid, bias, groups", 256, 8, BF16),
    ("softmax, bias", 1, 1, F32),
    ("sqrtsoftplus, bias, groups", 64, 6, F32),
    ("sqrtsoftplus", 33, 5, BF16),
    ("sqrtsoftplus, renormalized", 100, 3, F32),
]


@pytest.mark.parametrize(("name", "experts", "k", "dtype"), first(1, SHAPES), ids=str)
def test_kernels(name, experts, k, dtype):
    gate, rng = GATES[name], np.random.default_rng(experts)
    rows = ["normal", "peaked", "integers", "constant", "neg_inf_last"]
    x, bias = cases.rows(rows, experts, dtype), (0.1 * rng.standard_normal(experts)).astype(F32)
    got = kernels.route_rows(x, k, gate, bias)
    routing.judge(got, x, k, gate, bias)
    g, g_logsumexp = cases.cotangent((len(x), k)), cases.cotangent((len(x),))
    dx = kernels.route_grad_rows(x, got[1], gate, g, g_logsumexp)
    routing.judge_vjp(dx, x, np.asarray(got[1]), gate, g, g_logsumexp)
