"""Inline code: functions of one thread, written in MLIR and PTX, that are one operation of a Pallas kernel.

The kernel calls a function decorated with `inline` with arrays and references. While the function is traced, it sees
one thread's share of them: registers, which are MLIR vectors, and memory references. `program` writes its PTX. In the
text, <name> stands for an operand or a result; the text itself declares all other registers.
"""

import re
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.program import Program

# Typed Any, since pyright does not know that the decorator adds the function's first parameter.
inline: Any = plgpu.inline_mgpu

# Argument types of inline code: a reference; a block with one element for each thread; a scalar (any layout works).
REF = plgpu.RefType()
PER_THREAD: Any = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
SCALAR = PER_THREAD

# The LLVM constraint for the register that holds a value of an MLIR type.
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
    return utils.c(value, ir.IntegerType.get_signless(32))


def thread() -> ir.Value:
    """Returns the number of this thread in its warpgroup, 0 to 127."""
    return arith.remui(utils.thread_idx(), i32(WARPGROUP))


def scalar(argument) -> ir.Value:
    return argument.registers.item()


def array(layout, shape: tuple[int, ...], registers: list[ir.Value]):
    """Makes an array, as a result of inline code, of this thread's registers, in the order of the layout."""
    out = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    element = ir.VectorType(registers[0].type).element_type if shape else registers[0].type
    signed = True if isinstance(element, ir.IntegerType) else None
    return fragmented_array.FragmentedArray(_registers=out, _layout=layout, _is_signed=signed)


def pack(values: list[Any]) -> ir.Value:
    """Returns a register, which is an MLIR vector, with these elements."""
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def elements(register: ir.Value) -> list[ir.Value]:
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def words(register: ir.Value) -> list[ir.Value]:
    """Returns the bytes of a register as 32-bit numbers."""
    type_, i32_ = ir.VectorType(register.type), ir.IntegerType.get_signless(32)
    count = type_.shape[0] * utils.bytewidth(type_.element_type) // 4
    return elements(vector.bitcast(ir.VectorType.get((count,), i32_), register))


# --- PTX ----------------------------------------------------------------------------------------------


def emit_ptx(code: Program, operands: dict[str, ir.Value], results: dict[str, str] | None = None) -> list[Any]:
    """Emits PTX into the inline code that is being traced, in a scope of its own. Returns the values of the results.

    `operands` has values by name; a memory reference stands for its address. `results` has MLIR types, like "i32", by
    name. The text may write a result before it has read all operands.
    """
    results = results or {}
    values = [utils.memref_ptr(v) if isinstance(v.type, ir.MemRefType) else v for v in operands.values()]
    numbers = {name: f"${i}" for i, name in enumerate([*results, *operands])}
    text = re.sub(r"<([a-z]\w*)>", lambda match: numbers[match[1]], str(code))
    constraints = [f"=&{_CONSTRAINTS[kind]}" for kind in results.values()]
    constraints += [_CONSTRAINTS[str(v.type)] for v in values]
    types = [ir.Type.parse(kind) for kind in results.values()]
    no_or_one = types or [ir.Type.parse("!llvm.void")]
    result_type: Any = llvm.StructType.get_literal(types) if len(types) > 1 else no_or_one[0]
    out = llvm.inline_asm(result_type, values, f"{{ {text} }}", ",".join(constraints), has_side_effects=True)
    return [out] if len(types) == 1 else [llvm.extractvalue(t, out, [i]) for i, t in enumerate(types)]


def instruction(name: str, *operands: ir.Value) -> ir.Value:
    """Returns the result of one PTX instruction. It has the type of the operands, and no other effect."""
    constraint = _CONSTRAINTS[str(operands[0].type)]
    text = f"{name} {', '.join(f'${i}' for i in range(len(operands) + 1))};"
    constraints = ",".join([f"={constraint}"] + [constraint] * len(operands))
    return llvm.inline_asm(operands[0].type, operands, text, constraints)


def insert_ptx(
    code: Program,
    refs: dict[str, Any],
    numbers: dict[str, Any] | None = None,
    results: dict[str, str] | None = None,
    *,
    uniform: bool = False,
) -> tuple:
    """Inserts PTX into a kernel; <name> stands for an operand or a result, <thread> for the number 0 to 127.

    The text gets the addresses of `refs` and the `numbers`: scalars, or arrays (128,), which have one number for each
    thread. Each thread writes one number, "i32" or "f32", to each of the `results`. They are returned as arrays (128,);
    as scalars if all threads write the same numbers (`uniform`).
    """
    numbers, results = numbers or {}, results or {}
    names = [*refs, *numbers, *results]
    if len({*names}) < len(names):  # one operand would silently take the place of another
        raise ValueError(f"insert_ptx: operands must have different names, got {names}")
    dtypes = {"i32": np.dtype("int32"), "f32": np.dtype("float32")}
    shape = () if uniform else (WARPGROUP,)
    layout: Any = plgpu.Layout.WG_SPLAT(()) if uniform else PER_THREAD

    @inline(
        arg_types=([REF] * len(refs), [PER_THREAD] * len(numbers)),
        return_type=tuple(plgpu.ShapeDtypeStruct(shape, dtypes[t], layout=layout) for t in results.values()),
    )
    def emit(_, refs_, numbers_):
        operands = dict(zip(refs, refs_)) | {"thread": thread()}
        for name, x in zip(numbers, numbers_):
            operands[name] = elements(x.registers.item())[0] if x.shape else scalar(x)
        written = emit_ptx(code, operands, results)
        return tuple(array(layout.to_mgpu(), shape, [x if uniform else pack([x])]) for x in written)

    return emit([*refs.values()], [*numbers.values()])
