"""Exchanges between the devices of a mesh, if each row is spread over them."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.dispatch.mesh_types import is_tracked


def gather(arrays: tuple[jax.Array, ...], mesh_axes: str | tuple[str, ...]) -> list[jax.Array]:
    """Gathers arrays (..., n) over mesh axes, to (..., devices * n) each, by one all-gather of their bits."""
    axes = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    words = []
    for a in arrays:
        bits = lax.bitcast_convert_type(a, jnp.uint32)  # of 64 bits: two words, in a dimension of their own
        words.append(bits.reshape(*a.shape[:-1], a.shape[-1] * (a.dtype.itemsize // 4)))
    to = "invarying" if is_tracked(axes) else "varying"
    gathered = jnp.moveaxis(lax.all_gather(jnp.concatenate(words, -1), axes, to=to), 0, -2)
    ends = [sum(w.shape[-1] for w in words[: i + 1]) for i in range(len(words))]
    out = []
    for a, bits in zip(arrays, jnp.split(gathered, ends[:-1], -1)):
        two_words = () if a.dtype.itemsize == 4 else (a.dtype.itemsize // 4,)
        bits = bits.reshape(*bits.shape[:-2], bits.shape[-2] * a.shape[-1], *two_words)
        out.append(lax.bitcast_convert_type(bits, a.dtype))
    return out
