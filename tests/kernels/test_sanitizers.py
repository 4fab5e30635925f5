"""All kernels under compute-sanitizer on a GPU."""

import pytest

from tests.support.gpu import on_a_gpu, one_process, sanitize
from tests.support.racecheck import hazards

# At most four of these long tests run side by side.
TOOLS = [
    pytest.param(name, tool, marks=one_process(f"{pair[0]} of {name}"))
    for name in ("mosaic_gpu", "triton")
    for pair in (["racecheck", "synccheck"], ["memcheck", "initcheck"])
    for tool in pair
]


@on_a_gpu
@pytest.mark.parametrize(("implementation", "tool"), TOOLS)
def test_compute_sanitizer(implementation, tool):
    done = sanitize(tool, implementation)
    report = f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    if tool == "initcheck":
        # it does not see writes of bulk copies, so it complains about the copy of results to the host
        assert "Uninitialized __global__ memory read" not in done.stdout, report
    elif tool == "racecheck":
        assert not hazards(done.stdout, implementation), report
    else:
        assert done.returncode == 0, report
    assert f"swept {implementation}" in done.stdout
