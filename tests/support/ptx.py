"""Runs the text of inline PTX in Python: one CTA of 128 threads, and shared memory, of which it knows the alignment.

It knows the instructions that the search of top-k is made of, and says so of any other. It knows no timing: a thread
runs until it waits for its warp or its CTA, and so a missing barrier is likely to give a wrong result.
"""

import operator
import re

import numpy as np

THREADS, LANES = 128, 32
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_STATEMENT = re.compile(r"\s*(?:([A-Za-z_]\w*):(?!:)|([^;]*?);)")
_PREDICATE = re.compile(r"^\s*(?:@(!?\S+)\s)?\s*(.*?)\s*$", re.S)
_ARGUMENT = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)")


def run(code, memory: np.ndarray, **operands) -> list[dict[str, int]]:
    """Runs the text, in which <name> stands for an operand, on shared memory, bytes; returns their registers.

    An operand is a number, or an array with one for each thread.
    """
    text = re.sub(r"<([a-z]\w*)>", r"%\1", re.sub(r"<(\d+)>", "", str(code)))
    text = re.sub(r";\s*\}", ";", re.sub(r"\{\s*(?=\.reg)", "", text))
    program, labels = _parse(re.sub(r"\.reg[^;]*;", "", text))
    operands = {f"%{name}": np.broadcast_to(value, THREADS).tolist() for name, value in operands.items()}
    threads = []
    for t in range(THREADS):
        own = {name: values[t] & 0xFFFFFFFF for name, values in operands.items()}
        threads.append(_Thread(memory, own | {"%thread": t, "%lanemask_lt": (1 << t % LANES) - 1}))
    while True:
        for thread in threads:
            thread.run(program, labels)
        if all(thread.at == len(program) for thread in threads):
            return [thread.registers for thread in threads]
        if len({thread.at for thread in threads}) == 1 and program[threads[0].at][1].startswith("bar."):
            waiting = [threads]
        else:
            warps = [threads[w : w + LANES] for w in range(0, THREADS, LANES)]
            waiting = [
                w for w in warps if len({thread.at for thread in w}) == 1 and _of_warp(program, w[0].at)
            ]
        places = {t.at: program[t.at : t.at + 1] for t in threads}
        assert waiting, f"threads wait for each other at different places: {places}"
        for group in waiting:
            _, op, arguments = program[group[0].at]
            if not op.startswith("bar."):
                _exchange(op.split("."), arguments, group)
            for thread in group:
                thread.at += 1


def _parse(text):
    program, labels = [], {}
    for label, statement in _STATEMENT.findall(text):
        if label:
            assert label not in labels
            labels[label] = len(program)
        elif statement.strip():
            predicate, rest = _PREDICATE.findall(statement)[0]
            op, _, arguments = rest.partition(" ")
            program.append((predicate or None, op, [a.strip() for a in _ARGUMENT.findall(arguments)]))
    return program, labels


def _of_warp(program, at):
    return at < len(program) and program[at][1].startswith(("shfl.", "redux.", "vote."))


def _signed(value, bits):
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def _float(bits):
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def _names(operand):
    """The registers of an operand: several in braces, or one."""
    return [name.strip() for name in operand.strip("{}").split(",")]


class _Thread:
    def __init__(self, memory, registers):
        self.memory, self.registers, self.at = memory, registers, 0

    def value(self, name):
        if name.startswith("0f"):
            return int(name[2:], 16)
        # a register that was not written yet holds anything
        return self.registers.get(name, 0xABCDEF) if re.match(r"[%a-z]", name) else int(name, 0)

    def span(self, operand, size):
        base, _, offset = operand.strip("[]").partition("+")
        at = self.value(base.strip()) + int(offset or 0)
        assert at % size == 0 and 0 <= at <= len(self.memory) - size, operand
        return slice(at, at + size)

    def run(self, program, labels):
        """Runs until the thread is at the end, or waits for others."""
        while self.at < len(program):
            predicate, op, arguments = program[self.at]
            if op.startswith("bar.") or _of_warp(program, self.at):
                return
            self.at += 1
            if predicate is None or bool(self.value(predicate.lstrip("!"))) != predicate.startswith("!"):
                if op == "bra":
                    self.at = labels[arguments[0]]
                else:
                    self.execute(op.split("."), arguments)

    def execute(self, op, arguments):
        bits = int(re.sub(r"\D", "", op[-1]) or 1)
        if op[0] in ("ld", "st", "atom", "red"):
            return self.access(op, arguments, bits // 8)
        if op[0] == "mov" and "{" in "".join(arguments[:2]):
            return self.split_or_join(arguments, bits)
        values = [self.value(a) for a in arguments[1:]]
        result = _alu(op, values, bits)
        self.registers[arguments[0]] = result if op[0] == "setp" else result & (1 << bits) - 1
        return None

    def access(self, op, arguments, size):
        if op[0] in ("atom", "red"):
            span = self.span(arguments[-2], size)
            before = int.from_bytes(self.memory[span].tobytes(), "little")
            self.memory[span] = np.frombuffer(
                (before + self.value(arguments[-1])).to_bytes(size, "little"), "u1"
            )
            if op[0] == "atom":
                self.registers[arguments[0]] = before
            return
        operand, address = arguments if op[0] == "ld" else arguments[::-1]
        names = _names(operand)
        span = self.span(address, size * len(names))
        if op[0] == "ld":
            for i, name in enumerate(names):
                part = self.memory[span][i * size : (i + 1) * size]
                self.registers[name] = int.from_bytes(part.tobytes(), "little")
        else:
            parts = [(self.value(name) & (1 << 8 * size) - 1).to_bytes(size, "little") for name in names]
            self.memory[span] = np.frombuffer(b"".join(parts), "u1")

    def split_or_join(self, arguments, bits):
        into, out_of = (_names(a) for a in arguments)
        each = bits // max(len(into), len(out_of))
        whole = sum((self.value(name) & (1 << each) - 1) << each * i for i, name in enumerate(out_of))
        if len(out_of) == 1:
            whole = self.value(out_of[0])
        each = bits // len(into)
        self.registers |= {name: whole >> each * i & (1 << each) - 1 for i, name in enumerate(into)}


def _alu(op, values, bits):
    kind = op[-1]
    a, b, c = [*values, 0, 0][:3]
    if kind == "f32" and op[0] in ("add", "mul", "rcp"):
        with np.errstate(all="ignore"):
            x = {"add": _float(a) + _float(b), "mul": _float(a) * _float(b), "rcp": 1 / _float(a)}[op[0]]
        return int(np.float32(x).view(np.uint32))
    if kind[0] == "s" and op[0] in ("max", "min", "setp", "shr"):
        a, b = _signed(a, bits), _signed(b, bits)
    match op[0]:
        case "mov":
            return a
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b >> 32 if op[1] == "hi" else a * b
        case "mad":
            return a * b + c
        case "and":
            return a & b
        case "or":
            return a | b
        case "xor":
            return a ^ b
        case "not":
            return ~int(a)
        case "shl":
            return a << min(b, 32)
        case "shr":
            return a >> min(b, 32)
        case "max" | "min":
            return max(a, b) if op[0] == "max" else min(a, b)
        case "selp":
            return a if c else b
        case "popc":
            return a.bit_count()
        case "prmt":
            held = (a | b << 32).to_bytes(8, "little")
            chosen = [(held[digit & 7], digit & 8) for digit in (c >> 4 * i & 15 for i in range(4))]
            return int.from_bytes((0xFF * (x >> 7) if sign else x for x, sign in chosen), "little")
        case "lop3":
            return sum(
                (values[3] >> (a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) & 1) << i for i in range(32)
            )
        case "brev":
            return int(f"{a:032b}"[::-1], 2)
        case "clz":
            return 32 - a.bit_length()
        case "bfind":
            return a.bit_length() - 1
        case "setp":
            holds = _COMPARE[op[1]](a, b)
            return {"and": holds and bool(c), "or": holds or bool(c)}.get(op[2], holds)
        case "cvt":
            return _converted(op[-2], kind, a)
    raise NotImplementedError(".".join(op))


def _converted(into, out_of, a):
    match into, out_of:
        case "f32", "u32":
            return int(np.float32(a).view(np.uint32))
        case "u32", "f32":
            return min(0xFFFFFFFF, int(_float(a)))
        case "s32", "s16":
            return _signed(a, 16)
    raise NotImplementedError(f"cvt.{into}.{out_of}")


def _exchange(op, arguments, warp):
    """Runs an instruction that the lanes of a warp run together."""
    target, _, whether = arguments[0].partition("|")
    values = [lane.value(arguments[1]) for lane in warp]
    match op[0]:
        case "vote":
            results = [sum(bool(v) << i for i, v in enumerate(values))] * LANES
        case "redux":
            values = [_signed(v, 32) for v in values] if op[-1] == "s32" else values
            results = [{"max": max, "min": min, "add": sum}[op[2]](values) & 0xFFFFFFFF] * LANES
        case _:
            sources = []
            for i, lane in enumerate(warp):
                by = lane.value(arguments[2])
                sources.append({"up": i - by, "down": i + by, "bfly": i ^ by, "idx": by % LANES}[op[2]])
            inside = [0 <= j < LANES for j in sources]
            results = [values[j] if ok else values[i] for i, (j, ok) in enumerate(zip(sources, inside))]
            if whether:
                for lane, ok in zip(warp, inside):
                    lane.registers[whether] = ok
    for lane, result in zip(warp, results):
        lane.registers[target] = result
