"""Fixtures of all tests. Every test that is not marked `gpu` computes on the CPU, also where a GPU is visible."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tests.support.gpu import SIDE_BY_SIDE, THREADS, unavailable


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


@pytest.fixture
def quick_compilation():
    """XLA leaves out most of its optimizations, which take longer than the small programs of a test run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def needs_a_gpu(request, monkeypatch):
    """One for the parameter `implementation` of the test; without one, the test is of mosaic_gpu."""
    implementation = "mosaic_gpu"
    if "implementation" in request.fixturenames:
        implementation = request.getfixturevalue("implementation")
    reason = unavailable(implementation)
    if reason is not None:
        pytest.skip(reason)
    alone = not hasattr(request.config, "workerinput")  # with -n there are other processes that compile
    if alone and implementation == "triton" and request.function in SIDE_BY_SIDE:
        result = request.getfixturevalue("triton_results")[request.node.nodeid]
        monkeypatch.setattr(request.node, "obj", lambda **_: result.result())


@pytest.fixture(scope="session")
def triton_results(request):
    """By node id, the results of all selected cases that run side by side."""
    with ThreadPoolExecutor(THREADS) as pool:
        return {
            item.nodeid: pool.submit(item.function, **item.callspec.params)
            for item in request.session.items
            if item.function in SIDE_BY_SIDE and item.callspec.params.get("implementation") == "triton"
        }
