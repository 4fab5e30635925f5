"""The order of candidates, and of short rows, in inline PTX: by counting, sorting, or one after another."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir

from pallas_softmax.implementations.mosaic_gpu.device import memory
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    LANES,
    REF,
    SCALAR,
    Code,
    array,
    elements,
    inline,
    pack,
    run,
    scalar,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.topk.plan import winners_tile

_COUNTED = 256  # up to so many candidates counting is faster than sorting


def store_candidate(at: str, key: str, position: str) -> str:
    """To a slot: the position's complement below, the key as an unsigned number above."""
    return f"""{{ .reg .b32 to, low, high; .reg .b64 both;
        mad.lo.u32 to, {at}, 8, <slots>; xor.b32 high, {key}, 0x80000000; not.b32 low, {position};
        mov.b64 both, {{low, high}}; st.shared.b64 [to], both; }}"""


def enlist(slots, counts, keys, indices, row, first, n, bound):
    """The list must be empty, and its barrier past."""
    capacity = slots.size // 2

    @inline(arg_types=(REF,) * 4 + (SCALAR,) * 4)
    def enlist(_, slots, counts, keys, indices, row, first, n, bound):
        (columns,) = ir.MemRefType(keys.type).shape[1:]
        code = Code()
        code += ".reg .pred p; .reg .b32 i, slot; .reg .b64 at, a;"
        code += f"mul.wide.u32 at, <row>, {columns}; cvt.u64.u32 a, <first>;"
        code += "add.u64 at, at, a; cvt.u64.u32 a, <thread>; add.u64 at, at, a; shl.b64 at, at, 2;"
        each = capacity // WARPGROUP
        found, position = code.new("b32", min(each, 8)), code.new("b32", min(each, 8))
        for start in range(0, each, 8):  # the loads of a batch first
            batch = list(enumerate(range(start, min(start + 8, each))))
            for j, i in batch:
                code += f"add.u32 i, <thread>, {i * WARPGROUP}; setp.lt.u32 p, i, <n>;"
                code += f"mov.b32 {found[j]}, 0x80000000; mov.b32 {position[j]}, 0; add.u64 a, at, <keys>;"
                code += f"@p ld.global.b32 {found[j]}, [a+{4 * WARPGROUP * i}]; add.u64 a, at, <indices>;"
                code += f"@p ld.global.b32 {position[j]}, [a+{4 * WARPGROUP * i}];"
            for j, i in batch:
                code += f"add.u32 i, <thread>, {i * WARPGROUP}; setp.lt.u32 p, i, <n>;"
                code += f"setp.ge.and.s32 p, {found[j]}, <bound>, p; @!p bra next{i};"
                code += "atom.relaxed.cta.shared::cta.add.u32 slot, [<counts>], 1;"
                code += store_candidate("slot", found[j], position[j]) + f"next{i}:"
        code += BARRIER
        operands = {"slots": slots, "counts": counts, "keys": keys, "indices": indices, "thread": thread()}
        operands |= {"row": scalar(row), "first": scalar(first), "n": scalar(n), "bound": scalar(bound)}
        run(code, operands)

    enlist(slots, counts, keys, indices, row, first, n, bound)


def rank(slots, n, best, k: int, padded: int):
    """A slot's rank is the number of better ones; of many, by sorting them."""

    @inline(arg_types=(REF, SCALAR, REF))
    def rank(_, slots, n, best):
        (words,) = ir.MemRefType(slots.type).shape
        code = Code()
        code += ".reg .pred p; .reg .b32 own, at, to, rank, a, key, position; .reg .b64 w, x<4>;"
        if words // 2 > _COUNTED:
            code += f"setp.gt.u32 p, <n>, {_COUNTED}; @p bra sort;"
        code += """mov.b32 own, <thread>; mad.lo.u32 to, <n>, 8, <slots>; next: setp.ge.u32 p, own, <n>; @p bra end;
            mad.lo.u32 a, own, 8, <slots>; ld.shared.b64 w, [a]; mov.b32 rank, 0; mov.b32 at, <slots>;
            count: ld.shared.v2.b64 {x0, x1}, [at]; ld.shared.v2.b64 {x2, x3}, [at+16];"""
        code += "".join(f"setp.gt.u64 p, x{j}, w; @p add.u32 rank, rank, 1; " for j in range(4))
        code += "add.u32 at, at, 32; setp.lt.u32 p, at, to; @p bra count;"
        _write(code, ["w"], "rank", k, padded)
        code += f"add.u32 own, own, {WARPGROUP}; bra next;"
        if words // 2 > _COUNTED:
            code += "sort:"
            values = _sort(code, words // 2)
            code += f"mul.lo.u32 rank, <thread>, {len(values)};"
            _write(code, values, "rank", k, padded)
        code += f"end: {BARRIER}"
        run(code, {"slots": slots, "best": best, "n": scalar(n), "thread": thread()})

    rank(slots, n, best)


def _write(code: Code, values: list[str], rank: str, k: int, padded: int) -> None:
    """Key and index of the slots whose ranks start at `rank`, if they are below k."""
    code += f"mad.lo.u32 a, {rank}, 4, <best>;"
    for i, value in enumerate(values):
        code += f"setp.lt.s32 p, {rank}, {k - i}; mov.b64 {{position, key}}, {value};"
        code += "not.b32 position, position; xor.b32 key, key, 0x80000000;"
        code += f"@p st.shared.b32 [a+{4 * i}], key; @p st.shared.b32 [a+{4 * (padded + i)}], position;"


def _sort(code: Code, size: int) -> list[str]:
    """Bitonic, of all slots, best first; the registers of a thread, which holds as many neighbours.

    A block whose turn is to be sorted the other way round is complemented meanwhile, so that all are alike.
    """
    each = size // WARPGROUP
    values = code.new("b64", each)
    (other,) = code.new("b64")
    code += ".reg .b32 base, size, stride, part, low, high; .reg .b64 flip; .reg .pred q, upper;"
    code += "mad.lo.u32 base, <thread>, 8, <slots>;"
    for i, v in enumerate(values):  # in any order, without bank conflicts
        code += f"ld.shared.b64 {v}, [base+{8 * WARPGROUP * i}];"

    def order(a, b):
        """The larger in a."""
        larger = f"setp.lt.u64 q, {a}, {b}; selp.b64 {other}, {b}, {a}, q;"
        return larger + f"selp.b64 {b}, {a}, {b}, q; mov.b64 {a}, {other};"

    def merge(length):
        """Each bitonic run of `length` registers."""
        text = ""
        while length > 1:
            length //= 2
            for i in range(each):
                if not i & length:
                    text += order(values[i], values[i + length])
        return text

    def flip(condition):
        """Complements the values of threads for which it holds."""
        return condition + "selp.b64 flip, -1, 0, q;" + "".join(f"xor.b64 {v}, {v}, flip;" for v in values)

    length = 2
    while length < each:  # within a thread: every other run the other way round
        for start in range(0, each, length):
            held, half = values[start : start + length], length
            while half > 1:
                half //= 2
                for i in range(length):
                    if not i & half:
                        pair = (held[i], held[i + half])
                        code += order(*(pair if start // length % 2 == 0 else pair[::-1]))
        length *= 2
    # runs of `size` threads' values: size is in threads
    odd = "and.b32 part, <thread>, size; setp.ne.u32 q, part, 0;"
    code += f"mov.b32 size, 1; {flip(odd)} {merge(each)} {flip(odd)}"
    code += f"grow: shl.b32 size, size, 1; {flip(odd)} shr.u32 stride, size, 1;"
    code += "step: and.b32 part, <thread>, stride; setp.ne.u32 upper, part, 0; setp.ge.u32 p, stride, 32; @p bra far;"

    def keep(value):
        """The larger of two in the lower thread."""
        return (
            f"setp.lt.u64 q, {value}, {other}; xor.pred q, q, upper; selp.b64 {value}, {other}, {value}, q;"
        )

    for v in values:
        code += f"mov.b64 {{low, high}}, {v}; shfl.sync.bfly.b32 low, low, stride, 31, 0xffffffff;"
        code += f"shfl.sync.bfly.b32 high, high, stride, 31, 0xffffffff; mov.b64 {other}, {{low, high}};"
        code += keep(v)
    code += f"bra stepped; far: {BARRIER}"
    for i, v in enumerate(values):
        code += f"st.shared.b64 [base+{8 * WARPGROUP * i}], {v};"
    code += f"{BARRIER} xor.b32 part, <thread>, stride; mad.lo.u32 a, part, 8, <slots>;"
    for i, v in enumerate(values):
        code += f"ld.shared.b64 {other}, [a+{8 * WARPGROUP * i}]; {keep(v)}"
    code += "stepped: shr.u32 stride, stride, 1; setp.ne.u32 p, stride, 0; @p bra step;"
    code += f"{merge(each)} {flip(odd)} setp.lt.u32 p, size, {WARPGROUP}; @p bra grow;"
    return values


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Rounds: the largest key of the row, by shuffles; of those that have it the first; which is taken out.

    Narrow keys are taken together with the complement of their column, so all differ.
    """
    out = winners_tile(tile, k)
    layout, out_layout = memory.tile_layout(tile), memory.tile_layout(out)
    kinds = ["int32", "int32"] + ["float32"] * len(per_row)
    result = tuple(plgpu.ShapeDtypeStruct(out.shape, np.dtype(kind), layout=out_layout) for kind in kinds)
    slots = tile.rows // (WARPGROUP // tile.lanes)  # rows of a thread
    gone, most = "0x80000000", "0x7fffffff"

    @inline(arg_types=(layout, [layout] * len(per_row)), return_type=result)
    def take(_, key, per_row):
        code = Code()
        code += ".reg .pred p; .reg .b32 lane, at, round, t;"
        code += f"and.b32 lane, <thread>, {tile.lanes - 1}; mul.lo.u32 at, lane, {tile.vec};"
        operands, results = {"thread": thread()}, {}
        each = tile.steps * tile.vec
        keys, columns = (
            [code.new("b32", each) for _ in range(slots)],
            [code.new("b32", each) for _ in range(slots)],
        )
        starts = [s * tile.lanes * tile.vec + j for s in range(tile.steps) for j in range(tile.vec)]
        registers = list(key.registers.flat)
        for row in range(slots):
            held = sum((elements(r) for r in registers[row * tile.steps : (row + 1) * tile.steps]), [])
            for i, (x, start) in enumerate(zip(held, starts)):
                operands[f"x{row}_{i}"] = x
                code += f"mov.b32 {keys[row][i]}, <x{row}_{i}>; add.u32 {columns[row][i]}, at, {start};"
                if narrow:
                    code += (
                        f"shl.b32 {keys[row][i]}, {keys[row][i]}, 16; sub.u32 t, 0xffff, {columns[row][i]};"
                    )
                    code += f"or.b32 {keys[row][i]}, {keys[row][i]}, t;"
                if tile.shape[1] > vocab:
                    code += f"setp.ge.u32 p, {columns[row][i]}, {vocab};"
                    code += f"@p mov.b32 {keys[row][i]}, {gone}; @p mov.b32 {columns[row][i]}, {most};"
            for j in range(out.steps):
                results |= {f"key{row}_{j}": "i32", f"index{row}_{j}": "i32"}

        def across(op, values):
            """Text: over the lanes of each row, of one value a row."""
            if tile.lanes == LANES:
                return "".join(f"redux.sync.{op} {x}, {x}, 0xffffffff;" for x in values)
            text, others = "", code.new("b32", len(values))
            for offset in (1 << i for i in range(tile.lanes.bit_length() - 1)):
                for x, other in zip(values, others):
                    text += f"shfl.sync.bfly.b32 {other}, {x}, {offset}, 31, 0xffffffff;"
                for x, other in zip(values, others):
                    text += f"{op} {x}, {x}, {other};"
            return text

        best, first = code.new("b32", slots), code.new("b32", slots)
        code += "mov.b32 round, 0; next:"
        for row in range(slots):
            code += f"mov.b32 {best[row]}, {code.tree('max.s32', 'b32', list(keys[row]))};"
        code += across("max.s32", best)
        if narrow:
            for row in range(slots):
                code += f"not.b32 {first[row]}, {best[row]}; and.b32 {first[row]}, {first[row]}, 0xffff;"
                for x in keys[row]:
                    code += f"setp.eq.s32 p, {x}, {best[row]}; @p mov.b32 {x}, {gone};"
                code += f"shr.s32 {best[row]}, {best[row]}, 16;"
        else:
            for row in range(slots):
                code += f"mov.b32 {first[row]}, {most};"
                for x, column in zip(keys[row], columns[row]):
                    code += (
                        f"setp.eq.s32 p, {x}, {best[row]}; @p min.s32 {first[row]}, {first[row]}, {column};"
                    )
            code += across("min.s32", first)
            for row in range(slots):
                for x, column in zip(keys[row], columns[row]):
                    code += f"setp.eq.s32 p, {column}, {first[row]};"
                    code += f"@p mov.b32 {x}, {gone}; @p mov.b32 {column}, {most};"
        for j in range(out.steps):
            code += f"sub.u32 t, round, {j * tile.lanes}; setp.eq.u32 p, t, lane;"
            for row in range(slots):
                code += f"@p mov.b32 <key{row}_{j}>, {best[row]}; @p mov.b32 <index{row}_{j}>, {first[row]};"
        code += f"add.u32 round, round, 1; setp.lt.u32 p, round, {k}; @p bra next;"
        got = run(code, operands, results)
        outputs = [[pack([x]) for x in got[i::2]] for i in (0, 1)]
        for a in per_row:
            firsts = [elements(r)[0] for r in list(a.registers.flat)[:: tile.steps]]
            outputs.append([pack([x]) for x in firsts for _ in range(out.steps)])
        return tuple(array(out_layout.to_mgpu(), out.shape, registers) for registers in outputs)

    key, index, *per_row = take(key, list(per_row))
    return (key, index), per_row
