"""How the rows of a draw without filters lie over the GPU: `plan_stream`, a pure function of shape and device."""

import dataclasses

import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, MAX_CLUSTER, WARPGROUP
from pallas_softmax._src.sample.plan import SCRATCH

ELEMENTS = 16  # elements of a lane in a step
AT_ONCE = 2  # entries whose noise a lane computes at once
KEPT = 14  # entries that may stay in a lane's list while it has more steps
ROWS_OF_LIST = AT_ONCE + KEPT + ELEMENTS  # entries that the list of a lane has room for, with padding
WARPGROUPS = 2
CTAS_AT_ONCE = 4 * 132  # CTAs that an H100 runs at once
CTA_OVERHEAD = 8192  # elements that a CTA could draw from in the time that it takes to start and to end


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """How rows lie over clusters of CTAs."""

    vocab: int
    itemsize: int
    ctas: int
    warpgroups: int

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
        """The first word of the lists."""
        return SCRATCH.histogram

    @property
    def words(self) -> int:
        """Number of words of shared memory."""
        return self.lists + 2 * ROWS_OF_LIST * self.threads


def plan_stream(rows: int, vocab: int, dtype, capability: tuple[int, int]) -> StreamPlan:
    """Returns how the rows of a draw without filters lie over a GPU of this compute capability."""
    itemsize = jnp.dtype(dtype).itemsize

    def time(ctas: int) -> float:
        return -(-rows * ctas // CTAS_AT_ONCE) * (vocab / ctas + CTA_OVERHEAD)

    counts = [1, 2, 4, 8, 16]
    ctas = min((c for c in counts if c <= MAX_CLUSTER[capability[0]]), key=time)
    return StreamPlan(vocab, itemsize, ctas, WARPGROUPS)
