"""Every test that is not marked `gpu` computes on the CPU, also where a GPU is visible."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _on_the_cpu(request):
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
