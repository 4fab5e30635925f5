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

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.ptx.inline import array, elements, emit_ptx, inline, pack, thread
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax._src.topk.candidates import LOWEST_KEY

LOWEST, _HIGHEST = LOWEST_KEY, 2**31 - 1  # the key (packed or not) and the column of positions beyond the row
_LOWEST_WIDE = -(2**63)


def rows_of_thread(tile: Tile) -> int:
    """Returns the number of rows in each thread."""
    return tile.rows // (WARPGROUP // tile.lanes)


def insert_in_tile(code: Program, tile: Tile, out: Tile, held, per_row):
    """Inserts PTX into the kernel. Returns the winners as a tile `out`, and `per_row` spread over such tiles.

    Args:
      code: the program. It reads <x{row}_{i}>: key i of a row of the thread, or 16-bit elements 2 i and 2 i + 1. It
        writes <winner{row}_{i}>: register i of a row of winners.
      held: a tile of 32-bit keys, or of 16-bit elements as integers.
      per_row: tiles that hold one number for each row.
    """
    layout, out_layout = tiles.layout(tile), tiles.layout(out)
    dtypes = ["int32"] + ["float32"] * len(per_row)
    result = tuple(plgpu.ShapeDtypeStruct(out.shape, np.dtype(dtype), layout=out_layout) for dtype in dtypes)
    rows = rows_of_thread(tile)

    @inline(arg_types=(layout, [layout] * len(per_row)), return_type=result)
    def emit(_, held, per_row):
        operands = {"thread": thread()}
        for row, registers in enumerate(np.split(held.registers.flatten(), rows)):
            operands |= {f"x{row}_{i}": word for i, word in enumerate(_words(registers))}
        winners = [f"winner{row}_{i}" for row in range(rows) for i in range(out.steps)]
        outputs = [[pack([x]) for x in emit_ptx(code, operands, dict.fromkeys(winners, "i32"))]]
        for a in per_row:
            of_rows = [elements(register)[0] for register in a.registers.flatten()[:: tile.steps]]
            outputs.append([pack([x]) for x in of_rows for _ in range(out.steps)])
        return tuple(array(out_layout.to_mgpu(), out.shape, registers) for registers in outputs)

    winner, *per_row = emit(held, list(per_row))
    return winner, per_row


def _words(registers) -> list[ir.Value]:
    """Returns the elements in 32-bit words, two 16-bit elements in one. An unpaired last one fills both halves."""
    i32 = ir.IntegerType.get_signless(32)
    held = [x for register in registers for x in elements(register)]
    if held[0].type == i32:
        return held
    if ir.VectorType(registers[0].type).shape[0] > 1:
        words = [vector.bitcast(ir.VectorType.get((len(elements(r)) // 2,), i32), r) for r in registers]
        return [word for of_register in words for word in elements(of_register)]
    pairs = [pack([a, b]) for a, b in zip(held[::2], [*held[1::2], held[-1]])]
    return [elements(vector.bitcast(ir.VectorType.get((1,), i32), pair))[0] for pair in pairs]


def lane_and_first_column(p: Program, tile: Tile) -> tuple[Value, Value]:
    """Returns the number of the thread's lane in its rows, and the column of its first element."""
    lane = p.operand("thread", "u32") & (tile.lanes - 1)
    return lane, tile.first_column(lane)


def winner(p: Program, row: int, i: int) -> Value:
    """Returns the result <winner{row}_{i}>."""
    return p.operand(f"winner{row}_{i}", "s32")


def columns_of_thread(tile: Tile) -> list[int]:
    """Returns the columns of a thread's elements, relative to the first column of its lane."""
    return [step * tile.step_columns + j for step in range(tile.steps) for j in range(tile.vec)]


def keys_of_thread(p: Program, tile: Tile, row: int) -> list[Value]:
    """Returns the operands <x{row}_{i}>: the keys of the thread's elements of a row."""
    return [p.operand(f"x{row}_{i}", "s32") for i in range(tile.steps * tile.vec)]


def column_bits(tile: Tile) -> int:
    """Returns the number of bits of a column in a packed key."""
    return (tile.shape[1] - 1).bit_length()


def packed_keys(p: Program, tile: Tile, vocab: int, row: int, first_column: Value, bits: int) -> list[Value]:
    """Returns packed keys of the thread's elements of a row, and LOWEST for positions beyond the row."""
    ones = (1 << bits) - 1
    packed = []
    for key, column in zip(keys_of_thread(p, tile, row), columns_of_thread(tile)):
        complement = ones - column - first_column
        packed.append(p.bitwise3(lambda key, low, ones: key & ~ones | low, key, complement, ones))
    lower_beyond_row(p, tile, vocab, packed, first_column)
    return packed


def lower_beyond_row(p: Program, tile: Tile, vocab: int, words: list[Value], first_column: Value) -> None:
    """Sets the packed keys of positions beyond the row to LOWEST."""
    for word, column in zip(words, columns_of_thread(tile)):
        if column + tile.vec * (tile.lanes - 1) >= vocab:  # the position of the last lane is beyond the row
            p.set(word, LOWEST, when=first_column >= max(0, vocab - column))


def leave_if_exact(
    p: Program,
    tile: Tile,
    rows: int,
    bits: int,
    near_tie: Value,
    leave: Callable[[Value], None],
    too_short: Value | None = None,
) -> None:
    """Leaves a block if all lists are long enough, and packed keys order all rows of the warp as whole keys would.

    They do if no neighbours nearly tie. They also do if the lowest `bits` bits of all floats are 0.
    """

    def leave_unless(condition):
        leave(~p.any(condition if too_short is None else condition | too_short))

    leave_unless(near_tie)
    union = p.var(0, "s32")
    for key in itertools.chain(*(keys_of_thread(p, tile, row) for row in range(rows))):
        # The key of a negative float has all bits but the sign inverted.
        union = p.bitwise3(lambda union, sign, key: union | (sign ^ key), union, key.sign(), key)
    leave_unless((union & (1 << bits) - 1).differs(0))


def wide_keys(p: Program, tile: Tile, vocab: int, row: int, first_column: Value, count: int) -> list[Value]:
    """Returns `count` 64-bit words: the keys of the thread's elements of a row, above complements of their columns.

    Words for positions beyond the row, and words that pad to `count`, are lower than all others.
    """
    held = []
    for of_element, start in zip(keys_of_thread(p, tile, row), columns_of_thread(tile)):
        key, column = p.var(of_element), first_column + start
        if tile.shape[1] > vocab:
            beyond = column >= vocab
            p.set(key, LOWEST, when=beyond)
            p.set(column, _HIGHEST, when=beyond)
        held.append((column.bits("s32"), key))
    wide = [p.join(~column, key, "s64") for column, key in held]
    return wide + [p.var(_LOWEST_WIDE, "s64") for _ in range(count - len(wide))]


def best(p: Program, words: list[Value], count: int) -> list[Value]:
    """Returns the `count` largest words, the largest first, padded with LOWEST.

    A comparison computes its minimum and its maximum only if a result depends on them.
    """
    comparisons, places = network(len(words), count)
    out, needed, steps = list(words), set(places), []
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
    return [out[i] for i in places] + [p.var(LOWEST, "s32") for _ in range(count - len(places))]


def network(n: int, count: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the comparisons that find the best `count` of n elements, and their final places, the best first.

    A comparison (i, j) leaves the larger element in place i. This is Batcher's odd-even merge sort (Knuth, volume 3,
    5.3.4), but each list keeps only `count` elements. The best 8 of 32 elements take 248 minima and maxima. A whole
    sort without the unneeded ones takes 280.
    """
    comparisons: list[tuple[int, int]] = []

    def merged(a: list[int], b: list[int]) -> list[int]:
        """Merges two lists of places that hold sorted elements."""
        if not (a and b):
            return a + b
        if len(a) == len(b) == 1:
            comparisons.append((a[0], b[0]))
            return a + b
        even, odd = merged(a[::2], b[::2]), merged(a[1::2], b[1::2])
        out = even[:1]
        for i, j in zip(odd, even[1:]):
            comparisons.append((i, j))
            out += [i, j]
        pairs = min(len(odd), len(even) - 1)
        return out + odd[pairs:] + even[1 + pairs :]

    def best(places: list[int]) -> list[int]:
        half = (len(places) + 1) // 2
        return merged(best(places[:half]), best(places[half:]))[:count] if half < len(places) else places

    return comparisons, best(list(range(n)))
