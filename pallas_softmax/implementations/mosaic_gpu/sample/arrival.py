"""The arrival of a part of a row of `sample`, step by step: what each thread keeps of what has just come."""

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import ElementText
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import BARRIER, NEG_INF, ZERO, Code
from pallas_softmax.implementations.mosaic_gpu.sample.plan import GROUP_ELEMENTS, Scratch
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window


def absorb_step(window: Window, x_smem, scratch, step, blocks: int, m, scale, *, interpret):
    """Returns the largest element that each thread has seen, with those of this step: (128,), NaN where one is NaN.

    On the GPU it also writes the largest element of each of the thread's groups in the step, and the mass of the
    group relative to that.

    Args:
      window: how the part lies in shared memory.
      x_smem: the elements, of which those of the step have arrived.
      scratch: the words of `plan.Scratch`.
      step: number of the step.
      blocks: number of blocks of the step.
      m: the largest element that each thread had seen before, (128,).
      scale: log2(e) / temperature.
      interpret: as for `pallas_call`.
    """
    if interpret:
        x = x_smem[pl.ds(step * window.step_blocks * window.block, blocks * window.block)]
        return jnp.maximum(m, jnp.max(x.reshape(blocks, WARPGROUP, window.vec).astype(jnp.float32), (0, 2)))
    code = step_text(window, x_smem.dtype, blocks)
    operands = {"x": x_smem, "scratch": scratch}
    (m,) = insert(code, operands, {"step": step, "scale": scale}, {"m": m}, {"new_m": "f32"})
    return m


def step_text(window: Window, dtype, blocks: int) -> Code:
    """Returns the text of `absorb_step`: for each group of the step

    best = the largest element                    NaN if there is one
    mass = the sum of 2^((x - best) * scale)      0 if all elements are -inf
    """
    kind, code, scratch = ElementText(dtype), Code(), Scratch(window)
    address, group_at = code.new("b32", 2)
    group_blocks = GROUP_ELEMENTS // window.vec
    block_bytes = window.block * kind.itemsize
    code += f"mad.lo.u32 {address}, <step>, {window.step_blocks * block_bytes}, <x>;"
    code += f"mad.lo.u32 {address}, <thread>, 16, {address};"
    code += f"mad.lo.u32 {group_at}, <step>, {window.step_blocks // group_blocks * 4 * WARPGROUP}, <scratch>;"
    code += f"mad.lo.u32 {group_at}, <thread>, 4, {group_at};"
    vectors = kind.vectors(code, address, [b * block_bytes for b in range(blocks)])
    new_m = "<m>"
    for i, start in enumerate(range(0, blocks, group_blocks)):
        words = sum(vectors[start : start + group_blocks], [])
        best, _ = kind.best(code, words, None)
        empty = code.one("pred")
        shift, largest = code.new("f32", 2)
        code += f"setp.eq.f32 {empty}, {best}, {NEG_INF}; selp.f32 {shift}, {ZERO}, {best}, {empty};"
        terms = kind.floats(code, words, False)
        for x in terms:
            code += f"sub.f32 {x}, {x}, {shift}; mul.f32 {x}, {x}, <scale>; ex2.approx.ftz.f32 {x}, {x};"
        offset = 4 * WARPGROUP * i
        code += f"st.shared.f32 [{group_at}+{4 * scratch.best + offset}], {best};"
        mass = code.tree("add.f32", "f32", terms)
        code += f"st.shared.f32 [{group_at}+{4 * scratch.masses + offset}], {mass};"
        code += f"max.NaN.f32 {largest}, {new_m}, {best};"
        new_m = largest
    code += f"mov.f32 <new_m>, {new_m};"
    return code


def meet(x_smem, *, interpret) -> None:
    """Lets all threads of the CTA meet, after which each sees what the others wrote."""
    if not interpret:
        insert(_barrier(), {"x": x_smem})


def _barrier() -> Code:
    code = Code()
    code += BARRIER
    return code
