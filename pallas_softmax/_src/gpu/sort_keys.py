"""Sort keys: signed integers that order floats as lax.top_k does, +NaN > +inf > ... > -inf > -NaN.

A positive float has its own bits for a key. Those of a negative one, the sign aside, are turned round, since more
of them is less. Keys of 16-bit floats are numbers of 16 bits. They are held in int32.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def key(x):
    """Returns the sort keys of float32, bfloat16 or float16 numbers, int32."""
    return _turned(lax.bitcast_convert_type(x, _int_dtype(x.dtype)).astype(jnp.int32), x.dtype)


def of_key(key, dtype):
    """Returns the floats of this dtype with these sort keys, in float32."""
    bits = _turned(key, dtype)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(bits << 16, jnp.float32)
    return lax.bitcast_convert_type(bits.astype(_int_dtype(dtype)), dtype).astype(jnp.float32)


def key_of(value: float, dtype) -> int:
    """Returns the sort key of a number in this dtype."""
    bits = int(np.array(value, dtype).view(_int_dtype(dtype))[()])
    return bits if bits >= 0 else bits ^ ~lowest_key(dtype)


def lowest_key(dtype) -> int:
    """Returns the lowest sort key of this dtype, which masked elements get; the -NaN whose bits are all ones has it."""
    return -(2 ** (8 * jnp.dtype(dtype).itemsize - 1))


def lowest(dtype) -> Any:
    """Returns the float of the lowest key."""
    return np.array(-1, _int_dtype(dtype)).view(dtype)[()]


def _turned(bits, dtype):
    """Returns negative numbers with all bits but the sign inverted, and others as they are; it is its own inverse."""
    negative = lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31))
    return bits ^ (negative & ~jnp.int32(lowest_key(dtype)))


def _int_dtype(dtype) -> str:
    return f"int{8 * jnp.dtype(dtype).itemsize}"
