"""Times of calls: kernel times on a GPU, wall times on a CPU."""

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.support.contenders import Call

# Calls per turn of a contender on a GPU. Several calls in a row keep the GPU's clock rate from falling in between.
# Slow calls get fewer per turn: a contender that heats the GPU lowers the clock rate for the next one, by up to 20%.
_CALLS_PER_TURN = 10
_SECONDS_PER_TURN = 0.02
_LEAST_SAMPLES = 3

Name = TypeVar("Name")


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def wall_times(call: Call) -> list[float]:
    """Returns the seconds of one call until its result is ready, as a list of one sample."""
    start = time.perf_counter()
    call.wait(call.run())
    return [time.perf_counter() - start]


def _device_times(call: Call) -> list[float]:
    """Returns the seconds of each of several calls: the sum over the kernels that a call launches.

    CUPTI sees every kernel of the process, so it measures JAX and torch alike. It sees only kernels: neither gaps
    between them nor the driver's copies and fills of memory count. The function measure of
    jax.experimental.mosaic.gpu.profiler uses the same bindings, but takes only JAX functions, and keeps all results
    in memory until the end.
    """
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    (seconds,) = wall_times(call)
    calls = int(np.clip(_SECONDS_PER_TURN / seconds, 1, _CALLS_PER_TURN))
    result = None
    cupti._cupti_init()
    try:
        for _ in range(calls):
            result = call.run()  # drops the previous result, so that its memory can be reused
        call.wait(result)
    finally:
        kernels = cupti._cupti_get_timings(True)  # (name, milliseconds), in order
    if not kernels or len(kernels) % calls:
        raise RuntimeError(f"CUPTI saw {len(kernels)} kernels in {calls} calls")
    milliseconds = np.array([duration for _, duration in kernels])
    return list(milliseconds.reshape(calls, -1).sum(axis=1) / 1e3)


def interleave(
    calls: dict[Name, Call],
    repeats: int,
    seconds: float,
    failed: Callable[[Name, Exception], None],
    sample: Callable[[Call], list[float]] | None = None,
) -> dict[Name, list[float]]:
    """Samples the calls in turn, so that a slow spell of the machine affects all of them.

    Args:
      calls: the calls to time, by name. They have run before, so that they are compiled and warm.
      repeats: sampling ends when every call has this many samples.
      seconds: sampling also ends after this time, if every call has at least three samples.
      failed: receives the exception of a call that raises. That call is dropped. Nothing here keeps the exception,
        because its traceback would keep the arrays of all calls alive.
      sample: takes one or more samples of a call. The default is device times on a GPU, wall times on a CPU.

    Returns:
      The samples in seconds, by name, of the calls that did not raise.
    """
    sample = sample or (_device_times if on_gpu() else wall_times)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    deadline = time.monotonic() + seconds
    least = 0
    while times and least < repeats and (least < _LEAST_SAMPLES or time.monotonic() <= deadline):
        for name in list(times):
            try:
                times[name] += sample(calls[name])
            except Exception as error:
                failed(name, error)
                del times[name]
        least = min(map(len, times.values()), default=0)
    return times


def seconds_per_further_call(one: Call, many: Call, calls: int) -> float:
    """Returns what a further call adds to the wall time of a program of `calls` calls. The dispatch does not count.

    `one` is a program of one call, which has run before, and `many` a program of `calls` calls.
    """
    wall_times(many)
    times = interleave({1: one, calls: many}, 10, 2.0, _reraise, wall_times)
    return float(np.median(times[calls]) - np.median(times[1])) / (calls - 1)


def _reraise(name: object, error: Exception) -> None:
    raise error


def _gigabyte() -> jax.Array:
    """Returns 1 GB of float32, or 256 MB on a CPU."""
    return jnp.ones((2**28 if on_gpu() else 2**26,), jnp.float32)


@functools.cache  # measured once per process
def copy_bandwidth() -> float:
    """Returns the bytes per second, read plus written, of a jitted x + 1.0 over a gigabyte."""
    # On a CPU the result reuses the memory of x, because page faults of fresh memory would take longer than the copy.
    add = jax.jit(lambda x: x + 1.0, donate_argnums=() if on_gpu() else 0)
    x = _gigabyte()
    bytes_moved = 2 * x.nbytes

    def run() -> jax.Array:
        nonlocal x
        x = add(x)
        return x

    return bytes_moved / _median_seconds(run)


@functools.cache
def read_bandwidth() -> float:
    """Returns the bytes per second of a jitted sum over a gigabyte: the fastest possible read."""
    total, x = jax.jit(jnp.sum), _gigabyte()
    return x.nbytes / _median_seconds(lambda: total(x))


def _median_seconds(run: Callable[[], jax.Array]) -> float:
    """Returns the median of about twenty samples of a JAX function without arguments."""
    run()  # compiles
    try:
        return float(np.median(interleave({"bandwidth": Call(run, "jax")}, 20, 2.0, _reraise)["bandwidth"]))
    except Exception as error:
        raise RuntimeError(
            "timing on a GPU needs CUPTI, through JAX's CUDA plugin (jax[cuda12] or jax[cuda13])"
            " and without another profiler in the process"
        ) from error


def cache() -> tuple[str, int]:
    """Returns the name and the size in bytes of the last cache before the memory. An unknown size is 0."""
    size = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        if not on_gpu():
            text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
            return "L3", int(text.removesuffix("K")) * 1024
        attribute = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGetAttribute(ctypes.byref(size), attribute, jax.devices()[0].local_hardware_id)
    return "L2" if on_gpu() else "L3", size.value
