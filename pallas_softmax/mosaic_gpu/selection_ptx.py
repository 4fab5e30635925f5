"""The steps of `selection` in inline PTX, a CTA of one warpgroup: thread t holds vector t of every block."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_softmax.mosaic_gpu import direct, launch
from pallas_softmax.mosaic_gpu.direct import (
    REF,
    SCALAR,
    asm,
    elements,
    i32,
    inline,
    load_bytes,
    load_vector,
    pack,
    scalar,
    thread,
)
from pallas_softmax.mosaic_gpu.launch import WARPGROUP, Tile, Window

_LANES = 32
_NEG_INF = "0fFF800000"
_BARRIER = f"bar.sync 1, {WARPGROUP};"  # that of the warpgroup: Mosaic numbers them from 1
_IN_REGISTERS = 32  # keys of a lane
_PER_THREAD: Any = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def _per_thread(dtype: str):
    return plgpu.ShapeDtypeStruct((WARPGROUP,), np.dtype(dtype), layout=_PER_THREAD)


def _one(block) -> ir.Value:
    """This thread's element of a block of WARPGROUP."""
    (register,) = block.registers.flat
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _block(value: ir.Value, signed: bool | None = None):
    """The inverse of `_one`."""
    register = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    registers = np.array([register], dtype=object).reshape(_PER_THREAD.to_mgpu().registers_shape((WARPGROUP,)))
    return fragmented_array.FragmentedArray(
        _registers=registers, _layout=_PER_THREAD.to_mgpu(), _is_signed=signed
    )


class _Code:
    """PTX text, and the registers it has named so far."""

    def __init__(self):
        self.lines: list[str] = []
        self.registers: list[str] = []

    def __iadd__(self, line: str):
        self.lines.append(line)
        return self

    def new(self, kind: str, count: int = 1) -> list[str]:
        """Names of fresh registers of this type."""
        prefix = f"r{len(self.registers)}_"
        self.registers.append(f".reg .{kind} {prefix}<{count}>;")
        return [f"{prefix}{i}" for i in range(count)]

    def tree(self, op: str, kind: str, names: list[str]) -> str:
        """The register with the names reduced in pairs."""
        while len(names) > 1:
            pairs = self.new(kind, len(names) // 2)
            for out, a, b in zip(pairs, names[::2], names[1::2]):
                self += f"{op} {out}, {a}, {b};"
            names = pairs + names[len(pairs) * 2 :]
        return names[0]

    def __str__(self) -> str:
        return "\n".join(self.registers + self.lines)


class _Elements:
    """How elements of a dtype lie in registers: words of a vector, floats, keys."""

    def __init__(self, dtype):
        self.name = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]
        self.itemsize = np.dtype(dtype).itemsize
        self.halves = self.itemsize == 2
        self.neg_inf = {"f32": 0xFF800000, "bf16": 0xFF80, "f16": 0xFC00}[self.name]

    def vectors(self, code: _Code, address: str, offsets) -> list[list[str]]:
        """Loads of 16 bytes; the words of each."""
        out = []
        for offset in offsets:
            words = code.new("b32", 4)
            code += f"ld.shared.v4.b32 {{{', '.join(words)}}}, [{address}+{offset}];"
            out.append(words)
        return out

    def bits(self, code: _Code, words: list[str]) -> list[str]:
        """Each element's bits as a signed number."""
        if not self.halves:
            return words
        out = code.new("b32", 2 * len(words))
        for word, low, high in zip(words, out[::2], out[1::2]):
            code += f"shl.b32 {low}, {word}, 16; shr.s32 {low}, {low}, 16; shr.s32 {high}, {word}, 16;"
        return out

    def floats(self, code: _Code, words: list[str], marked: bool) -> list[str]:
        """Each element in float32; with `marked`, -inf in place of the lowest key's."""
        if self.name == "f32":
            out = code.new("f32", len(words))
            for word, x in zip(words, out):
                code += f"mov.b32 {x}, {word};"
            bits = words
        else:
            out = code.new("f32", 2 * len(words))
            for word, low, high in zip(words, out[::2], out[1::2]):
                if self.name == "bf16":
                    (t,) = code.new("b32")
                    code += f"shl.b32 {t}, {word}, 16; mov.b32 {low}, {t};"
                    code += f"and.b32 {t}, {word}, 0xffff0000; mov.b32 {high}, {t};"
                else:
                    h = code.new("b16", 2)
                    code += f"mov.b32 {{{h[0]}, {h[1]}}}, {word};"
                    code += f"cvt.f32.f16 {low}, {h[0]}; cvt.f32.f16 {high}, {h[1]};"
            bits = self.bits(code, words) if marked else []
        for x, b in zip(out, bits if marked else []):
            (p,) = code.new("pred")
            code += f"setp.eq.s32 {p}, {b}, -1; selp.f32 {x}, {_NEG_INF}, {x}, {p};"
        return out

    def keys(self, code: _Code, bits: list[str]) -> list[str]:
        """From the bits; in place."""
        (t,) = code.new("b32")
        for b in bits:
            code += f"shr.s32 {t}, {b}, 31; and.b32 {t}, {t}, {0x7FFF if self.halves else 0x7FFFFFFF}; xor.b32 {b}, {b}, {t};"
        return bits

    def best(self, code: _Code, words: list[str], floats: list[str] | None) -> tuple[str, str]:
        """The largest element as a float and as a key, a NaN of the highest key if there is any NaN.

        It is taken from the floats if they are given, for they may differ from the words.
        """
        (value,) = code.new("f32")
        (key,) = code.new("b32")
        h = code.new("b16", 2)
        if self.halves and floats is None:
            packed = code.tree(f"max.NaN.{self.name}x2", "b32", words)
            code += f"mov.b32 {{{h[0]}, {h[1]}}}, {packed}; max.NaN.{self.name} {h[0]}, {h[0]}, {h[1]};"
            code += f"cvt.s32.s16 {key}, {h[0]};"
            code += f"mov.b32 {value}, {{z16, {h[0]}}};" if self.name == "bf16" else f"cvt.f32.f16 {value}, {h[0]};"
        else:
            code += f"mov.f32 {value}, {code.tree('max.NaN.f32', 'f32', floats or self.floats(code, words, False))};"
            if self.halves:
                code += f"cvt.rn.{self.name}.f32 {h[0]}, {value}; cvt.s32.s16 {key}, {h[0]};"
            else:
                code += f"mov.b32 {key}, {value};"
        return value, self.keys(code, [key])[0]


def _run(code: _Code, operands: dict[str, Any], results: dict[str, str] | None = None) -> list[Any]:
    return asm(".reg .b16 z16; mov.b16 z16, 0;\n" + str(code), operands, results)


def clear(slots, counts):
    @inline(arg_types=(REF, REF))
    def clear(_, slots, counts):
        (size,) = ir.MemRefType(slots.type).shape
        code = _Code()
        code += f"{_BARRIER} .reg .b32 a, n; .reg .pred p;"
        code += "mad.lo.u32 a, <thread>, 16, <slots>; mov.b32 n, <thread>;"
        code += f"again: st.shared.v4.b32 [a], {{0, 0, 0, 0}}; add.u32 a, a, {16 * WARPGROUP};"
        code += f"add.u32 n, n, {WARPGROUP}; setp.lt.u32 p, n, {size // 4}; @p bra again;"
        code += f"setp.eq.u32 p, <thread>, 0; @p st.shared.v2.b32 [<counts>], {{0, 0}}; {_BARRIER}"
        _run(code, {"slots": slots, "counts": counts, "thread": thread()})

    clear(slots, counts)


def absorb(window: Window, smem, groups, step, blocks: int, m, d, scale, marked: bool):
    elements = _Elements(smem.dtype)

    @inline(
        arg_types=(REF, REF, SCALAR, _PER_THREAD, _PER_THREAD, SCALAR),
        return_type=(_per_thread("float32"), _per_thread("float32")),
    )
    def absorb(_, smem, groups, step, m, d, scale):
        code = _Code()
        block_bytes = window.block * elements.itemsize
        pools = window.group // window.pool  # of a full step
        code += ".reg .b32 a, g; .reg .f32 s, e; .reg .pred p;"
        code += f"mad.lo.u32 a, <step>, {window.group * block_bytes}, <smem>; mad.lo.u32 a, <thread>, 16, a;"
        code += f"mad.lo.u32 g, <step>, {pools * 4 * WARPGROUP}, <groups>; mad.lo.u32 g, <thread>, 4, g;"
        vectors = elements.vectors(code, "a", [b * block_bytes for b in range(blocks)])
        floats = [elements.floats(code, words, True) for words in vectors] if marked else None
        best = []
        for i in range(0, blocks, window.pool):
            pool = slice(i, i + window.pool)
            value, key = elements.best(code, sum(vectors[pool], []), sum(floats[pool], []) if floats else None)
            code += f"st.shared.b32 [g+{i // window.pool * 4 * WARPGROUP}], {key};"
            best.append(value)
        # a NaN is left out, for d is NaN then
        code += f"max.f32 <new_m>, <m>, {code.tree('max.f32', 'f32', best)};"
        code += f"setp.eq.f32 p, <new_m>, {_NEG_INF}; selp.f32 s, 0f00000000, <new_m>, p;"
        terms = []
        for b, words in enumerate(vectors):
            for x in floats[b] if floats else elements.floats(code, words, False):
                code += f"sub.f32 {x}, {x}, s; mul.f32 {x}, {x}, <scale>; ex2.approx.ftz.f32 {x}, {x};"
                terms.append(x)
        code += "sub.f32 e, <m>, s; mul.f32 e, e, <scale>; ex2.approx.ftz.f32 e, e;"
        code += f"fma.rn.f32 <new_d>, <d>, e, {code.tree('add.f32', 'f32', terms)};"
        new_m, new_d = _run(
            code,
            {
                "smem": smem,
                "groups": groups,
                "thread": thread(),
                "step": scalar(step),
                "m": _one(m),
                "d": _one(d),
                "scale": scalar(scale),
            },
            {"new_m": "f32", "new_d": "f32"},
        )
        return _block(new_m), _block(new_d)

    return absorb(smem, groups, step, m, d, scale)


def threshold(groups, scratch, size: int, k: int):
    """Bisection over the keys: few of them by every warp for itself, without a barrier; many by all together."""
    together = size > _LANES * _IN_REGISTERS
    among = WARPGROUP if together else _LANES
    each = size // among

    @inline(arg_types=(REF, REF), return_type=plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=SCALAR))
    def threshold(_, groups, scratch):
        code = _Code()
        code += f".reg .pred p, q; .reg .b32 a, n, v, lo, hi, mid, gap, parity; mov.b32 parity, 0; {_BARRIER}"
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
                    and.b32 gap, <thread>, {_LANES - 1}; setp.eq.u32 q, gap, 0; @q st.shared.b32 [a], {value};
                    {_BARRIER} mad.lo.u32 a, parity, 16, <scratch>; xor.b32 parity, parity, 1;
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
        code += "bra again; done: mov.b32 <bound>, lo;" + (_BARRIER if together else "")  # scratch is free
        operands = {"groups": groups, "scratch": scratch, "thread": thread()}
        (bound,) = _run(code, operands, {"bound": "i32"})
        return fragmented_array.FragmentedArray.splat(bound, (), is_signed=True)

    return threshold(groups, scratch)


def _store_candidate(at: str, key: str, position: str) -> str:
    """To a slot: the position's complement below, the key as an unsigned number above."""
    return f"""{{ .reg .b32 to, low, high; .reg .b64 both;
        mad.lo.u32 to, {at}, 8, <slots>; xor.b32 high, {key}, 0x80000000; not.b32 low, {position};
        mov.b64 both, {{low, high}}; st.shared.b64 [to], both; }}"""


def collect(window: Window, smem, groups, hits, slots, counts, bound, extent, *, all_groups: bool):
    elements, capacity = _Elements(smem.dtype), slots.size // 2

    @inline(arg_types=(REF,) * 5 + (SCALAR,) * 4)
    def collect(_, smem, groups, hits, slots, counts, bound, low, high, origin):
        per_pool, block_bytes = window.pool * window.vec, window.block * elements.itemsize
        total = window.pools * WARPGROUP
        (most,) = ir.MemRefType(hits.type).shape
        code = _Code()
        code += ".reg .pred p, q; .reg .b32 a, b, c, i, n, w, id, first, key, left, mask, own;"
        code += "mad.lo.u32 own, <thread>, 4, <groups>;"
        if all_groups:
            code += f"mov.b32 n, {total};"
        else:
            # the groups that reach the bound, in a list
            keys = code.new("b32", min(window.pools, 8))
            code += "mov.b32 c, 0;"
            for i in range(window.pools):
                key = keys[i % 8]
                code += f"ld.shared.b32 {key}, [own+{4 * WARPGROUP * i}]; setp.ge.s32 p, {key}, <bound>;"
                code += "@p add.u32 c, c, 1;"
            code += "setp.eq.u32 p, c, 0; @p bra listed;"
            code += "atom.relaxed.cta.shared::cta.add.u32 n, [<counts>+4], c;"
            for i in range(window.pools):
                key = keys[i % 8]
                code += f"ld.shared.b32 {key}, [own+{4 * WARPGROUP * i}]; setp.ge.s32 p, {key}, <bound>;"
                code += f"setp.lt.and.u32 q, n, {most}, p; mad.lo.u32 a, n, 4, <hits>;"
                code += f"add.u32 id, <thread>, {WARPGROUP * i}; @q st.shared.b32 [a], id; @p add.u32 n, n, 1;"
            code += f"listed: {_BARRIER} ld.shared.b32 n, [<counts>+4]; setp.le.u32 p, n, {most}; @p bra fits;"
            code += "setp.ne.u32 p, <thread>, 0; @p bra end;"
            code += f"st.shared.b32 [<counts>], {capacity + 1}; bra end;"
            code += "fits:"
        # a thread takes a group: its elements that reach the bound, as bits
        code += "mov.b32 i, <thread>;"
        code += "group: setp.ge.u32 p, i, n; @p bra end;"
        if all_groups:
            code += f"mad.lo.u32 a, i, 4, <groups>; ld.shared.b32 id, [a]; setp.lt.s32 p, id, <bound>;"
            code += f"@p add.u32 i, i, {WARPGROUP}; @p bra group; mov.b32 id, i;"
        else:
            code += "mad.lo.u32 a, i, 4, <hits>; ld.shared.b32 id, [a];"
        code += f"shr.u32 b, id, {WARPGROUP.bit_length() - 1}; mul.lo.u32 b, b, {window.pool};"  # its first block
        code += f"and.b32 first, id, {WARPGROUP - 1}; mul.lo.u32 first, first, {window.vec};"
        code += f"mad.lo.u32 first, b, {window.block}, first;"
        code += f"mad.lo.u32 a, first, {elements.itemsize}, <smem>; mov.b32 mask, 0;"
        vectors = []
        for j in range(window.pool):  # a pool may end early: its last block stands for those after it
            if j and window.blocks % window.pool:
                (at,) = code.new("b32")
                code += f"add.u32 {at}, b, {j}; min.u32 {at}, {at}, {window.blocks - 1}; sub.u32 {at}, {at}, b;"
                code += f"mad.lo.u32 {at}, {at}, {block_bytes}, a;"
                vectors += elements.vectors(code, at, [0])
            else:
                vectors += elements.vectors(code, "a", [j * block_bytes])
        keys = [elements.keys(code, elements.bits(code, _copy(code, words))) for words in vectors]
        keys = sum(keys, [])
        assert len(keys) == per_pool <= 32
        starts = [b * window.block + j for b in range(window.pool) for j in range(window.vec)]
        if per_pool <= 8:  # all at once, for many groups
            code += "mov.b32 c, 0;"
            chosen = code.new("pred", per_pool)
            for key, start, p in zip(keys, starts, chosen):
                code += f"add.s32 w, first, {start}; setp.ge.s32 p, w, <low>; setp.lt.and.s32 p, w, <high>, p;"
                code += f"setp.ge.and.s32 {p}, {key}, <bound>, p; @{p} add.u32 c, c, 1;"
            code += f"setp.eq.u32 p, c, 0; @p bra next; atom.relaxed.cta.shared::cta.add.u32 a, [<counts>], c;"
            code += f"add.u32 c, c, a; setp.gt.u32 p, c, {capacity}; @p bra end; add.s32 first, first, <origin>;"
            for i, (key, start, p) in enumerate(zip(keys, starts, chosen)):
                code += f"@!{p} bra skip{i}; add.s32 w, first, {start};"
                code += _store_candidate("a", key, "w") + f"add.u32 a, a, 1; skip{i}:"
            code += f"next: add.u32 i, i, {WARPGROUP}; bra group;"
        else:
            for i, key in enumerate(keys):
                code += f"setp.ge.s32 p, {key}, <bound>; @p or.b32 mask, mask, {1 << i};"
            code += f"next: setp.eq.u32 p, mask, 0; @p add.u32 i, i, {WARPGROUP}; @p bra group;"
            code += "brev.b32 c, mask; clz.b32 c, c; sub.u32 left, mask, 1; and.b32 mask, mask, left;"
            code += f"shr.u32 w, c, {window.vec.bit_length() - 1}; and.b32 c, c, {window.vec - 1};"
            code += f"mad.lo.u32 w, w, {window.block}, c; add.u32 w, w, first;"
            code += "setp.lt.s32 p, w, <low>; @p bra next; setp.ge.s32 p, w, <high>; @p bra next;"
            code += f"mad.lo.u32 c, w, {elements.itemsize}, <smem>;"
            if elements.halves:
                code += ".reg .b16 half; ld.shared.b16 half, [c]; cvt.s32.s16 key, half;"
            else:
                code += "ld.shared.b32 key, [c];"
            elements.keys(code, ["key"])
            code += "add.u32 w, w, <origin>; atom.relaxed.cta.shared::cta.add.u32 c, [<counts>], 1;"
            code += f"setp.ge.u32 p, c, {capacity}; @p bra end;"  # too many: enough is known
            code += _store_candidate("c", "key", "w") + "bra next;"
        code += f"end: {_BARRIER}"
        _run(
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


def _copy(code: _Code, words: list[str]) -> list[str]:
    out = code.new("b32", len(words))
    for a, b in zip(out, words):
        code += f"mov.b32 {a}, {b};"
    return out


def reaching(window: Window, smem, groups, bound):
    elements = _Elements(smem.dtype)

    @inline(arg_types=(REF, REF, SCALAR), return_type=(_per_thread("int32"), _per_thread("int32")))
    def reaching(_, smem, groups, bound):
        code = _Code()
        code += ".reg .pred p; .reg .b32 a, g, i, n, best;"
        code += "mov.b32 <least>, 0; mov.b32 <more>, 0; mad.lo.u32 a, <thread>, 16, <smem>;"
        code += f"mad.lo.u32 g, <thread>, 4, <groups>; mov.b32 i, {window.blocks};"
        code += f"pool: ld.shared.b32 best, [g]; min.u32 n, i, {window.pool}; sub.u32 i, i, n;"
        code += "setp.ge.s32 p, best, <bound>; @p bra again;"
        code += f"mad.lo.u32 a, n, {window.block * elements.itemsize}, a; bra next; again:"
        (words,) = elements.vectors(code, "a", [0])
        for key in elements.keys(code, elements.bits(code, words)):
            code += f"setp.ge.s32 p, {key}, <bound>; @p add.u32 <least>, <least>, 1;"
            code += f"setp.gt.s32 p, {key}, <bound>; @p add.u32 <more>, <more>, 1;"
        code += f"add.u32 a, a, {window.block * elements.itemsize}; sub.u32 n, n, 1;"
        code += f"setp.ne.u32 p, n, 0; @p bra again; next: add.u32 g, g, {4 * WARPGROUP};"
        code += "setp.ne.u32 p, i, 0; @p bra pool;"
        least, more = _run(
            code,
            {"smem": smem, "groups": groups, "thread": thread(), "bound": scalar(bound)},
            {"least": "i32", "more": "i32"},
        )
        return _block(least, True), _block(more, True)

    return reaching(smem, groups, bound)


def ties(window: Window, smem, hits, slots, bound, extent, first, k: int):
    """Block by block: a ballot for each element of a vector, a prefix over the warps through `hits`."""
    elements = _Elements(smem.dtype)

    @inline(arg_types=(REF,) * 3 + (SCALAR,) * 5)
    def ties(_, smem, hits, slots, bound, low, high, origin, first):
        code = _Code()
        code += ".reg .pred p, q; .reg .b32 a, i, w, n, c, at, base, warp, below, t, parity;"
        code += "mov.b32 base, <first>; mov.b32 parity, 0; mov.u32 below, %lanemask_lt;"
        code += f"shr.u32 warp, <thread>, 5; mul.lo.u32 w, <thread>, {window.vec};"
        code += "mad.lo.u32 a, <thread>, 16, <smem>; mov.b32 i, 0;"
        code += f"again: setp.ge.u32 p, i, {window.blocks}; setp.ge.or.s32 p, base, {k}, p; @p bra end;"
        (words,) = elements.vectors(code, "a", [0])
        keys = elements.keys(code, elements.bits(code, words))
        tied, before = code.new("pred", len(keys)), code.new("b32", 1)[0]
        code += f"mov.b32 n, 0; mov.b32 {before}, 0;"
        for j, (key, p) in enumerate(zip(keys, tied)):
            code += f"add.s32 c, w, {j}; setp.eq.s32 p, {key}, <bound>; setp.ge.and.s32 p, c, <low>, p;"
            code += f"setp.lt.and.s32 {p}, c, <high>, p; vote.sync.ballot.b32 c, {p}, 0xffffffff;"
            code += f"popc.b32 t, c; add.u32 n, n, t; and.b32 c, c, below; popc.b32 t, c;"
            code += f"add.u32 {before}, {before}, t;"
        code += "mad.lo.u32 at, parity, 16, <hits>; mad.lo.u32 c, warp, 4, at;"
        code += f"setp.eq.u32 p, below, 0; @p st.shared.b32 [c], n; {_BARRIER}"
        totals = code.new("b32", 4)
        code += f"ld.shared.v4.b32 {{{', '.join(totals)}}}, [at];"
        code += f"add.u32 {before}, {before}, base;"
        for warp, total in enumerate(totals):
            code += f"setp.gt.u32 p, warp, {warp}; @p add.u32 {before}, {before}, {total};"
            code += f"add.u32 base, base, {total};"
        for j, p in enumerate(tied):
            code += f"setp.lt.and.s32 q, {before}, {k}, {p}; @!q bra skip{j};"
            code += f"add.s32 c, w, {j}; add.s32 c, c, <origin>;"
            code += _store_candidate(before, "<bound>", "c")
            code += f"skip{j}: @{p} add.u32 {before}, {before}, 1;"
        code += f"add.u32 a, a, {window.block * elements.itemsize}; add.u32 w, w, {window.block};"
        code += f"add.u32 i, i, 1; xor.b32 parity, parity, 1; bra again; end: {_BARRIER}"
        _run(
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


def enlist(slots, counts, keys, indices, row, first, n, bound):
    """The list must be empty, and its barrier past."""
    capacity = slots.size // 2

    @inline(arg_types=(REF,) * 4 + (SCALAR,) * 4)
    def enlist(_, slots, counts, keys, indices, row, first, n, bound):
        (columns,) = ir.MemRefType(keys.type).shape[1:]
        code = _Code()
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
                code += _store_candidate("slot", found[j], position[j]) + f"next{i}:"
        code += _BARRIER
        operands = {"slots": slots, "counts": counts, "keys": keys, "indices": indices, "thread": thread()}
        operands |= {"row": scalar(row), "first": scalar(first), "n": scalar(n), "bound": scalar(bound)}
        _run(code, operands)

    enlist(slots, counts, keys, indices, row, first, n, bound)


_COUNTED = 256  # up to so many candidates counting is faster than sorting


def rank(slots, n, best, k: int, padded: int):
    """A slot's rank is the number of better ones; of many, by sorting them."""

    @inline(arg_types=(REF, SCALAR, REF))
    def rank(_, slots, n, best):
        (words,) = ir.MemRefType(slots.type).shape
        code = _Code()
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
        code += f"end: {_BARRIER}"
        _run(code, {"slots": slots, "best": best, "n": scalar(n), "thread": thread()})

    rank(slots, n, best)


def _write(code: _Code, values: list[str], rank: str, k: int, padded: int) -> None:
    """Key and index of the slots whose ranks start at `rank`, if they are below k."""
    code += f"mad.lo.u32 a, {rank}, 4, <best>;"
    for i, value in enumerate(values):
        code += f"setp.lt.s32 p, {rank}, {k - i}; mov.b64 {{position, key}}, {value};"
        code += "not.b32 position, position; xor.b32 key, key, 0x80000000;"
        code += f"@p st.shared.b32 [a+{4 * i}], key; @p st.shared.b32 [a+{4 * (padded + i)}], position;"


def _sort(code: _Code, size: int) -> list[str]:
    """Bitonic, of all slots, best first; the registers of a thread, which holds as many neighbours.

    A block whose turn is to be sorted the other way round is complemented meanwhile, so that all are alike.
    """
    each = size // WARPGROUP
    values = code.new("b64", each)
    (other,) = code.new("b64")
    code += f".reg .b32 base, size, stride, part, low, high; .reg .b64 flip; .reg .pred q, upper;"
    code += "mad.lo.u32 base, <thread>, 8, <slots>;"
    for i, v in enumerate(values):  # in any order, without bank conflicts
        code += f"ld.shared.b64 {v}, [base+{8 * WARPGROUP * i}];"

    def order(a, b):
        """The larger in a."""
        code_ = f"setp.lt.u64 q, {a}, {b}; selp.b64 {other}, {b}, {a}, q; selp.b64 {b}, {a}, {b}, q;"
        return code_ + f"mov.b64 {a}, {other};"

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
            run, half = values[start : start + length], length
            while half > 1:
                half //= 2
                for i in range(length):
                    if not i & half:
                        pair = (run[i], run[i + half])
                        code += order(*(pair if start // length % 2 == 0 else pair[::-1]))
        length *= 2
    # runs of `size` threads' values: size is in threads
    odd = "and.b32 part, <thread>, size; setp.ne.u32 q, part, 0;"
    code += f"mov.b32 size, 1; {flip(odd)} {merge(each)} {flip(odd)}"
    code += f"grow: shl.b32 size, size, 1; {flip(odd)} shr.u32 stride, size, 1;"
    code += "step: and.b32 part, <thread>, stride; setp.ne.u32 upper, part, 0; setp.ge.u32 p, stride, 32; @p bra far;"

    def keep(value):
        """The larger of two in the lower thread."""
        return f"setp.lt.u64 q, {value}, {other}; xor.pred q, q, upper; selp.b64 {value}, {other}, {value}, q;"

    for v in values:
        code += f"mov.b64 {{low, high}}, {v}; shfl.sync.bfly.b32 low, low, stride, 31, 0xffffffff;"
        code += f"shfl.sync.bfly.b32 high, high, stride, 31, 0xffffffff; mov.b64 {other}, {{low, high}};"
        code += keep(v)
    code += f"bra stepped; far: {_BARRIER}"
    for i, v in enumerate(values):
        code += f"st.shared.b64 [base+{8 * WARPGROUP * i}], {v};"
    code += f"{_BARRIER} xor.b32 part, <thread>, stride; mad.lo.u32 a, part, 8, <slots>;"
    for i, v in enumerate(values):
        code += f"ld.shared.b64 {other}, [a+{8 * WARPGROUP * i}]; {keep(v)}"
    code += "stepped: shr.u32 stride, stride, 1; setp.ne.u32 p, stride, 0; @p bra step;"
    code += f"{merge(each)} {flip(odd)} setp.lt.u32 p, size, {WARPGROUP}; @p bra grow;"
    return values


def fill(window: Window, gmem, first, smem, extent, mask):
    elements = _Elements(smem.dtype)
    masks = [] if mask is None else [*mask]

    @inline(arg_types=(REF, REF) + (SCALAR,) * 4 + (() if mask is None else (REF, SCALAR)))
    def fill(_, gmem, smem, first, low, high, origin, *mask):
        source, element = utils.memref_ptr(gmem), ir.MemRefType(gmem.type).element_type
        first, low, high, origin = map(scalar, (first, low, high, origin))
        less = arith.CmpIPredicate.slt
        i64 = ir.IntegerType.get_signless(64)

        def put(at, loaded, within):
            """Position `at`, where `within`."""
            inside = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, at, low), arith.cmpi(less, at, high))
            inside = arith.andi(inside, within)
            code = _Code()
            if loaded:
                offset = arith.extui(i64, arith.addi(first, arith.subi(at, low)))
                x = load_vector(source, element, 1, offset, inside, -float("inf"))
                x = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(8 * elements.itemsize)), x)
                x = vector.extract(x, dynamic_position=[], static_position=[0])
                if mask:
                    ref, row = mask
                    column = arith.addi(at, origin)
                    (kept,) = [
                        vector.extract(b, dynamic_position=[], static_position=[0])
                        for b in [_byte(ref, scalar(row), column, inside)]
                    ]
                    zero = utils.c(0, kept.type)
                    masked = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.eq, kept, zero))
                    x = arith.select(masked, utils.c(-1, x.type), x)
            else:
                x = utils.c(elements.neg_inf, ir.IntegerType.get_signless(8 * elements.itemsize))
            bits = f"b{8 * elements.itemsize}"
            code += ".reg .b32 a; .reg .pred p; setp.ne.b32 p, <within>, 0;"
            code += f"mad.lo.u32 a, <at>, {elements.itemsize}, <smem>; @p st.shared.{bits} [a], <x>;"
            within = arith.extui(ir.IntegerType.get_signless(32), within)
            _run(code, {"smem": smem, "at": at, "x": x, "within": within})

        if window.head:
            put(thread(), True, arith.cmpi(less, thread(), i32(window.head)))
        start = window.head + window.body
        for at in range(start, window.size, WARPGROUP):
            position = arith.addi(thread(), i32(at))
            put(position, at < window.head + window.longest, arith.cmpi(less, position, i32(window.size)))

    fill(gmem, smem, first, *extent, *masks)


def _byte(ref, row, column, inside):
    (columns,) = ir.MemRefType(ref.type).shape[1:]
    return load_bytes(utils.memref_ptr(ref), 1, row, column, columns, inside)


def mark(window: Window, smem, step, blocks):
    elements = _Elements(smem.dtype)
    layout = plgpu.Layout.WG_STRIDED((window.block,), vec_size=window.vec)

    @inline(arg_types=(REF, SCALAR, [layout] * len(blocks)))
    def mark(_, smem, step, blocks):
        code = _Code()
        block_bytes = window.block * elements.itemsize
        code += ".reg .pred p, q; .reg .b32 a, w, c, d;"
        code += f"mad.lo.u32 a, <step>, {window.group * block_bytes}, <smem>; mad.lo.u32 a, <thread>, 16, a;"
        code += f"mul.lo.u32 w, <thread>, {window.vec};"
        code += f"mad.lo.u32 w, <step>, {window.group * window.block}, w;"
        operands = {"smem": smem, "step": scalar(step), "thread": thread()}
        i32_ = ir.IntegerType.get_signless(32)
        for b, block in enumerate(blocks):
            (register,) = block.registers.flat
            kept = vector.bitcast(ir.VectorType.get((window.vec // 4,), i32_), register)
            for i in range(window.vec // 4):
                operands[f"kept{b}_{i}"] = vector.extract(kept, dynamic_position=[], static_position=[i])
            code += f"add.u32 c, w, {b * window.block}; setp.ge.u32 q, c, {window.head};"
            code += f"setp.lt.and.u32 q, c, {window.head + window.body}, q;"
            (words,) = elements.vectors(code, "a", [b * block_bytes])
            for j in range(window.vec):  # a byte is 0 or 1: a masked element is or-ed with ones
                ones = "0xffffffff" if not elements.halves else ("0xffff", "0xffff0000")[j % 2]
                word = words[j if not elements.halves else j // 2]
                code += f"and.b32 c, <kept{b}_{j // 4}>, {255 << 8 * (j % 4)}; setp.eq.u32 p, c, 0;"
                code += f"@p or.b32 {word}, {word}, {ones};"
            code += f"@q st.shared.v4.b32 [a+{b * block_bytes}], {{{', '.join(words)}}};"
        _run(code, operands)

    mark(smem, step, blocks)


def take(tile: Tile, vocab: int, k: int, key, per_row, narrow: bool):
    """Rounds: the largest key of the row, by shuffles; of those that have it the first; which is taken out.

    Narrow keys are taken together with the complement of their column, so all differ.
    """
    out = launch.winners(tile, k)
    layout, out_layout = direct.tile_layout(tile), direct.tile_layout(out)
    kinds = ["int32", "int32"] + ["float32"] * len(per_row)
    result = tuple(plgpu.ShapeDtypeStruct(out.shape, np.dtype(kind), layout=out_layout) for kind in kinds)
    slots = tile.rows // (WARPGROUP // tile.lanes)  # rows of a thread
    gone, most = "0x80000000", "0x7fffffff"

    @inline(arg_types=(layout, [layout] * len(per_row)), return_type=result)
    def take(_, key, per_row):
        code = _Code()
        code += ".reg .pred p; .reg .b32 lane, at, round, t;"
        code += f"and.b32 lane, <thread>, {tile.lanes - 1}; mul.lo.u32 at, lane, {tile.vec};"
        operands, results = {"thread": thread()}, {}
        each = tile.steps * tile.vec
        keys, columns = [code.new("b32", each) for _ in range(slots)], [code.new("b32", each) for _ in range(slots)]
        starts = [s * tile.lanes * tile.vec + j for s in range(tile.steps) for j in range(tile.vec)]
        registers = list(key.registers.flat)
        for row in range(slots):
            held = sum((elements(r) for r in registers[row * tile.steps : (row + 1) * tile.steps]), [])
            for i, (x, start) in enumerate(zip(held, starts)):
                operands[f"x{row}_{i}"] = x
                code += f"mov.b32 {keys[row][i]}, <x{row}_{i}>; add.u32 {columns[row][i]}, at, {start};"
                if narrow:
                    code += f"shl.b32 {keys[row][i]}, {keys[row][i]}, 16; sub.u32 t, 0xffff, {columns[row][i]};"
                    code += f"or.b32 {keys[row][i]}, {keys[row][i]}, t;"
                if tile.shape[1] > vocab:
                    code += f"setp.ge.u32 p, {columns[row][i]}, {vocab};"
                    code += f"@p mov.b32 {keys[row][i]}, {gone}; @p mov.b32 {columns[row][i]}, {most};"
            for j in range(out.steps):
                results |= {f"key{row}_{j}": "i32", f"index{row}_{j}": "i32"}

        def across(op, values):
            """Text: over the lanes of each row, of one value a row."""
            if tile.lanes == _LANES:
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
                    code += f"setp.eq.s32 p, {x}, {best[row]}; @p min.s32 {first[row]}, {first[row]}, {column};"
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
        got = _run(code, operands, results)
        outputs = [[pack([x]) for x in got[i::2]] for i in (0, 1)]
        for a in per_row:
            firsts = [elements(r)[0] for r in list(a.registers.flat)[:: tile.steps]]
            outputs.append([pack([x]) for x in firsts for _ in range(out.steps)])
        return tuple(direct.array(out_layout.to_mgpu(), out.shape, registers) for registers in outputs)

    key, index, *per_row = take(key, list(per_row))
    return (key, index), per_row
