"""The k best of rows in registers, in inline PTX, by a sort of the rows: `selection.take`, where k is large.

A row lies over the `lanes` lanes of a tile. Each lane sorts the elements that it holds, then runs of lanes are merged
in pairs until one run is the row. Position p of the sorted row is in lane p / held, register p % held:

    4 lanes of 2   3 7 | 5 1 | 1 0 | 2 6
    lanes          7 3 | 5 1 | 1 0 | 6 2     each lane from its largest on
    runs of 2      7 5 | 3 1 | 6 2 | 1 0
    runs of 4      7 6 | 5 3 | 2 1 | 1 0

Elements are packed keys (see `rounds_ptx`), in words of 32 bits. Those of 32-bit keys lack their lowest bits, so two
neighbours may be alike: they have the same upper bits. Where a warp has few such pairs it looks at their whole keys,
and exchanges those that are in the wrong order. Else it sorts its rows again in words of 64 bits, with the whole key.
"""

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import LANES
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value
from pallas_softmax.implementations.mosaic_gpu.topk import rounds_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.plan import sorted_tile

_LOWEST_WIDE = -(2**63)
# Normal logits have 0.3 and 0.6 such pairs in a row of 512 for k = 64 and 128, each of which takes some 160
# instructions of PTX in a pass. A sort of such a row takes 1,400, and in words of 64 bits four times as many.
_MOST_ALIKE = 8  # pairs in the rows of a warp that are looked at one by one


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
    words_of_rows = []
    for row in range(rows):
        words = rounds_ptx.packed_keys(p, tile, vocab, row, first_column, bits, narrow)
        words += [p.var(rounds_ptx.LOWEST, "s32") for _ in range(held - len(words))]
        words_of_rows.append(_sorted_row(p, words, lane, tile.lanes))

    def keep(row, words):
        for i, word in enumerate(words):
            p.set(rounds_ptx.column_result(p, row, i), ~word & ones)

    for row, words in enumerate(words_of_rows):
        keep(row, words)
    if narrow:
        return p
    pairs = [pairs_alike(p, words, lane, ones, min(k + 1, vocab - 1)) for words in words_of_rows]
    number = p.reduce("add", [p.count_ones(of_row) for of_row in pairs])
    with p.block() as finish:
        rounds_ptx.leave_if_exact(p, tile, rows, bits, number > 0, finish)
        goes_on = (
            p.reduce("or", pairs) >> (k % held) & 1
        )  # the two after the k-th are alike, and maybe others
        goes_on = goes_on.differs(0) & lane.equals(k // held)
        wide = p.any(goes_on | (p.over_lanes("add", number) > _MOST_ALIKE))
        with p.when(~wide):
            for row, words in enumerate(words_of_rows):
                put_in_order(p, tile, row, words, pairs[row], ones)
                keep(row, words)
        with p.when(wide):
            for row in range(rows):
                keys = wide_keys(p, tile, vocab, row, first_column, held)
                for i, word in enumerate(_sorted_row(p, keys, lane, tile.lanes)):
                    p.set(rounds_ptx.column_result(p, row, i), ~p.convert(word.bits("u64"), "u32"))
    return p


def pairs_alike(p: Program, words: list[Value], lane: Value, ones: int, count: int) -> Value:
    """Returns bit i where the words at position i of a lane and the next one differ in their low bits only.

    Of each row it looks at the first `count` pairs of neighbours.
    """
    bits = p.var(0, "u32")
    of_next_lane = p.shuffle(words[0], "down", 1)
    left = (count - lane * len(words)).bits("s32")  # pairs from the first position of this lane on
    for i, (word, other) in enumerate(zip(words, [*words[1:], of_next_lane])):
        near = (word ^ other).bits("u32") <= ones
        p.update(bits, "or", 1 << i, when=near & (left > i))
    return bits


def put_in_order(p: Program, tile: Tile, row: int, words: list[Value], pairs: Value, ones: int) -> None:
    """Exchanges neighbours that are in the wrong order, pair by pair; where pairs meet, until a pass finds none.

    Args:
      words: the packed keys at the positions of a lane.
      pairs: bit i where the word at position i and the next one are alike.
    """
    own_lane = p.operand("thread", "u32") & (LANES - 1)

    def put(i, lane, word):
        here = own_lane.equals(lane)
        for j, register in enumerate(words):
            p.set(register, word, when=here & i.equals(j))

    next_pair = pairs >> 1 | (p.shuffle(pairs, "down", 1) & 1) << len(words) - 1
    meet = p.any((pairs & next_pair).differs(0))
    exchanged = p.var(False, "pred")
    with p.repeat() as again:
        p.set(exchanged, False)
        left = p.var(pairs)
        with p.loop() as leave_pass:
            lanes = p.ballot(left.differs(0))
            leave_pass(lanes.equals(0))
            lane = p.lowest_bit(lanes)
            i = p.shuffle(p.lowest_bit(left), "idx", lane)
            p.set(left, left & (left - 1), when=own_lane.equals(lane))
            is_last = i.equals(len(words) - 1)
            next_i, next_lane = p.select(is_last, 0, i + 1), p.select(is_last, lane + 1, lane)
            word, next_word = of_lane(p, words, i, lane), of_lane(p, words, next_i, next_lane)
            key, next_key = (whole_key(p, tile, row, w, lane, ones) for w in (word, next_word))
            with p.when(key < next_key):
                put(i, lane, next_word)
                put(next_i, next_lane, word)
                p.set(exchanged, True)
        again(exchanged & meet)


def of_lane(p: Program, values: list[Value], i: Value, lane: Value) -> Value:
    """Returns value i of a lane; the number and the lane are the same for the warp."""
    while len(values) > 1:  # a bit of the number at a time
        odd = (i & 1).differs(0)
        unpaired = values[len(values) // 2 * 2 :]
        values = [p.select(odd, b, a) for a, b in zip(values[::2], values[1::2])] + unpaired
        i = i >> 1
    return p.shuffle(values[0], "idx", lane)


def whole_key(p: Program, tile: Tile, row: int, word: Value, lane: Value, ones: int) -> Value:
    """Returns the whole key of a packed key of the row of a lane; both are the same for the warp."""
    column = (~word & ones).bits("u32")
    of_step = column & (tile.lanes * tile.vec - 1)
    step = column >> (tile.lanes * tile.vec).bit_length() - 1
    i = step * tile.vec + (of_step & (tile.vec - 1))
    owner = (lane & -tile.lanes) + (of_step >> tile.vec.bit_length() - 1)
    return of_lane(p, rounds_ptx.keys_of_thread(p, tile, row), i, owner)


def wide_keys(p: Program, tile: Tile, vocab: int, row: int, first_column: Value, held: int) -> list[Value]:
    """Returns numbers of 64 bits: each element's key, above the complement of its column."""
    keys, columns = rounds_ptx.load_keys(p, tile, vocab, row, first_column)
    wide = [p.join(~column, key, "s64") for key, column in zip(keys, columns)]
    return wide + [p.var(_LOWEST_WIDE, "s64") for _ in range(held - len(wide))]


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
