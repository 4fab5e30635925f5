"""The base of all stages of the program that searches a window: addresses, extent, positions and groups."""

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.gpu.window import Window
from pallas_softmax._src.topk.plan import listed_items

# Offsets in <counts>, after the number of candidates: the number of groups that reach the bound, and the scratch.
HITS_BYTE, SCRATCH_BYTE = 4, 16


class WindowProgram(CtaProgram):
    """A program for the part of a row in a `Window`, with k winners.

    Its operands are attributes: the addresses of the arrays in `search.SearchMemory`, and three numbers of a `Part`.
    """

    def __init__(self, window: Window, dtype, k: int):
        super().__init__()
        self.window, self.element, self.k = window, Elements(dtype), k
        # The lists have room for `capacity` candidates, in `list_bytes` bytes, and for `hits_capacity` groups.
        items, self.hits_capacity = listed_items(window, k)
        self.capacity, self.list_bytes = (items, 2 * items) if window.compact else (items // 2, 4 * items)
        self.x, self.group_keys = self.operands("u32", "x", "group_keys")
        self.candidates, self.hits, self.counts = self.operands("u32", "candidates", "hits", "counts")
        self.low, self.high, self.origin = self.operands("s32", "low", "high", "origin")
        self.block_bytes = window.block * self.element.itemsize

    def address(self, position: Value) -> Value:
        """Returns the address of a position."""
        return self.at(self.x, position, self.element.itemsize)

    def first_position(self, group: Value) -> Value:
        """Returns the first position of a group."""
        window = self.window
        of_first_block = (group >> log2(WARPGROUP)) * (window.group_blocks * window.block)
        return self.multiply_add(group & (WARPGROUP - 1), window.vec, of_first_block)

    def hit(self, at: Value) -> Value:
        """Returns the address of entry `at` of the list of groups that reach the bound."""
        return self.at(self.hits, at, 2 if self.window.compact else 4)

    def load_hit(self, at: Value, when: Value, default: int | None = None) -> Value:
        """Returns the group at entry `at`. If `when` does not hold: the default, or an undefined number without one."""
        address = self.hit(at)
        if self.window.compact:
            return self.convert(self.load(address, "u16", when=when, default=default), "u32")
        if default is not None:
            return self.load(address, "u32", when=when, default=default)
        self.load_into([address], address, when=when)  # overwriting the address saves a register
        return address


def log2(n: int) -> int:
    """Returns the logarithm of a power of two."""
    return n.bit_length() - 1
