"""Inline PTX for the moments (m, d, t) of logits in the threads of a CTA: adds logits, and merges threads and CTAs.

`token_stats` of long rows uses it. `normalizers.Moments` explains the numbers.

A thread adds several logits at once. It takes their maximum first, and rescales its old d and t once. Then each logit x
takes six instructions, or seven with a temperature. Here a = log2(e) / temperature, in two factors of a `Scale`:

    u = max((x - m) a, FAR)     three instructions, or four
    e = 2^u
    d = d + e
    t = t + u e                 a fused multiply-add; t is multiplied by ln(2) at the end

One fma for x a - m a would save an instruction. But m a is rounded, so that the d of a single large logit would not be
exactly 1, and its entropy not exactly 0.

To merge the threads of a CTA, each warp merges its lanes. Then the warps exchange all numbers at once, with one
barrier. `Reduction.combine_lanes` needs barriers for each number: `jnp` reduces one number at a time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_softmax._src.gpu.hardware import WARPS
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import LOG2_E, Moments, Scale

# The least u. 2^FAR is 0 in float32. FAR * 0 is 0, and not NaN like -inf * 0: a logit of -inf adds nothing to t.
FAR = -1e4
_LN_2 = 1 / LOG2_E


class _State(NamedTuple):
    """Moments, and a number that says where the largest logit is. If several states have it, the lowest number wins."""

    m: Value
    d: Value
    t: Value
    place: Value
    before: Value | None = None  # how many logits come before the label's, if they are counted


@dataclasses.dataclass(frozen=True)
class Form:
    """The operands of the programs."""

    scaled: bool = False  # a temperature: there is the factor <again>
    counted: bool = False  # the count <before>

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a state."""
        return _State._fields if self.counted else _State._fields[:-1]

    @property
    def factors(self) -> tuple[str, ...]:
        """The operands with the product log2(e) / temperature."""
        return ("a", "again") if self.scaled else ("a",)


SCRATCH_WORDS = 4 * WARPS  # float32 words of shared memory that the merges need, and WARPS more for a count


def add_logits(moments: Moments, xs: Sequence[jax.Array], scale: Scale | None = None) -> Moments:
    """Adds logits `xs` to the moments of each thread, all arrays (128,), for the CTA's only warpgroup.

    Threads do not exchange anything. `scale` belongs to the temperature, or is None.
    """
    blocks = dict(zip(Moments._fields, moments)) | {f"x{i}": x for i, x in enumerate(xs)}
    results = {f"new_{name}": "f32" for name in Moments._fields}
    program = add_program(len(xs), Form(scale is not None))
    return Moments(*insert_ptx(program, {}, _factors(scale), blocks, results))


def combine_threads(
    moments: Moments, place, before, scratch, scale: Scale | None = None
) -> tuple[Moments, Any, Any]:
    """Returns the moments of the CTA, and the lowest `place` among threads with the largest m; NaN is the largest.

    The third result is the sum of `before`, or None if that is None. The results are scalars. `moments`, `place` and
    `before` are float32 (128,); `place` says where a thread's largest logit is. `scratch` refers to shared memory,
    SCRATCH_WORDS float32, aligned to 16 bytes. All threads must synchronize before it is used again. `scale` belongs to
    the temperature, or is None.
    """
    form = Form(scale is not None, before is not None)
    blocks = dict(zip(form.fields, (*moments, place, before)))
    return _insert(combine_threads_program(form), form, {"scratch": scratch}, blocks, scale)


def combine_ctas(
    moments: Moments, place, before, count: int, scratch, scale: Scale | None = None
) -> tuple[Moments, Any, Any]:
    """Merges the CTAs of a cluster like `combine_threads` merges threads, and returns the same.

    Afterwards this CTA reads no other CTA: those may exit, or overwrite their words. The cluster has `count` CTAs, at
    most one for each lane. `moments`, `place` and `before` refer to float32 (128,) in shared memory. In each CTA, all
    words of a reference hold the CTA's number. Lane i of a warp reads word i, in CTA i.
    """
    form = Form(scale is not None, before is not None)
    refs = dict(zip(form.fields, (*moments, place, before))) | {"scratch": scratch}
    return _insert(combine_ctas_program(count, form), form, refs, {}, scale)


def _insert(program: Program, form: Form, refs: dict, blocks: dict, scale) -> tuple[Moments, Any, Any]:
    """Inserts the program of a merge."""
    results = {f"new_{name}": "f32" for name in form.fields}
    m, d, t, place, *before = insert_ptx(program, refs, _factors(scale), blocks, results, uniform=True)
    return Moments(m, d, t), place, before[0] if before else None


def _factors(scale: Scale | None) -> dict[str, Any]:
    """Returns the operands with the product log2(e) / temperature."""
    if scale is None:
        return {"a": LOG2_E}
    return {"first": scale.first, "a": scale.factor * LOG2_E, "again": scale.again}


def add_program(count: int, form: Form = Form()) -> Program:
    """Returns the program of `add_logits`.

    It reads <m>, <d>, <t>, the factors and the logits <x0>, <x1>, ..., `count` in all. It writes <new_m>, <new_d> and
    <new_t>.
    """
    p = Program()
    m, d, t = p.operands("f32", "m", "d", "t")
    xs = p.operands("f32", *(f"x{i}" for i in range(count)))
    new_m, new_d, new_t = p.operands("f32", "new_m", "new_d", "new_t")
    p.set(new_m, p.reduce("max.NaN", [m, *xs]))
    shift = _shift(p, form, new_m)
    old_d, old_t = _rescaled(p, form, m, d, t, shift)
    # Four sums of d and four of t: an addition need not wait for the one before, and fewer rounding errors add up.
    ds, ts = ([p.var(0.0, "f32") for _ in range(4)] for _ in ("d", "t"))
    for i, x in enumerate(xs):
        u = _distance(p, form, x, shift)
        e = p.exp2(u)
        p.increase(ds[i % 4], e)
        p.set(ts[i % 4], p.multiply_add(u, e, ts[i % 4]))
    p.set(new_d, old_d + p.reduce("add", ds))
    p.set(new_t, p.multiply_add(p.reduce("add", ts), _LN_2, old_t))
    return p


def combine_threads_program(form: Form = Form()) -> Program:
    """Returns the program of `combine_threads`.

    It reads the fields of a state, such as <m>, the factors, and the address <scratch>. It writes <new_m> and so on.
    """
    p = CtaProgram()
    state_of_warp = _combine_lanes(p, form, _State(*p.operands("f32", *form.fields)))
    each_number = p.of_warps([*_numbers(state_of_warp)], p.operand("scratch", "u32"), lane=0)  # of all warps
    _set_results(p, _combine(p, form, [_State(*warp) for warp in zip(*each_number)]))
    return p


def combine_ctas_program(count: int, form: Form = Form()) -> Program:
    """Returns the program of `combine_ctas`.

    It reads the factors, and the addresses of the fields of a state and of <scratch>. It writes what
    `combine_threads_program` writes.
    """
    p = CtaProgram(ctas=count)
    scratch = p.operand("scratch", "u32")
    with p.when(p.warp.equals(0)):
        has_cta = p.lane < count
        numbers = []
        for name, empty in zip(form.fields, (float("-inf"), 0.0, 0.0, float("inf"), 0.0)):
            address = p.at(p.operand(name, "u32"), p.lane, 4)
            (number,) = p.of_cta(address, p.lane, "f32", when=has_cta)
            numbers.append(p.select(has_cta, number, empty))
        sums = _numbers(_combine_lanes(p, form, _State(*numbers)))
        p.store(scratch, *sums[:4], when=p.first_lane)
        if form.counted:
            p.store(scratch, sums[4], offset=16, when=p.first_lane)
    p.barrier()
    merged = p.load_vector(scratch, "f32", 4)
    _set_results(p, _State(*merged, *([p.load(scratch, "f32", offset=16)] if form.counted else [])))
    return p


def _numbers(state: _State) -> list[Value]:
    """Returns the numbers of a state."""
    return [number for number in state if number is not None]


def _set_results(p: Program, state: _State) -> None:
    """Writes the results of a merge."""
    for name, value in zip(_State._fields, _numbers(state)):
        p.set(p.operand(f"new_{name}", "f32"), value)


def _combine_lanes(p: CtaProgram, form: Form, state: _State) -> _State:
    """Merges the states of the lanes of a warp; all lanes get the result. m must be a result of max.NaN."""
    (m,) = p.over_warp(["max.NaN"], [state.m])
    parts = _part_of(p, form, state, m, _shift(p, form, m))
    return _State(m, *p.over_warp(_MERGES[: len(parts)], parts))


_MERGES = ["add", "add", "min", "add"]  # of d, t, place and before


def _combine(p: Program, form: Form, states: list[_State]) -> _State:
    """Merges some states of this thread."""
    m = p.reduce("max.NaN", [state.m for state in states])
    shift = _shift(p, form, m)
    parts = [_part_of(p, form, state, m, shift) for state in states]
    return _State(m, *[p.reduce(op, numbers) for op, numbers in zip(_MERGES, zip(*parts))])


def _part_of(p: Program, form: Form, state: _State, m: Value, shift: Value) -> list[Value]:
    """Returns the parts of a state in the merged d, t, place and before. The merged m is `m`."""
    is_largest = state.m.equals(m) | ~state.m.equals(state.m)  # the second condition: it is NaN
    d, t = _rescaled(p, form, state.m, state.d, state.t, shift)
    return [d, t, p.select(is_largest, state.place, float("inf")), *_numbers(state)[4:]]


def _rescaled(p: Program, form: Form, m: Value, d: Value, t: Value, shift: Value) -> tuple[Value, Value]:
    """Returns the sums d and t relative to `shift` instead of to m, as `normalizers.combine` does."""
    u = _distance(p, form, m, shift)
    factor = p.exp2(u)
    return d * factor, p.multiply_add(u * _LN_2, d, t) * factor


def _shift(p: Program, form: Form, m: Value) -> Value:
    """Returns what is subtracted from logits: m <first>, or 0 if m is -inf, because -inf - -inf is NaN."""
    return _in_range(p, form, p.select(m.equals(float("-inf")), 0.0, m))


def _in_range(p: Program, form: Form, x: Value) -> Value:
    """Returns x <first> with a temperature, else x."""
    return x * p.operand("first", "f32") if form.scaled else x


def _distance(p: Program, form: Form, x: Value, shift: Value) -> Value:
    """Returns u = (x <first> - shift) <a> <again>, at least FAR; without a temperature, (x - shift) <a>. NaN stays."""
    u = _in_range(p, form, x) - shift
    for factor in p.operands("f32", *form.factors):
        u = u * factor
    return p.op("max.NaN", "f32", u, FAR)
