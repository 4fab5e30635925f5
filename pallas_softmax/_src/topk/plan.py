"""How the rows of top-k lie over the GPU: `plan_topk`, a pure function of shape, dtype and device.

A short row lies in the registers of up to 32 threads (a `Tile`, see `tile_plan.py`). A longer one lies in the shared
memory of a CTA, or is cut into `count` parts with a CTA each. The array of shared memory that holds a row or a part is
a `Window`:

    position  0          low      head                      head + body      high          size
              |           |         |                             |            |              |
    contents  | -inf -inf | x x x x | x x x x x x x ... x x x x x | x x x x x  | -inf .. -inf |
              '-------- head -------'------------ body -----------'----------- tail ----------'
              written one element     copied in bulk: it starts     written one element
              at a time               at a multiple of 16 bytes     at a time

    blocks    |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |   8   |   vec elements a thread
    steps     |            step 0             |            step 1             | last  |   step_blocks = 4 blocks
    groups    |    group 0    |    group 1    |    group 2    |    group 3    | last  |   group_blocks = 2 blocks

A position counts in the window; an index counts in the row. Position p holds the element of index p + origin, if
low <= p < high; every other position holds -inf. The head exists only where some part starts beside a multiple of
16 bytes. Then the body starts at the first multiple of 16 bytes in the part, so that fewer than `vec` elements of
the part lie before it.

Thread t of the CTA holds positions t * vec to (t + 1) * vec - 1 of each block. A step is what arrives by one bulk
copy. A group is what one thread holds of `group_blocks` blocks: while a step arrives, the thread keeps the largest
element of each group in it. Group number g * 128 + t is that of thread t and of blocks g * group_blocks to
(g + 1) * group_blocks - 1.
"""

import dataclasses

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import (
    ACCESS_BYTES,
    RESERVED_SMEM_BYTES,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    WARPGROUP,
    smem_of_each,
)
from pallas_softmax._src.gpu.layout import Cut, Tile, power_of_two
from pallas_softmax._src.topk.tile_plan import plan_tile

# What follows rests on device times of one H100 80GB HBM3. They stand in benchmarks/results/topk_targets and
# topk_shapes, or are named here; the limits between two plans were tuned on variants whose times were not kept.

# The lists of 2048 winners take at least 64 KB of shared memory (`selection_bytes`), and a CTA of a GPU of compute
# capability 12 has 95 KB.
MAX_K = 2_048  # winners

# Two CTAs that hold a whole row of float32 share a multiprocessor, or three of 16 bits, and one searches its row
# while those of the others arrive. 4096 x 128256, k = 5: float32 in 6 parts takes 670 us, 0.98 of the bandwidth of
# a sum (802 us with the best cluster in place of a second launch), and bfloat16 takes 343 us, 0.96 of it.
ROW_BYTES = {4: 108_000, 2: 66_000}  # bytes of a row that one CTA holds at most, by bytes of an element
PART_BYTES = {4: 88_000, 2: 66_000}  # bytes of a part of a longer row at most

# Of many winners the search takes longer than a third CTA saves. k = 128, both launches: 4000 x 50257 float32 takes
# 293 us in 2 parts, 306 us in 3; 2048 x 49152 bfloat16 takes 78 us whole, 87 us in 2; 777 x 100003 bfloat16 takes 69 us
# in 2 and in 4. (Between 65 and 127 winners this was not measured.)
MANY_WINNERS = 65  # winners from which on MANY_WINNERS_BYTES takes the place of ROW_BYTES and PART_BYTES
MANY_WINNERS_BYTES = 108_000  # bytes, as many as let two CTAs share a multiprocessor

# Then a row that fills a multiprocessor is faster whole, and searched once. 4000 x 50257 float32 takes 270, 277 and
# 299 us whole and 286, 293 and 426 us in 2 parts, for k = 65, 128 and 256; 4000 x 40000, k = 128, 228 and 233 us. But
# 3001 x 33333 takes 165 and 158 us, and 777 x 100003 bfloat16 89 and 69 us.
WHOLE_ROW_BYTES = 160_000  # bytes of a float32 row from which on it is not cut if it fits

# An H100 has 132 multiprocessors, of which fewer rows than that leave some without work, unless they are cut. The
# second launch merges parts * k winners, so the more winners there are, the fewer parts pay. For k = 5,
# 1 x 128256 float32 takes 5.4 us, 10 x 100000 takes 6.0 us, and 64 x 128256 takes 11.4 us.
FEW_ROWS = 128  # rows
FEW_ROWS_MIN_VOCAB = 24_000  # elements of a row beyond which it is cut
FEW_ROWS_PART = 8_192  # elements of a part, about
FEW_ROWS_MERGED = 512  # winners that are merged at most, as long as there are more than MIN_PARTS
MIN_PARTS, MAX_PARTS = 8, 16  # parts: of many winners, and of few

# Merging more winners takes longer than parts save. Also, what their search takes (16 to 73 KB) leaves room for one CTA
# only beside 100 KB of the row, unless the window is compact.
MAX_CUT_K = 256  # winners up to which rows are cut, and two CTAs share a multiprocessor

# A search of each winner in the other list has fewer steps than an order of those that reach a bound. Lists of 2 parts
# are merged in 5.9, not 9.0 us (4096 x 50257 bfloat16, k = 5) and in 10.0, not 11.0 us (3001 x 33333 float32, k = 128);
# but those of 3 parts in 16.2, not 13.2 us (4000 x 50257 float32, k = 64).
SEARCHED_LISTS = 2  # lists at most
SEARCHED_WINNERS = 512  # winners at most, 4 of each thread

# A compact window, of more than MAX_CUT_K winners, lets two CTAs share a multiprocessor that would have one each:
# 4000 x 25000 float32 takes 146 us, not 210 (k = 300), and 158 us, not 244 (k = 512); 4000 x 16000, k = 2048, takes
# 285 us, not 436. Where one CTA was left nevertheless, it was no faster: k = 1024, before it fitted twice, took 322 us,
# not 316. A compact window numbers its positions and groups with 16 bits.
MAX_COMPACT_SIZE = 2**16  # positions
MIN_POSITIONS = 1_024  # of its list of candidates; in them are the counters of the search for a bound

# What a CTA takes is as jax 0.10.2 to 0.12 lower it: for 4000 x 25000, k = 512, 112,696 bytes, for k = 1024 114,744.
# Two of these share a multiprocessor of an H100; two of 117,816 did not.
REDUCTION_BYTES = 1_024  # that Mosaic reduces with; half of what it keeps otherwise

# The CTA that merges sorts the winners in registers, up to 32 of 8 bytes in each of its 128 threads.
MERGED_PER_CTA = 4_096  # winners

# The maxima of groups of 32 elements leave 67 candidates of 4000 x 25000 float32 for k = 64, and take 137 us. One
# maximum a thread left 90 to 180 candidates, and took 178 us.
STEP_ELEMENTS = 32  # elements of a thread in a step, and in a group at most


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows of top-k in shared memory, whole or in parts; the drawing at the top of this file shows one.

    Attributes:
      vocab: number of elements of a row.
      vec: number of elements in 16 bytes, which a thread loads at once.
      step_blocks: number of blocks of a step.
      group_blocks: number of blocks of a group; it divides step_blocks.
      count: number of parts of a row, each in a CTA of its own.
      compact: whether candidates are listed by their positions, in 16 bits, until the row is no longer needed; then
        they get their slots where it was. Of whole rows of float32.
    """

    vocab: int
    vec: int
    step_blocks: int
    group_blocks: int
    count: int = 1
    compact: bool = False

    @property
    def block(self) -> int:
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
        return -(-(self.head + self.cut.longest) // self.block)

    @property
    def full(self) -> int:
        """Number of steps that lie whole in the head and the body."""
        return (self.head + self.body) // (self.block * self.step_blocks)

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
        """Number of groups, of group_blocks blocks each, whose maxima one thread keeps."""
        return -(-self.blocks // self.group_blocks)

    @property
    def groups(self) -> int:
        """Number of groups of all threads."""
        return self.groups_per_thread * WARPGROUP

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.blocks * self.block

    def copies(self) -> list[tuple[int, int]]:
        """Returns the first position and the number of elements of each bulk copy: one a step, of the body alone."""
        step, end = self.block * self.step_blocks, self.head + self.body if self.body else 0
        return [(max(at, self.head), min(at + step, end) - max(at, self.head)) for at in range(0, end, step)]


def plan_topk(rows: int, vocab: int, k: int, dtype, capability: tuple[int, int]) -> Tile | Window:
    """Returns how the rows of top-k lie over a GPU.

    Args:
      rows: number of rows.
      vocab: number of elements of a row.
      k: number of winners of a row, from 1 to MAX_K.
      dtype: that of the logits.
      capability: compute capability of the GPU.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if tile := plan_tile(vocab, k, itemsize):
        return tile
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    if k > MAX_CUT_K:
        for window in _whole_windows(vocab, k, itemsize):
            if cta_bytes(window, k, itemsize) <= smem_of_each(capability, 2):
                return window
    whole = _window(vocab, k, itemsize, 1)
    fills = k >= MANY_WINNERS and itemsize == 4 and vocab * itemsize >= WHOLE_ROW_BYTES
    if rows > FEW_ROWS and fills and _fits(whole, k, itemsize, smem):
        return whole
    room = smem // 2 if k <= MAX_CUT_K else smem  # bytes of a CTA: two share a multiprocessor, or one has it
    count = _parts(rows, vocab, k, itemsize)
    while not _fits(_window(vocab, k, itemsize, count), k, itemsize, room):
        count += 1  # shorter parts take less room
    return _window(vocab, k, itemsize, count)


def _parts(rows: int, vocab: int, k: int, itemsize: int) -> int:
    """Returns the number of parts of a row that is the fastest, if they fit into shared memory."""
    if k > MAX_CUT_K:
        return 1  # merging so many winners would take longer than parts save
    if rows <= FEW_ROWS and vocab > FEW_ROWS_MIN_VOCAB:  # whole rows would leave multiprocessors without work
        return min(-(-vocab // FEW_ROWS_PART), max(MIN_PARTS, FEW_ROWS_MERGED // k), MAX_PARTS)
    row_bytes, part_bytes = ROW_BYTES[itemsize], PART_BYTES[itemsize]
    if k >= MANY_WINNERS:
        row_bytes = part_bytes = MANY_WINNERS_BYTES
    if vocab * itemsize > row_bytes:  # a multiprocessor would hold one row, and wait for the next
        return -(-vocab * itemsize // part_bytes)
    return 1  # nothing is to be merged


def _window(vocab: int, k: int, itemsize: int, count: int) -> Window:
    """Returns the window of a row in `count` parts that has twice as many groups as winners, if it can.

    The k-th largest of fewer maxima would be a loose bound for the k-th best element.
    """
    vec = ACCESS_BYTES // itemsize
    step_blocks = group_blocks = STEP_ELEMENTS // vec
    window = Window(vocab, vec, step_blocks, group_blocks, count)
    while group_blocks > 1 and (window.groups < 2 * k or group_blocks > window.blocks):
        group_blocks //= 2
        window = Window(vocab, vec, step_blocks, group_blocks, count)
    return window


def _whole_windows(vocab: int, k: int, itemsize: int) -> list[Window]:
    """Returns windows of a whole row, each of which takes less room, and longer to search, than the one before.

    The last one has half as many groups: a bound that is looser costs less than a CTA.
    """
    window = _window(vocab, k, itemsize, 1)
    if itemsize != 4 or not sum(ordering_words(k)) <= window.size <= MAX_COMPACT_SIZE:
        return [window]
    compact = dataclasses.replace(window, compact=True)
    fewer = dataclasses.replace(compact, group_blocks=2 * window.group_blocks)
    fits = fewer.group_blocks <= fewer.step_blocks and 2 * fewer.groups >= 3 * k
    return [window, compact, *[fewer] * fits]


def _fits(window: Window, k: int, itemsize: int, room: int) -> bool:
    """Returns whether the window, and what the search takes beside it, fit into `room` bytes."""
    return window.size * itemsize + selection_bytes(window, k) <= room


def cta_bytes(window: Window, k: int, itemsize: int) -> int:
    """Returns the bytes of shared memory that a CTA takes: Mosaic rounds arrays up, and keeps some to reduce with."""
    arrays = [window.size * itemsize, *_arrays_beside_row(window, k), REDUCTION_BYTES]
    return sum(-(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT for size in arrays) + 8 * len(window.copies())


def candidate_slots(k: int) -> int:
    """Returns the number of candidates that a window's list has room for, a power of two, which the sort needs.

    A normal sample of 25,000 has 67 candidates for k = 64. Where there are more than slots, the search is repeated.
    """
    return power_of_two(2 * k, 256)


def bound_rank(window: Window, k: int, room: int) -> int:
    """Returns which of the groups' largest elements, in order, is the bound for candidates: the k-th or a higher one.

    At least k elements reach the k-th, one in each of k groups. Where k is so large beside the number of groups that in
    a row in any order too many reach it, the bound is one that about 1.4 k reach.

    Args:
      room: how many candidates the list has room for.
    """
    elements = window.cut.longest

    def groups_with(number: float) -> float:
        """Returns how many groups have one of so many elements."""
        return elements / window.group_size * (1 - (1 - number / elements) ** window.group_size)

    if elements <= room or k <= groups_with(0.9 * room):
        return k
    return round(groups_with(1.4 * k))


def lists_per_merge(k: int) -> int:
    """Returns the number of lists of k winners that one CTA merges into one: at most one for each thread."""
    return max(2, min(WARPGROUP, MERGED_PER_CTA // k))


def searches_lists(lists: int, k: int) -> bool:
    """Returns whether a merge of so many lists of k winners finds the rank of each by a search in each list."""
    return lists <= SEARCHED_LISTS and lists * k <= SEARCHED_WINNERS


def padded_winners(k: int) -> int:
    """Returns k rounded up to whole blocks of one element a thread."""
    return -(-k // WARPGROUP) * WARPGROUP


def group_words(window: Window, k: int) -> int:
    """Returns the 32-bit words of shared memory that hold the groups' maxima, and later the winners in order.

    The winners of a compact window are in order where its row was.
    """
    return window.groups if window.compact else max(window.groups, 2 * padded_winners(k))


def ordering_words(k: int) -> tuple[int, int, int]:
    """Returns the words of slots, buckets and ranked winners, which a compact window has where its row was."""
    return 2 * candidate_slots(k), candidate_slots(k), 2 * padded_winners(k)


def listed_items(window: Window, k: int) -> tuple[int, int]:
    """Returns the lengths of the list of candidates, and of that of groups that reach the bound, which is scratch.

    Their items are words, of which a candidate has two; or numbers of 16 bits in a compact window, of which it has one.
    Of 25,000 numbers, 1,593 are candidates for k = 1024 and groups of 16, with a deviation of 33.
    """
    slots = candidate_slots(k)
    if not window.compact:
        return 2 * slots, slots
    return max(MIN_POSITIONS, slots - slots // 8), padded_winners(k + k // 4)


def selection_bytes(window: Window, k: int) -> int:
    """Returns the bytes of shared memory that top-k takes beside the row."""
    return sum(_arrays_beside_row(window, k))


def _arrays_beside_row(window: Window, k: int) -> list[int]:
    return [
        4 * (group_words(window, k) + WARPGROUP),
        (2 if window.compact else 4) * sum(listed_items(window, k)),
    ]
