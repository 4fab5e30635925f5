"""How the rows of a call lie over the programs of a Triton kernel: pure functions of shape, dtype and k.

A program is what CUDA calls a thread block: `warps` warps of 32 threads, which hold arrays in their registers. All
programs of a launch do the same work on different rows, or on different parts of rows. There are three plans.

`Block` is for short rows of softmax: a program reads `rows` whole rows at once, each padded to `width` elements.

    program 0   row 0  | x x x x x x x x x . . . . . . . |   x: an element, one of V
                row 1  | x x x x x x x x x . . . . . . . |   .: padding, which is neither read nor written
    program 1   row 2  | x x x x x x x x x . . . . . . . |
                row 3  | x x x x x x x x x . . . . . . . |
                       |<----------- width ------------->|

`Long` is for longer rows of softmax. A row is cut into `parts` of `length` elements, of which the last may be
shorter, and a program walks over its part in steps of depth x width elements. It adds each step to a running
normalizer (m, d) of each of the `width` columns, and merges these by ⊕ at the end. To write the result it reads the
part once more.

    row    |<-------------------------------- V -------------------------------->|
           |<----- length ----->|<----- length ----->|<----- length ----->| last |    `parts` parts, a program each

    part   |h|  step  |  step  |  step  |  step  |  step  |  step  |  step  |t|
           |h|<------ middle: vectors of 16 bytes, which are aligned ------>|t|

    step   | 0 1 2 ... width - 1 |    `depth` lines, one behind the other in memory
           | 0 1 2 ... width - 1 |

The head `h` and the tail `t`, together called the edge, are there only if V is not a multiple of the vector. Then
rows start anywhere, and the edge, less than two vectors, is read element by element.

`Slabs` is for top-k. A row is cut into parts as above, and a part into slabs of groups x vec elements. A group is a
column of the slabs: the same `vec` neighbours in each of them.

    part     group 0   group 1   group 2         group `groups` - 1
    slab 0   | x x x x | x x x x | x x x x | ... | x x x x |    vec = 4 elements, which one thread loads at once
    slab 1   | x x x x | x x x x | x x x x | ... | x x x x |
    slab 2   | x x x x | x x x x | x x x x | ... | x x x x |

One pass over the slabs keeps the best element of each group, and (m, d). All k winners lie in those k groups whose
best elements are the best. A program reads these groups again, cut into smaller groups, takes the k best of those,
and so on until a group is one element. `Slabs.levels` lists these levels. With several parts, a second kernel merges
their winners.
"""

import dataclasses
import math

import jax.numpy as jnp

# --- What the kernels can take ------------------------------------------------------------------------

MAX_K = 256  # winners; the sorting network is unrolled, and for more of them it takes minutes to compile
MAX_PARTS = 65_535  # parts of a row; they are the second dimension of a CUDA grid, which has this bound
MAX_INDEX = 2**31 - 2**20  # rows, or elements of a row, so that indices, padding included, fit an int32
VECTOR_BYTES = 16  # bytes that one thread loads at once

# --- What the plans rest on ---------------------------------------------------------------------------
# The constants were chosen by measurements on one H100. What the plans then reach is in benchmarks/results/triton
# (softmax) and in benchmarks/results/triton_topk. Constants that say "registers" rest on what ptxas reports, too: for
# compute capability 8.0, 8.9 and 9.0 no plan makes a kernel spill registers to memory (test_triton_compiled.py).

# Elements of a thread in a Block. Rows of up to 16,384 elements then take 93% of a copy's bandwidth or more.
BLOCK_THREAD_ELEMENTS = 32

# The longest rows, in elements, that are planned as a Block. Registers set them: each of a program's 1,024 threads has
# 64, of which 32,768 elements take half. The compiler drops what is only padding by whole vectors of all threads, which
# are 4,096 elements, or 8,192 in 16 bits. So a limit below 32,768 is a multiple of these.
MAX_BLOCK_EXPONENTIALS = 32_768  # softmax, whose exponentials take the logits' place, and logsumexp
MAX_BLOCK_32_BITS = 28_672  # others: with 32,768 log_softmax spills 28 bytes of a thread, and softmax_grad 52
MAX_BLOCK_16_BITS = 24_576  # others: with 32,768 log_softmax spills 36 bytes of a thread, and softmax_grad 40
MAX_BLOCK_MASKED = 16_384  # with a mask softmax_grad spills 52 bytes of a thread at 20,480 already

# With no more than FEW_ROWS rows, a program for each would leave most of the GPU idle, so rows are cut into parts:
# about LAUNCHED_PROGRAMS in all, two for each of the H100's 132 multiprocessors. 64 rows of 128,256 elements then
# take 69% of a copy's bandwidth in float32, as much as 1,024 whole rows do.
FEW_ROWS = 64
LAUNCHED_PROGRAMS = 256
MIN_LONG_PART = 4_096  # elements
DEEP_PART = 16_384  # elements of a part beyond which steps of four lines pay

# Top-k of up to FEW_WINNERS is bound by memory, of more by the sorting of candidates, so these have more, smaller
# groups.
FEW_WINNERS, SOME_WINNERS = 16, 64
MIN_SLABS_PART = 4_096  # elements, for few winners: 1 x 128,256 and k = 5 take 7.5 us in float32
MIN_SLABS_PART_SORTED = 16_384  # elements, for more winners, since each part sorts its own
MAX_PART_CANDIDATES = 2_048  # candidates of all parts of a row, so that one program can merge them
FEW_WINNERS_SLABS = 25  # slabs of a part, for few winners, beyond which twice the groups are faster
MAX_GROUP_ELEMENTS = 256  # elements of a group, for few winners; for more, MAX_CANDIDATES bounds them

# Registers: candidates, of 8 bytes each, that a program sorts at once.
MAX_CANDIDATES = 8_192  # of winning groups that are read again
MERGED_CANDIDATES = 4_096  # of the lists that are merged
SLAB_ELEMENTS = 4_096  # elements of the widest slab, each with a candidate and a pair (m, d)
MAX_GROUPS = 1_024
MIN_GROUPS = 128  # groups of a part, however short
LEVEL_RATIO = 8  # smaller groups that a level cuts a group into


@dataclasses.dataclass(frozen=True)
class Block:
    """A program holds whole rows in registers.

    Attributes:
      rows: number of rows of a program, a power of two.
      width: number of elements that each row is padded to, a power of two.
      warps: number of warps of a program.
    """

    rows: int
    width: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Long:
    """A program walks over a part of a row in steps.

    Attributes:
      parts: number of parts of a row, which is the number of its programs.
      length: number of elements of a part, a multiple of depth x width; the last part of a row may have fewer.
      depth: number of lines of a step, a power of two.
      width: number of elements of a line, a power of two; each keeps a normalizer of its own.
      warps: number of warps of a program.
    """

    parts: int
    length: int
    depth: int
    width: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Slabs:
    """A program finds the winners of a part of a row, slab by slab.

    Attributes:
      parts: number of parts of a row, which is the number of its programs.
      length: number of elements of a part, a multiple of groups x vec; the last part of a row may have fewer.
      slots: number of winners that are kept, a power of two that is not below k.
      groups: number of groups of a part, a power of two that is not below `slots`.
      vec: number of neighbouring elements that a group has in each slab, a power of two.
      warps: number of warps of a program.
    """

    parts: int
    length: int
    slots: int
    groups: int
    vec: int
    warps: int

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """How the winning groups are narrowed down to winning elements: one pair (slabs, size) for each level.

        A level reads `slabs` x `vec` elements of each winning group again, which is the whole group, and chooses the
        best of the smaller groups of `size` elements in them. The groups of the last level are single elements.
        """
        size = power_of_two(-(-self.length // (self.groups * self.vec))) * self.vec
        levels = []
        while size > 1:
            slabs = size // self.vec
            # Smaller groups are whole slabs of a group until they are single elements, as the kernel's order wants.
            size = 1 if size <= LEVEL_RATIO else max(self.vec, size // LEVEL_RATIO)
            levels.append((slabs, size))
        return tuple(levels)


def power_of_two(least: int) -> int:
    """Returns the first power of two that is not below `least`."""
    return 1 << max(least - 1, 0).bit_length()


# --- Softmax ------------------------------------------------------------------------------------------


def plan_softmax(op: str, rows: int, vocab: int, dtype, masked: bool = False) -> Block | Long:
    """Decides how the rows of a softmax operation lie over programs.

    Args:
      op: the name of the operation.
      rows: number of rows.
      vocab: number of elements of a row.
      dtype: dtype of the elements.
      masked: whether there is a mask.
    """
    is_gradient = op.endswith("_grad")
    is_16_bit = jnp.dtype(dtype).itemsize == 2

    if vocab <= _max_block(op, is_16_bit, masked):
        return _block(vocab)

    parts = _long_parts(rows, vocab)
    # The steps of few rows: small programs, but for parts that are long enough to fill the registers of larger ones.
    if parts > 1 and vocab > parts * DEEP_PART and not masked:
        return _long(vocab, parts, depth=4, width=4_096, warps=16)
    if parts > 1:
        return _long(vocab, parts, depth=1, width=4_096, warps=8)

    # The steps of many rows: as many elements at once as the registers hold.
    if masked:  # the mask and its addresses take the registers of deeper steps
        return _long(vocab, 1, depth=1, width=4_096, warps=16)
    if is_16_bit and not is_gradient:  # one array, whose elements are loaded eight at a time
        return _long(vocab, 1, depth=4, width=4_096, warps=16)
    return _long(vocab, 1, depth=2, width=8_192, warps=32)


def _max_block(op: str, is_16_bit: bool, masked: bool) -> int:
    """Length of the longest rows that a program holds whole, in elements."""
    if masked:
        return MAX_BLOCK_MASKED
    if op in ("softmax", "logsumexp"):
        return MAX_BLOCK_EXPONENTIALS
    if is_16_bit:
        return MAX_BLOCK_16_BITS
    return MAX_BLOCK_32_BITS


def _block(vocab: int) -> Block:
    """Returns the plan of short rows: programs of one warp or more, and of one row or more."""
    width = power_of_two(vocab)
    warp_elements = 32 * BLOCK_THREAD_ELEMENTS
    return Block(rows=max(1, warp_elements // width), width=width, warps=max(1, width // warp_elements))


def _long_parts(rows: int, vocab: int) -> int:
    """Returns the number of parts that a row should be cut into, so that the programs of few rows fill the GPU."""
    if rows > FEW_ROWS:
        return 1
    return min(_ceil_divide(vocab, MIN_LONG_PART), LAUNCHED_PROGRAMS // rows)


def _long(vocab: int, parts: int, depth: int, width: int, warps: int) -> Long:
    """Returns the plan of long rows in about so many parts, and in steps of depth x width elements."""
    length = _part_length(vocab, parts, depth * width)
    return Long(_ceil_divide(vocab, length), length, depth, width, warps)


# --- Top-k --------------------------------------------------------------------------------------------


def plan_topk(rows: int, vocab: int, k: int, dtype) -> Slabs:
    """Decides how the rows of top-k lie over programs.

    Args:
      rows: number of rows.
      vocab: number of elements of a row.
      k: number of winners, from 1 to MAX_K.
      dtype: dtype of the elements.
    """
    slots = max(2, power_of_two(k))  # tl.topk makes lists of a power of two, and none of one
    vec = math.gcd(vocab, VECTOR_BYTES // jnp.dtype(dtype).itemsize)  # every row starts at a multiple of it
    max_slabs = min(MAX_GROUP_ELEMENTS, MAX_CANDIDATES // slots) // vec  # since winning groups are read again

    parts = _slabs_parts(rows, vocab, k, slots)
    groups = _groups(k, slots, vec, max_slabs, _ceil_divide(vocab, parts), in_parts=parts > 1)
    slab = groups * vec
    parts = max(parts, _ceil_divide(vocab, slab * max_slabs))  # what groups of max_slabs slabs can hold
    length = _part_length(vocab, parts, slab)
    return Slabs(_ceil_divide(vocab, length), length, slots, groups, vec, _slabs_warps(groups, vec))


def _slabs_parts(rows: int, vocab: int, k: int, slots: int) -> int:
    """Returns the number of parts that a row should be cut into, so that the programs of few rows fill the GPU."""
    least = MIN_SLABS_PART if k <= FEW_WINNERS else MIN_SLABS_PART_SORTED
    return max(1, min(vocab // least, LAUNCHED_PROGRAMS // rows, MAX_PART_CANDIDATES // slots))


def _groups(k: int, slots: int, vec: int, max_slabs: int, part: int, in_parts: bool) -> int:
    """Returns the number of groups of a part of `part` elements.

    The more groups there are, the longer it takes to find the best of them; the fewer, the more elements of the
    best ones are read again.
    """
    widest = min(MAX_GROUPS, SLAB_ELEMENTS // vec)
    if k <= FEW_WINNERS:  # few groups are read again, so they may be larger and fewer
        groups, slabs = 128, FEW_WINNERS_SLABS
    elif k <= SOME_WINNERS:
        groups, slabs = 512, max_slabs
    else:
        groups, slabs = 1_024, max_slabs
    if vec < 4:  # narrow loads: more of them at once
        groups *= 4
    if in_parts:  # there are few programs: each keeps more loads on their way
        groups *= 2
    groups = min(widest, groups)
    while groups < widest and groups * vec * slabs < part:  # long parts: groups would have too many elements
        groups *= 2
    while groups > max(MIN_GROUPS, slots) and groups * vec > part:  # short parts: groups would have none
        groups //= 2
    return groups


def _slabs_warps(groups: int, vec: int) -> int:
    """Returns the number of warps of a program: for most slabs four, but up to eight if it has many groups to sort."""
    of_elements = groups * vec // 256
    of_groups = groups * min(vec, 4) // 256
    return max(1, min(4, of_elements), min(8, of_groups))


def lists_per_merge(slots: int) -> int:
    """Returns the number of lists, of `slots` candidates each, that one program can merge into one list."""
    return max(2, MERGED_CANDIDATES // slots)


def merge_fan_in(lists: int, slots: int) -> int:
    """Returns how many of the `lists` of a row each program of the next merge takes: a power of two."""
    return min(lists_per_merge(slots), power_of_two(lists))


def merge_warps(fan_in: int, slots: int) -> int:
    """Returns the number of warps of a program that merges `fan_in` lists: one for 64 candidates, but at most eight."""
    return max(1, min(8, fan_in * slots // 64))


# --- Both ---------------------------------------------------------------------------------------------


def _part_length(vocab: int, parts: int, step: int) -> int:
    """Returns the number of elements of a part, in whole steps, if a row is cut into about so many parts, or fewer."""
    return _ceil_divide(vocab, parts * step) * step


def _ceil_divide(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
