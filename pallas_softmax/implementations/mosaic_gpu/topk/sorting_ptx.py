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

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import Code
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.topk import rounds_ptx
from pallas_softmax.implementations.mosaic_gpu.topk.plan import sorted_tile


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Returns the columns of the k best of each row of a tile of keys; the arguments are those of `selection.take`."""
    out = sorted_tile(tile)
    code = _text(tile, vocab, k, rounds_ptx.rows_of_thread(tile), out.steps, narrow)
    return rounds_ptx.insert_in_tile(code, tile, out, key, per_row)


def _text(tile: Tile, vocab: int, k: int, rows: int, held: int, narrow: bool) -> Code:
    """Returns the text of `take`: <column{row}_{i}> gets the column at position lane * held + i of the sorted row."""
    code = Code()
    lane, first_column, low = code.new("b32", 3)
    code += f"and.b32 {lane}, <thread>, {tile.lanes - 1}; mul.lo.u32 {first_column}, {lane}, {tile.vec};"
    bits = rounds_ptx.column_bits(tile, narrow)
    ones = (1 << bits) - 1
    (alike,) = code.new("pred")
    code += f"setp.ne.u32 {alike}, 0, 0;"
    for row in range(rows):
        words = rounds_ptx.packed_keys(code, tile, vocab, row, first_column, bits, narrow)
        words += code.new("b32", held - len(words))
        for word in words[tile.steps * tile.vec :]:
            code += f"mov.b32 {word}, {rounds_ptx.LOWEST};"
        _sort_row(code, words, lane, tile.lanes, "s32")
        for i, word in enumerate(words):
            code += f"not.b32 {low}, {word}; and.b32 <column{row}_{i}>, {low}, {ones};"
        if not narrow:
            _find_alike(code, words, lane, ones, min(k, vocab - 1), alike)
    if not narrow:
        rounds_ptx.branch_if_exact(code, tile, rows, bits, alike, "end")
        for row in range(rows):
            wide = _wide_keys(code, tile, vocab, row, first_column, held)
            _sort_row(code, wide, lane, tile.lanes, "s64")
            for i, word in enumerate(wide):
                code += f"cvt.u32.u64 {low}, {word}; not.b32 <column{row}_{i}>, {low};"
        code += "end:"
    return code


def _wide_keys(code: Code, tile: Tile, vocab: int, row: int, first_column: str, held: int) -> list[str]:
    """Returns registers of 64 bits: each element's key, above the complement of its column."""
    keys, columns = rounds_ptx.load_keys(code, tile, vocab, row, first_column)
    wide = code.new("b64", held)
    (complement,) = code.new("b32")
    for word, key, column in zip(wide, keys, columns):
        code += f"not.b32 {complement}, {column}; mov.b64 {word}, {{{complement}, {key}}};"
    for word in wide[len(keys) :]:
        code += f"mov.b64 {word}, 0x8000000000000000;"
    return wide


def _find_alike(code: Code, words: list[str], lane: str, ones: int, pairs: int, alike: str) -> None:
    """Sets `alike` if the words at some position below `pairs` and at the next one differ in their low bits only."""
    first, next_, low, left = code.new("b32", 4)
    near, counts = code.new("pred", 2)
    code += f"mov.b32 {first}, {words[0]}; shfl.sync.down.b32 {next_}, {first}, 1, 31, 0xffffffff;"
    code += f"mul.lo.u32 {left}, {lane}, {len(words)}; sub.s32 {left}, {pairs}, {left};"  # of this lane
    for i, (word, other) in enumerate(zip(words, [*words[1:], next_])):
        code += f"xor.b32 {low}, {word}, {other}; setp.le.u32 {near}, {low}, {ones};"
        code += f"setp.gt.and.s32 {counts}, {left}, {i}, {near}; or.pred {alike}, {alike}, {counts};"


def _sort_row(code: Code, words: list[str], lane: str, lanes: int, kind: str) -> None:
    """Sorts the words of all lanes of a row, from the largest on; a lane has a power of two of them.

    sort the words of each lane
    for run = 2, 4, ... lanes:                    two sorted runs of half as many
        exchange with the lane opposite in the run, word for word from the other end:
            the first half of the lanes keeps the larger ones, the second half the smaller ones
        for stride = run / 4, ..., 2, 1 lanes:    each half is bitonic
            exchange with lane ^ stride: the lower lane keeps the larger ones
        the same within the lane
    """
    _exchange_in_lane(code, words, rounds_ptx.network(len(words)), kind)
    run = 2
    while run <= lanes:
        _exchange(code, words, lane, run - 1, run // 2, kind, mirrored=True)
        stride = run // 4
        while stride:
            _exchange(code, words, lane, stride, stride, kind, mirrored=False)
            stride //= 2
        _exchange_in_lane(code, words, _bitonic(len(words)), kind)
        run *= 2


def _bitonic(n: int) -> list[tuple[int, int]]:
    """The comparisons that sort n elements that are bitonic."""
    strides = [n >> level for level in range(1, n.bit_length())]
    return [(i, i + stride) for stride in strides for i in range(n) if not i & stride]


def _exchange_in_lane(code: Code, words: list[str], comparisons: list[tuple[int, int]], kind: str) -> None:
    """Of each two words puts the larger one first."""
    (smaller,) = code.new(f"b{kind[1:]}")
    for i, j in comparisons:
        a, b = words[i], words[j]
        code += f"min.{kind} {smaller}, {a}, {b}; max.{kind} {a}, {a}, {b}; mov.b{kind[1:]} {b}, {smaller};"


def _exchange(
    code: Code, words: list[str], lane: str, flip: int, half: int, kind: str, *, mirrored: bool
) -> None:
    """Exchanges words with lane ^ flip; lanes without the bit `half` keep the larger of two, the others the smaller.

    Args:
      mirrored: whether word i meets word -1 - i of the other lane, or word i.
    """
    size = kind[1:]
    others = code.new(f"b{size}", len(words))
    part, low, high = code.new("b32", 3)
    (upper,) = code.new("pred")
    code += f"and.b32 {part}, {lane}, {half}; setp.ne.u32 {upper}, {part}, 0;"
    for other, word in zip(others, words[::-1] if mirrored else words):
        if size == "32":
            code += f"shfl.sync.bfly.b32 {other}, {word}, {flip}, 31, 0xffffffff;"
        else:
            code += (
                f"mov.b64 {{{low}, {high}}}, {word}; shfl.sync.bfly.b32 {low}, {low}, {flip}, 31, 0xffffffff;"
            )
            code += f"shfl.sync.bfly.b32 {high}, {high}, {flip}, 31, 0xffffffff; mov.b64 {other}, {{{low}, {high}}};"
    for word, other in zip(words, others):
        code += f"@{upper} min.{kind} {word}, {word}, {other}; @!{upper} max.{kind} {word}, {word}, {other};"
