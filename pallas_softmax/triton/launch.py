"""Launch choices: which calls the kernels take, and how rows lie over programs. Pure functions."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math

import jax.numpy as jnp

from pallas_softmax.dispatch import Call

MAX_K = 256
_DTYPES = ("float32", "bfloat16", "float16")


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
class TopK:
    """A row in `parts` of `length` elements, a program each, in slabs of groups x vec, `depth` of them a step."""

    parts: int
    length: int
    slots: int
    depth: int
    groups: int
    vec: int
    warps: int
    ratio: int = 8

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """Slabs of the groups that are read again, and elements of those that are chosen from them."""
        elements = power_of_two(-(-self.length // (self.groups * self.vec))) * self.vec
        levels = []
        while elements > 1:
            slabs = elements // self.vec
            elements = 1 if elements <= self.ratio else max(self.vec if slabs > 1 else 1, elements // self.ratio)
            levels.append((slabs, elements))
        return tuple(levels)


def power_of_two(least: int) -> int:
    """The first power of two that is not below `least`."""
    return 1 << max(least - 1, 0).bit_length()


def plan(op: str, rows: int, vocab: int, dtype) -> Block | Long:
    """How the rows of a softmax operation lie over programs."""
    arrays = 2 if op.endswith("_grad") else 1
    lanes = power_of_two(vocab)
    if lanes * arrays <= 32_768:
        n = max(1, 1024 // lanes)
        return Block(n, lanes, min(32, max(1, lanes * n * arrays // 1024)))
    parts = 1
    while parts * rows < 128 and vocab // parts > 8_192:
        parts *= 2
    step = 4096 * 2
    length = -(-vocab // (parts * step)) * step
    return Long(-(-vocab // length), length, 2, 4096, 16)


def topk_plan(rows: int, vocab: int, k: int, dtype) -> TopK:
    """How the rows of top-k lie over programs."""
    slots = max(2, power_of_two(k))  # tl.topk has no list of one
    itemsize = jnp.dtype(dtype).itemsize
    vec = 16 // itemsize
    groups = max(slots, min(1024, power_of_two(-(-vocab // vec))))
    parts = 1
    while parts * rows < 128 and vocab // parts > 8_192:
        parts *= 2
    slab = groups * vec
    length = -(-vocab // (parts * slab)) * slab
    return TopK(-(-vocab // length), length, slots, 2, groups, vec, max(1, min(8, slab // 256)))


def slower(call: Call) -> str | None:
    """Why XLA is faster than the kernels at a call that they support; None if it is not."""
    if not call.trailing:
        return "slower than xla where the row is not the last axes: it is transposed, twice"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take this call on a GPU of this compute capability; None if they do."""
    if capability < (8, 0):
        return f"needs compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    if call.dtype not in _DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(_DTYPES)}"
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if call.rows >= 2**31 or call.vocab >= 2**31 - 2**16:
        return f"2^31 rows, or a row of 2^31 elements: {call.rows} x {call.vocab}"
    if call.op == "topk":
        if not call.trailing:
            return "the row is not contiguous: its axes are not the last ones"
        if call.k is None or not 1 <= call.k <= MAX_K:
            return f"k={call.k} is not from 1 to {MAX_K}"
    return missing()


@functools.cache
def missing() -> str | None:
    """Why jax-triton cannot be used here; None if it can."""
    return None
