"""Every test that is not marked `gpu` computes on the CPU, also where a GPU is visible."""

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import settings


@pytest.fixture(autouse=True)
def _on_the_cpu(request):
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def quick_to_compile():
    """Has XLA for CPUs optimize little: for tests of the interpreter and of transformations, which compile most."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def parse():
    """Parses a command line; the flags are as before at the end."""
    if "batch" not in flags.FLAGS:
        settings.define()
    with flagsaver.flagsaver():
        yield lambda *args: settings.from_flags(flags.FLAGS(["benchmarks", *args]))
