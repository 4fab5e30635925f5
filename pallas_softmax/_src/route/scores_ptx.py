"""Inline PTX of routers, for rows in registers: their scores, and the groups of experts that take part.

A softmax usually subtracts the largest logit first. Here e = exp(x) itself, one exponential per logit, serves the
normalizer and two scores:

    normalizer   (0, d), d = sum of e
    softmax      e / d
    sigmoid      e / (1 + e)

That is accurate if d is neither large nor small. If d of any row of a warp is not, the warp computes its rows again,
with the largest logit subtracted. Only rows with such a d get these results, so the other rows do not depend on them.

A group is ranked by the sum of its best entries. A group lies in the elements of some neighbouring lanes, or of one
lane, or a lane has several groups (see `route/plan.py`). The steps:

    each lane            finds the best entries of its part of each group
    lanes of a group     merge their best entries, by shuffles, and add them
    lanes of a row       count for each group how many others are better: a larger sum, or an equal one of a lower group
"""

import functools
import operator

import numpy as np

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.layout import Tile, log2, powers_below
from pallas_softmax._src.gpu.ptx.elements import flip_negative_at_once
from pallas_softmax._src.gpu.ptx.networks import LOWEST, best
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.gpu.tiles import TileProgram
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.route.formulas import Groups, Score

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
    """Returns the program of the exponentials e and the normalizers (m, d) of the rows of a tile of logits x.

    For "softmax", e is exp(x - m). For "sigmoid", e is exp(x), or large if that is large. <x{row}_{i}> has element i of
    a row of the thread, -inf beyond the row. <e{row}_{i}>, <m{row}> and <d{row}> get the results.
    """
    p, count = TileProgram(tile, tile.shape[1]), tile.steps * tile.vec
    rows = range(p.rows)
    xs, es = ([p.operands("f32", *(f"{name}{row}_{i}" for i in range(count))) for row in rows] for name in "xe")
    m, d = (p.operands("f32", *(f"{name}{row}" for row in rows)) for name in "md")
    inexact = [p.var(False, "pred") for _ in rows]
    for row in rows:
        for e, x in zip(es[row], xs[row]):
            p.set(e, p.exp2(x * LOG2_E))
        p.set(m[row], 0.0)
        p.set(d[row], _over_row(p, tile, "add", p.reduce("add", es[row])))
        is_exact = (d[row] >= LEAST_SUM) & (d[row] <= MOST_SUM)  # False for NaN
        p.set(inexact[row], True, when=~is_exact)
    with p.when(p.any(functools.reduce(operator.or_, inexact))):  # again, with the largest logit subtracted
        for row, again in zip(rows, inexact):
            largest = _over_row(p, tile, "max.NaN", p.reduce("max.NaN", xs[row]))
            shift = p.select(largest.equals(float("-inf")), 0.0, largest)
            total = p.var(0.0, "f32")
            for x, e in zip(xs[row], es[row]):  # one after the other, to need few registers
                shifted = p.exp2((x - shift) * LOG2_E)
                p.increase(total, shifted)
                if score == "softmax":
                    p.set(e, shifted, when=again)
                else:  # the same as before where d is neither large nor small
                    p.set(e, p.exp2(p.op("min.NaN", "f32", x * LOG2_E, LARGEST_EXPONENT)))
            p.set(m[row], largest, when=again)
            p.set(d[row], _over_row(p, tile, "add", total), when=again)
    # Without this barrier, ptxas moves the loads of the bias to the top, and needs 20 more registers.
    p.sync_warp()
    return p


def _over_row(p: Program, tile: Tile, op: str, x: Value) -> Value:
    for distance in powers_below(tile.lanes):
        x = p.op(op, "f32", x, p.shuffle(x, "bfly", distance))
    return x


# --- Groups of experts


@twin
def keep_groups(tile: Tile, groups: Groups, key):
    """Returns `key`, a tile without padding, with LOWEST for elements of groups that take no part."""
    return tiles.insert_in_tile(groups_program(tile, groups), key, "i32", {"kept": tile})[0]


def groups_program(tile: Tile, groups: Groups) -> TileProgram:
    p = TileProgram(tile, tile.shape[1])
    lanes = tile.lanes // tile.pieces  # of a group
    own_piece = p.lane >> log2(lanes)
    for row in range(p.rows):
        keys = p.keys(row)
        size = len(keys) * tile.pieces // groups.count  # elements of a group in this lane
        keys_of_groups = [keys[i : i + size] for i in range(0, len(keys), size)]
        sums = [_group_key(p, keys_of_group, lanes, groups.best) for keys_of_group in keys_of_groups]
        for group, keys_of_group in enumerate(keys_of_groups):
            better = _count_better(p, sums, group, own_piece, tile.pieces, lanes)
            takes_part = better < float(groups.top)
            # Integer maxima and selects share one pipe, which limits the kernel. This product has another pipe.
            factor, lowest = p.select(takes_part, 1, 0, "s32"), p.select(takes_part, 0, LOWEST, "s32")
            for i, key in enumerate(keys_of_group, group * size):
                kept = p.operand(f"kept{row}_{i}", "s32")
                p += f"mad.lo.s32 {kept}, {key}, {factor}, {lowest};"
    return p


def _group_key(p: Program, keys: list[Value], lanes: int, count: int) -> Value:
    """Returns the sort key of the sum of the `count` best entries of a group that lies over `lanes` lanes."""
    best_keys = best(p, keys, min(count, len(keys)))
    for distance in powers_below(lanes):
        others = [p.shuffle(key, "bfly", distance) for key in best_keys]
        best_keys = best(p, best_keys + others, min(count, 2 * len(others)), run=len(others))
    total = flip_negative_at_once(best_keys[0]).bits("f32")
    for key in best_keys[1:]:
        total = total + flip_negative_at_once(key).bits("f32")
    return flip_negative_at_once(total.bits("s32"))


def _count_better(p: Program, sums: list[Value], group: int, own_piece: Value, pieces: int, lanes: int) -> Value:
    """Returns how many groups of the row are better than the lane's group number `group`, as a float.

    Floats are added in another pipe than integers are compared. `sums` has the sort keys of the sums of the lane's
    groups. The row has `pieces` pieces of `lanes` lanes; the lane belongs to piece `own_piece`.
    """
    own, better = sums[group], p.var(0.0, "f32")
    for other, sum_ in enumerate(sums):
        if other != group:
            p.increase(better, 1.0, when=sum_ >= own if other < group else sum_ > own)
    for distance in range(1, pieces):
        # The numbers of two pieces differ in a highest bit. The lower number has a 0 there.
        is_higher = own_piece >> log2(distance) & 1
        bound = own - is_higher.bits("s32")
        for sum_ in sums:
            p.increase(better, 1.0, when=p.shuffle(sum_, "bfly", distance * lanes) > bound)
    return better
