"""PTX written as Python arithmetic: a `Program` is the text so far, a `Value` is a register in it.

    p = Program()
    address = p.operand("address", "u32")
    x = p.load(address, "f32")
    with p.when(x > 0.0):
        p.store(address, p.exp2(x - 1.0))

writes

    ld.shared.b32 r0, [<address>+0];  setp.gt.f32 r1, r0, 0f00000000;  @!r1 bra end1;
    sub.rn.f32 r2, r0, 0f3F800000;  ex2.approx.ftz.f32 r3, r2;  st.shared.b32 [<address>+0], r3;  end1:

Python runs once, while the text is written: a `for` unrolls, and an `if` chooses which text is written. Each thread
decides on the GPU by `when`, `block`, `repeat`, `loop`, `each` and `select`, and by the argument `when` of loads,
stores, `set` and `increase`.

Arithmetic puts its result into a new register. Later, only `set`, `increase`, `update` and functions named `*_into`
change a register. So a number that changes in a GPU loop must be a variable: `var` or `fresh` makes it before the loop,
and these functions change it. `x = x + 1` would bind the name x to a new register, which the loop's next iteration does
not read.

The kind of a value says how an instruction interprets its bits:

    integer                  "u32", "s32", "u16", "s16", "u64", "s64"; in memory also "u8"
    float                    "f32", "f16", "bf16"
    pair of 16-bit numbers   "f16x2", "bf16x2", "u16x2", "s16x2"
    condition                "pred"
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES

_BITS = {
    **{"u8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "pred": 1},
    **{"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "u16x2": 32, "s16x2": 32},
}
_FLOATS = {"f16", "bf16", "f32"}
WHOLE_WARP = "0xffffffff"  # lane mask of a warp instruction: all lanes take part
# For prmt, where 8 + i is the sign of byte i: the signs of bytes 1, 1, 3 and 3, the lowest first.
_SIGNS_OF_HALVES = 0xBB99


class Value:
    """A register of a program, or one of its operands."""

    def __init__(self, program: "Program", name: str, kind: str):
        self.program, self.name, self.kind = program, name, kind
        # For a comparison: the number of lines up to and including it, the relation, and both sides.
        self.comparison: tuple[int, str, Value, Any] | None = None

    def __str__(self) -> str:
        return self.name

    def bits(self, kind: str) -> "Value":
        """Returns the same register with its bits interpreted as another kind."""
        assert _BITS[kind] == _BITS[self.kind]
        return Value(self.program, self.name, kind)

    def __add__(self, other: Any) -> "Value":
        return self.program.op("add", self.kind, self, other)

    def __sub__(self, other: Any) -> "Value":
        return self.program.op("sub", self.kind, self, other)

    def __rsub__(self, other: Any) -> "Value":
        return self.program.op("sub", self.kind, other, self)

    def __mul__(self, other: Any) -> "Value":
        return self.program.op("mul" if self.kind == "f32" else "mul.lo", self.kind, self, other)

    def __and__(self, other: Any) -> "Value":
        return self.program.and_or("and", self, other)

    def __or__(self, other: Any) -> "Value":
        return self.program.and_or("or", self, other)

    def __xor__(self, other: Any) -> "Value":
        return self.program.op("xor", self.kind, self, other)

    def __invert__(self) -> "Value":
        if self.kind == "pred":  # no instruction: most others accept a negated condition; see `_ptx_of`
            return Value(self.program, f"!{self.name}".removeprefix("!!"), "pred")
        return self.program.op("not", self.kind, self)

    def __lshift__(self, by: Any) -> "Value":
        return self.program.write(f"shl.b{_BITS[self.kind]}", self.kind, self, by)

    def __rshift__(self, by: Any) -> "Value":
        return self.program.write(f"shr.{self.kind}", self.kind, self, by)

    def _rebind(self, _: Any) -> Any:
        """Raises: `x += y` would bind the name x to a new register, and a loop on the GPU would not see the change."""
        raise TypeError("a PTX value cannot be changed by +=, -= and so on; call increase, update or set")

    __iadd__ = __isub__ = __imul__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _rebind

    def sign(self) -> "Value":
        """Returns as many bits: all ones if this is negative, else zeros. Each half of a pair has its own sign."""
        if self.kind == "s16x2":
            return self.program.write("prmt.b32", self.kind, self, 0, _SIGNS_OF_HALVES)
        return self >> (_BITS[self.kind] - 1)

    def __lt__(self, other: Any) -> "Value":
        return self.program.compare(self, "lt", other)

    def __le__(self, other: Any) -> "Value":
        return self.program.compare(self, "le", other)

    def __gt__(self, other: Any) -> "Value":
        return self.program.compare(self, "gt", other)

    def __ge__(self, other: Any) -> "Value":
        return self.program.compare(self, "ge", other)

    def equals(self, other: Any) -> "Value":
        """Returns a condition: whether this equals a number or another value."""
        return self.program.compare(self, "eq", other)

    def differs(self, other: Any) -> "Value":
        """Returns the opposite of `equals`."""
        return self.program.compare(self, "ne", other)


Condition = Value | None  # None: always


class Program:
    """PTX text that arithmetic writes; the top of this file shows how.

    If an instruction has no function here, `+=` appends it as a line of text. Values format as their registers' names.
    """

    def __init__(self):
        self.lines: list[str] = []
        self.declarations: list[str] = []
        self.labels = 0

    def __iadd__(self, line: str):
        self.lines.append(line)
        return self

    def __str__(self) -> str:
        return "\n".join(self.declarations + self.lines)

    # --- Registers

    def fresh(self, kind: str) -> Value:
        """Returns a new register without a value."""
        name = f"r{len(self.declarations)}"
        self.declarations.append(f".reg .{_untyped(kind)} {name};")
        return Value(self, name, kind)

    def operand(self, name: str, kind: str) -> Value:
        """Returns the operand or the result <name>. An operand must not be changed; a result must be set."""
        return Value(self, f"<{name}>", kind)

    def operands(self, kind: str, *names: str) -> list[Value]:
        """Returns several operands of one kind."""
        return [self.operand(name, kind) for name in names]

    def var(self, start: Any, kind: str | None = None) -> Value:
        """Returns a variable: a new register that starts with a number or a value, and may be changed later."""
        out = self.fresh(kind or start.kind)
        self.set(out, start)
        return out

    def set(self, register: Value, value: Any, when: Condition = None) -> None:
        """Sets a register to a value, where `when` holds."""
        self += f"{_if(when)}mov.{_untyped(register.kind)} {register}, {_ptx_of(value, register.kind)};"

    def increase(self, register: Value, by: Any, when: Condition = None) -> None:
        """Adds to a register, where `when` holds."""
        self.update(register, "add", by, when)

    def update(self, register: Value, op: str, value: Any, when: Condition = None) -> None:
        """Applies an instruction, like "max", to a register and a value, in place, where `when` holds."""
        typed = _typed(op, register.kind)
        self += f"{_if(when)}{typed} {register}, {register}, {_ptx_of(value, register.kind)};"

    def special(self, name: str) -> Value:
        """Returns a special register of PTX, like "lanemask_lt"."""
        return self.write("mov.u32", "u32", f"%{name}")

    # --- Arithmetic

    def write(self, instruction: str, kind: str, *arguments: Any, of: str | None = None) -> Value:
        """Returns the result of an instruction. It has a kind; numbers among the arguments have kind `of` if given."""
        out = self.fresh(kind)
        self += f"{instruction} {out}, {', '.join(_ptx_of(a, of or kind) for a in arguments)};"
        return out

    def op(self, op: str, kind: str, *arguments: Any) -> Value:
        """Returns the result of an instruction; its operands and its result have the same kind."""
        return self.write(_typed(op, kind), kind, *arguments)

    def bitwise3(self, function: Callable[[Any, Any, Any], Any], *arguments: Any) -> Value:
        """Returns a bitwise function of three numbers, like lambda a, b, c: a & b | c, by one instruction."""
        table = function(0xF0, 0xCC, 0xAA) & 0xFF  # the truth table: all combinations of three bits
        return self.write("lop3.b32", arguments[0].kind, *arguments, table)

    def and_or(self, op: str, a: Value, b: Any) -> Value:
        """Returns a & b or a | b. If b is a comparison in the last line, one instruction compares and combines."""
        comparison = b.comparison if isinstance(b, Value) else None
        if comparison is None or comparison[0] != len(self.lines):
            return self.op(op, a.kind, a, b)
        _, relation, x, y = comparison
        out = self.fresh("pred")
        self += f"setp.{relation}.{op}.{x.kind} {out}, {x}, {_ptx_of(y, x.kind)}, {a};"
        return out

    def compare(self, x: Value, relation: str, y: Any) -> Value:
        """Returns a condition: whether a relation, like "lt", holds between x and y."""
        out = self.write(f"setp.{relation}.{x.kind}", "pred", x, y, of=x.kind)
        out.comparison = len(self.lines), relation, x, y
        return out

    def min(self, a: Value, b: Any) -> Value:
        """Returns the smaller number; if one is NaN, the other."""
        return self.op("min", a.kind, a, b)

    def max(self, a: Value, b: Any) -> Value:
        """Returns the larger number; if one is NaN, the other."""
        return self.op("max", a.kind, a, b)

    def multiply_add(self, a: Value, b: Any, c: Any) -> Value:
        """Returns a * b + c; floats are rounded only once."""
        return self.op("fma.rn" if a.kind == "f32" else "mad.lo", a.kind, a, b, c)

    def multiply_high(self, a: Value, b: Value) -> Value:
        """Returns the upper half of the bits of the product."""
        return self.op("mul.hi", a.kind, a, b)

    def divide(self, a: Value, b: Any) -> Value:
        """Returns a / b of floats, accurate to two units in the last place."""
        return self.op("div.full", "f32", a, b)

    def multiply_wide(self, a: Value, b: int) -> Value:
        """Returns the 64-bit product of an unsigned number and a constant."""
        return self.write("mul.wide.u32", "u64", a, b)

    def at(self, array: Value, number: Any, itemsize: int) -> Value:
        """Returns the address of item `number` of an array that starts at the address `array`."""
        return self.multiply_add(number, itemsize, array)

    def reduce(self, op: str, values: Sequence[Value]) -> Value:
        """Reduces values by an instruction, like "max.NaN", in a tree of pairs."""
        values = list(values)
        while len(values) > 1:
            unpaired = values[len(values) // 2 * 2 :]
            values = [self.op(op, a.kind, a, b) for a, b in zip(values[::2], values[1::2])] + unpaired
        return values[0]

    def select(self, condition: Value, a: Any, b: Any, kind: str | None = None) -> Value:
        """Returns a where the condition holds, else b."""
        kind = kind or next(v.kind for v in (a, b) if isinstance(v, Value))
        return self.write(f"selp.{kind if kind == 'f32' else _untyped(kind)}", kind, a, b, condition)

    def exp2(self, x: Value) -> Value:
        """Returns 2^x."""
        return self.op("ex2.approx.ftz", "f32", x)

    def log2(self, x: Value) -> Value:
        """Returns the logarithm to base 2, accurate to 2^-22. That is inexact near 1, where the logarithm is 0."""
        return self.op("lg2.approx.ftz", "f32", x)

    def absolute(self, x: Value) -> Value:
        """Returns the absolute value."""
        return self.op("abs", x.kind, x)

    def convert(self, x: Value, kind: str, to_integer: str = "rzi") -> Value:
        """Returns the number in another kind. A conversion to a float gives the nearest float.

        For a float to an integer, `to_integer` sets the rounding: "rzi" (toward zero), "rni" (nearest) or "rpi" (up).
        """
        if kind in _FLOATS:
            rounding = "" if x.kind in _FLOATS and _BITS[x.kind] < _BITS[kind] else "rn."
        else:
            rounding = f"{to_integer}." if x.kind in _FLOATS else ""
        return self.write(f"cvt.{rounding}{kind}.{x.kind}", kind, x)

    def split(self, x: Value, kind: str = "u32") -> tuple[Value, Value]:
        """Returns the lower and the upper half of the bits, each in the given kind."""
        low, high = self.fresh(kind), self.fresh(kind)
        self += f"mov.b{_BITS[x.kind]} {{{low}, {high}}}, {x};"
        return low, high

    def join(self, low: Value, high: Value, kind: str = "u64") -> Value:
        """Joins a lower and an upper half to a number."""
        out = self.fresh(kind)
        self += f"mov.b{_BITS[kind]} {out}, {{{low}, {high}}};"
        return out

    # --- Bits

    def count_ones(self, x: Value) -> Value:
        """Returns the number of bits that are 1."""
        return self.write("popc.b32", "u32", x)

    def highest_bit(self, x: Value) -> Value:
        """Returns the number of the highest bit that is 1."""
        return self.write("bfind.u32", "u32", x)

    def lowest_bit(self, x: Value) -> Value:
        """Returns the number of the lowest bit that is 1; 32 if x is 0."""
        return self.write("clz.b32", "u32", self.write("brev.b32", "u32", x))

    # --- Control

    def label(self, name: str) -> str:
        """Returns a new label that starts with this name."""
        self.labels += 1
        return f"{name}{self.labels}"

    @contextlib.contextmanager
    def block(self) -> Iterator[Callable[..., None]]:
        """Opens a block. leave() in it jumps to its end; leave(condition) jumps where the condition holds."""
        end = self.label("end")

        def leave(condition: Condition = None) -> None:
            self.lines.append(f"{_if(condition)}bra {end};")

        yield leave
        self += f"{end}:"

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Opens a block that runs only in threads where the condition holds."""
        with self.block() as leave:
            leave(~condition)
            yield

    @contextlib.contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """Opens a loop. again(condition), the last call in it, repeats the loop where the condition holds."""
        start = self.label("again")
        self += f"{start}:"

        def again(condition: Value) -> None:
            self.lines.append(f"@{condition} bra {start};")

        yield again

    @contextlib.contextmanager
    def loop(self) -> Iterator[Callable[..., None]]:
        """Opens an endless loop. leave(condition) ends it where the condition holds."""
        start = self.label("again")
        with self.block() as leave:
            self += f"{start}:"
            yield leave
            self += f"bra {start};"

    @contextlib.contextmanager
    def each(self, first: Value | int, end: Value | int, step: int = 1) -> Iterator[Value]:
        """Opens a GPU loop over the numbers first, first + step, .. below end."""
        number = self.var(first, "u32")
        with self.loop() as leave:
            leave(number >= end)
            yield number
            self.increase(number, step)

    # --- Memory

    def load(
        self,
        address: Value,
        kind: str,
        *,
        offset: int = 0,
        when: Condition = None,
        default: Any = None,
        space: str = "shared",
    ) -> Value:
        """Returns the number in memory at address + offset, or the default where `when` does not hold.

        Without a default the result is undefined there.
        """
        out = self.fresh(kind) if default is None else self.var(default, kind)
        self.load_into([out], address, offset=offset, when=when, space=space)
        return out

    def load_vector(self, address: Value, kind: str, count: int, *, offset: int = 0) -> list[Value]:
        """Loads neighbouring numbers in shared memory, up to 16 bytes at a time. `count` is a power of two."""
        out = [self.fresh(kind) for _ in range(count)]
        self.load_into(out, address, offset=offset)
        return out

    def load_into(
        self,
        registers: list[Value],
        address: Value,
        *,
        offset: int = 0,
        when: Condition = None,
        space: str = "shared",
    ) -> None:
        """Loads neighbouring numbers at address + offset into a power of two of registers, where `when` holds."""
        kind = registers[0].kind
        for byte, vector, names in _vectors([str(register) for register in registers], kind):
            self += f"{_if(when)}ld.{space}{vector}.b{_BITS[kind]} {names}, [{address}+{offset + byte}];"

    def store(
        self,
        address: Value,
        *values: Any,
        offset: int = 0,
        when: Condition = None,
        space: str = "shared",
    ) -> None:
        """Writes neighbouring values, or 32-bit integers, to memory, up to 16 bytes at a time."""
        kind = values[0].kind if isinstance(values[0], Value) else "u32"
        for byte, vector, names in _vectors([_ptx_of(value, kind) for value in values], kind):
            self += f"{_if(when)}st.{space}{vector}.b{_BITS[kind]} [{address}+{offset + byte}], {names};"

    def add_to(self, address: Value, number: Any, when: Condition = None, *, offset: int = 0) -> None:
        """Adds atomically to the number in shared memory at address + offset."""
        add = "red.relaxed.cta.shared::cta.add.u32"
        self += f"{_if(when)}{add} [{address}+{offset}], {_ptx_of(number, 'u32')};"

    def take_from(
        self, address: Value, number: Any, *, offset: int = 0, when: Condition = None, default: Any = None
    ) -> Value:
        """Adds atomically to a number in shared memory and returns its old value; otherwise like `load`."""
        out = self.fresh("u32") if default is None else self.var(default, "u32")
        add = "atom.relaxed.cta.shared::cta.add.u32"
        self += f"{_if(when)}{add} {out}, [{address}+{offset}], {_ptx_of(number, 'u32')};"
        return out

    # --- Warps

    def shuffle(self, x: Value, mode: str, by: Any) -> Value:
        """Returns the value of another lane, number lane ^ by ("bfly"), lane + by ("down") or by ("idx")."""
        if _BITS[x.kind] == 64:
            low, high = (self.shuffle(half, mode, by) for half in self.split(x))
            return self.join(low, high, x.kind)
        return self.write(f"shfl.sync.{mode}.b32", x.kind, x, by, LANES - 1, WHOLE_WARP, of="u32")

    def shuffle_up(self, x: Value, by: int) -> tuple[Value, Value]:
        """Returns the value of lane number lane - by, and a condition: whether that lane exists."""
        out, inside = self.fresh(x.kind), self.fresh("pred")
        self += f"shfl.sync.up.b32 {out}|{inside}, {x}, {by}, 0, {WHOLE_WARP};"
        return out, inside

    def over_lanes(self, op: str, x: Value) -> Value:
        """Reduces an integer over the lanes of a warp by "add", "min" or "max"; all lanes get the result."""
        return self.write(f"redux.sync.{op}.{x.kind}", x.kind, x, WHOLE_WARP)

    def any(self, condition: Value) -> Value:
        """Returns a condition: whether the given one holds in any lane of the warp."""
        return self.write("vote.sync.any.pred", "pred", condition, WHOLE_WARP)

    def ballot(self, condition: Value) -> Value:
        """Returns one bit for each lane of the warp: whether the condition holds there."""
        return self.write("vote.sync.ballot.b32", "u32", condition, WHOLE_WARP)


def _untyped(kind: str) -> str:
    """Returns the untyped PTX type of a register for values of a kind."""
    return kind if kind == "pred" else f"b{max(16, _BITS[kind])}"  # 8-bit values have 16-bit registers


def _typed(op: str, kind: str) -> str:
    """Returns an instruction with its type. Sums and products of floats are never fused to a multiply-add."""
    if op in ("and", "or", "xor", "not"):
        return f"{op}.{_untyped(kind)}"
    return f"{op}.rn.f32" if kind == "f32" and op in ("add", "sub", "mul") else f"{op}.{kind}"


def _if(condition: Condition) -> str:
    return "" if condition is None else f"@{condition} "


def _vectors(registers: list[str], kind: str) -> Iterator[tuple[int, str, str]]:
    """Yields the first byte, the suffix and the registers of each access to neighbouring numbers."""
    itemsize = _BITS[kind] // 8
    size = min(len(registers), ACCESS_BYTES // itemsize)
    for i in range(0, len(registers), size):
        names = ", ".join(registers[i : i + size])
        yield (itemsize * i, f".v{size}", f"{{{names}}}") if size > 1 else (itemsize * i, "", names)


def _ptx_of(value: Any, kind: str) -> str:
    """Returns the name of a register, or a number in PTX syntax. Text stays as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, Value):
        if value.name.startswith("!"):
            return value.program.op("not", "pred", ~value).name
        return value.name
    # PTX writes a float as 0f and the eight hexadecimal digits of its bits
    return f"0f{np.float32(value).view(np.uint32):08X}" if kind == "f32" else str(int(value))
