"""Fixtures of all tests. Tests without the mark `gpu` compute on the CPU, even if a GPU is visible."""

import fcntl
import gc
import os
from pathlib import Path

import jax
import pytest

from tests.support.gpu import unavailable

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the GPU's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


jax.config.update("jax_traceback_filtering", "off")  # a call that fails would spend most of its time there


def pytest_collection_modifyitems(items):
    """Moves the tests that run alone to the end, where few processes have to wait for them."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def pytest_collection_finish():
    """Leaves modules and test items out of the garbage collector's later runs."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Frees the compiled programs of a file. XLA maps memory for each, and dies at Linux's 65,530 maps of a process."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _forget_programs_of_a_long_file():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _share_the_gpu(request):
    """Lets the processes run GPU tests side by side. No GPU test runs during a test marked `alone`."""
    if not request.node.get_closest_marker("gpu") or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = request.getfixturevalue("tmp_path_factory").getbasetemp().parent  # of all processes
    with (folder / "gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield


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
def quick_compilation(request):
    """Disables most of XLA's optimizations, which take longer than a test's small programs run on a CPU."""
    on_a_gpu = request.node.get_closest_marker("gpu") is not None
    jax.config.update("jax_disable_most_optimizations", not on_a_gpu)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def needs_a_gpu(request):
    """Skips a test without a GPU for its parameter `implementation`, which defaults to mosaic_gpu."""
    implementation = "mosaic_gpu"
    if "implementation" in request.fixturenames:
        implementation = request.getfixturevalue("implementation")
    reason = unavailable(implementation)
    if reason is not None:
        pytest.skip(reason)
