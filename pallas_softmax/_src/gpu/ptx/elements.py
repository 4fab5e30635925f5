"""Elements of rows in a `program.Program`: as 32-bit words of shared memory, as bits, as floats, as sort keys.

A word holds one float32, or two 16-bit elements with the first one in the lower half. A single element is held as

    bits     the bits of its dtype, as a signed number ("s32"); a 16-bit element is extended by its sign
    float    the same number in float32 ("f32")
    key      its sort key (see `sort_keys.py`), as a signed number ("s32")

`flip_negative` is the one definition of sort keys in inline PTX; `flip_negative_at_once` is another form of it.
"""

from collections.abc import Sequence

import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Condition, Value

# The bits of -inf, by the name of the dtype in PTX and MLIR.
NEG_INF_BITS = {"f32": 0xFF800000, "bf16": 0xFF80, "f16": 0xFC00}
_UPPER_HALF, _HALF_BITS = 0xFFFF0000, 16
MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 except the sign


def flip_negative(bits: Value, magnitude: int = MAGNITUDE) -> Value:
    """Returns the sort key of a float with these bits, or the bits of the float with this sort key.

    It inverts the bits `magnitude` of negative numbers. For a 16-bit float, extended by its sign, they are 0x7fff.
    """
    return bits ^ (bits.sign() & magnitude)


def flip_negative_at_once(bits: Value, magnitude: int = MAGNITUDE) -> Value:
    """Does the same in one instruction after `sign()`; for a pair of 16-bit floats too."""
    flip = bits.program.bitwise3
    return flip(lambda bits, signs, magnitude: bits ^ signs & magnitude, bits, bits.sign(), magnitude)


class Elements:
    """Writes programs for elements of one dtype."""

    def __init__(self, dtype):
        self.dtype, self.itemsize = np.dtype(dtype), np.dtype(dtype).itemsize
        self.name = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[self.dtype.name]  # in PTX
        self.halves = self.itemsize == 2  # whether a word has two elements
        self.all_ones = 2 ** (8 * self.itemsize) - 1  # an element with all bits set, which has the lowest key
        self.neg_inf = NEG_INF_BITS[self.name]  # the bits of -inf
        self.magnitude = self.all_ones >> 1  # the bits that the sort key of a negative element inverts
        # A word with `magnitude` in each of its elements.
        self.flip = self.magnitude << _HALF_BITS | self.magnitude if self.halves else self.magnitude

    def vectors(
        self,
        p: Program,
        addresses: Sequence[Value],
        shift: Value | None = None,
        stride: int = 4,
        when: Sequence[Condition] | None = None,
    ) -> list[list[Value]]:
        """Returns four words for each address: the vector there, at a multiple of 16 bytes.

        With a `shift`, they are words that start so many elements later, `stride` bytes apart. Then the addresses are
        multiples of 4 bytes. Each word of 16-bit elements also reads the 4 bytes after it. `when` has a condition for
        each address.
        """
        vectors = [[p.fresh("s32") for _ in range(ACCESS_BYTES // 4)] for _ in addresses]
        conditions = when or [None] * len(vectors)
        if shift is None:
            for address, words, condition in zip(addresses, vectors, conditions):
                p.load_into(words, address, when=condition)
            return vectors
        shift_bytes = shift * self.itemsize
        left = 32 - (shift_bytes & 2) * 8
        for address, words, condition in zip(addresses, vectors, conditions):
            first = address + (shift_bytes & -4)
            for i, word in enumerate(words):
                p.load_into([word], first, offset=stride * i, when=condition)
                if self.halves:
                    upper = p.fresh("s32")
                    p.load_into([upper], first, offset=stride * i + 4, when=condition)
                    operands = word, upper, left  # the result is the upper half of upper:word << left
                    p.set(word, p.write("shf.l.clamp.b32", "s32", *operands, of=("b32", "b32", "u32")))
        return vectors

    def bits(self, words: list[Value]) -> list[Value]:
        if not self.halves:
            return words
        return [half for word in words for half in (word << _HALF_BITS >> _HALF_BITS, word >> _HALF_BITS)]

    def keys(self, words: list[Value]) -> list[Value]:
        return [self.key(bits) for bits in self.bits(words)]

    def key(self, bits: Value) -> Value:
        """Returns the sort key of an element's bits, or the bits of the element with this sort key."""
        return flip_negative(bits, self.magnitude)

    def floats(self, p: Program, words: list[Value], marked: bool) -> list[Value]:
        """Returns each element as a float. If `marked`, elements with all bits set become -inf."""
        out = []
        for word in words:
            match self.name:
                case "f32":
                    out.append(word.bits("f32"))
                case "bf16":  # a bfloat16 is the upper half of a float32
                    out += [(word << _HALF_BITS).bits("f32"), (word & _UPPER_HALF).bits("f32")]
                case _:
                    out += [p.convert(half, "f32") for half in p.split(word, "f16")]
        if marked:
            out = [p.select(bits.equals(-1), -np.inf, x) for x, bits in zip(out, self.bits(words))]
        return out

    def load_bits(self, p: Program, address: Value, when: Condition = None) -> Value:
        bits = p.load(address, "s16" if self.halves else "s32", when=when)
        return p.convert(bits, "s32") if self.halves else bits

    def float_of_bits(self, p: Program, bits: Value) -> Value:
        if self.name == "f16":
            return p.convert(p.convert(bits.bits("u32"), "u16").bits("f16"), "f32")
        return (bits << _HALF_BITS if self.halves else bits).bits("f32")

    def best(self, p: Program, words: list[Value], floats: list[Value] | None) -> tuple[Value, Value]:
        """Returns the largest element as a float and as a sort key; if there is a NaN, a NaN with the highest key.

        `floats` decide if they are given, since some of them may be marked. Otherwise the words decide. 16-bit elements
        are compared two at a time:

            words   x1 x0 | x3 x2 | x5 x4 | x7 x6   ->   the largest odd and the largest even one   ->   the larger
        """
        if floats is not None or not self.halves:
            x = p.reduce("max.NaN", floats or self.floats(p, words, marked=False))
            bits = p.convert(p.convert(x, self.name).bits("s16"), "s32") if self.halves else x.bits("s32")
            return x, self.key(bits)
        pair = p.reduce("max.NaN", [word.bits(f"{self.name}x2") for word in words])
        half = p.op("max.NaN", self.name, *p.split(pair, self.name))
        bits = p.convert(half.bits("s16"), "s32")
        x = p.convert(half, "f32") if self.name == "f16" else p.join(p.var(0, "u16"), half, "f32")
        return x, self.key(bits)
