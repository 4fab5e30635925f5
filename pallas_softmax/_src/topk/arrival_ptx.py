"""Inline PTX for the steps of a search while a row arrives. Thread t handles vector t of every block."""

import math

import numpy as np

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax._src.gpu.window import Window
from pallas_softmax._src.topk import candidates
from pallas_softmax.online import Normalizer


def clear(list_smem, counts_smem) -> None:
    """Empties the list of candidates."""
    p = CtaProgram()
    (items,) = list_smem.shape
    size = items * np.dtype(list_smem.dtype).itemsize
    candidates.clear(p, p.operand("candidates", "u32"), size, p.operand("counts", "u32"))
    insert_ptx(p, {"candidates": list_smem, "counts": counts_smem})


def add_step(
    window: Window, x_smem, group_keys, step, blocks: int, lane: Normalizer, scale, masked: bool
) -> Normalizer:
    """Adds a thread's elements of a step to its normalizer. All of them share one rescaling of d:

    new_m = max(m, x...)                                max ignores a NaN; the NaN still makes d NaN
    s     = 0 if new_m is -inf, else new_m              so that -inf - s is -inf, not NaN
    new_d = d * 2^((m - s) scale) + sum of 2^((x - s) scale)

    Also writes the largest key of each of the thread's groups in the step.
    """
    element, p = Elements(x_smem.dtype), Program()
    m, d, scale_of_row, new_m, new_d = p.operands("f32", "m", "d", "scale", "new_m", "new_d")
    x_at, keys_at = _step_addresses(p, window, element)
    vectors = [element.vector(p, x_at, b * window.block * element.itemsize) for b in range(blocks)]
    floats = [element.floats(p, words, marked=True) for words in vectors] if masked else None
    largest = _largest_of_groups(p, window, element, vectors, floats, keys_at)
    p.set(new_m, p.max(p.reduce("max", largest), m))
    s = p.select(new_m.equals(-math.inf), 0.0, new_m)
    terms = []
    for b, words in enumerate(vectors):
        for x in floats[b] if floats else element.floats(p, words, marked=False):
            terms.append(p.exp2((x - s) * scale_of_row))
    rescale = p.exp2((m - s) * scale_of_row)
    p.set(new_d, p.multiply_add(d, rescale, p.reduce("add", terms)))
    new = insert_ptx(
        p,
        {"x": x_smem, "group_keys": group_keys},
        {"step": step, "scale": scale},
        {"m": lane.m, "d": lane.d},
        {"new_m": "f32", "new_d": "f32"},
    )
    return Normalizer(*new)


def _step_addresses(p: Program, window: Window, element: Elements) -> tuple[Value, Value]:
    """Returns the addresses of the thread's first vector and first group key of step <step>."""
    thread, step, x, group_keys = p.operands("u32", "thread", "step", "x", "group_keys")
    step_bytes = window.step_blocks * window.block * element.itemsize
    keys_of_step = window.step_blocks // window.group_blocks * WARPGROUP
    x_at = p.at(p.at(x, step, step_bytes), thread, ACCESS_BYTES)
    return x_at, p.at(p.at(group_keys, step, 4 * keys_of_step), thread, 4)


def _largest_of_groups(
    p: Program,
    window: Window,
    element: Elements,
    vectors: list[list[Value]],
    floats: list[list[Value]] | None,
    keys_at: Value,
) -> list[Value]:
    """Writes the largest key of each of the thread's groups in a step. Returns the groups' largest floats.

    Args:
      vectors: the words of each block.
      floats: the elements of each block as floats, if some are masked and so differ from the words; else None.
      keys_at: the address of the thread's first group key.
    """
    largest = []
    for i, start in enumerate(range(0, len(vectors), window.group_blocks)):
        group = slice(start, start + window.group_blocks)
        words, values = sum(vectors[group], []), sum(floats[group], []) if floats else None
        value, key = element.best(p, words, values)
        p.store(keys_at, key, offset=i * 4 * WARPGROUP)
        largest.append(value)
    return largest
