"""Tile sizes of the matrix products in the projection kernels: a pure function of the number of rows."""

import dataclasses

# CTAs of a launch, one for each multiprocessor of an H100 or H200. On smaller GPUs, some CTAs wait for others to end.
CTAS = 132
MULTIPLIERS = 2  # warpgroups of a CTA that multiply (one more copies)
WARPGROUP_ROWS = 64  # rows of a tile per multiplier: the rows of one wgmma
TILE_M = MULTIPLIERS * WARPGROUP_ROWS  # rows of a tile
TILE_N = 256  # columns of a tile; 64 x 256 float32 take 128 registers of each thread of a warpgroup

# TMA and wgmma use swizzled shared memory, laid out in atoms. Array dimensions must be multiples of an atom.
SWIZZLE_BYTES = 128  # bytes of each row of an atom
ATOM_ROWS = 8
ATOM_COLUMNS = 64  # 16-bit elements in SWIZZLE_BYTES
TILE_K = ATOM_COLUMNS  # columns of a block of x, rows of a block of w


# "Tiles of the product" in benchmarks/results/NOTES.md has the times behind these numbers.
@dataclasses.dataclass(frozen=True)
class Tiling:
    cluster: int = 2  # CTAs of a cluster. They take tiles one below the other, and share each block of w
    # Rows of tiles (or of clusters of tiles) that are taken together, column by column, so that their blocks of x stay
    # in the L2 cache.
    rows_together: int = 8
    stages: int = 3  # blocks of x and of w that shared memory holds

    @property
    def cluster_rows(self) -> int:
        return self.cluster * TILE_M


def plan_projection(rows: int) -> Tiling:
    if rows <= TILE_M:  # a single row of tiles reads w only once: as many loads as fit should be in flight
        return Tiling(cluster=1, rows_together=1, stages=4)
    return Tiling()


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
