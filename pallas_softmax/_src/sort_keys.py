"""Sort keys: signed integers in the order that lax.top_k gives floats, +NaN > +inf > ... > +0 > -0 > ... > -NaN.

The key of a positive float is its bits. For a negative float, the key inverts all bits except the sign, because a
larger magnitude is a smaller number. This file is for JAX arrays. `gpu/ptx/elements.py` has sort keys in inline PTX,
and `triton/language.py` in Triton.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# --- In plain JAX: keys of the width of the dtype


def key(x: jax.Array) -> jax.Array:
    """Returns the sort keys of floats; other numbers as signed integers in the same order."""
    if x.dtype == jnp.float8_e8m0fnu:  # it has no sign
        x = lax.bitcast_convert_type(x, jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.floating):
        if jnp.finfo(x.dtype).bits < 8:  # no integers have this width
            x = x.astype(jnp.float16)
        return _flip_negative(lax.bitcast_convert_type(x, _int_dtype(x.dtype)), x.dtype)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        signed = _int_dtype(x.dtype)
        return lax.bitcast_convert_type(x, signed) ^ jnp.iinfo(signed).min
    return x


def wide_key(x: jax.Array) -> jax.Array:
    keys = key(x)
    return keys if keys.dtype.itemsize >= 4 else keys.astype(jnp.int32)


def from_key(key: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the floats of this dtype that have these keys, which are of the width of the dtype or int32."""
    return lax.bitcast_convert_type(_flip_negative(key, dtype).astype(_int_dtype(dtype)), dtype)


def value_key(x: jax.Array) -> jax.Array:
    """Returns integers in the order of float32 or float64 numbers: 0 and -0 are equal, and a NaN is the largest.

    On the CPU, XLA's comparisons of floats take subnormal numbers for 0.
    """
    keys = key(x)
    keys = jnp.where(keys == -1, 0, keys)  # -0 has the key -1
    return jnp.where(jnp.isnan(x), jnp.iinfo(keys.dtype).max, keys)


# For each dtype of integers that kernels take, the dtype of `as_floats`
INTEGERS_AS_FLOATS = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), "bfloat16"),
    **dict.fromkeys(("int32", "uint32"), "float32"),
}


def as_floats(x: jax.Array) -> jax.Array:
    """Returns floats in the order of the integers `x`, also as sort keys. NaNs and subnormal numbers are among them.

    Floats stay as they are.
    """
    if x.dtype.name not in INTEGERS_AS_FLOATS:
        return x
    dtype = INTEGERS_AS_FLOATS[x.dtype.name]
    return from_key(key(x).astype(_int_dtype(dtype)), dtype)


def from_floats(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the numbers of this dtype that `as_floats` turned into `x`; the least one for lower floats."""
    if jnp.dtype(dtype).name not in INTEGERS_AS_FLOATS:
        return x
    keys, narrow = key(x), _int_dtype(dtype)
    if keys.dtype != narrow:
        keys = jnp.maximum(keys, jnp.iinfo(narrow).min)
    signed = keys.astype(narrow)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return signed
    return lax.bitcast_convert_type(signed ^ jnp.iinfo(signed.dtype).min, dtype)


def _flip_negative(bits, dtype):
    """Inverts the bits of negative numbers of a dtype, except the sign. The function is its own inverse.

    The bits may be in int32. A shift and a mask cost a kernel less than a select.
    """
    negative = lax.shift_right_arithmetic(bits, jnp.full_like(bits, 8 * bits.dtype.itemsize - 1))
    return bits ^ (negative & np.array(~lowest_key(dtype), bits.dtype))


# --- In Mosaic GPU kernels: int32 keys, for 16-bit floats as well


def key32(x):
    return _flip_negative(lax.bitcast_convert_type(x, _int_dtype(x.dtype)).astype(jnp.int32), x.dtype)


def from_key32(key, dtype):
    """Returns the floats of this dtype that have these keys, converted to float32."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(_flip_negative(key, dtype) << 16, jnp.float32)
    return from_key(key, dtype).astype(jnp.float32)


def widened_key(key, dtype):
    """Returns the int32 sort keys in float32 of numbers with these keys in `dtype`, more than the least int32.

    A 16-bit NaN becomes another NaN of its sign.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return key
    x, least = from_key32(key, dtype), jnp.iinfo(jnp.int32).min + 1
    return jnp.where(jnp.isnan(x), jnp.where(key < 0, least, jnp.iinfo(jnp.int32).max), key32(x))


# --- Keys of single numbers


def key_of_number(value: float, dtype) -> int:
    bits = int(np.array(value, dtype).view(_int_dtype(dtype))[()])
    return bits if bits >= 0 else bits ^ ~lowest_key(dtype)


def lowest_key(dtype) -> int:
    """Returns the lowest sort key of this dtype: the key of the -NaN with all bits set. Masked elements get it."""
    return -(2 ** (8 * jnp.dtype(dtype).itemsize - 1))


def lowest(dtype) -> Any:
    return np.array(-1, _int_dtype(dtype)).view(dtype)[()]


def _int_dtype(dtype) -> np.dtype:
    return np.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")
