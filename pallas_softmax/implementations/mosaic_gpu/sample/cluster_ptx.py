"""How the threads of a cluster meet, and what they read from each other, in inline PTX.

A warp tells numbers to all warps of the cluster by `send`, a meeting of the cluster, and `receive`. The words that
hold them are that warp's alone in its own CTA; each receiver reads those of all CTAs:

    word        at   at+1  at+2  at+3 | at+4  at+5  at+6  at+7       of each CTA
    number      first one, of warp    | second one, of warp
                0    1     2     3    | 0     1     2     3

Every sum is taken in an order that is the same in all warps and on every run, so that all threads of a cluster get
the same bits.
"""

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    LANES,
    NEG_INF,
    WARPS,
    WHOLE_WARP,
    ZERO,
)
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program, word

# What a reduction starts with, by its instruction.
_NEUTRAL = {
    "add.f32": ZERO,
    "add.s32": "0",
    "max.NaN.f32": NEG_INF,
    "max.s32": "0x80000000",
    "min.s32": "0x7fffffff",
}


def meet(code: Program) -> None:
    """All threads of the CTA meet, after which each sees what the others wrote before."""
    code += BARRIER


def meet_cluster(code: Program) -> None:
    """All threads of the cluster meet, after which each sees what the others wrote before."""
    if code.ctas == 1:
        meet(code)
    else:
        code += "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


def is_first_thread(code: Program) -> str:
    """Returns a predicate that holds in thread 0 of the CTA."""
    first = code.one("pred")
    code += f"setp.eq.u32 {first}, <thread>, 0;"
    return first


def address_of_word(code: Program, number: int) -> str:
    """Returns a register with the address of a word of <scratch>."""
    address = code.one("b32")
    code += f"add.u32 {address}, <scratch>, {4 * number};"
    return address


def load_from(code: Program, cta: int, address: str, count: int, offset: int = 0) -> list[str]:
    """Loads 1, 2 or 4 neighbouring words from a CTA of the cluster.

    Args:
      cta: number of the CTA.
      address: register with the address that the words have in this CTA; all CTAs have them at the same one.
      count: number of words.
      offset: bytes from the address to the first word.
    """
    words = code.new("b32", count)
    vector = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = f"{{{', '.join(words)}}}" if count > 1 else words[0]
    if code.ctas == 1:
        code += f"ld.shared{vector}.b32 {names}, [{address}+{offset}];"
    else:
        there = code.one("b32")
        code += f"mapa.shared::cluster.u32 {there}, {address}, {cta};"
        code += f"ld.shared::cluster{vector}.b32 {names}, [{there}+{offset}];"
    return words


def reduce_warp(code: Program, op: str, kind: str, register: str) -> None:
    """Reduces a register over the lanes of the warp, in place: all of them get the result.

    Args:
      op: the instruction, without its type for integers: "add.f32", "add.s32", "max.s32", ...
      kind: "b32" or "f32".
      register: the number of each lane.
    """
    if kind == "b32":
        code += f"redux.sync.{op} {register}, {register}, {WHOLE_WARP};"
        return
    other = code.one(kind)
    for lanes in (16, 8, 4, 2, 1):
        code += f"shfl.sync.bfly.b32 {other}, {register}, {lanes}, 31, {WHOLE_WARP};"
        code += f"{op} {register}, {register}, {other};"


def send(code: Program, at: int, registers: list[str]) -> None:
    """Writes numbers, on which the lanes of a warp agree, to words at + warp, at + 4 + warp, and so on."""
    address, first_lane = code.one("b32"), code.one("pred")
    code += f"mad.lo.u32 {address}, {code.warp}, 4, <scratch>; setp.eq.u32 {first_lane}, {code.lane}, 0;"
    for i, register in enumerate(registers):
        code += f"@{first_lane} st.shared.b32 [{address}+{4 * (at + WARPS * i)}], {register};"


def receive(code: Program, at: int, reductions: list[tuple[str, str]]) -> list[str]:
    """Reduces what the warps of the cluster have sent; the cluster has met since.

    Args:
      at: that of `send`.
      reductions: an (instruction, kind) for each of the numbers sent, as `reduce_warp` takes them.

    Returns:
      A register for each of the numbers, the same in all threads.
    """
    return [_receive_one(code, at + WARPS * i, op, kind) for i, (op, kind) in enumerate(reductions)]


def _receive_one(code: Program, at: int, op: str, kind: str) -> str:
    """Reduces one number of each warp: a lane takes that of one warp, or of every 32nd, and then the lanes meet."""
    senders = WARPS * code.ctas
    total = code.constant(kind, _NEUTRAL[op])
    for first in range(0, senders, LANES):
        warp, cta, address = code.new("b32", 3)
        exists = code.one("pred")
        number = code.constant(kind, _NEUTRAL[op])
        code += f"add.u32 {warp}, {code.lane}, {first}; setp.lt.u32 {exists}, {warp}, {senders};"
        code += f"shr.u32 {cta}, {warp}, 2; and.b32 {warp}, {warp}, 3;"
        code += f"mad.lo.u32 {address}, {warp}, 4, <scratch>;"
        space = "shared"
        if code.ctas > 1:
            code += f"@{exists} mapa.shared::cluster.u32 {address}, {address}, {cta};"
            space = "shared::cluster"
        code += f"@{exists} ld.{space}.{kind} {number}, [{address}+{4 * at}];"
        code += f"{op} {total}, {total}, {number};"
    reduce_warp(code, op, kind, total)
    return total


# --- Running sums

_ADD = {"f32": "add.f32", "b32": "add.u32", "b64": "add.u64"}
_SUBTRACT = {"b32": "sub.u32", "b64": "sub.u64"}


def sum_up_to_lane(code: Program, register: str, kind: str) -> str:
    """Returns the sum of a register (f32, b32 or b64) over the lower lanes of the warp and this one."""
    total, other = code.new(kind, 2)
    has_lower = code.one("pred")
    code += f"mov.{kind} {total}, {register};"
    halves = code.new("b32", 2) if kind == "b64" else []  # lanes exchange words of 32 bits
    for lanes in (1, 2, 4, 8, 16):
        if kind == "b64":
            code += f"mov.b64 {{{halves[0]}, {halves[1]}}}, {total};"
            for half in halves:
                code += f"shfl.sync.up.b32 {half}, {half}, {lanes}, 0, {WHOLE_WARP};"
            code += f"mov.b64 {other}, {{{halves[0]}, {halves[1]}}};"
        else:
            code += f"shfl.sync.up.b32 {other}, {total}, {lanes}, 0, {WHOLE_WARP};"
        code += f"setp.ge.u32 {has_lower}, {code.lane}, {lanes};"
        code += f"@{has_lower} {_ADD[kind]} {total}, {total}, {other};"
    return total


def sum_of_lower_threads(code: Program, register: str, kind: str, at: int) -> tuple[str, str]:
    """Returns the sums of a register (f32, b32 or b64) over the lower threads of the CTA, and over all threads.

    The threads meet in it, so that each sees afterwards what the others wrote before.

    Args:
      register: the number of each thread.
      kind: its type.
      at: number of the first of four words, or of eight for b64, which no one uses meanwhile.
    """
    up_to_lane = sum_up_to_lane(code, register, kind)
    size = 8 if kind == "b64" else 4
    address, condition = code.one("b32"), code.one("pred")
    before, total = code.new(kind, 2)
    of_warps = code.new(kind, WARPS)
    code += f"mad.lo.u32 {address}, {code.warp}, {size}, <scratch>;"
    code += f"setp.eq.u32 {condition}, {code.lane}, {LANES - 1};"
    code += f"@{condition} st.shared.b{8 * size} [{address}+{4 * at}], {up_to_lane};"
    meet(code)
    zero = ZERO if kind == "f32" else "0"
    code += f"mov.{kind} {before}, {zero}; mov.{kind} {total}, {zero};"
    for i, of_warp in enumerate(of_warps):
        code += f"ld.shared.b{8 * size} {of_warp}, [{word(at)}+{size * i}];"
        code += f"setp.gt.u32 {condition}, {code.warp}, {i};"
        code += f"@{condition} {_ADD[kind]} {before}, {before}, {of_warp};"
        code += f"{_ADD[kind]} {total}, {total}, {of_warp};"
    lower = _sum_of_lower_lanes(code, register, kind, up_to_lane)
    code += f"{_ADD[kind]} {before}, {before}, {lower};"
    return before, total


def _sum_of_lower_lanes(code: Program, register: str, kind: str, up_to_lane: str) -> str:
    """Returns what `sum_up_to_lane` has without this lane's own number."""
    lower = code.one(kind)
    if kind == "f32":  # a difference of sums is not the sum of the others, since both are rounded
        first_lane = code.one("pred")
        code += f"shfl.sync.up.b32 {lower}, {up_to_lane}, 1, 0, {WHOLE_WARP};"
        code += f"setp.eq.u32 {first_lane}, {code.lane}, 0; @{first_lane} mov.f32 {lower}, {ZERO};"
    else:
        code += f"{_SUBTRACT[kind]} {lower}, {up_to_lane}, {register};"
    return lower
