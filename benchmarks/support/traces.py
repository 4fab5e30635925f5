"""How long a call takes on the devices, from a trace of a program of many calls by JAX's profiler."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

_TRACES = 3  # of which the median is taken


def call_seconds(run: Callable[[], Any], calls: int) -> float:
    """Returns the seconds from a call to the next on the GPUs of this process.

    The gaps between kernels count, in which a device waits for others or for its host, but not the dispatch
    of the program, nor what comes before its first kernel.

    Args:
      run: runs a compiled program of `calls` like calls, each of which waits for the one before.
      calls: how many.

    Raises:
      RuntimeError: a trace has fewer kernels than calls.
    """
    jax.block_until_ready(run())
    return float(np.median([period(_kernel_starts(run), calls) for _ in range(_TRACES)]))


def period(starts: list[list[float]], calls: int) -> float:
    """Returns the median time from a kernel to the same kernel of the next call, over all kernels and devices.

    Args:
      starts: for each device, when its kernels started, in nanoseconds.
      calls: how many calls they were.
    """
    steps = []
    for each in starts:
        # What is left over, such as a first clearing of memory, comes before the calls.
        kernels = len(each) // calls
        if not kernels:
            raise RuntimeError(f"the trace has {len(each)} kernels of {calls} calls")
        ordered = np.sort(each)
        steps.append(ordered[kernels:] - ordered[:-kernels])
    return float(np.median(np.concatenate(steps))) / 1e9


def _kernel_starts(run: Callable[[], Any]) -> list[list[float]]:
    """Returns, for each GPU, when each of its kernels started, in nanoseconds."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # or else writing the trace takes seconds
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
