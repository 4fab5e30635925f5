"""Tiles."""
import dataclasses
@dataclasses.dataclass(frozen=True)
class Tiling:
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    in_flight: int = 0
    rows_together: int = 16
