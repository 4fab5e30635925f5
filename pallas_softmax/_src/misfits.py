"""Finds misfits: values that JAX would misread, or reject without naming the argument."""

import jax
import numpy as np
from jax.core import Tracer


def misfit(x, *, any_integer: bool = False) -> tuple[type[Exception], str] | None:
    """Returns None if JAX can take the numbers of `x`; if not, the error to raise.

    The error is a pair: the exception type, and the end of the message "(argument) must be ...". Anything except an
    array or a number is no misfit. `any_integer` accepts integers beyond the range of JAX's integers.
    """
    if isinstance(x, np.ndarray | np.generic):
        dtype = x.dtype
        if isinstance(x, np.ma.MaskedArray):
            return (ValueError, "an array without a mask, got a masked array of numpy.ma; fill it with its filled()")
        # isbuiltin is 0 for another byte order or a structured dtype, 1 for NumPy's own dtypes, 2 for ml_dtypes
        if dtype.isbuiltin == 0 or (dtype.isbuiltin == 1 and dtype.char in "OSUVMmgGT"):
            order = "" if dtype.isnative else " in the byte order of the machine"
            return TypeError, f"of numbers that JAX has{order}, got dtype {dtype}"
    return None if any_integer else _out_of_range(x)


def check_static(function: str, name: str, accepted: str, value) -> None:
    """Raises if the value of a static argument is traced."""
    if type(value).__name__ == "BatchTracer":
        raise TypeError(
            f"{function}: {name} must be {accepted}, the same for all slices of jax.vmap, got a mapped value; "
            "pass it with in_axes=None as a Python value, or close over it"
        )
    if isinstance(value, Tracer):
        raise TypeError(
            f"{function}: {name} must be {accepted}, got a traced value; pass it through "
            f"static_argnames={name!r} of jax.jit, or close over it"
        )


def is_jet(x) -> bool:
    """Returns whether `jax.experimental.jet` traces `x`."""
    return isinstance(x, Tracer) and type(x).__name__ == "JetTracer"


def has_wide_integers(x) -> bool:
    """Returns whether `x` is an array of known 64-bit integers that JAX truncates to 32 bits (no jax_enable_x64)."""
    is_wide = isinstance(x, np.ndarray | np.generic | jax.Array) and x.dtype in (np.int64, np.uint64)
    return is_wide and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype and is_known(x)


def is_known(value) -> bool:
    """Returns whether this process can read all numbers of a parameter, so that they can be checked."""
    if isinstance(value, Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated


def _out_of_range(x) -> tuple[type[Exception], str] | None:
    if isinstance(x, int):
        dtype, ends = np.dtype(np.int64), (x,)
    elif has_wide_integers(x) and x.size:
        dtype, ends = x.dtype, (np.asarray(x).min(), np.asarray(x).max())
    else:
        return None
    info = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
    wanted = f"from {info.min} to {info.max} ({info.dtype})"
    return next(((ValueError, f"{wanted}, got {end}") for end in ends if not info.min <= end <= info.max), None)
