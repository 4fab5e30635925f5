"""The k best of rows in registers, in inline PTX: `selection.take`, by rounds in which a row loses its best element.

A row lies over the `lanes` lanes of a tile, and a thread may have several rows. Each lane first sorts the elements
that it holds of a row, so that a round looks at one element a lane. For k = 2, and 4 lanes of 2 elements:

    lists       7 3 | 7 5 | 1 0 | 6 2      round 0: 7 is the best of the first ones; of two, that of the lower column
                3 . | 7 5 | 1 0 | 6 2      round 1: 7, of lane 1
    winners     7 (column 1) | 7 (column 3)  the winner of round r is in lane r % lanes, register r / lanes

An element is one word, its packed key: the upper bits of its key, above the complement of its column.

    packed key  | key without its lowest b bits    | complement of the column, b bits |

No two packed keys are equal, and those of 16 bits have room for the whole key. Those of 32 bits do not: elements that
differ in the lowest b bits only come in the order of their columns. So each winner is compared with the next one,
and if their upper bits are the same, the warp takes its winners again by whole keys, which is slower. That is rare
in logits without ties. Logits with ties, such as small integers, have lowest bits of 0, and nothing is lost.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device import tiles
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    LANES,
    Code,
    array,
    elements,
    emit_ptx,
    inline,
    pack,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.topk.plan import winners_tile

# The key, packed or not, and the column of an element that is out.
LOWEST, _HIGHEST = "0x80000000", "0x7fffffff"


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Returns the columns of the k best of each row of a tile of keys; the arguments are those of `selection.take`."""
    code = _text(tile, vocab, k, rows_of_thread(tile), narrow)
    return insert_in_tile(code, tile, winners_tile(tile, k), key, per_row)


def rows_of_thread(tile: Tile) -> int:
    """Returns the number of rows that a thread has a part of."""
    return tile.rows // (WARPGROUP // tile.lanes)


def insert_in_tile(code: Code, tile: Tile, out: Tile, key, per_row):
    """Puts PTX into the kernel, of which it returns the columns, a tile `out`, and per_row over such a tile.

    Args:
      code: the text. <x{row}_{i}> has key i of a row of the thread; it writes register i of a row, <column{row}_{i}>.
      key: the tile of keys.
      per_row: tiles, each of one number for a whole row.
    """
    layout, out_layout = tiles.layout(tile), tiles.layout(out)
    dtypes = ["int32"] + ["float32"] * len(per_row)
    result = tuple(plgpu.ShapeDtypeStruct(out.shape, np.dtype(dtype), layout=out_layout) for dtype in dtypes)
    rows = rows_of_thread(tile)

    @inline(arg_types=(layout, [layout] * len(per_row)), return_type=result)
    def emit(_, key, per_row):
        operands = {"thread": thread()}
        for row, registers in enumerate(np.split(key.registers.flatten(), rows)):
            held = [x for register in registers for x in elements(register)]
            operands |= {f"x{row}_{i}": x for i, x in enumerate(held)}
        winners = [f"column{row}_{i}" for row in range(rows) for i in range(out.steps)]
        outputs = [[pack([x]) for x in emit_ptx(code, operands, dict.fromkeys(winners, "i32"))]]
        for a in per_row:
            of_rows = [elements(register)[0] for register in a.registers.flatten()[:: tile.steps]]
            outputs.append([pack([x]) for x in of_rows for _ in range(out.steps)])
        return tuple(array(out_layout.to_mgpu(), out.shape, registers) for registers in outputs)

    column, *per_row = emit(key, list(per_row))
    return column, per_row


def _text(tile: Tile, vocab: int, k: int, rows: int, narrow: bool) -> Code:
    """Returns the text of `take`.

    <x{row}_{i}> has key i of a row of the thread; <column{row}_{j}> gets the winner of round j * lanes + lane.
    """
    code = Code()
    lane, first_column = code.new("b32", 2)
    code += f"and.b32 {lane}, <thread>, {tile.lanes - 1}; mul.lo.u32 {first_column}, {lane}, {tile.vec};"
    bits = column_bits(tile, narrow)
    lists = [packed_keys(code, tile, vocab, row, first_column, bits, narrow) for row in range(rows)]
    rounds = k if narrow else min(k + 1, vocab)
    lists = [_sorted(code, packed, rounds) for packed in lists]
    alike = _take_packed(code, tile, k, rounds, lists, lane, bits, narrow)
    if not narrow:
        branch_if_exact(code, tile, rows, bits, alike, "end")
        _take_whole(code, tile, vocab, k, rows, lane, first_column)
        code += "end:"
    return code


def _columns(tile: Tile) -> list[int]:
    """The columns of a thread's elements, but for the first column of its lane."""
    return [step * tile.lanes * tile.vec + j for step in range(tile.steps) for j in range(tile.vec)]


# ---- by packed keys


def column_bits(tile: Tile, narrow: bool) -> int:
    """Returns the number of bits of a column in a packed key."""
    return 16 if narrow else (tile.shape[1] - 1).bit_length()


def packed_keys(
    code: Code, tile: Tile, vocab: int, row: int, first_column: str, bits: int, narrow: bool
) -> list[str]:
    """Returns registers with the packed keys of the elements of a row of the thread."""
    ones = (1 << bits) - 1
    packed = code.new("b32", len(_columns(tile)))
    (complement,) = code.new("b32")
    (p,) = code.new("pred")
    for i, (out, column) in enumerate(zip(packed, _columns(tile))):
        code += f"sub.u32 {complement}, {ones - column}, {first_column};"
        if narrow:
            code += f"shl.b32 {out}, <x{row}_{i}>, 16; or.b32 {out}, {out}, {complement};"
        else:  # (key & ~ones) | complement
            code += f"lop3.b32 {out}, <x{row}_{i}>, {complement}, {ones}, 0xdc;"
        if column + tile.vec * tile.lanes > vocab:
            code += (
                f"setp.ge.u32 {p}, {first_column}, {max(0, vocab - column)}; @{p} mov.b32 {out}, {LOWEST};"
            )
    return packed


def _sorted(code: Code, values: list[str], k: int) -> list[str]:
    """Sorts registers in place, the largest first; returns those of the k largest."""
    comparisons, needed = [], set(range(min(k, len(values))))
    for i, j in reversed(network(len(values))):
        if {i, j} & needed:
            comparisons.append((i, j, i in needed, j in needed))
            needed |= {i, j}
    (smaller,) = code.new("b32")
    for i, j, upper, lower in reversed(comparisons):
        a, b = values[i], values[j]
        if lower:
            code += f"min.s32 {smaller}, {a}, {b};"
        if upper:
            code += f"max.s32 {a}, {a}, {b};"
        if lower:
            code += f"mov.b32 {b}, {smaller};"
    return values[:k]


def network(n: int) -> list[tuple[int, int]]:
    """The comparisons that sort n elements: Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M)."""
    out = []
    p = top = 1 << max(0, (n - 1).bit_length() - 1)
    while p:
        q, r, d = top, 0, p
        while True:
            out += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return out if n > 1 else []


def _take_packed(
    code: Code, tile: Tile, k: int, rounds: int, lists: list[list[str]], lane: str, bits: int, narrow: bool
) -> str:
    """Takes the winners from the sorted lists, round by round; one round more finds what comes after them:

        best = the largest of the first elements of all lanes
        the lane whose it is goes on to its next one
        the lane whose turn it is keeps its column

    Returns a predicate: whether two neighbours, of the winners and the one after them, differ in their low bits only.
    """
    ones = (1 << bits) - 1
    rows = range(len(lists))
    best, previous, low = code.new("b32", len(lists)), code.new("b32", len(lists)), code.new("b32")[0]
    alike, turn, own = code.new("pred", 3)
    code += f"setp.ne.u32 {alike}, 0, 0;"
    for row in rows:
        for j in range(-(-k // tile.lanes)):
            code += f"mov.b32 <column{row}_{j}>, 0;"
    for round_ in range(rounds):
        for row in rows:
            code += f"mov.b32 {best[row]}, {lists[row][0]};"
        _reduce_lanes(code, "max.s32", best, tile.lanes)
        if round_ and not narrow:
            for row in rows:
                code += f"xor.b32 {low}, {best[row]}, {previous[row]};"
                code += f"setp.le.or.u32 {alike}, {low}, {ones}, {alike};"
        if round_ == k:
            break
        code += f"setp.eq.u32 {turn}, {lane}, {round_ % tile.lanes};"
        for row in rows:
            code += f"@{turn} mov.b32 <column{row}_{round_ // tile.lanes}>, {best[row]};"
            code += f"mov.b32 {previous[row]}, {best[row]};"
            code += f"setp.eq.s32 {own}, {lists[row][0]}, {best[row]};"
            held = lists[row][: rounds - round_]  # as many as may still be looked at
            for a, b in zip(held, [*held[1:], *[LOWEST] * (len(held) < rounds - round_)]):
                code += f"@{own} mov.b32 {a}, {b};"
    for row in rows:
        for j in range(-(-k // tile.lanes)):  # the complement of a complement
            code += f"not.b32 {low}, <column{row}_{j}>; and.b32 <column{row}_{j}>, {low}, {ones};"
    return alike


def branch_if_exact(code: Code, tile: Tile, rows: int, bits: int, alike: str, label: str) -> None:
    """Goes to `label` if the order of packed keys is that of the keys, for all rows of the warp.

    It is if no two neighbours are alike, and also if all floats, as bits, end in so many zeros.
    """
    turned, union = code.new("b32", 2)
    (p,) = code.new("pred")
    code += f"vote.sync.any.pred {p}, {alike}, 0xffffffff; @!{p} bra {label};"
    code += f"mov.b32 {union}, 0;"
    for row in range(rows):
        for i in range(len(_columns(tile))):
            code += f"shr.s32 {turned}, <x{row}_{i}>, 31; lop3.b32 {union}, {union}, {turned}, <x{row}_{i}>, 0xf6;"
    code += f"and.b32 {union}, {union}, {(1 << bits) - 1}; setp.ne.u32 {p}, {union}, 0;"
    code += f"vote.sync.any.pred {p}, {p}, 0xffffffff; @!{p} bra {label};"


# ---- by whole keys


def _take_whole(code: Code, tile: Tile, vocab: int, k: int, rows: int, lane: str, first_column: str) -> None:
    """Takes the winners, each the largest key, and of those equal to it the one of the lowest column:

    repeat k times, for each row:
        best = the largest key of all lanes
        column = the lowest column that has it
        take the element of that column out
        the lane whose turn it is keeps column
    """
    keys, columns = zip(*(load_keys(code, tile, vocab, row, first_column) for row in range(rows)))
    best, first = code.new("b32", rows), code.new("b32", rows)
    round_, turn = code.new("b32", 2)
    (p,) = code.new("pred")
    code += f"mov.b32 {round_}, 0; next_round:"
    for row in range(rows):
        code += f"mov.b32 {best[row]}, {code.tree('max.s32', 'b32', list(keys[row]))};"
    _reduce_lanes(code, "max.s32", best, tile.lanes)
    for row in range(rows):
        code += f"mov.b32 {first[row]}, {_HIGHEST};"
        for key, column in zip(keys[row], columns[row]):
            code += f"setp.eq.s32 {p}, {key}, {best[row]}; @{p} min.s32 {first[row]}, {first[row]}, {column};"
    _reduce_lanes(code, "min.s32", first, tile.lanes)
    for row in range(rows):
        for key, column in zip(keys[row], columns[row]):
            code += f"setp.eq.s32 {p}, {column}, {first[row]};"
            code += f"@{p} mov.b32 {key}, {LOWEST}; @{p} mov.b32 {column}, {_HIGHEST};"
    for j in range(-(-k // tile.lanes)):
        code += f"sub.u32 {turn}, {round_}, {j * tile.lanes}; setp.eq.u32 {p}, {turn}, {lane};"
        for row in range(rows):
            code += f"@{p} mov.b32 <column{row}_{j}>, {first[row]};"
    code += f"add.u32 {round_}, {round_}, 1; setp.lt.u32 {p}, {round_}, {k}; @{p} bra next_round;"


def load_keys(code: Code, tile: Tile, vocab: int, row: int, first_column: str) -> tuple[list[str], list[str]]:
    """Returns registers with the keys of a row of the thread, and with their columns."""
    starts = _columns(tile)
    keys, columns = code.new("b32", len(starts)), code.new("b32", len(starts))
    (p,) = code.new("pred")
    for i, (key, column, start) in enumerate(zip(keys, columns, starts)):
        code += f"mov.b32 {key}, <x{row}_{i}>; add.u32 {column}, {first_column}, {start};"
        if tile.shape[1] > vocab:
            code += f"setp.ge.u32 {p}, {column}, {vocab};"
            code += f"@{p} mov.b32 {key}, {LOWEST}; @{p} mov.b32 {column}, {_HIGHEST};"
    return keys, columns


def _reduce_lanes(code: Code, op: str, values: list[str], lanes: int) -> None:
    """Reduces registers in place over the lanes of each row."""
    if lanes == LANES:
        for x in values:
            code += f"redux.sync.{op} {x}, {x}, 0xffffffff;"
        return
    others = code.new("b32", len(values))
    for offset in (1 << i for i in range(lanes.bit_length() - 1)):
        for x, other in zip(values, others):
            code += f"shfl.sync.bfly.b32 {other}, {x}, {offset}, 31, 0xffffffff;"
        for x, other in zip(values, others):
            code += f"{op} {x}, {x}, {other};"
