"""Time: of the device's kernels on a GPU, of the wall on a CPU."""

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import Call

# Calls in a row in one turn of a contender on the GPU, so that its clocks do not fall between.
_CALLS_PER_TURN = 10
_LEAST_SAMPLES = 3


def on_gpu() -> bool:
    """Whether the default device is a GPU."""
    return jax.default_backend() == "gpu"


def _wall_times(call: Call) -> list[float]:
    start = time.perf_counter()
    call.wait(call.run())
    return [time.perf_counter() - start]


def _device_times(call: Call) -> list[float]:
    """Seconds of each of several calls: the sum over the kernels that a call launches.

    As jax.experimental.mosaic.gpu.profiler.measure, through the same bindings; but that keeps all
    results in memory until the end, and takes only JAX functions. CUPTI sees every kernel of the
    process, so torch is measured with the same instrument. It sees kernels alone: the gaps
    between them, and memory copies and fills by the driver, do not count.
    """
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    result = call.run()
    call.wait(result)
    cupti._cupti_init()
    try:
        for _ in range(_CALLS_PER_TURN):
            result = call.run()  # the earlier result's memory is free to be used again
        call.wait(result)
    finally:
        kernels = cupti._cupti_get_timings(True)  # (name, milliseconds), in order
    if not kernels or len(kernels) % _CALLS_PER_TURN:
        raise RuntimeError(f"CUPTI saw {len(kernels)} kernels in {_CALLS_PER_TURN} calls")
    milliseconds = np.array([duration for _, duration in kernels])
    return list(milliseconds.reshape(_CALLS_PER_TURN, -1).sum(axis=1) / 1e3)


def interleave(
    calls: dict[str, Call], repeats: int, seconds: float, failed: Callable[[str, Exception], None]
) -> dict[str, list[float]]:
    """Samples of every call in turn, so that a slow spell of the machine meets all of them.

    The calls are compiled and warm: they have been checked. Ends at `repeats` samples each, or
    after `seconds` with at least three. A call that raises drops out, and `failed` is told its
    exception, which nothing keeps: its traceback would keep the arrays of all calls.
    """
    sample: Callable[[Call], list[float]] = _device_times if on_gpu() else _wall_times
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.monotonic() + seconds
    while times:
        for name in list(times):
            try:
                times[name] += sample(calls[name])
            except Exception as error:
                failed(name, error)
                del times[name]
        least = min(map(len, times.values()), default=0)
        if least >= repeats or (least >= _LEAST_SAMPLES and time.monotonic() > deadline):
            break
    return times


def _gigabyte() -> jax.Array:
    """1 GB of float32 (on a CPU 256 MB)."""
    return jnp.ones((2**28 if on_gpu() else 2**26,), jnp.float32)


@functools.cache  # once a run, for both benchmarks
def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a jitted x + 1.0 over a gigabyte."""
    # On a CPU in place: else the time would be that of the page faults of fresh memory.
    add = jax.jit(lambda x: x + 1.0, donate_argnums=() if on_gpu() else 0)
    x = _gigabyte()
    bytes_moved = 2 * x.nbytes

    def run() -> dict[str, jax.Array]:
        nonlocal x
        x = add(x)
        return {"y": x}

    return bytes_moved / _median_seconds(run)


@functools.cache
def read_bandwidth() -> float:
    """Bytes per second of a jitted sum over a gigabyte: the most that one read can reach."""
    total, x = jax.jit(jnp.sum), _gigabyte()
    return x.nbytes / _median_seconds(lambda: {"y": total(x)})


def _median_seconds(run: Callable[[], dict[str, jax.Array]]) -> float:
    run()  # compiles
    call = Call(run, jax.block_until_ready, lambda array, indices, axis: array.take(indices, axis), "jax")

    def failed(name: str, error: Exception) -> None:
        raise RuntimeError(
            "timing on a GPU needs CUPTI, through JAX's CUDA plugin (jax[cuda12] or jax[cuda13])"
            " and without another profiler in the process"
        ) from error

    return float(np.median(interleave({"bandwidth": call}, 20, 2.0, failed)["bandwidth"]))


def cache() -> tuple[str, int]:
    """The name and size in bytes of the last cache before the memory; size 0 where unknown."""
    if not on_gpu():
        try:
            text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        except OSError:
            text = "0K"
        return "L3", int(text.removesuffix("K")) * 1024
    size = ctypes.c_int(0)
    attribute = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ordinal = jax.devices()[0].local_hardware_id
        driver.cuDeviceGetAttribute(ctypes.byref(size), attribute, ordinal)
    except OSError:
        pass
    return "L2", size.value
