"""Selects the hazards in a report of compute-sanitizer's racecheck that count."""

import re

from pallas_softmax._src.gpu.hardware import WARPGROUP


def hazards(report, implementation):
    """Returns the hazards that racecheck reports, except the wrong reports that docs/dev/racecheck.md explains.

    Some exceptions are hazards of Triton's reductions. Two kinds are of Mosaic: a CTA reads what another CTA wrote
    before both synchronized at an mbarrier; in the kernels of `sample`, a warpgroup reads what another one wrote, or
    overwrites what another one read, before both synchronized at `bar.sync 0`.
    """
    triton = implementation == "triton"
    found = []
    for hazard in re.findall(r"Error: [^\n]*?Potential (.*?Current Value[^\n]*)", report, re.DOTALL):
        threads = re.findall(r"(Write|Read) Thread \((\d+),0,0\)(?: \(block rank (\d+)\))? at (\S+) in", hazard)
        (_, a, rank_a, at_a), (_, b, rank_b, at_b) = threads
        values = re.search(r"Current Value : (\S+), Incoming Value : (\S+)", hazard)
        one_slot = hazard.startswith("WAW") and at_a == at_b and int(a) // 32 == int(b) // 32
        one_value = hazard.startswith("WAW") and values is not None and values[1] == values[2]
        met = hazard.startswith("RAW") and rank_a != rank_b
        if at_a.startswith(("sample_", "filter_cutoff_")) and hazard.startswith(("RAW", "WAR")):
            met |= int(a) // WARPGROUP != int(b) // WARPGROUP
        if not (triton and (one_slot or one_value) or not triton and met):
            found.append(hazard)
    return found
