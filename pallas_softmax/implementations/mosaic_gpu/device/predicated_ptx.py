"""Loads and stores of one thread between device memory and registers, under a predicate, in inline PTX.

All functions are called while inline code is traced (see `inline_ptx`): they take and return MLIR values. What
they read or write lies in an array (rows, columns) that starts at `pointer`.
"""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import elements, emit_ptx, i32, pack


def offset_of(row: ir.Value, columns: int, column: ir.Value) -> ir.Value:
    """The number of the element at this row and column, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    row_start = arith.muli(arith.extui(i64, row), utils.c(columns, i64))
    return arith.addi(row_start, arith.extui(i64, column))


def load_vector(pointer, element: ir.Type, vec: int, offset, inside, fill=0.0) -> ir.Value:
    """A vector of `vec` elements, of 1 to 16 bytes together; if not `inside`, of `fill`, which is 0 or -inf.

    Args:
      pointer: to element 0.
      element: the elements' type.
      vec: number of elements, which start at a multiple of their size in memory.
      offset: number of the first one.
      inside: whether to read them.
      fill: the elements otherwise.
    """
    itemsize = utils.bytewidth(element)
    count, access, word = _words(vec * itemsize)
    names = [f"x{i}" for i in range(count)]
    words = emit_ptx(
        ".reg .pred p; setp.ne.b32 p, <inside>, 0;"
        + "".join(f" mov.b{word[1:]} <{name}>, {_bits(fill, element, word)};" for name in names)
        + f" @p ld.global.{access} {_operand(names)}, [<at>];",
        {"at": _address(pointer, offset, itemsize), "inside": _as_i32(inside)},
        dict.fromkeys(names, word),
    )
    if vec * itemsize == 1:
        words = [arith.trunci(ir.IntegerType.get_signless(8), words[0])]
    return vector.bitcast(ir.VectorType.get((vec,), element), pack(words))


def store_vector(pointer, register: ir.Value, vec: int, offset, inside) -> None:
    """Writes the first `vec` elements of a vector, of 2 to 16 bytes together, from element `offset` on if `inside`."""
    itemsize = utils.bytewidth(ir.VectorType(register.type).element_type)
    count, access, word = _words(vec * itemsize)
    packed = pack(elements(register)[:vec])
    words = elements(vector.bitcast(ir.VectorType.get((count,), ir.Type.parse(word)), packed))
    names = [f"x{i}" for i in range(count)]
    emit_ptx(
        f".reg .pred p; setp.ne.b32 p, <inside>, 0; @p st.global.{access} [<at>], {_operand(names)};",
        {
            "at": _address(pointer, offset, itemsize),
            "inside": _as_i32(inside),
            **dict(zip(names, words)),
        },
    )


def load_mask(pointer, vec: int, row, column, columns: int, inside) -> ir.Value:
    """A vector of `vec` bytes of a mask (rows, columns) from this row and column on; of 0, if not `inside`.

    Of a mask of one column all bytes are that of the row.
    """
    i8 = ir.IntegerType.get_signless(8)
    if columns == 1:
        (byte,) = elements(load_vector(pointer, i8, 1, offset_of(row, 1, i32(0)), inside))
        return pack([byte] * vec)
    first = offset_of(row, columns, column)
    if columns % vec == 0:  # all vectors start at a multiple of their size
        return load_vector(pointer, i8, vec, first, inside)
    return _load_unaligned_bytes(pointer, vec, first, inside)


def _load_unaligned_bytes(pointer, vec: int, offset, inside) -> ir.Value:
    """`vec` bytes, a multiple of four, that start anywhere: of the aligned words around them, shifted.

        words     | w0          | w1          | w2          |
        bytes            |<------- vec = 8 ------->|             shift = 8 * (address % 4) bits

    The last word is read only where the bytes reach it. No read leaves the array's buffer, which starts and ends
    at a multiple of four bytes.
    """
    count = vec // 4
    words = [f"w{i}" for i in range(count + 1)]
    needed = ["some"] * count + ["unaligned"]
    registers = emit_ptx(
        f".reg .pred some, unaligned; .reg .b64 aligned; .reg .b32 shift, {', '.join(words)};"
        " setp.ne.b32 some, <inside>, 0; and.b64 aligned, <at>, -4; cvt.u32.u64 shift, <at>;"
        " and.b32 shift, shift, 3; shl.b32 shift, shift, 3; setp.ne.and.b32 unaligned, shift, 0, some;"
        + "".join(f" mov.b32 {word}, 0;" for word in words)
        + "".join(
            f" @{predicate} ld.global.b32 {word}, [aligned+{4 * i}];"
            for i, (word, predicate) in enumerate(zip(words, needed))
        )
        + "".join(f" shf.r.wrap.b32 <x{i}>, w{i}, w{i + 1}, shift;" for i in range(count)),
        {"at": _address(pointer, offset, 1), "inside": _as_i32(inside)},
        {f"x{i}": "i32" for i in range(count)},
    )
    return vector.bitcast(ir.VectorType.get((vec,), ir.IntegerType.get_signless(8)), pack(registers))


def _words(size: int) -> tuple[int, str, str]:
    """How `size` bytes, 1 to 16, are moved: number of registers; type of the access; type of each register."""
    match size:
        case 1:
            return 1, "u8", "i16"
        case 2:
            return 1, "b16", "i16"
        case 4:
            return 1, "b32", "i32"
        case 8:
            return 2, "v2.b32", "i32"
        case 16:
            return 4, "v4.b32", "i32"
    raise AssertionError(f"no access of {size} bytes")


_NEG_INF = {"f32": 0xFF800000, "bf16": 0xFF80, "f16": 0xFC00}


def _bits(fill: float, element: ir.Type, word: str) -> int:
    """A register of this type that is full of elements `fill`, which is 0 or -inf, as a number."""
    if fill == 0:
        return 0
    bits = _NEG_INF[str(element)]
    two_elements = utils.bytewidth(element) == 2 and word == "i32"
    return bits << 16 | bits if two_elements else bits


def _address(pointer: ir.Value, offset: ir.Value, itemsize: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(i64, pointer), arith.muli(offset, utils.c(itemsize, i64)))


def _operand(names: list[str]) -> str:
    """How PTX names the registers of an access: <x0>, or the vector {<x0>, <x1>}."""
    return f"<{names[0]}>" if len(names) == 1 else f"{{{', '.join(f'<{name}>' for name in names)}}}"


def _as_i32(condition: ir.Value) -> ir.Value:
    return arith.extui(ir.IntegerType.get_signless(32), condition)
