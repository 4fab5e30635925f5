"""What the kernels share: compiler settings, and the walk over a row in shared memory."""

import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_softmax.mosaic_gpu.launch import WARPGROUP, Walk
from pallas_softmax.online import Normalizer, shift


def kernel(
    body, *, grid: dict[str, int], out_type, scratch_types=(), cluster=1, approximate=False, interpret=None
):
    """`plgpu.kernel` with CTAs of one warpgroup.

    Args:
      body: the kernel; its name is that of the kernel in profiles.
      grid: the number of CTAs along each named axis.
      cluster: the CTAs of a cluster; more than one are all those of the last axis.
      approximate: whether exp and log are; see `launch.approximate`.
    """
    if cluster > 1:
        *names, last = grid
        shape = {"cluster": (cluster,), "cluster_names": (last,)}
    else:
        names, shape = [*grid], {}

    def run(*inputs):
        if jax.__version_info__ >= (0, 12):
            moved = [*inputs, *jax.tree.leaves(out_type)]
            elements = max(a.size for a in inputs)
            shape["cost_estimate"] = pl.CostEstimate(
                flops=4 * elements,
                transcendentals=2 * elements,
                bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved),
            )
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch_types,
            grid=tuple(grid[name] for name in names),
            grid_names=tuple(names),
            # the default semantics are Lane in jax 0.10 and Warpgroup from 0.11 on
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=approximate
            ),
            interpret=interpret,
            **shape,
        )(*inputs)

    return run


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


def absorb(normalizer: Normalizer, blocks, scale=None) -> Normalizer:
    """Each lane's normalizer with its elements of `blocks` added: ⊕ with one rescaling of d for all.

    With `scale`, d is the sum of exp((x - m) scale).
    """
    m = normalizer.m
    for x in blocks:
        m = jnp.maximum(m, x)
    s = shift(m)
    return Normalizer(
        m, normalizer.d * _exp(normalizer.m - s, scale) + tree_sum(_exp(x - s, scale) for x in blocks)
    )


def tree_sum(terms):
    """The sum of several blocks, with fewer roundings on the way of each term than one by one."""
    return tree(operator.add, list(terms))


def tree(merge, terms):
    """The terms merged in pairs, and pairs of pairs."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return merge(tree(merge, terms[:half]), tree(merge, terms[half:]))


def across(lane: Normalizer, axis=None, spread=None, scale=None) -> Normalizer:
    """⊕ over the lanes of a block, or along an axis of a tile.

    Args:
      lane: the normalizer of each lane.
      axis: None reduces all lanes to scalars.
      spread: with an axis, how its reduction is broadcast back to the tile.
      scale: as for `absorb`.
    """
    m = jnp.max(lane.m, axis)
    s = shift(m) if spread is None else spread(shift(m))
    return Normalizer(m, jnp.sum(lane.d * _exp(lane.m - s, scale), axis))


def _exp(x, scale):
    return jnp.exp(x if scale is None else x * scale)
