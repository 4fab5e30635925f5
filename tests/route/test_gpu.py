"""Routers on a GPU: every gate, over the lengths where the tile of a row changes."""

import pytest

from tests.route.test_api import assert_routing_and_gradient
from tests.support.cases import BF16, F16, F32
from tests.support.covering import pairs
from tests.support.routing import GATES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]
SHAPES = [(64, 6), (8, 2), (128, 8), (256, 8), (384, 8), (512, 8), (1000, 6), (1024, 64), (160, 6)]


@pytest.mark.parametrize(("name", "shape", "dtype"), pairs(list(GATES), SHAPES, [F32, BF16, F16]), ids=str)
def test_routing_and_gradient(name, shape, dtype):
    implementation = None if GATES[name].groups > 1 and shape[0] == 1000 else "mosaic_gpu"
    assert_routing_and_gradient(name, *shape, dtype, implementation=implementation)
