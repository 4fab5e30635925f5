"""Inline PTX for the exponentials and the normalizers of rows in registers, with one exponential per logit.

A softmax usually subtracts the largest logit first. Here e = exp(x) itself serves the normalizer and both scores:

    normalizer   (0, d), d = sum of e
    softmax      e / d
    sigmoid      e / (1 + e)

That is accurate if d is neither large nor small. Otherwise the warp computes the normalizers of its rows again, with
the largest logit subtracted.
"""

import numpy as np

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.gpu.tiles import TileProgram
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.route.formulas import Score

# The sums of exp(x) that are used. An exponential has the relative error |x| eps, so the largest x should be small. An
# x below -87 counts as -inf, so the largest should not be much less than 0.
LEAST_SUM, MOST_SUM = 2.0**-16, 2.0**24
# The largest exponent of e for the sigmoid, so that e / (1 + e) is 1, and not infinity / infinity.
LARGEST_EXPONENT = 126.0


def reciprocals(tile: Tile, x):
    """Returns 1 / x of a float32 tile, accurate to one unit in the last place; 0 if that is subnormal."""
    p = TileProgram(tile, tile.shape[1])
    for row, i in np.ndindex(p.rows, tile.steps * tile.vec):
        p.set(p.operand(f"y{row}_{i}", "f32"), p.op("rcp.approx.ftz", "f32", p.operand(f"x{row}_{i}", "f32")))
    return tiles.insert_in_tile(p, x, "f32", {"y": tile})[0]


def exponentials_program(tile: Tile, score: Score) -> TileProgram:
    """Returns the program of the exponentials e and the normalizers (m, d) of the rows of a tile of float32 logits x.

    For "softmax", e is exp(x - m). For "sigmoid", e is exp(x), or large if that is large. <x{row}_{i}> has element i of
    a row of the thread, -inf beyond the row, and <e{row}_{i}> gets its exponential. <m{row}> and <d{row}> get the
    normalizer.
    """
    p, count = TileProgram(tile, tile.shape[1]), tile.steps * tile.vec
    rows = range(p.rows)
    xs, es = (
        [p.operands("f32", *(f"{name}{row}_{i}" for i in range(count))) for row in rows] for name in "xe"
    )
    m, d = (p.operands("f32", *(f"{name}{row}" for row in rows)) for name in "md")
    inexact = p.var(False, "pred")
    for row in rows:
        for e, x in zip(es[row], xs[row]):
            p.set(e, p.exp2(x * LOG2_E))
        p.set(m[row], 0.0)
        p.set(d[row], _over_row(p, tile, "add", p.reduce("add", es[row])))
        is_exact = (d[row] >= LEAST_SUM) & (d[row] <= MOST_SUM)  # False for NaN
        p.set(inexact, True, when=~is_exact)
    with p.when(p.any(inexact)):
        for row in rows:
            _subtract_largest(p, tile, score, xs[row], es[row], m[row], d[row])
    # Without this barrier, ptxas moves the loads of the bias to the top, and needs 20 more registers.
    p.sync_warp()
    return p


def _subtract_largest(
    p: Program, tile: Tile, score: Score, xs: list[Value], es: list[Value], m: Value, d: Value
) -> None:
    """Sets m to the largest logit of the row, d to the sum of exp(x - m), and e as `exponentials_program` says."""
    p.set(m, _over_row(p, tile, "max.NaN", p.reduce("max.NaN", xs)))
    shift = p.select(m.equals(float("-inf")), 0.0, m)
    total = p.var(0.0, "f32")
    for x, e in zip(xs, es):  # one after the other, to need few registers
        shifted = p.exp2((x - shift) * LOG2_E)
        p.increase(total, shifted)
        if score == "softmax":
            p.set(e, shifted)
        else:
            p.set(e, p.exp2(p.op("min.NaN", "f32", x * LOG2_E, LARGEST_EXPONENT)))
    p.set(d, _over_row(p, tile, "add", total))


def _over_row(p: Program, tile: Tile, op: str, x: Value) -> Value:
    """Reduces a number over the lanes of a row."""
    distance = 1
    while distance < tile.lanes:
        x = p.op(op, "f32", x, p.shuffle(x, "bfly", distance))
        distance *= 2
    return x
