"""plgpu.kernel with the settings of this package."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


def gpu_kernel(
    body, *, grid: dict[str, int], out_type, scratch_types=(), cluster=1, approximate=False, interpret=None
):
    """`plgpu.kernel` with CTAs of one warpgroup.

    Args:
      body: the kernel; its name is that of the kernel in profiles.
      grid: the number of CTAs along each named axis.
      cluster: the CTAs of a cluster; more than one are all those of the last axis.
      approximate: whether exp and log are; see `softmax.plan.approximate`.
    """
    if cluster > 1:
        *names, last = grid
        shape = {"cluster": (cluster,), "cluster_names": (last,)}
    else:
        names, shape = [*grid], {}

    def run(*inputs):
        if jax.__version_info__ >= (0, 12):
            moved = [*inputs, *jax.tree.leaves(out_type)]
            elements = max(a.size for a in inputs)
            shape["cost_estimate"] = pl.CostEstimate(
                flops=4 * elements,
                transcendentals=2 * elements,
                bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved),
            )
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch_types,
            grid=tuple(grid[name] for name in names),
            grid_names=tuple(names),
            # the default semantics are Lane in jax 0.10 and Warpgroup from 0.11 on
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=approximate
            ),
            interpret=interpret,
            **shape,
        )(*inputs)

    return run
