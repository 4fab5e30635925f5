"""Sort keys: signed integers in the order that lax.top_k gives floats, +NaN > +inf > ... > -inf > -NaN.

The key of a positive float is its bits. For a negative float, the key inverts all bits except the sign, because a
larger magnitude is a smaller number. Keys of 16-bit floats have 16 bits but are stored in int32.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def key(x):
    """Returns the int32 sort keys of float32, bfloat16 or float16 numbers."""
    return _flip_negative(lax.bitcast_convert_type(x, _int_dtype(x.dtype)).astype(jnp.int32), x.dtype)


def of_key(key, dtype):
    """Returns the floats of this dtype that have these sort keys, converted to float32."""
    bits = _flip_negative(key, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(bits << 16, jnp.float32)
    return lax.bitcast_convert_type(bits.astype(_int_dtype(dtype)), dtype).astype(jnp.float32)


def key_of(value: float, dtype) -> int:
    """Returns the sort key of a number in this dtype."""
    bits = int(np.array(value, dtype).view(_int_dtype(dtype))[()])
    return bits if bits >= 0 else bits ^ ~lowest_key(dtype)


def lowest_key(dtype) -> int:
    """Returns the lowest sort key of this dtype: the key of the -NaN with all bits set. Masked elements get it."""
    return -(2 ** (8 * jnp.dtype(dtype).itemsize - 1))


def lowest(dtype) -> Any:
    """Returns the float with the lowest key."""
    return np.array(-1, _int_dtype(dtype)).view(dtype)[()]


def _flip_negative(bits, dtype):
    """Inverts all bits of negative numbers except the sign. The function is its own inverse."""
    negative = lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31))
    return bits ^ (negative & ~jnp.int32(lowest_key(dtype)))


def _int_dtype(dtype) -> str:
    return f"int{8 * jnp.dtype(dtype).itemsize}"
