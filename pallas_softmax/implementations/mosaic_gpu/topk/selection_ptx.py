"""The steps of `selection` in inline PTX, by one warpgroup: thread t takes vector t of every block."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    LANES,
    NEG_INF,
    PER_THREAD,
    REF,
    SCALAR,
    Code,
    Elements,
    block,
    elements,
    i32,
    inline,
    one,
    per_thread,
    run,
    scalar,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.memory import load_bytes, load_vector
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window
from pallas_softmax.implementations.mosaic_gpu.topk.ranking_ptx import store_candidate

_IN_REGISTERS = 32  # keys of a lane


def clear(slots, counts):
    @inline(arg_types=(REF, REF))
    def clear(_, slots, counts):
        (size,) = ir.MemRefType(slots.type).shape
        code = Code()
        code += f"{BARRIER} .reg .b32 a, n; .reg .pred p;"
        code += "mad.lo.u32 a, <thread>, 16, <slots>; mov.b32 n, <thread>;"
        code += f"again: st.shared.v4.b32 [a], {{0, 0, 0, 0}}; add.u32 a, a, {16 * WARPGROUP};"
        code += f"add.u32 n, n, {WARPGROUP}; setp.lt.u32 p, n, {size // 4}; @p bra again;"
        code += f"setp.eq.u32 p, <thread>, 0; @p st.shared.v2.b32 [<counts>], {{0, 0}}; {BARRIER}"
        run(code, {"slots": slots, "counts": counts, "thread": thread()})

    clear(slots, counts)


def fill(window: Window, gmem, first, smem, extent, mask):
    kind = Elements(smem.dtype)
    end = window.head + window.body

    @inline(arg_types=(REF, REF) + (SCALAR,) * 4 + (() if mask is None else (REF, SCALAR)))
    def fill(_, gmem, smem, first, low, high, origin, *mask):
        first, low, high, origin = map(scalar, (first, low, high, origin))
        bits = ir.IntegerType.get_signless(8 * kind.itemsize)

        def element(at, inside):
            """Its bits: of the row where `inside`, if it is not masked."""
            offset = arith.extui(ir.IntegerType.get_signless(64), arith.addi(first, arith.subi(at, low)))
            of_row = ir.MemRefType(gmem.type).element_type
            x = load_vector(utils.memref_ptr(gmem), of_row, 1, offset, inside, -float("inf"))
            (x,) = elements(vector.bitcast(ir.VectorType.get((1,), bits), x))
            if mask:
                ref, row = mask
                columns = ir.MemRefType(ref.type).shape[1]
                keep = load_bytes(
                    utils.memref_ptr(ref), 1, scalar(row), arith.addi(at, origin), columns, inside
                )
                (keep,) = elements(keep)
                masked = arith.cmpi(arith.CmpIPredicate.eq, keep, utils.c(0, keep.type))
                x = arith.select(arith.andi(inside, masked), utils.c(-1, bits), x)
            return x

        def put(at, limit, of_row):
            """Position `at`, if it is below the limit; -inf unless some of the row may be there."""
            less = arith.CmpIPredicate.slt
            within = arith.cmpi(less, at, i32(limit))
            inside = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, at, low), arith.cmpi(less, at, high))
            x = element(at, arith.andi(inside, within)) if of_row else utils.c(kind.neg_inf, bits)
            code = Code()
            code += ".reg .b32 a; .reg .pred p; setp.ne.b32 p, <within>, 0;"
            code += (
                f"mad.lo.u32 a, <at>, {kind.itemsize}, <smem>; @p st.shared.b{8 * kind.itemsize} [a], <x>;"
            )
            within = arith.extui(ir.IntegerType.get_signless(32), within)
            run(code, {"smem": smem, "at": at, "x": x, "within": within})

        if window.head:
            put(thread(), window.head, True)
        for at in range(end, window.size, WARPGROUP):
            put(arith.addi(thread(), i32(at)), window.size, at < window.head + window.longest)

    fill(gmem, smem, first, *extent, *(mask or ()))


def mark(window: Window, smem, step, blocks):
    kind = Elements(smem.dtype)
    layout = plgpu.Layout.WG_STRIDED((window.block,), vec_size=window.vec)

    @inline(arg_types=(REF, SCALAR, [layout] * len(blocks)))
    def mark(_, smem, step, blocks):
        code = Code()
        block_bytes = window.block * kind.itemsize
        code += ".reg .pred p, q; .reg .b32 a, w, c;"
        code += f"mad.lo.u32 a, <step>, {window.group * block_bytes}, <smem>; mad.lo.u32 a, <thread>, 16, a;"
        code += f"mul.lo.u32 w, <thread>, {window.vec};"
        code += f"mad.lo.u32 w, <step>, {window.group * window.block}, w;"
        operands = {"smem": smem, "step": scalar(step), "thread": thread()}
        word_type = ir.IntegerType.get_signless(32)
        for b, of_block in enumerate(blocks):
            (register,) = of_block.registers.flat
            kept = vector.bitcast(ir.VectorType.get((window.vec // 4,), word_type), register)
            for i in range(window.vec // 4):
                operands[f"kept{b}_{i}"] = vector.extract(kept, dynamic_position=[], static_position=[i])
            code += f"add.u32 c, w, {b * window.block}; setp.ge.u32 q, c, {window.head};"
            code += f"setp.lt.and.u32 q, c, {window.head + window.body}, q;"
            (words,) = kind.vectors(code, "a", [b * block_bytes])
            for j in range(window.vec):  # a byte is 0 or 1: a masked element is or-ed with ones
                ones = "0xffffffff" if not kind.halves else ("0xffff", "0xffff0000")[j % 2]
                word = words[j if not kind.halves else j // 2]
                code += f"and.b32 c, <kept{b}_{j // 4}>, {255 << 8 * (j % 4)}; setp.eq.u32 p, c, 0;"
                code += f"@p or.b32 {word}, {word}, {ones};"
            code += f"@q st.shared.v4.b32 [a+{b * block_bytes}], {{{', '.join(words)}}};"
        run(code, operands)

    mark(smem, step, blocks)


def absorb(window: Window, smem, groups, step, blocks: int, m, d, scale, marked: bool):
    kind = Elements(smem.dtype)

    @inline(
        arg_types=(REF, REF, SCALAR, PER_THREAD, PER_THREAD, SCALAR),
        return_type=(per_thread("float32"), per_thread("float32")),
    )
    def absorb(_, smem, groups, step, m, d, scale):
        code = Code()
        block_bytes = window.block * kind.itemsize
        pools = window.group // window.pool  # of a full step
        code += ".reg .b32 a, g; .reg .f32 s, e; .reg .pred p;"
        code += f"mad.lo.u32 a, <step>, {window.group * block_bytes}, <smem>; mad.lo.u32 a, <thread>, 16, a;"
        code += f"mad.lo.u32 g, <step>, {pools * 4 * WARPGROUP}, <groups>; mad.lo.u32 g, <thread>, 4, g;"
        vectors = kind.vectors(code, "a", [b * block_bytes for b in range(blocks)])
        floats = [kind.floats(code, words, True) for words in vectors] if marked else None
        best = []
        for i in range(0, blocks, window.pool):
            pool = slice(i, i + window.pool)
            value, key = kind.best(code, sum(vectors[pool], []), sum(floats[pool], []) if floats else None)
            code += f"st.shared.b32 [g+{i // window.pool * 4 * WARPGROUP}], {key};"
            best.append(value)
        # a NaN is left out, for d is NaN then
        code += f"max.f32 <new_m>, <m>, {code.tree('max.f32', 'f32', best)};"
        code += f"setp.eq.f32 p, <new_m>, {NEG_INF}; selp.f32 s, 0f00000000, <new_m>, p;"
        terms = []
        for b, words in enumerate(vectors):
            for x in floats[b] if floats else kind.floats(code, words, False):
                code += f"sub.f32 {x}, {x}, s; mul.f32 {x}, {x}, <scale>; ex2.approx.ftz.f32 {x}, {x};"
                terms.append(x)
        code += "sub.f32 e, <m>, s; mul.f32 e, e, <scale>; ex2.approx.ftz.f32 e, e;"
        code += f"fma.rn.f32 <new_d>, <d>, e, {code.tree('add.f32', 'f32', terms)};"
        new_m, new_d = run(
            code,
            {
                "smem": smem,
                "groups": groups,
                "thread": thread(),
                "step": scalar(step),
                "m": one(m),
                "d": one(d),
                "scale": scalar(scale),
            },
            {"new_m": "f32", "new_d": "f32"},
        )
        return block(new_m), block(new_d)

    return absorb(smem, groups, step, m, d, scale)


def threshold(groups, scratch, size: int, k: int):
    """Bisection over the keys: few of them by every warp for itself, without a barrier; many by all together."""
    together = size > LANES * _IN_REGISTERS
    among = WARPGROUP if together else LANES
    each = size // among

    @inline(arg_types=(REF, REF), return_type=plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=SCALAR))
    def threshold(_, groups, scratch):
        code = Code()
        code += f".reg .pred p, q; .reg .b32 a, n, v, lo, hi, mid, gap, parity; mov.b32 parity, 0; {BARRIER}"
        code += f"and.b32 a, <thread>, {among - 1}; mad.lo.u32 a, a, 4, <groups>;"
        keys = code.new("b32", each)
        for i, key in enumerate(keys):
            code += f"ld.shared.b32 {key}, [a+{4 * among * i}];"

        def across(op, value):
            """Over all lanes that hold keys."""
            text = f"redux.sync.{op} {value}, {value}, 0xffffffff;"
            if together:  # in turns in two places: no thread is more than one turn behind
                others = code.new("b32", 4)
                text += f"""shr.u32 a, <thread>, 5; mad.lo.u32 a, parity, 4, a; mad.lo.u32 a, a, 4, <scratch>;
                    and.b32 gap, <thread>, {LANES - 1}; setp.eq.u32 q, gap, 0; @q st.shared.b32 [a], {value};
                    {BARRIER} mad.lo.u32 a, parity, 16, <scratch>; xor.b32 parity, parity, 1;
                    ld.shared.v4.b32 {{{", ".join(others)}}}, [a]; mov.b32 {value}, {others[0]};"""
                text += "".join(f"{op} {value}, {value}, {other};" for other in others[1:])
            return text

        # `parts` sets of each lane's keys: the least of their maxima has enough keys above it
        parts = -(-k // among) if 2 * k <= size else each
        code += f"mov.b32 hi, {code.tree('max.s32', 'b32', list(keys))};"
        low = [code.tree("max.s32", "b32", keys[i::parts]) for i in range(parts)]
        code += f"mov.b32 lo, {code.tree('min.s32', 'b32', low)};"
        code += across("min.s32", "lo") + across("max.s32", "hi")
        # lo is reached by n >= k groups, hi + 1 by fewer than k
        code += f"mov.b32 n, {size};"
        code += "again: setp.lt.s32 p, lo, hi;"
        code += f"setp.gt.and.s32 p, n, {k + max(2, k // 16)}, p; @!p bra done;"
        code += "sub.u32 gap, hi, lo; and.b32 mid, gap, 1; shr.u32 gap, gap, 1;"
        code += "add.u32 mid, mid, gap; add.u32 mid, mid, lo;"
        counts = code.new("b32", 4)
        code += "".join(f"mov.b32 {c}, 0; " for c in counts)
        for i, key in enumerate(keys):
            code += f"setp.ge.s32 q, {key}, mid; @q add.u32 {counts[i % 4]}, {counts[i % 4]}, 1;"
        code += f"mov.b32 v, {code.tree('add.u32', 'b32', list(counts))};" + across("add.u32", "v")
        code += f"setp.ge.s32 q, v, {k}; @q mov.b32 lo, mid; @q mov.b32 n, v; @!q sub.u32 hi, mid, 1;"
        code += "bra again; done: mov.b32 <bound>, lo;" + (BARRIER if together else "")  # scratch is free
        operands = {"groups": groups, "scratch": scratch, "thread": thread()}
        (bound,) = run(code, operands, {"bound": "i32"})
        return fragmented_array.FragmentedArray.splat(bound, (), is_signed=True)

    return threshold(groups, scratch)


def collect(window: Window, smem, groups, hits, slots, counts, bound, extent, *, all_groups: bool):
    kind, capacity = Elements(smem.dtype), slots.size // 2

    @inline(arg_types=(REF,) * 5 + (SCALAR,) * 4)
    def collect(_, smem, groups, hits, slots, counts, bound, low, high, origin):
        code = Code()
        code += ".reg .pred p, q; .reg .b32 a, b, c, i, n, w, id, first, key, left, mask;"
        if all_groups:
            code += f"mov.b32 n, {window.pools * WARPGROUP};"
        else:
            (most,) = ir.MemRefType(hits.type).shape
            _list_groups(code, window, most, capacity)
        code += "mov.b32 i, <thread>; group: setp.ge.u32 p, i, n; @p bra end;"  # a thread takes a group
        if all_groups:
            code += "mad.lo.u32 a, i, 4, <groups>; ld.shared.b32 id, [a]; setp.lt.s32 p, id, <bound>;"
            code += f"@p add.u32 i, i, {WARPGROUP}; @p bra group; mov.b32 id, i;"
        else:
            code += "mad.lo.u32 a, i, 4, <hits>; ld.shared.b32 id, [a];"
        append = _append_few if window.pool * window.vec > 8 else _append_many
        append(code, window, kind, _keys_of_group(code, window, kind), capacity)
        code += f"end: {BARRIER}"
        run(
            code,
            {
                "smem": smem,
                "groups": groups,
                "hits": hits,
                "slots": slots,
                "counts": counts,
                "thread": thread(),
                "bound": scalar(bound),
                "low": scalar(low),
                "high": scalar(high),
                "origin": scalar(origin),
            },
        )

    collect(smem, groups, hits, slots, counts, bound, *extent)


def _list_groups(code: Code, window: Window, most: int, capacity: int) -> None:
    """The numbers of the n groups that reach the bound, in `hits`; to the end if there is no room for them."""
    keys = code.new("b32", min(window.pools, 8))

    def load(i):
        key = keys[i % 8]
        return f"ld.shared.b32 {key}, [b+{4 * WARPGROUP * i}]; setp.ge.s32 p, {key}, <bound>;"

    code += "mad.lo.u32 b, <thread>, 4, <groups>; mov.b32 c, 0;"
    for i in range(window.pools):
        code += load(i) + "@p add.u32 c, c, 1;"
    code += "setp.eq.u32 p, c, 0; @p bra listed; atom.relaxed.cta.shared::cta.add.u32 n, [<counts>+4], c;"
    for i in range(window.pools):
        code += load(i) + f"setp.lt.and.u32 q, n, {most}, p; mad.lo.u32 a, n, 4, <hits>;"
        code += f"add.u32 id, <thread>, {WARPGROUP * i}; @q st.shared.b32 [a], id; @p add.u32 n, n, 1;"
    code += f"listed: {BARRIER} ld.shared.b32 n, [<counts>+4]; setp.le.u32 p, n, {most}; @p bra fits;"
    code += f"setp.eq.u32 p, <thread>, 0; @p st.shared.b32 [<counts>], {capacity + 1}; bra end; fits:"


def _keys_of_group(code: Code, window: Window, kind: Elements) -> list[str]:
    """Of group `id`; `first` is the position of its first element."""
    block_bytes = window.block * kind.itemsize
    code += f"shr.u32 b, id, {WARPGROUP.bit_length() - 1}; mul.lo.u32 b, b, {window.pool};"  # its first block
    code += f"and.b32 first, id, {WARPGROUP - 1}; mul.lo.u32 first, first, {window.vec};"
    code += f"mad.lo.u32 first, b, {window.block}, first; mad.lo.u32 a, first, {kind.itemsize}, <smem>;"
    keys = []
    for j in range(window.pool):
        if j and window.blocks % window.pool:  # the last block stands for those after it, which are outside
            code += f"add.u32 c, b, {j}; min.u32 c, c, {window.blocks - 1}; sub.u32 c, c, b;"
            code += f"mad.lo.u32 c, c, {block_bytes}, a;"
            (words,) = kind.vectors(code, "c", [0])
        else:
            (words,) = kind.vectors(code, "a", [j * block_bytes])
        keys += kind.keys(code, kind.bits(code, words))
    return keys


def _append_few(code: Code, window: Window, kind: Elements, keys: list[str], capacity: int) -> None:
    """Those of up to 32 keys that reach the bound, one after another: as a rule there is one."""
    code += "mov.b32 mask, 0;"
    for i, key in enumerate(keys):
        code += f"setp.ge.s32 p, {key}, <bound>; @p or.b32 mask, mask, {1 << i};"
    code += f"next: setp.eq.u32 p, mask, 0; @p add.u32 i, i, {WARPGROUP}; @p bra group;"
    code += "brev.b32 c, mask; clz.b32 c, c; sub.u32 left, mask, 1; and.b32 mask, mask, left;"
    code += f"shr.u32 w, c, {window.vec.bit_length() - 1}; and.b32 c, c, {window.vec - 1};"
    code += f"mad.lo.u32 w, w, {window.block}, c; add.u32 w, w, first;"
    code += "setp.lt.s32 p, w, <low>; @p bra next; setp.ge.s32 p, w, <high>; @p bra next;"
    code += f"mad.lo.u32 c, w, {kind.itemsize}, <smem>;"  # again: registers have no numbers
    if kind.halves:
        code += ".reg .b16 half; ld.shared.b16 half, [c]; cvt.s32.s16 key, half;"
    else:
        code += "ld.shared.b32 key, [c];"
    kind.keys(code, ["key"])
    code += "add.u32 w, w, <origin>; atom.relaxed.cta.shared::cta.add.u32 c, [<counts>], 1;"
    code += f"setp.ge.u32 p, c, {capacity}; @p bra end;"  # too many: enough is known
    code += store_candidate("c", "key", "w") + "bra next;"


def _append_many(code: Code, window: Window, kind: Elements, keys: list[str], capacity: int) -> None:
    """The same, all together: for many groups of few keys."""
    starts = [b * window.block + j for b in range(window.pool) for j in range(window.vec)]
    chosen = code.new("pred", len(keys))
    code += "mov.b32 c, 0;"
    for key, start, p in zip(keys, starts, chosen):
        code += f"add.s32 w, first, {start}; setp.ge.s32 p, w, <low>; setp.lt.and.s32 p, w, <high>, p;"
        code += f"setp.ge.and.s32 {p}, {key}, <bound>, p; @{p} add.u32 c, c, 1;"
    code += "setp.eq.u32 p, c, 0; @p bra next; atom.relaxed.cta.shared::cta.add.u32 a, [<counts>], c;"
    code += f"add.u32 c, c, a; setp.gt.u32 p, c, {capacity}; @p bra end; add.s32 first, first, <origin>;"
    for i, (key, start, p) in enumerate(zip(keys, starts, chosen)):
        code += f"@!{p} bra skip{i}; add.s32 w, first, {start};"
        code += store_candidate("a", key, "w") + f"add.u32 a, a, 1; skip{i}:"
    code += f"next: add.u32 i, i, {WARPGROUP}; bra group;"


def reaching(window: Window, smem, groups, bound):
    kind = Elements(smem.dtype)

    @inline(arg_types=(REF, REF, SCALAR), return_type=(per_thread("int32"), per_thread("int32")))
    def reaching(_, smem, groups, bound):
        code = Code()
        code += ".reg .pred p; .reg .b32 a, g, i, n, best;"
        code += "mov.b32 <least>, 0; mov.b32 <more>, 0; mad.lo.u32 a, <thread>, 16, <smem>;"
        code += f"mad.lo.u32 g, <thread>, 4, <groups>; mov.b32 i, {window.blocks};"
        code += f"pool: ld.shared.b32 best, [g]; min.u32 n, i, {window.pool}; sub.u32 i, i, n;"
        code += "setp.ge.s32 p, best, <bound>; @p bra again;"
        code += f"mad.lo.u32 a, n, {window.block * kind.itemsize}, a; bra next; again:"
        (words,) = kind.vectors(code, "a", [0])
        for key in kind.keys(code, kind.bits(code, words)):
            code += f"setp.ge.s32 p, {key}, <bound>; @p add.u32 <least>, <least>, 1;"
            code += f"setp.gt.s32 p, {key}, <bound>; @p add.u32 <more>, <more>, 1;"
        code += f"add.u32 a, a, {window.block * kind.itemsize}; sub.u32 n, n, 1;"
        code += f"setp.ne.u32 p, n, 0; @p bra again; next: add.u32 g, g, {4 * WARPGROUP};"
        code += "setp.ne.u32 p, i, 0; @p bra pool;"
        least, more = run(
            code,
            {"smem": smem, "groups": groups, "thread": thread(), "bound": scalar(bound)},
            {"least": "i32", "more": "i32"},
        )
        return block(least, True), block(more, True)

    return reaching(smem, groups, bound)


def ties(window: Window, smem, hits, slots, bound, extent, first, k: int):
    """Block by block: a ballot for each element of a vector, a prefix over the warps through `hits`."""
    kind = Elements(smem.dtype)

    @inline(arg_types=(REF,) * 3 + (SCALAR,) * 5)
    def ties(_, smem, hits, slots, bound, low, high, origin, first):
        code = Code()
        code += ".reg .pred p, q; .reg .b32 a, i, w, n, c, at, base, warp, below, t, parity;"
        code += "mov.b32 base, <first>; mov.b32 parity, 0; mov.u32 below, %lanemask_lt;"
        code += f"shr.u32 warp, <thread>, 5; mul.lo.u32 w, <thread>, {window.vec};"
        code += "mad.lo.u32 a, <thread>, 16, <smem>; mov.b32 i, 0;"
        code += f"again: setp.ge.u32 p, i, {window.blocks}; setp.ge.or.s32 p, base, {k}, p; @p bra end;"
        (words,) = kind.vectors(code, "a", [0])
        keys = kind.keys(code, kind.bits(code, words))
        tied, before = code.new("pred", len(keys)), code.new("b32", 1)[0]
        code += f"mov.b32 n, 0; mov.b32 {before}, 0;"
        for j, (key, p) in enumerate(zip(keys, tied)):
            code += f"add.s32 c, w, {j}; setp.eq.s32 p, {key}, <bound>; setp.ge.and.s32 p, c, <low>, p;"
            code += f"setp.lt.and.s32 {p}, c, <high>, p; vote.sync.ballot.b32 c, {p}, 0xffffffff;"
            code += "popc.b32 t, c; add.u32 n, n, t; and.b32 c, c, below; popc.b32 t, c;"
            code += f"add.u32 {before}, {before}, t;"
        code += "mad.lo.u32 at, parity, 16, <hits>; mad.lo.u32 c, warp, 4, at;"
        code += f"setp.eq.u32 p, below, 0; @p st.shared.b32 [c], n; {BARRIER}"
        totals = code.new("b32", 4)
        code += f"ld.shared.v4.b32 {{{', '.join(totals)}}}, [at];"
        code += f"add.u32 {before}, {before}, base;"
        for warp, total in enumerate(totals):
            code += f"setp.gt.u32 p, warp, {warp}; @p add.u32 {before}, {before}, {total};"
            code += f"add.u32 base, base, {total};"
        for j, p in enumerate(tied):
            code += f"setp.lt.and.s32 q, {before}, {k}, {p}; @!q bra skip{j};"
            code += f"add.s32 c, w, {j}; add.s32 c, c, <origin>;"
            code += store_candidate(before, "<bound>", "c")
            code += f"skip{j}: @{p} add.u32 {before}, {before}, 1;"
        code += f"add.u32 a, a, {window.block * kind.itemsize}; add.u32 w, w, {window.block};"
        code += f"add.u32 i, i, 1; xor.b32 parity, parity, 1; bra again; end: {BARRIER}"
        run(
            code,
            {
                "smem": smem,
                "hits": hits,
                "slots": slots,
                "thread": thread(),
                "bound": scalar(bound),
                "low": scalar(low),
                "high": scalar(high),
                "origin": scalar(origin),
                "first": scalar(first),
            },
        )

    ties(smem, hits, slots, bound, *extent, first)
