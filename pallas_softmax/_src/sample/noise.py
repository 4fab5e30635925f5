"""The noise of `jax.random.categorical`, computed at chosen elements: `jax.random.gumbel` without the whole array.

With threefry keys, the noise of an element depends only on the key and on the element's counter: its 64-bit number in
the flattened array of noise. So four words describe the noise of a whole row:

    words       uint32 (..., 4): the two words of the key, then the high and the low word of the counter of the row's
                first element
    stride      the distance between the counters of neighbours in a row

`race_ptx.gumbel` is the same function in PTX. For other generators, modes and dtypes, `gumbel_array` returns the noise
of the whole array.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from pallas_softmax._src.dispatch.mesh_types import vary_together

MODES = ("low", "high", "highest")
_TINY = np.finfo(np.float32).tiny


def has_words(key: jax.Array, shape: tuple, dtype, mode: str) -> bool:
    """Returns whether words can describe the noise of these keys."""
    threefry = str(jax.random.key_impl(key)) == "threefry2x32" and jax.config.jax_threefry_partitionable
    static = all(isinstance(n, int) for n in shape)
    return bool(threefry and static and mode == "low" and jnp.dtype(dtype) == jnp.float32)


def words(key: jax.Array, shape: tuple[int, ...], axis: int) -> list[jax.Array]:
    """Returns the words of each row along an axis: four arrays of the shape of the batch, with an axis of size 1 last.

    `shape` is the shape of the array of noise. With a key for each row, each row has its own array, from counter 0 on.
    """
    batch = shape[:axis] + shape[axis + 1 :]
    data = jnp.broadcast_to(jax.random.key_data(key), (*batch, 2))
    high, low = (jnp.zeros_like(data[..., 0]),) * 2  # with its Explicit mesh axes
    if key.ndim == 0:
        before, after = (math.prod(s) for s in (shape[:axis], shape[axis + 1 :]))
        # arrays (before, after): row (i, j) starts at i * V * after + j
        i, j = (lax.broadcasted_iota(jnp.uint32, (before, after), dimension) for dimension in (0, 1))
        start = _counter(_counter((0, 0), i, shape[axis] * after), j, 1)
        high, low = (a.reshape(batch) for a in start)
    return [a[..., None] for a in (data[..., 0], data[..., 1], high, low)]


def stride(key: jax.Array, shape: tuple[int, ...], axis: int) -> int:
    return math.prod(shape[axis + 1 :]) if key.ndim == 0 else 1


def gumbel_at(words: jax.Array, index: jax.Array, stride: int) -> jax.Array:
    """Returns the noise, float32, of the elements with these indices in their rows (..., n); words are (..., 4)."""
    bits = bits_at(words, index, stride)
    ones = lax.shift_right_logical(bits, np.uint32(9)) | np.uint32(0x3F800000)
    uniform = jnp.maximum(lax.bitcast_convert_type(ones, jnp.float32) - 1, _TINY)
    return -jnp.log(-jnp.log(uniform))


def bits_at(words: jax.Array, index: jax.Array, stride: int) -> jax.Array:
    key0, key1, *start = jnp.split(words, 4, -1)
    high, low = _counter(start, index.astype(jnp.uint32), stride)
    # The keys stay one per row: a CPU would store a key for each element.
    arrays = vary_together(key0, key1, *jnp.broadcast_arrays(high, low))
    bits = functools.reduce(lax.bitwise_xor, threefry2x32_p.bind(*arrays))
    return vary_together(bits, arrays)[0]  # the primitive's type does not vary over mesh axes


def advance(words: jax.Array, index, stride: int) -> jax.Array:
    key0, key1, *start = jnp.split(words, 4, -1)
    index = jnp.asarray(index).astype(jnp.uint32)
    return jnp.concatenate([key0, key1, *_counter(start, index, stride)], -1)


def _counter(start, index, stride: int):
    """Returns both words of start + index * stride, where start is two words."""
    stride_high, stride_low = (np.uint32(word) for word in divmod(stride, 2**32))
    product = index * stride_low
    low = start[1] + product
    high = start[0] + index * stride_high + _high_of_product(index, stride_low)
    return high + (low < product).astype(jnp.uint32), low


def _high_of_product(a, b: np.uint32):
    """Returns the high word of a * b. XLA's partitioner cannot divide `lax.mulhi` over a mesh."""
    if b == 1:
        return np.uint32(0)
    (a1, a0), (b1, b0) = ((n >> np.uint32(16), n & np.uint32(0xFFFF)) for n in (a, b))
    middle = a1 * b0 + (a0 * b0 >> np.uint32(16))
    low_middle = (middle & np.uint32(0xFFFF)) + a0 * b1
    return a1 * b1 + (middle >> np.uint32(16)) + (low_middle >> np.uint32(16))


def gumbel_array(key: jax.Array, shape: tuple, axis: int, dtype, mode: str | None = None) -> jax.Array:
    """Returns the noise of the whole array, with the axis of a row last."""
    if key.ndim == 0:
        return jnp.moveaxis(jax.random.gumbel(key, shape, dtype, mode), axis, -1)
    of_row = functools.partial(jax.random.gumbel, shape=(shape[axis],), dtype=dtype, mode=mode)
    return functools.reduce(lambda each, _: jax.vmap(each), key.shape, of_row)(key)
