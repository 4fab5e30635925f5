"""`plgpu.kernel` with the settings that all kernels of this package share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu.interpreter import interpret


def gpu_kernel(
    body: Callable[..., None],
    *,
    grid: dict[str, int],  # number of CTAs by axis; axes with one CTA are left out, except the first
    out_type: Any,  # shape and dtype of the output; or a list or NamedTuple of several, to be returned as such
    scratch_types: Any = (),  # shared memory and barriers, by name
    name: str,  # in profiles
    cluster: int = 1,  # number of CTAs in a cluster: 1, or the size of the grid's last axis
    warpgroups: int | None = None,  # numbered along the axis "warpgroup"; None: one, and no such axis
    approximate: bool = True,  # whether exp and log use the fast instructions; see `softmax.plan.approximate`
    reduction_bytes: int = 2048,  # of shared memory for reductions over the warps of a CTA
    operations: tuple[int, int]
    | None = None,  # and exponentials: their numbers, for XLA; None: 4 and 2 per element
) -> Callable[..., Any]:
    """Returns a function that launches a kernel on its inputs.

    The kernel is called as `body(*inputs, *outputs, **scratch)` with references to device memory in place of arrays. An
    input may also be a pytree of arrays, or None; the body gets the same structure.
    """
    names = [name for i, (name, size) in enumerate(grid.items()) if i == 0 or size > 1]
    optional: dict[str, Any] = {}
    if cluster > 1:
        optional |= {"cluster": (cluster,), "cluster_names": (names.pop(),)}
    if warpgroups:
        optional |= {"num_threads": warpgroups, "thread_name": "warpgroup"}

    def launch(*inputs):
        if jax.__version_info__ >= (0, 12):
            elements = max(a.size for a in jax.tree.leaves(inputs))
            flops, exponentials = operations or (4 * elements, 2 * elements)
            bytes_accessed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((inputs, out_type)))
            optional["cost_estimate"] = pl.CostEstimate(flops, exponentials, bytes_accessed)
        call = plgpu.kernel(
            body,
            kernel_name=name,
            out_type=out_type,
            scratch_types=scratch_types,
            grid=tuple(grid[name] for name in names),
            grid_names=tuple(names),
            # The default depends on the version of jax: Lane in 0.10, Warpgroup from 0.11 on.
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
                approx_math=approximate,
                reduction_scratch_bytes=reduction_bytes,
            ),
            interpret=interpret(),
            **optional,
        )
        with jax.enable_x64(False):  # index arithmetic of 64 bits has no lowering, or would be slower
            return call(*inputs)

    return launch


def cta_number(axis: str, size: int) -> Any:
    """Returns the number of this CTA along an axis of this size, other than the first axis of the grid."""
    return lax.axis_index(axis) if size > 1 else jnp.int32(0)


def number_of_row(ref, row) -> Any:
    """Returns the number of a row, given a reference to one number per row, or to one for all; None stays None."""
    return None if ref is None else ref[row if ref.shape[0] > 1 else 0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _traced(function, interpret, static, *arrays):  # `interpret` only tells calls apart
    return function(*arrays, **dict(static))


def traced_once(function: Callable[..., Any], *arrays, **static) -> Any:
    """Returns function(*arrays, **static), which launches a kernel. JAX traces and lowers equal calls only once."""
    return _traced(function, interpret(), tuple(static.items()), *arrays)
