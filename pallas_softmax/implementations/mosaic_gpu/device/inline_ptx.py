"""Inline code: arguments, registers, and PTX made from text."""

import re
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP

REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)  # any layout stands for a scalar argument
inline: Any = plgpu.inline_mgpu  # called without its first parameter, the context
PER_THREAD: Any = SCALAR  # of blocks with an element for each thread
LANES = 32
BARRIER = f"bar.sync 1, {WARPGROUP};"  # that of the warpgroup: Mosaic numbers them from 1
NEG_INF = "0fFF800000"


def i32(value: int) -> ir.Value:
    """A constant."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def scalar(x) -> ir.Value:
    """The value of a scalar argument of inline code."""
    return x.registers.item()


def thread() -> ir.Value:
    """The number of this thread in its warpgroup."""
    return arith.remui(utils.thread_idx(), i32(WARPGROUP))


def array(layout, shape, registers: list[ir.Value]):
    """The registers of this thread, in their order, as an array."""
    out = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    signed = True if isinstance(ir.VectorType(registers[0].type).element_type, ir.IntegerType) else None
    return fragmented_array.FragmentedArray(_registers=out, _layout=layout, _is_signed=signed)


def pack(parts: list[Any]) -> ir.Value:
    """A register of these elements."""
    return vector.from_elements(ir.VectorType.get((len(parts),), parts[0].type), parts)


def elements(register: ir.Value) -> list[ir.Value]:
    """Of a register."""
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def per_thread(dtype: str):
    """The type of a block with an element for each thread."""
    return plgpu.ShapeDtypeStruct((WARPGROUP,), np.dtype(dtype), layout=PER_THREAD)


def one(block) -> ir.Value:
    """This thread's element of a block of WARPGROUP."""
    (register,) = block.registers.flat
    return vector.extract(register, dynamic_position=[], static_position=[0])


def block(value: ir.Value, signed: bool | None = None):
    """The inverse of `one`."""
    register = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    registers = np.array([register], dtype=object).reshape(PER_THREAD.to_mgpu().registers_shape((WARPGROUP,)))
    return fragmented_array.FragmentedArray(
        _registers=registers, _layout=PER_THREAD.to_mgpu(), _is_signed=signed
    )


def asm(code: str, operands: dict[str, ir.Value], results: dict[str, str] | None = None) -> list[Any]:
    """Inline PTX, in which <name> stands for an operand or a result; the results, whose types are given.

    An operand in memory is its address. A result may be written before all operands are read.
    """
    results = results or {}
    values = [utils.memref_ptr(v) if isinstance(v.type, ir.MemRefType) else v for v in operands.values()]
    numbers = {name: f"${i}" for i, name in enumerate([*results, *operands])}
    code = re.sub(r"<([a-z]\w*)>", lambda match: numbers[match[1]], code)
    letters = {"i32": "r", "f32": "f", "i64": "l", "i16": "h", "!llvm.ptr<3>": "r", "!llvm.ptr": "l"}
    letters |= {"!llvm.ptr<1>": "l"}
    words = [ir.Type.parse(word) for word in results.values()]
    if not words:
        result: Any = ir.Type.parse("!llvm.void")
    else:
        result = words[0] if len(words) == 1 else llvm.StructType.get_literal(words)
    out = llvm.inline_asm(
        result,
        values,
        f"{{ {code} }}",
        ",".join([f"=&{letters[str(w)]}" for w in words] + [letters[str(v.type)] for v in values]),
        has_side_effects=True,
    )
    return [out] if len(words) == 1 else [llvm.extractvalue(w, out, [i]) for i, w in enumerate(words)]


class Code:
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


class Elements:
    """Text that takes the elements of a dtype from shared memory: as words of 32 bits, floats, keys."""

    def __init__(self, dtype):
        self.name = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]
        self.itemsize = np.dtype(dtype).itemsize
        self.halves = self.itemsize == 2
        self.neg_inf = {"f32": 0xFF800000, "bf16": 0xFF80, "f16": 0xFC00}[self.name]

    def vectors(self, code: Code, address: str, offsets) -> list[list[str]]:
        """Loads of 16 bytes; the words of each."""
        out = []
        for offset in offsets:
            words = code.new("b32", 4)
            code += f"ld.shared.v4.b32 {{{', '.join(words)}}}, [{address}+{offset}];"
            out.append(words)
        return out

    def bits(self, code: Code, words: list[str]) -> list[str]:
        """Each element's bits as a signed number."""
        if not self.halves:
            return words
        out = code.new("b32", 2 * len(words))
        for word, low, high in zip(words, out[::2], out[1::2]):
            code += f"shl.b32 {low}, {word}, 16; shr.s32 {low}, {low}, 16; shr.s32 {high}, {word}, 16;"
        return out

    def floats(self, code: Code, words: list[str], marked: bool) -> list[str]:
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
            code += f"setp.eq.s32 {p}, {b}, -1; selp.f32 {x}, {NEG_INF}, {x}, {p};"
        return out

    def keys(self, code: Code, bits: list[str]) -> list[str]:
        """From the bits; in place."""
        (t,) = code.new("b32")
        for b in bits:
            code += f"shr.s32 {t}, {b}, 31; and.b32 {t}, {t}, {0x7FFF if self.halves else 0x7FFFFFFF};"
            code += f"xor.b32 {b}, {b}, {t};"
        return bits

    def best(self, code: Code, words: list[str], floats: list[str] | None) -> tuple[str, str]:
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
            to_float = f"mov.b32 {value}, {{z16, {h[0]}}};", f"cvt.f32.f16 {value}, {h[0]};"
            code += to_float[self.name == "f16"]
        else:
            floats = floats or self.floats(code, words, marked=False)
            code += f"mov.f32 {value}, {code.tree('max.NaN.f32', 'f32', floats)};"
            if self.halves:
                code += f"cvt.rn.{self.name}.f32 {h[0]}, {value}; cvt.s32.s16 {key}, {h[0]};"
            else:
                code += f"mov.b32 {key}, {value};"
        return value, self.keys(code, [key])[0]


def run(code: Code, operands: dict[str, Any], results: dict[str, str] | None = None) -> list[Any]:
    """`asm` of the text."""
    return asm(".reg .b16 z16; mov.b16 z16, 0;\n" + str(code), operands, results)
