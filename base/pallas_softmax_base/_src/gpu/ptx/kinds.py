"""Kinds of numbers in PTX registers, and the operands that an instruction takes.

The kind of a register says how an instruction interprets its bits:

    integer                  "u32", "s32", "u16", "s16", "u64", "s64"; in memory also "u8"
    float                    "f32", "f16", "bf16"
    pair of 16-bit numbers   "u16x2", "s16x2", "f16x2", "bf16x2"
    condition                "pred"

An operand of an instruction takes registers of one kind. If the instruction computes the same bits for several kinds,
the operand takes all of them, and has one of these names:

    "i16", "i32", "i64"      integers, signed or not
    "i16x2"                  pairs of integers, signed or not
    "b16", "b32", "b64"      integers and pairs of integers
"""

import math
import numbers
from typing import Any

import numpy as np

BITS = {
    **{"u8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "pred": 1},
    **{"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "u16x2": 32, "s16x2": 32},
}
FLOATS = {"f16", "bf16", "f32"}
_INTEGERS = {f"i{bits}": (f"u{bits}", f"s{bits}") for bits in (16, 32, 64)} | {"i16x2": ("u16x2", "s16x2")}
_SEVERAL = _INTEGERS | {
    "b16": _INTEGERS["i16"],
    "b32": (*_INTEGERS["i32"], *_INTEGERS["i16x2"]),
    "b64": _INTEGERS["i64"],
}
_BITWISE = ("and", "or", "xor", "not")
_ANY_BITS = (*_BITWISE, "lop3", "mov", "selp", "st")
_ANY_SIGN = ("add", "sub", "mul.lo", "mad.lo", "eq", "ne")


def untyped(kind: str) -> str:
    """Returns the untyped PTX type of a register for values of a kind."""
    return kind if kind == "pred" else f"b{max(16, BITS[kind])}"  # 8-bit values have 16-bit registers


def typed(op: str, kind: str) -> str:
    """Returns an instruction with its type.

    Sums and products of f32 get the suffix ".rn", so that ptxas never fuses them to a multiply-add.
    """
    if op in _BITWISE:
        return f"{op}.{untyped(kind)}"
    return f"{op}.rn.f32" if kind == "f32" and op in ("add", "sub", "mul") else f"{op}.{kind}"


def operand_of(op: str, kind: str) -> str:
    """Returns what operands an instruction takes if its first has this kind. `op` may be a relation like "lt"."""
    integers = next((name for name, kinds in _INTEGERS.items() if kind in kinds), None)
    if integers is None:
        return kind
    if op in _ANY_BITS:
        return f"b{BITS[kind]}"
    return integers if op in _ANY_SIGN else kind


def takes(operand: str, kind: str) -> bool:
    """Returns whether an operand takes registers of this kind."""
    return kind in _SEVERAL.get(operand, (operand,))


def number_text(instruction: str, operand: str, number: Any) -> str:
    """Returns a Python number as an operand, in PTX syntax.

    Raises:
      TypeError: the operand is an integer and the number is not; or the operand is a 16-bit float, and PTX has no
        syntax for such numbers.
      ValueError: the number is out of the operand's range.
    """
    if operand == "f32":
        return _float_text(instruction, number)
    if operand in FLOATS or not isinstance(number, numbers.Integral):
        raise TypeError(f"{instruction} takes {operand}, not the {type(number).__name__} {number!r}")
    integer, (least, largest) = int(number), _range(operand)
    if not least <= integer <= largest:
        raise ValueError(f"{instruction} takes {operand}, a number from {least} to {largest}, not {number}")
    return str(integer)


def _range(operand: str) -> tuple[int, int]:
    """Returns the least and the largest number that an operand takes.

    If it takes signed and unsigned kinds, or pairs, the range covers signed and unsigned numbers.
    """
    bits = BITS[_SEVERAL.get(operand, (operand,))[0]]
    least = 0 if operand.startswith(("u", "pred")) and not operand.endswith("x2") else -(1 << bits - 1)
    largest = (1 << bits - 1) - 1 if operand in ("s16", "s32", "s64") else (1 << bits) - 1
    return least, largest


def _float_text(instruction: str, number: Any) -> str:
    """Returns a number as an f32 in PTX syntax: 0f and the eight hexadecimal digits of its bits."""
    if not isinstance(number, numbers.Real):
        raise TypeError(f"{instruction} takes f32, not {number!r}")
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if np.isinf(rounded) and not math.isinf(number):
        raise ValueError(f"{instruction} takes f32, which cannot hold {number}")
    return f"0f{rounded.view(np.uint32):08X}"
