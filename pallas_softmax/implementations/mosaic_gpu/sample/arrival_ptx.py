"""The largest element of the row, and the mass of each CTA relative to that, once the row is in shared memory.

A thread keeps the largest of its elements and their mass relative to that, (m, d), as the normalizer of softmax does;
those of the lanes are combined to that of the warp, and so on, with masses in powers of two here:

    lanes     (3, 1.5)  (5, 1.25) ..    each relative to its own m
    warps     (5, 1.625)  (4, 2) ..     1.5 * 2^(3 - 5) + 1.25
    CTAs      (5, 2.625)  (6, 1) ..
    row       6; the CTAs have masses 1.3125 and 1
"""

from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Value
from pallas_softmax.implementations.mosaic_gpu.sample.row_ptx import INF, LOWEST, Row


def arrive(p: Row) -> Value:
    """Finds p.top, NaN if there is one; returns the mass of each CTA, in the lane of its number."""
    layout = p.layout
    m, d, finite_m = p.var(-INF, "f32"), p.var(0, "f32"), p.var(LOWEST, "f32")

    def absorb(words, _):
        largest = p.op("max.NaN", "f32", m, p.greatest(words))
        p.set(m, largest)
        finite = p.max(largest, LOWEST)  # so that -inf minus it is -inf
        p.set(d, d * p.exp2((finite_m - finite) * p.scale))
        p.set(d, d + p.reduce("add", [p.exp2((x - finite) * p.scale) for x in p.floats(words)]))
        p.set(finite_m, finite)

    p.sweep(absorb)
    p.store(p.word(layout.warps, p.warp, layout.warp_words), *_over_warp(p, m, d), when=p.first_lane)
    p.barrier()
    with p.when(p.warp.equals(0)):
        p.store(p.word(layout.total), *_over_warp(p, *of_warp(p)), when=p.first_lane)
    p.meet()
    (m,) = p.of_ctas(layout.total, "f32", default=-INF)
    (d,) = p.of_ctas(layout.total + 1, "f32")
    m, d = _relative_to_largest(p, m, d)
    p.top = m + 0.0  # not -0
    return d


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
    return largest, d * p.exp2((p.max(m, LOWEST) - p.max(largest, LOWEST)) * p.scale)
