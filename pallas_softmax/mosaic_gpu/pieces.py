"""What the kernels share: compiler settings, and the walk over a row in shared memory."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax.mosaic_gpu.launch import Walk
from pallas_softmax.online import Normalizer, shift


def kernel(body, *, rows: int, out_type, scratch_types, approximate=False, interpret=None):
    """`plgpu.kernel` with one CTA of one warpgroup for each row, whose index is `lax.axis_index("row")`."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(rows,),
        grid_names=("row",),
        # the default semantics are Lane in jax 0.10 and Warpgroup from 0.11 on
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=approximate
        ),
        interpret=interpret,
    )


def load(ref, layout):
    """The block in `ref`, one-dimensional; the interpreter has no layouts (None)."""
    if layout is None:
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # an argument of jax 0.10 only
    return plgpu.load(ref, *index, layout=layout, optimized=False)


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

    def copy_in(self, gmem, smem, landed):
        """Starts the copies of the row, a step each; `landed[i]` completes when step i has arrived."""
        for i in range(self.walk.steps):
            at = pl.ds(i * self.walk.step, self._size(i))
            plgpu.copy_gmem_to_smem(
                gmem.at[at], smem.at[at], landed.at[i], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
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

    def write(self, values, smem, gmem):
        """Writes the row whose step i is the blocks values(i, size) to `gmem`, through `smem`."""

        def step(i, size, carry):
            for (at, _), block in zip(self.blocks(i, size), values(i, size), strict=True):
                smem[at] = block.astype(smem.dtype)
            plgpu.commit_smem()
            at = pl.ds(i * self.walk.step, size)
            plgpu.copy_smem_to_gmem(smem.at[at], gmem.at[at])
            return carry

        self.sweep(step, ())
        plgpu.wait_smem_to_gmem(0)

    def load(self, smem, i, size, fill):
        """The blocks of step i as float32, with `fill` after the end of the row."""
        for at, held in self.blocks(i, size):
            x = load(smem.at[at], self.layout).astype(jnp.float32)
            yield x if held == self.walk.block else jnp.where(self.positions() < held, x, fill)

    def keys(self, smem, i, size):
        """The blocks of step i as int32 keys, ordered as lax.top_k orders; the lowest after the row's end."""
        for at, held in self.blocks(i, size):
            x = load(smem.at[at], self.layout)
            lowest = lowest_key(x.dtype)
            bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{x.dtype.itemsize * 8}")).astype(jnp.int32)
            key = bits ^ (lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31)) & ~jnp.int32(lowest))
            yield key if held == self.walk.block else jnp.where(self.positions() < held, key, lowest)

    def _size(self, i):
        return self.walk.step if i < self.walk.full else self.walk.left


def lowest_key(dtype) -> int:
    """The least key of the floats of this size: that of the -NaN whose bits are all ones."""
    return -(2 ** (8 * jnp.dtype(dtype).itemsize - 1))


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
    """The sum of several blocks, in pairs of pairs: fewer roundings on the way of each term than one by one."""
    terms = list(terms)
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


def across_lanes(lane: Normalizer, scale=None) -> Normalizer:
    """⊕ over the lanes: the normalizer of the row, as scalars."""
    m = jnp.max(lane.m)
    return Normalizer(m, jnp.sum(lane.d * _exp(lane.m - shift(m), scale)))


def _exp(x, scale):
    return jnp.exp(x if scale is None else x * scale)
