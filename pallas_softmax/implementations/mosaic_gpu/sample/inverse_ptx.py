"""The draw: the first kept entry, in the order of the row, at which the kept mass exceeds u times all of it.

The way from that mass to an element goes down, in inline PTX, from what sums up more to what sums up less, and at each
step takes off what comes before. With u = 0.7, and kept masses of 1 and 2 in two CTAs:

    target     0.7 * 3 = 2.1
    CTA        masses 1, 2                  before them 0, 1: CTA 1, with 2.1 - 1 = 1.1 to go
    group      masses .5, 0, 1.5            before them 0, .5, .5: group 2, with 0.6 to go
    thread     masses 0, .5, 0, 1, ...      before them 0, 0, .5, .5: thread 3, with 0.1 to go
    element    masses 0, .25, .75, ...      before them 0, 0, .25: element 1

It is the last one that has kept mass and before which there is no more than the target. So rounding, by which the sum
of the parts of something may be less than what was summed up, never leads to an entry that is not kept.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import WARPS, ZERO
from pallas_softmax.implementations.mosaic_gpu.sample import cluster_ptx, kept_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program, word
from pallas_softmax.implementations.mosaic_gpu.sample.search import Kept


class Vectors(NamedTuple):
    """Registers with the neighbouring vectors of a group that a thread takes, as many as the group has blocks (b32).

    Attributes:
      position: position in the part of their first element.
      address: its address.
      count: number of vectors.
    """

    position: str
    address: str
    count: str


def cta_reaching(code: Program, masses: list[str], target: str) -> tuple[str, str]:
    """Returns the number of the CTA of the draw (b32), and the kept mass of those before it (f32).

    Args:
      masses: the kept mass of each CTA.
      target: the mass to go.
    """
    before, chosen, before_chosen = code.constant("f32", ZERO), code.constant("b32", 0), code.one("f32")
    code += f"mov.f32 {before_chosen}, {ZERO};"
    for cta, mass in enumerate(masses):
        here = _may_be_here(code, before, mass, target)
        code += f"@{here} mov.b32 {chosen}, {cta}; @{here} mov.f32 {before_chosen}, {before};"
        code += f"add.f32 {before}, {before}, {mass};"
    return chosen, before_chosen


def group_reaching(code: Program, target: str) -> str:
    """Returns the group of the draw in this CTA (b32); takes the kept mass of those before it off the target."""
    before, group, before_group = code.constant("f32", ZERO), code.constant("b32", 0), code.one("f32")
    code += f"mov.f32 {before_group}, {ZERO};"
    for i, mass in enumerate(kept_ptx.load_sums(code)):
        here = _may_be_here(code, before, mass, target)
        code += f"@{here} mov.b32 {group}, {i}; @{here} mov.f32 {before_group}, {before};"
        code += f"add.f32 {before}, {before}, {mass};"
    code += f"sub.f32 {target}, {target}, {before_group};"
    return group


def vectors_of_group(code: Program, group: str) -> Vectors:
    """Returns the vectors of a group that a thread takes for the draw.

    They are neighbours in the order of the row, so that those of lower threads come before them:

        of the group, in the order of the row     t0 t0 t0 t0 t1 t1 t1 t1 t2 ...     for a group of 4 blocks
    """
    position, count, address = code.new("b32", 3)
    code += f"mul.lo.u32 {position}, {group}, {code.group_blocks};"
    code += (
        f"sub.u32 {count}, {code.window.blocks}, {position}; min.u32 {count}, {count}, {code.group_blocks};"
    )
    code += f"mul.lo.u32 {position}, {position}, {WARPGROUP};"
    code += f"mad.lo.u32 {position}, <thread>, {count}, {position};"
    code += f"mad.lo.u32 {address}, {position}, 16, <x>;"
    code += f"mul.lo.u32 {position}, {position}, {code.window.vec};"
    return Vectors(position, address, count)


def thread_reaching(code: Program, vectors: Vectors, kept: Kept, least_weight: str, target: str):
    """Returns a predicate: whether the draw is in this thread; and the kept mass of lower threads (f32)."""
    own = code.constant("f32", ZERO)
    for mass, _, _ in _elements(code, vectors, kept, least_weight):
        code += f"add.f32 {own}, {own}, {mass};"
    before, _ = cluster_ptx.sum_of_lower_threads(code, own, "f32", code.scratch.scans)
    last = code.constant("b32", -1)
    here = _may_be_here(code, before, own, target)
    code += f"@{here} mov.b32 {last}, <thread>;"
    cluster_ptx.reduce_warp(code, "max.s32", "b32", last)
    cluster_ptx.send(code, code.scratch.beside_scan, [last])
    cluster_ptx.meet(code)
    of_warps = code.new("b32", WARPS)
    code += f"ld.shared.v4.b32 {{{', '.join(of_warps)}}}, [{word(code.scratch.beside_scan)}];"
    code += f"setp.eq.s32 {here}, <thread>, {code.tree('max.s32', 'b32', of_warps)};"
    return here, before


def element_reaching(
    code: Program, vectors: Vectors, kept: Kept, least_weight: str, target: str, before: str
) -> tuple[str, str]:
    """Returns the element's number among those of the thread's vectors (b32), and its distance (f32).

    `before` is the kept mass of lower threads; it does not stay that.
    """
    chosen, distance_of_chosen = code.constant("b32", 0), code.constant("f32", ZERO)
    for mass, distance, number in _elements(code, vectors, kept, least_weight):
        here = _may_be_here(code, before, mass, target)
        code += f"@{here} mov.b32 {chosen}, {number}; @{here} mov.f32 {distance_of_chosen}, {distance};"
        code += f"add.f32 {before}, {before}, {mass};"
    return chosen, distance_of_chosen


def _may_be_here(code: Program, before: str, mass: str, target: str) -> str:
    """Returns a predicate: the draw is here or later, since there is mass and no more than the target before it."""
    here = code.one("pred")
    code += f"setp.le.f32 {here}, {before}, {target}; setp.gt.and.f32 {here}, {mass}, {ZERO}, {here};"
    return here


def _elements(
    code: Program, vectors: Vectors, kept: Kept, least_weight: str
) -> Iterator[tuple[str, str, str]]:
    """Walks over the elements of vectors; see `walk_ptx`. Yields registers with kept mass, distance and number."""
    turn, address = code.new("b32", 2)
    again, more = code.label("vector"), code.one("pred")
    code += f"mov.b32 {turn}, 0; mov.b32 {address}, {vectors.address}; {again}:"
    (words,) = code.kind.vectors(code, address, [0])
    for i, x in enumerate(code.kind.floats(code, words, False)):
        distance, mass, number = code.distance(x), code.one("f32"), code.one("b32")
        weight = code.weight(distance)
        keeps = kept_ptx.is_kept(code, x, weight, kept, least_weight)
        code += f"selp.f32 {mass}, {weight}, {ZERO}, {keeps};"
        code += f"mad.lo.u32 {number}, {turn}, {code.window.vec}, {i};"
        yield mass, distance, number
    code += f"add.u32 {turn}, {turn}, 1; add.u32 {address}, {address}, 16;"
    code += f"setp.lt.u32 {more}, {turn}, {vectors.count}; @{more} bra {again};"
