"""All kernels under compute-sanitizer on a GPU."""

import pytest

from tests.support.gpu import one_process, run_under
from tests.support.racecheck import hazards

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


# At most four of these long tests run side by side.
TOOLS = [
    pytest.param(name, tool, marks=one_process(f"{pair[0]} of {name}"))
    for name in ("mosaic_gpu", "triton")
    for pair in (["racecheck", "synccheck"], ["memcheck", "initcheck"])
    for tool in pair
]


@pytest.mark.parametrize(("implementation", "tool"), TOOLS)
def test_compute_sanitizer(implementation, tool):
    options = ["--tool", tool, "--error-exitcode", "9"]
    # JAX handles some errors of the driver itself, for example when it asks for features that the device lacks.
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    options += ["--racecheck-report", "hazard", "--print-limit", "100000"] if tool == "racecheck" else []
    done = run_under("compute-sanitizer", *options, script="sanitizer_sweep.py", arguments=[implementation])
    report = f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    if (
        tool == "initcheck"
    ):  # it does not see writes of bulk copies, so it complains about the copy of results to the host
        assert "Uninitialized __global__ memory read" not in done.stdout, report
    elif tool == "racecheck":
        assert not hazards(done.stdout, implementation), report
    else:
        assert done.returncode == 0, report
    assert f"swept {implementation}" in done.stdout
