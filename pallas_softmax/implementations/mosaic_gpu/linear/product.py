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

Tiles reach beyond the matrices: the copies bring zeros from there, which add nothing to the product, and write nothing
there. Matrices are copied in blocks of 8 rows and 128 bytes, of which their dimensions must be multiples.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.linear.plan import (
    CTAS,
    MULTIPLIERS,
    SWIZZLE_BYTES,
    TILE_M,
    WARPGROUP_ROWS,
    Tiling,
)


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
    a_transposed: bool = False,
    b_transposed: bool = False,
    into: tuple | None = None,
    wanted: jax.Array | None = None,
    staged: Any = None,
    tiling: Tiling,
    name: str,
    interpret: Any = None,
) -> tuple:
    """Calls `epilogue(acc, place, *others, *outputs)` for each part (64, tile_n) of the product a @ b.

    Args:
      epilogue: what is made of a part; `acc` is that in float32, the other arguments are references to device memory.
      a: (M, K), or (K, M) if `a_transposed`.
      b: (K, N), or (N, K) if `b_transposed`.
      others: further inputs of the epilogue; pytrees of arrays.
      out_type: shapes and dtypes of the outputs; pytrees.
      into: arrays that are changed in place, and are the outputs; None makes new ones.
      wanted: int32 (1,), whether to do anything at all, with `into`; None is yes.
      staged: the dtype of what the epilogue writes by `store`, if it does.
      tiling: sizes of tiles and stages.
      name: the kernel's name in profiles.
      interpret: as for `pallas_call`.
    """
    m, depth = a.shape[::-1] if a_transposed else a.shape
    grid = -(-m // TILE_M), -(-b.shape[0 if b_transposed else 1] // tiling.tile_n)

    def block(size: int, along: int) -> plgpu.BlockSpec:
        """The blocks of an operand along K, which is its dimension `along`."""
        shape = (size, tiling.tile_k) if along else (tiling.tile_k, size)
        return plgpu.BlockSpec(
            shape, (lambda k: (0, k)) if along else (lambda k: (k, 0)), transforms=_transforms(a.dtype)
        )

    def pipeline(multiply, context):
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(-(-depth // tiling.tile_k),),
            in_specs=[block(TILE_M, 0 if a_transposed else 1), block(tiling.tile_n, 1 if b_transposed else 0)],
            max_concurrent_steps=tiling.stages,
            memory_registers=_COPIER_REGISTERS,
            num_compute_wgs=MULTIPLIERS,
            wg_axis="warpgroup",
            compute_context=context,
        )

    def kernel(a_gmem, b_gmem, wanted_gmem, *others_and_outputs_gmem):
        def unused(*_):
            pass

        def all_tiles(blocks, staging_smem):
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="cta")
            def _(loop):
                i, j = plgpu.planar_snake(loop.index[0], grid, 0, tiling.rows_together)
                own_rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

                def multiply(_, a_smem, b_smem, acc):
                    a_own = a_smem.at[:, own_rows].transpose((1, 0)) if a_transposed else a_smem.at[own_rows]
                    plgpu.wgmma(acc, a_own, b_smem.transpose((1, 0)) if b_transposed else b_smem)
                    plgpu.wgmma_wait(0)
                    return acc

                def context(multiply_all):
                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((WARPGROUP_ROWS, tiling.tile_n), jnp.float32))
                    def _(acc):
                        multiply_all(acc)
                        row = i * TILE_M + warpgroup * WARPGROUP_ROWS
                        staging = None if staging_smem is None else staging_smem.at[warpgroup]
                        place = Place(row, j * tiling.tile_n, j, staging)
                        epilogue(acc[...], place, *others_and_outputs_gmem)

                rows, columns = pl.ds(i * TILE_M, TILE_M), pl.ds(j * tiling.tile_n, tiling.tile_n)
                pipeline(multiply, context)(
                    a_gmem.at[:, rows] if a_transposed else a_gmem.at[rows],
                    b_gmem.at[columns] if b_transposed else b_gmem.at[:, columns],
                    allocations=blocks,
                )

            if staging_smem is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(True if wanted_gmem is None else wanted_gmem[0] != 0)
        def _():
            pl.run_scoped(
                all_tiles,
                pipeline(unused, unused).get_allocations(a_gmem, b_gmem),
                None if staged is None else _staging(staged),
                collective_axes="warpgroup",
            )

    return _launch(kernel, (a, b, wanted, *others), out_type, into, name, interpret)


_COPIER_REGISTERS = 40  # registers of a thread of the warpgroup that copies; the others share the rest


def store(place: Place, values, gmem, *, add: bool = False) -> None:
    """Writes a part of the product, in the dtype of `gmem`, where it lies there; or adds it to what is there.

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
            reduction_op="add" if add else None,
        )


def _staging(dtype) -> plgpu.SMEM:
    shape = (MULTIPLIERS, 2, WARPGROUP_ROWS, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=_transforms(dtype))


def _transforms(dtype) -> tuple:
    """How a block lies in shared memory so that wgmma and TMA take it: 8 rows of 128 bytes together, swizzled."""
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE_BYTES)


def _launch(kernel: Callable[..., None], inputs: tuple, out_type: tuple, into: tuple | None, name: str, interpret: Any):
    """Runs a kernel on pytrees of inputs, with new outputs or with those of `into`."""
    flat_inputs, in_tree = jax.tree.flatten(inputs)
    flat_outputs, out_tree = jax.tree.flatten(out_type)

    def body(*refs):
        kernel(*in_tree.unflatten(refs[: len(flat_inputs)]), *out_tree.unflatten(refs[len(flat_inputs) :]))

    mesh = {
        "grid": (CTAS,),
        "grid_names": ("cta",),
        "num_threads": MULTIPLIERS + 1,
        "thread_name": "warpgroup",
        "kernel_name": name,
    }
    parameters = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    )
    if into is None:
        launch = plgpu.kernel(
            body, out_type=flat_outputs, compiler_params=parameters, interpret=interpret, **mesh
        )
        return out_tree.unflatten(launch(*flat_inputs))

    def in_place(refs):
        pl.kernel(
            body, out_type=(), mesh=plgpu.Mesh(**mesh), compiler_params=parameters, interpret=interpret, name=name
        )(*refs)

    results = pl.run_state(in_place)((*flat_inputs, *jax.tree.leaves(into)))
    return out_tree.unflatten(results[len(flat_inputs) :])
