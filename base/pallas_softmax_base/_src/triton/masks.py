"""Masks as arguments of Triton kernels."""

import jax

from pallas_softmax_base._src.folding import Mask


def mask_arguments(mask: Mask | None, x: jax.Array) -> tuple[jax.Array, dict]:
    """Returns the array and the constants that tell a kernel which elements count; `language.mask_start` has both.

    Without a mask the array is x, which the kernel does not read as a mask.
    """
    if mask is None:
        return x, {"WHERE": None, "MASK": ()}
    along_row = mask.array.shape[1] > 1
    return mask.array, {"WHERE": "row" if along_row else "one", "MASK": mask.row.terms}
