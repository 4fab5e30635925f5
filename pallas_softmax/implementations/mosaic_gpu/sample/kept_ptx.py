"""The kept mass of every group, of the CTA and of the row, in inline PTX.

    masses   | t0 t1 ... t127 | t0 t1 ... t127 | ...       of a thread in each group, a word each
    sums     |     group 0    |     group 1    | ...       of all threads in each group

The arrival left the mass of each group relative to its own largest element; `rescale` makes it relative to that of the
row. A search leaves the mass above its zone, to which that of the kept candidates is added. Only where min_p filters
too, or a thread has dropped its list, are all elements walked over once more.
"""

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import WARPS, WHOLE_WARP, ZERO, float_literal
from pallas_softmax.implementations.mosaic_gpu.sample import candidates_ptx, cluster_ptx, walk_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.plan import GROUP_ELEMENTS
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program, word
from pallas_softmax.implementations.mosaic_gpu.sample.search import Kept, Search

# By how much the least kept distance is lowered, so that no rounding of distances and logarithms leaves a group out.
_SLACK = float_literal(2.0**-11)
_SLACK_OF_DISTANCE = float_literal(1 + 2.0**-15)


def is_kept(code: Program, x: str, weight: str, kept: Kept, least_weight: str) -> str:
    """Returns a predicate: whether all filters keep an element.

    Args:
      x, weight: the element and its weight.
      kept: what the thresholds have left.
      least_weight: register with min_p.
    """
    out = code.one("pred")
    code += f"setp.ge.f32 {out}, {x}, {kept.least}; setp.ge.and.f32 {out}, {weight}, {least_weight}, {out};"
    return out


def rescale(code: Program) -> str:
    """Makes the masses of groups relative to the row's maximum; returns the mass of the warp's elements (f32)."""
    total, best, mass = code.constant("f32", ZERO), *code.new("f32", 2)
    of_thread = code.one("b32")
    code += f"mad.lo.u32 {of_thread}, <thread>, 4, <scratch>;"
    for group in range(code.scratch.groups):
        best_at = f"{of_thread}+{4 * (code.scratch.best + WARPGROUP * group)}"
        mass_at = f"{of_thread}+{4 * (code.scratch.masses + WARPGROUP * group)}"
        code += f"ld.shared.f32 {best}, [{best_at}]; ld.shared.f32 {mass}, [{mass_at}];"
        weight = code.weight(code.distance(best))
        code += f"mul.f32 {mass}, {mass}, {weight}; st.shared.f32 [{mass_at}], {mass};"
        code += f"add.f32 {total}, {total}, {mass};"
    cluster_ptx.reduce_warp(code, "add.f32", "f32", total)
    return total


def write_masses(code: Program, search: Search, least_weight: str, filtered: str) -> None:
    """Makes the masses of groups those of what is kept.

    Args:
      search: the search for the last threshold.
      least_weight: register with min_p, or 0.
      filtered: predicate: whether anything filters.
    """
    end, walk_all = code.label("masses"), code.label("walk_all")
    simple, all_listed = code.new("pred", 2)
    code.skip_unless(filtered, end)
    code += f"setp.le.and.f32 {simple}, {least_weight}, {ZERO}, {search.kept.known};"
    code += f"not.pred {all_listed}, {search.candidates.dropped};"
    code += f"vote.sync.all.pred {all_listed}, {all_listed}, {WHOLE_WARP};"
    code += f"and.pred {simple}, {simple}, {all_listed};"
    code.skip_unless(simple, walk_all)
    _add_kept_candidates(code, search)
    code += f"bra {end}; {walk_all}:"
    _sum_all(code, search.kept, least_weight)
    code += f"{end}:"
    cluster_ptx.meet(code)


def _add_kept_candidates(code: Program, search: Search) -> None:
    """Adds the kept candidates of the thread to the masses of their groups, those of one group at once."""
    this_group, same = code.constant("b32", 0), code.one("pred")
    mass = code.constant("f32", ZERO)
    for candidate in candidates_ptx.walk(code, search):
        group, in_this_group = code.one("b32"), code.label("in_this_group")
        code += f"setp.ge.and.f32 {candidate.inside}, {candidate.x}, {search.kept.least}, {candidate.inside};"
        code.skip_unless(candidate.inside, candidate.next)
        code += f"shr.u32 {group}, {candidate.number}, {GROUP_ELEMENTS.bit_length() - 1};"
        code += f"setp.eq.u32 {same}, {group}, {this_group}; @{same} bra {in_this_group};"
        _add_to_group(code, this_group, mass)
        code += f"mov.b32 {this_group}, {group}; mov.f32 {mass}, {ZERO}; {in_this_group}:"
        weight = code.weight(candidate.distance)
        code += f"add.f32 {mass}, {mass}, {weight};"
    _add_to_group(code, this_group, mass)


def _add_to_group(code: Program, group: str, mass: str) -> None:
    """Adds a mass to that of the thread in a group."""
    address, total = code.one("b32"), code.one("f32")
    code += f"mad.lo.u32 {address}, {group}, {WARPGROUP}, <thread>;"
    code += f"mad.lo.u32 {address}, {address}, 4, <scratch>;"
    code += f"ld.shared.f32 {total}, [{address}+{4 * code.scratch.masses}]; add.f32 {total}, {total}, {mass};"
    code += f"st.shared.f32 [{address}+{4 * code.scratch.masses}], {total};"


def _sum_all(code: Program, kept: Kept, least_weight: str) -> None:
    """Sums the kept elements of every group; groups without one, by their largest element, are left out."""
    least, of_weight = code.new("f32", 2)
    code += f"lg2.approx.f32 {of_weight}, {least_weight}; sub.f32 {of_weight}, {of_weight}, {_SLACK};"
    of_threshold = code.distance(kept.least)
    code += f"max.f32 {least}, {of_threshold}, {of_weight};"
    code += f"mul.f32 {least}, {least}, {_SLACK_OF_DISTANCE}; sub.f32 {least}, {least}, {_SLACK};"
    for group in walk_ptx.groups(code, least):
        masses = code.new("f32", len(group.floats))
        for mass, x in zip(masses, group.floats):
            weight = code.weight(code.distance(x))
            keeps = is_kept(code, x, weight, kept, least_weight)
            code += f"selp.f32 {mass}, {weight}, {ZERO}, {keeps};"
        code += f"mov.f32 {group.mass}, {code.tree('add.f32', 'f32', masses)};"


def sum_groups(code: Program) -> str:
    """Sums the masses of each group over the threads, a warp every fourth group; returns the CTA's mass (f32)."""
    group, address, sum_at = code.new("b32", 3)
    of_lane, (total, of_group) = code.new("f32", WARPGROUP // 32), code.new("f32", 2)
    more, first_lane = code.new("pred", 2)
    again, done = code.label("sum"), code.label("sums_done")
    code += f"mov.b32 {group}, {code.warp}; setp.eq.u32 {first_lane}, {code.lane}, 0;"
    code += f"{again}: setp.lt.u32 {more}, {group}, {code.scratch.groups}; @!{more} bra {done};"
    code += f"mad.lo.u32 {address}, {group}, {4 * WARPGROUP}, <scratch>;"
    code += f"mad.lo.u32 {address}, {code.lane}, 16, {address};"
    code += f"ld.shared.v4.f32 {{{', '.join(of_lane)}}}, [{address}+{4 * code.scratch.masses}];"
    code += f"mov.f32 {of_group}, {code.tree('add.f32', 'f32', of_lane)};"
    cluster_ptx.reduce_warp(code, "add.f32", "f32", of_group)
    code += f"mad.lo.u32 {sum_at}, {group}, 4, <scratch>;"
    code += f"@{first_lane} st.shared.f32 [{sum_at}+{4 * code.scratch.sums}], {of_group};"
    code += f"add.u32 {group}, {group}, {WARPS}; bra {again}; {done}:"
    cluster_ptx.meet(code)
    code += f"mov.f32 {total}, {ZERO};"
    for x in load_sums(code):
        code += f"add.f32 {total}, {total}, {x};"
    return total


def load_sums(code: Program) -> list[str]:
    """Returns the kept mass of each group (f32), which `sum_groups` has written."""
    out = code.new("f32", code.scratch.groups)
    for i, x in enumerate(out):
        code += f"ld.shared.f32 {x}, [{word(code.scratch.sums + i)}];"
    return out
