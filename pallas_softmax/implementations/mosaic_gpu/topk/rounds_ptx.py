"""The k best of rows in registers, in inline PTX: `selection.take`, by rounds in which a row loses its best element.

Each lane first lists the best of the elements that it holds of a row, so that a round looks at one element a lane. For
k = 2, and 4 lanes of 2 elements:

    lists       7 3 | 7 5 | 1 0 | 6 2      round 0: 7 is the best of the first ones; of two, that of the lower column
                3 . | 7 5 | 1 0 | 6 2      round 1: 7, of lane 1
    winners     7 (column 1) | 7 (column 3)  the winner of round r is in lane r % lanes, register r / lanes

Elements are packed keys (see `packed_ptx`). So each winner is compared with the next one, and if they are alike, the
warp takes its winners again by whole keys, which is slower.

A lane lists no more elements than it is likely to have winners, 3 of 16 for k = 4 over 32 lanes. Where all of a list
are winners, what comes after them is not known, and the warp takes its winners by whole keys, too.
"""

import itertools

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import LANES
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value
from pallas_softmax.implementations.mosaic_gpu.topk import packed_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.packed_ptx import HIGHEST, LOWEST
from pallas_softmax.implementations.mosaic_gpu.topk.plan import list_length_of_rounds, winners_tile


def take(tile: Tile, vocab: int, k: int, key, per_row):
    """Returns the columns of the k best of each row of a tile of keys; the arguments are those of `selection.take`."""
    code = _text(tile, vocab, k, packed_ptx.rows_of_thread(tile))
    return packed_ptx.insert_in_tile(code, tile, winners_tile(tile, k), key, per_row)


def _text(tile: Tile, vocab: int, k: int, rows: int) -> Program:
    """Returns the text of `take`.

    <x{row}_{i}> has key i of a row of the thread; <winner{row}_{j}> gets the winner of round j * lanes + lane.
    """
    p = Program()
    lane, first_column = packed_ptx.lane_and_first_column(p, tile)
    bits = packed_ptx.column_bits(tile, narrow=False)
    packed = [
        packed_ptx.packed_keys(p, tile, vocab, row, first_column, bits, narrow=False) for row in range(rows)
    ]
    rounds = min(k + 1, vocab)
    length = list_length_of_rounds(tile, vocab, rounds)
    lists = [packed_ptx.best(p, of_row, length) for of_row in packed]
    alike = _take_packed(p, tile, k, rounds, lists, lane, bits)
    used_up = None
    if length < min(rounds, tile.steps * tile.vec):
        used_up = p.reduce("or", [first.equals(LOWEST) for first, *_ in lists])
    with p.block() as finish:
        packed_ptx.leave_if_exact(p, tile, rows, bits, alike, finish, used_up)
        _take_whole(p, tile, vocab, k, rows, lane, first_column)
    return p


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
    columns = [
        [packed_ptx.winner(p, row, j) for j in range(-(-k // tile.lanes))] for row in range(len(lists))
    ]
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
    keys, columns = zip(*(packed_ptx.load_keys(p, tile, vocab, row, first_column) for row in range(rows)))
    round_ = p.var(0, "u32")
    with p.repeat() as again:
        best = _over_lanes(p, "max", [p.reduce("max", of_row) for of_row in keys], tile.lanes)
        first = [p.var(HIGHEST, "s32") for _ in range(rows)]
        for row in range(rows):
            for key, column in zip(keys[row], columns[row]):
                p.update(first[row], "min", column, when=key.equals(best[row]))
        first = _over_lanes(p, "min", first, tile.lanes)
        for row in range(rows):
            for key, column in zip(keys[row], columns[row]):
                taken = column.equals(first[row])
                p.set(key, LOWEST, when=taken)
                p.set(column, HIGHEST, when=taken)
        for j in range(-(-k // tile.lanes)):
            turn = (round_ - j * tile.lanes).equals(lane)
            for row in range(rows):
                p.set(packed_ptx.winner(p, row, j), first[row], when=turn)
        p.increase(round_, 1)
        again(round_ < k)


def _over_lanes(p: Program, op: str, values: list[Value], lanes: int) -> list[Value]:
    """Reduces each of the values by "max" or "min" over the lanes of a row."""
    if lanes == LANES:
        return [p.over_lanes(op, x) for x in values]
    for offset in (1 << i for i in range(lanes.bit_length() - 1)):
        others = [p.shuffle(x, "bfly", offset) for x in values]
        values = [p.op(op, x.kind, x, other) for x, other in zip(values, others)]
    return values
