"""Sizes of the tiles in which the kernels of a projection multiply matrices."""

import dataclasses

CTAS = 132  # as many as an H100 or H200 has multiprocessors; where there are fewer, the rest wait for their turn
MULTIPLIERS = 2  # warpgroups of a CTA that multiply
WARPGROUP_ROWS = 64  # rows of a tile that each of them multiplies: those of one wgmma
TILE_M = MULTIPLIERS * WARPGROUP_ROWS  # rows of a tile
SWIZZLE_BYTES = 128  # of each row of a block in shared memory


@dataclasses.dataclass(frozen=True)
class Tiling:
    """x"""
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    rows_together: int = 16
