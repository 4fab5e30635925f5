"""The walk over a row in shared memory."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.layout import Walk


def load(ref, layout):
    """The block in `ref`, one-dimensional; the interpreter has no layouts (None)."""
    if layout is None:
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # an argument of jax 0.10 only
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref, block, interpret):
    """Writes a block to device memory."""
    if interpret:
        ref[...] = block
    else:
        if hasattr(plgpu, "store"):  # jax 0.12
            plgpu.store(ref, block, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            ref[...] = block


def per_thread(interpret) -> Any:
    """The layout of a block with an element for each thread."""
    return None if interpret else plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def laid_out(block, interpret):
    """The block in that layout."""
    return block if interpret else plgpu.layout_cast(block, per_thread(interpret))


class Row:
    """The row of this CTA: its walk, and the layout of a block."""

    def __init__(self, walk: Walk, interpret):
        self.walk = walk
        self.layout = None if interpret else plgpu.Layout.WG_STRIDED((walk.block,), vec_size=walk.vec)

    def full(self, value, dtype=jnp.float32):
        """A block of one value."""
        return self._laid_out(jnp.full((self.walk.block,), value, dtype))

    def positions(self):
        """A block of the positions 0 to block - 1."""
        return self._laid_out(lax.broadcasted_iota(jnp.int32, (self.walk.block,), 0))

    def _laid_out(self, value):
        return value if self.layout is None else plgpu.layout_cast(value, self.layout)

    def copy_in(self, gmem, smem, landed, start=0):
        """Starts the copies of the row, a step each; `landed[i]` completes when step i has arrived."""
        for i in range(self.walk.steps):
            at, size = i * self.walk.step, self._size(i)
            plgpu.copy_gmem_to_smem(
                gmem.at[pl.ds(start + at, size)],
                smem.at[pl.ds(at, size)],
                landed.at[i],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def sweep(self, step, state):
        """state = step(i, size, state) for each step i of the row, which holds `size` (static) elements."""
        walk = self.walk
        if walk.full:
            state = lax.fori_loop(0, walk.full, lambda i, state: step(i, walk.step, state), state)
        return step(walk.full, walk.left, state) if walk.left else state

    def blocks(self, i, size):
        """Where the blocks of step i lie, and for each the number of elements it holds (static)."""
        for start in range(0, size, self.walk.block):
            yield pl.ds(i * self.walk.step + start, self.walk.block), min(self.walk.block, size - start)

    def write(self, values, smem, gmem, start=0):
        """Writes the row whose step i is the blocks values(i, size) to `gmem`, through `smem`."""

        def step(i, size, carry):
            for (at, _), block in zip(self.blocks(i, size), values(i, size), strict=True):
                smem[at] = block.astype(smem.dtype)
            plgpu.commit_smem()
            at = i * self.walk.step
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(at, size)], gmem.at[pl.ds(start + at, size)])
            return carry

        self.sweep(step, ())
        plgpu.wait_smem_to_gmem(
            0, wait_read_only=True
        )  # shared memory may go, the kernel's end does the rest

    def load(self, smem, i, size, fill):
        """The blocks of step i as float32, with `fill` after the end of the row."""
        for at, held in self.blocks(i, size):
            x = load(smem.at[at], self.layout).astype(jnp.float32)
            yield x if held == self.walk.block else jnp.where(self.positions() < held, x, fill)

    def _size(self, i):
        return self.walk.step if i < self.walk.full else self.walk.left
