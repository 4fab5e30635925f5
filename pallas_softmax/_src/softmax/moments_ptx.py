"""Inline PTX for moments of logits in the threads of a CTA: adds logits, and merges threads and CTAs.

`online` and `formulas.located` define the results. Adding a logit takes seven instructions. With
a = log2(e) / temperature:

    m = max(m, x)
    u = max((x - m) a, FAR)     three instructions
    e = 2^u
    d = d + e
    t = t + u e                 one fma

Threads merge in one exchange through shared memory, and so do CTAs. A merge by jnp has an exchange for each of m, d, t
and the position.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_softmax._src.gpu.hardware import WARPS
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Program, Value
from pallas_softmax.online import LOG2_E, Moments

FAR = -1e4  # 2^FAR is 0, and the product of FAR and a sum of exponentials is finite
SCRATCH = 4 * WARPS  # words of shared memory that the merges need


def add_logits(moments: Moments, xs: Sequence[jax.Array], scale=None) -> Moments:
    """Adds logits to the moments of each thread.

    Args:
      moments: arrays (128,), one number for each thread.
      xs: arrays (128,), the new logits of each thread.
      scale: 1 / temperature, or None.
    """
    blocks = dict(zip("mdt", moments)) | {f"x{i}": x for i, x in enumerate(xs)}
    results = {"new_m": "f32", "new_d": "f32", "new_t": "f32"}
    return Moments(*insert_ptx(add_program(len(xs)), {}, _scalars(scale), blocks, results))


def merge_threads(moments: Moments, at, scratch, scale=None) -> tuple[Moments, Any]:
    """Returns the moments of a CTA, and the smallest `at` of the threads that have the largest m, as scalars.

    Args:
      moments: arrays (128,), one number for each thread.
      at: a float32 array (128,).
      scratch: a reference to SCRATCH float32 in shared memory. Nothing else may use it.
      scale: 1 / temperature, or None.
    """
    blocks = dict(zip(("m", "d", "t", "at"), (*moments, at)))
    return _merge(merge_threads_program(), {"scratch": scratch}, blocks, scale)


def merge_ctas(moments: Moments, at, count: int, scratch, scale=None) -> tuple[Moments, Any]:
    """Returns what `merge_threads` returns, for the CTAs of a cluster.

    All loads from other CTAs are complete when a thread has its result.

    Args:
      moments: references to shared memory. The words 0 to 31 of each all hold the number that the CTA contributes.
      at: a reference like these.
      count: number of CTAs of the cluster, up to 32.
      scratch, scale: as for `merge_threads`.
    """
    refs = dict(zip(("m", "d", "t", "at", "scratch"), (*moments, at, scratch)))
    return _merge(merge_ctas_program(count), refs, {}, scale)


def _merge(program: Program, refs: dict, blocks: dict, scale) -> tuple[Moments, Any]:
    results = {"new_m": "f32", "new_d": "f32", "new_t": "f32", "new_at": "f32"}
    *moments, at = insert_ptx(program, refs, _scalars(scale), blocks, results, uniform=True)
    return Moments(*moments), at


def _scalars(scale) -> dict:
    return {"a": LOG2_E if scale is None else scale * LOG2_E}


def add_program(count: int) -> Program:
    """Returns the program of `add_logits`: <m>, <d>, <t>, <a> and `count` logits <x0>, <x1>, ... give <new_m> etc."""
    p = Program()
    m, d, t = p.operands("f32", "m", "d", "t")
    xs = p.operands("f32", *(f"x{i}" for i in range(count)))
    new_m, new_d, new_t = p.operands("f32", "new_m", "new_d", "new_t")
    p.set(new_m, p.reduce("max.NaN", [m, *xs]))
    shift = _shift(p, new_m)
    old_d, old_t = _relative_to(p, shift, m, d, t)
    # Four sums at a time: an addition need not wait for the one before, and is rounded fewer times.
    ds, ts = ([p.var(0.0, "f32") for _ in range(4)] for _ in "dt")
    for i, x in enumerate(xs):
        u = _distance(p, x, shift)
        e = p.exp2(u)
        p.increase(ds[i % 4], e)
        p.set(ts[i % 4], p.multiply_add(u, e, ts[i % 4]))
    p.set(new_d, old_d + p.reduce("add", ds))
    p.set(new_t, p.multiply_add(p.reduce("add", ts), 1 / LOG2_E, old_t))
    return p


def merge_threads_program() -> Program:
    """Returns the program of `merge_threads`: <m>, <d>, <t>, <at>, <a> and <scratch> give <new_m> and so on."""
    p = CtaProgram()
    of_warp = _merged(p, [p.operands("f32", "m", "d", "t", "at")], over_warp=True)
    words = p.of_warps(of_warp, p.operand("scratch", "u32"), 0)
    _set_results(p, _merged(p, list(zip(*words)), over_warp=False))
    return p


def merge_ctas_program(count: int) -> Program:
    """Returns the program of `merge_ctas`: the addresses <m>, <d>, <t>, <at> and <scratch>, and <a>."""
    p = CtaProgram(ctas=count)
    scratch = p.operand("scratch", "u32")
    with p.when(p.warp.equals(0)):
        has_cta, state = p.lane < count, []
        for name, empty in zip(("m", "d", "t", "at"), (float("-inf"), 0.0, 0.0, float("inf"))):
            address = p.at(p.operand(name, "u32"), p.lane, 4)
            (word,) = p.of_cta(address, p.lane, "f32", when=has_cta)
            state.append(p.select(has_cta, word, empty))
        p.store(scratch, *_merged(p, [state], over_warp=True), when=p.first_lane)
    p.barrier()
    _set_results(p, p.load_vector(scratch, "f32", 4))
    return p


def _set_results(p: Program, state: Sequence[Value]) -> None:
    for name, value in zip(("new_m", "new_d", "new_t", "new_at"), state):
        p.set(p.operand(name, "f32"), value)


def _merged(p: CtaProgram, states: Sequence[Sequence[Value]], *, over_warp: bool) -> list[Value]:
    """Returns the union of a thread's states (m, d, t, at), or of the states of all threads of the warp."""
    m = p.reduce("max.NaN", [state[0] for state in states])
    if over_warp:
        (m,) = p.over_warp(["max.NaN"], [m])
    s, parts = _shift(p, m), []
    for of_part, d, t, at in states:
        is_largest = of_part.equals(m) | ~of_part.equals(of_part)  # NaN is the largest
        parts.append((*_relative_to(p, s, of_part, d, t), p.select(is_largest, at, float("inf"))))
    ops = ("add", "add", "min")
    total = [p.reduce(op, values) for op, values in zip(ops, zip(*parts))]
    return [m, *(p.over_warp(ops, total) if over_warp else total)]


def _shift(p: Program, m: Value) -> Value:
    """Returns what `online.shift` returns."""
    return p.select(m.equals(float("-inf")), 0.0, m)


def _distance(p: Program, x: Value, shift: Value) -> Value:
    """Returns u = (x - shift) <a>, at least FAR."""
    return p.op("max.NaN", "f32", (x - shift) * p.operand("a", "f32"), FAR)


def _relative_to(p: Program, shift: Value, m: Value, d: Value, t: Value) -> tuple[Value, Value]:
    """Returns the sums d and t relative to `shift` instead of to m."""
    u = _distance(p, m, shift)
    factor = p.exp2(u)
    return d * factor, p.multiply_add(u * (1 / LOG2_E), d, t) * factor
