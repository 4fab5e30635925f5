"""Inline code: functions of one thread, written in MLIR and PTX, that stand in a Pallas kernel as one operation.

A function decorated with `inline` is called in the kernel with arrays and references. While it is traced it sees
what one thread has of them: registers, which are MLIR vectors, and memory references. Its PTX is text, in which
<name> stands for an operand or a result, and which declares all its other registers itself: `Code` takes it in
strings, and `ptx_values` writes it as arithmetic.
"""

import re
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP

# Typed Any, since pyright does not know that the decorator adds the function's first parameter.
inline: Any = plgpu.inline_mgpu

# Types of arguments of inline code: a reference; a scalar, for which any layout will do; a block of an element for
# each thread.
REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
PER_THREAD: Any = SCALAR

LANES = 32  # threads of a warp
WARPS = WARPGROUP // LANES  # of a CTA
WHOLE_WARP = "0xffffffff"  # the lanes that take part in an instruction of a warp: all of them
BARRIER = f"bar.sync 1, {WARPGROUP};"  # at which all threads of the CTA meet; Mosaic numbers barriers from 1


def float_literal(value: float) -> str:
    """A float32 as PTX writes it: 0f, and the eight hexadecimal digits of its bits."""
    return f"0f{np.float32(value).view(np.uint32):08X}"


ZERO, ONE = float_literal(0), float_literal(1)
INF, NEG_INF, NAN = float_literal(np.inf), float_literal(-np.inf), float_literal(np.nan)

# How LLVM names the kind of register that holds a value of an MLIR type.
_CONSTRAINTS = {
    "i16": "h",
    "i32": "r",
    "i64": "l",
    "f32": "f",
    "!llvm.ptr": "l",
    "!llvm.ptr<1>": "l",  # device memory
    "!llvm.ptr<3>": "r",  # shared memory
}


# --- Values -------------------------------------------------------------------------------------------


def i32(value: int) -> ir.Value:
    """Returns a constant of 32 bits."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def thread() -> ir.Value:
    """Returns the number of this thread in its warpgroup, 0 to 127."""
    return arith.remui(utils.thread_idx(), i32(WARPGROUP))


def scalar(argument) -> ir.Value:
    """Returns the value of an argument of type SCALAR."""
    return argument.registers.item()


def array(layout, shape: tuple[int, ...], registers: list[ir.Value]):
    """Returns an array, for inline code to return, of this thread's registers in the order of the layout."""
    out = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    signed = True if isinstance(ir.VectorType(registers[0].type).element_type, ir.IntegerType) else None
    return fragmented_array.FragmentedArray(_registers=out, _layout=layout, _is_signed=signed)


def pack(values: list[Any]) -> ir.Value:
    """Returns a register, which is an MLIR vector, that holds these elements."""
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def elements(register: ir.Value) -> list[ir.Value]:
    """Returns the elements of a register."""
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def per_thread_type(dtype: str) -> plgpu.ShapeDtypeStruct:
    """Returns the type, for inline code to return, of a block with an element for each thread."""
    return plgpu.ShapeDtypeStruct((WARPGROUP,), np.dtype(dtype), layout=PER_THREAD)


def own_element(block) -> ir.Value:
    """Returns this thread's element of an argument of type PER_THREAD."""
    (register,) = block.registers.flat
    return vector.extract(register, dynamic_position=[], static_position=[0])


def as_block(element: ir.Value, signed: bool | None = None):
    """Returns the block, for inline code to return, in which this is the thread's element, signed or not."""
    registers = np.array([pack([element])], dtype=object)
    layout = PER_THREAD.to_mgpu()
    return fragmented_array.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((WARPGROUP,))), _layout=layout, _is_signed=signed
    )


# --- PTX ----------------------------------------------------------------------------------------------


class Code:
    """PTX text that is being written, and the registers that it has named so far.

        code = Code()
        total, term = code.new("f32", 2)
        code += f"add.f32 {total}, {total}, {term};"

    A function that writes a piece of it makes registers of its own by `new`, and takes the names of all others, so
    that no two pieces share a register unknown to each other.
    """

    def __init__(self):
        self.lines: list[str] = []
        self.declarations: list[str] = []
        self.labels = 0

    def __iadd__(self, line: str):
        self.lines.append(line)
        return self

    def new(self, kind: str, count: int = 1) -> list[str]:
        """Names of fresh registers of a type of PTX, like "b32" or "pred"."""
        prefix = f"r{len(self.declarations)}_"
        self.declarations.append(f".reg .{kind} {prefix}<{count}>;")
        return [f"{prefix}{i}" for i in range(count)]

    def one(self, kind: str) -> str:
        """The name of a fresh register."""
        return self.new(kind)[0]

    def constant(self, kind: str, value: str | int) -> str:
        """The name of a fresh register, which the text sets to a number here."""
        register = self.one(kind)
        self += f"mov.{kind} {register}, {value};"
        return register

    def label(self, name: str) -> str:
        """A fresh label, which starts with this name."""
        self.labels += 1
        return f"{name}{self.labels}"

    def tree(self, op: str, kind: str, names: list[str]) -> str:
        """Reduces registers by a binary instruction, in pairs and pairs of pairs; the register with the result."""
        while len(names) > 1:
            pairs = self.new(kind, len(names) // 2)
            for out, a, b in zip(pairs, names[::2], names[1::2]):
                self += f"{op} {out}, {a}, {b};"
            names = pairs + names[len(pairs) * 2 :]
        return names[0]

    def __str__(self) -> str:
        return "\n".join(self.declarations + self.lines)


def emit_ptx(code: Code, operands: dict[str, ir.Value], results: dict[str, str] | None = None) -> list[Any]:
    """Puts PTX into the inline code that is being traced, in a scope of its own.

    Args:
      code: the text, in which <name> stands for an operand or a result.
      operands: values by name; a memory reference stands for its address.
      results: types of MLIR, like "i32", by name. The text may write a result before it has read all operands.

    Returns:
      The values of the results.
    """
    results = results or {}
    values = [utils.memref_ptr(v) if isinstance(v.type, ir.MemRefType) else v for v in operands.values()]
    numbers = {name: f"${i}" for i, name in enumerate([*results, *operands])}
    text = re.sub(r"<([a-z]\w*)>", lambda match: numbers[match[1]], str(code))
    constraints = [f"=&{_CONSTRAINTS[kind]}" for kind in results.values()]
    constraints += [_CONSTRAINTS[str(v.type)] for v in values]
    types = [ir.Type.parse(kind) for kind in results.values()]
    if not types:
        result_type: Any = ir.Type.parse("!llvm.void")
    elif len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(result_type, values, f"{{ {text} }}", ",".join(constraints), has_side_effects=True)
    return [out] if len(types) == 1 else [llvm.extractvalue(t, out, [i]) for i, t in enumerate(types)]
