"""Inline PTX for the steps of a search while a row arrives. Thread t handles vector t of every block."""

import math

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, WARPGROUP
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Program
from pallas_softmax._src.gpu.window import Window
from pallas_softmax.online import Normalizer


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
    thread, step_, x_at, keys_at = p.operands("u32", "thread", "step", "x", "group_keys")
    block_bytes, keys_of_step = (
        window.block * element.itemsize,
        window.step_blocks // window.group_blocks * WARPGROUP,
    )
    x_at = p.at(p.at(x_at, step_, window.step_blocks * block_bytes), thread, ACCESS_BYTES)
    keys_at = p.at(p.at(keys_at, step_, 4 * keys_of_step), thread, 4)
    vectors = [element.vector(p, x_at, b * block_bytes) for b in range(blocks)]
    # If some elements are masked, their floats differ from the words.
    floats = [element.floats(p, words, marked=True) for words in vectors] if masked else None
    largest = []
    for i, start in enumerate(range(0, blocks, window.group_blocks)):
        group = slice(start, start + window.group_blocks)
        value, key = element.best(p, sum(vectors[group], []), sum(floats[group], []) if floats else None)
        p.store(keys_at, key, offset=i * 4 * WARPGROUP)
        largest.append(value)
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
