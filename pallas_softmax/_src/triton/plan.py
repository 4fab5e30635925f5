"""Plans of Triton kernels: how the rows of a call lie over programs. Pure functions of shape, dtype and k.

A program is a thread block of CUDA: `warps` warps of 32 threads, which hold arrays in their registers. All
programs of a launch do the same work on different rows, or on different parts of rows. There are three plans.

`Block` is for short rows of softmax: a program reads `rows` whole rows at once, each padded to `width` elements.

    program 0   row 0  | x x x x x x x x x . . . . . . . |   x: an element, one of V
                row 1  | x x x x x x x x x . . . . . . . |   .: padding, which is neither read nor written
    program 1   row 2  | x x x x x x x x x . . . . . . . |
                row 3  | x x x x x x x x x . . . . . . . |
                       |<----------- width ------------->|

`Long` is for longer rows of softmax. A row is cut into `parts` of `length` elements; the last part may be shorter. A
program walks over its part in steps of depth x width elements. It keeps a running normalizer (m, d) for each of the
`width` columns, adds each step to them, and merges them by ⊕ at the end. To write the result it reads the part once
more.

    row    |<-------------------------------- V -------------------------------->|
           |<----- length ----->|<----- length ----->|<----- length ----->| last |    `parts` parts, a program each

    part   |h|  step  |  step  |  step  |  step  |  step  |  step  |  step  |t|
           |h|<------ middle: vectors of 16 bytes, which are aligned ------>|t|

    step   | 0 1 2 ... width - 1 |    `depth` lines, one behind the other in memory
           | 0 1 2 ... width - 1 |

The head `h` and the tail `t` together are the edge. There is an edge only if V is not a multiple of the vector: rows
then start anywhere. The edge is shorter than two vectors, and is read element by element.

`Slabs` is for top-k. A row is cut into parts as above, and a part into slabs of groups x vec elements. A group is a
column of the slabs: the same `vec` neighbours in each of them.

    part     group 0   group 1   group 2         group `groups` - 1
    slab 0   | x x x x | x x x x | x x x x | ... | x x x x |    vec = 4 elements, which one thread loads at once
    slab 1   | x x x x | x x x x | x x x x | ... | x x x x |
    slab 2   | x x x x | x x x x | x x x x | ... | x x x x |

topk/triton_kernels.py explains how groups lead to the winners.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES
from pallas_softmax._src.gpu.layout import power_of_two

# --- Limits of the kernels ----------------------------------------------------------------------------

MAX_K = 256  # winners; for more, the unrolled sorting network takes minutes to compile
MAX_PARTS = 65_535  # parts of a row: the largest second dimension of a CUDA grid
MAX_INDEX = 2**31 - 2**20  # rows, or elements of a row; indices must fit an int32 with padding

# --- Measured constants of the plans ------------------------------------------------------------------
# We chose these constants by measurements on one H100. benchmarks/results/triton (softmax) and
# benchmarks/results/triton_topk have the resulting speeds. Constants that mention registers also rest on reports of
# ptxas: for compute capability 8.0, 8.9 and 9.0 no plan makes a kernel spill registers (tests/triton/test_compiled.py).

# Elements of a thread in a Block. Rows of up to 16,384 elements then reach at least 93% of a copy's bandwidth.
BLOCK_THREAD_ELEMENTS = 32

# The longest rows, in elements, that are planned as a Block. Registers limit them: each of a program's 1,024 threads
# has 64 registers, and 32,768 elements take half of them. The compiler drops padding only in whole vectors of all
# threads: 4,096 elements, or 8,192 in 16-bit dtypes. So a limit below 32,768 is a multiple of these numbers.
MAX_BLOCK_EXPONENTIALS = 32_768  # logsumexp, and softmax, where exponentials replace the logits
MAX_BLOCK_32_BITS = 28_672  # others: at 32,768 log_softmax spills 28 bytes per thread, softmax_grad 52
MAX_BLOCK_16_BITS = 24_576  # others: at 32,768 log_softmax spills 36 bytes per thread, softmax_grad 40
MAX_BLOCK_MASKED = 16_384  # with a mask: softmax_grad spills 52 bytes per thread already at 20,480

# With at most FEW_ROWS rows, one program per row would leave most of the GPU idle, so rows are cut into parts. A launch
# then has about LAUNCHED_PROGRAMS programs, two for each of the H100's 132 multiprocessors. 64 rows of 128,256 elements
# then reach 69% of a copy's bandwidth in float32, the same as 1,024 whole rows.
FEW_ROWS = 64
LAUNCHED_PROGRAMS = 256
MIN_LONG_PART = 4_096  # elements
DEEP_PART = 16_384  # elements of a part; in longer parts, steps of four lines are faster

# Memory bounds top-k of up to FEW_WINNERS. The sorting of candidates bounds top-k of more winners, so these plans have
# more and smaller groups.
FEW_WINNERS, SOME_WINNERS = 16, 64
MIN_SLABS_PART = 4_096  # elements, for few winners: (1, 128256) with k = 5 takes 7.5 µs in float32
MIN_SLABS_PART_SORTED = 16_384  # elements, for more winners, since each part sorts its own
MAX_PART_CANDIDATES = 2_048  # candidates of all parts of a row, for one program to merge
FEW_WINNERS_SLABS = 25  # slabs of a part, for few winners; with more slabs, twice the groups are faster
MAX_GROUP_ELEMENTS = 256  # elements of a group, for few winners; otherwise MAX_CANDIDATES is the limit

# Registers limit the candidates, of 8 bytes each, that a program sorts at once.
MAX_CANDIDATES = 8_192  # in winning groups that are read again
MERGED_CANDIDATES = 4_096  # in lists that are merged
SLAB_ELEMENTS = 4_096  # elements of the widest slab; each has a candidate and a pair (m, d)
MAX_GROUPS = 1_024
MIN_GROUPS = 128  # groups of a part, however short
LEVEL_RATIO = 8  # number of smaller groups that a level cuts a group into


@dataclasses.dataclass(frozen=True)
class Block:
    """A program holds whole rows in registers."""

    rows: int  # number of rows of a program, a power of two
    width: int  # number of elements that each row is padded to, a power of two
    warps: int  # number of warps of a program


@dataclasses.dataclass(frozen=True)
class Long:
    """A program walks over a part of a row in steps."""

    parts: int  # number of parts of a row, which is the number of its programs
    length: int  # number of elements of a part, a multiple of depth x width; the last part may have fewer
    depth: int  # number of lines of a step, a power of two
    width: int  # number of elements of a line, a power of two; each keeps a normalizer of its own
    warps: int  # number of warps of a program


@dataclasses.dataclass(frozen=True)
class Slabs:
    """A program finds the winners of a part of a row, slab by slab."""

    parts: int  # number of parts of a row, which is the number of its programs
    length: int  # number of elements of a part, a multiple of groups x vec; the last part may have fewer
    slots: int  # number of winners that are kept, a power of two that is at least k
    groups: int  # number of groups of a part, a power of two that is at least `slots`
    vec: int  # number of neighbouring elements that a group has in each slab, a power of two
    warps: int  # number of warps of a program

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """A pair (slabs, size) for each level that narrows winning groups down to winning elements.

        A level reads each winning group again, all its `slabs` x `vec` elements. It cuts the group into smaller groups
        of `size` elements and chooses the best of them. The groups of the last level are single elements.
        """
        size = power_of_two(-(-self.length // (self.groups * self.vec)), 1) * self.vec
        levels = []
        while size > 1:
            slabs = size // self.vec
            # The kernel's order requires that smaller groups are whole slabs of a group, or single elements.
            size = 1 if size <= LEVEL_RATIO else max(self.vec, size // LEVEL_RATIO)
            levels.append((slabs, size))
        return tuple(levels)


# --- Softmax ------------------------------------------------------------------------------------------


def plan_softmax(op: str, rows: int, vocab: int, dtype, masked: bool = False) -> Block | Long:
    """Returns how the rows of the softmax operation named `op` lie over programs."""
    is_16_bit = jnp.dtype(dtype).itemsize == 2
    if masked:
        longest = MAX_BLOCK_MASKED
    elif op in ("softmax", "logsumexp"):
        longest = MAX_BLOCK_EXPONENTIALS
    else:
        longest = MAX_BLOCK_16_BITS if is_16_bit else MAX_BLOCK_32_BITS
    if vocab <= longest:  # a program has at least one warp and at least one row
        width, warp_elements = power_of_two(vocab, 1), LANES * BLOCK_THREAD_ELEMENTS
        return Block(max(1, warp_elements // width), width, max(1, width // warp_elements))

    # Few rows are cut into parts, so that their programs fill the GPU.
    parts = 1 if rows > FEW_ROWS else min(-(-vocab // MIN_LONG_PART), LAUNCHED_PROGRAMS // rows)
    # Their programs are small, unless parts are long enough to fill the registers of larger programs. With many rows, a
    # step has as many elements as the registers hold.
    if parts > 1 and vocab > parts * DEEP_PART and not masked:
        depth, width, warps = 4, 4_096, 16
    elif parts > 1:
        depth, width, warps = 1, 4_096, 8
    elif masked:  # the mask and its addresses take the registers that deeper steps need
        depth, width, warps = 1, 4_096, 16
    elif is_16_bit and not op.endswith("_grad"):  # one array, loaded eight elements at a time
        depth, width, warps = 4, 4_096, 16
    else:
        depth, width, warps = 2, 8_192, 32
    return Long(*_cut(vocab, parts, depth * width), depth, width, warps)


def _cut(vocab: int, parts: int, step: int) -> tuple[int, int]:
    """Returns how many parts a row is cut into, at most `parts`, and the length of a part, a multiple of `step`."""
    length = -(-vocab // (parts * step)) * step
    return -(-vocab // length), length


# --- Top-k --------------------------------------------------------------------------------------------


def plan_topk(rows: int, vocab: int, k: int, dtype) -> Slabs:
    """Returns how the rows of top-k lie over programs. k is from 1 to MAX_K."""
    slots = power_of_two(k, 2)  # tl.topk makes lists of a power of two, at least two
    vec = math.gcd(vocab, ACCESS_BYTES // jnp.dtype(dtype).itemsize)  # every row starts at a multiple of it
    # Winning groups are read again, so their size has a limit.
    max_slabs = min(MAX_GROUP_ELEMENTS, MAX_CANDIDATES // slots) // vec

    # Few rows are cut into parts, so that their programs fill the GPU.
    least = MIN_SLABS_PART if k <= FEW_WINNERS else MIN_SLABS_PART_SORTED
    parts = max(1, min(vocab // least, LAUNCHED_PROGRAMS // rows, MAX_PART_CANDIDATES // slots))
    groups = _groups(k, slots, vec, max_slabs, -(-vocab // parts), in_parts=parts > 1)
    slab = groups * vec
    parts = max(parts, -(-vocab // (slab * max_slabs)))  # a group holds at most max_slabs slabs
    # At most four warps, or at most eight if a program has many groups to sort.
    warps = max(1, min(4, slab // 256), min(8, groups * min(vec, 4) // 256))
    return Slabs(*_cut(vocab, parts, slab), slots, groups, vec, warps)


def _groups(k: int, slots: int, vec: int, max_slabs: int, part: int, in_parts: bool) -> int:
    """Returns the number of groups of a part of `part` elements.

    With more groups, it takes longer to find the best groups. With fewer groups, the best groups have more elements to
    read again.
    """
    widest = min(MAX_GROUPS, SLAB_ELEMENTS // vec)
    if k <= FEW_WINNERS:  # few groups are read again, so they may be larger and fewer
        groups, slabs = 128, FEW_WINNERS_SLABS
    else:
        groups, slabs = 512 if k <= SOME_WINNERS else 1_024, max_slabs
    if vec < 4:  # loads are narrow: a program has more of them at once
        groups *= 4
    if in_parts:  # there are few programs: each keeps more loads in flight
        groups *= 2
    groups = min(widest, groups)
    while groups < widest and groups * vec * slabs < part:  # long parts: groups would have too many elements
        groups *= 2
    while groups > max(MIN_GROUPS, slots) and groups * vec > part:  # short parts: some groups would be empty
        groups //= 2
    return groups


def merge_fan_in(lists: int, slots: int) -> int:
    """Returns how many of a row's `lists` lists of `slots` candidates a program merges into one: a power of two."""
    return min(max(2, MERGED_CANDIDATES // slots), power_of_two(lists, 1))


def merge_warps(fan_in: int, slots: int) -> int:
    """Returns the number of warps of a program that merges `fan_in` lists: one per 64 candidates, at most eight."""
    return max(1, min(8, fan_in * slots // 64))
