"""The threshold of top_k, by number, and after it that of top_p, by mass: the last entry that is kept, in inline PTX.

A row of 8, with m = 5 and temperature such that the scale is 1, for top_k = 4:

    index        0     1     2     3     4     5     6     7
    x            3     5     0     4     5     1     4     4
    distance    -2     0    -5    -1     0    -4    -1    -1
    weight      .25    1   .03    .5     1   .06    .5    .5

    histogram    2 elements near 0, 3 near -1, 1 near -2, ...                         estimated from a sample
    zone         lower = -1.5 < distance <= upper = -0.5                              the 4th is expected in it
    candidates   number 3, 6 and 7; above the zone 2 elements of mass 2               one walk over all elements
    rounds       the key of 4, which 3 elements have, and of which 4 - 2 = 2 are kept
    cut          x[7] becomes -inf, since index 7 is the highest of 3, 6 and 7
    kept         x >= 4: elements 1, 3, 4 and 6, of mass 3

`top_p` = 0.6 then takes 0.6 * 3 = 1.8 of that mass, again from a zone on: the key of 5, of which both entries are kept.

The histogram is an estimate. If the threshold turns out not to be in the zone, then the rounds are repeated with all
elements for candidates; and so are the elements of a thread whose list is too short. So the estimate changes the time,
and not the result.
"""

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import INF, NEG_INF, ZERO, float_literal
from pallas_softmax.implementations.mosaic_gpu.sample import (
    candidates_ptx,
    cluster_ptx,
    cut_ptx,
    masses_ptx,
    rounds_ptx,
    zone_ptx,
)
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program
from pallas_softmax.implementations.mosaic_gpu.sample.search import (
    Above,
    Alike,
    Candidates,
    Kept,
    Search,
    Target,
    Zone,
)

_LOWEST_KEY = "0x80000000"
# A distance is rounded three times, each by 2^-24 of it or of x and m, from which it comes: together by less than this.
_ROUNDING = float_literal(2.0**-20)


def new_search(code: Program, total: str, kept: Kept) -> Search:
    """Returns the registers of a search, in which nothing has been looked for.

    Args:
      total: mass of the warp's elements (f32).
      kept: what is kept so far, which is all.
    """
    zone = Zone(code.one("f32"), code.one("f32"), code.one("pred"))
    above = Above(code.one("f32"), code.one("b32"), code.one("b32"))
    candidates = Candidates(code.one("b32"), code.one("pred"))
    alike = Alike(code.one("pred"), code.one("f32"), code.one("b32"))
    search = Search(total, kept, zone, above, candidates, alike, code.constant("b32", _LOWEST_KEY))
    code += f"mov.b32 {above.count_of_row}, 1;"
    code.set_false(zone.everything)
    code.set_false(candidates.dropped)
    return search


def find(code: Program, search: Search, target: Target) -> None:
    """Finds a threshold, after which `search.kept` tells what is kept. If the target is not reached, all is kept."""
    look = code.label("look")
    if target.by_mass:
        # If nothing was above the zone of a search by number, all that it has kept is among its candidates.
        none_above = code.one("pred")
        code += f"setp.eq.u32 {none_above}, {search.above.count_of_row}, 0;"
        code += f"@{search.zone.everything} bra {look}; @{none_above} bra {look};"
    zone_ptx.expect(code, search, target)
    candidates_ptx.collect(code, search, target.by_mass)
    code += f"{look}:"
    _look(code, search, target)


def _look(code: Program, search: Search, target: Target) -> None:
    """Finds a threshold among the candidates, or, if it is not there, in the whole row."""
    again, failed, end = (code.label(name) for name in ("look_again", "failed", "found"))
    code += f"{again}:"
    unit = masses_ptx.unit_below(code, search.zone.upper)
    keys = _keys_of_zone(code, search)
    candidates_ptx.find_alike(code, search)
    mail = code.scratch.zone_mail[target.by_mass]
    cluster_ptx.send(code, mail, [search.total, search.above.mass, search.above.count])
    last = rounds_ptx.find_key(code, search, target, keys, unit, failed)
    cut_ptx.cut(code, last, unit, search.kept, target.by_mass)
    code += f"mov.b32 {search.lowest_key}, {last.key}; bra {end};"
    code += f"{failed}: @{search.zone.everything} bra {end};"
    cluster_ptx.meet_cluster(code)  # no CTA sends again before all have received
    _take_everything(code, search)
    code += f"bra {again}; {end}:"


def _keys_of_zone(code: Program, search: Search) -> rounds_ptx.KeyRange:
    """Returns a range that has the keys of all elements in the zone, and of not many others."""
    high = _key_beyond(code, search.zone.upper, "add", INF, code.row_max)
    low = _key_beyond(code, search.zone.lower, "sub", NEG_INF, NEG_INF)
    code += f"max.s32 {low}, {low}, {search.lowest_key};"
    return rounds_ptx.KeyRange(high, low)


def _key_beyond(code: Program, distance: str, direction: str, unbounded: str, bound: str) -> str:
    """Returns a key that no element on this side of a distance reaches (b32).

    Args:
      distance: register with an end of the zone.
      direction: "add" for its upper end, "sub" for its lower one.
      unbounded: the distance that stands for no end.
      bound: the element whose key is returned then, or one beyond it.
    """
    x, error, size = code.new("f32", 3)
    key, is_unbounded = code.one("b32"), code.one("pred")
    code += f"div.rn.f32 {x}, {distance}, {code.scale}; abs.f32 {error}, {x}; abs.f32 {size}, {code.row_max};"
    code += f"add.f32 {error}, {error}, {size}; mul.f32 {error}, {error}, {_ROUNDING};"
    code += f"add.f32 {x}, {x}, {code.row_max}; {direction}.f32 {x}, {x}, {error};"
    code += f"min.f32 {x}, {x}, {code.row_max};"
    code += f"setp.eq.f32 {is_unbounded}, {distance}, {unbounded}; @{is_unbounded} mov.f32 {x}, {bound};"
    nearest = code.kind.key(code, code.kind.bits_of_float(code, x))
    code += f"{direction}.s32 {key}, {nearest}, 1;"
    return key


def _take_everything(code: Program, search: Search) -> None:
    """Makes the zone the whole row, and all elements of all threads candidates; nothing is above it any more."""
    zone, above = search.zone, search.above
    code += f"mov.f32 {zone.upper}, {INF}; mov.f32 {zone.lower}, {NEG_INF}; mov.f32 {above.mass}, {ZERO};"
    code += f"mov.b32 {above.count}, 0; setp.eq.f32 {zone.everything}, {zone.upper}, {zone.upper};"
    code += f"setp.eq.f32 {search.candidates.dropped}, {zone.upper}, {zone.upper};"
    of_thread = code.one("b32")
    code += f"mad.lo.u32 {of_thread}, <thread>, 4, <scratch>;"
    for group in range(code.scratch.groups):
        code += f"st.shared.b32 [{of_thread}+{4 * (code.scratch.masses + group * WARPGROUP)}], 0;"
