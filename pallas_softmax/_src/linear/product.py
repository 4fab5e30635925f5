"""Persistent matrix product kernel with a custom epilogue, which consumes each tile of a @ b in registers.

Each multiprocessor runs one CTA, which takes tile after tile. A CTA has three warpgroups. The last one, the copier,
copies blocks of the operands to shared memory. The other two, the multipliers, multiply them (wgmma). Each multiplier
has 64 rows of the tile:

                         b (K, N)
                         │   TILE_N    │
                         ├─────────────┤
                  TILE_K │   stage 0   │   each stage holds a block of a and a block of b; warpgroup 2 copies them
                         ├─────────────┤   (TMA) while earlier stages are multiplied
                         │   stage 1   │
       a (M, K)          ├─────────────┤
       ┌─────┬─────┬──   ┌─────────────┐
       │  0  │  1  │ ..  │ warpgroup 0 │   64 rows: TILE_N / 2 float32 registers per thread
       │     │     │     ├─────────────┤
       │     │     │     │ warpgroup 1 │   64 rows
       └─────┴─────┴──   └─────────────┘

Each stage has two barriers: `arrived` completes when its blocks have been copied, and `consumed` when they have been
multiplied. Blocks are numbered over all tiles of a CTA, and block k goes to stage k % stages. So the copies for the
next tile go on while the epilogue runs:

       warpgroup 2       copy 0 │ copy 1 │ copy 2 │ wait │ copy 3 │ ..
                              └─ arrived[0]          ▲
                                     │               └─ consumed[0] ─┐
       warpgroups 0, 1           wait │ wgmma 0 │ wgmma 1 │ wgmma 2 │ ..   │ epilogue │ wgmma of the next tile

In a cluster of two CTAs, the tiles lie one below the other and share each block of b. Each CTA copies its own block of
a, and multicasts one half of the block of b to both CTAs. So a stage is consumed once the multipliers of both CTAs have
read it.

       CTA 0, tile (i, j)        block of a ─► CTA 0     first half of the block of b   ─► CTAs 0 and 1
       CTA 1, tile (i + 1, j)    block of a ─► CTA 1     second half                    ─► CTAs 0 and 1

Tiles may extend beyond the matrices. There, loads read zeros, and stores write nothing. Zeros add nothing to a product.
(Of an a with fewer rows than a tile, no zeros are copied: `copied_rows`.)
Matrices are copied in swizzle atoms of 8 rows and 128 bytes, so their dimensions must be multiples of an atom.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.linear.plan import (
    ATOM_COLUMNS,
    ATOM_ROWS,
    CTAS,
    MULTIPLIERS,
    SWIZZLE_BYTES,
    TILE_K,
    TILE_M,
    TILE_N,
    WARPGROUP_ROWS,
    Tiling,
)

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # Any: pyright believes that its transforms are abstract


# Registers per thread. A multiprocessor has 512 for each of 128 threads. One thread of each warpgroup takes 504 in all.
_COPIER_REGISTERS = 40
_MULTIPLIER_REGISTERS = 232


def multiply_tiles(cta: "_TilesOfCta", epilogue: Callable[[Any, "Place"], None], start: Callable | None) -> None:
    """The kernel: the copier copies the blocks of each tile; the multipliers multiply them and call the epilogue.

    `start` is `Overlapped.start` with its arrays.

    `over_tiles` calls its argument for each tile of this CTA.
    """

    @pl.when(cta.warpgroup == MULTIPLIERS)
    def _copier():
        plgpu.set_max_registers(_COPIER_REGISTERS, action="decrease")
        blocks = cta.over_tiles(cta.copy)
        # A CTA must not exit while a peer may still arrive at its `consumed` barriers.
        for stage in range(cta.tiling.stages):  # wait until the last block of each stage is consumed
            pl.when(blocks > stage)(functools.partial(plgpu.barrier_wait, cta.consumed.at[stage]))

    @pl.when(cta.warpgroup < MULTIPLIERS)
    def _multiplier():
        plgpu.set_max_registers(_MULTIPLIER_REGISTERS, action="increase")
        cta.over_tiles(functools.partial(cta.multiply, epilogue, start))
        if cta.staging_smem is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class Place(NamedTuple):
    """Where a warpgroup's part of a tile lies in the product, and the warpgroup's buffers in shared memory."""

    row: Any  # the first row of the part
    column: Any  # the first column
    tile: Any  # the number of the tile along the columns
    staging: Any  # two buffers (64, columns) in shared memory, which `store` uses; None without `staged`
    scratch: Any  # int32 of the shape `Overlapped.scratch`; None without


class Overlapped(NamedTuple):
    """A computation of the multipliers, for the epilogue, while the tensor cores multiply.

    `start(place, *others)` returns step(k, steps), which is called while block k of the part is multiplied.
    """

    start: Callable[..., Callable[[Any, int], None]]
    scratch: tuple[int, ...]  # shape of the numbers that a part keeps for its epilogue


def product(
    epilogue, a, b, others: tuple, out_type: tuple, *, b_transposed: bool, staged, tiling: Tiling, name: str,
    overlapped: Overlapped | None = None,
) -> tuple:  # fmt: skip
    """Calls `epilogue(acc, place, *others, *outputs)` for each part (64, TILE_N) of the product a @ b.

    Parts below the last row of a are left out: their outputs stay undefined.

    Args:
      epilogue: consumes a part. `acc` is the part in float32; `others` and `outputs` are references to device memory.
      a, b: (M, K), and (K, N), or (N, K) if `b_transposed`.
      others, out_type: further inputs of the epilogue; shapes and dtypes of the outputs. Both are pytrees.
      staged: the dtype that the epilogue writes by `store`; None if it does not call `store`.
      tiling, name: the sizes of tiles and stages, and the kernel's name in profiles.
    """
    columns, cluster = b.shape[0 if b_transposed else 1], tiling.cluster
    flat_inputs, in_tree = jax.tree.flatten((a, b, *others))
    flat_outputs, out_tree = jax.tree.flatten(out_type)

    def body(*refs):
        a_gmem, b_gmem, *others_gmem = in_tree.unflatten(refs[: len(flat_inputs)])
        outputs_gmem = out_tree.unflatten(refs[len(flat_inputs) :])

        def run(*memory):
            cta = _TilesOfCta(tiling, b_transposed, lax.axis_index("warpgroup"), a_gmem, b_gmem, *memory)
            start = overlapped and (lambda place, of=overlapped.start: of(place, *others_gmem))
            multiply_tiles(cta, lambda acc, place: epilogue(acc, place, *others_gmem, *outputs_gmem), start)

        scratch = None if overlapped is None else overlapped.scratch
        pl.run_scoped(run, *_memory(a.dtype, b_transposed, staged, scratch, tiling), collective_axes="warpgroup")

    results = gpu_kernel(
        body,
        grid={"cta": CTAS // cluster, "cluster": cluster},
        out_type=flat_outputs,
        name=name,
        cluster=cluster,
        warpgroups=MULTIPLIERS + 1,
        operations=(2 * a.size * columns, a.shape[0] * columns),
    )(*flat_inputs)
    return out_tree.unflatten(results)


def _memory(dtype, b_transposed: bool, staged: Any, scratch: tuple[int, ...] | None, tiling: Tiling) -> tuple:
    """Returns the shared memory and barriers of a CTA, in the order of the attributes of `_TilesOfCta`."""
    stages, b_block = tiling.stages, (TILE_N, TILE_K) if b_transposed else (TILE_K, TILE_N)
    barrier: Any = plgpu.Barrier
    if tiling.cluster > 1:
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))

    def smem(shape, dtype) -> Any:
        atom = plgpu.TilingTransform((ATOM_ROWS, _elements_of_atom_row(dtype)))
        return plgpu.SMEM(shape, dtype, transforms=(atom, plgpu.SwizzleTransform(SWIZZLE_BYTES)))

    staging = staged and smem((MULTIPLIERS, 2, WARPGROUP_ROWS, _elements_of_atom_row(staged)), staged)
    return (
        smem((stages, TILE_M, TILE_K), dtype),
        smem((stages, *b_block), dtype),
        staging,
        scratch and plgpu.SMEM((MULTIPLIERS, *scratch), jnp.int32),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # a block of a, and a block of b
        barrier(num_arrivals=MULTIPLIERS, num_barriers=stages),
    )


def _elements_of_atom_row(dtype) -> int:
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class _TilesOfCta:
    """The work of a CTA, and its memory; the drawings at the top of this file show both."""

    tiling: Tiling
    b_transposed: bool  # whether b is (N, K)
    warpgroup: Any  # the number of this warpgroup. The multipliers come first, then the copier
    a_gmem: Any
    b_gmem: Any
    a_smem: Any  # a block of a for each stage
    b_smem: Any
    staging_smem: Any  # the buffers of `Place.staging`, for each multiplier; None without `staged`
    scratch_smem: Any  # `Place.scratch`, for each multiplier; None without
    arrived: Any  # a barrier for each stage. It completes when both blocks have been copied
    consumed: Any  # the same. It completes when all multipliers of the cluster have read the stage

    @property
    def steps(self) -> int:
        return pl.cdiv(self.a_gmem.shape[1], TILE_K)

    @property
    def copied_rows(self) -> int:
        """The rows of a block of a that are copied. Below them, where a has no rows, shared memory holds anything."""
        return min(TILE_M, self.a_gmem.shape[0])

    def over_tiles(self, take: Callable[[Any, Any, Callable], None]) -> Any:
        """Calls take(i, j, count) for each tile (i, j) of this CTA. Returns the CTA's number of blocks of an operand.

        Block k of the tile is number count(k) among the CTA's blocks.
        """
        cluster, columns = self.tiling.cluster, self.b_gmem.shape[0 if self.b_transposed else 1]
        # Along the rows, a cluster counts as one tile.
        tiles = pl.cdiv(self.a_gmem.shape[0], self.tiling.cluster_rows), pl.cdiv(columns, TILE_N)

        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="cta", init_carry=jnp.int32(0))
        def blocks(loop, carry):
            i, j = plgpu.planar_snake(loop.index[0], tiles, 0, self.tiling.rows_together)
            i = i if cluster == 1 else i * cluster + lax.axis_index("cluster")
            take(i, j, lambda k: carry + k)
            return carry + self.steps

        return blocks

    def copy(self, i, j, count) -> None:
        """Starts the copies of the blocks of tile (i, j). Each waits until its stage is consumed."""
        stages = jnp.int32(self.tiling.stages)  # lax.rem would take an int as int64 under x64
        rows, columns = pl.ds(i * TILE_M, self.copied_rows), pl.ds(j * TILE_N, TILE_N)
        shared = {} if self.tiling.cluster == 1 else {"collective_axes": "cluster"}

        def step(k, carry):
            along, stage = pl.ds(k * TILE_K, TILE_K), lax.rem(count(k), stages)

            @pl.when(count(k) >= stages)
            def _():
                plgpu.barrier_wait(self.consumed.at[stage])

            arrived = self.arrived.at[stage]
            a_block = self.a_smem.at[stage, pl.ds(0, self.copied_rows)]
            plgpu.copy_gmem_to_smem(self.a_gmem.at[rows, along], a_block, arrived)
            b_block = self.b_gmem.at[columns, along] if self.b_transposed else self.b_gmem.at[along, columns]
            plgpu.copy_gmem_to_smem(b_block, self.b_smem.at[stage], arrived, **shared)
            return carry

        lax.fori_loop(0, self.steps, step, None)

    def multiply(self, epilogue: Callable[[Any, Place], None], start: Callable | None, i, j, count) -> None:
        """Multiplies this warpgroup's part of tile (i, j), block by block, and calls the epilogue."""
        stages, steps = jnp.int32(self.tiling.stages), self.steps
        row = i * TILE_M + self.warpgroup * WARPGROUP_ROWS
        buffers = (smem if smem is None else smem.at[self.warpgroup] for smem in (self.staging_smem, self.scratch_smem))
        place = Place(row, j * TILE_N, j, *buffers)
        has_rows = row < self.a_gmem.shape[0]
        overlapped: Any = start and start(place)

        @functools.partial(pl.run_scoped, acc=plgpu.ACC((WARPGROUP_ROWS, TILE_N), jnp.float32))
        def _(acc):
            def step(k, carry):
                stage = lax.rem(count(k), stages)
                plgpu.barrier_wait(self.arrived.at[stage])
                a_block = self.a_smem.at[stage, pl.ds(self.warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                b_block = self.b_smem.at[stage]
                plgpu.wgmma(acc, a_block, b_block.transpose((1, 0)) if self.b_transposed else b_block)
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)  # the previous wgmma has ended; this one is still running
                def _():
                    plgpu.barrier_arrive(self.consumed.at[lax.rem(count(k) - 1, stages)])

                if overlapped is not None:  # this wgmma is still running
                    pl.when(has_rows)(lambda: overlapped(k, steps))
                return carry

            lax.fori_loop(0, steps, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.consumed.at[lax.rem(count(steps - 1), stages)])
            part = acc[...]
            pl.when(has_rows)(lambda: epilogue(part, place))


def store(place: Place, values, gmem) -> None:
    """Writes a part of the product to its place in `gmem`, in the dtype of `gmem`.

    The two buffers of `place` alternate: one is copied while the other is filled. If an output were one atom wide,
    Mosaic GPU (jax 0.11.2) would give TMA no index for the columns: parts of a tile beyond it would overwrite it.
    """
    width = place.staging.shape[-1]
    assert gmem.shape[1] > ATOM_COLUMNS, gmem.shape
    for i, at in enumerate(range(0, values.shape[1], width)):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last one has read its buffer
        place.staging[i % 2] = values[:, at : at + width].astype(gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            place.staging.at[i % 2], gmem.at[pl.ds(place.row, WARPGROUP_ROWS), pl.ds(place.column + at, width)]
        )
