"""The candidates: the elements of the zone, which each thread lists, in inline PTX.

One walk over all elements sums what is above the zone, and notes for each element in it its number in the thread, a
byte. The lists of the 128 threads are columns of bytes:

    row 0    t0 t1 t2 ... t127        the first candidate of each thread
    row 1    t0 t1 t2 ... t127        the second one
    ...                               list_rows rows

    element number of a thread    block * vec + place in the vector; 16 * group + place in the group

A thread whose list has no room for a whole group more drops it, and from then on takes all its elements one by one. If
among those the ones in the zone are all the same number, as in a constant row, then it is enough to know that number
and how many they are.
"""

import dataclasses
from collections.abc import Iterator

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import INF, NEG_INF, WHOLE_WARP, ZERO
from pallas_softmax.implementations.mosaic_gpu.sample import cluster_ptx, walk_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.plan import GROUP_ELEMENTS
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program
from pallas_softmax.implementations.mosaic_gpu.sample.search import Search


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An element that a thread takes, as registers.

    Attributes:
      x: the element (f32).
      bits: its bits, as `ElementText.bits` has them (b32).
      distance: its distance (f32).
      inside: predicate: whether it is in the zone; of a thread that has dropped its list, others are not.
      number: its number in the thread (b32).
      next: label at which the walk goes on.
    """

    x: str
    bits: str
    distance: str
    inside: str
    number: str
    next: str


def collect(code: Program, search: Search, by_mass: bool) -> None:
    """Sums what is above the zone, for each group and for the warp, and lists the elements in it."""
    zone, above, candidates = search.zone, search.above, search.candidates
    end, start, limit, first_number = code.new("b32", 4)
    lower, mass = code.new("f32", 2)
    is_above, inside, has_room = code.new("pred", 3)
    code += f"add.u32 {start}, <scratch>, <thread>; add.u32 {start}, {start}, {4 * code.scratch.listed};"
    code += f"add.u32 {limit}, {start}, {(code.scratch.list_rows - GROUP_ELEMENTS) * WARPGROUP};"
    code += f"mov.b32 {end}, {start}; mov.f32 {above.mass}, {ZERO}; mov.b32 {above.count}, 0;"
    code += f"setp.ne.u32 {candidates.dropped}, {start}, {start};"
    for group in walk_ptx.groups(code, zone.lower):
        # Without room for all of the group nothing is in the zone any more.
        code += f"setp.le.u32 {has_room}, {end}, {limit}; selp.f32 {lower}, {zone.lower}, {INF}, {has_room};"
        code += f"not.pred {is_above}, {has_room};"
        code += f"or.pred {candidates.dropped}, {candidates.dropped}, {is_above};"
        code += f"mov.f32 {mass}, {ZERO}; mul.lo.u32 {first_number}, {group.number}, {GROUP_ELEMENTS};"
        for i, x in enumerate(group.floats):
            distance, number = code.distance(x), code.one("b32")
            code += f"setp.gt.f32 {is_above}, {distance}, {zone.upper};"
            weight = code.weight(distance)
            code += f"@{is_above} add.f32 {mass}, {mass}, {weight};"
            if not by_mass:
                code += f"@{is_above} add.u32 {above.count}, {above.count}, 1;"
            code += f"setp.gt.and.f32 {inside}, {distance}, {lower}, !{is_above};"
            code += f"add.u32 {number}, {first_number}, {i}; @{inside} st.shared.b8 [{end}], {number};"
            code += f"@{inside} add.u32 {end}, {end}, {WARPGROUP};"
        code += f"add.f32 {above.mass}, {above.mass}, {mass}; mov.f32 {group.mass}, {mass};"
    code += f"sub.u32 {candidates.listed}, {end}, {start};"
    code += f"shr.u32 {candidates.listed}, {candidates.listed}, {WARPGROUP.bit_length() - 1};"
    cluster_ptx.reduce_warp(code, "add.f32", "f32", above.mass)
    cluster_ptx.reduce_warp(code, "add.s32", "b32", above.count)


def walk(code: Program, search: Search, without: str = "") -> Iterator[Candidate]:
    """Walks over the candidates of a thread; see `walk_ptx`. If the predicate `without` holds, it takes none."""
    candidates = search.candidates
    turn, count, number, listed_at = code.new("b32", 4)
    more, inside = code.new("pred", 2)
    again, done, after = (code.label(name) for name in ("candidate", "candidates_done", "next_candidate"))
    elements = code.window.size // WARPGROUP
    code += f"mov.b32 {turn}, 0; selp.b32 {count}, {elements}, {candidates.listed}, {candidates.dropped};"
    if without:
        code += f"@{without} mov.b32 {count}, 0;"
    code += f"add.u32 {listed_at}, <scratch>, <thread>;"
    code += f"add.u32 {listed_at}, {listed_at}, {4 * code.scratch.listed};"
    code += f"{again}: setp.lt.u32 {more}, {turn}, {count}; @!{more} bra {done};"
    code += f"mov.b32 {number}, {turn}; @!{candidates.dropped} ld.shared.b8 {number}, [{listed_at}];"
    bits = code.kind.load_bits(code, _address(code, number))
    x = code.kind.float_of_bits(code, bits)
    distance = code.distance(x)
    search.zone.has(code, distance, inside)
    yield Candidate(x, bits, distance, inside, number, after)
    code += f"{after}: add.u32 {turn}, {turn}, 1; add.u32 {listed_at}, {listed_at}, {WARPGROUP};"
    code += f"bra {again}; {done}:"


def _address(code: Program, number: str) -> str:
    """Returns the address of the thread's element of this number."""
    address, place, block = code.new("b32", 3)
    vec = code.window.vec
    code += f"shr.u32 {block}, {number}, {vec.bit_length() - 1};"
    code += f"mad.lo.u32 {address}, {block}, {WARPGROUP}, <thread>;"
    code += f"and.b32 {place}, {number}, {vec - 1}; mad.lo.u32 {address}, {address}, {vec}, {place};"
    code += f"mad.lo.u32 {address}, {address}, {code.kind.itemsize}, <x>;"
    return address


def find_alike(code: Program, search: Search) -> None:
    """Finds whether all of a thread's elements in the zone are the same number, if a thread of the warp needs that."""
    alike, dropped = search.alike, search.candidates.dropped
    least, most = code.new("f32", 2)
    inside, nobody = code.new("pred", 2)
    end = code.label("alike_known")
    code += f"mov.f32 {least}, {INF}; mov.f32 {most}, {NEG_INF}; mov.b32 {alike.count}, 0;"
    code += f"mov.f32 {alike.x}, {ZERO};"
    code.set_false(alike.holds)
    code += f"not.pred {nobody}, {dropped};"
    code += f"vote.sync.all.pred {nobody}, {nobody}, {WHOLE_WARP}; @{nobody} bra {end};"
    for vector in walk_ptx.blocks(code, code.constant("b32", 0)):
        for x in vector.floats:
            search.zone.has(code, code.distance(x), inside)
            code += f"@{inside} min.f32 {least}, {least}, {x}; @{inside} max.f32 {most}, {most}, {x};"
            code += f"@{inside} add.u32 {alike.count}, {alike.count}, 1;"
    code += f"setp.ge.and.f32 {alike.holds}, {least}, {most}, {dropped};"
    code += f"mov.f32 {alike.x}, {most}; setp.ne.and.f32 {alike.holds}, {most}, {ZERO}, {alike.holds}; {end}:"
