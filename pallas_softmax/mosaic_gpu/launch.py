"""Launch choices: which calls the kernels take, and how a CTA walks over its row. Pure functions."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_softmax.dispatch import Call

WARPGROUP = 128  # threads of a CTA: one warpgroup
EDGE = 128  # elements, one a thread, at each end of a part that starts anywhere
_ACCESS_BYTES = 16  # of a thread, and the alignment of bulk copies between device and shared memory
_DTYPES = ("float32", "bfloat16", "float16")

# Shared memory a CTA may use, by major compute capability, in bytes.
_SMEM_BYTES = {9: 227 * 1024, 10: 227 * 1024, 12: 99 * 1024}
_CLUSTER = {9: 16, 10: 16, 12: 8}  # CTAs of a cluster at most; 16 is more than the portable 8


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


EDGE_WALK = Walk(EDGE, 1, 1)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows in registers: `rows` of them in a CTA, each over `lanes` threads (a power of two up to 32, or 128).

    A thread holds `steps` vectors of `vec` elements of a row, and rows / (128 / lanes) rows.
    """

    rows: int
    lanes: int
    vec: int
    steps: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and elements of a row, with those that stand for nothing."""
        return self.rows, self.lanes * self.vec * self.steps


@dataclasses.dataclass(frozen=True)
class Parts:
    """Rows in shared memory: each over `count` CTAs, a cluster of them or, in two launches, independent ones.

    A part is `length` elements, of which it owns those that the next part does not hold, too. `body` of them
    lie in shared memory, at a multiple of 16 bytes of device memory as of shared memory. Where that leaves
    some out, the first and the last `EDGE` elements are held in registers besides (`edges`).
    """

    vocab: int
    vec: int
    group: int
    count: int
    cluster: bool

    @property
    def edges(self) -> bool:
        """Whether a part may start off a multiple of 16 bytes, or overlap the next one."""
        return bool(self.vocab % (self.count * self.vec))

    @property
    def unit(self) -> int:
        """Parts start at multiples of it."""
        return 1 if self.vocab % self.vec else self.vec

    @property
    def length(self) -> int:
        """Elements of a part."""
        return -(-self.vocab // (self.unit * self.count)) * self.unit

    @property
    def body(self) -> int:
        """Elements of a part that are copied in bulk."""
        return (self.length - EDGE - self.vec) // self.vec * self.vec if self.edges else self.length

    @property
    def walk(self) -> Walk:
        """Over the body."""
        return Walk(self.body, self.vec, self.group)

    def start(self, part):
        """First element of a part; it owns those up to the start of the next."""
        return _start(part, self.vocab, self.unit, self.count)


def _start(part, vocab: int, unit: int, count: int):
    units, left = divmod(vocab // unit, count)
    later = part - (count - left)  # the longer parts come last
    return (part * units + jnp.maximum(later, 0)) * unit


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows of top-k in shared memory: each in `count` parts, a CTA each.

    A part lies in `blocks` blocks, taken in steps of `group`. What can be copied in bulk, `body` elements,
    lies after the first `head` positions, at a multiple of 16 bytes of device memory as of shared memory;
    the few elements before it end at the body, those after it follow it. A thread's elements of `pool`
    blocks are a group, whose largest is found while the row arrives.
    """

    vocab: int
    vec: int
    group: int
    pool: int
    count: int = 1

    @property
    def block(self) -> int:
        """Elements of a block, a vector a thread."""
        return WARPGROUP * self.vec

    @property
    def unit(self) -> int:
        """Parts start at multiples of it."""
        return 1 if self.vocab % self.vec else self.vec

    @property
    def longest(self) -> int:
        """Elements of a part at most."""
        return -(-self.vocab // (self.unit * self.count)) * self.unit

    @property
    def head(self) -> int:
        """Positions before the body."""
        return self.vec if self.unit == 1 else 0

    @property
    def body(self) -> int:
        """Elements that every part can copy in bulk."""
        shortest = self.vocab // (self.unit * self.count) * self.unit
        return max(0, shortest - (self.vec - 1)) // self.vec * self.vec if self.head else shortest

    @property
    def blocks(self) -> int:
        """That hold the head and the longest part."""
        return -(-(self.head + self.longest) // self.block)

    @property
    def full(self) -> int:
        """Steps of `group` blocks that bulk copies fill."""
        return (self.head + self.body) // (self.block * self.group)

    @property
    def rest(self) -> int:
        """Blocks after the full steps: one more step, of up to group + 1."""
        return self.blocks - self.full * self.group

    @property
    def pools(self) -> int:
        """Groups of a thread."""
        return -(-self.blocks // self.pool)

    @property
    def size(self) -> int:
        """Positions."""
        return self.blocks * self.block

    def start(self, part):
        """First element of a part, which ends where the next one starts."""
        return _start(part, self.vocab, self.unit, self.count)

    def copies(self):
        """The bulk copies: position and size of each."""
        step, end = self.block * self.group, self.head + self.body if self.body else 0
        return [(max(at, self.head), min(at + step, end) - max(at, self.head)) for at in range(0, end, step)]


def aligned_view(rows: int, vocab: int, vec: int) -> tuple[int, ...]:
    """A shape of the rows' array in which bulk copies may start at a row's aligned element.

    Rows that do not all start at 16 bytes are taken `vec` together, or all, in one dimension.
    """
    together = vec // math.gcd(vocab, vec)
    return (rows // together, together * vocab) if rows % together == 0 else (rows * vocab,)


def plan(op: str, rows: int, vocab: int, dtype, capability: tuple[int, int]) -> Tile | Parts:
    """How the rows of a softmax operation lie over the GPU. Rests on benchmarks/results/launch."""
    itemsize, arrays = jnp.dtype(dtype).itemsize, _ARRAYS[op]
    few = rows <= 16
    vec = _ACCESS_BYTES // itemsize
    if vocab * arrays <= (5_120 if vocab % vec else 10_240 if few else _TILE_ELEMENTS):
        return _tile(vocab, itemsize)
    most = 6_400 if few else 19_000 if itemsize == 2 else 13_000 if rows < 2_000 else 26_000
    smem = _SMEM_BYTES[capability[0]] - _RESERVED_BYTES

    def parts(count, cluster=True):
        return Parts(vocab, vec, 4, count, cluster)

    def fits(choice):
        return choice.walk.padded * itemsize * arrays <= smem

    count = 1
    while count < _CLUSTER[capability[0]] and (vocab > count * most or not fits(parts(count))):
        count *= 2
    if fits(parts(count)) and not (few and parts(count).length > 26_000):
        return parts(count)
    count = _SPLIT
    while not fits(parts(count, cluster=False)):
        count += _SPLIT
    return parts(count, cluster=False)


def _tile(vocab: int, itemsize: int, warp: float = 2_048) -> Tile:
    """Short rows: a thread has at least 8 elements, of several rows where they are very short.

    Rows of up to `warp` bytes have a warp each, or a part of one; longer ones the CTA.
    """
    vec = math.gcd(vocab, _ACCESS_BYTES // itemsize)
    vectors = -(-vocab // vec)
    lanes = 2
    while lanes < min(vectors, 32):
        lanes *= 2
    if vocab * itemsize > warp:
        lanes = WARPGROUP
    steps = -(-vectors // lanes)
    return Tile(max(1, 8 // (vec * steps)) * (WARPGROUP // lanes), lanes, vec, steps)


# Arrays of rows that an operation reads.
_ARRAYS = {"softmax": 1, "log_softmax": 1, "logsumexp": 1, "softmax_grad": 2, "log_softmax_grad": 2}
_TILE_ELEMENTS = 12_288  # of a row's arrays: what the registers of a CTA hold in float32
_LONE_ROW = 65_536
_SPLIT = 256  # parts of a row beyond any cluster, or a multiple of it
_RESERVED_BYTES = 4 * 1024  # barriers, reduction scratch


def approximate(dtype, op: str = "softmax") -> bool:
    """Whether exp is ex2.approx(x log2(e)), off by |x| eps, and not the one exact to an ulp or two.

    The exact one is hidden behind the memory for float32 softmax, and lost in the rounding of 16-bit results.
    top-k has no time for it (8% at 4000 x 25000 float32); its winners have small |x - m|.
    """
    return op == "topk" or jnp.dtype(dtype).itemsize == 2


def slower(call: Call) -> str | None:
    """Why XLA is faster than the kernels at a call that they support; None if it is not.

    The kernels are at least as fast at nearly every shape measured (benchmarks/results/launch, figure2) but for
    the backward and thousands of winners of one very long row.
    """
    if call.op == "topk" and call.rows == 1 and call.vocab > _LONE_ROW and (call.k or 0) > 1_024:
        if call.dtype == "float32":
            return f"slower than xla for more than 1024 of a single float32 row of more than {_LONE_ROW}"
    if call.op.endswith("_grad") and call.rows == 1 and call.vocab > _LONE_ROW:
        return f"slower than xla for the backward of a single row of more than {_LONE_ROW}"
    return None


def unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take this call on a GPU of this compute capability; None if they do."""
    if capability[0] not in _SMEM_BYTES:
        return f"needs compute capability 9.0 or newer, not {capability[0]}.{capability[1]}"
    if call.dtype not in _DTYPES:
        return f"no kernel for {call.dtype}, only {', '.join(_DTYPES)}"
    if call.rows == 0 or call.vocab == 0:
        return "the array is empty"
    if call.op in ("topk", "merge"):
        reason = _topk_unsupported(call)
        if reason is not None:
            return reason
    vec = _ACCESS_BYTES // jnp.dtype(call.dtype).itemsize
    view = aligned_view(call.rows, call.vocab, vec)
    if view[-1] >= 2**31:
        what = (
            "a row" if call.vocab >= 2**31 else f"rows of which neither V nor number is a multiple of {vec}"
        )
        return f"{what}, {call.rows} x {call.vocab} {call.dtype}, of 2^31 elements or more"
    return None


def _topk_unsupported(call: Call) -> str | None:
    if not call.trailing:
        return "the row is not contiguous: its axes are not the last ones"
    if call.k is None or not 1 <= call.k <= MAX_K:
        return f"k={call.k} is not from 1 to {MAX_K}"
    if call.op == "merge" and call.vocab > merged(call.k) * call.k:
        return (
            f"{call.vocab // call.k} lists of {call.k} are more than the {merged(call.k)} that a CTA merges"
        )
    return None


MAX_K = 2048


def topk_plan(rows: int, vocab: int, k: int, dtype, capability: tuple[int, int]) -> Tile | Window:
    """How the rows of top-k lie over the GPU. Rests on measurements of an H100."""
    itemsize = jnp.dtype(dtype).itemsize
    vec = _ACCESS_BYTES // itemsize
    smem = _SMEM_BYTES[capability[0]] - _RESERVED_BYTES
    tile, row = _tile(vocab, itemsize, warp=math.inf), vocab * itemsize
    most = 1_024 // itemsize if row <= 2_048 else 160 if row <= 4_096 else 64
    if k * tile.steps * tile.vec <= most:  # its time is that product
        return tile

    def window(count):
        """With at least twice as many groups as winners, if there are so many elements."""
        pool = group = 32 // vec
        plan = Window(vocab, vec, group, pool, count)
        while pool > 1 and plan.pools * WARPGROUP < 2 * k:
            pool //= 2
            plan = Window(vocab, vec, group, pool, count)
        return plan

    def fits(plan, ctas):
        """As many CTAs in a multiprocessor."""
        return plan.size * itemsize + selection_bytes(plan, k) <= smem // ctas

    whole, part = (66_000, 66_000) if itemsize == 2 else (108_000, 88_000)  # bytes
    count = 1
    if rows <= 128 and vocab > 24_000 and k <= 256:  # merging takes longer, the more winners there are
        count = min(-(-vocab // 8_192), max(8, 512 // k), 16)
    elif k <= 256 and vocab * itemsize > whole:
        count = -(-vocab * itemsize // part)
    while not fits(window(count), 1 if k > 256 else 2):
        count += 1
    return window(count)


def winners(tile: Tile, k: int) -> Tile:
    """The tile of the k best of each row of a tile, over the same lanes."""
    return Tile(tile.rows, tile.lanes, 1, -(-k // tile.lanes))


def power_of_two(least: int, start: int) -> int:
    """The first of start, 2 start, 4 start, ... that is not below `least`."""
    while start < least:
        start *= 2
    return start


def capacity(k: int) -> int:
    """Candidates that a list has room for: a power of two."""
    return power_of_two(2 * k, 256)


def merged(k: int) -> int:
    """Lists of k winners that a CTA merges into one."""
    return max(2, min(WARPGROUP, 4096 // k))


def padded(k: int) -> int:
    """Winners, in whole blocks of a vector of one element."""
    return -(-k // WARPGROUP) * WARPGROUP


def group_words(plan: Window, k: int) -> int:
    """Of shared memory for the groups' maxima, and later for the winners."""
    return max(plan.pools * WARPGROUP, 2 * padded(k))


def selection_bytes(plan: Window, k: int) -> int:
    """Of shared memory that top-k takes beside the row."""
    return 4 * group_words(plan, k) + 12 * capacity(k)
