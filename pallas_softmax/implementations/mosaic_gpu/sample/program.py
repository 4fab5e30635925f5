"""The inline PTX of `sample` while it is being written, with the registers that all of its pieces read.

Every file `*_ptx.py` of this folder adds text to one `Program`. Its text finds these operands (see `draw_ptx`):

    <thread>                0 to 127, the thread's number in its CTA
    <part>                  the CTA's number in its cluster, and that of its part in the row
    <x>, <scratch>          addresses in the CTA's shared memory: of the elements, and of the words of `plan.Scratch`

Words that the pieces use in one meaning:

    distance    (x - m) * log2(e) / temperature, where m is the largest element of the row: 0 or negative, or -inf
    weight      2^distance, an element's probability in units of that of the largest: from 0 to 1
    mass        a sum of weights
    group       16 elements of a thread, in consecutive blocks; the last group of a part may have fewer
"""

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import ElementText
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import Code
from pallas_softmax.implementations.mosaic_gpu.sample.plan import GROUP_ELEMENTS, Scratch
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window


class Program(Code):
    """The text for one part of a row, and the registers that all of its pieces know.

    Attributes:
      window: how the part lies in shared memory.
      kind: how its elements are read.
      ctas: number of CTAs of the cluster, each of which has a part.
      scratch: which words of <scratch> hold what.
      group_blocks: number of blocks of a group.
      block_bytes: bytes from a thread's vector in one block to that in the next.
      lane, warp: numbers of the thread's lane in its warp, and of the warp in the CTA (b32).
      first_vector: address of the thread's vector in the first block (b32).
      next_counts: address of the one of two sets of counters that the next round over keys takes (b32).
      both_counts: sum of the addresses of both, from which the address of one gives that of the other (b32).
      row_max: the largest element of the row (f32).
      scale: log2(e) / temperature (f32).
    """

    def __init__(self, window: Window, dtype):
        super().__init__()
        self.window = window
        self.kind = ElementText(dtype)
        self.ctas = window.count
        self.scratch = Scratch(window)
        self.group_blocks = GROUP_ELEMENTS // window.vec
        self.block_bytes = window.block * self.kind.itemsize
        self.lane, self.warp, self.first_vector = self.new("b32", 3)
        self.next_counts, self.both_counts = self.new("b32", 2)
        self.row_max, self.scale = self.new("f32", 2)
        self += f"mov.f32 {self.scale}, <scale>;"
        self += f"and.b32 {self.lane}, <thread>, 31; shr.u32 {self.warp}, <thread>, 5;"
        self += f"mad.lo.u32 {self.first_vector}, <thread>, 16, <x>;"
        self += f"add.u32 {self.next_counts}, <scratch>, {4 * self.scratch.rounds};"
        self += f"add.u32 {self.both_counts}, {self.next_counts}, {self.next_counts};"
        self += f"add.u32 {self.both_counts}, {self.both_counts}, {4 * self.scratch.round_words};"

    def skip_unless(self, predicate: str, label: str) -> None:
        """Writes a jump to the label, which is taken where the predicate does not hold."""
        self += f"@!{predicate} bra {label};"

    def set_false(self, predicate: str) -> None:
        """Writes false to a predicate."""
        self += f"setp.ne.u32 {predicate}, {self.lane}, {self.lane};"

    def distance(self, x: str) -> str:
        """Returns a register with (x - m) * scale: 0 for the largest element, -inf for -inf."""
        distance = self.one("f32")
        self += f"sub.f32 {distance}, {x}, {self.row_max}; mul.f32 {distance}, {distance}, {self.scale};"
        return distance

    def weight(self, distance: str) -> str:
        """Returns a register with 2^distance."""
        weight = self.one("f32")
        self += f"ex2.approx.ftz.f32 {weight}, {distance};"
        return weight


def word(number: int) -> str:
    """Returns the address of a word of <scratch>, as an access to memory writes it."""
    return f"<scratch>+{4 * number}"
