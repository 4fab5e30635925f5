"""Loads and stores of one thread under a predicate, in device memory, in inline PTX.

These functions are called while inline code is traced (see `inline`). They take and return MLIR values. They read or
write an array (rows, columns) that starts at `pointer`.
"""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_softmax._src.gpu.ptx.elements import NEG_INF_BITS
from pallas_softmax._src.gpu.ptx.inline import elements, emit_ptx, pack
from pallas_softmax._src.gpu.ptx.program import Program

# The number and the kind of the registers that move so many bytes, and the MLIR types of such registers.
_WORDS = {1: (1, "u8"), 2: (1, "u16"), 4: (1, "u32"), 8: (2, "u32"), 16: (4, "u32")}
_REGISTERS = {"u8": "i16", "u16": "i16", "u32": "i32"}


def offset_of(row: ir.Value, columns: int, column: ir.Value) -> ir.Value:
    """Returns the 64-bit offset of the element at this row and column."""
    i64 = ir.IntegerType.get_signless(64)
    row_start = arith.muli(arith.extui(i64, row), utils.c(columns, i64))
    return arith.addi(row_start, arith.extui(i64, column))


def load_vector(pointer, element: ir.Type, vec: int, offset, inside, fill=0.0, *, step: int = 0) -> ir.Value:
    """Returns a vector of `vec` elements, 1 to 16 bytes in all, from element `offset` + `step` on.

    If not `inside`, the elements are not read, and all are `fill`, which is 0 or -inf. The first one's address must be
    a multiple of the vector's size. Accesses with the same offset share the computation of the address.
    """
    itemsize = utils.bytewidth(element)
    p, (count, kind) = Program(), _WORDS[vec * itemsize]
    words = [p.operand(f"x{i}", kind) for i in range(count)]
    reads = p.operand("inside", "u32").differs(0)
    bits = 0 if fill == 0 else NEG_INF_BITS[str(element)]
    for word in words:
        p.set(word, bits << 16 | bits if itemsize == 2 and kind == "u32" else bits)
    p.load_into(words, p.operand("at", "u64"), offset=step * itemsize, when=reads)
    results = {f"x{i}": _REGISTERS[kind] for i in range(count)}
    registers = emit_access(p, pointer, offset, itemsize, inside, {}, results)
    if vec * itemsize == 1:
        registers = [arith.trunci(ir.IntegerType.get_signless(8), registers[0])]
    return vector.bitcast(ir.VectorType.get((vec,), element), pack(registers))


def store_vector(pointer, register: ir.Value, offset, inside, *, step: int = 0) -> None:
    """Writes a vector of 2 to 16 bytes from element `offset` + `step` on, if `inside`; see `load_vector`."""
    held = ir.VectorType(register.type)
    itemsize = utils.bytewidth(held.element_type)
    p, (count, kind) = Program(), _WORDS[held.shape[0] * itemsize]
    words_type = ir.VectorType.get((count,), ir.Type.parse(_REGISTERS[kind]))
    registers = elements(vector.bitcast(words_type, register))
    names = [f"x{i}" for i in range(count)]
    writes = p.operand("inside", "u32").differs(0)
    p.store(p.operand("at", "u64"), *p.operands(kind, *names), offset=step * itemsize, when=writes)
    emit_access(p, pointer, offset, itemsize, inside, dict(zip(names, registers)), {})


def load_unaligned_bytes(pointer, vec: int, offset, inside) -> ir.Value:
    """Returns `vec` bytes, a multiple of four, that start anywhere; zeros if not `inside`.

    It shifts the aligned words around them.

        words     | w0          | w1          | w2          |
        bytes            |<------- vec = 8 ------->|             shift = 8 * (address % 4) bits

    The last word is read only if the bytes reach it. Up to 3 bytes around the array are read, and shifted out. They lie
    in the memory that XLA has for the array: its buffers start and end at multiples of 256 bytes.
    """
    p, count = Program(), vec // 4
    at, reads = p.operand("at", "u64"), p.operand("inside", "u32").differs(0)
    first = at & -4
    shift = (p.convert(at, "u32") & 3) << 3  # from bytes to bits
    reads_last = reads & shift.differs(0)
    words = [p.var(0, "u32") for _ in range(count + 1)]
    for i, word in enumerate(words):
        p.load_into([word], first, offset=4 * i, when=reads if i < count else reads_last)
    for i, (low, high) in enumerate(zip(words, words[1:])):
        p.set(p.operand(f"x{i}", "u32"), p.write("shf.r.wrap.b32", "u32", low, high, shift))
    registers = emit_access(p, pointer, offset, 1, inside, {}, {f"x{i}": "i32" for i in range(count)})
    return vector.bitcast(ir.VectorType.get((vec,), ir.IntegerType.get_signless(8)), pack(registers))


def emit_access(p: Program, pointer, offset, itemsize: int, inside, operands, results) -> list[ir.Value]:
    """Emits a program that accesses the element at an offset, at the address <at>, if <inside>."""
    i64 = ir.IntegerType.get_signless(64)
    at = arith.addi(llvm.ptrtoint(i64, pointer), arith.muli(offset, utils.c(itemsize, i64)))
    inside = arith.extui(ir.IntegerType.get_signless(32), inside)
    return emit_ptx(p, {"at": at, "inside": inside, **operands}, results)
