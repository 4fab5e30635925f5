"""Inline PTX that chooses the groups of experts that take part, for rows in registers.

A group is ranked by the sum of its two best entries. A group lies in the elements of some neighbouring lanes, or of one
lane, or a lane has several groups (see `route/plan.py`). The steps:

    each lane            finds the two best entries of its part of each group
    lanes of a group     merge their two best, by shuffles, and add them
    lanes of a row       count for each group how many others are better: a larger sum, or an equal one of a lower group
"""

from pallas_softmax_base._src.gpu import tiles
from pallas_softmax_base._src.gpu.layout import Tile
from pallas_softmax_base._src.gpu.ptx.elements import flip_negative_at_once
from pallas_softmax_base._src.gpu.ptx.inline import array, elements, emit_ptx, inline, pack, thread
from pallas_softmax_base._src.gpu.ptx.program import Program
from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.topk.packed_ptx import LOWEST, TileProgram


def keep_groups(tile: Tile, groups: int, top_groups: int, key):
    """Returns `key`, a tile of sort keys without padding, with LOWEST for elements of groups that take no part."""
    layout, program = tiles.layout(tile), groups_program(tile, groups, top_groups)

    @inline(arg_types=(layout,), return_type=tiles.type_of(tile, "int32"))
    def keep(_, key):
        held = [x for register in key.registers.flat for x in elements(register)]
        elements_of_row = tile.steps * tile.vec
        operands = {f"x{i // elements_of_row}_{i % elements_of_row}": x for i, x in enumerate(held)}
        kept = emit_ptx(
            program, {"thread": thread(), **operands}, {f"kept{name[1:]}": "i32" for name in operands}
        )
        registers = [pack(kept[i : i + tile.vec]) for i in range(0, len(kept), tile.vec)]
        return array(layout.to_mgpu(), tile.shape, registers)

    return keep(key)


def groups_program(tile: Tile, groups: int, top_groups: int) -> TileProgram:
    """Returns the program of `keep_groups`. <kept{row}_{i}> gets key <x{row}_{i}> or LOWEST."""
    p = TileProgram(tile, tile.shape[1])
    lanes = tile.lanes // tile.pieces  # of a group
    own_piece = p.lane >> lanes.bit_length() - 1
    for row in range(p.rows):
        keys = p.keys(row)
        size = len(keys) * tile.pieces // groups  # elements of a group in this lane
        keys_of_groups = [keys[i : i + size] for i in range(0, len(keys), size)]
        sums = [_key_of_two_best(p, keys_of_group, lanes) for keys_of_group in keys_of_groups]
        for group, keys_of_group in enumerate(keys_of_groups):
            better = _count_better(p, sums, group, own_piece, tile.pieces, lanes)
            takes_part = better < float(top_groups)
            # Integer maxima and selects share one pipe, which limits the kernel. This product has another pipe.
            factor, lowest = p.select(takes_part, 1, 0, "s32"), p.select(takes_part, 0, LOWEST, "s32")
            for i, key in enumerate(keys_of_group, group * size):
                kept = p.operand(f"kept{row}_{i}", "s32")
                p += f"mad.lo.s32 {kept}, {key}, {factor}, {lowest};"
    return p


def _key_of_two_best(p: Program, keys: list[Value], lanes: int) -> Value:
    """Returns the sort key of the sum of the two best entries of a group that lies over `lanes` lanes."""
    best, second = _two_best(p, keys)
    distance = 1
    while distance < lanes:
        other = p.shuffle(best, "bfly", distance)
        other_second = None if second is None else p.shuffle(second, "bfly", distance)
        best, second = _two_best_of_pairs(p, (best, second), (other, other_second))
        distance *= 2

    def flip(bits: Value) -> Value:
        return flip_negative_at_once(p, bits, bits.sign())

    total = flip(best).bits("f32")
    if second is not None:
        total = total + flip(second).bits("f32")
    return flip(total.bits("s32"))


def _two_best(p: Program, keys: list[Value]) -> tuple[Value, Value | None]:
    """Returns the largest and the second largest of some keys. A single key has no second."""
    if len(keys) == 1:
        return keys[0], None
    half = len(keys) // 2
    return _two_best_of_pairs(p, _two_best(p, keys[:half]), _two_best(p, keys[half:]))


def _two_best_of_pairs(
    p: Program, a: tuple[Value, Value | None], b: tuple[Value, Value | None]
) -> tuple[Value, Value | None]:
    """Returns the two best of two pairs, each in order."""
    second = p.min(a[0], b[0])
    lower = [key for key in (a[1], b[1]) if key is not None]
    return p.max(a[0], b[0]), p.reduce("max", [second, *lower][::-1])


def _count_better(
    p: Program, sums: list[Value], group: int, own_piece: Value, pieces: int, lanes: int
) -> Value:
    """Returns how many groups of the row are better than the lane's group number `group`, as a float.

    Floats are added in another pipe than integers are compared. `sums` has the sort keys of the sums of the lane's
    groups. The row has `pieces` pieces of `lanes` lanes each; the lane belongs to piece `own_piece`.
    """
    own, better = sums[group], p.var(0.0, "f32")
    for other, sum_ in enumerate(sums):
        if other != group:
            p.increase(better, 1.0, when=sum_ >= own if other < group else sum_ > own)
    for distance in range(1, pieces):
        # The numbers of two pieces differ in a highest bit. The lower number has a 0 there.
        is_higher = own_piece >> distance.bit_length() - 1 & 1
        bound = own - is_higher.bits("s32")
        for sum_ in sums:
            p.increase(better, 1.0, when=p.shuffle(sum_, "bfly", distance * lanes) > bound)
    return better
