"""PTX as Python arithmetic: a `Value` is a register, and `Arithmetic` writes the instructions that compute new ones.

`program` adds statements: variables, control flow, memory, warps. docs/dev/ptx.md explains the language.

Operands of an instruction have the same kind (see `kinds`), because PTX itself does not say what a register holds:
`add.f32` of an integer is a legal instruction. A Python number takes the kind of the other operands.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_softmax._src.gpu.ptx.kinds import BITS, FLOATS, check_bits, number_text, operand_of, takes, typed, untyped

# Selects the signs of the halves of a pair by prmt. Hexadecimal digit i selects byte i of the result, the lowest first:
# 9 is the sign of byte 1, eight times, and B the sign of byte 3.
_SIGNS_OF_HALVES = 0xBB99


def _operation(op: str) -> Callable[["Value", Any], "Value"]:
    """Returns a method of `Value`: an instruction of it and a number, or another value."""
    return lambda self, other: self.program.op(op, self.kind, self, other)


def _relation(name: str) -> Callable[["Value", Any], "Value"]:
    """Returns a method of `Value` that compares it with a number or another value."""
    return lambda self, other: self.program.compare(self, name, other)


def _instruction(op: str, kind: str | None = None) -> Callable[..., "Value"]:
    """Returns a method of `Arithmetic`: an instruction of operands of this kind; of the first one's kind if None."""
    return lambda self, a, *others: self.op(op, kind or a.kind, a, *others)


class Value:
    """A register of a program, or one of its operands."""

    __hash__ = object.__hash__

    def __init__(self, program: "Arithmetic", name: str, kind: str):
        self.program, self.name, self.kind = program, name, kind
        # If it is a comparison: the number of lines up to it, the relation, and both sides; see `and_or`.
        self.comparison: tuple[int, str, Value, Any] | None = None

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        raise TypeError(
            f"a PTX value ({self.name}, {self.kind}) is neither true nor false while the text is written; "
            "call when, select or block, or compare with None by `is`"
        )

    def __eq__(self, other: Any) -> Any:
        # Python compares by == in many places where no instruction is meant.
        raise TypeError("PTX values are not compared by == and !=; call equals or differs")

    def bits(self, kind: str) -> "Value":
        """Returns the same register with its bits interpreted as another kind."""
        check_bits(f"bits of {self.kind}", BITS[self.kind], kind)
        return Value(self.program, self.name, kind)

    __add__ = _operation("add")
    __sub__ = _operation("sub")
    __xor__ = _operation("xor")

    def __rsub__(self, other: Any) -> "Value":
        return self.program.op("sub", self.kind, other, self)

    def __mul__(self, other: Any) -> "Value":
        return self.program.op("mul" if self.kind == "f32" else "mul.lo", self.kind, self, other)

    def __and__(self, other: Any) -> "Value":
        return self.program.and_or("and", self, other)

    def __or__(self, other: Any) -> "Value":
        return self.program.and_or("or", self, other)

    def __invert__(self) -> "Value":
        if self.kind == "pred":  # no instruction: most accept a negated condition; see `Arithmetic.text_of`
            return Value(self.program, f"!{self.name}".removeprefix("!!"), "pred")
        return self.program.op("not", self.kind, self)

    def __lshift__(self, by: Any) -> "Value":
        return self.program.write(f"shl.{untyped(self.kind)}", self.kind, self, by, of=(self.kind, "i32"))

    def __rshift__(self, by: Any) -> "Value":
        return self.program.write(f"shr.{self.kind}", self.kind, self, by, of=(self.kind, "i32"))

    def _rebind(self, _: Any) -> Any:
        """Raises: `x += y` would bind the name x to a new register, and a loop on the GPU would not see the change."""
        raise TypeError("a PTX value cannot be changed by +=, -= and so on; call increase, update or set")

    __iadd__ = __isub__ = __imul__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _rebind

    def sign(self) -> "Value":
        """Returns as many bits: all ones if this is negative, else zeros. Each half of a pair has its own sign."""
        if self.kind == "s16x2":
            return self.program.write("prmt.b32", self.kind, self, 0, _SIGNS_OF_HALVES)
        return self >> (BITS[self.kind] - 1)

    __lt__ = _relation("lt")
    __le__ = _relation("le")
    __gt__ = _relation("gt")
    __ge__ = _relation("ge")
    equals = _relation("eq")
    differs = _relation("ne")


Condition = Value | None  # None: always


class Arithmetic:
    """PTX text so far, and instructions that compute a new value. Values format as their registers' names."""

    def __init__(self):
        self.lines: list[str] = []
        self.declarations: list[str] = []

    def __iadd__(self, line: str):
        self.lines.append(line)
        return self

    def __str__(self) -> str:
        return "\n".join(self.declarations + self.lines)

    def fresh(self, kind: str) -> Value:
        name = f"r{len(self.declarations)}"
        self.declarations.append(f".reg .{untyped(kind)} {name};")
        return Value(self, name, kind)

    def text_of(self, instruction: str, kind: str, operand: Any) -> str:
        """Returns an operand in PTX syntax: the name of a register, or a number. Text stays as it is."""
        if isinstance(operand, str):
            return operand
        if not isinstance(operand, Value):
            return number_text(instruction, kind, operand)
        if not takes(kind, operand.kind):
            raise TypeError(f"{instruction} takes {kind}, not {operand.kind} ({operand})")
        if operand.name.startswith("!"):
            return self.op("not", "pred", ~operand).name
        return operand.name

    def write(self, instruction: str, kind: str, *operands: Any, of: str | Sequence[str] = "") -> Value:
        """Returns the result of an instruction. `of` is the kind of its operands, one for all or each; else `kind`."""
        out = self.fresh(kind)
        kinds = [of or kind] * len(operands) if isinstance(of, str) else of
        texts = [self.text_of(instruction, one, x) for one, x in zip(kinds, operands, strict=True)]
        self += f"{instruction} {out}, {', '.join(texts)};"
        return out

    def op(self, op: str, kind: str, *operands: Any) -> Value:
        """Returns the result of an instruction. Its operands and its result have the same kind."""
        return self.write(typed(op, kind), kind, *operands, of=operand_of(op, kind))

    def bitwise3(self, function: Callable[[Any, Any, Any], Any], *operands: Any) -> Value:
        """Returns a bitwise function of three numbers, like lambda a, b, c: a & b | c, by one instruction."""
        table = function(0xF0, 0xCC, 0xAA) & 0xFF  # the truth table: all combinations of three bits
        kind = operands[0].kind
        return self.write("lop3.b32", kind, *operands, table, of=operand_of("lop3", kind))

    def and_or(self, op: str, a: Value, b: Any) -> Value:
        """Returns a & b or a | b. If the last line compares for b, one more instruction compares and combines.

        A comparison as `a` gives the same condition by a plain and/or. ptxas drops comparisons that nothing reads.
        """
        if not isinstance(b, Value) or b.comparison is None or b.comparison[0] != len(self.lines):
            return self.op(op, a.kind, a, b)
        _, relation, x, y = b.comparison
        instruction = f"setp.{relation}.{op}.{x.kind}"
        if a.kind != "pred":
            raise TypeError(f"{instruction} takes pred, not {a.kind} ({a})")
        out = self.fresh("pred")
        self += f"{instruction} {out}, {x}, {self.text_of(instruction, operand_of(relation, x.kind), y)}, {a};"
        return out

    def compare(self, x: Value, relation: str, y: Any) -> Value:
        out = self.write(f"setp.{relation}.{x.kind}", "pred", x, y, of=operand_of(relation, x.kind))
        out.comparison = len(self.lines), relation, x, y
        return out

    min = _instruction("min")  # of a NaN and a number: the number
    max = _instruction("max")  # of a NaN and a number: the number
    absolute = _instruction("abs")
    multiply_high = _instruction("mul.hi")
    divide = _instruction("div.full", "f32")  # accurate to two units in the last place
    divide_exactly = _instruction("div.rn", "f32")
    exp2 = _instruction("ex2.approx.ftz", "f32")
    log2 = _instruction("lg2.approx.ftz", "f32")  # accurate to 2^-22: inexact near 1, where the logarithm is 0

    def multiply_add(self, a: Value, b: Any, c: Any) -> Value:
        """Returns a * b + c; floats are rounded only once."""
        return self.op("fma.rn" if a.kind == "f32" else "mad.lo", a.kind, a, b, c)

    def multiply_wide(self, a: Value, b: int) -> Value:
        return self.write("mul.wide.u32", "u64", a, b, of="u32")

    def multiply_add_wide(self, a: Value, b: int, c: Value) -> Value:
        return self.write("mad.wide.u32", "u64", a, b, c, of=("u32", "u32", "u64"))

    def at(self, array: Value, number: Any, itemsize: int) -> Value:
        return self.multiply_add(number, itemsize, array)

    def reduce(self, op: str, values: Sequence[Value]) -> Value:
        """Reduces values by an instruction, like "max.NaN", in a tree of pairs."""
        values = list(values)
        while len(values) > 1:
            unpaired = values[len(values) // 2 * 2 :]
            values = [self.op(op, a.kind, a, b) for a, b in zip(values[::2], values[1::2])] + unpaired
        return values[0]

    def select(self, condition: Value, a: Any, b: Any, kind: str | None = None) -> Value:
        kind = kind or next(v.kind for v in (a, b) if isinstance(v, Value))
        typed, operand = kind if kind == "f32" else untyped(kind), operand_of("selp", kind)
        return self.write(f"selp.{typed}", kind, a, b, condition, of=(operand, operand, "pred"))

    def convert(self, x: Value, kind: str, to_integer: str = "rzi") -> Value:
        """Returns the number in another kind. A conversion to a float gives the nearest float.

        For a float to an integer, `to_integer` sets the rounding: "rzi" (toward zero), "rni" (nearest) or "rpi" (up).
        """
        if kind in FLOATS:
            rounding = "" if x.kind in FLOATS and BITS[x.kind] < BITS[kind] else "rn."
        else:
            rounding = f"{to_integer}." if x.kind in FLOATS else ""
        return self.write(f"cvt.{rounding}{kind}.{x.kind}", kind, x, of=x.kind)

    def split(self, x: Value, kind: str = "u32") -> tuple[Value, Value]:
        """Returns the lower and the upper half of the bits, each in the given kind."""
        low, high = self.fresh(kind), self.fresh(kind)
        move = f"mov.b{BITS[x.kind]}"
        check_bits(move, BITS[x.kind] // 2, kind)
        self += f"{move} {{{low}, {high}}}, {x};"
        return low, high

    def join(self, low: Value, high: Value, kind: str = "u64") -> Value:
        out = self.fresh(kind)
        move = f"mov.b{BITS[kind]}"
        check_bits(move, BITS[kind] // 2, low.kind, high.kind)
        self += f"{move} {out}, {{{low}, {high}}};"
        return out

    # --- Bits

    def count_ones(self, x: Value) -> Value:
        return self.write("popc.b32", "u32", x, of="b32")

    highest_bit = _instruction("bfind", "u32")

    def lowest_bit(self, x: Value) -> Value:
        """Returns the number of the lowest bit that is 1; 32 if x is 0."""
        return self.write("clz.b32", "u32", self.write("brev.b32", "u32", x, of="b32"))
