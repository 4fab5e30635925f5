"""PTX text that takes elements from shared memory: as words of 32 bits, as bits, as floats, as sort keys.

An element by itself is held in one of three ways, each in a register of 32 bits:

    bits     those of its own dtype, as a signed number; a half is extended by its sign
    float    the same number in float32
    key      its sort key (see `sort_keys`), as a signed number
"""

import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import NEG_INF, Code


class Elements:
    """Writes PTX for elements of one dtype, four words of 32 bits at a time, each of one element or of two halves.

    Attributes:
      name: the dtype in PTX: "f32", "bf16" or "f16".
      itemsize: bytes of an element.
      halves: whether a word has two elements.
      neg_inf: the bits of -inf.
      all_ones: those of the float of the lowest key.
      flip: the bits of a word in which the sort key of a negative element differs from its own bits.
      magnitude: the same of an element.
    """

    def __init__(self, dtype):
        self.name = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]
        self.itemsize = np.dtype(dtype).itemsize
        self.halves = self.itemsize == 2
        self.neg_inf = {"f32": 0xFF800000, "bf16": 0xFF80, "f16": 0xFC00}[self.name]
        self.all_ones = 2 ** (8 * self.itemsize) - 1
        self.flip = 0x7FFF7FFF if self.halves else 0x7FFFFFFF
        self.magnitude = 0x7FFF if self.halves else 0x7FFFFFFF

    def vectors(self, code: Code, address: str, offsets: list[int]) -> list[list[str]]:
        """Loads 16 bytes from each of address + offsets; the registers of their four words."""
        out = []
        for offset in offsets:
            words = code.new("b32", 4)
            code += f"ld.shared.v4.b32 {{{', '.join(words)}}}, [{address}+{offset}];"
            out.append(words)
        return out

    def bits(self, code: Code, words: list[str]) -> list[str]:
        """The bits of each element as a signed number of 32 bits."""
        if not self.halves:
            return words
        out = code.new("b32", 2 * len(words))
        for word, low, high in zip(words, out[::2], out[1::2]):
            code += f"shl.b32 {low}, {word}, 16; shr.s32 {low}, {low}, 16; shr.s32 {high}, {word}, 16;"
        return out

    def floats(self, code: Code, words: list[str], marked: bool) -> list[str]:
        """Each element in float32; if `marked`, -inf in place of those whose bits are all ones, the lowest key's."""
        match self.name:
            case "f32":
                out = code.new("f32", len(words))
                for word, x in zip(words, out):
                    code += f"mov.b32 {x}, {word};"
            case "bf16":
                out = code.new("f32", 2 * len(words))
                for word, low, high in zip(words, out[::2], out[1::2]):
                    (t,) = code.new("b32")
                    code += f"shl.b32 {t}, {word}, 16; mov.b32 {low}, {t};"
                    code += f"and.b32 {t}, {word}, 0xffff0000; mov.b32 {high}, {t};"
            case _:
                out = code.new("f32", 2 * len(words))
                for word, low, high in zip(words, out[::2], out[1::2]):
                    h = code.new("b16", 2)
                    code += f"mov.b32 {{{h[0]}, {h[1]}}}, {word};"
                    code += f"cvt.f32.f16 {low}, {h[0]}; cvt.f32.f16 {high}, {h[1]};"
        if marked:
            for x, bits in zip(out, self.bits(code, words)):
                (p,) = code.new("pred")
                code += f"setp.eq.s32 {p}, {bits}, -1; selp.f32 {x}, {NEG_INF}, {x}, {p};"
        return out

    def load_bits(self, code: Code, address: str) -> str:
        """Loads an element; the register with its bits."""
        bits = code.one("b32")
        if self.halves:
            half = code.one("b16")
            code += f"ld.shared.b16 {half}, [{address}]; cvt.s32.s16 {bits}, {half};"
        else:
            code += f"ld.shared.b32 {bits}, [{address}];"
        return bits

    def float_of_bits(self, code: Code, bits: str) -> str:
        """The float32 of an element's bits."""
        x = code.one("f32")
        match self.name:
            case "f32":
                code += f"mov.b32 {x}, {bits};"
            case "bf16":  # a bfloat16 is the upper half of a float32
                upper = code.one("b32")
                code += f"shl.b32 {upper}, {bits}, 16; mov.b32 {x}, {upper};"
            case _:
                half = code.one("b16")
                code += f"cvt.u16.u32 {half}, {bits}; cvt.f32.f16 {x}, {half};"
        return x

    def bits_of_float(self, code: Code, x: str) -> str:
        """The bits of the element that is nearest to a float32."""
        bits = code.one("b32")
        if self.halves:
            half = code.one("b16")
            code += f"cvt.rn.{self.name}.f32 {half}, {x}; cvt.s32.s16 {bits}, {half};"
        else:
            code += f"mov.b32 {bits}, {x};"
        return bits

    def key(self, code: Code, bits: str) -> str:
        """The sort key of an element's bits; or, since that is its own inverse, the bits of a key."""
        key = code.one("b32")
        self._turn(code, bits, key, key)
        return key

    def keys(self, code: Code, bits: list[str]) -> list[str]:
        """Turns the bits of elements into their sort keys, in place."""
        turned = code.one("b32")
        for each in bits:
            self._turn(code, each, turned, each)
        return bits

    def _turn(self, code: Code, bits: str, turned: str, out: str) -> None:
        """Writes to `out` the bits, turned round but for the sign if they are negative; to `turned`, which of them."""
        code += f"shr.s32 {turned}, {bits}, 31; and.b32 {turned}, {turned}, {self.magnitude};"
        code += f"xor.b32 {out}, {bits}, {turned};"

    def best(self, code: Code, words: list[str], floats: list[str] | None) -> tuple[str, str]:
        """The largest element, in float32 and as a sort key; if there is a NaN, one with the highest key.

        It is taken from the floats where they are given, since some may be marked, and from the words otherwise.
        """
        if self.halves and floats is None:
            value, bits = self._best_half(code, words)
        else:
            value, bits = self._best_float(code, floats or self.floats(code, words, marked=False))
        return value, self.keys(code, [bits])[0]

    def _best_half(self, code: Code, words: list[str]) -> tuple[str, str]:
        """The largest of two elements in each word, in float32, and its bits: two at a time."""
        (value,), (bits,) = code.new("f32"), code.new("b32")
        half, other, zero = code.new("b16", 3)
        pair = code.tree(f"max.NaN.{self.name}x2", "b32", words)
        code += f"mov.b32 {{{half}, {other}}}, {pair}; max.NaN.{self.name} {half}, {half}, {other};"
        code += f"cvt.s32.s16 {bits}, {half};"
        if self.name == "f16":
            code += f"cvt.f32.f16 {value}, {half};"
        else:  # a bfloat16 is the upper half of a float32
            code += f"mov.b16 {zero}, 0; mov.b32 {value}, {{{zero}, {half}}};"
        return value, bits

    def _best_float(self, code: Code, floats: list[str]) -> tuple[str, str]:
        """The largest of float32 values, and its bits in the dtype of the elements."""
        value = code.one("f32")
        code += f"mov.f32 {value}, {code.tree('max.NaN.f32', 'f32', floats)};"
        return value, self.bits_of_float(code, value)
