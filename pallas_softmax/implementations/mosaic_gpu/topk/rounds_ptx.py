"""The k best of rows in registers, in inline PTX: `selection.take`, by rounds in which a row loses its best element.

A row lies over the `lanes` lanes of a tile, and a thread may have several rows. Each lane first lists the best of the
elements that it holds of a row, so that a round looks at one element a lane. For k = 2, and 4 lanes of 2 elements:

    lists       7 3 | 7 5 | 1 0 | 6 2      round 0: 7 is the best of the first ones; of two, that of the lower column
                3 . | 7 5 | 1 0 | 6 2      round 1: 7, of lane 1
    winners     7 (column 1) | 7 (column 3)  the winner of round r is in lane r % lanes, register r / lanes

An element is one word, its packed key: the upper bits of its key, above the complement of its column.

    packed key  | key without its lowest b bits    | complement of the column, b bits |

No two packed keys are equal, and those of 16 bits have room for the whole key. Those of 32 bits do not: elements that
differ in the lowest b bits only come in the order of their columns. So each winner is compared with the next one,
and if their upper bits are the same, the warp takes its winners again by whole keys, which is slower. That is rare
in logits without ties. Logits with ties, such as small integers, have lowest bits of 0, and nothing is lost.

A lane lists no more elements than it is likely to have winners, 5 of 16 for k = 16 over 32 lanes. Where all of a list
are winners, what comes after them is not known, and the warp takes its winners by whole keys, too.
"""

import itertools
from collections.abc import Callable

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device import tiles
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    LANES,
    array,
    elements,
    emit_ptx,
    inline,
    pack,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value
from pallas_softmax.implementations.mosaic_gpu.topk.plan import list_length_of_rounds, winners_tile

# The key, packed or not, and the column of an element that is out.
LOWEST, _HIGHEST = -(2**31), 2**31 - 1
_HALF_BITS = 16  # of the keys of 16-bit floats


def take(tile: Tile, vocab: int, k: int, key, per_row):
    """Returns the columns of the k best of each row of a tile of keys; the arguments are those of `selection.take`."""
    code = _text(tile, vocab, k, rows_of_thread(tile))
    return insert_in_tile(code, tile, winners_tile(tile, k), key, per_row)


def rows_of_thread(tile: Tile) -> int:
    """Returns the number of rows that a thread has a part of."""
    return tile.rows // (WARPGROUP // tile.lanes)


def insert_in_tile(code: Program, tile: Tile, out: Tile, key, per_row):
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


def _text(tile: Tile, vocab: int, k: int, rows: int) -> Program:
    """Returns the text of `take`.

    <x{row}_{i}> has key i of a row of the thread; <column{row}_{j}> gets the winner of round j * lanes + lane.
    """
    p = Program()
    lane, first_column = lane_and_first_column(p, tile)
    bits = column_bits(tile, narrow=False)
    packed = [packed_keys(p, tile, vocab, row, first_column, bits, narrow=False) for row in range(rows)]
    rounds = min(k + 1, vocab)
    length = list_length_of_rounds(tile, vocab, rounds)
    lists = [_sorted(p, of_row, length) for of_row in packed]
    alike = _take_packed(p, tile, k, rounds, lists, lane, bits)
    used_up = None
    if length < min(rounds, tile.steps * tile.vec):
        used_up = p.reduce("or", [first.equals(LOWEST) for first, *_ in lists])
    with p.block() as finish:
        leave_if_exact(p, tile, rows, bits, alike, finish, used_up)
        _take_whole(p, tile, vocab, k, rows, lane, first_column)
    return p


def lane_and_first_column(p: Program, tile: Tile) -> tuple[Value, Value]:
    """Returns the number of the thread's lane in its rows, and the column of its first element."""
    lane = p.operand("thread", "u32") & (tile.lanes - 1)
    return lane, lane * tile.vec


def column_result(p: Program, row: int, i: int) -> Value:
    """Returns the result <column{row}_{i}>."""
    return p.operand(f"column{row}_{i}", "s32")


def columns_of_thread(tile: Tile) -> list[int]:
    """Returns the columns of a thread's elements, but for the first column of its lane."""
    return [step * tile.lanes * tile.vec + j for step in range(tile.steps) for j in range(tile.vec)]


def keys_of_thread(p: Program, tile: Tile, row: int) -> list[Value]:
    """Returns the operands <x{row}_{i}>: the keys of the thread's elements of a row."""
    return [p.operand(f"x{row}_{i}", "s32") for i in range(tile.steps * tile.vec)]


# ---- by packed keys


def column_bits(tile: Tile, narrow: bool) -> int:
    """Returns the number of bits of a column in a packed key."""
    return _HALF_BITS if narrow else (tile.shape[1] - 1).bit_length()


def packed_keys(
    p: Program, tile: Tile, vocab: int, row: int, first_column: Value, bits: int, narrow: bool
) -> list[Value]:
    """Returns the packed keys of the elements of a row of the thread; those beyond the row are the lowest."""
    ones = (1 << bits) - 1
    packed = []
    for key, column in zip(keys_of_thread(p, tile, row), columns_of_thread(tile)):
        complement = ones - column - first_column
        if narrow:
            packed.append(key << _HALF_BITS | complement)
        else:
            packed.append(p.bitwise3(lambda key, low, ones: key & ~ones | low, key, complement, ones))
        if column + tile.vec * tile.lanes > vocab:
            p.set(packed[-1], LOWEST, when=first_column >= max(0, vocab - column))
    return packed


def _sorted(p: Program, values: list[Value], k: int) -> list[Value]:
    """Returns the k largest values, the largest first."""
    comparisons, needed = [], set(range(min(k, len(values))))
    for i, j in reversed(network(len(values))):
        if {i, j} & needed:
            comparisons.append((i, j, i in needed, j in needed))
            needed |= {i, j}
    out = list(values)
    for i, j, upper, lower in reversed(comparisons):
        a, b = out[i], out[j]
        if lower:
            out[j] = p.min(a, b)
        if upper:
            out[i] = p.max(a, b)
    return out[:k]


def network(n: int) -> list[tuple[int, int]]:
    """Returns the comparisons that sort n elements: Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M)."""
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
    p: Program,
    tile: Tile,
    k: int,
    rounds: int,
    lists: list[list[Value]],
    lane: Value,
    bits: int,
) -> Value:
    """Takes the winners from the sorted lists, round by round; one round more finds what comes after them:

        best = the largest of the first elements of all lanes
        the lane whose it is goes on to its next one
        the lane whose turn it is keeps its column

    Returns a condition: whether two neighbours, of the winners and the one after them, differ in their low bits only.
    """
    ones = (1 << bits) - 1
    columns = [[column_result(p, row, j) for j in range(-(-k // tile.lanes))] for row in range(len(lists))]
    alike, previous = p.var(False, "pred"), []
    for column in itertools.chain(*columns):
        p.set(column, 0)
    for round_ in range(rounds):
        best = _over_lanes(p, "max", [first for first, *_ in lists], tile.lanes)
        if round_:
            for a, b in zip(best, previous):
                alike |= (a ^ b).bits("u32") <= ones
        if round_ == k:
            break
        turn = lane.equals(round_ % tile.lanes)
        for of_row, column, words in zip(best, columns, lists):
            p.set(column[round_ // tile.lanes], of_row, when=turn)
            own = words[0].equals(of_row)
            held = words[: rounds - round_]  # as many as may still be looked at
            for a, b in zip(held, [*held[1:], *[LOWEST] * (len(held) < rounds - round_)]):
                p.set(a, b, when=own)
        previous = best
    for column in itertools.chain(*columns):
        p.set(column, ~column & ones)  # the complement of a complement
    return alike


def leave_if_exact(
    p: Program,
    tile: Tile,
    rows: int,
    bits: int,
    alike: Value,
    leave: Callable[[Value], None],
    used_up: Value | None = None,
) -> None:
    """Leaves a block if the order of packed keys is that of the keys, for all rows of the warp, and no list `used_up`.

    It is if no two neighbours are alike, and also if all floats, as bits, end in so many zeros.
    """

    def leave_unless(condition):
        leave(~p.any(condition if used_up is None else condition | used_up))

    leave_unless(alike)
    union = p.var(0, "s32")
    for key in itertools.chain(*(keys_of_thread(p, tile, row) for row in range(rows))):
        # Of a negative float, the bits of the key are turned.
        union = p.bitwise3(lambda union, sign, key: union | (sign ^ key), union, key.sign(), key)
    leave_unless((union & (1 << bits) - 1).differs(0))


# ---- by whole keys


def _take_whole(
    p: Program, tile: Tile, vocab: int, k: int, rows: int, lane: Value, first_column: Value
) -> None:
    """Takes the winners, each the largest key, and of those equal to it the one of the lowest column:

    repeat k times, for each row:
        best = the largest key of all lanes
        column = the lowest column that has it
        take the element of that column out
        the lane whose turn it is keeps column
    """
    keys, columns = zip(*(load_keys(p, tile, vocab, row, first_column) for row in range(rows)))
    round_ = p.var(0, "u32")
    with p.repeat() as again:
        best = _over_lanes(p, "max", [p.reduce("max", of_row) for of_row in keys], tile.lanes)
        first = [p.var(_HIGHEST, "s32") for _ in range(rows)]
        for row in range(rows):
            for key, column in zip(keys[row], columns[row]):
                p.update(first[row], "min", column, when=key.equals(best[row]))
        first = _over_lanes(p, "min", first, tile.lanes)
        for row in range(rows):
            for key, column in zip(keys[row], columns[row]):
                taken = column.equals(first[row])
                p.set(key, LOWEST, when=taken)
                p.set(column, _HIGHEST, when=taken)
        for j in range(-(-k // tile.lanes)):
            turn = (round_ - j * tile.lanes).equals(lane)
            for row in range(rows):
                p.set(column_result(p, row, j), first[row], when=turn)
        p.increase(round_, 1)
        again(round_ < k)


def load_keys(
    p: Program, tile: Tile, vocab: int, row: int, first_column: Value
) -> tuple[list[Value], list[Value]]:
    """Returns registers with the keys of a row of the thread, and with their columns."""
    keys, columns = [], []
    for of_element, start in zip(keys_of_thread(p, tile, row), columns_of_thread(tile)):
        key, column = p.var(of_element), first_column + start
        keys.append(key)
        columns.append(column.bits("s32"))
        if tile.shape[1] > vocab:
            beyond = column >= vocab
            p.set(key, LOWEST, when=beyond)
            p.set(column, _HIGHEST, when=beyond)
    return keys, columns


def _over_lanes(p: Program, op: str, values: list[Value], lanes: int) -> list[Value]:
    """Reduces each of the values by "max" or "min" over the lanes of a row."""
    if lanes == LANES:
        return [p.over_lanes(op, x) for x in values]
    for offset in (1 << i for i in range(lanes.bit_length() - 1)):
        others = [p.shuffle(x, "bfly", offset) for x in values]
        values = [p.op(op, x.kind, x, other) for x, other in zip(values, others)]
    return values
