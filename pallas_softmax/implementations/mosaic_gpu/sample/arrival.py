"""The arrival of a part of a row of `sample`: its largest element, and -inf where it is masked."""

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import Elements
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, Code
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window


def absorb_step(window: Window, x_smem, step, blocks: int, m, *, interpret):
    """The largest element that each thread (128,) has seen with those of a step of so many blocks; NaN if one is."""
    if interpret:
        x = x_smem[pl.ds(step * window.step_blocks * window.block, blocks * window.block)]
        return jnp.maximum(m, jnp.max(x.reshape(blocks, WARPGROUP, window.vec).astype(jnp.float32), (0, 2)))
    kind, code = Elements(x_smem.dtype), Code()
    (address,) = code.new("b32")
    block_bytes = window.block * kind.itemsize
    code += f"mad.lo.u32 {address}, <step>, {window.step_blocks * block_bytes}, <x>;"
    code += f"mad.lo.u32 {address}, <thread>, 16, {address};"
    vectors = kind.vectors(code, address, [b * block_bytes for b in range(blocks)])
    largest, _ = kind.best(code, sum(vectors, []), None)
    code += f"max.NaN.f32 <new_m>, <m>, {largest};"
    (m,) = insert(code, {"x": x_smem}, {"step": step}, {"m": m}, {"new_m": "f32"})
    return m


def meet(x_smem, *, interpret) -> None:
    """All threads of the CTA meet, after which each sees what the others wrote."""
    if not interpret:
        insert(_barrier(), {"x": x_smem})


def _barrier() -> Code:
    code = Code()
    code += BARRIER
    return code
