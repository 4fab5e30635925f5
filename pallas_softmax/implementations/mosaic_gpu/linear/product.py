"""A product of two matrices, made tile by tile, of which an epilogue makes something while a tile is in registers.

One CTA stays on each multiprocessor and takes tile after tile. Of its three warpgroups the last copies blocks of the
operands to shared memory, the other two multiply them (wgmma), 64 rows of the tile each:

                       b (K, N)
                         |  tile_n = 256  |
                         ┌────────────────┐
              tile_k ... │ stage 0        │ ─┐
                         │ stage 1        │  ├ copied by warpgroup 2, some stages ahead (TMA)
     a (M, K)            │ ...            │ ─┘
       ┌────┬────┬───    ┌────────────────┐
       │  0 │  1 │ ...   │ warpgroup 0    │  64 rows, 128 float32 registers a thread
       │    │    │       ├────────────────┤
       │    │    │       │ warpgroup 1    │  64 rows
       └────┴────┴───    └────────────────┘

Tiles and stages reach beyond the matrices: the copies bring zeros from there, which add nothing to the product, and
write nothing there. So any M, N and K will do, as long as rows of the matrices in memory start on 16 bytes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.linear.plan import Tiling

WARPGROUP_ROWS = 64  # rows of a tile that a warpgroup multiplies: those of one wgmma
MULTIPLIERS = 2  # warpgroups of a CTA that multiply
TILE_M = MULTIPLIERS * WARPGROUP_ROWS  # rows of a tile


class Place(NamedTuple):
    """Where the part of a tile that a warpgroup holds lies in the product.

    Attributes:
      row: its first row.
      column: its first column.
      index: the number of its column of tiles.
      staging: two buffers of the warpgroup in shared memory, if the epilogue asked for them, for what it writes.
    """

    row: Any
    column: Any
    index: Any
    staging: Any


class Staging(NamedTuple):
    """The shared memory through which an epilogue writes its tile: `columns` columns of `dtype` at a time."""

    dtype: Any
    columns: int


def product(
    epilogue: Callable[..., None],
    a: jax.Array,
    b: jax.Array,
    others: Sequence[Any],
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    out_type: Any,
    into: jax.Array | None = None,
    staging: Staging | None = None,
    tiling: Tiling = Tiling(),
    name: str,
    interpret: Any = None,
) -> Any:
    """Calls `epilogue(acc, place, *others, *outputs)` for each part (64, tile_n) of the product.

    Args:
      epilogue: what is made of a part; `acc` is that in float32, the other arguments are references to device memory.
      a: (M, K), or if `a_transposed` (K, M).
      b: (K, N), or if `b_transposed` (N, K).
      others: further inputs of the epilogue; an element may be None.
      out_type: shapes and dtypes of the outputs.
      staging: the shared memory that the epilogue needs.
      tiling: sizes of tiles and stages.
      name: the kernel's name in profiles.
      interpret: as for `pallas_call`.
    """
    (m, depth), n = (a.shape[::-1] if a_transposed else a.shape), b.shape[0 if b_transposed else 1]
    tile_m, tile_n, tile_k = TILE_M, tiling.tile_n, tiling.tile_k
    grid = -(-m // tile_m), -(-n // tile_n)
    transforms = _transforms(a.dtype)

    def operand(transposed: bool, tile: int, dim: int) -> plgpu.BlockSpec:
        """The blocks of an operand along K, its dimension `dim`."""
        shape = (tile, tile_k) if dim == 1 else (tile_k, tile)
        index = (lambda k: (0, k)) if dim == 1 else (lambda k: (k, 0))
        return plgpu.BlockSpec(shape, index, transforms=transforms, delay_release=tiling.in_flight)

    def pipeline(multiply, context):
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(-(-depth // tile_k),),
            in_specs=[
                operand(a_transposed, tile_m, 0 if a_transposed else 1),
                operand(b_transposed, tile_n, 1 if b_transposed else 0),
            ],
            max_concurrent_steps=tiling.stages,
            memory_registers=COPIER_REGISTERS,
            num_compute_wgs=MULTIPLIERS,
            wg_axis="warpgroup",
            compute_context=context,
        )

    def body(a_gmem, b_gmem, *refs):
        unused = lambda *_, **__: None
        allocations = pipeline(unused, unused).get_allocations(a_gmem, b_gmem)
        pl.run_scoped(
            functools.partial(tiles, a_gmem, b_gmem, refs),
            allocations,
            None
            if staging is None
            else plgpu.SMEM(
                (MULTIPLIERS, 2, WARPGROUP_ROWS, staging.columns),
                staging.dtype,
                transforms=_transforms(staging.dtype),
            ),
            collective_axes="warpgroup",
        )

    def tiles(a_gmem, b_gmem, refs, allocations, staging_smem):
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="cta")
        def _(loop):
            i, j = plgpu.planar_snake(loop.index[0], grid, 0, tiling.rows_together)
            own = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

            def context(multiply_all):
                @functools.partial(pl.run_scoped, acc=plgpu.ACC((WARPGROUP_ROWS, tile_n), jnp.float32))
                def _(acc):
                    multiply_all(acc)
                    row = i * tile_m + warpgroup * WARPGROUP_ROWS
                    mine = None if staging_smem is None else staging_smem.at[warpgroup]
                    epilogue(acc[...], Place(row, j * tile_n, j, mine), *refs)

            def multiply(_, a_smem, b_smem, acc):
                a_own = a_smem.at[:, own].transpose((1, 0)) if a_transposed else a_smem.at[own]
                b_all = b_smem.transpose((1, 0)) if b_transposed else b_smem
                plgpu.wgmma(acc, a_own, b_all)
                plgpu.wgmma_wait(tiling.in_flight)
                return acc

            rows, columns = pl.ds(i * tile_m, tile_m), pl.ds(j * tile_n, tile_n)
            pipeline(multiply, context)(
                a_gmem.at[:, rows] if a_transposed else a_gmem.at[rows],
                b_gmem.at[columns] if b_transposed else b_gmem.at[:, columns],
                allocations=allocations,
            )

        if staging is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return launch(body, out_type, into, (a, b, *others), name, interpret)


def launch(body, out_type, into, inputs, name, interpret):
    inputs, tree = jax.tree.flatten(tuple(inputs))
    outs, out_tree = jax.tree.flatten(out_type)

    def flat(*refs):
        a, b, *others = tree.unflatten(refs[: len(inputs)])
        results = out_tree.unflatten(refs[len(inputs) :])
        body(a, b, *others, *(results if isinstance(out_type, tuple) and not hasattr(out_type, "_fields") else (results,)))

    mesh = dict(
        grid=(CTAS,),
        grid_names=("cta",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
    )
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)
    if into is None:
        results = plgpu.kernel(flat, out_type=outs, **mesh, compiler_params=params, interpret=interpret)(*inputs)
        return out_tree.unflatten(results)

    def in_place(refs):
        pl.kernel(flat, out_type=(), mesh=plgpu.Mesh(**mesh), compiler_params=params, interpret=interpret, name=name)(*refs)

    *_, result = pl.run_state(in_place)((*inputs, into))
    return result


CTAS = 132  # as many as an H100 or H200 has multiprocessors; with fewer, the rest wait for their turn
COPIER_REGISTERS = 40  # registers of a thread of the warpgroup that copies; the others get the rest


def store(staging, values, gmem, row, column, add: bool = False) -> None:
    """Writes values (64, n) to `gmem` from (row, column) on, through the two buffers of `staging`."""
    width = staging.shape[-1]
    for i, at in enumerate(range(0, values.shape[1], width)):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last one has left its buffer
        staging[i % 2] = values[:, at : at + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            staging.at[i % 2],
            gmem.at[pl.ds(row, WARPGROUP_ROWS), pl.ds(column + at, width)],
            reduction_op="add" if add else None,
        )


def _transforms(dtype) -> tuple:
    """How a block lies in shared memory so that wgmma and TMA take it: 8 rows of 128 bytes together, swizzled."""
    swizzle = 128
    return (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
