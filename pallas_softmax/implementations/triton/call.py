"""A Triton kernel as a JAX operation, by jax_triton.

The operation is our own: its lowering calls `jax_triton.triton_call`, whose own operation jax 0.12 cannot remove as
dead code (jax-triton 0.4.1), and whose import fails where JAX has no CUDA (0.3.1).
"""

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_softmax import target

launch_p = Primitive("pallas_softmax_triton")
launch_p.multiple_results = True


def call(kernel, inputs: Sequence, out_type: Sequence, grid: tuple[int, ...], warps: int, **constants: Any):
    """The outputs of `kernel(*inputs, *outputs, **constants)`.

    Args:
      kernel: a `triton.jit` function.
      inputs: arrays.
      out_type: what the outputs are like.
      grid: the number of programs in each dimension.
      warps: those of a program.
      **constants: the constexpr arguments.
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


@launch_p.def_abstract_eval
def _(*inputs, out_type, **_):
    return [ShapedArray(out.shape, out.dtype) for out in out_type]


def _lower(*inputs, kernel, out_type, grid, warps, constants, capability):
    triton_call = _triton_call()
    if "out_type" in inspect.signature(triton_call).parameters:  # jax-triton 0.4
        options = {"out_type": list(out_type), "backend_options": {"enable_fp_fusion": True}}
    else:
        options = {"out_shape": list(out_type), "enable_fp_fusion": True}
    return triton_call(
        *inputs,
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        name=kernel.__name__,
        compute_capability=10 * capability[0] + capability[1],
        **options,
        **dict(constants),
    )


_import = threading.Lock()


def _triton_call():
    """jax_triton's; its import changes a variable that triton and its other users read."""
    with _import:
        if "jax_triton" not in sys.modules:
            before = os.environ.get("TRITON_CACHE_DIR")
            try:
                importlib.import_module("jax_triton")
            finally:
                os.environ.pop("TRITON_CACHE_DIR", None)
                if before is not None:
                    os.environ["TRITON_CACHE_DIR"] = before
    return importlib.import_module("jax_triton").triton_call


mlir.register_lowering(launch_p, mlir.lower_fun(_lower, multiple_results=True), platform="cuda")
launch_p.def_impl(
    jax.jit(launch_p.bind, static_argnames=("kernel", "out_type", "grid", "warps", "constants", "capability"))
)
