"""Inline PTX for the moments (m, d, t) of logits in the threads of a CTA: adds logits, and merges threads and CTAs.

`token_stats` of long rows uses it. `normalizers.Moments` explains the numbers.

A thread adds several logits at once. It takes their maximum first, and rescales its old d and t once. Then each logit x
takes six instructions. Here a = log2(e) / temperature:

    u = max((x - m) a, FAR)     three instructions
    e = 2^u
    d = d + e
    t = t + u e                 a fused multiply-add; t is multiplied by ln(2) at the end

One fma for x a - m a would save an instruction. But m a is rounded, so that the d of a single large logit would not be
exactly 1, and its entropy not exactly 0.

To merge the threads of a CTA, each warp merges its lanes. Then the warps exchange all numbers at once, with one
barrier. `Reduction.combine_lanes` needs barriers for each number: `jnp` reduces one number at a time.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_softmax_base._src.gpu.hardware import WARPS
from pallas_softmax_base._src.gpu.ptx.cta import CtaProgram
from pallas_softmax_base._src.gpu.ptx.inline import insert_ptx
from pallas_softmax_base._src.gpu.ptx.program import Program
from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.normalizers import LOG2_E, Moments

# The least u. 2^FAR is 0 in float32. FAR * 0 is 0, and not NaN like -inf * 0: a logit of -inf adds nothing to t.
FAR = -1e4
_LN_2 = 1 / LOG2_E


class _State(NamedTuple):
    """Moments, and a number that says where the largest logit is. If several states have it, the lowest number wins."""

    m: Value
    d: Value
    t: Value
    place: Value


SCRATCH = len(_State._fields) * WARPS  # float32 words of shared memory that the merges need


def add_logits(moments: Moments, xs: Sequence[jax.Array], scale=None) -> Moments:
    """Adds logits `xs` to the moments of each thread, all arrays (128,), for the CTA's only warpgroup.

    Threads do not exchange anything. `scale` is 1 / temperature, or None.
    """
    blocks = dict(zip(Moments._fields, moments)) | {f"x{i}": x for i, x in enumerate(xs)}
    results = {f"new_{name}": "f32" for name in Moments._fields}
    return Moments(*insert_ptx(add_program(len(xs)), {}, {"a": _factor(scale)}, blocks, results))


def combine_threads(moments: Moments, place, scratch, scale=None) -> tuple[Moments, Any]:
    """Returns the moments of the CTA, and the lowest `place` among threads with the largest m; NaN is the largest.

    The results are scalars. `moments` and `place` are float32 (128,); `place` says where a thread's largest logit is.
    `scratch` refers to SCRATCH float32 in shared memory, aligned to 16 bytes. All threads must synchronize before it is
    used again. `scale` is 1 / temperature, or None.
    """
    blocks = dict(zip(_State._fields, (*moments, place)))
    return _insert(combine_threads_program(), {"scratch": scratch}, blocks, scale)


def combine_ctas(moments: Moments, place, count: int, scratch, scale=None) -> tuple[Moments, Any]:
    """Merges the CTAs of a cluster like `combine_threads` merges threads, and returns the same.

    Afterwards this CTA reads no other CTA: those may exit, or overwrite their words. The cluster has `count` CTAs, at
    most one for each lane. `moments` and `place` refer to float32 (128,) in shared memory. In each CTA, all words of a
    reference hold the CTA's number. Lane i of a warp reads word i, in CTA i.
    """
    refs = dict(zip(_State._fields, (*moments, place))) | {"scratch": scratch}
    return _insert(combine_ctas_program(count), refs, {}, scale)


def _insert(program: Program, refs: dict, blocks: dict, scale) -> tuple[Moments, Any]:
    """Inserts the program of a merge."""
    results = {f"new_{name}": "f32" for name in _State._fields}
    *moments, place = insert_ptx(program, refs, {"a": _factor(scale)}, blocks, results, uniform=True)
    return Moments(*moments), place


def _factor(scale):
    """Returns a = log2(e) / temperature."""
    return LOG2_E if scale is None else scale * LOG2_E


def add_program(count: int) -> Program:
    """Returns the program of `add_logits`.

    It reads <m>, <d>, <t>, <a> and the logits <x0>, <x1>, ..., `count` in all. It writes <new_m>, <new_d> and <new_t>.
    """
    p = Program()
    m, d, t = p.operands("f32", "m", "d", "t")
    xs = p.operands("f32", *(f"x{i}" for i in range(count)))
    new_m, new_d, new_t = p.operands("f32", "new_m", "new_d", "new_t")
    p.set(new_m, p.reduce("max.NaN", [m, *xs]))
    shift = _shift(p, new_m)
    old_d, old_t = _rescaled(p, m, d, t, shift)
    # Four sums of d and four of t: an addition need not wait for the one before, and fewer rounding errors add up.
    ds, ts = ([p.var(0.0, "f32") for _ in range(4)] for _ in ("d", "t"))
    for i, x in enumerate(xs):
        u = _distance(p, x, shift)
        e = p.exp2(u)
        p.increase(ds[i % 4], e)
        p.set(ts[i % 4], p.multiply_add(u, e, ts[i % 4]))
    p.set(new_d, old_d + p.reduce("add", ds))
    p.set(new_t, p.multiply_add(p.reduce("add", ts), _LN_2, old_t))
    return p


def combine_threads_program() -> Program:
    """Returns the program of `combine_threads`.

    It reads <m>, <d>, <t>, <place>, <a> and the address <scratch>. It writes <new_m>, <new_d>, <new_t> and <new_place>.
    """
    p = CtaProgram()
    state_of_warp = _combine_lanes(p, _State(*p.operands("f32", *_State._fields)))
    each_number = p.of_warps(state_of_warp, p.operand("scratch", "u32"), lane=0)  # of all warps
    _set_results(p, _combine(p, [_State(*warp) for warp in zip(*each_number)]))
    return p


def combine_ctas_program(count: int) -> Program:
    """Returns the program of `combine_ctas`.

    It reads <a> and the addresses <m>, <d>, <t>, <place> and <scratch>. It writes what `combine_threads_program`
    writes.
    """
    p = CtaProgram(ctas=count)
    scratch = p.operand("scratch", "u32")
    with p.when(p.warp.equals(0)):
        has_cta = p.lane < count
        numbers = []
        for name, empty in zip(_State._fields, (float("-inf"), 0.0, 0.0, float("inf"))):
            address = p.at(p.operand(name, "u32"), p.lane, 4)
            (number,) = p.of_cta(address, p.lane, "f32", when=has_cta)
            numbers.append(p.select(has_cta, number, empty))
        p.store(scratch, *_combine_lanes(p, _State(*numbers)), when=p.first_lane)
    p.barrier()
    _set_results(p, p.load_vector(scratch, "f32", len(_State._fields)))
    return p


def _set_results(p: Program, state: Iterable[Value]) -> None:
    """Writes the results of a merge."""
    for name, value in zip(_State._fields, state):
        p.set(p.operand(f"new_{name}", "f32"), value)


def _combine_lanes(p: CtaProgram, state: _State) -> _State:
    """Merges the states of the lanes of a warp; all lanes get the result. m must be a result of max.NaN."""
    (m,) = p.over_warp(["max.NaN"], [state.m])
    return _State(m, *p.over_warp(["add", "add", "min"], _part_of(p, state, m, _shift(p, m))))


def _combine(p: Program, states: list[_State]) -> _State:
    """Merges some states of this thread."""
    m = p.reduce("max.NaN", [state.m for state in states])
    shift = _shift(p, m)
    parts = [_part_of(p, state, m, shift) for state in states]
    sums = [p.reduce(op, numbers) for op, numbers in zip(("add", "add", "min"), zip(*parts))]
    return _State(m, *sums)


def _part_of(p: Program, state: _State, m: Value, shift: Value) -> tuple[Value, Value, Value]:
    """Returns the parts of a state in the merged d, t and place. The merged m is `m`."""
    is_largest = state.m.equals(m) | ~state.m.equals(state.m)  # the second condition: it is NaN
    d, t = _rescaled(p, state.m, state.d, state.t, shift)
    return d, t, p.select(is_largest, state.place, float("inf"))


def _rescaled(p: Program, m: Value, d: Value, t: Value, shift: Value) -> tuple[Value, Value]:
    """Returns the sums d and t relative to `shift` instead of to m, as `normalizers.combine` does."""
    u = _distance(p, m, shift)
    factor = p.exp2(u)
    return d * factor, p.multiply_add(u * _LN_2, d, t) * factor


def _shift(p: Program, m: Value) -> Value:
    """Returns what is subtracted from logits: m, or 0 if m is -inf, because -inf - -inf is NaN."""
    return p.select(m.equals(float("-inf")), 0.0, m)


def _distance(p: Program, x: Value, shift: Value) -> Value:
    """Returns u = (x - shift) <a>, at least FAR; NaN stays."""
    return p.op("max.NaN", "f32", (x - shift) * p.operand("a", "f32"), FAR)
