"""Inline PTX that orders near ties among winners by their whole keys (see `packed_ptx`).

Two packed keys nearly tie if they differ in the bits of their columns only. A warp handles pairs of neighbours that
nearly tie one by one. All lanes read the two packed keys, then the two whole keys, from the lanes that hold them.
"""

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax._src.topk.packed_ptx import TileProgram


def near_ties(p: TileProgram, words: list[Value], count: int) -> Value:
    """Returns a word with bit i set if words i and i + 1 nearly tie: they differ in the bits of the column only.

    Only the first `count` pairs of neighbours of each row are compared.
    """
    bits = p.var(0, "u32")
    of_next_lane = p.shuffle(words[0], "down", 1)
    remaining = (count - p.lane * len(words)).bits("s32")  # pairs to compare from this lane's first word on
    for i, (word, other) in enumerate(zip(words, [*words[1:], of_next_lane])):
        near = (word ^ other).bits("u32") <= p.ones
        p.update(bits, "or", 1 << i, when=near & (remaining > i))
    return bits


def put_in_order(p: TileProgram, row: int, words: list[Value], pairs: Value) -> None:
    """Exchanges neighbours that are in the wrong order, pair by pair.

    If two pairs share a word, passes are repeated until one pass exchanges nothing.

    Args:
      words: the packed keys of a lane, in order.
      pairs: has bit i set if words i and i + 1 nearly tie.
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
            word, next_word = of_lane(p, words, i, lane), of_lane(p, words, next_i, next_lane)
            key, next_key = (whole_key(p, row, w, lane) for w in (word, next_word))
            with p.when(key < next_key):
                put(i, lane, next_word)
                put(next_i, next_lane, word)
                p.set(exchanged, True)
        again(exchanged & meet)


def of_lane(p: Program, values: list[Value], i: Value, lane: Value) -> Value:
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
    of_step = column & (tile.lanes * tile.vec - 1)
    step = column >> (tile.lanes * tile.vec).bit_length() - 1
    i = step * tile.vec + (of_step & (tile.vec - 1))
    owner = (lane & -tile.lanes) + (of_step >> tile.vec.bit_length() - 1)
    return of_lane(p, p.keys(row), i, owner)
