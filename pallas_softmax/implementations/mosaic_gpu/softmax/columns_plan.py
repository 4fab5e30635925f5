"""How the columns of a softmax lie over the GPU."""

import dataclasses

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile


@dataclasses.dataclass(frozen=True)
class Strips:
    """Strips of `width` columns in shared memory, each over a cluster of `count` CTAs, `length` rows each."""

    vocab: int
    width: int
    vec: int
    count: int
    step_rows: int
    slots: int
    clusters: int | None = None

    @property
    def block(self) -> Tile:
        lanes = self.width // self.vec
        return Tile(WARPGROUP // lanes, lanes, self.vec, 1)

    @property
    def steps(self) -> int:
        return -(-self.vocab // (self.count * self.step_rows))


def plan_columns(op, outer, vocab, inner, dtype, capability):
    return None
