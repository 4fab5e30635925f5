"""Routers on a GPU: every gate, with the numbers of experts of models and the longest rows."""

import jax
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import cases, routing
from tests.support.cases import BF16, F16, F32
from tests.support.routing import GATES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]

EXPERTS = [(8, 2), (64, 6), (256, 8), (384, 8), (1000, 6), (1024, 8)]  # (E, k)
DTYPES = [F32, BF16, F16]
CASES = [
    (name, experts, min(k, experts // gate.groups * (gate.top_groups or 1)), DTYPES[(i + at) % 3])
    for at, (name, gate) in enumerate(GATES.items())
    for i, (experts, k) in enumerate(EXPERTS)
]
CASES += [
    ("softmax", 64, 64, BF16),
    ("sigmoid, bias, groups", 256, 64, F32),
    ("sigmoid, bias", 1024, 64, F16),
]


def logits_and_bias(experts, dtype):
    """Returns mild, tied and peaked rows, rows of large and of small scores, and rows with infinities and NaN."""
    rng = np.random.default_rng(experts)
    rows = [
        2 * rng.standard_normal((300, experts)),
        rng.integers(-2, 3, (40, experts)),
        np.zeros((3, experts)),
    ]
    rows += [shift + rng.standard_normal((9, experts)) for shift in (60, -60, 300, -300)]
    rows += [30 * rng.standard_normal((9, experts))]
    special = rng.standard_normal((12, experts))
    special[:8][rng.random((8, experts)) < 0.2] = -np.inf
    special[8, 3], special[9, 5], special[10, 1:4], special[11] = np.inf, np.nan, -np.nan, -np.inf
    bias = 0.2 * rng.standard_normal(experts)
    return np.concatenate([*rows, special]).astype(dtype), bias.astype(F32)


def implementation_of(gate, experts):
    """Returns the implementation to name: the kernel, if it has a tile for these groups."""
    return None if gate.groups > 1 and experts == 1000 else "mosaic_gpu"


@pytest.mark.parametrize(("name", "experts", "k", "dtype"), CASES, ids=str)
def test_route(name, experts, k, dtype):
    """Experts, weights, logsumexp and the cotangents of the logits. Groups of 125 experts have no kernel."""
    gate = GATES[name]
    x, bias = logits_and_bias(experts, dtype)
    g, g_logsumexp = cases.cotangent((len(x), k)), cases.cotangent((len(x),))
    results = routing.results_and_gradient(k, gate, implementation_of(gate, experts))
    got, dx = jax.jit(results)(x, bias, g, g_logsumexp)
    routing.judge(got, x, k, gate, bias)
    routing.judge_vjp(dx, x, np.asarray(got.indices), gate, g, g_logsumexp)


@pytest.mark.parametrize(("name", "experts", "k", "dtype"), CASES, ids=str)
def test_many_tokens(name, experts, k, dtype):
    """Rows lie over fewer lanes than few rows do."""
    gate = GATES[name]
    x, bias = logits_and_bias(experts, dtype)
    x, named = np.tile(x, (6, 1)), implementation_of(gate, experts)
    route = jax.jit(lambda x, bias: ps.route(x, k, implementation=named, **gate.keywords(bias)))
    routing.judge(route(x, bias), x, k, gate, bias)
