"""How rows of a draw without filters lie over the GPU: `plan_stream`, a pure function of shape, dtype and device."""

import dataclasses

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, MAX_CLUSTER, WARPGROUP, WARPS
from pallas_softmax._src.sample.plan import FEW_ROWS, SCRATCH

# "Sampling" in benchmarks/results/NOTES.md has times of other numbers.
ELEMENTS = 16  # elements of a lane in a step
AT_ONCE = 2  # entries of a list whose noise a lane computes at once
KEPT = 14  # entries that may stay in the list of a lane while it has more steps
LIST_SIZE = AT_ONCE + KEPT + ELEMENTS  # entries that the list of a lane has room for, with padding
WARPGROUPS = 2  # of a CTA; three CTAs share a multiprocessor
# A few rows take as many CTAs as a GPU runs at once. An H100 has 396 places for CTAs, but clusters leave some of them
# empty. Clusters of these sizes fill at least 336.
CLUSTERED = 336
CLUSTERS = *range(1, 9), 12, 16


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """How rows lie over clusters of CTAs; `stream_ptx` draws the steps of a row."""

    vocab: int
    itemsize: int
    ctas: int  # in the cluster of a row

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return WARPGROUPS * WARPGROUP

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
    """Returns how rows lie over a GPU of this compute capability; None if the kernel for filters is faster."""
    if rows <= FEW_ROWS:
        return None
    steps_of_cta = LANES * ELEMENTS * WARPS * WARPGROUPS  # elements, if each warp has one step
    most = max(1, min(CLUSTERED // rows, -(-vocab // steps_of_cta), MAX_CLUSTER[capability[0]]))
    return StreamPlan(vocab, jnp.dtype(dtype).itemsize, max(c for c in CLUSTERS if c <= most))
