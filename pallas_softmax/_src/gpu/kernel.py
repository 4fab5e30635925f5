"""`plgpu.kernel` with the settings that all kernels of this package share, and what a CTA works on."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu.interpreter import interpret
from pallas_softmax._src.gpu.layout import Cut
from pallas_softmax._src.masks import own_arrays


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
    operations: tuple[int, int] | None = None,  # flops and exponentials, for XLA; None: 4 and 2 per element
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
            return own_arrays(call(*own_arrays(inputs)))

    return launch


def cta_number(axis: str, size: int) -> Any:
    """Returns the number of this CTA along an axis of this size, other than the first axis of the grid."""
    return lax.axis_index(axis) if size > 1 else jnp.int32(0)


class PartPlace(NamedTuple):
    """A part of a row that this CTA works on, and its place in an `aligned_view`. In softmax, a part is a segment.

    In this example 6 rows have a view of shape (2, 3 * vocab), and each row is cut into two parts. For part 1 of row 4,
    view_row is 1 and first is vocab + start:

        view row 0    | row 0           | row 1           | row 2           |
        view row 1    | row 3           | row 4           | row 5           |
                                        | part 0 | part 1 |
    """

    row: Any  # number of the row in the array (rows, vocab)
    index: Any  # number of the part in the row
    start: Any  # first element of the part, counted from the start of the row
    owned: Any  # number of elements of the part
    view_row: Any  # number of the row of the view that holds the part; None if the view is one-dimensional
    first: Any  # first element of the part, counted from the start of that row, or of a one-dimensional view

    def in_view(self, gmem):
        return gmem if self.view_row is None else gmem.at[self.view_row]


def part_place(
    cut: Cut, view: tuple[int, ...], *, backwards: bool = False, row: Any = None, per_cta: int = 1, number: Any = 0
) -> PartPlace:
    """Returns the place of this CTA's part. The grid has the axis "row" and, if a row has several CTAs, "part".

    `view` is the shape of the arrays, from `aligned_view`. If `backwards`, the CTAs take the rows and their parts in
    reverse order. A CTA that takes several rows passes the number of the `row`. A CTA that has several neighbouring
    parts, `per_cta`, passes the `number` of one of them.
    """
    row = lax.axis_index("row") if row is None else row
    index = cta_number("part", cut.count // per_cta) * per_cta + number
    if backwards:
        rows = math.prod(view) // cut.vocab
        row, index = rows - 1 - row, cut.count - 1 - index
    start = cut.start(index)
    owned = cut.start(index + 1) - start
    joined_rows = view[-1] // cut.vocab
    view_row = row // joined_rows if len(view) > 1 else None
    return PartPlace(row, index, start, owned, view_row, row % joined_rows * cut.vocab + start)


def number_of_row(ref, row) -> Any:
    """Returns the number of a row, given a reference to one number per row, or to one for all; None stays None."""
    return None if ref is None else ref[row if ref.shape[0] > 1 else 0]
