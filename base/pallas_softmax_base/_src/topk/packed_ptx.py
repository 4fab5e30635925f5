"""Inline PTX shared by the top-k searches in registers: packed keys, and the lists of a lane's best elements.

A row lies over the `lanes` lanes of a tile, and a thread may have parts of several rows. An element is one word, its
packed key. It has the upper bits of the element's key above the complement of its column:

    packed key  | key without its lowest b bits    | complement of the column, b bits |

No two packed keys are equal: among equal elements, a lower column makes a larger packed key. The packed key of a 16-bit
element has room for the whole key. The packed key of a 32-bit element lacks the lowest b bits of its key. Two elements
nearly tie if their keys have the same upper bits. Their packed keys order them by column, so near ties among winners
are compared again by whole keys. Near ties are rare in logits without ties. Logits with ties, such as small integers,
end in bits of 0, so their packed keys lose nothing.
"""

import itertools
from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir

from pallas_softmax_base._src.gpu import tiles
from pallas_softmax_base._src.gpu.hardware import LANES, WARPGROUP
from pallas_softmax_base._src.gpu.layout import Tile
from pallas_softmax_base._src.gpu.ptx.inline import array, elements, emit_ptx, inline, pack, thread, words
from pallas_softmax_base._src.gpu.ptx.program import Program
from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.topk.candidates import LOWEST_KEY

LOWEST, _HIGHEST = LOWEST_KEY, 2**31 - 1  # the key (packed or not) and the column of positions beyond the row
_LOWEST_WIDE = -(2**63)


class TileProgram(Program):
    """A program that searches the rows of a tile. It reads and writes these operands, for each row of a thread:

    <x{row}_{i}>          key i of the row, or 16-bit elements 2 i and 2 i + 1
    <winner{row}_{i}>     the result: element i of the thread's winners of the row
    """

    def __init__(self, tile: Tile, vocab: int):
        super().__init__()
        self.tile, self.vocab = tile, vocab
        self.rows = tile.rows // (WARPGROUP // tile.lanes)  # of each thread
        self.lane = self.operand("thread", "u32") & (tile.lanes - 1)  # the thread's lane in its rows
        self.first_column = tile.first_column(self.lane)  # of the thread's first element
        # The columns of the thread's elements, relative to the first one.
        self.columns = [step * tile.step_columns + j for step in range(tile.steps) for j in range(tile.vec)]
        self.ones = (1 << (tile.shape[1] - 1).bit_length()) - 1  # the bits of the column in a packed key

    def keys(self, row: int) -> list[Value]:
        """Returns the keys of the thread's elements of a row."""
        return [self.operand(f"x{row}_{i}", "s32") for i in range(len(self.columns))]

    def winner(self, row: int, i: int) -> Value:
        """Returns the result <winner{row}_{i}>."""
        return self.operand(f"winner{row}_{i}", "s32")


def insert_in_tile(code: TileProgram, out: Tile, held):
    """Inserts PTX into the kernel; returns the winners as a tile `out`. `held` has 32-bit keys or 16-bit integers."""

    @inline(arg_types=(tiles.layout(code.tile),), return_type=tiles.type_of(out, "int32"))
    def emit(_, held):
        operands = {"thread": thread()}
        for row, registers in enumerate(np.split(held.registers.flatten(), code.rows)):
            operands |= {f"x{row}_{i}": word for i, word in enumerate(_words(registers))}
        names = [f"winner{row}_{i}" for row in range(code.rows) for i in range(out.vec)]
        winners = emit_ptx(code, operands, dict.fromkeys(names, "i32"))
        registers = [pack(winners[i : i + out.vec]) for i in range(0, len(winners), out.vec)]
        return array(tiles.layout(out).to_mgpu(), out.shape, registers)

    return emit(held)


def _words(registers) -> list[ir.Value]:
    """Returns the elements in 32-bit words, two 16-bit elements in one. An unpaired last one fills both halves."""
    if ir.VectorType(registers[0].type) == ir.VectorType.get((1,), ir.IntegerType.get_signless(16)):
        held = [elements(register)[0] for register in registers]
        registers = [pack([a, b]) for a, b in zip(held[::2], [*held[1::2], held[-1]])]
    return [word for register in registers for word in words(register)]


def listed_keys(p: TileProgram, row: int, length: int) -> list[Value]:
    """Returns the thread's list of a row: the `length` best packed keys, the largest first."""
    if p.tile.shape[1] > p.vocab or p.rows * length >= len(p.columns):
        lows = [p.ones - column - p.first_column for column in p.columns]
        words = [_packed(p, key, low) for key, low in zip(p.keys(row), lows)]
        lower_beyond_row(p, words, p.first_column)
        return best(p, words, length)
    # Within a thread, the columns differ by constants. They order the thread's elements. The rest of the complement is
    # the same for all of these, and is added to the listed ones only.
    last = p.columns[-1]
    words = [_packed(p, key, last - column) for key, column in zip(p.keys(row), p.columns)]
    rest = p.ones - last - p.first_column
    return [word + rest for word in best(p, words, length)]


def _packed(p: TileProgram, key: Value, low: Value | int) -> Value:
    """Returns the key with `low` in place of its lowest bits."""
    return p.bitwise3(lambda key, low, ones: key & ~ones | low, key, low, p.ones)


def lower_beyond_row(p: TileProgram, words: list[Value], first_column: Value) -> None:
    """Sets the packed keys of positions beyond the row to LOWEST."""
    for word, column in zip(words, p.columns):
        column_of_last_lane = column + p.tile.vec * (p.tile.lanes - 1)
        if column_of_last_lane >= p.vocab:
            p.set(word, LOWEST, when=first_column >= max(0, p.vocab - column))


def leave_if_exact(p: TileProgram, near_tie: Value, too_short: Value, leave: Callable[[Value], None]) -> None:
    """Leaves a block if all lists are long enough, and packed keys order all rows of the warp as whole keys would.

    They do if no neighbours nearly tie. They also do if the bits `ones` of all floats are 0.
    """
    leave(~p.any(near_tie | too_short))
    union = p.var(0, "s32")
    for key in itertools.chain(*map(p.keys, range(p.rows))):
        # The key of a negative float has all bits but the sign inverted.
        union = p.bitwise3(lambda union, sign, key: union | (sign ^ key), union, key.sign(), key)
    leave(~p.any((union & p.ones).differs(0) | too_short))


def wide_keys(p: TileProgram, row: int, count: int) -> list[Value]:
    """Returns `count` 64-bit words: the keys of the thread's elements of a row, above complements of their columns.

    Words for positions beyond the row, and words that pad to `count`, are lower than all others.
    """
    wide = []
    for whole, start in zip(p.keys(row), p.columns):
        key, column = p.var(whole), p.first_column + start
        if p.tile.shape[1] > p.vocab:
            beyond = column >= p.vocab
            p.set(key, LOWEST, when=beyond)
            p.set(column, _HIGHEST, when=beyond)
        wide.append(p.join(~column.bits("s32"), key, "s64"))
    return wide + [p.var(_LOWEST_WIDE, "s64") for _ in range(count - len(wide))]


def best(p: Program, words: list[Value], count: int) -> list[Value]:
    """Returns the `count` largest words, the largest first, padded with LOWEST.

    A comparison computes its minimum and its maximum only if a result depends on them.
    """
    comparisons, positions = network(len(words), count)
    out, needed, steps = list(words), set(positions), []
    for i, j in reversed(comparisons):
        if {i, j} & needed:
            steps.append((i, j, i in needed, j in needed))
            needed |= {i, j}
    for i, j, upper, lower in reversed(steps):
        a, b = out[i], out[j]
        if lower:
            out[j] = p.min(a, b)
        if upper:
            out[i] = p.max(a, b)
    return [out[i] for i in positions] + [p.var(LOWEST, "s32") for _ in range(count - len(positions))]


def sorted_bitonic(p: Program, words: list[Value]) -> list[Value]:
    """Returns bitonic words in order, the largest first. Their number is a power of two."""
    out, stride = list(words), len(words) // 2
    while stride:
        for i in range(len(out)):
            if not i & stride:
                a, b = out[i], out[i + stride]
                out[i + stride], out[i] = p.min(a, b), p.max(a, b)
        stride //= 2
    return out


def network(n: int, count: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the comparisons that find the best `count` of n elements, and their final positions, the best first.

    A comparison (i, j) leaves the larger element in position i. This is Batcher's odd-even merge sort (Knuth, volume 3,
    5.3.4), but each list keeps only `count` elements. The best 8 of 32 elements take 248 minima and maxima. A whole
    sort without the unneeded ones takes 280.
    """
    comparisons: list[tuple[int, int]] = []

    def merge(a: list[int], b: list[int]) -> list[int]:
        """Merges two lists of positions that hold sorted elements."""
        if not (a and b):
            return a + b
        if len(a) == len(b) == 1:
            comparisons.append((a[0], b[0]))
            return a + b
        even, odd = merge(a[::2], b[::2]), merge(a[1::2], b[1::2])
        out = even[:1]
        for i, j in zip(odd, even[1:]):
            comparisons.append((i, j))
            out += [i, j]
        pairs = min(len(odd), len(even) - 1)
        return out + odd[pairs:] + even[1 + pairs :]

    def best(positions: list[int]) -> list[int]:
        half = (len(positions) + 1) // 2
        if half == len(positions):
            return positions
        return merge(best(positions[:half]), best(positions[half:]))[:count]

    return comparisons, best(list(range(n)))


# A warp handles pairs of neighbours that nearly tie one by one. All lanes read the two packed keys, then the two whole
# keys, from the lanes that hold them.


def near_ties(p: TileProgram, words: list[Value], count: int) -> Value:
    """Returns a word with bit i set if words i and i + 1 nearly tie: they differ in the bits of the column only.

    Only the first `count` pairs of neighbours of each row are compared.
    """
    bits = p.var(0, "u32")
    first_of_next_lane = p.shuffle(words[0], "down", 1)
    remaining = (count - p.lane * len(words)).bits("s32")  # pairs to compare from this lane's first word on
    for i, (word, other) in enumerate(zip(words, [*words[1:], first_of_next_lane])):
        near = (word ^ other).bits("u32") <= p.ones
        p.update(bits, "or", 1 << i, when=near & (remaining > i))
    return bits


def put_in_order(p: TileProgram, row: int, words: list[Value], pairs: Value) -> None:
    """Exchanges neighbours that are in the wrong order, pair by pair: words i and i + 1 if bit i of `pairs` is set.

    If two pairs share a word, passes are repeated until one pass exchanges nothing.
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
            word, next_word = value_in_lane(p, words, i, lane), value_in_lane(p, words, next_i, next_lane)
            key, next_key = (whole_key(p, row, w, lane) for w in (word, next_word))
            with p.when(key < next_key):
                put(i, lane, next_word)
                put(next_i, next_lane, word)
                p.set(exchanged, True)
        again(exchanged & meet)


def value_in_lane(p: Program, values: list[Value], i: Value, lane: Value) -> Value:
    """Returns value i of a lane. `i` and `lane` must be the same in all lanes of the warp."""
    while len(values) > 1:  # selects by one bit of i at a time
        odd = (i & 1).differs(0)
        unpaired = values[len(values) // 2 * 2 :]
        values = [p.select(odd, b, a) for a, b in zip(values[::2], values[1::2])] + unpaired
        i = i >> 1
    return p.shuffle(values[0], "idx", lane)


def whole_key(p: TileProgram, row: int, word: Value, lane: Value) -> Value:
    """Returns the whole key for packed key `word`, from the row of `lane`. Both must be the same in all lanes."""
    tile, column = p.tile, (~word & p.ones).bits("u32")
    owner = lane & -tile.lanes
    if tile.pieces > 1:
        # column / piece_columns, exact for columns up to 1024
        piece = column * -(-(1 << 20) // tile.piece_columns) >> 20
        column = column - piece * tile.piece_columns
        owner = owner + piece * (tile.lanes // tile.pieces)
    in_step = column & (tile.step_columns - 1)
    step = column >> tile.step_columns.bit_length() - 1
    i = step * tile.vec + (in_step & (tile.vec - 1))
    owner = owner + (in_step >> tile.vec.bit_length() - 1)
    return value_in_lane(p, p.keys(row), i, owner)
