"""Sizes of the tiles in which the kernels of a projection multiply matrices: a pure function of the number of rows."""

import dataclasses

# CTAs of a launch: the multiprocessors of an H100 or H200. Where there are fewer, the rest wait for their turn.
CTAS = 132
MULTIPLIERS = 2  # warpgroups of a CTA that multiply
WARPGROUP_ROWS = 64  # rows of a tile that each of them multiplies: those of one wgmma
TILE_M = MULTIPLIERS * WARPGROUP_ROWS  # rows of a tile
TILE_N = 256  # columns of a tile: its 64 x 256 float32 are 128 registers of each thread of a warpgroup

# What TMA copies and wgmma reads is swizzled in atoms, of which the dimensions of arrays must be multiples.
SWIZZLE_BYTES = 128  # of each row of an atom
ATOM_ROWS = 8
ATOM_COLUMNS = 64  # SWIZZLE_BYTES of 16 bits each
TILE_K = ATOM_COLUMNS  # columns of a block of x, rows of one of w

# Chosen on an H100 80GB HBM3 (jax 0.11.2, 2026-11-22) by the statistics of (8192, 4096) @ (4096, 128256) bfloat16:
#
#     cuBLAS, the product alone                      10.48 ms
#     clusters of 2 CTAs, 3 stages, 8 rows together  10.46
#     the same with 4 stages                         10.69
#     no clusters                                    11.51
#
# and in another run, in which cuBLAS took 10.61: 4, 8 or 16 rows together 11.09, 11.00 and 10.99.
CLUSTER = 2
STAGES = 3
ROWS_TOGETHER = 8


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
      cluster: CTAs that take tiles of the same columns, one below the other, and get their block of w by one copy.
      rows_together: rows of tiles (of clusters) that are taken together, column by column, so that L2 holds them.
      stages: blocks of x and w that are in shared memory at a time.
    """

    cluster: int = CLUSTER
    rows_together: int = ROWS_TOGETHER
    stages: int = STAGES

    @property
    def cluster_rows(self) -> int:
        """Number of rows that the tiles of a cluster have together."""
        return self.cluster * TILE_M


def plan_projection(rows: int) -> Tiling:
    """Returns the tiling for so many rows of x."""
    if rows <= TILE_M:  # one row of tiles: w is read once, and as much of it as fits should be on its way
        return Tiling(cluster=1, rows_together=1, stages=4)
    return Tiling()


def rounded_up(number: int, multiple: int) -> int:
    """Returns the least multiple of a number that is not below another number."""
    return -(-number // multiple) * multiple
