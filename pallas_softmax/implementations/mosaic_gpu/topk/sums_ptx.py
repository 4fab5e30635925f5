"""Sums over the 128 threads of a CTA, in inline PTX, and counters in shared memory, of which each thread has some."""

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, LANES, WARPS, Code


def vectors(registers: list[str]) -> list[tuple[int, str, str]]:
    """Returns how neighbouring words are moved, up to 16 bytes at a time: byte, type and operand of each access."""
    size = min(4, len(registers))
    starts = range(0, len(registers), size)
    return [(4 * i, f"v{size}.b32", f"{{{', '.join(registers[i : i + size])}}}") for i in starts]


def add_lower_lanes(code: Code, value: str, start: str) -> None:
    """Adds to `value` those of the lower lanes of the warp; register `start` gets the sum of these alone."""
    (other,), (p,) = code.new("b32"), code.new("pred")
    code += f"mov.b32 {start}, {value};"
    for offset in (1, 2, 4, 8, 16):
        code += f"shfl.sync.up.b32 {other}|{p}, {value}, {offset}, 0, 0xffffffff;"
        code += f"@{p} add.u32 {value}, {value}, {other};"
    code += f"sub.u32 {start}, {value}, {start};"


def of_warps(code: Code, values: list[str], scratch: str, lane: int) -> list[list[str]]:
    """Returns, for each of the values, registers with what this lane of each warp has in it.

    The warps meet in shared memory at `scratch`, four words for each value, which nothing reads or writes meanwhile.
    """
    at, own = code.new("b32", 2)
    (p,) = code.new("pred")
    out = [code.new("b32", WARPS) for _ in values]
    code += (
        f"and.b32 {own}, <thread>, {LANES - 1}; setp.eq.u32 {p}, {own}, {lane}; shr.u32 {at}, <thread>, 5;"
    )
    code += f"mad.lo.u32 {at}, {at}, 4, {scratch};"
    for i, value in enumerate(values):
        code += f"@{p} st.shared.b32 [{at}+{4 * WARPS * i}], {value};"
    code += BARRIER
    for i, of_value in enumerate(out):
        code += f"ld.shared.v4.b32 {{{', '.join(of_value)}}}, [{scratch}+{4 * WARPS * i}];"
    return out


def add_lower_warps(code: Code, start: str, totals: list[str]) -> None:
    """Adds to `start` the totals of the lower warps."""
    (warp,), (p,) = code.new("b32"), code.new("pred")
    code += f"shr.u32 {warp}, <thread>, 5;"
    for i, total in enumerate(totals[:-1]):
        code += f"setp.gt.u32 {p}, {warp}, {i}; @{p} add.u32 {start}, {start}, {total};"
