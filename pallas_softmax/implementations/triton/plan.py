"""How rows lie over the programs of the kernels. Pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax import operations

MAX_K = 256  # of more, sorting takes minutes to compile
_NARROW = 8  # elements of a group that top-k orders together
MAX_PARTS = 65_535  # the second dimension of a grid
MAX_INDEX = 2**31 - 2**20  # so that the indices of a program, also of what it leaves out, fit an int32
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Block:
    """`rows` rows of a program in registers, each in `lanes` elements (a power of two)."""

    rows: int
    lanes: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Long:
    """A row in `parts` of `length` elements, a program each, in steps of depth x width."""

    parts: int
    length: int
    depth: int
    width: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Slabs:
    """A row in `parts` of `length` elements, a program each, in slabs of groups x vec."""

    parts: int
    length: int
    slots: int
    groups: int
    vec: int
    warps: int

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """Slabs of the groups that are read again, and elements of those that are chosen from them."""
        elements = power_of_two(-(-self.length // (self.groups * self.vec))) * self.vec
        levels = []
        while elements > 1:
            slabs = elements // self.vec
            elements = 1 if elements <= _NARROW else max(self.vec, elements // _NARROW)
            levels.append((slabs, elements))
        return tuple(levels)


def power_of_two(least: int) -> int:
    """The first power of two that is not below `least`."""
    return 1 << max(least - 1, 0).bit_length()


def plan_softmax(op: str, rows: int, vocab: int, dtype, masked: bool = False) -> Block | Long:
    """How the rows of a softmax operation lie over programs. Rests on measurements of an H100.

    And on what ptxas says: no plan spills registers, which a mask needs more of.
    """
    backward = operations.TABLE[op].is_gradient
    half = jnp.dtype(dtype).itemsize == 2
    if masked:
        most = 16_384
    elif op in ("softmax", "logsumexp"):
        most = 32_768
    else:
        most = 24_576 if half else 28_672
    if vocab <= most:
        lanes = power_of_two(vocab)
        return Block(max(1, 1024 // lanes), lanes, max(1, lanes // 1024))  # 32 elements a thread
    parts = min(-(-vocab // 4096), 256 // rows) if rows <= 64 else 1
    if parts > 1:
        deep = not masked and vocab > parts * 16_384
        return _long(vocab, parts, 4, 4096, 16) if deep else _long(vocab, parts, 1, 4096, 8)
    if masked:
        return _long(vocab, 1, 1, 4096, 16)
    return _long(vocab, 1, 4, 4096, 16) if half and not backward else _long(vocab, 1, 2, 8192, 32)


def _long(vocab, parts, depth, width, warps) -> Long:
    length = _part(vocab, parts, depth * width)
    return Long(-(-vocab // length), length, depth, width, warps)


def _part(vocab: int, parts: int, step: int) -> int:
    """Elements of a part, in whole steps, of about that many parts."""
    return -(-vocab // (parts * step)) * step


def plan_topk(rows: int, vocab: int, k: int, dtype) -> Slabs:
    """How the rows of top-k lie over programs. Rests on measurements of an H100.

    `vec` is what a thread loads at once. The more groups, the longer it takes to find the best; the fewer, the
    more elements of theirs are read again.
    """
    slots = max(2, power_of_two(k))  # tl.topk has no list of one
    vec = math.gcd(vocab, 16 // jnp.dtype(dtype).itemsize)
    parts = max(1, min(vocab // (4_096 if k <= 16 else 16_384), 256 // rows, 2_048 // slots))
    part = -(-vocab // parts)
    most = 8192 // (max(32, slots) * vec)  # slabs of a part: those of its winning groups fit the registers
    groups = 128 if k <= 16 else 512 if k <= 64 else 1024
    widest = min(1024, 4096 // vec)
    groups = min(widest, groups * (4 if vec < 4 else 1) * (2 if parts > 1 else 1))
    while groups < widest and groups * vec * (25 if k <= 16 else most) < part:
        groups *= 2
    while groups > max(128, slots) and groups * vec > part:
        groups //= 2
    parts = max(parts, -(-vocab // (groups * vec * most)))
    length = _part(vocab, parts, groups * vec)
    warps = max(min(4, groups * vec // 256), min(8, groups * min(vec, 4) // 256), 1)
    return Slabs(-(-vocab // length), length, slots, groups, vec, warps)


def lists_per_merge(slots: int) -> int:
    """Lists of so many winners that a program merges into one."""
    return max(2, 4096 // slots)
