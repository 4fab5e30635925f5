"""The shared-memory array that holds a row, or a part of a row, in a CTA: `Window`.

    position  0          low      head                      head + body      high          size
              |           |         |                             |            |              |
    contents  | -inf -inf | x x x x | x x x x x x x ... x x x x x | x x x x x  | -inf .. -inf |
              '-------- head -------'------------ body -----------'----------- tail ----------'
              written one element     copied in bulk: it starts     written one element
              at a time               at a multiple of 16 bytes     at a time

    blocks    |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |   8   |   vec elements a thread
    steps     |            step 0             |            step 1             | last  |   step_blocks = 4 blocks
    groups    |    group 0    |    group 1    |    group 2    |    group 3    | last  |   group_blocks = 2 blocks

A position counts in the window; an index counts in the row. Position p holds the element of index p + origin if
low <= p < high. So origin is the index of position 0, which may be negative. Every other position holds -inf. The head
exists only if some part does not start at a multiple of 16 bytes. Then the body starts at the first multiple of 16
bytes in the part, so fewer than `vec` elements of the part lie before it.

Thread t of the CTA holds positions t * vec to (t + 1) * vec - 1 of each block. One bulk copy brings one step. A group
is the elements of one thread in `group_blocks` blocks. Once a step has arrived, top-k keeps the largest key of each
group. Group number g * 128 + t belongs to thread t and blocks g * group_blocks to (g + 1) * group_blocks - 1.
"""

import dataclasses

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.layout import Cut


@dataclasses.dataclass(frozen=True)
class Window:
    """How rows lie in shared memory, whole or in parts. A drawing is at the top of this file.

    In a compact window, candidates are listed by 16-bit positions until the row is no longer needed. Then their list
    takes the place of the row. Only whole float32 rows have compact windows.
    """

    vocab: int  # number of elements of a row
    vec: int  # number of elements that a thread loads at once, 16 bytes
    step_blocks: int  # number of blocks of a step
    group_blocks: int  # number of blocks of a group; it divides step_blocks
    count: int = 1  # number of parts of a row, each in a CTA of its own
    compact: bool = False

    @property
    def block_size(self) -> int:
        """Number of elements of a block: a vector for each thread."""
        return WARPGROUP * self.vec

    @property
    def cut(self) -> Cut:
        """How the row is cut into parts: at multiples of 16 bytes, if rows start there."""
        return Cut(self.vocab, 1 if self.vocab % self.vec else self.vec, self.count)

    @property
    def head(self) -> int:
        """Number of positions before the body; 0 if all parts start at a multiple of 16 bytes."""
        return self.vec if self.cut.unit == 1 else 0

    @property
    def body(self) -> int:
        """Number of elements that are copied in bulk, the same for every part."""
        shortest = self.cut.shortest
        return max(0, shortest - (self.vec - 1)) // self.vec * self.vec if self.head else shortest

    @property
    def blocks(self) -> int:
        """Number of blocks that hold the head and the longest part."""
        return -(-(self.head + self.cut.longest) // self.block_size)

    @property
    def full(self) -> int:
        """Number of steps that lie whole in the head and the body."""
        return (self.head + self.body) // (self.block_size * self.step_blocks)

    @property
    def rest(self) -> int:
        """Number of blocks after the full steps, from 0 to step_blocks + 1; they make one last step."""
        return self.blocks - self.full * self.step_blocks

    @property
    def group_size(self) -> int:
        """Number of elements of a group, a power of two."""
        return self.group_blocks * self.vec

    @property
    def groups_per_thread(self) -> int:
        """Number of groups of one thread, which keeps the maximum of each."""
        return -(-self.blocks // self.group_blocks)

    @property
    def groups(self) -> int:
        """Number of groups of all threads."""
        return self.groups_per_thread * WARPGROUP

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.blocks * self.block_size

    def copies(self) -> list[tuple[int, int]]:
        """Returns the first position and the number of elements of each bulk copy: one per step, for the body only."""
        step, end = self.block_size * self.step_blocks, self.head + self.body if self.body else 0
        return [(max(at, self.head), min(at + step, end) - max(at, self.head)) for at in range(0, end, step)]
