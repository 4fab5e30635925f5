"""Masses as integers, in inline PTX: sums of them are the same in any order.

Rounds over keys add masses in shared memory, in an order that differs from run to run. So there a mass is a multiple
of a small power of two, 1 / factor, and two words hold the multiple:

    weight * factor  =  high * 2^half + low        low is rounded, and the only thing that is

Each word has `half` bits, which leaves room for a sum over all elements of a part: half + log2(elements) <= 32. The
factor is as large as the largest weight in the zone, which may be small, lets it be. Sums are joined to 64 bits.
"""

import dataclasses

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import ZERO, float_literal
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program

# The largest weight of the zone counts as at least 2^-90, so that the factor stays a number of float32.
_LEAST_EXPONENT = 90.0
_BIAS, _MANTISSA_BITS = 127, 23  # of float32


@dataclasses.dataclass(frozen=True)
class Unit:
    """The unit of masses as integers.

    Attributes:
      half: bits of each of the two words of a mass.
      factor: register with the number of units in a mass of 1, a power of two (f32).
    """

    half: int
    factor: str

    def split(self, code: Program, distance: str) -> tuple[str, str]:
        """Returns the upper and the lower word of the mass of one element (b32)."""
        high, low = code.new("b32", 2)
        mass, upper = code.new("f32", 2)
        weight = code.weight(distance)
        code += f"mul.f32 {mass}, {weight}, {self.factor}; mul.f32 {upper}, {mass}, {float_literal(2.0**-self.half)};"
        code += f"cvt.rzi.u32.f32 {high}, {upper}; cvt.rn.f32.u32 {upper}, {high};"
        code += f"fma.rn.f32 {mass}, {upper}, {float_literal(-(2.0**self.half))}, {mass};"
        code += f"cvt.rni.u32.f32 {low}, {mass};"
        return high, low

    def join(self, code: Program, high: str, low: str) -> str:
        """Returns the mass of both words, or sums of words, in one register (b64)."""
        mass, wide = code.new("b64", 2)
        code += f"mul.wide.u32 {mass}, {high}, {1 << self.half}; cvt.u64.u32 {wide}, {low};"
        code += f"add.u64 {mass}, {mass}, {wide};"
        return mass

    def inverse(self, code: Program) -> str:
        """Returns 1 / factor (f32)."""
        inverse, bits = code.one("f32"), code.one("b32")
        code += f"mov.b32 {bits}, {self.factor}; sub.u32 {bits}, {2 * _BIAS << _MANTISSA_BITS}, {bits};"
        code += f"mov.b32 {inverse}, {bits};"
        return inverse


def unit_below(code: Program, upper: str) -> Unit:
    """Returns the unit for elements of at most this distance: the largest mass is 2^(2 half), or less."""
    half = 32 - code.window.size.bit_length()
    exponent, factor, bits = *code.new("f32", 2), code.one("b32")
    code += f"neg.f32 {exponent}, {upper}; max.f32 {exponent}, {exponent}, {ZERO};"
    code += f"min.f32 {exponent}, {exponent}, {float_literal(_LEAST_EXPONENT)};"
    code += f"cvt.rzi.s32.f32 {bits}, {exponent}; add.u32 {bits}, {bits}, {_BIAS + 2 * half};"
    code += f"shl.b32 {bits}, {bits}, {_MANTISSA_BITS}; mov.b32 {factor}, {bits};"
    return Unit(half, factor)
