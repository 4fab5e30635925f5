"""How rows of a draw without filters lie over the GPU: `plan_stream`, a pure function of shape, dtype and device."""

import dataclasses

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, MAX_CLUSTER, WARPGROUP, WARPS
from pallas_softmax._src.sample.plan import SCRATCH

# "Sampling" in benchmarks/results/NOTES.md has times of other numbers.
ELEMENTS = 16  # elements of a lane in a step
AT_ONCE = 2  # entries of its list that a lane enters in the race at once
KEPT = 14  # entries that the list of a lane may carry to its next step
LIST_SIZE = AT_ONCE + KEPT + ELEMENTS  # entries that the list of a lane has room for, with padding
# Three CTAs of two warpgroups share a multiprocessor if a thread has at most 80 registers; it has 78 to 80.
WARPGROUPS = 2
# Elements in one step of every warp of two warpgroups. For rows of up to as many, one warpgroup is enough.
SHORT = LANES * ELEMENTS * WARPS * WARPGROUPS
# How many CTAs an H100 runs at once, in clusters up to the size of the key: clusters leave places empty.
PLACES = {2: 396, 6: 372, 8: 360, 16: 336}
CLUSTERS = *range(1, 9), 12, 16
# The cost of the start, the end and the low first threshold of a CTA, as a number of elements.
OVERHEAD = 2**14
# A few long rows are faster in the kernel for filters, which has more warps for each row.
FEW_LONG_ROWS, LONG_BYTES = 4, 2**18


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """How rows lie over clusters of CTAs; `stream_ptx` draws the steps of a row."""

    vocab: int
    itemsize: int
    ctas: int  # in the cluster of a row

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups of a CTA."""
        return 1 if self.vocab <= SHORT else WARPGROUPS

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.warpgroups * WARPGROUP

    @property
    def vectors(self) -> int:
        """Number of vectors of a lane in a step."""
        return ELEMENTS * self.itemsize // ACCESS_BYTES

    @property
    def lists(self) -> int:
        """The first word of the lists: one list for each lane, of elements and of their indices."""
        return SCRATCH.histogram

    @property
    def words(self) -> int:
        """Number of words of the scratch memory."""
        return self.lists + 2 * LIST_SIZE * self.threads


def plan_stream(rows: int, vocab: int, dtype, capability: tuple[int, int]) -> StreamPlan | None:
    """Returns how rows lie over a GPU of this compute capability; None if the kernel for filters is faster.

    All CTAs take about the same time, so they run in waves: the number of waves and the elements of a CTA decide.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if rows <= FEW_LONG_ROWS and vocab * itemsize > LONG_BYTES:
        return None

    def time(ctas: int) -> float:
        places = next(places for size, places in PLACES.items() if ctas <= size)
        return -(-rows * ctas // places) * (vocab / ctas + OVERHEAD)

    most = max(1, min(-(-vocab // SHORT), MAX_CLUSTER[capability[0]]))
    return StreamPlan(vocab, itemsize, min((c for c in CLUSTERS if c <= most), key=time))
