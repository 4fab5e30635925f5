"""The largest element of the row, and the mass of each CTA relative to that, once the row is in shared memory.

A thread keeps the largest of its elements and their mass relative to that, (m, d), as the normalizer of softmax does;
those of the lanes are combined to that of the warp, and so on, with masses in powers of two here:

    lanes     (3, 1.5)  (5, 1.25) ..    each relative to its own m
    warps     (5, 1.625)  (4, 2) ..     1.5 * 2^(3 - 5) + 1.25
    CTAs      (5, 2.625)  (6, 1) ..
    row       6; the CTAs have masses 1.3125 and 1

For a small top_k there is also a bound, an element up to which there are enough for certain. Each CTA is to have its
share of top_k, so the bound is the least of theirs, and of the 5th largest of the warps' largest for a share of 5. If
a CTA has fewer warps than its share, it is the least of the warps' second largest of the lanes' largest, or third, ..

Where the largest elements of a row lie in one CTA that says little. Then each CTA is to have all of top_k, and the best
of their bounds is taken. The elements of its warps alternate, so that neighbours are in all of them:

    vectors    0 .. 7 | 8 .. 15 | .. |      of 16 bytes: 128 bytes, which 8 lanes load at once
    warp         0    |    1    | .. | 0    and lanes 0 to 7, then 8 to 15, ..
"""

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import Layout
from pallas_softmax._src.sample.row_ptx import INF, LEAST_FINITE, Row

# A small top_k has a bound from the largest elements of threads: about 120 keys are above it for top_k = 50.
_FEW, _FEW_OF_WARP = 128, 4
_TOGETHER = 8  # lanes that load neighbouring vectors


def arrive(p: Row, few: Value, top_k: Value) -> tuple[Value, Value]:
    """Finds p.top, NaN if there is one.

    Args:
      few: whether top_k is small, at most `most_few`.
      top_k: a number of elements.

    Returns:
      The mass of each CTA, in the lane of its number; and, if `few`, an element that at least `top_k` elements reach.
    """
    layout = p.layout
    m, d, finite_m = p.var(-INF, "f32"), p.var(0, "f32"), p.var(LEAST_FINITE, "f32")

    def absorb(words, _):
        largest = p.op("max.NaN", "f32", m, p.greatest(words))
        p.set(m, largest)
        finite = p.max(largest, LEAST_FINITE)  # so that -inf minus it is -inf
        p.set(d, d * p.exp2((finite_m - finite) * p.scale))
        p.set(d, d + p.reduce("add", [p.exp2((x - finite) * p.scale) for x in p.floats(words)]))
        p.set(finite_m, finite)

    p.sweep(absorb)
    of_cta = _divided(top_k + (p.ctas - 1), p.ctas)  # so many elements a CTA is to have
    of_each_warp = _divided(of_cta + (p.warps - 1), p.warps)
    largest, d = _over_warp(p, m, d)
    bound = p.var(largest)
    with p.when(few & (of_each_warp > 1)):
        p.set(bound, _in_rank(p, m, of_each_warp, LANES))
    own = p.word(layout.warps, p.warp, layout.warp_words)
    p.store(own, largest, d, when=p.first_lane)
    p.store(own, bound, offset=8, when=p.first_lane)
    p.barrier()
    with p.when(p.warp.equals(0)):
        p.store(p.word(layout.total), *_over_warp(p, *of_warp(p)), when=p.first_lane)
        with p.when(few):
            of_warps, inside = p.word(layout.warps, p.lane, layout.warp_words), p.lane < p.warps
            bounds = p.load(of_warps, "f32", offset=8, when=inside, default=-INF)
            rank = p.select(of_each_warp > 1, p.warps, of_cta)
            bound = _in_rank(p, bounds, rank, 1 << (p.warps - 1).bit_length())
            p.store(p.word(layout.total), bound, offset=8, when=p.first_lane)
    p.meet()
    m, d, bound, _ = (value.bits("f32") for value in p.of_ctas(layout.total, 4))
    inside = p.lane < p.ctas
    m, d = _relative_to_largest(p, p.select(inside, m, -INF), d)
    p.top = m + 0.0  # not -0
    (bound,) = p.over_warp(["min"], [p.select(inside, bound, INF)])
    return d, bound


def bound_of_best(p: Row, top_k: Value) -> Value:
    """Returns the largest element of which it is known that as many as a small top_k, of one CTA, are not less."""
    layout = p.layout
    together, lane = p.lane >> _TOGETHER.bit_length() - 1, p.lane & (_TOGETHER - 1)
    at = p.var(p.x + ((together * p.warps + p.warp) * _TOGETHER + lane) * ACCESS_BYTES)
    end = p.x + layout.window.size * p.elements.itemsize
    largest = p.var(LEAST_FINITE, "f32")
    with p.loop() as leave:
        leave(at >= end)
        p.set(largest, p.max(largest, p.greatest(p.vector(at))))
        p.increase(at, layout.threads * ACCESS_BYTES)
    of_each_warp = _divided(top_k + (p.warps - 1), p.warps)
    p.over_cta(["min"], [_in_rank(p, largest, of_each_warp, LANES)], [INF], layout.kept)
    p.meet()
    (bound,) = p.of_ctas(layout.kept, 1)
    (best,) = p.over_warp(["max"], [p.select(p.lane < p.ctas, bound.bits("f32"), LEAST_FINITE)])
    return best


def most_few(layout: Layout) -> int:
    """Returns up to which a top_k is small: for which the largest elements of threads tell a good bound."""
    if layout.by_value:  # the histogram is as fast
        return 0
    return min(_FEW, _FEW_OF_WARP * layout.window.count * layout.threads // LANES)


def _divided(number: Value, by: int) -> Value:
    """Returns a small number divided by another one, without the remainder."""
    p = number.program
    return p.multiply_high(number, p.var(-(-(2**32) // by), "u32")) if by > 1 else number


def _in_rank(p: Row, value: Value, rank: Value, count: int) -> Value:
    """Returns the largest (rank 1), the second largest (2), .. of the first lanes' values, a power of two of them."""
    larger, other_lane = p.var(1, "u32"), p.var(1, "u32")
    with p.loop() as leave:
        leave(other_lane >= count)
        other = p.shuffle(value, "bfly", other_lane)
        equal_before = other.equals(value) & ((p.lane ^ other_lane) < p.lane)
        p.increase(larger, 1, equal_before | (other > value))
        p.increase(other_lane, 1)
    return p.shuffle(value, "idx", p.first_that(larger.equals(rank)))


def of_warp(p: Row) -> tuple[Value, Value]:
    """Returns the largest element of the warp of this lane's number, and its mass relative to that."""
    at, inside = p.word(p.layout.warps, p.lane, p.layout.warp_words), p.lane < p.warps
    m = p.load(at, "f32", when=inside, default=-INF)
    return m, p.load(at, "f32", offset=4, when=inside, default=0)


def _over_warp(p: Row, m: Value, d: Value) -> tuple[Value, Value]:
    """Combines the (m, d) of all lanes."""
    m, d = _relative_to_largest(p, m, d)
    (d,) = p.over_warp(["add"], [d])
    return m, d


def _relative_to_largest(p: Row, m: Value, d: Value) -> tuple[Value, Value]:
    """Returns the largest of the lanes' m, and each lane's mass relative to that."""
    (largest,) = p.over_warp(["max.NaN"], [m])
    return largest, d * p.exp2((p.max(m, LEAST_FINITE) - p.max(largest, LEAST_FINITE)) * p.scale)
