"""Times of calls: kernel times on a GPU, wall times on a CPU, and traces of programs of many calls."""

import contextlib
import ctypes
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.support.contenders import Call

# Calls per turn of a contender on a GPU. Several calls in a row keep its clock rate from falling in between.
# Slow calls get fewer per turn: a contender that heats the GPU lowers the clock rate for the next one, by up to 20%.
_CALLS_PER_TURN = 10
_SECONDS_PER_TURN = 0.02
_LEAST_SAMPLES = 3
_TRACES = 3  # the time by traces is their median


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def wall_times(call: Call) -> list[float]:
    """Returns the seconds of one call until its result is ready, as a list of one sample."""
    start = time.perf_counter()
    call.result()
    return [time.perf_counter() - start]


def _device_times(call: Call) -> list[float]:
    """Returns the seconds of each of several calls: the sum over the kernels that a call launches.

    CUPTI sees every kernel of the process, so it measures JAX and torch alike. It sees only kernels: neither gaps
    between them nor the driver's copies and fills of memory count. jax.experimental.mosaic.gpu.profiler.measure uses
    the same bindings, but takes only JAX functions, and keeps all results in memory.
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
    calls: dict[str, Call],
    repeats: int,
    seconds: float,
    failed: Callable[[str, Exception], None],
    sample: Callable[[Call], list[float]] | None = None,
) -> dict[str, list[float]]:
    """Samples warm calls in turn, so that a slow spell of the machine affects all of them.

    Args:
      calls: the calls to time, by name.
      repeats: sampling ends when every call has this many samples.
      seconds: sampling also ends after this time, if every call has at least three samples.
      failed: receives the exception of a call that raises. That call is dropped. Nothing here keeps the exception,
        because its traceback would keep the arrays of all calls alive.
      sample: takes one or more samples of a call. The default is device times on a GPU, wall times on a CPU.
    """
    sample = sample or (_device_times if on_gpu() else wall_times)
    times: dict[str, list[float]] = {name: [] for name in calls}
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


class NoKernels(RuntimeError):
    """A trace has fewer kernels than calls. On some machines the profiler sees none."""


def call_seconds(one: Call, many: Call, calls: int) -> tuple[float, str]:
    """Returns the seconds from one call to the next on the GPUs of this process, and how they were found.

    `one` is a warm program of one call. `many` is a program of `calls` such calls, and each waits for the previous one.
    By JAX's profiler, gaps between kernels count: a device may be waiting for other devices or for its host. The
    dispatch of the program, and anything else before its first kernel, does not count. If a trace has fewer kernels
    than calls, the time is what a further call adds to the wall time of the program.
    """
    many.result()
    try:
        return float(np.median([period(_kernel_starts(many), calls) for _ in range(_TRACES)])), "trace"
    except NoKernels:
        times = interleave({"one": one, "many": many}, 10, 2.0, _reraise, wall_times)
        further = np.median(times["many"]) - np.median(times["one"])
        return float(further) / (calls - 1), "host's clock"


def period(starts: list[list[float]], calls: int) -> float:
    """Returns the median seconds from a kernel to the same kernel of the next call, over all kernels and devices."""
    steps = []
    for each in starts or [[]]:
        # Extra kernels, such as an initial clearing of memory, come before the calls.
        kernels = len(each) // calls
        if not kernels:
            raise NoKernels(f"the trace has {len(each)} kernels of {calls} calls")
        ordered = np.sort(each)
        steps.append(ordered[kernels:] - ordered[:-kernels])
    return float(np.median(np.concatenate(steps))) / 1e9


def _kernel_starts(call: Call) -> list[list[float]]:
    """Returns the start times of each device's kernels, in nanoseconds."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # otherwise writing the trace takes seconds
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call.result()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return [
            [event.start_ns for line in plane.lines if line.name.startswith("Stream") for event in line.events]
            for plane in planes
            if plane.name.startswith("/device:GPU")
        ]


def _reraise(name: object, error: Exception) -> None:
    raise error


@functools.cache  # measured once per process
def bandwidth(kind: str) -> float:
    """Returns the bytes per second of a pass over 1 GB of float32 (256 MB on a CPU), the median of about 20.

    The pass is a copy, x + 1.0, which counts as read plus written, or a read, sum(x).
    """
    x = jnp.ones((2**28 if on_gpu() else 2**26,), jnp.float32)
    # On a CPU the copy reuses the memory of x, because page faults of fresh memory would take longer than the copy.
    copy, read = jax.jit(lambda x: x + 1.0, donate_argnums=() if on_gpu() else 0), jax.jit(jnp.sum)

    def run() -> jax.Array:
        nonlocal x
        if kind == "read":
            return read(x)
        x = copy(x)
        return x

    run()  # compiles
    try:
        seconds = interleave({kind: Call(run, "jax")}, 20, 2.0, _reraise)[kind]
    except Exception as error:
        raise RuntimeError(
            "timing on a GPU needs CUPTI, through JAX's CUDA plugin (jax[cuda12] or jax[cuda13])"
            " and without another profiler in the process"
        ) from error
    return {"copy": 2, "read": 1}[kind] * x.nbytes / float(np.median(seconds))


def cache() -> tuple[str, int]:
    """Returns the name and the bytes of the last cache before the memory. Unknown bytes are 0."""
    size = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        if not on_gpu():
            text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
            return "L3", int(text.removesuffix("K")) * 1024
        attribute = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGetAttribute(ctypes.byref(size), attribute, jax.devices()[0].local_hardware_id)
    return "L2" if on_gpu() else "L3", size.value
