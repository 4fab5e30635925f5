"""How a part of a row arrives in its `Window`: bulk copies, the edges around them, and the mask.

On the GPU the edges and the mask are inline PTX (`ptx/window.py`). The interpreter runs the JAX versions in this file.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.folding import Mask
from pallas_softmax._src.gpu import blocks, sort_keys
from pallas_softmax._src.gpu.ptx import window as window_ptx
from pallas_softmax._src.gpu.staged_row import PartPlace, part_place
from pallas_softmax._src.gpu.window import Window


class Part(NamedTuple):
    """The part of a row that this CTA holds.

    Attributes:
      place: the row, and the place of the part in it.
      x_gmem: one-dimensional device memory. The part starts at element `place.first`.
      body: number of the element in x_gmem where the body starts.
      low, high: position of the first element in the window, and the position after the last one.
      origin: index in the row that position 0 has; it may be negative.
      mask: None, or (reference to the mask, its row).
    """

    place: PartPlace
    x_gmem: Any
    body: Any
    low: Any
    high: Any
    origin: Any
    mask: Any


def part_of(window: Window, view, rows: int, x_gmem, mask: Mask | None, mask_gmem) -> Part:
    """Returns the part of this CTA, for rows in device memory with the shape `view`."""
    place = part_place(window.cut, view, rows=rows)
    before_body = (-place.first) % window.vec if window.head else 0  # elements
    low = window.head - before_body
    low, high, origin = map(jnp.int32, (low, low + place.owned, place.start - low))
    mask_of_part = None if mask is None else (mask_gmem, mask.row(place.row))
    return Part(place, place.in_view(x_gmem), place.first + before_body, low, high, origin, mask_of_part)


def start_copies(window: Window, part: Part, x_smem, arrived) -> None:
    """Starts the bulk copies of the part's body to shared memory. Step i arrives at barrier number i."""
    for i, (position, size) in enumerate(window.copies()):
        plgpu.copy_gmem_to_smem(
            part.x_gmem.at[pl.ds(part.body + (position - window.head), size)],
            x_smem.at[pl.ds(position, size)],
            arrived.at[i],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )


def fill_edges(window: Window, part: Part, x_smem, *, infinite: bool = False, interpret) -> None:
    """Writes the head and the tail of the window: the few elements outside the body, and -inf around them.

    Args:
      infinite: whether a masked element becomes -inf, instead of the float of the lowest key.
    """
    if not interpret:
        window_ptx.fill_edges(window, part, x_smem, infinite)
        return
    for start, end in ((0, window.head), (window.head + window.body, window.size)):
        if start == end:
            continue
        position = jnp.arange(start, end)
        inside = (position >= part.low) & (position < part.high)
        at = jnp.where(inside, part.place.first + position - part.low, 0)
        x = jnp.where(inside, part.x_gmem[...][at], -jnp.inf)
        if part.mask is not None:
            mask_gmem, row = part.mask
            column = jnp.where(inside & (mask_gmem.shape[1] > 1), position + part.origin, 0)
            x = jnp.where(inside & ~mask_gmem[row][column], _of_masked(x_smem.dtype, infinite), x)
        x_smem[start:end] = x.astype(x_smem.dtype)


def mask_of_step(window: Window, part: Part, i, interpret) -> tuple:
    """Returns the mask of each block of step i, (block,) int8 and 0 outside the body; or () without a mask."""
    if part.mask is None:
        return ()
    mask_gmem, mask_row = part.mask

    def load(b):
        position = (i * window.step_blocks + b) * window.block
        return blocks.load_mask(
            mask_gmem,
            mask_row,
            start=position + part.origin,
            held=window.head + window.body - position,
            vec=window.vec,
            skip=window.head - jnp.minimum(position, window.head),
            interpret=interpret,
        )

    return tuple(load(b) for b in range(max(window.step_blocks, window.rest)))


def mask_step(window: Window, x_smem, step, keep, *, infinite: bool = False, interpret) -> None:
    """Writes the float of the lowest key to the masked positions of a step that lie in the body.

    Args:
      keep: the mask, one block of int8 for each block of the step. 0 means masked.
      infinite: whether to write -inf instead.
    """
    if not interpret:
        window_ptx.mask_step(window, x_smem, step, keep, infinite)
        return
    start, size = step * window.step_blocks * window.block, len(keep) * window.block
    position = start + jnp.arange(size)
    body = (position >= window.head) & (position < window.head + window.body)
    x, masked = x_smem[pl.ds(start, size)], body & (jnp.concatenate(keep) == 0)
    x_smem[pl.ds(start, size)] = jnp.where(masked, _of_masked(x.dtype, infinite), x)


def _of_masked(dtype, infinite: bool):
    """Returns the value of a masked element: -inf, or the float of the lowest key."""
    return np.array(-np.inf, dtype) if infinite else sort_keys.lowest(dtype)
