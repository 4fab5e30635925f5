"""The k best of rows in registers, in inline PTX: `selection.take`, by rounds in which a row loses its best element.

A row lies over the `lanes` lanes of a tile, and a thread may have several rows. For k = 2, and 4 lanes of 2 elements:

    keys        3 7 | 5 7 | 1 0 | 2 6      round 0: 7 is the best key; of those equal to it, column 1 is the first
                3 . | 5 7 | 1 0 | 2 6      round 1: 7, column 3
    winners     7 (1) | 7 (3)              the winner of round r is in lane r % lanes, register r / lanes
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

_LOWEST, _HIGHEST = "0x80000000", "0x7fffffff"  # the key, and the column, of an element that is out


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Returns the k best of each row of a tile of keys; the arguments are those of `selection.take`.

    repeat k times, for each row:
        best = the largest key of all lanes
        column = the lowest column that has it
        take the element of that column out
        the lane whose turn it is keeps best and column

    A narrow key, of 16 bits, is packed above the complement of its column. Then no two are equal, the largest has
    the lowest column, and one reduction over the lanes does for both.
    """
    out = winners_tile(tile, k)
    layout, out_layout = tiles.layout(tile), tiles.layout(out)
    dtypes = ["int32", "int32"] + ["float32"] * len(per_row)
    result = tuple(plgpu.ShapeDtypeStruct(out.shape, np.dtype(dtype), layout=out_layout) for dtype in dtypes)
    rows = tile.rows // (WARPGROUP // tile.lanes)  # of a thread
    code = _rounds(tile, vocab, k, rows, narrow)

    @inline(arg_types=(layout, [layout] * len(per_row)), return_type=result)
    def emit(_, key, per_row):
        operands = {"thread": thread()}
        for row, registers in enumerate(np.split(key.registers.flatten(), rows)):
            held = [x for register in registers for x in elements(register)]
            operands |= {f"x{row}_{i}": x for i, x in enumerate(held)}
        winners = [f"{row}_{j}" for row in range(rows) for j in range(out.steps)]
        results = {f"{name}{winner}": "i32" for winner in winners for name in ("key", "column")}
        written = emit_ptx(code, operands, results)
        outputs = [[pack([x]) for x in written[i::2]] for i in (0, 1)]
        for a in per_row:
            of_rows = [elements(register)[0] for register in a.registers.flatten()[:: tile.steps]]
            outputs.append([pack([x]) for x in of_rows for _ in range(out.steps)])
        return tuple(array(out_layout.to_mgpu(), out.shape, registers) for registers in outputs)

    key, column, *per_row = emit(key, list(per_row))
    return (key, column), per_row


def _rounds(tile: Tile, vocab: int, k: int, rows: int, narrow: bool) -> Code:
    """Returns the text of `take`.

    <x{row}_{i}> has key i of a row of the thread; <key{row}_{j}> and <column{row}_{j}> get the winner of round
    j * lanes + lane.
    """
    code = Code()
    lane, round_, turn = code.new("b32", 3)
    (p,) = code.new("pred")
    code += f"and.b32 {lane}, <thread>, {tile.lanes - 1};"
    keys, columns = _load_keys(code, tile, vocab, rows, narrow, lane)
    best, first = code.new("b32", rows), code.new("b32", rows)
    code += f"mov.b32 {round_}, 0; next_round:"
    for row in range(rows):
        code += f"mov.b32 {best[row]}, {code.tree('max.s32', 'b32', list(keys[row]))};"
    _reduce_lanes(code, "max.s32", best, tile.lanes)
    if narrow:
        _take_out_narrow(code, keys, best, first)
    else:
        _take_out(code, tile, keys, columns, best, first)
    for j in range(-(-k // tile.lanes)):
        code += f"sub.u32 {turn}, {round_}, {j * tile.lanes}; setp.eq.u32 {p}, {turn}, {lane};"
        for row in range(rows):
            code += f"@{p} mov.b32 <key{row}_{j}>, {best[row]}; @{p} mov.b32 <column{row}_{j}>, {first[row]};"
    code += f"add.u32 {round_}, {round_}, 1; setp.lt.u32 {p}, {round_}, {k}; @{p} bra next_round;"
    return code


def _load_keys(
    code: Code, tile: Tile, vocab: int, rows: int, narrow: bool, lane: str
) -> tuple[list[list[str]], list[list[str]]]:
    """Returns registers with the keys of each row of the thread, narrow ones packed, and with their columns."""
    vector_columns = tile.lanes * tile.vec  # of a vector of each lane
    starts = [step * vector_columns + j for step in range(tile.steps) for j in range(tile.vec)]
    keys = [code.new("b32", len(starts)) for _ in range(rows)]
    columns = [code.new("b32", len(starts)) for _ in range(rows)]
    at, low = code.new("b32", 2)
    (p,) = code.new("pred")
    code += f"mul.lo.u32 {at}, {lane}, {tile.vec};"
    for row in range(rows):
        for i, (key, column, start) in enumerate(zip(keys[row], columns[row], starts)):
            code += f"mov.b32 {key}, <x{row}_{i}>; add.u32 {column}, {at}, {start};"
            if narrow:
                code += f"shl.b32 {key}, {key}, 16; sub.u32 {low}, 0xffff, {column};"
                code += f"or.b32 {key}, {key}, {low};"
            if tile.shape[1] > vocab:
                code += f"setp.ge.u32 {p}, {column}, {vocab};"
                code += f"@{p} mov.b32 {key}, {_LOWEST}; @{p} mov.b32 {column}, {_HIGHEST};"
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


def _take_out_narrow(code: Code, keys: list[list[str]], best: list[str], first: list[str]) -> None:
    """Takes the best packed key of each row out; `best` becomes the key in it, and `first` gets its column."""
    (p,) = code.new("pred")
    for of_row, best_of_row, first_of_row in zip(keys, best, first):
        code += f"not.b32 {first_of_row}, {best_of_row}; and.b32 {first_of_row}, {first_of_row}, 0xffff;"
        for key in of_row:
            code += f"setp.eq.s32 {p}, {key}, {best_of_row}; @{p} mov.b32 {key}, {_LOWEST};"
        code += f"shr.s32 {best_of_row}, {best_of_row}, 16;"


def _take_out(
    code: Code, tile: Tile, keys: list[list[str]], columns: list[list[str]], best: list[str], first: list[str]
) -> None:
    """Takes the first element with the best key of each row out; `first` gets its column."""
    (p,) = code.new("pred")
    for row, first_of_row in enumerate(first):
        code += f"mov.b32 {first_of_row}, {_HIGHEST};"
        for key, column in zip(keys[row], columns[row]):
            code += f"setp.eq.s32 {p}, {key}, {best[row]};"
            code += f"@{p} min.s32 {first_of_row}, {first_of_row}, {column};"
    _reduce_lanes(code, "min.s32", first, tile.lanes)
    for row, first_of_row in enumerate(first):
        for key, column in zip(keys[row], columns[row]):
            code += f"setp.eq.s32 {p}, {column}, {first_of_row};"
            code += f"@{p} mov.b32 {key}, {_LOWEST}; @{p} mov.b32 {column}, {_HIGHEST};"
