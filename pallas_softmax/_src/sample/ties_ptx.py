"""Finds the last kept entry among the ties, the entries with the last kept key.

The filters know this key, and how many ties each CTA has and keeps. The kept ties are the first ones of the row.
"""

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import WARP_LOAD_BYTES
from pallas_softmax._src.sample.row_ptx import HIGHEST, RowProgram
from pallas_softmax._src.sample.search_ptx import Kept


def cut(p: RowProgram, kept: Kept) -> tuple[Value, Value, Value]:
    """Returns the CTA of the last kept tie, its position in this CTA, and whether any tie is left out.

    Ties up to that position are kept: all of them in lower CTAs, none in higher ones.
    """
    is_cut = p.any(kept.equal_kept < kept.equal)
    last = p.last_that(kept.equal_kept > 0)
    position = p.var(p.select(is_cut & (p.cta > last), -1, HIGHEST, "s32"))
    with p.when(is_cut & p.cta.equals(last)):
        p.set(position, _position_of(p, kept.key, p.shuffle(kept.equal_kept, "idx", last)))
    return last, position, is_cut


def _position_of(p: RowProgram, key: Value, number: Value) -> Value:
    """Returns the position of element `number`, from 1, of the CTA's elements with this key.

    Each warp counts its elements with the key. Then the warp that has the element looks for it, load by load.
    """
    equal = p.var(0, "u32")
    for words, _ in p.sweep():
        for x in p.floats(words):
            p.increase(equal, 1, when=p.key(x).equals(key))
    of_warp = p.over_lanes("add", equal)
    p.store(p.word(p.plan.warps, p.warp, p.plan.warp_words), of_warp, when=p.first_lane)
    p.barrier()
    (of_warps,) = p.words_of_warp(["u32"], [0])
    before, _ = p.before(of_warps)
    rest = p.var(number - p.shuffle(before, "idx", p.warp))  # the number among the elements of this warp
    with p.when((rest.bits("s32") > 0) & (rest <= of_warp)):
        at = p.var(p.span)
        with p.repeat() as again:
            elements = p.floats(p.vector(at))
            equal = p.var(0, "u32")
            for x in elements:
                p.increase(equal, 1, when=p.key(x).equals(key))
            before, of_load = p.before(equal)
            missing = of_load < rest
            p.increase(at, WARP_LOAD_BYTES, when=missing)
            p.update(rest, "sub", of_load, when=missing)
            again(missing)
        position, seen = p.position_of(at), p.var(before)
        for i, x in enumerate(elements):
            is_equal = p.key(x).equals(key)
            p.increase(seen, 1, when=is_equal)
            p.store(p.word(p.plan.picked), position + i, when=is_equal & seen.equals(rest))
    p.barrier()
    return p.load(p.word(p.plan.picked), "s32")
