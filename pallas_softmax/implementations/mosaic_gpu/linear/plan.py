"""Sizes of the tiles in which the kernels of a projection multiply matrices: a pure function of the number of rows."""

import dataclasses

CTAS = (
    132  # as many as an H100 or H200 has multiprocessors; where there are fewer, the rest wait for their turn
)
MULTIPLIERS = 2  # warpgroups of a CTA that multiply
WARPGROUP_ROWS = 64  # rows of a tile that each of them multiplies: those of one wgmma
TILE_M = MULTIPLIERS * WARPGROUP_ROWS  # rows of a tile
TILE_N = 256  # columns of a tile: with 64 rows, half of the registers of a warpgroup

SWIZZLE_BYTES = 128  # of each row of a block in shared memory
BLOCK_ROWS = 8  # arrays are copied in blocks of so many rows,
BLOCK_COLUMNS = 64  # and of so many columns of 16 bits, SWIZZLE_BYTES


# The tiling was chosen on an H100 80GB HBM3 (jax 0.11.2, 2026-11-22) by the statistics of (8192, 4096) @
# (4096, 128256) bfloat16, in ms: cuBLAS alone 10.48; clusters of 2 with 3 stages 10.46, with 4 stages 10.69; no
# clusters 11.51. Clusters that take 4, 8 or 16 rows of tiles together: 11.09, 11.00 and 10.99, of a run in which
# cuBLAS took 10.61.


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
      cluster: CTAs that take tiles of the same columns, one below the other, and get their block of w by one copy.
      rows_together: rows of tiles (of clusters) that are taken together, column by column, so that L2 holds them.
      stages: blocks of x and w that are in shared memory at a time.
      tile_n: columns of a tile.
      tile_k: columns of a block of x, rows of one of w.
    """

    cluster: int
    rows_together: int
    stages: int
    tile_n: int = TILE_N
    tile_k: int = BLOCK_COLUMNS

    @property
    def cluster_rows(self) -> int:
        """Number of rows that the tiles of a cluster have together."""
        return self.cluster * TILE_M


def plan_projection(rows: int) -> Tiling:
    """The tiling for so many rows of x."""
    if rows <= TILE_M:  # one row of tiles: w is read once, and as much of it as fits should be on its way
        return Tiling(cluster=1, rows_together=1, stages=4)
    return Tiling(cluster=2, rows_together=8, stages=3)
