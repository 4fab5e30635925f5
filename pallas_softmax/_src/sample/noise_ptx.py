"""The noise of `jax.random.gumbel` in inline PTX: threefry2x32 of the counter of an element, and -log(-log(u)).

    counter   the number of an element in the array of noise, 64 bits
    word      the bits of `jax.random.bits` there: both halves of threefry2x32(key, counter), combined by xor
    1 + u     a float32 with the upper 23 bits of the word as its fraction
    noise     -log(-log(u)), float32, where u = 0 counts as the smallest normal number; at most `MAX_NOISE`

The logarithm repeats the one of CUDA's libdevice, which XLA calls, so that the noise has the same bits on a GPU.
"""

import numpy as np

from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value

MAX_NOISE = 15.9424  # the noise of the largest u, 1 - 2^-23, rounded up

_TINY = float(np.finfo(np.float32).tiny)
_ONE = 0x3F800000  # the bits of 1.0
# Constants of threefry2x32 (Salmon et al., 2011), as in `jax.random`.
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_LN2 = 0.6931471824645996  # log(2) in float32
_TWO_THIRDS = 0x3F2AAAAB  # the bits of 2/3: the logarithm takes a number as m 2^e, with m from there to 4/3
_EXPONENT = 0xFF800000  # the bits of the sign and the exponent
# libdevice's coefficients, the highest power first, for Horner's rule: log(1 + f) = f + f^2 (-1/2 + f (..)).
_SERIES = (
    0xBE055027,
    0x3E1039F6,
    0xBDF8CDCC,
    0x3E0F2955,
    0xBE2AD8B9,
    0x3E4CED0B,
    0xBE7FFF22,
    0x3EAAAA78,
    0xBF000000,
)


def key_schedule(p: Program, key0: Value, key1: Value) -> list[tuple[Value, Value]]:
    """Returns what is added to both words of a counter: at the start, and after every four rounds."""
    keys = [key0, key1, p.bitwise3(lambda a, b, c: a ^ b ^ c, key0, key1, p.var(_PARITY, "u32"))]
    return [(keys[i % 3], keys[(i + 1) % 3] + i if i else keys[1]) for i in range(6)]


def words_at(
    p: Program, schedule: list[tuple[Value, Value]], halves: list[tuple[Value, Value]]
) -> list[Value]:
    """Returns the word of each counter; `halves` are its upper and its lower half, with the first keys added.

    Counters take turns, so that no instruction waits for the last one.
    """
    for rotations, (first, second) in zip(_ROTATIONS * 3, schedule[1:]):
        for by in rotations:
            halves = [(x + y, y) for x, y in halves]
            halves = [(x, p.rotate_left(y, by) ^ x) for x, y in halves]
        halves = [(x + first, y + second) for x, y in halves]
    return [x ^ y for x, y in halves]


def one_plus_uniform(p: Program, word: Value) -> Value:
    """Returns 1 + u as a float from 1 to 2 - 2^-23: the exponent of 1, then the upper 23 bits of the word."""
    return p.write("shf.l.wrap.b32", "u32", word, _ONE >> 23, 23, of=("b32", "b32", "i32")).bits("f32")


def gumbel(p: Program, one_plus_u: Value) -> Value:
    """Returns the noise of 1 + u."""
    u = p.max(one_plus_u - 1.0, _TINY)
    return log(p, log(p, u) * -1.0) * -1.0


def log(p: Program, x: Value) -> Value:
    """Returns log(x) of a positive normal number, accurate to one unit in the last place."""
    bits = x.bits("u32")
    exponent = (bits - _TWO_THIRDS) & _EXPONENT
    f = (bits - exponent).bits("f32") - 1.0
    series = p.var(_float(_SERIES[0]), "f32")
    for bits in _SERIES[1:]:
        series = p.multiply_add(series, f, _float(bits))
    log_of_m = p.multiply_add(f * series, f, f)
    return p.multiply_add(p.convert(exponent.bits("s32"), "f32") * 2.0**-23, _LN2, log_of_m)


def _float(bits: int) -> float:
    """Returns the float32 with these bits."""
    return float(np.uint32(bits).view(np.float32))
