"""Inline PTX for the states of a reduction: adds logits to moments, and merges the threads and segments of a row.

A state is a sum, a normalizer (m, d), or moments (m, d, t) with a place and a count. `normalizers` explains the
numbers, and `plan.Parts` draws segments. A row is merged in one order, wherever its segments lie:

    write_record    the lanes of each warp merge, once for each segment   → a record: a state of each warp
    merged          the warps of a segment merge, then all segments       → the state of the row

So the order depends on the segments only, and not on the number of CTAs that hold them.

`add_logits` adds several logits to the moments of each thread. It takes their maximum first, and rescales the old d and
t once. Then each logit x takes six instructions, or eight with a temperature. Here a = log2(e) / temperature; with a
temperature it has the three factors of a `Scale`:

    u = max((x - m) a, FAR)     three instructions, or five
    e = 2^u
    d = d + e
    t = t + u e                 a fused multiply-add; t is multiplied by ln(2) at the end

One fma for x a - m a would save an instruction. But m a is rounded, so that the d of a single large logit would not be
exactly 1, and its entropy not exactly 0.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_softmax._src.gpu.hardware import WARPS
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.normalizers import LOG2_E, Moments, Scale

# The least u. 2^FAR is 0 in float32. FAR * 0 is 0, and not NaN like -inf * 0: a logit of -inf adds nothing to t.
FAR = -1e4
_LN_2 = 1 / LOG2_E

# The numbers of a state by name, with what the empty set has. `place` says where the largest logit is, and the lowest
# place wins. `before` is how many logits come before the label's. A state has some of these fields, in this order.
_EMPTY = {"m": float("-inf"), "d": 0.0, "t": 0.0, "place": float("inf"), "before": 0.0}
_MERGES = {"d": "add", "t": "add", "place": "min", "before": "add"}
State = dict[str, Value]
Fields = tuple[str, ...]

_RESULT_WORDS = 8  # the state of the row, before the records of the segments


def words(fields: Fields, segments: int) -> int:
    """Returns the words of shared memory of a CTA for the records of its segments."""
    return _RESULT_WORDS + segments * WARPS * len(fields)


@twin
def add_logits(moments: Moments, xs: Sequence[jax.Array], scale: Scale | None = None) -> Moments:
    """Adds logits `xs` to the moments of each thread, all arrays (128,), in a CTA of one warpgroup."""
    numbers = dict(zip(Moments._fields, moments)) | {f"x{i}": x for i, x in enumerate(xs)}
    results = {f"new_{name}": "f32" for name in Moments._fields}
    program = add_program(len(xs), scaled=scale is not None)
    return Moments(*insert_ptx(program, {}, numbers | factors(scale), results))


@twin
def write_record(reduction: Any, state, records, segment) -> None:
    """Writes the record of a segment, given the state of each thread in it: arrays (128,).

    `records` refers to shared memory, `words` float32. `segment` is the number of the segment in its CTA.
    """
    fields, scale = reduction.fields, reduction.scale
    numbers = dict(zip(fields, jax.tree.leaves(state))) | factors(scale) | {"segment": segment}
    insert_ptx(record_program(fields, scaled=scale is not None), {"records": records}, numbers)


@twin
def merged(reduction: Any, records, segments: int, ctas: int) -> Any:
    """Returns the state of the row, scalars, given the records of its segments in the CTAs of the cluster.

    The CTAs hold equal numbers of segments, in order. A cluster of several must synchronize before this. Afterwards
    this CTA reads no other CTA. A CTA may exit, or overwrite its records, once all have merged.
    """
    results = {f"new_{name}": "f32" for name in reduction.fields}
    program = merge_program(reduction.fields, segments, ctas, scaled=reduction.scale is not None)
    leaves = insert_ptx(program, {"records": records}, factors(reduction.scale), results, uniform=True)
    return jax.tree.unflatten(jax.tree.structure(reduction.empty), leaves)


def factors(scale: Any) -> dict[str, Any]:
    """Returns the operands with the product log2(e) / temperature; `scale` is 1 / temperature, and None is 1."""
    if not isinstance(scale, Scale):
        return {"a": LOG2_E if scale is None else scale * LOG2_E}
    return {"first": scale.first, "a": scale.factor * LOG2_E, "again": scale.again}


# --- Programs


def add_program(count: int, *, scaled: bool) -> Program:
    """Returns the program of `add_logits` for `count` logits <x0>, <x1>, ..."""
    p = Program()
    old = {name: p.operand(name, "f32") for name in Moments._fields}
    xs = p.operands("f32", *(f"x{i}" for i in range(count)))
    new_m, new_d, new_t = p.operands("f32", "new_m", "new_d", "new_t")
    p.set(new_m, p.reduce("max.NaN", [old["m"], *xs]))
    kept, from_m = _relative_to(p, scaled, old, new_m), shift(p, scaled, new_m)
    # Four sums of d and four of t: an addition need not wait for the one before, and fewer rounding errors add up.
    ds, ts = ([p.var(0.0, "f32") for _ in range(4)] for _ in ("d", "t"))
    for i, x in enumerate(xs):
        u = _distance(p, scaled, x, from_m)
        e = p.exp2(u)
        p.increase(ds[i % 4], e)
        p.set(ts[i % 4], p.multiply_add(u, e, ts[i % 4]))
    p.set(new_d, kept["d"] + p.reduce("add", ds))
    p.set(new_t, p.multiply_add(p.reduce("add", ts), _LN_2, kept["t"]))
    return p


def record_program(fields: Fields, *, scaled: bool) -> CtaProgram:
    p = CtaProgram()
    state = _combine_lanes(p, scaled, {name: p.operand(name, "f32") for name in fields})
    record = _record(p, fields, p.operand("segment", "s32").bits("u32"))
    for i, value in enumerate(state.values()):
        p.store(p.at(record, p.warp, 4), value, offset=4 * WARPS * i, when=p.first_lane)
    return p


def merge_program(fields: Fields, segments: int, ctas: int, *, scaled: bool) -> CtaProgram:
    """Returns the program of `merged`. `segments` and `ctas` are powers of two, `segments` at most 32.

    Lane i of the first warp reads the record of segment i. The results reach other warps by shared memory.
    """
    p = CtaProgram(ctas=ctas)
    result = p.operand("records", "u32")
    if ctas == 1:
        p.barrier()
    with p.when(p.warp.equals(0)):
        exists, each = p.lane < segments, log2(segments // ctas)
        record = _record(p, fields, p.lane & (1 << each) - 1)
        of_warps = []
        for i, name in enumerate(fields):
            found = p.of_cta(record + 4 * WARPS * i, p.lane >> each, "f32", WARPS, when=exists)
            of_warps.append([p.select(exists, number, _EMPTY[name]) for number in found])
        states = [dict(zip(fields, numbers)) for numbers in zip(*of_warps)]
        total = [*_combine_lanes(p, scaled, _combine(p, scaled, states)).values()]
        for i in range(0, len(total), 4):
            p.store(result, *total[i : i + 4], offset=4 * i, when=p.first_lane)
    p.barrier()
    for i, name in enumerate(fields):
        p.set(p.operand(f"new_{name}", "f32"), p.load(result, "f32", offset=4 * i))
    return p


def _record(p: CtaProgram, fields: Fields, segment: Value) -> Value:
    """Returns the address of the record of a segment, in this CTA.

    result    | m | d | ..  8 words
    record 0  | m of 4 warps | d of 4 warps | ..
    record 1  | ..
    """
    return p.operand("records", "u32") + segment * (4 * WARPS * len(fields)) + 4 * _RESULT_WORDS


def _combine_lanes(p: CtaProgram, scaled: bool, state: State) -> State:
    """Merges the states of the lanes of a warp; all lanes get the result. m must be a result of max.NaN."""
    m = {"m": p.over_warp(["max.NaN"], [state["m"]])[0]} if "m" in state else {}
    parts = _relative_to(p, scaled, state, *m.values())
    sums = p.over_warp([_MERGES[name] for name in parts], [*parts.values()])
    return m | dict(zip(parts, sums))


def _combine(p: Program, scaled: bool, states: list[State]) -> State:
    """Merges some states of this thread."""
    m = {"m": p.reduce("max.NaN", [state["m"] for state in states])} if "m" in states[0] else {}
    parts = [_relative_to(p, scaled, state, *m.values()) for state in states]
    return m | {name: p.reduce(_MERGES[name], [part[name] for part in parts]) for name in parts[0]}


def _relative_to(p: Program, scaled: bool, state: State, m: Value | None = None) -> State:
    """Returns the numbers of a state except m, for a merge with this m; without m, they are only added."""
    rest = {name: value for name, value in state.items() if name != "m"}
    if m is None:
        return rest
    u = _distance(p, scaled, state["m"], shift(p, scaled, m))
    factor = p.exp2(u)
    if "t" in rest:
        rest["t"] = p.multiply_add(u * _LN_2, rest["d"], rest["t"]) * factor
    rest["d"] = rest["d"] * factor
    if "place" in rest:
        is_largest = state["m"].equals(m) | ~state["m"].equals(state["m"])  # the second condition: it is NaN
        rest["place"] = p.select(is_largest, rest["place"], float("inf"))
    return rest


def shift(p: Program, scaled: bool, m: Value) -> Value:
    """Returns what is subtracted from logits: m <first>, or 0 if m is -inf, because -inf - -inf is NaN."""
    m = p.select(m.equals(float("-inf")), 0.0, m)
    return m * p.operand("first", "f32") if scaled else m


def octaves(p: Program, scaled: bool, x: Value, shift: Value) -> Value:
    """Returns (x <first> - shift) <a> <again>; unless `scaled`, (x - shift) <a>."""
    x = x * p.operand("first", "f32") if scaled else x
    u = (x - shift) * p.operand("a", "f32")
    return u * p.operand("again", "f32") if scaled else u


def _distance(p: Program, scaled: bool, x: Value, shift: Value) -> Value:
    """Returns u: the octaves, at least FAR. NaN stays."""
    return p.op("max.NaN", "f32", octaves(p, scaled, x, shift), FAR)
