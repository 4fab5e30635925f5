"""Launch choices: which calls the kernels take, and how rows lie over programs. Pure functions."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import re
import sys

import jax.numpy as jnp

from pallas_softmax.dispatch import Call

MAX_K = 256  # of more, sorting takes minutes to compile
_NARROW = 8  # elements of a group that top-k orders together
_MOST_PARTS = 65_535  # the second dimension of a grid
_MOST = 2**31 - 2**20  # so that the indices of a program, also of what it leaves out, fit an int32
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


def plan(op: str, rows: int, vocab: int, dtype, masked: bool = False) -> Block | Long:
    """How the rows of a softmax operation lie over programs. Rests on measurements of an H100.

    And on what ptxas says: no plan spills registers, which a mask needs more of.
    """
    backward = op.endswith("_grad")
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


def topk_plan(rows: int, vocab: int, k: int, dtype) -> TopK:
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
    return TopK(-(-vocab // length), length, slots, groups, vec, warps)


def merged(slots: int) -> int:
    """Lists of so many winners that a program merges into one."""
    return max(2, 4096 // slots)


def slower(call: Call) -> str | None:
    """Why XLA is faster than the kernels at a call that they support; None if it is not."""
    if call.op.endswith("_grad") and call.dtype == "float32" and call.masked and call.vocab > 16_384:
        return "slower than xla for the masked backward of float32 rows of more than 16384"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take this call on a GPU of this compute capability; None if they do."""
    if capability < (8, 0):
        return f"needs compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    if call.dtype not in _DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(_DTYPES)}"
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if max(call.rows, call.vocab) > _MOST:
        return f"more than {_MOST} rows, or elements of a row: {call.rows} x {call.vocab}"
    if call.op == "merge":
        return "no kernel for winners of other devices"
    if call.op == "topk":
        if not call.trailing:
            return "the row is not contiguous: its axes are not the last ones"
        if call.k is None or not 1 <= call.k <= MAX_K:
            return f"k={call.k} is not from 1 to {MAX_K}"
        if topk_plan(call.rows, call.vocab, call.k, call.dtype).parts > _MOST_PARTS:
            return f"k={call.k} of a row of {call.vocab}: more than {_MOST_PARTS} parts"
    return missing()


@functools.cache
def missing() -> str | None:
    """Why jax-triton cannot be used here; None if it can."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    cuda = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    return incompatible(version("jax-triton"), version("triton"), sys.version_info[:2], cuda)


def incompatible(
    jax_triton: str | None, triton: str | None, python: tuple[int, int], cuda: bool
) -> str | None:
    """Why these versions do not work together; None if they do. `cuda`: JAX has its CUDA plugin.

    jax-triton 0.3.1 lowers with triton 3.6 to 3.9, 0.4.1 with 3.7 to 3.9, both with jax 0.10.2 to 0.12.0.1.
    """
    install = "pip install 'pallas-softmax[triton]'"
    for name, version, least in (("jax-triton", jax_triton, (0, 3, 1)), ("triton", triton, (3, 6))):
        if version is None:
            return f"{name} is not installed: {install}"
        if _version(version) < least:
            return f"needs {name} {'.'.join(map(str, least))} or newer, not {version}: {install}"
    assert jax_triton is not None and triton is not None
    if _version(jax_triton) >= (0, 4):
        if python < (3, 12):
            return (
                f"jax-triton {jax_triton} needs Python 3.12 or newer, not {python[0]}.{python[1]}: take 0.3.1"
            )
        if _version(triton) < (3, 7):
            return f"jax-triton {jax_triton} needs triton 3.7 or newer, not {triton}; 0.3.1 works with it"
    if not cuda:
        return "JAX is installed without CUDA: pip install 'jax[cuda13]' or 'jax[cuda12]'"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
