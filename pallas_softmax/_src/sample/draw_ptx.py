"""Writes one program of inline PTX that draws from a row of logits, once the row has arrived in a cluster of CTAs.

    stage                                 file              exchanges over the cluster
    the row's maximum and its mass        arrival_ptx       1
    top_k, then top_p, then min_p         filters_ptx       1 for min_p, if it is stricter than the others
      the last entry that a filter keeps    search_ptx
        bfloat16                              values_ptx      1
        float32, float16                      distances_ptx   1
          near where it is expected             zone_ptx        1, and 1 to count the greater of two keys,
                                                                or 2 with a better bound for a small top_k
            among the keys listed there           lists_ptx     0
        where that is not enough              digits_ptx      1 for every 7 bits of the keys' range, then 1 more
                                                                (bfloat16: 3 more)
    the draw                              inverse_ptx       0

All stages use `row_ptx` (elements, sums over warps, CTAs and clusters) and the scratch words of `SamplePlan`. The mass
of an element is 2^((x - top) * scale). Here scale is log2(e) / temperature, and top is the largest element of the row.
Every decision rests on integers, or on sums in a fixed order. So a draw has the same bits each time.
"""

import functools

from pallas_softmax._src.gpu.ptx.cta import ARRIVE, WAIT
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import arrival_ptx, filters_ptx, inverse_ptx
from pallas_softmax._src.sample.plan import SamplePlan
from pallas_softmax._src.sample.row_ptx import INF, RowProgram
from pallas_softmax._src.sample.search_ptx import Kept

_LN2 = 0.6931471805599453
_NEAR_ONE = 2.0**-6  # for |x - 1| below this, 4 terms of the series are exact to float32
_NAN = float("nan")


@functools.lru_cache(maxsize=16)  # writing the program takes half a second
def draw_program(plan: SamplePlan, dtype) -> RowProgram:
    """Returns the program for the part of a row at <x>; missing and masked elements are -inf there.

    Its operands, in addition to <x>, are:

        <scratch>                  the words that `SamplePlan` draws
        <row>, <part>              the numbers of the row, and of the CTA in its cluster
        <origin>                   the index in the row of the element at position 0
        <scale>                    log2(e) / temperature, see `kernel.scale_of`
        <u>, <temperature>, <top_k>, <top_p>, <min_p>    the parameters of the row
        <index>, <log_prob>, <log_mass>                  device memory for the results
    """
    p = RowProgram(plan, dtype)
    p.barrier()
    small_top_k = p.var((p.top_k <= arrival_ptx.largest_small_top_k(plan)) & (p.top_k < plan.window.vocab))
    mass_of_cta, bound = arrival_ptx.arrive(p, small_top_k)
    drawable = (p.absolute(p.top) < INF) & (p.temperature >= 0.0)
    with p.when(~drawable):
        with p.when(p.thread.equals(0) & p.cta.equals(0)):
            _write(p, p.var(-1, "s32"), p.var(_NAN, "f32"), p.var(_NAN, "f32"))
        if p.ctas > 1:
            p.sync_cluster()  # no CTA exits while another one may read its shared memory
    with p.when(drawable):
        _draw(p, mass_of_cta, small_top_k, bound)
    return p


def _draw(p: RowProgram, mass_of_cta: Value, small_top_k: Value, bound: Value) -> None:
    """Draws, and writes the results; `mass_of_cta` and `bound` are the results of `arrival_ptx.arrive`."""
    _, total = p.before(mass_of_cta)
    kept = Kept(p, mass_of_cta)
    filters_ptx.apply_filters(p, kept, total, small_top_k, bound)
    least, by_least = filters_ptx.least_weight(p, kept)
    filtered = (p.top_k < p.plan.window.vocab) | (p.top_p < 1.0) | (p.min_p > 0.0)
    before, all_kept = p.before(kept.mass)
    cta, target = inverse_ptx.choose(p, kept.mass, before, p.u * all_kept)
    if p.ctas > 1:
        p += ARRIVE
    with p.when(p.cta.equals(cta)):
        position, x = inverse_ptx.draw_from_part(p, kept, cta, target, least, (~filtered, by_least))
        log_prob = (x - p.top) * p.scale * _LN2 - _log(p, total)
        log_mass = _log(p, p.min(p.divide(all_kept, total), 1.0))
        with p.when(p.thread.equals(0)):
            index = position + p.operand("origin", "s32")
            _write(p, index, log_prob, p.select(filtered, log_mass, 0.0))
    if p.ctas > 1:
        p += WAIT  # no CTA exits while another one may read its shared memory


def _log(p: RowProgram, x: Value) -> Value:
    """Returns log(x); near 1 by the same series as `gpu.arithmetic.log_of_sum`."""
    u = x - 1.0
    series = u * (1.0 - u * (0.5 - u * (1 / 3 - u * 0.25)))
    return p.select(p.absolute(u) < _NEAR_ONE, series, p.log2(x) * _LN2)


def _write(p: RowProgram, index: Value, log_prob: Value, log_mass: Value) -> None:
    """Writes the results of the row."""
    offset = p.multiply_wide(p.operand("row", "u32"), 4)
    for name, value in (("index", index), ("log_prob", log_prob), ("log_mass", log_mass)):
        p.store(p.operand(name, "u64") + offset, value, space="global")
