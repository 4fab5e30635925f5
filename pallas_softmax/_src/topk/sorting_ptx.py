"""Inline PTX for the k best of rows in registers, by sorting the rows: `selection.take` if `tile_plan.sorts`.

A row lies over the `lanes` lanes of a tile. Each lane sorts its elements. Then runs of lanes are merged in pairs, until
one run is the row. Position p of the sorted row is in lane p / held, register p % held:

    4 lanes of 2   3 7 | 5 1 | 1 0 | 2 6
    lanes          7 3 | 5 1 | 1 0 | 6 2     each lane from its largest on
    runs of 2      7 5 | 3 1 | 6 2 | 1 0
    runs of 4      7 6 | 5 3 | 2 1 | 1 0

Elements are packed keys (see `packed_ptx`), in 32-bit words. The packed key of a 32-bit element lacks the lowest bits
of the key, so two neighbours may nearly tie: they have the same upper bits. If a warp has few near ties, it compares
their whole keys, and exchanges neighbours in the wrong order. Otherwise it sorts its rows again, in 64-bit words with
the whole key.
"""

from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax._src.topk import mending_ptx, packed_ptx
from pallas_softmax._src.topk.tile_plan import sorted_tile

# Each near tie takes about 160 PTX instructions in a pass. Normal logits have 0.6 among the best 128 of 512 elements.
# Sorting such a row takes 1,400 instructions, and four times as many in 64-bit words.
_MOST_NEAR_TIES = 8  # most near ties in the rows of a warp that are compared one by one


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Returns the columns of the k best of each row of a tile of keys. For the arguments see `selection.take`."""
    out = sorted_tile(tile)
    code = _take_program(tile, vocab, k, packed_ptx.rows_of_thread(tile), out.steps, narrow)
    return packed_ptx.insert_in_tile(code, tile, out, key, per_row)


def _take_program(tile: Tile, vocab: int, k: int, rows: int, held: int, narrow: bool) -> Program:
    """Returns the program of `take`. <winner{row}_{i}> gets the column at position lane * held + i in order."""
    p = Program()
    lane, first_column = packed_ptx.lane_and_first_column(p, tile)
    bits = packed_ptx.column_bits(tile, narrow)
    ones = (1 << bits) - 1
    words_of_rows = []
    for row in range(rows):
        words = packed_ptx.packed_keys(p, tile, vocab, row, first_column, bits, narrow)
        words += [p.var(packed_ptx.LOWEST, "s32") for _ in range(held - len(words))]
        words_of_rows.append(_sorted_row(p, words, lane, tile.lanes))

    def keep(row, words):
        for i, word in enumerate(words):
            p.set(packed_ptx.winner(p, row, i), ~word & ones)

    for row, words in enumerate(words_of_rows):
        keep(row, words)
    if narrow:
        return p
    pairs = [mending_ptx.near_ties(p, words, lane, ones, min(k + 1, vocab - 1)) for words in words_of_rows]
    number = p.reduce("add", [p.count_ones(of_row) for of_row in pairs])
    with p.block() as finish:
        packed_ptx.leave_if_exact(p, tile, rows, bits, number > 0, finish)
        # If the two elements after the k-th nearly tie, later elements may nearly tie as well.
        pair_after = p.reduce("or", pairs) >> (k % held) & 1
        goes_on = pair_after.differs(0) & lane.equals(k // held)
        wide = p.any(goes_on | (p.over_lanes("add", number) > _MOST_NEAR_TIES))
        with p.when(~wide):
            for row, words in enumerate(words_of_rows):
                mending_ptx.put_in_order(p, tile, row, words, pairs[row], ones)
                keep(row, words)
        with p.when(wide):
            for row in range(rows):
                keys = packed_ptx.wide_keys(p, tile, vocab, row, first_column, held)
                for i, word in enumerate(_sorted_row(p, keys, lane, tile.lanes)):
                    p.set(packed_ptx.winner(p, row, i), ~p.convert(word.bits("u64"), "u32"))
    return p


def _sorted_row(p: Program, words: list[Value], lane: Value, lanes: int) -> list[Value]:
    """Sorts the words of all lanes of a row in descending order. Each lane has a power of two of words.

    sort the words of each lane
    for run = 2, 4, ... lanes:                    merges two sorted runs of run / 2 lanes
        exchange with the opposite lane of the run, word i with word -1 - i:
            the first half of the lanes keeps the larger words, the second half the smaller ones
        for stride = run / 4, ..., 2, 1 lanes:    each half is bitonic
            exchange with lane ^ stride: the lower lane keeps the larger words
        the same within each lane
    """
    words = packed_ptx.best(p, words, len(words))
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
    """Returns the comparisons that sort n bitonic elements."""
    strides = [n >> level for level in range(1, n.bit_length())]
    return [(i, i + stride) for stride in strides for i in range(n) if not i & stride]


def exchanged_in_lane(p: Program, words: list[Value], comparisons: list[tuple[int, int]]) -> list[Value]:
    """Returns the words after these comparisons (i, j). Each puts the larger of two words at i."""
    out = list(words)
    for i, j in comparisons:
        a, b = out[i], out[j]
        out[j], out[i] = p.min(a, b), p.max(a, b)
    return out


def _exchange(p: Program, words: list[Value], lane: Value, flip: int, half: int, *, mirrored: bool) -> None:
    """Exchanges words with lane ^ flip. Lanes without the bit `half` keep the larger words, the others the smaller.

    Args:
      mirrored: whether word i is compared with word -1 - i of the other lane, or with word i.
    """
    upper = (lane & half).differs(0)
    others = [p.shuffle(word, "bfly", flip) for word in (words[::-1] if mirrored else words)]
    for word, other in zip(words, others):
        p.update(word, "min", other, when=upper)
        p.update(word, "max", other, when=~upper)
