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
    "u8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "pred": 1,
    "f16": 16, "bf16": 16, "f32": 32, "u16x2": 32, "s16x2": 32, "f16x2": 32, "bf16x2": 32,
}  # fmt: skip
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
    """Returns the PTX type of a register for values of a kind."""
    return kind if kind == "pred" else f"b{max(16, BITS[kind])}"  # 8-bit values have 16-bit registers


def typed(op: str, kind: str) -> str:
    if op in _BITWISE:
        return f"{op}.{untyped(kind)}"
    if kind == "f32" and op in ("add", "sub", "mul"):  # ".rn": ptxas must not fuse them to a multiply-add
        return f"{op}.rn.f32"
    return f"{op}.{kind}"


def operand_of(op: str, kind: str) -> str:
    """Returns what operands an instruction takes if its first has this kind. `op` may be a relation like "lt"."""
    integers = next((name for name, kinds in _INTEGERS.items() if kind in kinds), None)
    if integers is None:
        return kind
    if op in _ANY_BITS:
        return f"b{BITS[kind]}"
    return integers if op in _ANY_SIGN else kind


def takes(operand: str, kind: str) -> bool:
    return kind in _SEVERAL.get(operand, (operand,))


def check_bits(instruction: str, bits: int, *kinds: str) -> None:
    """Raises TypeError if an operand has another number of bits, or is a condition."""
    for kind in kinds:
        if BITS[kind] != bits or kind == "pred":
            raise TypeError(f"{instruction} takes {bits} bits, not {kind}")


def number_text(instruction: str, operand: str, number: Any) -> str:
    """Returns a Python number as an operand, in PTX syntax.

    Raises TypeError for a number of the wrong type, and for a 16-bit float, which PTX has no syntax for. Raises
    ValueError for a number out of range.
    """
    accepted: Any = numbers.Real if operand == "f32" else numbers.Integral
    if operand in ("f16", "bf16") or not isinstance(number, accepted):
        raise TypeError(f"{instruction} takes {operand}, not the {type(number).__name__} {number!r}")
    if operand == "f32":
        with np.errstate(over="ignore"):
            rounded = np.float32(number)
        if np.isinf(rounded) and not math.isinf(number):
            raise ValueError(f"{instruction} takes f32, which cannot hold {number}")
        return f"0f{rounded.view(np.uint32):08X}"
    # An operand that takes signed and unsigned kinds, or pairs, takes signed and unsigned numbers.
    bits = BITS[_SEVERAL.get(operand, (operand,))[0]]
    least = 0 if operand.startswith(("u", "pred")) and not operand.endswith("x2") else -(1 << bits - 1)
    largest = (1 << bits - 1) - 1 if operand in ("s16", "s32", "s64") else (1 << bits) - 1
    if not least <= int(number) <= largest:
        raise ValueError(f"{instruction} takes {operand}, a number from {least} to {largest}, not {number}")
    return str(int(number))
