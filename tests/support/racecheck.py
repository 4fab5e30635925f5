"""Which of the hazards that compute-sanitizer's racecheck reports count."""

import re


def hazards(report, implementation):
    """The hazards that racecheck reports, but those of Mosaic's cluster barrier and of Triton's reductions.

    Triton's reductions across warps have all lanes of a warp write the warp's result to one slot, by one
    instruction, or several warps write the same value: of a byte, which is what racecheck compares, so that of other
    values another byte is reported. Mosaic's cluster barrier is an mbarrier: what a CTA reads of its peers'
    normalizers is reported. With barrier.cluster in its place nothing was, and the kernels were slower.
    """
    triton = implementation == "triton"
    found = []
    for hazard in re.findall(r"Error: [^\n]*?Potential (.*?Current Value[^\n]*)", report, re.DOTALL):
        threads = re.findall(
            r"(Write|Read) Thread \((\d+),0,0\)(?: \(block rank (\d+)\))? at (\S+) in", hazard
        )
        (_, a, rank_a, at_a), (access, b, rank_b, at_b) = threads
        values = re.search(r"Current Value : (\S+), Incoming Value : (\S+)", hazard)
        one_slot = hazard.startswith("WAW") and at_a == at_b and int(a) // 32 == int(b) // 32
        one_value = hazard.startswith("WAW") and values is not None and values[1] == values[2]
        peers = hazard.startswith("RAW") and rank_a != rank_b and access == "Read"
        if not (triton and (one_slot or one_value) or not triton and peers):
            found.append(hazard)
    return found
