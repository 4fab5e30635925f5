"""PTX written as Python arithmetic: a `Program` is the text so far, a `Value` is a register in it.

    p = Program()
    address = p.operand("address", "u32")
    x = p.load(address, "f32")
    with p.when(x > 0.0):
        p.store(address, p.exp2(x - 1.0))

writes

    ld.shared.b32 r0, [<address>+0];  setp.gt.f32 r1, r0, 0f00000000;  @!r1 bra end1;
    sub.rn.f32 r2, r0, 0f3F800000;  ex2.approx.ftz.f32 r3, r2;  st.shared.b32 [<address>+0], r3;  end1:

Python runs once, while the text is written. docs/dev/ptx.md has the rules that follow from this.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.ptx.kinds import BITS, check_bits, number_text, operand_of, typed, untyped
from pallas_softmax._src.gpu.ptx.values import Arithmetic, Condition, Value

_WHOLE_WARP = "0xffffffff"  # lane mask of a warp instruction: all lanes take part


class Program(Arithmetic):
    """A PTX program; the top of this file shows how to write one.

    If an instruction has no function here or in `Arithmetic`, `+=` appends it as a line of text.
    """

    def __init__(self):
        super().__init__()
        self.labels = 0

    # --- Registers

    def operand(self, name: str, kind: str) -> Value:
        """Returns the operand or the result <name>. An operand must not be changed; a result must be set."""
        return Value(self, f"<{name}>", kind)

    def operands(self, kind: str, *names: str) -> list[Value]:
        return [self.operand(name, kind) for name in names]

    def var(self, start: Any, kind: str | None = None) -> Value:
        """Returns a new register that starts with a number or a value, and may be changed later."""
        out = self.fresh(kind or start.kind)
        self.set(out, start)
        return out

    def set(self, register: Value, value: Any, when: Condition = None) -> None:
        instruction = f"mov.{untyped(register.kind)}"
        text = self.text_of(instruction, operand_of("mov", register.kind), value)
        self += f"{_if(when)}{instruction} {register}, {text};"

    def increase(self, register: Value, by: Any, when: Condition = None) -> None:
        self.update(register, "add", by, when)

    def update(self, register: Value, op: str, value: Any, when: Condition = None) -> None:
        """Applies an instruction, like "max", to a register and a value, in place, where `when` holds."""
        instruction = typed(op, register.kind)
        text = self.text_of(instruction, operand_of(op, register.kind), value)
        self += f"{_if(when)}{instruction} {register}, {register}, {text};"

    def special(self, name: str) -> Value:
        return self.write("mov.u32", "u32", f"%{name}")

    # --- Control

    def _label(self, name: str) -> str:
        self.labels += 1
        return f"{name}{self.labels}"

    def _jump(self, label: str, condition: Condition = None) -> None:
        self += f"{_if(condition)}bra {label};"

    @contextlib.contextmanager
    def block(self) -> Iterator[Callable[..., None]]:
        """Opens a block. leave() in it jumps to its end; leave(condition) jumps where the condition holds."""
        end = self._label("end")
        yield functools.partial(self._jump, end)
        self += f"{end}:"

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Opens a block that runs only in threads where the condition holds."""
        with self.block() as leave:
            leave(~condition)
            yield

    @contextlib.contextmanager
    def repeat(self) -> Iterator[Callable[..., None]]:
        """Opens a loop. again(condition), the last call in it, repeats the loop where the condition holds."""
        start = self._label("again")
        self += f"{start}:"
        yield functools.partial(self._jump, start)

    @contextlib.contextmanager
    def loop(self) -> Iterator[Callable[..., None]]:
        """Opens an endless loop. leave(condition) ends it where the condition holds."""
        with self.repeat() as again, self.block() as leave:
            yield leave
            again()

    @contextlib.contextmanager
    def each(self, first: Value | int, end: Value | int, step: int = 1) -> Iterator[Value]:
        """Opens a GPU loop over the numbers first, first + step, .. below end."""
        number = self.var(first, "u32")
        with self.loop() as leave:
            leave(number >= end)
            yield number
            self.increase(number, step)

    # --- Memory

    def load(self, address: Value, kind: str, *, offset: int = 0, when: Condition = None, default: Any = None) -> Value:
        """Returns the number in memory. Where `when` does not hold, it is the default, or undefined without one."""
        out = self.fresh(kind) if default is None else self.var(default, kind)
        self.load_into([out], address, offset=offset, when=when)
        return out

    def load_vector(self, address: Value, kind: str, count: int, *, offset: int = 0) -> list[Value]:
        """Loads neighbouring numbers in shared memory, up to 16 bytes at a time. `count` is a power of two."""
        out = [self.fresh(kind) for _ in range(count)]
        self.load_into(out, address, offset=offset)
        return out

    def load_into(
        self, registers: list[Value], address: Value, *, offset: int = 0, when: Condition = None, space: str = ""
    ) -> None:
        """Loads neighbouring numbers into a power of two of registers, where `when` holds."""
        bits, space = BITS[registers[0].kind], space or _space(address)
        check_bits(f"ld.{space}.b{bits}", bits, *(register.kind for register in registers))
        for byte, vector, names in _vectors([str(register) for register in registers], bits // 8):
            instruction = f"ld.{space}{vector}.b{bits}"
            self += f"{_if(when)}{instruction} {names}, {self._memory(instruction, address, offset + byte)};"

    def store(self, address: Value, *values: Any, offset: int = 0, when: Condition = None, space: str = "") -> None:
        """Writes neighbouring values, or 32-bit integers, to memory, up to 16 bytes at a time.

        The values have the same number of bits. Their kinds may differ, because memory has none.
        """
        kind = values[0].kind if isinstance(values[0], Value) else "u32"
        bits, operand, space = BITS[kind], operand_of("st", kind), space or _space(address)
        instruction = f"st.{space}.b{bits}"
        check_bits(instruction, bits, *(v.kind for v in values if isinstance(v, Value)))
        texts = [str(v) if isinstance(v, Value) else number_text(instruction, operand, v) for v in values]
        for byte, vector, names in _vectors(texts, bits // 8):
            instruction = f"st.{space}{vector}.b{bits}"
            self += f"{_if(when)}{instruction} {self._memory(instruction, address, offset + byte)}, {names};"

    def add_to(self, address: Value, number: Any, when: Condition = None, *, offset: int = 0) -> None:
        """Adds atomically to a number in shared memory."""
        add = "red.relaxed.cta.shared::cta.add.u32"
        self += f"{_if(when)}{add} {self._memory(add, address, offset)}, {self.text_of(add, 'i32', number)};"

    def take_from(
        self, address: Value, number: Any, *, offset: int = 0, when: Condition = None, default: Any = None
    ) -> Value:
        """Adds atomically to a number in shared memory and returns its old value; otherwise like `load`."""
        out = self.fresh("u32") if default is None else self.var(default, "u32")
        add = "atom.relaxed.cta.shared::cta.add.u32"
        at, number = self._memory(add, address, offset), self.text_of(add, "i32", number)
        self += f"{_if(when)}{add} {out}, {at}, {number};"
        return out

    def _memory(self, instruction: str, address: Value, offset: int) -> str:
        kind = "i64" if ".global" in instruction else "i32"
        return f"[{self.text_of(instruction, kind, address)}+{offset}]"

    # --- Warps

    def sync_warp(self) -> None:
        """Shows the lanes of the warp what the others wrote to shared memory."""
        self += f"bar.warp.sync {_WHOLE_WARP};"

    def shuffle(self, x: Value, mode: str, by: Any) -> Value:
        """Returns the value of another lane, number lane ^ by ("bfly"), lane + by ("down") or by ("idx")."""
        if BITS[x.kind] == 64:
            low, high = (self.shuffle(half, mode, by) for half in self.split(x))
            return self.join(low, high, x.kind)
        check_bits(f"shfl.sync.{mode}.b32", 32, x.kind)
        operands = x, by, LANES - 1, _WHOLE_WARP
        return self.write(f"shfl.sync.{mode}.b32", x.kind, *operands, of=(x.kind, *["i32"] * 3))

    def shuffle_up(self, x: Value, by: int) -> tuple[Value, Value]:
        """Returns the value of lane number lane - by, and a condition: whether that lane exists."""
        check_bits("shfl.sync.up.b32", 32, x.kind)
        out, inside = self.fresh(x.kind), self.fresh("pred")
        self += f"shfl.sync.up.b32 {out}|{inside}, {x}, {by}, 0, {_WHOLE_WARP};"
        return out, inside

    def over_lanes(self, op: str, x: Value) -> Value:
        """Reduces an integer over the lanes of a warp by "add", "min" or "max"; all lanes get the result."""
        return self.write(f"redux.sync.{op}.{x.kind}", x.kind, x, _WHOLE_WARP)

    def any(self, condition: Value) -> Value:
        return self.write("vote.sync.any.pred", "pred", condition, _WHOLE_WARP, of="pred")

    def ballot(self, condition: Value) -> Value:
        return self.write("vote.sync.ballot.b32", "u32", condition, _WHOLE_WARP, of="pred")


def _space(address: Value) -> str:
    """Returns where an address is: it has 64 bits in device memory, and 32 bits in shared memory."""
    return "global" if BITS[address.kind] == 64 else "shared"


def _if(condition: Condition) -> str:
    if condition is None:
        return ""
    if condition.kind != "pred":
        raise TypeError(f"a condition has kind pred, not {condition.kind} ({condition})")
    return f"@{condition} "


def _vectors(registers: list[str], itemsize: int) -> Iterator[tuple[int, str, str]]:
    """Yields the first byte, the suffix and the registers of each access to neighbouring numbers."""
    size = min(len(registers), ACCESS_BYTES // itemsize)
    for i in range(0, len(registers), size):
        names = ", ".join(registers[i : i + size])
        yield (itemsize * i, f".v{size}", f"{{{names}}}") if size > 1 else (itemsize * i, "", names)
