"""Device time of a call, from a trace by JAX's profiler of a program of many calls."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

_TRACES = 3  # the result is their median


class NoKernels(RuntimeError):
    """A trace has fewer kernels than calls. On some machines the profiler sees none."""


def call_seconds(run: Callable[[], Any], calls: int) -> float:
    """Returns the seconds from one call to the next on the GPUs of this process.

    Gaps between kernels count: a device may be waiting for other devices or for its host. The dispatch of the
    program, and anything else before its first kernel, does not count.

    Args:
      run: runs a compiled program of `calls` equal calls. Each call waits for the previous one.
      calls: the number of calls.

    Raises:
      NoKernels: a trace has fewer kernels than calls.
    """
    jax.block_until_ready(run())
    return float(np.median([period(_kernel_starts(run), calls) for _ in range(_TRACES)]))


def period(starts: list[list[float]], calls: int) -> float:
    """Returns the median seconds from a kernel to the same kernel of the next call, over all kernels and devices.

    Args:
      starts: the start times of each device's kernels, in nanoseconds.
      calls: the number of calls.
    """
    steps = []
    for each in starts or [[]]:
        # Extra kernels, such as an initial clearing of memory, come before the calls.
        kernels = len(each) // calls
        if not kernels:
            raise NoKernels(f"the trace has {len(each)} kernels of {calls} calls")
        ordered = np.sort(each)
        steps.append(ordered[kernels:] - ordered[:-kernels])
    return float(np.median(np.concatenate(steps))) / 1e9


def _kernel_starts(run: Callable[[], Any]) -> list[list[float]]:
    """Returns the start times of each GPU's kernels, in nanoseconds."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # otherwise writing the trace takes seconds
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return [
            [
                event.start_ns
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
            for plane in planes
            if plane.name.startswith("/device:GPU")
        ]
