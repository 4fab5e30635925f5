"""Launches a Triton kernel from JAX, by jax_triton.

A launch is one equation of a jaxpr, with our own primitive. Its lowering calls `jax_triton.triton_call`. We do not
trace jax-triton's primitive, for two reasons. jax 0.12 cannot remove the primitive of jax-triton 0.4.1 as dead code.
jax-triton 0.3.1 cannot be imported where JAX has no CUDA.
"""

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.platform import compiled
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.masks import own_arrays

launch_p = Primitive("pallas_softmax_triton")
launch_p.multiple_results = True


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    **constants: Any,
) -> list[jax.Array]:
    """Launches `kernel(*inputs, *outputs, **constants)`, a function decorated with `triton.jit`; returns its outputs.

    `grid` is the number of programs in each dimension, and `warps` the number of warps of a program.
    """
    return launch_p.bind(
        *inputs,
        kernel=kernel,
        out_type=tuple(out_type),
        grid=grid,
        warps=warps,
        constants=tuple(constants.items()),
        capability=target.capability(),
    )


def mask_arguments(mask: Mask | None, x: jax.Array) -> tuple[jax.Array, dict]:
    """Returns the array and the constants of a mask, which `language.mask_start` explains.

    Without a mask the array is x, which the kernel does not read as a mask.
    """
    if mask is None:
        return x, {"WHERE": None, "MASK": ()}
    return mask.array, {"WHERE": "row" if mask.array.shape[1] > 1 else "one", "MASK": mask.row.terms}


@launch_p.def_abstract_eval
def _(*inputs, out_type, **_):
    return [ShapedArray(out.shape, out.dtype) for out in out_type]


def _lower(*inputs, kernel, out_type, grid, warps, constants, capability):
    """Calls jax_triton with the option names of the installed version."""
    triton_call = _import_triton_call()
    if "out_type" in inspect.signature(triton_call).parameters:  # jax-triton 0.4
        options = {"out_type": list(out_type), "backend_options": {"enable_fp_fusion": True}}
    else:
        options = {"out_shape": list(out_type), "enable_fp_fusion": True}
    results = triton_call(
        *own_arrays(inputs),
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        name=kernel.__name__,
        compute_capability=10 * capability[0] + capability[1],
        **options,
        **dict(constants),
    )
    return own_arrays(results)


_environment = threading.Lock()


def _import_triton_call() -> Callable:
    """Imports `jax_triton.triton_call`. The import sets TRITON_CACHE_DIR for the whole process; this restores it."""
    with _environment:
        before = os.environ.get("TRITON_CACHE_DIR")
        try:
            from jax_triton import triton_call  # pyright: ignore[reportMissingImports]
        finally:
            if before is None:
                os.environ.pop("TRITON_CACHE_DIR", None)
            else:
                os.environ["TRITON_CACHE_DIR"] = before
    return triton_call


mlir.register_lowering(launch_p, mlir.lower_fun(_lower, multiple_results=True), platform="cuda")
launch_p.def_impl(compiled(launch_p.bind, "kernel", "out_type", "grid", "warps", "constants", "capability"))
