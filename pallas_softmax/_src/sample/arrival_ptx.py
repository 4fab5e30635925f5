"""Finds the largest element of the row, and its mass relative to that, once the row is in shared memory.

Each thread keeps its largest element m, and the mass d of its elements relative to m. This pair (m, d) is the
normalizer of softmax. The pairs of the lanes combine to one of the warp, and so on; here masses are powers of two:

    lanes     (3, 1.5)  (5, 1.25) ..    each relative to its own m
    warps     (5, 1.625)  (4, 2) ..     1.5 * 2^(3 - 5) + 1.25
    CTAs      (5, 2.625)  (6, 1) ..
    row       (6, 2.3125)

A small top_k also gets a bound: an element that at least top_k elements of the row reach. The share of a CTA is top_k
divided by the number of CTAs. Each CTA gives a bound that its share of elements reaches, and the least of these bounds
is the bound of the row. For a share of 5, the bound of a CTA is the 5th largest of its warps' maxima. If a CTA has
fewer warps than its share, each warp must have several elements. The bound of a warp is then the second, or third, ..
largest of its lanes' maxima, and the CTA takes the least bound of its warps.

This bound is weak if the largest elements of a row lie in one CTA. `bound_of_best` helps there: each CTA gives a bound
for all of top_k, and the best of these bounds is taken. The elements of the warps alternate, so that neighbours are
spread over all warps:

    vectors    0 .. 7 | 8 .. 15 | .. |      16 bytes each: 8 lanes load 128 bytes at once
    warp         0    |    1    | .. | 0    lanes 0 to 7, then lanes 8 to 15, ..
"""

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.plan import SCRATCH
from pallas_softmax._src.sample.row_ptx import INF, LEAST_FINITE, ClusterProgram, PartProgram

# The largest top_k that the maxima of threads bound well. For top_k = 50, about 120 keys reach the bound. We have no
# times of other limits.
_SMALL_TOP_K, _SMALL_TOP_K_PER_WARP = 128, 4
_NEIGHBOURS = 8  # lanes that load neighbouring vectors


class LaneNormalizer:
    """The normalizer (m, d) of each lane, in variables."""

    def __init__(self, p: ClusterProgram):
        self._p = p
        self.m, self.d, self._finite_m = p.var(-INF, "f32"), p.var(0, "f32"), p.var(LEAST_FINITE, "f32")

    def raise_to(self, x: Value) -> None:
        """Raises m to x, if x is greater, or NaN."""
        p = self._p
        p.set(self.m, p.op("max.NaN", "f32", self.m, x))
        finite = p.max(self.m, LEAST_FINITE)  # so that the difference from -inf is -inf, not NaN
        p.set(self.d, self.d * _mass(p, self._finite_m, finite))
        p.set(self._finite_m, finite)

    def add(self, elements: list[Value]) -> None:
        """Adds the masses of elements that m is not below."""
        p = self._p
        with p.when(~p.greedy):
            masses = [p.exp2((x - self._finite_m) * p.octaves_per_unit) for x in elements]
            p.set(self.d, self.d + p.reduce("add", masses))
        with p.when(p.greedy):
            for x in elements:
                p.set(self.d, self.d + 1.0, when=x.equals(self._finite_m))


def _mass(p: ClusterProgram, x: Value, m: Value) -> Value:
    """Returns the mass of x below the maximum m. At temperature 0, differences of subnormal numbers count."""
    mass = p.var(p.exp2((x - m) * p.octaves_per_unit))
    p.set(mass, 0, when=p.greedy & x.differs(m))
    return mass


def arrive(p: PartProgram) -> tuple[Value, Value, Value]:
    """Sets p.top to the largest element of the row, or to NaN if the row has a NaN.

    Returns the mass of the row; whether top_k is small; and if so, an element that at least top_k elements reach.
    """
    # For bfloat16, the histogram is as fast as a bound.
    small = 0 if p.plan.by_value else min(_SMALL_TOP_K, _SMALL_TOP_K_PER_WARP * p.ctas * p.warps)
    small_top_k = p.var((p.top_k <= small) & (p.top_k < p.plan.window.vocab))
    normalizer = LaneNormalizer(p)

    def add(words, _):
        normalizer.raise_to(p.greatest(words))
        normalizer.add(p.floats(words))

    p.sweep(add)
    m, d = normalizer.m, normalizer.d
    # how many elements of each CTA must reach its bound
    share_of_cta = _divided(p, p.top_k + (p.ctas - 1), p.ctas)
    share_of_warp = _divided(p, share_of_cta + (p.warps - 1), p.warps)
    rank_in_cta = p.select(share_of_warp > 1, p.warps, share_of_cta)
    ranks = iter([(share_of_warp, LANES), (rank_in_cta, 1 << (p.warps - 1).bit_length())])

    def reduce(values):
        """Reduces over the lanes of a warp, and then over the warps."""
        m, d, bounds = values
        largest, d = combine(p, m, d)
        bound, (rank, count) = p.var(largest), next(ranks)
        with p.when(small_top_k & (rank > 1)):
            p.set(bound, _value_of_rank(p, bounds, rank, count))
        return [largest, d, bound]

    p.store(p.word(SCRATCH.threshold), 0, when=p.thread.equals(0))
    tops, d, bound = p.over_each_cta(reduce, [m, d, m], [-INF, 0, -INF], p.word(SCRATCH.normalizer))
    top, total = combine(p, tops, d)
    p.top = top + 0.0  # +0 in place of -0
    (bound,) = p.over_warp(["min"], [p.select(p.lane < p.ctas, bound, INF)])
    return total, small_top_k, bound


def bound_of_best(p: PartProgram) -> Value:
    """Returns the best bound for a small top_k: some CTA has at least top_k elements that reach it."""
    group, lane = p.lane >> _NEIGHBOURS.bit_length() - 1, p.lane & (_NEIGHBOURS - 1)
    first = p.x + ((group * p.warps + p.warp) * _NEIGHBOURS + lane) * ACCESS_BYTES
    end = p.x + p.plan.window.size * p.elements.itemsize
    largest = p.var(LEAST_FINITE, "f32")
    with p.each(first, end, p.plan.threads * ACCESS_BYTES) as at:
        p.set(largest, p.max(largest, p.greatest(p.vector(at))))
    share_of_warp = _divided(p, p.top_k + (p.warps - 1), p.warps)
    (bound,) = p.over_each_cta(
        ["min"], [_value_of_rank(p, largest, share_of_warp, LANES)], [INF], p.word(SCRATCH.counted)
    )
    (best,) = p.over_warp(["max"], [p.select(p.lane < p.ctas, bound, LEAST_FINITE)])
    return best


def _divided(p: PartProgram, number: Value, by: int) -> Value:
    """Returns a small number divided by another one, rounded down."""
    return p.multiply_high(number, p.var(-(-(2**32) // by), "u32")) if by > 1 else number


def _value_of_rank(p: PartProgram, value: Value, rank: Value, count: int) -> Value:
    """Returns the value of a rank (1 is the largest) among the first `count` lanes; `count` is a power of two."""
    own_rank = p.var(1, "u32")
    with p.each(1, count) as other_lane:
        other = p.shuffle(value, "bfly", other_lane)
        equal_before = other.equals(value) & ((p.lane ^ other_lane) < p.lane)
        p.increase(own_rank, 1, equal_before | (other > value))
    return p.shuffle(value, "idx", p.first_that(own_rank.equals(rank)))


def combine(p: ClusterProgram, m: Value, d: Value) -> tuple[Value, Value]:
    """Combines the (m, d) of all lanes of the warp."""
    (largest,) = p.over_warp(["max.NaN"], [m])
    d = d * _mass(p, p.max(m, LEAST_FINITE), p.max(largest, LEAST_FINITE))
    (d,) = p.over_warp(["add"], [d])
    return largest, d
