"""Launch choices: which calls the kernels take, and how a CTA walks over its row. Pure functions."""

import dataclasses

import jax.numpy as jnp

from pallas_softmax.dispatch import Call

WARPGROUP = 128  # threads of a CTA: one warpgroup
_ACCESS_BYTES = 16  # of a thread, and the alignment of bulk copies between device and shared memory
_DTYPES = ("float32", "bfloat16", "float16")

# Shared memory a CTA may use, by major compute capability, in bytes.
_SMEM_BYTES = {9: 227 * 1024, 10: 227 * 1024, 12: 99 * 1024}


@dataclasses.dataclass(frozen=True)
class Walk:
    """A row in shared memory, taken in steps of `group` blocks of `block` elements.

    Thread t holds elements t * vec to (t + 1) * vec of a block.
    """

    vocab: int
    vec: int
    group: int

    @property
    def block(self) -> int:
        """Elements of a block."""
        return WARPGROUP * self.vec

    @property
    def step(self) -> int:
        """Elements of a full step."""
        return self.block * self.group

    @property
    def full(self) -> int:
        """Number of full steps."""
        return self.vocab // self.step

    @property
    def left(self) -> int:
        """Elements after the last full step; they make one more, shorter step."""
        return self.vocab % self.step

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.full + (self.left > 0)

    @property
    def padded(self) -> int:
        """Elements of shared memory: the last block is whole."""
        return -(-self.vocab // self.block) * self.block


def walk(vocab: int, dtype, op: str = "softmax") -> Walk:
    """The walk of `op` over a row of `vocab` elements of `dtype`.

    Eight blocks a step: one rescaling of d serves as many exponentials, and a step is a copy of 16 KB. top-k
    of 16-bit rows holds keys besides, and is a quarter faster with four (H100, 4000 x 25000 bfloat16).
    """
    itemsize = jnp.dtype(dtype).itemsize
    return Walk(vocab, _ACCESS_BYTES // itemsize, 4 if op == "topk" and itemsize == 2 else 8)


def approximate(dtype, op: str = "softmax") -> bool:
    """Whether exp is ex2.approx(x log2(e)), off by |x| eps, and not the one exact to an ulp or two.

    The exact one is hidden behind the memory for float32 softmax, and lost in the rounding of 16-bit results.
    top-k has no time for it (8% at 4000 x 25000 float32); its winners have small |x - m|.
    """
    return op == "topk" or jnp.dtype(dtype).itemsize == 2


def slower(call: Call) -> str | None:
    """Why XLA is faster than the kernels at a call that they support; None if it is not.

    Measured on an H100 against jax.nn.softmax, XLA's own fusion: with a CTA a row, fewer than 128 rows leave
    much of the GPU idle, and rows below 8 KB cost more to start than to compute. Against XLA's softmax and
    stable top-k the kernel won at every shape tried, from 1 x 50000 to 100000 x 128.
    """
    if call.op == "topk":
        return None
    if call.rows < 128:
        return f"slower than xla for fewer than 128 rows, here {call.rows}"
    if call.vocab * jnp.dtype(call.dtype).itemsize < 8192:
        return f"slower than xla for rows shorter than 8 KB, here {call.vocab} {call.dtype}"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take this call on a GPU of this compute capability; None if they do."""
    smem = _SMEM_BYTES.get(capability[0])
    if call.op not in _ROWS_IN_SMEM:
        return f"no kernel for {call.op} yet"
    if smem is None:
        return f"needs compute capability 9.0 or newer, not {capability[0]}.{capability[1]}"
    if call.dtype not in _DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(_DTYPES)}"
    if call.masked:
        return "no kernel with where yet"
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if not call.trailing:
        return "the row is not contiguous: its axes are not the last ones"
    itemsize = jnp.dtype(call.dtype).itemsize
    if call.vocab * itemsize % _ACCESS_BYTES:
        return f"rows of {call.vocab} {call.dtype} do not all start at a multiple of {_ACCESS_BYTES} bytes"
    need = _ROWS_IN_SMEM[call.op] * walk(call.vocab, call.dtype, call.op).padded * itemsize + _RESERVED_BYTES
    if need > smem:
        return f"the row needs {need} bytes of shared memory, a CTA has {smem}"
    if call.k is not None and not 1 <= call.k <= MAX_K:
        return f"k={call.k} is not from 1 to {MAX_K}"
    return None


# Rows that an operation holds in shared memory.
_ROWS_IN_SMEM = {"softmax": 1, "softmax_grad": 2, "topk": 1}
MAX_K = 128
_RESERVED_BYTES = 16 * 1024  # barriers, reduction scratch, candidates
