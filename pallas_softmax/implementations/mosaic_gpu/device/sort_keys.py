"""Integers in the order of lax.top_k."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def lowest_key(dtype) -> int:
    """The least key of the floats of this size: that of the -NaN whose bits are all ones."""
    return -(2 ** (8 * jnp.dtype(dtype).itemsize - 1))


def lowest(dtype) -> Any:
    """The float of the lowest key."""
    return np.array(-1, f"int{8 * jnp.dtype(dtype).itemsize}").view(dtype)[()]


def key_of(value: float, dtype) -> int:
    """The key of a number."""
    bits = int(np.array(value, dtype).view(f"int{8 * jnp.dtype(dtype).itemsize}")[()])
    return bits if bits >= 0 else bits ^ ~lowest_key(dtype)


def key(x):
    """Integers in lax.top_k's order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}")).astype(jnp.int32)
    return _flipped(bits, x.dtype)


def of_key(key, dtype):
    """The floats of these keys, as float32."""
    bits = _flipped(key, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(bits << 16, jnp.float32)
    bits = bits.astype(f"int{8 * jnp.dtype(dtype).itemsize}")
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def _flipped(bits, dtype):
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31)) & ~jnp.int32(lowest_key(dtype)))
