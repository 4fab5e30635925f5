"""The Mosaic GPU kernels of routers lowered for CUDA, without a GPU."""

import jax
import pytest

import pallas_softmax as ps
from tests.support.calls import DTYPES
from tests.support.covering import first, pairs
from tests.support.lowering import array, kernel_names, lowered
from tests.support.routing import GATES


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    first(2, pairs(list(GATES), [(64, 6), (256, 8), (384, 8), (1000, 6), (1024, 64), (8, 1)], DTYPES)),
    ids=str,
)
def test_kernels(name, shape, dtype):
    """The forward and the gradient each run one kernel."""
    (experts, k), gate = shape, GATES[name]
    if gate.groups > 1 and (experts % 64 or k > experts // 8 * gate.top_groups):
        experts, k = 64, 6

    def total(x, bias):
        found = ps.route(x, k, **gate.keywords(bias))
        return found.weights.sum() + found.logsumexp.sum()

    text = lowered(jax.grad(total), array(100, experts, dtype=dtype), array(experts))
    assert kernel_names(text) == ["route", "route_grad"]
