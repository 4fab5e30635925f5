"""All kernels under compute-sanitizer on a GPU, and the hazards in a report of racecheck that count."""

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


def test_hazards_are_found_in_a_report():
    line = "=========     {} Thread ({},0,0){} at {kernel}+0x{} in kernel.py:1\n"
    report = "========= Error: Potential {} hazard detected at __shared__ 0xc in block (0,0,0) :\n"
    end = "=========     Current Value : {}, Incoming Value : {}\n"

    def hazard(kind, first, second, values=(1, 2), kernel="softmax_kernel"):
        lines = "".join(line.format(*thread, kernel=kernel) for thread in (first, second))
        return report.format(kind) + lines + end.format(*values)

    one_slot = hazard("WAW", ("Write", 96, "", 1), ("Write", 97, "", 1))
    one_value = hazard("WAW", ("Write", 31, "", 1), ("Write", 32, "", 2), (7, 7))
    ranks = " (block rank 0)", " (block rank 1)"
    peers = hazard("RAW", ("Write", 3, ranks[0], 1), ("Read", 4, ranks[1], 2))
    warpgroups = ("Write", 3, "", 1), ("Read", 160, "", 2)
    of_sample = [f"{name}_mosaic_gpu" for name in ("sample", "filter_cutoff")]
    met = peers + "".join(hazard("RAW", *warpgroups, kernel=name) for name in of_sample)
    met += hazard("WAR", ("Read", 70, "", 1), ("Write", 192, "", 2), kernel=of_sample[0])
    assert not hazards(one_slot + one_value, "triton") and not hazards(met, "mosaic_gpu")
    assert len(hazards(one_slot + one_value, "mosaic_gpu")) == 2 and len(hazards(met, "triton")) == 4
    warps = hazard("WAW", ("Write", 31, "", 1), ("Write", 32, "", 1))
    digits = hazard("WAW", ("Write", 31, "", 1), ("Write", 32, "", 1), (1, 12))
    read = hazard("RAW", ("Write", 3, "", 1), ("Read", 4, "", 2), (7, 7))
    overwritten = hazard("WAR", ("Read", 3, "", 1), ("Write", 40, "", 2), (7, 7))
    own = hazard("RAW", ("Write", 3, ranks[0], 1), ("Read", 4, ranks[0], 2))
    shown_alone = read.replace(", Incoming Value : 7", "")
    real = [warps, digits, read, overwritten, own, shown_alone, hazard("RAW", *warpgroups)]
    real.append(hazard("WAR", ("Read", 3, "", 1), ("Write", 40, "", 2), kernel=of_sample[0]))
    assert len(hazards(one_slot.join(real) + one_value, "triton")) == len(real)
    assert len(hazards("".join(real), "mosaic_gpu")) == len(real)
    assert "Incoming Value : 12" in hazards(digits, "triton")[0]
