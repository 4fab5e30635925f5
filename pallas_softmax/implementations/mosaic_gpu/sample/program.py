"""What the PTX of `sample` shares: the shared memory it works in, sweeps over a part, and reductions over a cluster."""

from collections.abc import Callable

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import Elements
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, LANES, Code
from pallas_softmax.implementations.mosaic_gpu.sample.plan import GROUP_ELEMENTS, Scratch
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window

WARPS = WARPGROUP // LANES
WHOLE_WARP = "0xffffffff"
INF, NEG_INF, NAN = "0f7F800000", "0fFF800000", "0f7FC00000"


class Program(Code):
    """The text of `sample` after the arrival of a part, and the registers that all of its pieces know.

    Attributes:
      window: how the part lies in shared memory.
      kind: how its elements are read.
      ctas: number of CTAs of the cluster.
      scratch: where in <scratch> what lies.
      lane, warp: numbers of the thread's lane and warp.
      base: address of the thread's vector in the first block.
      counts: address of the set of counts that the next round over keys takes; `both_counts` is the sum of both.
      m: the maximum of the row.
      scale: log2(e) / temperature.
    """

    def __init__(self, window: Window, dtype):
        super().__init__()
        self.window = window
        self.kind = Elements(dtype)
        self.ctas = window.count
        self.scratch = Scratch(window)
        self.group_blocks = GROUP_ELEMENTS // window.vec
        self.labels = 0
        self.lane, self.warp, self.base, self.counts, self.both_counts = self.new("b32", 5)
        self.m, self.scale = self.new("f32", 2)
        self += f"mov.f32 {self.scale}, <scale>;"
        self += f"and.b32 {self.lane}, <thread>, 31; shr.u32 {self.warp}, <thread>, 5;"
        self += f"mad.lo.u32 {self.base}, <thread>, 16, <x>;"
        self += f"add.u32 {self.counts}, <scratch>, {4 * self.scratch.rounds};"
        self += f"add.u32 {self.both_counts}, {self.counts}, {self.counts};"
        self += f"add.u32 {self.both_counts}, {self.both_counts}, {4 * self.scratch.round_words};"

    # --- Text

    def emit(self, line: str) -> None:
        """Adds a line."""
        self.lines.append(line)

    def label(self, name: str) -> str:
        """A label that no other piece has."""
        self.labels += 1
        return f"{name}{self.labels}"

    def one(self, kind: str) -> str:
        """A fresh register."""
        return self.new(kind)[0]

    def const(self, kind: str, value) -> str:
        """A fresh register with a number in it."""
        register = self.one(kind)
        self += f"mov.{kind} {register}, {value};"
        return register

    def skip_unless(self, predicate: str, label: str) -> None:
        """Goes on at the label, unless the predicate holds."""
        self += f"@!{predicate} bra {label};"

    def first_thread(self) -> str:
        """A predicate of thread 0."""
        p = self.one("pred")
        self += f"setp.eq.u32 {p}, <thread>, 0;"
        return p

    # --- Elements

    def distance(self, x: str) -> str:
        """(x - m) scale: 0 for the largest element, negative for others, -inf for -inf."""
        out = self.one("f32")
        self += f"sub.f32 {out}, {x}, {self.m}; mul.f32 {out}, {out}, {self.scale};"
        return out

    def weight(self, distance: str) -> str:
        """2^distance."""
        out = self.one("f32")
        self += f"ex2.approx.ftz.f32 {out}, {distance};"
        return out

    def key(self, bits: str) -> str:
        """The sort key of an element's bits as a signed number; the same turns a key into bits."""
        out = self.one("b32")
        mask = 0x7FFF if self.kind.halves else 0x7FFFFFFF
        self += f"shr.s32 {out}, {bits}, 31; and.b32 {out}, {out}, {mask}; xor.b32 {out}, {out}, {bits};"
        return out

    def float_of_bits(self, bits: str) -> str:
        """The float32 of an element's bits."""
        x = self.one("f32")
        if self.kind.name == "f32":
            self += f"mov.b32 {x}, {bits};"
        elif self.kind.name == "bf16":
            t = self.one("b32")
            self += f"shl.b32 {t}, {bits}, 16; mov.b32 {x}, {t};"
        else:
            h = self.one("b16")
            self += f"cvt.u16.u32 {h}, {bits}; cvt.f32.f16 {x}, {h};"
        return x

    def bits_of_float(self, x: str) -> str:
        """The bits, as a signed number, of an element that is near a float32."""
        bits = self.one("b32")
        if self.kind.name == "f32":
            self += f"mov.b32 {bits}, {x};"
        else:
            h = self.one("b16")
            self += f"cvt.rn.{self.kind.name}.f32 {h}, {x}; cvt.s32.s16 {bits}, {h};"
        return bits

    def load_bits(self, address: str) -> str:
        """The bits of the element at an address, as a signed number."""
        bits = self.one("b32")
        if self.kind.halves:
            h = self.one("b16")
            self += f"ld.shared.b16 {h}, [{address}]; cvt.s32.s16 {bits}, {h};"
        else:
            self += f"ld.shared.b32 {bits}, [{address}];"
        return bits

    def sweep(self, body: Callable[[list[str], str], str], above: str) -> None:
        """Calls body(floats, step) for the groups of blocks of a thread, to write its text, and writes their masses.

        The body returns the register with the mass of the group. `step` is a register with the group's number. Where
        no element of a warp exceeds the distance `above`, the body is left out, and the mass is 0.
        """
        block_bytes = self.window.block * self.kind.itemsize
        full, rest = divmod(self.window.blocks, self.group_blocks)
        address, at, step = self.new("b32", 3)
        (best, mass), out = self.new("f32", 2), self.one("pred")
        self += f"mov.b32 {address}, {self.base}; mov.b32 {step}, 0; mad.lo.u32 {at}, <thread>, 4, <scratch>;"

        def group(blocks):
            skip = self.label("group_done")
            self.emit(f"ld.shared.f32 {best}, [{at}+{4 * self.scratch.best}]; mov.f32 {mass}, 0f00000000;")
            self.emit(f"setp.gt.f32 {out}, {self.distance(best)}, {above}; not.pred {out}, {out};")
            self.emit(f"vote.sync.all.pred {out}, {out}, {WHOLE_WARP}; @{out} bra {skip};")
            vectors = self.kind.vectors(self, address, [b * block_bytes for b in range(blocks)])
            of_group = body([x for words in vectors for x in self.kind.floats(self, words, False)], step)
            self.emit(f"mov.f32 {mass}, {of_group}; {skip}:")
            self.emit(f"st.shared.f32 [{at}+{4 * self.scratch.masses}], {mass};")

        if full:
            again, p = self.label("sweep"), self.one("pred")
            self += f"{again}:"
            group(self.group_blocks)
            self += (
                f"add.u32 {address}, {address}, {self.group_blocks * block_bytes}; add.u32 {step}, {step}, 1;"
            )
            self += f"add.u32 {at}, {at}, {4 * WARPGROUP};"
            self += f"setp.lt.u32 {p}, {step}, {full}; @{p} bra {again};"
        if rest:
            group(rest)

    def each_block(
        self, first: str, body: Callable[[list[str], list[str], str, str], None], least: str | None = None
    ) -> None:
        """Calls body(floats, bits, address, block) for the thread's vector of each block from `first` on, in a loop.

        Blocks whose group has no element that reaches `least` in a warp are left out.
        """
        address, block = self.new("b32", 2)
        again, after, done = self.label("block"), self.label("next_block"), self.label("blocks_done")
        p, block_bytes = self.one("pred"), self.window.block * self.kind.itemsize
        self += f"mov.b32 {block}, {first}; mad.lo.u32 {address}, {block}, {block_bytes}, {self.base};"
        self += f"{again}: setp.ge.u32 {p}, {block}, {self.window.blocks}; @{p} bra {done};"
        if least is not None:
            at, best = self.one("b32"), self.one("f32")
            self += f"shr.u32 {at}, {block}, {self.group_blocks.bit_length() - 1};"
            self += f"mad.lo.u32 {at}, {at}, {WARPGROUP}, <thread>; mad.lo.u32 {at}, {at}, 4, <scratch>;"
            self += f"ld.shared.f32 {best}, [{at}+{4 * self.scratch.best}]; setp.lt.f32 {p}, {best}, {least};"
            self += f"vote.sync.all.pred {p}, {p}, {WHOLE_WARP}; @{p} bra {after};"
        (words,) = self.kind.vectors(self, address, [0])
        body(self.kind.floats(self, words, False), self.kind.bits(self, words), address, block)
        self += f"{after}: add.u32 {address}, {address}, {block_bytes}; add.u32 {block}, {block}, 1;"
        self += f"bra {again}; {done}:"

    # --- Threads, CTAs and clusters

    def barrier(self) -> None:
        """All threads of the CTA meet."""
        self += BARRIER

    def cluster_barrier(self) -> None:
        """All threads of the cluster meet, and see what the others wrote before."""
        if self.ctas == 1:
            self.barrier()
        else:
            self += "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"

    def address(self, words: int) -> str:
        """The address of a word of <scratch>."""
        out = self.one("b32")
        self += f"add.u32 {out}, <scratch>, {4 * words};"
        return out

    def load_peer(self, cta: int, address: str, count: int, offset: int = 0) -> list[str]:
        """Loads words from the shared memory of a CTA of the cluster, at the address that they have in this one."""
        out = self.new("b32", count)
        vector = {1: "", 2: ".v2", 4: ".v4"}[count]
        names = f"{{{', '.join(out)}}}" if count > 1 else out[0]
        if self.ctas == 1:
            self += f"ld.shared{vector}.b32 {names}, [{address}+{offset}];"
        else:
            peer = self.one("b32")
            self += f"mapa.shared::cluster.u32 {peer}, {address}, {cta};"
            self += f"ld.shared::cluster{vector}.b32 {names}, [{peer}+{offset}];"
        return out

    def over_warp(self, op: str, kind: str, register: str) -> None:
        """Reduces a register in place over the lanes of a warp, in a fixed order."""
        if kind == "b32":
            self += f"redux.sync.{op} {register}, {register}, {WHOLE_WARP};"
            return
        other = self.one(kind)
        for lanes in (16, 8, 4, 2, 1):
            self += f"shfl.sync.bfly.b32 {other}, {register}, {lanes}, 31, {WHOLE_WARP};"
            self += f"{op} {register}, {register}, {other};"

    def send(self, at: int, registers: list[str]) -> None:
        """Writes numbers of a warp, which its lanes agree on, to words at + warp, at + 4 + warp, ..."""
        address, p = self.one("b32"), self.one("pred")
        self += f"mad.lo.u32 {address}, {self.warp}, 4, <scratch>; setp.eq.u32 {p}, {self.lane}, 0;"
        for i, register in enumerate(registers):
            self += f"@{p} st.shared.b32 [{address}+{4 * (at + WARPS * i)}], {register};"

    def receive(self, at: int, ops: list[tuple[str, str]]) -> list[str]:
        """What all warps of the cluster have sent, each number reduced by its (instruction, kind), in a fixed order."""
        neutral = {"add.f32": "0f00000000", "add.s32": "0", "max.NaN.f32": NEG_INF}
        neutral |= {"max.s32": "0x80000000", "min.s32": "0x7fffffff"}
        totals = []
        for i, (op, kind) in enumerate(ops):
            total = self.const(kind, neutral[op])
            for first in range(0, WARPS * self.ctas, LANES):  # a lane takes the number of one warp
                sender, cta, address = self.new("b32", 3)
                (inside,) = self.new("pred")
                value = self.const(kind, neutral[op])
                self += f"add.u32 {sender}, {self.lane}, {first}; setp.lt.u32 {inside}, {sender}, {WARPS * self.ctas};"
                self += f"shr.u32 {cta}, {sender}, 2; and.b32 {sender}, {sender}, 3;"
                self += f"mad.lo.u32 {address}, {sender}, 4, <scratch>;"
                space = "shared"
                if self.ctas > 1:
                    self += f"@{inside} mapa.shared::cluster.u32 {address}, {address}, {cta};"
                    space = "shared::cluster"
                self += f"@{inside} ld.{space}.{kind} {value}, [{address}+{4 * (at + WARPS * i)}];"
                self += f"{op} {total}, {total}, {value};"
            self.over_warp(op, kind, total)
            totals.append(total)
        return totals

    def scan(self, register: str, kind: str) -> str:
        """The sum of a register (f32, b32 or b64) over the lower lanes of the warp and this one."""
        total, other = self.new(kind, 2)
        p = self.one("pred")
        add = {"f32": "add.f32", "b32": "add.u32", "b64": "add.u64"}[kind]
        self += f"mov.{kind} {total}, {register};"
        halves = self.new("b32", 2) if kind == "b64" else []
        for lanes in (1, 2, 4, 8, 16):
            if kind == "b64":
                self += f"mov.b64 {{{halves[0]}, {halves[1]}}}, {total};"
                for half in halves:
                    self += f"shfl.sync.up.b32 {half}, {half}, {lanes}, 0, {WHOLE_WARP};"
                self += f"mov.b64 {other}, {{{halves[0]}, {halves[1]}}};"
            else:
                self += f"shfl.sync.up.b32 {other}, {total}, {lanes}, 0, {WHOLE_WARP};"
            self += f"setp.ge.u32 {p}, {self.lane}, {lanes}; @{p} {add} {total}, {total}, {other};"
        return total

    def scan_cta(self, register: str, kind: str, at: int) -> tuple[str, str]:
        """The sum of a register over the lower threads of the CTA, and over all. The words at `at` are scratch.

        It has a barrier, before which a word of a thread may be written that others read after it.
        """
        inclusive = self.scan(register, kind)
        add = {"f32": "add.f32", "b32": "add.u32", "b64": "add.u64"}[kind]
        size = 8 if kind == "b64" else 4
        bits = 8 * size
        address, p = self.one("b32"), self.one("pred")
        before, total = self.new(kind, 2)
        warps = self.new(kind, WARPS)
        self += f"mad.lo.u32 {address}, {self.warp}, {size}, <scratch>; setp.eq.u32 {p}, {self.lane}, 31;"
        self += f"@{p} st.shared.b{bits} [{address}+{4 * at}], {inclusive};"
        self.barrier()
        zero = "0f00000000" if kind == "f32" else "0"
        self += f"mov.{kind} {before}, {zero}; mov.{kind} {total}, {zero};"
        for i, of_warp in enumerate(warps):
            self += f"ld.shared.b{bits} {of_warp}, [<scratch>+{4 * at + size * i}];"
            self += f"setp.gt.u32 {p}, {self.warp}, {i}; @{p} {add} {before}, {before}, {of_warp};"
            self += f"{add} {total}, {total}, {of_warp};"
        sub = {"f32": "sub.f32", "b32": "sub.u32", "b64": "sub.u64"}[kind]
        if kind == "f32":  # inclusive - register is not the sum of the lower lanes, in float32
            lower = self.one("f32")
            self += f"shfl.sync.up.b32 {lower}, {inclusive}, 1, 0, {WHOLE_WARP};"
            self += f"setp.eq.u32 {p}, {self.lane}, 0; @{p} mov.f32 {lower}, 0f00000000;"
            self += f"add.f32 {before}, {before}, {lower};"
        else:
            lower = self.one(kind)
            self += f"{sub} {lower}, {inclusive}, {register}; {add} {before}, {before}, {lower};"
        return before, total
