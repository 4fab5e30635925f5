"""One call of `parts_kernel.launch`: its arguments, its launches, and the memory of a CTA."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu.hardware import WARPGROUP, WARPS
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.softmax.formulas import Formula, Label
from pallas_softmax._src.softmax.moments_ptx import SCRATCH_WORDS
from pallas_softmax._src.softmax.plan import Parts


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of `launch`; the fields are its arguments."""

    formula: Formula
    arrays: list[jax.Array]
    mask: Mask | None
    parts: Parts
    scale: jax.Array | None
    label: Label | None
    approximate: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.arrays[0].shape[0]

    @property
    def dtype(self) -> Any:
        """The dtype of the output elements."""
        return self.arrays[-1].dtype

    @property
    def view(self) -> tuple[int, ...]:
        """The shape of the arrays and the result inside the kernels."""
        return aligned_view(self.rows, self.parts.vocab, self.parts.vec)

    @property
    def mask_is_whole(self) -> bool:
        """Whether the mask has the shape of the arrays, so that its bodies are aligned to vec bytes.

        An aligned vector of the mask is a single load, and nothing waits for it until its step is reduced. Other masks
        need two words, and shifting these together waits for both loads.
        """
        return self.mask is not None and self.mask.array.shape == self.arrays[0].shape

    @property
    def clustered(self) -> bool:
        """Whether the CTAs of a row form a cluster and merge their reductions in the kernel."""
        return self.parts.cluster and self.parts.count > 1

    @property
    def teams(self) -> int:
        """Number of groups of CTAs. A group has one CTA per part of a row, and takes one row or several in turns."""
        return self.parts.teams or self.rows

    def launch(
        self, kernel, name: str, out_type: list[jax.ShapeDtypeStruct], reductions=None
    ) -> list[jax.Array]:
        """Launches kernel(job, refs) on all rows, and returns its results.

        `reductions` has the reductions of the parts, arrays (rows, parts), if a launch before made them.
        """
        parts, count = self.parts, self.parts.count
        scratch: dict[str, Any] = {
            "x_smem": [plgpu.SMEM((parts.smem_elements,), a.dtype) for a in self.arrays],
            "arrived": [plgpu.Barrier(num_barriers=parts.barriers)] * len(self.arrays),
        }
        if self.formula.reduction.per_thread:
            words = SCRATCH_WORDS + (WARPS if self.formula.counts else 0)
            scratch["scratch_smem"] = plgpu.SMEM((words,), jnp.float32)
        if self.clustered:
            reduction_smem = plgpu.SMEM((WARPGROUP,), jnp.float32)
            scratch["sent_smem"] = jax.tree.map(lambda _: reduction_smem, self.formula.reduction.empty)
            scratch["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("part",))

        def body(x_gmem, mask_gmem, scale_gmem, label_gmem, reductions_gmem, *out_gmem, **scratch):
            inputs = {"mask_gmem": mask_gmem, "scale_gmem": scale_gmem, "label_gmem": label_gmem}
            inputs["reductions_gmem"] = reductions_gmem
            kernel(self, Refs(x_gmem, out_gmem, **scratch, **inputs))

        inputs = [a.reshape(self.view) for a in self.arrays]
        return gpu_kernel(
            body,
            grid={"row": self.teams, "part": count} if count > 1 else {"row": self.teams},
            cluster=count if self.clustered else 1,
            out_type=out_type,
            scratch_types=scratch,
            name=name,
            approximate=self.approximate,
        )(inputs, None if self.mask is None else self.mask.array, self.scale, self.label, reductions)


class Refs(NamedTuple):
    """The memory and barriers that a CTA uses."""

    x_gmem: list  # the input arrays, in the shape `Job.view`; or (outer, vocab, inner) for columns
    out_gmem: tuple  # the results
    # For each array, the body of the CTA's part, or slots. The memory of the last array also stages the output.
    x_smem: list
    # For each array, one barrier per step, or per slot. It completes when the step has arrived.
    arrived: list
    # In a cluster, the reduction of this CTA's part, which the other CTAs read. Each thread, or column, has a copy.
    sent_smem: Any = None
    cluster_barrier: Any = None  # in a cluster, the barrier that synchronizes its CTAs
    mask_gmem: Any = None  # the mask, (mask rows, vocab or 1), or None
    scale_gmem: Any = None  # `normalizers.encoded_scale`, (rows,) or (1,), or None
    label_gmem: Any = None  # the `Label` of each row, (rows,), or None
    reductions_gmem: Any = None  # the reductions of the parts, as references (rows, parts), or None
    scratch_smem: Any = None  # with one state for each thread, memory to merge the threads
