"""The k best of rows in registers, in inline PTX, by a sort of the rows: `selection.take`, where k is large.

A row lies over the `lanes` lanes of a tile. Each lane sorts the elements that it holds, then runs of lanes are merged
in pairs until one run is the row. Position p of the sorted row is in lane p / held, register p % held:

    4 lanes of 2   3 7 | 5 1 | 1 0 | 2 6
    lanes          7 3 | 5 1 | 1 0 | 6 2     each lane from its largest on
    runs of 2      7 5 | 3 1 | 6 2 | 1 0
    runs of 4      7 6 | 5 3 | 2 1 | 1 0

Elements are packed keys (see `rounds_ptx`), in words of 32 bits. Those of 32-bit keys lack their lowest bits, so where
two neighbours have the same upper bits, the warp sorts its rows again in words of 64 bits, which have the whole key.
"""

from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value
from pallas_softmax.implementations.mosaic_gpu.topk import rounds_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.plan import sorted_tile

_LOWEST_WIDE = -(2**63)


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Returns the columns of the k best of each row of a tile of keys; the arguments are those of `selection.take`."""
    out = sorted_tile(tile)
    code = _text(tile, vocab, k, rounds_ptx.rows_of_thread(tile), out.steps, narrow)
    return rounds_ptx.insert_in_tile(code, tile, out, key, per_row)


def _text(tile: Tile, vocab: int, k: int, rows: int, held: int, narrow: bool) -> Program:
    """Returns the text of `take`: <column{row}_{i}> gets the column at position lane * held + i of the sorted row."""
    p = Program()
    lane, first_column = rounds_ptx.lane_and_first_column(p, tile)
    bits = rounds_ptx.column_bits(tile, narrow)
    ones = (1 << bits) - 1
    alike = p.var(False, "pred")
    for row in range(rows):
        words = rounds_ptx.packed_keys(p, tile, vocab, row, first_column, bits, narrow)
        words += [p.var(rounds_ptx.LOWEST, "s32") for _ in range(held - len(words))]
        words = _sorted_row(p, words, lane, tile.lanes)
        for i, word in enumerate(words):
            p.set(rounds_ptx.column_result(p, row, i), ~word & ones)
        if not narrow:
            alike |= _any_alike(p, words, lane, ones, min(k, vocab - 1))
    if not narrow:
        with p.block() as finish:
            rounds_ptx.leave_if_exact(p, tile, rows, bits, alike, finish)
            for row in range(rows):
                wide = _wide_keys(p, tile, vocab, row, first_column, held)
                for i, word in enumerate(_sorted_row(p, wide, lane, tile.lanes)):
                    p.set(rounds_ptx.column_result(p, row, i), ~p.convert(word.bits("u64"), "u32"))
    return p


def _wide_keys(p: Program, tile: Tile, vocab: int, row: int, first_column: Value, held: int) -> list[Value]:
    """Returns numbers of 64 bits: each element's key, above the complement of its column."""
    keys, columns = rounds_ptx.load_keys(p, tile, vocab, row, first_column)
    wide = [p.join(~column, key, "s64") for key, column in zip(keys, columns)]
    return wide + [p.var(_LOWEST_WIDE, "s64") for _ in range(held - len(wide))]


def _any_alike(p: Program, words: list[Value], lane: Value, ones: int, pairs: int) -> Value:
    """Returns whether the words at some position below `pairs` and at the next one differ in their low bits only."""
    alike = p.var(False, "pred")
    of_next_lane = p.shuffle(words[0], "down", 1)
    left = (pairs - lane * len(words)).bits("s32")  # pairs from the first position of this lane on
    for i, (word, other) in enumerate(zip(words, [*words[1:], of_next_lane])):
        near = (word ^ other).bits("u32") <= ones
        alike |= near & (left > i)
    return alike


def _sorted_row(p: Program, words: list[Value], lane: Value, lanes: int) -> list[Value]:
    """Sorts the words of all lanes of a row, from the largest on; a lane has a power of two of them.

    sort the words of each lane
    for run = 2, 4, ... lanes:                    two sorted runs of half as many
        exchange with the lane opposite in the run, word for word from the other end:
            the first half of the lanes keeps the larger ones, the second half the smaller ones
        for stride = run / 4, ..., 2, 1 lanes:    each half is bitonic
            exchange with lane ^ stride: the lower lane keeps the larger ones
        the same within the lane
    """
    words = exchanged_in_lane(p, words, rounds_ptx.network(len(words)))
    run = 2
    while run <= lanes:
        _exchange(p, words, lane, run - 1, run // 2, mirrored=True)
        stride = run // 4
        while stride:
            _exchange(p, words, lane, stride, stride, mirrored=False)
            stride //= 2
        words = exchanged_in_lane(p, words, bitonic(len(words)))
        run *= 2
    return words


def bitonic(n: int) -> list[tuple[int, int]]:
    """Returns the comparisons that sort n elements that are bitonic."""
    strides = [n >> level for level in range(1, n.bit_length())]
    return [(i, i + stride) for stride in strides for i in range(n) if not i & stride]


def exchanged_in_lane(p: Program, words: list[Value], comparisons: list[tuple[int, int]]) -> list[Value]:
    """Returns the words after comparisons, each of which puts the larger one of two words first."""
    out = list(words)
    for i, j in comparisons:
        a, b = out[i], out[j]
        out[j], out[i] = p.min(a, b), p.max(a, b)
    return out


def _exchange(p: Program, words: list[Value], lane: Value, flip: int, half: int, *, mirrored: bool) -> None:
    """Exchanges words with lane ^ flip; lanes without the bit `half` keep the larger of two, the others the smaller.

    Args:
      mirrored: whether word i meets word -1 - i of the other lane, or word i.
    """
    upper = (lane & half).differs(0)
    others = [p.shuffle(word, "bfly", flip) for word in (words[::-1] if mirrored else words)]
    for word, other in zip(words, others):
        p.update(word, "min", other, when=upper)
        p.update(word, "max", other, when=~upper)
