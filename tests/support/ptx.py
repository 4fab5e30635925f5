"""Runs the text of inline PTX in numpy: the threads of a cluster of CTAs, with branches, barriers, shared memory, and
arrays in device memory.

Threads of a warp at the same instruction run it together, and threads that lag behind run first. A warp that is chosen
at random runs for a while and then another one, or all warps run together, which is faster. Threads run until they
diverge or wait, so a missing barrier is likely to give a wrong result, and more likely if one warp runs far ahead.

The machine knows the instructions that the package's programs use, and refuses any other. It checks the alignment and
the bounds of memory accesses. It does not model timing.
"""

import functools
import re

import numpy as np

LANES, WARPGROUP = 32, 128
_PAIRS = {"u16x2": np.uint16, "s16x2": np.int16, "f16x2": np.float16, "bf16x2": np.uint16}
_DTYPES = {"f16": np.float16, "f32": np.float32, "bf16": np.uint16, "pred": np.bool_}
_DTYPES |= dict.fromkeys(_PAIRS, np.uint32)
_DTYPES |= {f"{a}{bits}": getattr(np, f"uint{bits}") for a in "ub" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"s{bits}": getattr(np, f"int{bits}") for bits in (16, 32, 64)}
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal}  # fmt: skip
_FUNCTIONS = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    **{"abs": np.abs, "lg2": np.log2},
}
_OF_WARP = ("shfl", "redux", "vote")
_PEER = 24  # bits of an address in shared memory; the bits above hold the number of another CTA, plus one
_DEVICE = 32  # bits of an address in device memory; the bits above hold the number of an array, plus one
_MOST_BYTES = 16  # of an access
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # the NaN that min.NaN and max.NaN return for any NaN
_UNSET = 0xABCDEF  # bits of a register that was not written yet
# How likely another warp runs next, while the last one could go on. Without one barrier of `ranking`, 10 of 32
# tests fail with this number; if every choice is at random, 1 fails.
_SWITCH = 0.05

_STATEMENT = re.compile(r"\s*(?:([A-Za-z_]\w*):(?!:)|([^;]*?);)")
_PREDICATE = re.compile(r"^\s*(?:@(!?\S+)\s)?\s*(.*?)\s*$", re.S)
_ARGUMENT = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)")


class Device:
    """A copy of an array in device memory. Accesses outside of the array fail.

    Args:
      array: the array.
      offset: the array starts this number of bytes, a multiple of its itemsize, after a multiple of 256 bytes.

    Attributes:
      array: the copy, which the program changes.
    """

    def __init__(self, array, offset=0):
        self.start, self.end = offset, offset + array.nbytes
        self.memory = np.zeros(-(-self.end // _MOST_BYTES) * _MOST_BYTES, "u1")
        self.array = self.memory[self.start : self.end].view(array.dtype).reshape(array.shape)
        self.array[...] = array


def run(code, memory, **operands):
    """Runs the text in one CTA with one warpgroup and returns the machine. `memory` is shared memory, as bytes."""
    machine = Machine(code, memory[None], WARPGROUP, operands, np.random.default_rng(0))
    machine.run()
    return machine


class Machine:
    """Clusters of CTAs that run one text.

    Args:
      code: the text; <name> stands for an operand.
      memory: (CTAs of all clusters, bytes), the shared memory, which the program changes.
      threads: number of threads of a CTA.
      operands: by name, a number for all, or an array with one for each CTA or for each thread. A `Device` stands for
        its address.
      rng: chooses the warp that runs next; if None, all warps run together.
      clusters: number of clusters.

    Attributes:
      registers: (threads of all clusters,) uint64 by name.
      steps: number of instructions run, each by many threads.
    """

    def __init__(self, code, memory, threads, operands, rng=None, clusters=1):
        self.program, self.labels = _parse(str(code))
        self.memory, self.rng = memory, rng
        self.ctas, self.threads = len(memory) // clusters, threads  # of a cluster, of a CTA
        self.cta = np.arange(len(memory) * threads) // threads
        self.devices, self.steps = [], 0
        thread = np.arange(len(memory) * threads) % threads
        self.registers = {
            "%tid.x": thread.astype(np.uint64),
            "%thread": (thread % WARPGROUP).astype(np.uint64),
            "%lanemask_lt": ((1 << thread % LANES) - 1).astype(np.uint64),
        }
        for name, number in operands.items():
            if isinstance(number, Device):
                self.devices.append(number)
                number = (len(self.devices) << _DEVICE) + number.start
            per_thread = number if np.size(number) == len(self.cta) else np.broadcast_to(number, len(memory))[self.cta]
            self.write(f"%{name}", slice(None), per_thread)

    def run(self, most=10**7):
        """Runs until all threads are at the end."""
        end, count = len(self.program), len(self.cta)
        self.at = np.zeros(count, np.int64)  # the next instruction of each thread
        self.waiting = np.zeros(count, bool)
        self.arrived = np.zeros(count, np.int64)  # how often a thread arrived at the cluster's barrier
        self.waited = np.zeros(count, np.int64)
        warp = None
        while True:
            ready = np.flatnonzero(~self.waiting & (self.at < end))
            if not len(ready):
                if not self.waiting.any():
                    return
                places = np.unique(self.at[self.waiting])
                released = [self._release(place) for place in places]
                assert any(released), f"threads wait for each other: {[self.program[at] for at in places]}"
                continue
            if self.rng is not None:
                warps = np.unique(ready // LANES)
                if warp not in warps or self.rng.random() < _SWITCH:
                    warp = self.rng.choice(warps)
                ready = ready[ready // LANES == warp]
            at = self.at[ready]
            first = int(at.min())
            others = at[at != first]
            self._go(ready[at == first], first, int(others.min()) if len(others) else end)
            assert self.steps < most, f"no end after {most} steps"

    def _go(self, group, at, stop):
        """Runs threads that are at the same instruction until they diverge, wait, or reach other threads."""
        while at < stop:
            predicate, op, arguments = self.program[at]
            self.steps += 1
            if op[0] in (*_OF_WARP, "bar") or op[:3] == ["barrier", "cluster", "wait"]:
                assert predicate is None
                self.at[group], self.waiting[group] = at, True
                self._release(at)
                if self.waiting[group].any():
                    return
                at += 1
                continue
            some = group if predicate is None else group[self.value(predicate, group, "pred")]
            if op[0] == "bra":
                self.at[group] = at + 1
                self.at[some] = self.labels[arguments[0]]
                return
            if len(some):
                with np.errstate(all="ignore"):
                    self._execute(op, arguments, some)
            at += 1
        self.at[group] = at

    def _release(self, place) -> bool:
        """Releases the threads that wait at an instruction, if all have arrived; returns whether any were released."""
        _, op, arguments = self.program[place]
        here = self.waiting & (self.at == place)
        if op[0] == "barrier":  # the cluster's barrier
            arrivals = self.arrived.reshape(-1, self.ctas * self.threads).min(1)
            ready = here & (np.repeat(arrivals, self.ctas * self.threads) > self.waited)
            self.waited[ready] += 1
        else:
            together = LANES if op[0] in _OF_WARP or op[1] == "warp" else self.threads
            ready = np.repeat(here.reshape(-1, together).all(1), together)
            if op[0] in _OF_WARP and ready.any():
                self._exchange(op, arguments, np.flatnonzero(ready))
        self.at[ready] += 1
        self.waiting[ready] = False
        return bool(ready.any())

    # --- Registers

    def value(self, name, group, kind):
        """Returns an operand of some threads in the dtype of `kind`: (threads,), or one number for all."""
        dtype = _DTYPES[kind]
        if not re.match(r"[!%a-zA-Z_]", name):
            return _number(name, dtype)
        register = self.registers.get(name.lstrip("!"))
        bits = np.full(len(group), _UNSET, np.uint64) if register is None else register[group]
        if dtype is np.bool_:
            return (bits != 0) != name.startswith("!")
        return bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)

    def write(self, name, group, values):
        values = np.asarray(values)
        if name not in self.registers:
            self.registers[name] = np.full(len(self.cta), _UNSET, np.uint64)
        bits = values if values.dtype == bool else values.view(f"u{values.dtype.itemsize}")
        self.registers[name][group] = bits

    # --- Instructions

    def _execute(self, op, arguments, group):
        kind = op[-1]
        match op[0]:
            case "fence":
                return
            case "cp" if "prefetch" in op:
                at, size = (self.value(arguments[0].strip("[]"), group, "u64"), self.value(arguments[1], group, "u32"))
                for byte in (0, size - _MOST_BYTES):  # the first and the last 16 bytes
                    self._in_device(op, at.astype(np.int64) + byte, _MOST_BYTES, group, op)
            case "barrier":
                self.arrived[group] += 1
            case "ld" | "st" | "red" | "atom":
                self._access(op, arguments, group)
            case "mov" if "{" in "".join(arguments):
                self._split_or_join(arguments, kind, group)
            case "setp":
                a, b = (self.value(name, group, kind) for name in arguments[1:3])
                holds = _COMPARE[op[1]](a, b)
                if op[2] in ("and", "or"):
                    also = self.value(arguments[3], group, "pred")
                    holds = holds & also if op[2] == "and" else holds | also
                self.write(arguments[0], group, holds)
            case "selp":
                a, b = (self.value(name, group, kind) for name in arguments[1:3])
                self.write(arguments[0], group, np.where(self.value(arguments[3], group, "pred"), a, b))
            case "shl" | "shr":
                x, by = self.value(arguments[1], group, kind), self.value(arguments[2], group, "u32")
                self.write(arguments[0], group, _shifted(op[0], x, by))
            case "mad" if op[1] == "wide":
                a, b, c = (self.value(name, group, of) for name, of in zip(arguments[1:], (kind, kind, "u64")))
                self.write(arguments[0], group, a.astype(np.uint64) * np.uint64(b) + c)
            case "cvt":
                self.write(arguments[0], group, _converted(op, self.value(arguments[1], group, kind)))
            case _:
                operands = [self.value(name, group, kind) for name in arguments[1:]]
                self.write(arguments[0], group, _computed(op, *operands))

    def _split_or_join(self, arguments, kind, group):
        into, out_of = (_names(argument) for argument in arguments)
        bits = 8 * np.dtype(_DTYPES[kind]).itemsize // max(len(into), len(out_of))  # bits of each part
        whole = np.zeros(len(group), np.uint64)
        for i, name in enumerate(out_of):
            part = self.value(name, group, kind if len(out_of) == 1 else f"b{bits}")
            whole |= part.astype(np.uint64) << np.uint64(bits * i)
        for i, name in enumerate(into):
            part = whole >> np.uint64(bits * i)
            self.write(name, group, part & np.uint64((1 << bits) - 1) if len(into) > 1 else part)

    def _access(self, op, arguments, group):
        size = int(re.sub(r"\D", "", op[-1])) // 8
        address, data = arguments[-2:] if op[0] != "ld" else arguments[::-1]
        names = _names(data)
        base, _, offset = address.strip("[]").partition("+")
        at = self.value(base.strip(), group, "u64").astype(np.int64) + int(offset or 0)
        where = f"{'.'.join(op)} {arguments}"
        memory, *row, at = (self._in_device if "global" in op else self._in_shared)(
            op, at, size * len(names), group, where
        )
        memory = memory.view(f"u{size}")
        for i, name in enumerate(names):
            place = *row, at // size + i
            if op[0] == "ld":
                self.write(name, group, memory[place])
                continue
            numbers = np.broadcast_to(self.value(name, group, f"b{8 * size}"), group.shape)
            if op[0] == "st":
                memory[place] = numbers
            elif op[0] == "red":
                (np.maximum if "max" in op else np.add).at(memory, place, numbers)
            else:
                before = []
                for *of_row, word, number in zip(*place, numbers):
                    before.append(memory[*of_row, word])
                    memory[*of_row, word] += number
                self.write(arguments[0], group, np.array(before))

    def _in_shared(self, op, at, span, group, where):
        """Returns the shared memory, and the CTA and the byte of each access. `span` is in bytes."""
        at &= 0xFFFFFFFF
        cta, at = (at >> _PEER) - 1, at & ((1 << _PEER) - 1)
        assert "shared_cluster" in op or (cta < 0).all(), f"an address of another CTA: {where}"
        own = self.cta[group]
        assert (at % span == 0).all(), f"misaligned: {where}"
        inside = (at + span <= self.memory.shape[1]) & (cta < self.ctas)
        assert inside.all(), f"outside: {where}"
        return self.memory, np.where(cta < 0, own, own // self.ctas * self.ctas + cta), at

    def _in_device(self, op, at, span, group, where):
        """Returns the memory of the array in device memory, and the byte of each access. `span` is in bytes."""
        (number,) = np.unique(at >> _DEVICE)
        assert 1 <= number <= len(self.devices), f"not in device memory: {where}"
        device, at = self.devices[number - 1], at & ((1 << _DEVICE) - 1)
        assert (at % span == 0).all(), f"misaligned: {where}"
        inside = (at >= device.start) & (at + span <= device.end)
        assert inside.all(), f"outside: {where}"
        return device.memory, at

    def _exchange(self, op, arguments, group):
        """Runs an instruction that exchanges values between the lanes of a warp."""
        target, _, whether = arguments[0].partition("|")
        values = self.value(arguments[1], group, {"vote": "pred", "redux": op[-1], "shfl": "b32"}[op[0]])
        values = np.broadcast_to(values, group.shape).reshape(-1, LANES)
        match op[0], op[2]:
            case "vote", "ballot":
                bits = values.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)
                result = bits.sum(1, keepdims=True)
            case "vote", "any":
                result = values.any(1, keepdims=True)
            case "redux", how:
                result = _FUNCTIONS[how].reduce(values, 1, values.dtype, keepdims=True)
            case "shfl", how:
                by = np.broadcast_to(self.value(arguments[2], group, "u32"), group.shape).reshape(-1, LANES)
                lane, by = np.arange(LANES)[None], by.astype(int)
                source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": by % LANES}[how]
                inside = (source >= 0) & (source < LANES)
                result = np.take_along_axis(values, np.where(inside, source, lane), 1)
                if whether:
                    self.write(whether, group, np.broadcast_to(inside, values.shape).ravel())
            case _:
                raise NotImplementedError(".".join(op))
        self.write(target, group, np.broadcast_to(result, values.shape).ravel())


# --- Tiles in registers


def held_by_threads(tile, x):
    """Returns the elements of each thread, (128, rows of a thread, elements), for x in the shape of the tile."""
    lanes = tile.lanes // tile.pieces
    shape = (-1, WARPGROUP // tile.lanes, tile.pieces, tile.steps, lanes, tile.vec)
    held = x.reshape(shape).transpose(1, 2, 4, 0, 3, 5)
    return held.reshape(WARPGROUP, held.shape[3], -1)


def run_on_tile(code, held):
    """Runs the text in one warpgroup, with the elements of each thread as <x{row}_{i}>, and returns the machine."""
    _, rows, count = held.shape
    operands = {f"x{row}_{i}": held[:, row, i].astype("int64") for row in range(rows) for i in range(count)}
    return run(code, np.zeros(16, "u1"), **operands)


def tile_of(machine, tile, name, dtype="int32"):
    """Returns the results <name{row}_{i}> of all threads in the shape of the tile: the inverse of `held_by_threads`."""
    lanes, rows = tile.lanes // tile.pieces, tile.rows // (WARPGROUP // tile.lanes)
    count = tile.steps * tile.vec
    found = [[machine.registers[f"%{name}{row}_{i}"] for i in range(count)] for row in range(rows)]
    found = np.moveaxis(np.array(found), -1, 0).astype("uint32").view(dtype)
    found = found.reshape(WARPGROUP // tile.lanes, tile.pieces, lanes, rows, tile.steps, tile.vec)
    return found.transpose(3, 0, 1, 4, 2, 5).reshape(tile.rows, -1)


# --- The text


def _parse(text):
    text = re.sub(r"\.reg[^;]*;", "", re.sub(r"<([a-z]\w*)>", r"%\1", text))
    program, labels = [], {}
    for label, statement in _STATEMENT.findall(text):
        if label:
            assert label not in labels
            labels[label] = len(program)
        elif statement.strip():
            predicate, rest = _PREDICATE.findall(statement)[0]
            op, _, arguments = rest.partition(" ")
            op = op.replace("::", "_").split(".")
            program.append((predicate or None, op, [a.strip() for a in _ARGUMENT.findall(arguments)]))
    return program, labels


def _names(argument):
    """Returns the registers of an argument: several in braces, or one."""
    return [name.strip() for name in argument.strip("{}").split(",")]


@functools.cache
def _number(text, dtype):
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16)).view(np.float32)
    if dtype is np.bool_:
        return np.bool_(int(text) != 0)
    bits = 8 * np.dtype(dtype).itemsize
    return np.array(int(text, 0) & (1 << bits) - 1, f"u{bits // 8}").view(dtype)[()]


def _shifted(op, x, by):
    bits = 8 * np.dtype(x.dtype).itemsize
    within = np.minimum(by, bits - 1).astype(x.dtype)
    if op == "shl":
        return np.where(by < bits, np.left_shift(x, within), x.dtype.type(0))
    return x >> within if x.dtype.kind == "i" else np.where(by < bits, x >> within, x.dtype.type(0))


def _converted(op, x):
    into, out_of = op[-2:]
    if into in _DTYPES and out_of == "f32" and np.dtype(_DTYPES[into]).kind in "iu":
        rounded = {"rzi": np.trunc, "rni": np.rint, "rpi": np.ceil}[op[1]](x.astype(np.float64))
        limits = np.iinfo(_DTYPES[into])
        most = float(limits.max) if limits.bits < 64 else np.nextafter(2.0**limits.bits, 0)
        return np.clip(np.nan_to_num(rounded), limits.min, most).astype(_DTYPES[into])
    if "bf16" in (into, out_of):
        raise NotImplementedError(".".join(op))
    return x.astype(_DTYPES[into])


def _halves(kind, *words):
    """Returns the halves of words, (threads, 2), in the dtype of a pair."""
    words = np.broadcast_arrays(*words)
    return [np.ascontiguousarray(word)[:, None].view(_PAIRS[kind]) for word in words]


def _first_is_largest(kind, a, b):
    """Returns whether the first of two 16-bit floats, given as bits, is the larger one or NaN."""
    if kind.startswith("bf16"):
        a, b = ((x.astype(np.uint32) << np.uint32(16)).view(np.float32) for x in (a, b))
    return (a >= b) | np.isnan(a)


def _computed(op, a, b=None, c=None, d=None):
    kind = op[-1]
    is_float = kind == "f32"
    if kind in _PAIRS and op[0] in ("add", "min", "max"):
        halves = _halves(kind, a, b)
        if "NaN" in op:
            out = np.where(_first_is_largest(kind, *halves), *halves)
        else:
            out = _FUNCTIONS[op[0]](*halves)
        return np.ascontiguousarray(out).view(np.uint32)[:, 0]
    if kind in ("bf16", "f16") and op[0] == "max":
        return np.where(_first_is_largest(kind, a, b), a, b)
    match op[0]:
        case "mov":
            return a
        case "mul" if op[1] == "wide":
            return a.astype(np.uint64) * np.uint64(b)
        case "shf":  # rotates, or shifts, the 64 bits b:a to the left, and returns the upper half
            whole = np.asarray(b).astype(np.uint64) << np.uint64(32) | a
            return (whole << c.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
        case "mul" if op[1] == "hi":
            return (a.astype(np.uint64) * np.asarray(b).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
        case "mad":
            return a * b + c
        case "fma":
            return (a.astype(np.float64) * np.float64(b) + np.float64(c)).astype(np.float32)
        case "div":
            return a / b if is_float else a // b
        case "rcp":
            return np.float32(1) / a
        case "prmt":  # selects bytes of a and b, or their signs
            bytes_ = np.stack(np.broadcast_arrays(a, b), -1).astype(np.uint32).view(np.uint8).reshape(-1, 8)
            picks = [int(c) >> 4 * i & 15 for i in range(4)]
            picked = [bytes_[:, pick & 7] for pick in picks]
            signs = [np.where(byte >= 128, 255, 0) if pick & 8 else byte for byte, pick in zip(picked, picks)]
            return np.stack(signs, 1).astype(np.uint8).view(np.uint32)[:, 0]
        case "min" | "max" if is_float and "NaN" in op:
            out = _FUNCTIONS[op[0]](a, b)
            return np.where(np.isnan(out), _NAN, out)
        case "min" | "max" if is_float:
            found = {"min": np.fmin, "max": np.fmax}[op[0]](a, b)
            takes_b = np.signbit(a) == (op[0] == "max")  # +0 is above -0
            return np.where((a == 0) & (b == 0), np.where(takes_b, b, a), found)
        case "lop3":  # bit i of d is the result where a, b and c have the bits of i
            held = [(d >> np.uint32(i) & 1) * ~np.uint32(0) for i in range(8)]
            of = [np.where(i & 4, a, ~a) & np.where(i & 2, b, ~b) & np.where(i & 1, c, ~c) for i in range(8)]
            return functools.reduce(np.bitwise_or, [x & y for x, y in zip(held, of)])
        case "ex2":
            out = np.exp2(a)
            return np.where(np.abs(out) < np.finfo(np.float32).tiny, np.float32(0), out)
        case "popc":
            return np.bitwise_count(a).astype(np.uint32)
        case "bfind":  # bfind of 0 has all bits set
            return _bit_length(a) - np.uint32(1)
        case "clz":
            return np.uint32(32) - _bit_length(a)
        case "brev":
            bits = np.unpackbits(np.ascontiguousarray(a)[:, None].view(np.uint8), axis=1, bitorder="little")
            return np.packbits(bits, axis=1).view(">u4").astype(np.uint32)[:, 0]
        case "mapa":
            return (a & np.uint32((1 << _PEER) - 1)) | ((np.uint32(1) + b) << np.uint32(_PEER))
        case name if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(x for x in (a, b) if x is not None))
    raise NotImplementedError(".".join(op))


def _bit_length(x):
    return np.frexp(x.astype(np.float64))[1].astype(np.uint32)
