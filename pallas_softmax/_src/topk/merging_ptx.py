"""The k best of rows in registers, in inline PTX, by merges of short lists: `selection.take`, `selection.take_words`.

A row lies over the `lanes` lanes of a tile. Each lane finds the best few of its elements, its list, and runs of lanes
are merged in pairs: element i of one run meets element -1 - i of the other. As long as two runs have no more than
`size` elements, k rounded up to a power of two, the larger ones go to the first run and the smaller ones to the second;
then only the larger ones are kept, over both runs, which halves what a lane holds, until that is one element; from
there on both runs of a pair keep the same. With lists of 2 and a size of 4:

    lists          7 3 | 9 5 | 8 6 | 8 2       the best two of each lane
    runs of 2      9 7 | 5 3 | 6 2 | 8 8       lanes 2 and 3 in the opposite order, for the next merge
    runs of 4      9   | 8   | 8   | 7         the best of the row, after a last shuffle

What comes out of a merge is bitonic, and sorted by exchanges between lanes and then within them.

A lane may have had more winners than its list has, if the last of that is among the winners. Lists are so long that
this is rare in rows in any order (`tile_plan.list_length`). Then, of 16 bits, the lanes make lists of what comes after
those, which are merged in, and so on.

An element is one word, its packed key (see `packed_ptx`): of 16 bits it has the whole key, so no two words are equal,
and the winners' keys need not be read again. Words are made from two elements at a time, which share a register:

    two elements      x1 x0                       the upper half is that of the higher column
    two keys          k1 k0                       x ^ (0x7fff where x is negative)
    two complements   ~c1 ~c0                     of the columns
    two words         k1 ~c1 | k0 ~c0

Packed keys of 32 bits lack the lowest bits of the key. So winners that are alike are put in order by their whole keys,
as in `mending_ptx`, and others that are alike the last winner are compared with it, and take its place if they are
larger. Where these are many, or a list was too short, the warp merges whole lists again, in words of 64 bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.layout import Tile, power_of_two
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax._src.topk import mending_ptx, packed_ptx, sorting_ptx
from pallas_softmax._src.topk.packed_ptx import LOWEST
from pallas_softmax._src.topk.tile_plan import list_length, merged_tile

# Elements of a warp's rows that are looked at one by one, each of which takes 190 instructions of PTX.
_MOST_ALIKE = 16
_HALF_ONES = 0xFFFF
_MAGNITUDES = 0x7FFF7FFF
# Bytes for `permute`: 0 to 3 are those of its first argument, 4 to 7 of its second.
_LOWER_WORD, _UPPER_WORD = 0x1054, 0x3276


def take_words(tile: Tile, vocab: int, k: int, bits, per_row):
    """Returns packed keys of the k best of each row of a tile; the arguments are those of `selection.take_words`."""
    return packed_ptx.insert_in_tile(text_of_words(tile, vocab, k), tile, merged_tile(tile, k), bits, per_row)


def take(tile: Tile, vocab: int, k: int, key, per_row):
    """Returns the columns of the k best of each row of a tile of 32-bit keys; arguments as in `selection.take`."""
    return packed_ptx.insert_in_tile(text(tile, vocab, k), tile, merged_tile(tile, k), key, per_row)


def text(tile: Tile, vocab: int, k: int) -> Program:
    """Returns the text of `take`.

    <x{row}_{i}> has key i of a row of the thread; <winner{row}_{i}> gets the column of winner lane * held + i.
    """
    p = Program()
    lane, first_column = packed_ptx.lane_and_first_column(p, tile)
    bits, rows = packed_ptx.column_bits(tile, narrow=False), packed_ptx.rows_of_thread(tile)
    ones, size = (1 << bits) - 1, power_of_two(k, 1)
    # Of k + 1 listed the last may be alike the last winner; then so may others that are not listed: `maybe_short`.
    length = list_length(tile, k, itemsize=4)
    held = merged_tile(tile, k).steps
    place = (p.operand("thread", "u32") & (LANES - tile.lanes)) + (k - 1) // held, (k - 1) % held
    found = []
    maybe_short, too_short = p.var(False, "pred"), p.var(False, "pred")  # whether a list may be that, or is
    for row in range(rows):
        words = packed_ptx.packed_keys(p, tile, vocab, row, first_column, bits, narrow=False)
        listed = packed_ptx.best(p, words, length)
        winners = [p.var(word) for word in _merged(p, listed[:size], lane, tile.lanes, size)]
        pairs = mending_ptx.pairs_alike(p, winners, lane, ones, min(k, vocab) - 1)
        worst = p.shuffle(winners[place[1]], "idx", place[0])
        least_alike = worst & ~ones
        if tile.shape[1] > vocab:  # what lies beyond the row is LOWEST, and no other element
            least_alike = p.max(least_alike, LOWEST + 1)
        others = p.var(0, "u32")
        for i, word in enumerate(listed):
            p.update(others, "or", 1 << i, when=(word < worst) & (word >= least_alike))
        if length < len(words):
            too_short |= listed[-1] >= worst
            maybe_short |= listed[-1] >= worst & ~ones
        found.append(_Found(winners, pairs, listed, others))
    numbers = [f.pairs for f in found] + [f.others for f in found]
    number = p.reduce("add", [p.count_ones(of_row) for of_row in numbers])

    def keep(row):
        for i, word in enumerate(found[row].winners):
            p.set(packed_ptx.winner(p, row, i), ~word & ones)

    for row in range(rows):
        keep(row)
    with p.block() as finish:
        packed_ptx.leave_if_exact(p, tile, rows, bits, (number > 0) | maybe_short, finish, too_short)
        wide = p.any(maybe_short | (p.over_lanes("add", number) > _MOST_ALIKE))
        with p.when(~wide):
            for row in range(rows):
                _mend(p, tile, row, found[row], place, ones)
                keep(row)
        with p.when(wide):
            for row in range(rows):
                count = power_of_two(tile.steps * tile.vec, 1)
                keys = packed_ptx.wide_keys(p, tile, vocab, row, first_column, count)
                whole = packed_ptx.best(p, keys, min(size, count))
                for i, word in enumerate(_merged(p, whole, lane, tile.lanes, size)):
                    p.set(packed_ptx.winner(p, row, i), ~p.convert(word.bits("u64"), "u32"))
    return p


class _Found(NamedTuple):
    """What merges of packed keys found of a row."""

    winners: list[Value]  # the packed keys of a lane's winners
    pairs: Value  # bit i where winner i of a lane and the next one are alike
    listed: list[Value]  # the list of a lane
    others: Value  # bit i where its element i is no winner, and alike the last one


def _mend(p: Program, tile: Tile, row: int, found: _Found, place: tuple[Value, int], ones: int) -> None:
    """Puts winners in the order of their whole keys, and larger elements in the place of the last one.

    Args:
      place: the lane of the last winner, and its number there.
      ones: the bits of a packed key that are those of its column.
    """
    own_lane = p.operand("thread", "u32") & (LANES - 1)
    winners, others = found.winners, found.others
    with p.loop() as leave:
        mending_ptx.put_in_order(p, tile, row, winners, found.pairs, ones)
        lanes = p.ballot(others.differs(0))
        leave(lanes.equals(0))
        lane = p.lowest_bit(lanes)
        i = p.shuffle(p.lowest_bit(others), "idx", lane)
        p.set(others, others & (others - 1), when=own_lane.equals(lane))
        last_lane = p.shuffle(place[0], "idx", lane)  # of the same row
        word = mending_ptx.of_lane(p, found.listed, i, lane)
        last = p.shuffle(winners[place[1]], "idx", last_lane)
        key, last_key = (mending_ptx.whole_key(p, tile, row, w, lane, ones) for w in (word, last))
        larger = (key > last_key) | (key.equals(last_key) & (word > last))
        p.set(winners[place[1]], word, when=larger & own_lane.equals(last_lane))


def text_of_words(tile: Tile, vocab: int, k: int) -> Program:
    """Returns the text of `take_words`.

    <x{row}_{i}> has elements 2 i and 2 i + 1 of a row of the thread; <winner{row}_{i}> gets the packed key of winner
    lane * held + i, of which a lane gets `held`.
    """
    p = Program()
    lane, first_column = packed_ptx.lane_and_first_column(p, tile)
    complements = _complements(tile, first_column)
    size, length = power_of_two(k, 1), list_length(tile, k, itemsize=2)
    length = k if length >= k - 1 else length  # k elements are never too short
    for row in range(packed_ptx.rows_of_thread(tile)):
        words = _packed_keys(p, tile, vocab, row, first_column, complements)
        listed = packed_ptx.best(p, words, length)
        best = [packed_ptx.winner(p, row, i) for i in range(max(1, size // tile.lanes))]
        _set_all(p, best, _merged(p, listed, lane, tile.lanes, size))
        if length >= min(k, len(words)):
            continue  # no list can be too short
        last = p.var(listed[-1])
        with p.loop() as leave:
            of_lane, place = divmod(k - 1, len(best))
            worst = p.shuffle(best[place], "idx", p.operand("thread", "u32") - lane + of_lane)
            leave(~p.any(last >= worst))
            again = first_column + _zero(p)
            words = _packed_keys(p, tile, vocab, row, again, _complements(tile, again))
            for word in words:
                p.set(word, LOWEST, when=word >= last)
            listed = packed_ptx.best(p, words, length)
            p.set(last, listed[-1])
            more = _merged(p, listed, lane, tile.lanes, size)
            _set_all(p, best, _better_half(p, best, more, lane, min(size, tile.lanes)))
    return p


def _zero(p: Program) -> Value:
    """Returns 0, which the compiler does not know: what depends on it is made again, and not kept in registers."""
    return p.over_lanes("min", p.operand("thread", "u32") & (LANES - 1))


def _set_all(p: Program, registers: list[Value], values: list[Value]) -> None:
    """Gives each register its value."""
    for register, value in zip(registers, values, strict=True):
        p.set(register, value)


# ---- packed keys


def _complements(tile: Tile, first_column: Value) -> list[Value]:
    """Returns the complements of the columns of each two elements of the thread."""
    columns = packed_ptx.columns_of_thread(tile)
    first = first_column * (1 << 16 | 1)
    pairs = zip(columns[::2], [*columns[1::2], columns[-1]])
    return [((_HALF_ONES - upper) << 16 | _HALF_ONES - lower) - first for lower, upper in pairs]


def _packed_keys(
    p: Program, tile: Tile, vocab: int, row: int, first_column: Value, complements: list[Value]
) -> list[Value]:
    """Returns the packed keys of the elements of a row of the thread; those beyond the row are the lowest."""
    words: list[Value] = []
    for i, complement in enumerate(complements):
        pair = p.operand(f"x{row}_{i}", "u32")
        signs = pair.bits("s16x2").sign()
        keys = p.bitwise3(lambda pair, signs, m: pair ^ signs & m, pair, signs, _MAGNITUDES)
        words += [p.permute(keys, complement, which).bits("s32") for which in (_LOWER_WORD, _UPPER_WORD)]
    words = words[: len(packed_ptx.columns_of_thread(tile))]
    packed_ptx.lower_beyond_row(p, tile, vocab, words, first_column)
    return words


# ---- merges


def _merged(p: Program, words: list[Value], lane: Value, lanes: int, size: int) -> list[Value]:
    """Merges the lists of all lanes of a row; returns the best `size`, in the order of the lanes.

    make the list of each lane longer, to a power of two, by lowest words
    for run = 1, 2, ... lanes / 2:            two runs of so many lanes, the second in the opposite order
        exchange with lane ^ run, word for word from the other end: each lane keeps all its words,
            the larger or the smaller ones; or, of those in its first half, the larger ones
        for flip of the lanes that hold a half: exchange with lane ^ flip, one keeps the larger ones
        sort the words of each lane, which are bitonic now

    `flips` are the bits of a lane's number that give the place of its words in the run, the highest first. They end in
    another order than those of the lane's number, and so there is a last shuffle.
    """
    missing = power_of_two(len(words), 1) - len(words)
    held: list[Any] = [*words, *[None] * missing]  # None is the lowest word
    flips: list[int] = []
    run = 1
    while run < lanes:
        # Whether the new run is the second of a pair, and so is to have the opposite order.
        turned = (lane & 2 * run).differs(0) if 2 * run < lanes else None
        half = len(held) // 2
        if len(held) * run < size:
            held = _exchanged(p, held, lane, run, turned, mirrored=True)
            flips, bitonic = [run, *flips], flips
        elif half:
            others = [word and p.shuffle(word, "bfly", run) for word in held[: half - 1 : -1]]
            held = [p.max(word, other) if other else word for word, other in zip(held, others)]
            flips = bitonic = [*flips, run]
        else:
            held = [p.max(held[0], p.shuffle(held[0], "bfly", run))]
            bitonic = flips
        for flip in bitonic:
            # Where half of the words were kept, a lane of the second run has its words in the opposite order so far.
            held = _exchanged(p, held, lane, flip, turned, mirrored=flip == run)
        held = sorting_ptx.exchanged_in_lane(p, held, sorting_ptx.bitonic(len(held)))
        run *= 2
    if flips == sorted(flips, reverse=True):
        return held
    source = p.operand("thread", "u32") - lane
    for i, flip in enumerate(reversed(flips)):
        moved = flip.bit_length() - 1 - i
        bit = lane & 1 << i
        source = source + (bit << moved if moved >= 0 else bit >> -moved)
    return [p.shuffle(word, "idx", source) for word in held]


def _exchanged(
    p: Program, words: Sequence[Value | None], lane: Value, flip: int, turned: Value | None, *, mirrored: bool
) -> list[Value]:
    """Exchanges words with lane ^ flip; lanes without the bit `flip`, or if `turned` those with it, keep the larger.

    Args:
      words: those of a lane, of which None is the lowest one; no two of these meet.
      mirrored: whether word i meets word -1 - i of the other lane, or word i.
    """
    others = [word and p.shuffle(word, "bfly", flip) for word in (words[::-1] if mirrored else words)]
    larger = (lane & flip).equals(0)
    if turned is not None:
        larger = larger ^ turned
    pairs = [(p.max(a, b), p.min(a, b)) if a and b else (a or b, LOWEST) for a, b in zip(words, others)]
    return [p.select(larger, a, b) for a, b in pairs]


def _better_half(p: Program, a: Sequence[Value], b: Sequence[Value], lane: Value, lanes: int) -> list[Value]:
    """Merges two lists that lie in order over the lanes of a row, `lanes` of them, and keeps as many as one has."""
    opposite = [p.shuffle(word, "bfly", lanes - 1) for word in b[::-1]]
    words = [p.max(word, other) for word, other in zip(a, opposite)]
    flip = lanes // 2
    while flip:
        words = _exchanged(p, words, lane, flip, None, mirrored=False)
        flip //= 2
    return sorting_ptx.exchanged_in_lane(p, words, sorting_ptx.bitonic(len(words)))
