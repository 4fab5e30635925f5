"""A product of two matrices, made tile by tile, of which an epilogue makes something while a tile is in registers.

One CTA stays on each multiprocessor and takes tile after tile. Of its three warpgroups the last copies blocks of the
operands to shared memory, the other two multiply them (wgmma), 64 rows of the tile each:

                         b (K, N)
                         │   tile_n    │
                         ├─────────────┤
                  tile_k │   stage 0   │   each stage holds a block of a and one of b, copied by warpgroup 2 (TMA)
                         ├─────────────┤   while the stages before it are multiplied
                         │   stage 1   │
       a (M, K)          ├─────────────┤
       ┌─────┬─────┬──   ┌─────────────┐
       │  0  │  1  │ ..  │ warpgroup 0 │   64 rows: tile_n / 2 float32 registers of each thread
       │     │     │     ├─────────────┤
       │     │     │     │ warpgroup 1 │   64 rows
       └─────┴─────┴──   └─────────────┘

Two barriers for each stage say that a block has `arrived` and that it is `consumed`. Block k of all that a CTA takes,
of whichever tile, goes to stage k % stages, so that the copies for the next tile go on while the epilogue runs:

       warpgroup 2       copy 0 │ copy 1 │ copy 2 │ wait │ copy 3 │ ..
                              └─ arrived[0]          ▲
                                     │               └─ consumed[0] ─┐
       warpgroups 0, 1           wait │ wgmma 0 │ wgmma 1 │ wgmma 2 │ ..   │ epilogue │ wgmma of the next tile

In a cluster of two CTAs the tiles lie one below the other and share their block of b. Each CTA copies its own block of
a, and a half of that of b into both; so a stage is consumed when the multipliers of both have read it.

       CTA 0, tile (i, j)        block of a ─► CTA 0     first half of the block of b   ─► CTAs 0 and 1
       CTA 1, tile (i + 1, j)    block of a ─► CTA 1     second half                    ─► CTAs 0 and 1

Tiles reach beyond the matrices: the copies bring zeros from there, which add nothing to the product, and write nothing
there. Matrices are copied in blocks of 8 rows and 128 bytes, of which their dimensions must be multiples.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.linear.plan import (
    BLOCK_ROWS,
    CTAS,
    MULTIPLIERS,
    SWIZZLE_BYTES,
    TILE_M,
    WARPGROUP_ROWS,
    Tiling,
)

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # Any, since pyright takes its transforms for abstract


class Place(NamedTuple):
    """Where the part of a tile that a warpgroup holds lies in the product.

    Attributes:
      row: its first row.
      column: its first column.
      tile: the number of its column of tiles.
      staging: two buffers (64, columns) in shared memory, for what the epilogue writes; None without `Staging`.
    """

    row: Any
    column: Any
    tile: Any
    staging: Any


def product(
    epilogue: Callable[..., None],
    a: jax.Array,
    b: jax.Array,
    others: tuple,
    out_type: tuple,
    *,
    b_transposed: bool = False,
    staged: Any = None,
    tiling: Tiling,
    name: str,
    interpret: Any = None,
) -> tuple:
    """Calls `epilogue(acc, place, *others, *outputs)` for each part (64, tile_n) of the product a @ b.

    Args:
      epilogue: what is made of a part; `acc` is that in float32, the other arguments are references to device memory.
      a: (M, K).
      b: (K, N), or (N, K) if `b_transposed`.
      others: further inputs of the epilogue; pytrees of arrays.
      out_type: shapes and dtypes of the outputs; pytrees.
      staged: the dtype of what the epilogue writes by `store`, if it does.
      tiling: sizes of tiles and stages.
      name: the kernel's name in profiles.
      interpret: as for `pallas_call`.
    """
    tile_n, tile_k, stages, cluster = tiling.tile_n, tiling.tile_k, tiling.stages, tiling.cluster
    grid = -(-a.shape[0] // tiling.cluster_rows), -(-b.shape[0 if b_transposed else 1] // tile_n)
    steps = -(-a.shape[1] // tile_k)  # blocks along K
    b_block = (tile_n, tile_k) if b_transposed else (tile_k, tile_n)

    def kernel(a_gmem, b_gmem, *others_and_outputs_gmem):
        def run(a_smem, b_smem, staging_smem, arrived, consumed):
            warpgroup = lax.axis_index("warpgroup")

            def over_tiles(take: Callable[[Any, Any, Callable], None]) -> Any:
                """Calls take(i, j, count) for each tile (i, j) of this CTA, and returns the number of blocks of all.

                Before block k of the tile, the CTA has count(k) blocks: of each operand, in the order of the stages.
                """

                @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="cta", init_carry=jnp.int32(0))
                def blocks(loop, carry):
                    i, j = plgpu.planar_snake(loop.index[0], grid, 0, tiling.rows_together)
                    i = i if cluster == 1 else i * cluster + lax.axis_index("cluster")
                    take(i, j, lambda k: carry + k)
                    return carry + steps

                return blocks

            def copy(i, j, count):
                rows, columns = pl.ds(i * TILE_M, TILE_M), pl.ds(j * tile_n, tile_n)

                def step(k, carry):
                    along, stage = pl.ds(k * tile_k, tile_k), lax.rem(count(k), stages)

                    @pl.when(count(k) >= stages)
                    def _():
                        plgpu.barrier_wait(consumed.at[stage])

                    plgpu.copy_gmem_to_smem(a_gmem.at[rows, along], a_smem.at[stage], arrived.at[stage])
                    b_from = b_gmem.at[columns, along] if b_transposed else b_gmem.at[along, columns]
                    shared = {} if cluster == 1 else {"collective_axes": "cluster"}
                    plgpu.copy_gmem_to_smem(b_from, b_smem.at[stage], arrived.at[stage], **shared)
                    return carry

                lax.fori_loop(0, steps, step, None)

            def multiply(i, j, count):
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((WARPGROUP_ROWS, tile_n), jnp.float32))
                def _(acc):
                    def step(k, carry):
                        stage = lax.rem(count(k), stages)
                        plgpu.barrier_wait(arrived.at[stage])
                        own = a_smem.at[stage, pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)]
                        b_all = b_smem.at[stage]
                        plgpu.wgmma(acc, own, b_all.transpose((1, 0)) if b_transposed else b_all)
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)  # this product runs on, the one before has ended
                        def _():
                            plgpu.barrier_arrive(consumed.at[lax.rem(count(k) - 1, stages)])

                        return carry

                    lax.fori_loop(0, steps, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(consumed.at[lax.rem(count(steps - 1), stages)])
                    row = i * TILE_M + warpgroup * WARPGROUP_ROWS
                    staging = None if staging_smem is None else staging_smem.at[warpgroup]
                    epilogue(acc[...], Place(row, j * tile_n, j, staging), *others_and_outputs_gmem)

            @pl.when(warpgroup == MULTIPLIERS)
            def _():
                plgpu.set_max_registers(_COPIER_REGISTERS, action="decrease")
                blocks = over_tiles(copy)
                # No CTA may leave while another one of its cluster has yet to tell it that a stage is consumed.
                for stage in range(stages):
                    pl.when(blocks > stage)(functools.partial(plgpu.barrier_wait, consumed.at[stage]))

            @pl.when(warpgroup < MULTIPLIERS)
            def _():
                plgpu.set_max_registers(_MULTIPLIER_REGISTERS, action="increase")
                over_tiles(multiply)
                if staging_smem is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        barrier: Any = plgpu.Barrier
        if cluster > 1:
            barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
        pl.run_scoped(
            run,
            plgpu.SMEM((stages, TILE_M, tile_k), a.dtype, transforms=_transforms(a.dtype)),
            plgpu.SMEM((stages, *b_block), b.dtype, transforms=_transforms(b.dtype)),
            None if staged is None else _staging(staged),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            barrier(num_arrivals=MULTIPLIERS, num_barriers=stages),
            collective_axes="warpgroup",
        )

    flat_inputs, in_tree = jax.tree.flatten((a, b, *others))
    flat_outputs, out_tree = jax.tree.flatten(out_type)

    def body(*refs):
        kernel(*in_tree.unflatten(refs[: len(flat_inputs)]), *out_tree.unflatten(refs[len(flat_inputs) :]))

    launch = plgpu.kernel(
        body,
        out_type=flat_outputs,
        grid=(CTAS // cluster,),
        grid_names=("cta",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("cluster",) if cluster > 1 else (),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        interpret=interpret,
    )
    return out_tree.unflatten(launch(*flat_inputs))


# Registers of a thread of each warpgroup; a multiprocessor has 512 for a thread of all three together.
_COPIER_REGISTERS = 40
_MULTIPLIER_REGISTERS = 232


def store(place: Place, values, gmem) -> None:
    """Writes a part of the product to its place in `gmem`, in the dtype of that.

    It goes through the buffers of `place` by turns, so that one is copied while the other is filled.
    """
    width = place.staging.shape[-1]
    for i, at in enumerate(range(0, values.shape[1], width)):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has left its buffer
        place.staging[i % 2] = values[:, at : at + width].astype(gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            place.staging.at[i % 2],
            gmem.at[pl.ds(place.row, WARPGROUP_ROWS), pl.ds(place.column + at, width)],
        )


def _staging(dtype) -> Any:
    shape = (MULTIPLIERS, 2, WARPGROUP_ROWS, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=_transforms(dtype))


def _transforms(dtype) -> tuple:
    """How a block lies in shared memory so that wgmma and TMA take it: 8 rows of 128 bytes together, swizzled."""
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((BLOCK_ROWS, columns)), plgpu.SwizzleTransform(SWIZZLE_BYTES)
