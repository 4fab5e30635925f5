"""Inline PTX for the k best of rows in registers, by merging short lists.

A row lies over the `lanes` lanes of a tile. Each lane lists its best few elements. Then runs of lanes are merged in
pairs: element i of one run is compared with element -1 - i of the other. `size` is k rounded up to a power of two. A
merge keeps its elements in one of three ways:

  * Two runs with at most `size` elements: the larger elements go to the first run, the smaller ones to the second.
  * Two runs with more elements: only the larger ones are kept, over the lanes of both runs. A lane's elements halve.
  * One element in a lane: both runs of a pair keep the same elements.

An example with lists of 2 and a size of 4:

    lists          7 3 | 9 5 | 8 6 | 8 2       the best two of each lane
    runs of 2      9 7 | 5 3 | 6 2 | 8 8       lanes 2 and 3 in the opposite order, for the next merge
    runs of 4      9   | 8   | 8   | 7         the best of the row, after a last shuffle

A merge leaves a bitonic sequence, which is sorted by exchanges between lanes and then within each lane.

A list is too short if its last element is a winner, because the lane may have further winners. Lists are so long that
this is rare in rows in random order (`layout.list_length`). For 16-bit elements, the lanes then list their next best
elements, merge them in, and so on.

An element is one word, its packed key: the upper bits of its key above the complement of its column.

    packed key  | key without its lowest b bits    | complement of the column, b bits |

No two packed keys are equal: among equal elements, a lower column makes a larger packed key. A 16-bit key has room as
a whole. Two 16-bit elements share a register and are packed together:

    two elements      x1 x0                       the upper half has the higher column
    two keys          k1 k0                       x ^ (0x7fff where x is negative)
    two complements   ~c1 ~c0                     of the columns
    two words         k1 ~c1 | k0 ~c0

The packed key of a 32-bit element lacks the lowest b bits of its key. Two elements nearly tie if their keys have the
same upper bits. Their packed keys order them by column, so near ties among winners are ordered by whole keys. Other
elements that nearly tie with the last winner are compared with it, and replace it if larger. If there are many near
ties, or a list may be too short, the warp merges whole lists again, in 64-bit words. Near ties are rare in logits
without ties. Logits with ties, such as small integers, end in bits of 0, so their packed keys lose nothing.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import sort_keys
from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.layout import Tile, list_length, log2, merged_tile, power_of_two, powers_below
from pallas_softmax._src.gpu.ptx.elements import flip_negative_at_once
from pallas_softmax._src.gpu.ptx.networks import LOWEST, best, sorted_bitonic
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.gpu.tiles import TileProgram, insert_in_tile

# The most near ties in a warp's rows that are compared one by one. Each takes 190 PTX instructions.
_MOST_NEAR_TIES = 16
_HALF_ONES = 0xFFFF
_MAGNITUDES = 0x7FFF7FFF
# Selectors for prmt: each digit selects a byte, 0 to 3 from its first argument, 4 to 7 from its second.
_LOWER_WORD, _UPPER_WORD = 0x1054, 0x3276


def search_input(x) -> tuple[Any, int]:
    """Returns what the search takes, and its value for a masked element: bits of 16-bit elements, keys of others."""
    if x.dtype.itemsize == 2:
        return lax.bitcast_convert_type(x, jnp.int16), -1
    return sort_keys.key32(x), sort_keys.lowest_key(x.dtype)


@twin
def search_rows(tile: Tile, vocab: int, k: int, elements, lanes: float | None = None) -> tuple[Any, Any]:
    """Returns the indices of the k best of each row of `vocab` elements, and their keys if these have 16 bits.

    They are tiles of `merged_tile`. `elements` are as of `search_input`, and may have columns beyond the row.
    `list_length` documents `lanes`.
    """
    in_16_bits = elements.dtype.itemsize == 2
    program = (search_words_program if in_16_bits else search_program)(tile, vocab, k, lanes)
    (winner,) = insert_in_tile(program, elements, "i32", {"winner": merged_tile(tile, k)})
    return (~winner & _HALF_ONES, winner >> 16) if in_16_bits else (winner, None)


def search_program(tile: Tile, vocab: int, k: int, lanes: float | None = None) -> TileProgram:
    """Returns the program for 32-bit keys. <winner{row}_{i}> gets the column of winner lane * held + i."""
    p, size = TileProgram(tile, vocab), power_of_two(k, 1)
    # Even with k + 1 elements listed, the last may nearly tie with the last winner. Then unlisted ones may nearly tie
    # as well (`maybe_short`).
    length = list_length(tile, k, itemsize=4, lanes=lanes)
    held = merged_tile(tile, k).vec
    last_winner = (p.operand("thread", "u32") & (LANES - tile.lanes)) + (k - 1) // held, (k - 1) % held
    # For each row: winners, pairs, listed, others. Bit i of `pairs`: winners i and i + 1 nearly tie. Bit i of `others`:
    # listed element i did not win, but nearly ties with the last winner; None if k >= V.
    found = []
    maybe_short, too_short = (p.var(False, "pred") for _ in range(2))  # a list of any row
    for row in range(p.rows):
        listed = _listed_keys(p, row, length)
        winners = [p.var(word) for word in _best_of_row(p, listed[:size], size)]
        pairs = _near_ties(p, winners, min(k, vocab) - 1)
        worst = p.shuffle(winners[last_winner[1]], "idx", last_winner[0])
        others = None
        if k < vocab:
            least = worst & ~p.ones
            if tile.shape[1] > vocab:  # LOWEST marks positions beyond the row
                least = p.max(least, LOWEST + 1)
            others = p.var(0, "u32")
            for i, word in enumerate(listed):
                p.update(others, "or", 1 << i, when=(word < worst) & (word >= least))
        if length < len(p.columns):
            too_short = too_short | (listed[-1] >= worst)
            maybe_short = maybe_short | (listed[-1] >= worst & ~p.ones)
        found.append((winners, pairs, listed, others))
    numbers = [pairs for _, pairs, *_ in found] + [others for *_, others in found if others is not None]
    number = p.reduce("add", [p.count_ones(bits) for bits in numbers])

    def keep(row):
        winners, *_ = found[row]
        for i, word in enumerate(winners):
            p.set(p.winner(row, i), ~word & p.ones)

    for row in range(p.rows):
        keep(row)
    with p.block() as finish:
        _leave_if_exact(p, (number > 0) | maybe_short, too_short, finish)
        wide = p.any(maybe_short | (p.over_lanes("add", number) > _MOST_NEAR_TIES))
        with p.when(~wide):
            for row in range(p.rows):
                _mend(p, row, last_winner, *found[row])
                keep(row)
        with p.when(wide):
            for row in range(p.rows):
                count = power_of_two(tile.steps * tile.vec, 1)
                whole = best(p, _wide_keys(p, row, count), min(size, count))
                for i, word in enumerate(_best_of_row(p, whole, size)):
                    p.set(p.winner(row, i), ~p.convert(word.bits("u64"), "u32"))
    return p


def _mend(p: TileProgram, row: int, last_winner: tuple[Value, int], winners, pairs, listed, others) -> None:
    """Orders winners by their whole keys. Larger `others` replace the last winner, number [1] of lane [0]."""
    own_lane = p.operand("thread", "u32") & (LANES - 1)
    if others is None:
        _put_in_order(p, row, winners, pairs)
        return
    with p.loop() as leave:
        _put_in_order(p, row, winners, pairs)
        lanes = p.ballot(others.differs(0))
        leave(lanes.equals(0))
        lane = p.lowest_bit(lanes)
        i = p.shuffle(p.lowest_bit(others), "idx", lane)
        p.set(others, others & (others - 1), when=own_lane.equals(lane))
        last_lane = p.shuffle(last_winner[0], "idx", lane)  # in the row of `lane`
        word = _value_in_lane(p, listed, i, lane)
        last = p.shuffle(winners[last_winner[1]], "idx", last_lane)
        key, last_key = (_whole_key(p, row, w, lane) for w in (word, last))
        larger = (key > last_key) | (key.equals(last_key) & (word > last))
        p.set(winners[last_winner[1]], word, when=larger & own_lane.equals(last_lane))


def search_words_program(tile: Tile, vocab: int, k: int, lanes: float | None = None) -> TileProgram:
    """Returns the program for 16-bit elements. <winner{row}_{i}> gets the packed key of winner lane * held + i."""
    p = TileProgram(tile, vocab)
    complements = _complements(p, p.first_column)
    size, length = power_of_two(k, 1), list_length(tile, k, itemsize=2, lanes=lanes)
    length = k if length >= k - 1 else length  # a list of k is never too short
    for row in range(p.rows):
        words = _packed_keys(p, row, p.first_column, complements)
        listed = best(p, words, length)
        winners = [p.winner(row, i) for i in range(max(1, size // tile.lanes))]
        for winner, word in zip(winners, _best_of_row(p, listed, size), strict=True):
            p.set(winner, word)
        if length >= min(k, len(words)):
            continue  # lists cannot be too short
        last = p.var(listed[-1])
        with p.loop() as leave:
            lane_of_last, number_of_last = divmod(k - 1, len(winners))
            first_lane = p.operand("thread", "u32") - p.lane
            worst = p.shuffle(winners[number_of_last], "idx", first_lane + lane_of_last)
            leave(~p.any(last >= worst))
            # The least lane number is 0, which the compiler does not know. So it computes the words again here,
            # instead of keeping them in registers all along.
            zero = p.over_lanes("min", p.operand("thread", "u32") & (LANES - 1))
            first_column = p.first_column + zero
            words = _packed_keys(p, row, first_column, _complements(p, first_column))
            for word in words:
                p.set(word, LOWEST, when=word >= last)
            listed = best(p, words, length)
            p.set(last, listed[-1])
            more = _best_of_row(p, listed, size)
            better = _better_half(p, winners, more, min(size, tile.lanes))
            for winner, word in zip(winners, better, strict=True):
                p.set(winner, word)
    return p


def _complements(p: TileProgram, first_column: Value) -> list[Value]:
    first = first_column * (1 << 16 | 1)
    pairs = zip(p.columns[::2], [*p.columns[1::2], p.columns[-1]])
    return [((_HALF_ONES - upper) << 16 | _HALF_ONES - lower) - first for lower, upper in pairs]


def _packed_keys(p: TileProgram, row: int, first_column: Value, complements: list[Value]) -> list[Value]:
    words: list[Value] = []
    for i, complement in enumerate(complements):
        keys = flip_negative_at_once(p.operand(f"x{row}_{i}", "s16x2"), _MAGNITUDES)
        for half in (_LOWER_WORD, _UPPER_WORD):
            words.append(p.write("prmt.b32", "s32", keys, complement, half, of="b32"))
    words = words[: len(p.columns)]
    _lower_beyond_row(p, words, first_column)
    return words


def _best_of_row(p: TileProgram, words: list[Value], size: int) -> list[Value]:
    """Returns the best `size` words of a row, in the order of the lanes; each lane passes its list, in order.

    The list of each lane is padded with lowest words to a power of two. Pairs of runs of 1, 2, 4, ... lanes, the second
    one in the opposite order, are merged in one of the three ways at the top of this file. The bitonic words that stay
    are sorted by exchanges between the lanes that hold a half, and then within each lane.

    `run_bits` are the bits of a lane's number that give the position of its words in the run, the highest first.
    """
    lanes = p.tile.lanes
    missing = power_of_two(len(words), 1) - len(words)
    held: list[Any] = [*words, *[None] * missing]  # None is the lowest word
    run_bits: list[int] = []
    for run in powers_below(lanes):
        # Whether the new run is the second of a pair, and so needs the opposite order.
        opposite = (p.lane & 2 * run).differs(0) if 2 * run < lanes else None
        half = len(held) // 2
        if len(held) * run < size:  # the first run keeps the larger words, the second run the smaller ones
            held = _exchange(p, held, run, opposite, mirrored=True)
            run_bits, unsorted_bits = [run, *run_bits], run_bits
        elif half:  # both runs together keep the larger half
            upper = held[: half - 1 : -1]
            others = [None if word is None else p.shuffle(word, "bfly", run) for word in upper]
            held = [word if other is None else p.max(word, other) for word, other in zip(held, others)]
            run_bits = unsorted_bits = [*run_bits, run]
        else:  # a lane holds one word: both runs keep the same words
            held = [p.max(held[0], p.shuffle(held[0], "bfly", run))]
            unsorted_bits = run_bits
        for bit in unsorted_bits:
            # If half of the words were kept, lanes of the second run still hold their words in the opposite order.
            held = _exchange(p, held, bit, opposite, mirrored=bit == run)
        held = sorted_bitonic(p, held)
    return _in_order_of_lanes(p, held, run_bits)


def _in_order_of_lanes(p: TileProgram, words: list[Value], run_bits: list[int]) -> list[Value]:
    """Moves words between lanes. `_best_of_row` explains `run_bits`."""
    if run_bits == sorted(run_bits, reverse=True):
        return words
    source = p.operand("thread", "u32") - p.lane
    for i, run_bit in enumerate(reversed(run_bits)):
        moved = log2(run_bit) - i
        bit = p.lane & 1 << i
        source = source + (bit << moved if moved >= 0 else bit >> -moved)
    return [p.shuffle(word, "idx", source) for word in words]


def _exchange(
    p: TileProgram, words: Sequence[Value | None], flip: int, opposite: Value | None, *, mirrored: bool
) -> list[Value]:
    """Exchanges words with lane ^ flip. The lane without the bit `flip` keeps the larger; if `opposite`, the other one.

    Word i is compared with word i of the other lane, or with word -1 - i if `mirrored`. None is the lowest word.
    """
    partners = words[::-1] if mirrored else words
    others = [None if word is None else p.shuffle(word, "bfly", flip) for word in partners]
    larger = (p.lane & flip).equals(0)
    if opposite is not None:
        larger = larger ^ opposite
    out = []
    for word, other in zip(words, others):
        if word is None or other is None:
            out.append(p.select(larger, other if word is None else word, LOWEST))
        else:
            out.append(p.var(word))
            p.update(out[-1], "max", other, when=larger)
            p.update(out[-1], "min", other, when=~larger)
    return out


def _better_half(p: TileProgram, a: Sequence[Value], b: Sequence[Value], lanes: int) -> list[Value]:
    """Merges two lists, each sorted over the `lanes` lanes of a row. Keeps the larger half of the words."""
    opposite = [p.shuffle(word, "bfly", lanes - 1) for word in b[::-1]]
    words = [p.max(word, other) for word, other in zip(a, opposite)]
    for flip in reversed(powers_below(lanes)):
        words = _exchange(p, words, flip, None, mirrored=False)
    return sorted_bitonic(p, words)


# --- Packed keys

_HIGHEST = 2**31 - 1  # the column of positions beyond the row
_LOWEST_WIDE = -(2**63)


def _listed_keys(p: TileProgram, row: int, length: int) -> list[Value]:
    """Returns the `length` best packed keys of the thread in a row, the largest first."""
    if p.tile.shape[1] > p.vocab or p.rows * length >= len(p.columns):
        lows = [p.ones - column - p.first_column for column in p.columns]
        words = [_packed(p, key, low) for key, low in zip(p.keys(row), lows)]
        _lower_beyond_row(p, words, p.first_column)
        return best(p, words, length)
    # Within a thread, the columns differ by constants. They order the thread's elements. The rest of the complement is
    # the same for all of these, and is added to the listed ones only.
    last = p.columns[-1]
    words = [_packed(p, key, last - column) for key, column in zip(p.keys(row), p.columns)]
    rest = p.ones - last - p.first_column
    return [word + rest for word in best(p, words, length)]


def _packed(p: TileProgram, key: Value, low: Value | int) -> Value:
    return p.bitwise3(lambda key, low, ones: key & ~ones | low, key, low, p.ones)


def _lower_beyond_row(p: TileProgram, words: list[Value], first_column: Value) -> None:
    for word, column in zip(words, p.columns):
        column_of_last_lane = column + p.tile.vec * (p.tile.lanes - 1)
        if column_of_last_lane >= p.vocab:
            p.set(word, LOWEST, when=first_column >= max(0, p.vocab - column))


def _leave_if_exact(p: TileProgram, near_tie: Value, too_short: Value, leave: Callable[[Value], None]) -> None:
    """Leaves a block if all lists are long enough, and packed keys order all rows of the warp as whole keys would.

    They do if no neighbours nearly tie, or if the bits `ones` of all floats are 0.
    """
    leave(~p.any(near_tie | too_short))
    union = p.var(0, "s32")
    for key in itertools.chain(*map(p.keys, range(p.rows))):
        # The key of a negative float has all bits but the sign inverted.
        union = p.bitwise3(lambda union, sign, key: union | (sign ^ key), union, key.sign(), key)
    leave(~p.any((union & p.ones).differs(0) | too_short))


def _wide_keys(p: TileProgram, row: int, count: int) -> list[Value]:
    """Returns `count` 64-bit words, the whole key above ~column. Words beyond the row, and padding, are the lowest."""
    wide = []
    for whole, start in zip(p.keys(row), p.columns):
        key, column = p.var(whole), p.first_column + start
        if p.tile.shape[1] > p.vocab:
            beyond = column >= p.vocab
            p.set(key, LOWEST, when=beyond)
            p.set(column, _HIGHEST, when=beyond)
        wide.append(p.join(~column.bits("s32"), key, "s64"))
    return wide + [p.var(_LOWEST_WIDE, "s64") for _ in range(count - len(wide))]


def _near_ties(p: TileProgram, words: list[Value], count: int) -> Value:
    """Returns a word: bit i is set if words i and i + 1 nearly tie. Only the first `count` pairs of a row count."""
    bits = p.var(0, "u32")
    first_of_next_lane = p.shuffle(words[0], "down", 1)
    remaining = (count - p.lane * len(words)).bits("s32")  # pairs to compare from this lane's first word on
    for i, (word, other) in enumerate(zip(words, [*words[1:], first_of_next_lane])):
        near = (word ^ other).bits("u32") <= p.ones
        p.update(bits, "or", 1 << i, when=near & (remaining > i))
    return bits


def _put_in_order(p: TileProgram, row: int, words: list[Value], pairs: Value) -> None:
    """Exchanges neighbours that are in the wrong order, pair by pair: words i and i + 1 if bit i of `pairs` is set.

    All lanes read the words from the lanes that hold them. If two pairs share a word, passes are repeated until one
    pass exchanges nothing.
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
        remaining = p.var(pairs)
        with p.loop() as leave_pass:
            lanes = p.ballot(remaining.differs(0))
            leave_pass(lanes.equals(0))
            lane = p.lowest_bit(lanes)
            i = p.shuffle(p.lowest_bit(remaining), "idx", lane)
            p.set(remaining, remaining & (remaining - 1), when=own_lane.equals(lane))
            is_last = i.equals(len(words) - 1)
            next_i, next_lane = p.select(is_last, 0, i + 1), p.select(is_last, lane + 1, lane)
            word, next_word = _value_in_lane(p, words, i, lane), _value_in_lane(p, words, next_i, next_lane)
            key, next_key = (_whole_key(p, row, w, lane) for w in (word, next_word))
            # Words of equal keys compare columns: a near tie that came later may have a lower one.
            with p.when((key < next_key) | (key.equals(next_key) & (word < next_word))):
                put(i, lane, next_word)
                put(next_i, next_lane, word)
                p.set(exchanged, True)
        again(exchanged & meet)


def _value_in_lane(p: Program, values: list[Value], i: Value, lane: Value) -> Value:
    """Returns value i of a lane. Both must be the same in all lanes of the warp."""
    while len(values) > 1:  # selects by one bit of i at a time
        odd = (i & 1).differs(0)
        unpaired = values[len(values) // 2 * 2 :]
        values = [p.select(odd, b, a) for a, b in zip(values[::2], values[1::2])] + unpaired
        i = i >> 1
    return p.shuffle(values[0], "idx", lane)


def _whole_key(p: TileProgram, row: int, word: Value, lane: Value) -> Value:
    """Returns the whole key for packed key `word`, from the row of `lane`. Both are the same in all lanes."""
    tile, column = p.tile, (~word & p.ones).bits("u32")
    owner = lane & -tile.lanes
    if tile.pieces > 1:
        # column / piece_columns, exact for columns up to 1024
        piece = column * -(-(1 << 20) // tile.piece_columns) >> 20
        column = column - piece * tile.piece_columns
        owner = owner + piece * (tile.lanes // tile.pieces)
    in_step = column & (tile.step_columns - 1)
    step = column >> log2(tile.step_columns)
    i = step * tile.vec + (in_step & (tile.vec - 1))
    owner = owner + (in_step >> log2(tile.vec))
    return _value_in_lane(p, p.keys(row), i, owner)
