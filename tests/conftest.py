"""Fixtures of all tests. Tests without the mark `gpu` compute on the CPU, even if a GPU is visible."""

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
    """Disables most of XLA's optimizations, which take longer than a test's small programs run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def needs_a_gpu(request, monkeypatch):
    """Skips a test without a GPU for its parameter `implementation`, which defaults to mosaic_gpu."""
    implementation = "mosaic_gpu"
    if "implementation" in request.fixturenames:
        implementation = request.getfixturevalue("implementation")
    reason = unavailable(implementation)
    if reason is not None:
        pytest.skip(reason)
    alone = not hasattr(request.config, "workerinput")  # with -n, other processes compile
    if alone and implementation == "triton" and request.function in SIDE_BY_SIDE:
        result = request.getfixturevalue("triton_results")[request.node.nodeid]
        monkeypatch.setattr(request.node, "obj", lambda **_: result.result())


@pytest.fixture(scope="session")
def triton_results(request):
    """Returns, by node id, the futures of all selected cases that run side by side."""
    with ThreadPoolExecutor(THREADS) as pool:
        return {
            item.nodeid: pool.submit(item.function, **item.callspec.params)
            for item in request.session.items
            if item.function in SIDE_BY_SIDE and item.callspec.params.get("implementation") == "triton"
        }
