"""Elements in shared memory for PTX that is written in strings: `elements`, with names of registers for values."""

from pallas_softmax.implementations.mosaic_gpu.device import elements
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import Code
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value


class ElementText:
    """Writes PTX for elements of one dtype; all it returns is in registers of its own.

    Attributes:
      name, itemsize, neg_inf: as in `elements.Elements`.
    """

    def __init__(self, dtype):
        self._elements = elements.Elements(dtype)
        self.name, self.itemsize = self._elements.name, self._elements.itemsize
        self.neg_inf = self._elements.neg_inf

    def vectors(self, code: Code, address: str, offsets: list[int]) -> list[list[str]]:
        """Loads 16 bytes from each of address + offsets; the registers of their four words."""
        p = Program(code)
        at = p.value(address, "u32")
        return [_names(self._elements.vector(p, at, offset)) for offset in offsets]

    def bits(self, code: Code, words: list[str]) -> list[str]:
        """The bits of each element as a signed number of 32 bits."""
        return _names(self._elements.bits(_words(Program(code), words)))

    def floats(self, code: Code, words: list[str], marked: bool) -> list[str]:
        """Each element in float32; if `marked`, -inf in place of those whose bits are all ones, the lowest key's."""
        p = Program(code)
        return [str(p.var(x)) for x in self._elements.floats(p, _words(p, words), marked)]

    def load_bits(self, code: Code, address: str) -> str:
        """Loads an element; the register with its bits."""
        p = Program(code)
        return str(self._elements.load_bits(p, p.value(address, "u32")))

    def float_of_bits(self, code: Code, bits: str) -> str:
        """The float32 of an element's bits."""
        p = Program(code)
        return str(p.var(self._elements.float_of_bits(p, p.value(bits, "s32"))))

    def bits_of_float(self, code: Code, x: str) -> str:
        """The bits of the element that is nearest to a float32."""
        p = Program(code)
        return str(p.var(self._elements.bits_of_float(p, p.value(x, "f32"))))

    def key(self, code: Code, bits: str) -> str:
        """The sort key of an element's bits; or, since that is its own inverse, the bits of a key."""
        return str(self._elements.key(Program(code).value(bits, "s32")))

    def best(self, code: Code, words: list[str], floats: list[str] | None) -> tuple[str, str]:
        """The largest element, in float32 and as a sort key; see `elements.Elements.best`."""
        p = Program(code)
        values = None if floats is None else [p.value(x, "f32") for x in floats]
        x, key = self._elements.best(p, _words(p, words), values)
        return str(p.var(x)), str(key)


def _words(p: Program, words: list[str]) -> list[Value]:
    return [p.value(word, "s32") for word in words]


def _names(values: list[Value]) -> list[str]:
    return [str(value) for value in values]
