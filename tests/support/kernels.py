"""The kernels of mosaic_gpu with a given plan, in Pallas's interpreter or on a GPU.

This is the only helper that calls the package's internal functions for kernels. It also has plans that cover every kind
of launch, and the checks of their results.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import folding, target
from pallas_softmax._src.dispatch.operation import describe
from pallas_softmax._src.gpu.interpreter import interpreted
from pallas_softmax._src.gpu.layout import Tile, aligned_view
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow  # noqa: F401
from pallas_softmax._src.gpu.ptx.values import Program  # noqa: F401
from pallas_softmax._src.gpu.window import Window  # noqa: F401
from pallas_softmax._src.route import grad_kernel as route_grad_kernel
from pallas_softmax._src.route import groups_ptx, scores_ptx
from pallas_softmax._src.route import kernel as route_kernel
from pallas_softmax._src.route import plan as route_plan
from pallas_softmax._src.route.formulas import Gate
from pallas_softmax._src.sample import draw_ptx as sample_ptx
from pallas_softmax._src.sample import mosaic_gpu as sample_kernel
from pallas_softmax._src.sample import plan as sample_plan
from pallas_softmax._src.softmax import columns_kernel, columns_plan
from pallas_softmax._src.softmax import mosaic_gpu as softmax_kernels
from pallas_softmax._src.softmax import plan as softmax_plan
from pallas_softmax._src.softmax.columns_plan import Strips
from pallas_softmax._src.softmax.formulas import FORMULAS
from pallas_softmax._src.softmax.plan import Parts, approximate
from pallas_softmax._src.topk import (
    bound_ptx,
    collect_ptx,
    lists_ptx,
    merge_kernel,
    merging_ptx,
    ranking_ptx,
    search_ptx,
    tile_plan,
    window_kernel,
)
from pallas_softmax._src.topk import plan as topk_plan
from pallas_softmax._src.topk import tile_grad_kernel as grad_kernel
from pallas_softmax._src.topk import tile_kernel as topk_tile_kernel
from pallas_softmax._src.topk.candidates import CandidateList
from pallas_softmax._src.topk.window_ptx import WindowProgram
from tests.support import bounds, cases, oracle
from tests.support.calls import OPERATIONS
from tests.support.cases import ALL, BF16, F16, F32, FEW

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams()
HOPPER = (9, 0)
ONE = np.ones(1, F32)


# --- softmax, log_softmax, logsumexp and their backwards ----------------------------------------------


def plan_softmax(name, rows, vocab, dtype, capability=HOPPER):
    """Returns the plan that the package chooses."""
    return softmax_plan.plan_softmax(name, rows, vocab, dtype, capability)


def softmax_results(name, arrays, where=None, axes=(-1,), plan=None, interpret=INTERPRET):
    """Returns everything that the kernel of an operation returns: for logsumexp also m and d."""
    axes = tuple(a % arrays[0].ndim for a in axes)
    arrays = [jnp.asarray(a) for a in arrays]
    where = None if where is None else jnp.asarray(where)
    if plan is None:
        call = describe(OPERATIONS[name], arrays[0], axes, where, function=name)
        plan = softmax_kernels.plan(call, target.capability())
    with interpreted(interpret):
        return softmax_kernels.softmax_rows(name, arrays, where, axes, plan)


def softmax_rows(name, arrays, where=None, axes=(-1,), plan=None, interpret=INTERPRET):
    """Returns the kernel's result in the dtype that the public functions return."""
    out = softmax_results(name, arrays, where, axes, plan, interpret)[0]
    return np.asarray(out.astype(arrays[-1].dtype))


def assert_softmax(name, x, names, where=None, plan=None, interpret=INTERPRET):
    """Asserts that the kernel is right for the logits x, with garbage at masked positions."""
    arrays = cases.operands(name, x, where)
    if where is not None:
        arrays = [cases.spoil_masked(a, where) if a is arrays[-1] else a for a in arrays]
    got = softmax_rows(name, arrays, where, plan=plan, interpret=interpret)
    bounds.assert_operation(name, got, arrays, names, where)


def plan_columns(name, outer, vocab, inner, dtype, capability=HOPPER):
    """Returns the plan that the package chooses for columns, or None."""
    return columns_plan.plan_columns(name, outer, vocab, inner, dtype, capability)


def columns_results(name, arrays, plan, interpret=INTERPRET):
    """Returns everything that the kernel of columns returns for arrays (outer, vocab, inner)."""
    with interpreted(interpret):
        return columns_kernel.launch(
            FORMULAS[name],
            [jnp.asarray(a) for a in arrays],
            plan,
            name=name,
            approximate=approximate(arrays[-1].dtype),
        )


def columns_rows(name, arrays, plan, interpret=INTERPRET):
    """Returns the result of the kernel of columns for the rows of arrays (rows, vocab), stored as columns.

    An even number of rows becomes the columns of two arrays.
    """
    rows, vocab = arrays[0].shape
    outer = 1 if rows % 2 else 2
    across = [np.asarray(a).reshape(outer, -1, vocab).swapaxes(1, 2) for a in arrays]
    out = np.asarray(columns_results(name, across, plan, interpret)[0].astype(arrays[-1].dtype))
    return out.swapaxes(1, 2).reshape(rows, -1)


def assert_columns(name, x, names, plan, interpret=INTERPRET):
    """Asserts that the kernel of columns is right for the logits x."""
    arrays = cases.operands(name, x)
    got = columns_rows(name, arrays, plan, interpret)
    bounds.assert_operation(name, got, arrays, names)


EVEN = [*ALL, "normal"]  # an even number of rows, for the columns of two arrays

# (tile, V, dtype, rows). Vectors and single elements; tiles that end with the columns, and beyond them.
COLUMN_TILES = [
    (Tile(24, 8, 1, 1), 21, F32, ALL),
    (Tile(128, 4, 4, 1), 127, F32, EVEN),
    (Tile(8, 16, 4, 1), 8, BF16, EVEN),
    (Tile(2, 128, 4, 1), 2, F16, FEW + FEW[:1]),
    (Tile(1, 128, 1, 1), 1, BF16, FEW),
    (Tile(1024, 4, 4, 1), 1000, F32, EVEN),
    (Tile(21, 128, 1, 3), 21, F32, ALL),
]
# (strips, dtype, rows). Steps that end with the array, and beyond it; a single step; strips that end with the columns.
# With turns: slots for one strip, for more than one, and for all, where the last cluster takes fewer strips.
COLUMN_STRIPS = [
    (Strips(129, 8, 4, 1, 64, 3), F32, EVEN),
    (Strips(129, 8, 4, 1, 64, 4, turns=3), BF16, EVEN),
    (Strips(1024, 8, 4, 1, 256, 4), F16, EVEN),
    (Strips(127, 16, 4, 1, 128, 1), BF16, EVEN),
    (Strips(1000, 8, 4, 1, 128, 8), F32, EVEN),
    (Strips(129, 8, 4, 1, 64, 3, turns=2), F32, EVEN),
    (Strips(1000, 8, 4, 1, 128, 16, turns=2), F16, EVEN),
]
# Columns that are only read, through fewer slots.
READ_STRIPS = [
    (Strips(1000, 8, 4, 1, 128, 3), F32, EVEN),
    (Strips(1024, 8, 4, 1, 64, 1), F32, EVEN),
]


def fewer_rows(plan):
    """Returns a tile with fewer rows, so that the few rows of a test take several tiles. For the interpreter only."""
    return dataclasses.replace(plan, rows=min(plan.rows, 4))


# (plan, dtype, rows). One CTA per row: exact blocks; several steps, the last one short. Rows and parts that are not
# aligned to 16 bytes; parts that overlap, or are all the same; single rows, or rows that together fill a multiple of
# 16 bytes.
PARTS = [
    (Parts(1003, 4, 2, 1, True), F32, FEW),
    (Parts(1003, 8, 1, 2, False), BF16, FEW),
    (Parts(1003, 8, 4, 3, False), F16, FEW + FEW[:1]),
    (Parts(1000, 4, 2, 3, False), F32, FEW),
    (Parts(1024, 8, 1, 2, False), BF16, FEW),
    (Parts(1024, 4, 2, 1, True), F32, ALL),
    (Parts(5000, 8, 2, 1, True), BF16, FEW),
    (Parts(1003, 4, 2, 1, True), F32, ALL),
    (Parts(1002, 4, 1, 2, False), F32, FEW[:4]),
    # rows in turns: slots for one row, for more than one, and for all
    (Parts(1003, 4, 1, 1, True, teams=3, slots=2), F32, FEW),
    (Parts(1024, 8, 1, 1, True, teams=4, slots=3), BF16, FEW),
    (Parts(1000, 4, 2, 1, True, teams=1, slots=9), F32, FEW),
]
# Rows that are written and that shared memory cannot hold: some steps are read twice.
READ_AGAIN = [
    (Parts(1503, 4, 1, 1, True, teams=3, slots=2), F32, FEW),
    (Parts(4096, 8, 1, 1, True, teams=4, slots=2), BF16, FEW),
    (Parts(4001, 4, 1, 1, True, teams=1, slots=7), F32, ALL),
]


# --- top-k --------------------------------------------------------------------------------------------


def plan_topk(rows, vocab, k, dtype, capability=HOPPER):
    """Returns the plan that the package chooses."""
    return topk_plan.plan_topk(rows, vocab, k, dtype, capability)


MAX_K = topk_plan.MAX_K


def candidate_capacity(k):
    """Returns how many candidates a window has room for."""
    return topk_plan.candidate_capacity(k)


def rank_ptx_of(capacity, k, dtype, vocab):
    """Returns the text that ranks the first <n> entries of the list <candidates>, with scratch <buckets>."""
    p = CtaProgram()
    candidates, n, buckets, ranked = p.operands("u32", "candidates", "n", "buckets", "ranked")
    ranking_ptx.rank(p, CandidateList(candidates, n, capacity, buckets, ranked, k, dtype, vocab))
    return p


def search_lists_ptx_of(lists, k):
    """Returns the text that ranks the winners of a few lists."""
    return lists_ptx.search_lists_program(lists, k)


def rank_lists_ptx_of(winners, capacity, k, dtype):
    """Returns the text that ranks the winners that reach <bound>, at most `capacity` of the `winners` of a row."""
    return lists_ptx.rank_lists_program(winners, capacity, k, np.dtype(dtype))


def bound_ptx_of(window, k):
    """Returns the text of the search for a bound; <bound> receives it."""
    p = WindowProgram(window, "float32", k)
    bound, _ = bound_ptx.find_bound(p, k)
    p.set(p.operand("bound", "s32"), bound)
    return p


def collect_ptx_of(window, dtype, k, everywhere):
    """Returns the text that lists the elements that reach <bound>."""
    p = WindowProgram(window, dtype, k)
    collect_ptx.collect(p, p.operand("bound", "s32"), all_groups=everywhere)
    return p


def search_ptx_of(window, dtype, k):
    """Returns the text of a whole search."""
    return search_ptx.search_program(window, np.dtype(dtype), k)


def merging_words_ptx_of(tile, vocab, k):
    """Returns the text of merges in a tile of 16-bit keys, and the tile of the packed keys <winner0_0>, ..."""
    return merging_ptx.take_words_program(tile, vocab, k), tile_plan.merged_tile(tile, k)


def merging_ptx_of(tile, vocab, k, lanes=None):
    """Returns the text of merges in a tile of 32-bit keys, and the tile of the columns <winner0_0>, ..."""
    return merging_ptx.take_program(tile, vocab, k, lanes), tile_plan.merged_tile(tile, k)


def near_keys(rng, shape, kind):
    """Returns keys that a sort of packed keys leaves in the wrong order in few places, in many, or nowhere."""
    x = rng.standard_normal(shape).astype(F32)
    match kind:
        case "few":  # two or three keys differ in their lowest bits or are equal
            bits = x.view("i4")
            for row in bits:
                places = rng.choice(len(row), 6, replace=False)
                row[places] = np.repeat(row[places[::3]], 3) ^ rng.integers(0, 3, 6)
        case "many":
            x = 5 + 1e-5 * x
        case "ties":
            x = np.round(2 * x)
    return oracle.order_key(x).astype("int64")


def merge_so_many_lists(monkeypatch, lists):
    """Makes a launch merge this many lists of winners into one."""
    monkeypatch.setattr(merge_kernel, "lists_per_merge", lambda k: lists)


def launches_that_merge(plan, k):
    """Returns how many launches merge the winners of the parts of a row."""
    lists, launches = plan.count if isinstance(plan, Window) else 1, 0
    while lists > 1:
        lists, launches = -(-lists // topk_plan.lists_per_merge(k)), launches + 1
    return launches


def topk_rows(x, k, plan, where=None, temperature=ONE, log=False, dtype=F32, interpret=INTERPRET):
    """Returns the kernel's winners and normalizers along the last axis of x, with the other axes flattened into one."""
    *batch, v = x.shape
    mask = None
    if where is not None:
        rows = folding.mask_rows(where.shape[:-1], tuple(batch))
        mask = folding.Mask(jnp.asarray(where.reshape(-1, where.shape[-1])), rows)
    kernel = topk_tile_kernel if isinstance(plan, Tile) else window_kernel
    x, t = jnp.asarray(x.reshape(-1, v)), jnp.asarray(temperature)
    with interpreted(interpret):
        return kernel.topk_rows(x, mask, t, k, plan, log=log, dtype=dtype)


def topk_grad_rows(x, t, indices, m, d, g, g_d, *, log, interpret=INTERPRET):
    """Returns the cotangents of the logits and of each row's temperature. The interpreter gets a tile of few rows."""
    plan = tile_plan.plan_topk_grad(x.shape[-1], x.dtype)
    assert plan is not None
    arrays = (jnp.asarray(a) for a in (x, t, m, d, indices, g, g_d))
    plan = plan if interpret is None else fewer_rows(plan)
    with interpreted(interpret):
        return grad_kernel.topk_grad_rows(*arrays, plan, log=log)


def topk_merge(won, kept, indices, normalizers, temperature, k, log, interpret=INTERPRET):
    """Returns the kernel's merge of the winners and normalizers of several devices."""
    t = jnp.asarray(temperature)
    with interpreted(interpret):
        return merge_kernel.merge_rows(won, kept, indices, normalizers, t, k, log=log, dtype=F32)


def assert_topk(x, k, names, plan, where=None, temperature=ONE, log=False, dtype=F32):
    """Asserts that the kernel's winners are right."""
    got = topk_rows(x, k, plan, where, temperature, log, dtype)
    judge_topk(got, x, k, names, where, temperature, log, dtype)


def judge_topk(got, x, k, names, where, temperature, log, dtype):
    """Asserts that indices and m are exact, and values and d within the units of float32."""
    winners, (m, d) = got
    if where is not None:
        where = np.broadcast_to(where, x.shape).reshape(-1, x.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    t = temperature[0] if len(temperature) == 1 else temperature
    want, indices = oracle.fused_topk(x, k, where, t, log)
    assert winners.indices.dtype == jnp.int32 and winners.values.dtype == dtype
    assert winners.indices.shape == winners.values.shape == (len(x), k)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(winners.indices[i], indices[i], err_msg=name)
    # 1 / temperature is rounded once, and multiplied: one more unit each way
    bounds.assert_close(winners.values, want, 1.5 * bounds.fused_topk_unit(x, k, where, t, log), names)
    assert m.shape == d.shape == (len(x), 1)
    want_m = oracle.normalizer(x, where)[0]
    ordinary = np.isfinite(want_m[:, 0])  # otherwise p is NaN for any m and d
    np.testing.assert_allclose(np.asarray(m)[ordinary], want_m[ordinary], rtol=0, atol=bounds.slack(F32))
    assert np.isfinite(np.asarray(d)[ordinary]).all()


TOPK_SHORT = [
    (2, F16, 2, FEW),
    (8, BF16, 5, ALL),
    (100, F32, 64, FEW),
    (129, F16, 33, FEW),
    (512, BF16, 8, FEW),
    (1003, F32, 5, FEW),
    (1003, BF16, 30, FEW),
    (1, F32, 1, FEW),
    (2, BF16, 1, FEW),
    (7, F32, 7, ALL),
    (8, F16, 8, FEW),
    (128, F32, 5, ALL),
    (128, BF16, 64, FEW),
    (512, F32, 1, FEW),
    (1024, F32, 2, FEW),
    (64, F32, 64, ALL),
    (512, F32, 100, FEW),
    (1000, BF16, 200, FEW),
]


def neighbours(v):
    """Returns float32 rows, by name, with numbers that differ in their lowest bits only: all, some, or with ties."""
    rng = np.random.default_rng(v)
    ulps = (1 + rng.permutation(v) * float(np.finfo(F32).eps)).astype(F32)
    pairs = rng.standard_normal(v).astype(F32)
    pairs[1::2] = np.nextafter(pairs[: v // 2 * 2 : 2], np.float32(np.inf))
    short = cases.rows(["normal"], v, BF16)[0].astype(F32)
    return {
        "all apart by ulps": ulps,
        "negative": -ulps,
        "some, the larger later": pairs,
        "some, the larger earlier": pairs[::-1].copy(),
        "ties of odd numbers": rng.choice(np.array([0.1, 0.3, 0.7], F32), v),
        "16 bits": short,
        "16 bits but for one": np.where(np.arange(v) == v // 2, np.nextafter(short, np.float32(9)), short),
    }


def bunched(v):
    """Returns float32 rows, by name. All elements but one share a bucket: they differ in their lowest bits only."""
    ulps, first = neighbours(v)["all apart by ulps"], np.arange(v) == v // 3
    return {
        "one far above": np.where(first, np.float32(1e30), ulps),
        "inf above": np.where(first, np.float32(np.inf), -ulps),
        "one far above ties": np.where(first, np.float32(9), np.float32(1.5)),
        "none above": ulps,
    }


# (plan, dtype, k, rows). One part: several steps; groups smaller than a step; rows that are not aligned to 16 bytes,
# single and several to a row of the view; whole blocks; a short rest. Several parts: merged by one launch, and by two
# (1400 winners).
WINDOWS = [
    (Window(1004, 8, 4, 2), F16, 33, [*FEW, "constant"]),
    (Window(2007, 8, 2, 1), BF16, 300, FEW),
    (Window(1003, 4, 1, 1, 2), F32, 5, FEW),
    (Window(4203, 4, 8, 4, 3), F32, 1400, ["integers"]),
    (Window(1024, 4, 2, 2), F32, 64, FEW),
    (Window(2007, 4, 1, 1), F32, 5, FEW),
    (Window(1021, 4, 2, 1), F32, 128, ALL),
    (Window(100, 4, 8, 1), F32, 100, FEW),  # fewer groups than winners
    (Window(1003, 8, 4, 4, 3), BF16, 128, FEW),
    (Window(2048, 8, 2, 2, 5), F16, 1, [*FEW, "constant"]),
]


def crowded(v, k, dtype):
    """Returns rows, by name, where more keys than the list has slots reach any bound near the k-th best."""
    at = np.arange(v)
    middle = (at > v // 3) & (at < v - 8)
    few = np.where(middle, 1.0, 0.0)
    few[v - (k - 1) :] = 2 + np.arange(k - 1)  # k - 1 winners at the end, and one among the ties
    late = np.where(at >= v - topk_plan.candidate_capacity(k) - 1, 3.0, 0.0)
    lane = at // 4 % 128
    return {
        "constant": np.full(v, 1.5),
        "all_neg_nan": np.full(v, cases.NEG_NAN),  # the lowest key, except for masked elements
        "k-1 winners after the ties": few,
        "one tie more than slots, at the end": late,
        "two values": np.where(at % 2, 1.0, -1.0),
        "a third NaN": np.where(at % 3, 1.0, np.nan),
        "half NaN, half -NaN": np.where(at % 2, cases.NEG_NAN, np.nan),
        "+0 and -0": np.where(at % 3, -0.0, 0.0),
        "-inf after one number": np.where(at == v - 1, 0.0, -np.inf),
        "k - 1 numbers, the rest -NaN": np.where(at < k - 1, 1.0, cases.NEG_NAN),
    }, {
        # distinct, but the best are in few groups: bisection over keys
        "sorted by lane": -lane * 64.0 - at // 512,
        "sorted by lane, rising": lane * 64.0 + at // 512,
        "ascending": at - v / 2,
        "descending": v / 2 - at,
    }


CROWDED = [
    (Window(1003, 8, 4, 4), BF16, 5),
    (Window(2007, 4, 8, 4, 2), F32, 64),
    (Window(1203, 4, 8, 8), F32, 128),
]


def exceeds_capacity(x, k):
    """Returns whether, in every row, more elements reach the k-th best than a list of candidates has room for."""
    keys = oracle.order_key(x)
    bound = np.take_along_axis(keys, oracle.topk_indices(x, k)[:, -1:], -1)
    return (np.sum(keys >= bound, -1) > topk_plan.candidate_capacity(k)).all()


def steps(plan):
    """Returns the number of full steps of a window, of blocks after them, and of blocks in a step."""
    return plan.full, plan.rest, plan.step_blocks


def views(plans):
    """Returns the set of numbers of dimensions of the views that bulk copies read, for each (rows, plan)."""
    return {len(aligned_view(rows, plan.vocab, plan.vec)) for rows, plan in plans}


# --- route --------------------------------------------------------------------------------------------


def plan_route(rows, experts, k, dtype, *, steered, groups=1):
    """Returns the tile that the package chooses."""
    tile = route_plan.plan_route(rows, experts, k, np.dtype(dtype).itemsize, steered=steered, groups=groups)
    assert tile is not None
    return tile


def groups_ptx_of(tile, groups, top_groups):
    """Returns the text that gives the experts of other groups the lowest key: <x0_0> to <kept0_0>, ..."""
    return groups_ptx.groups_program(tile, groups, top_groups)


def exponentials_ptx_of(tile, score):
    """Returns the text that computes exponentials <e0_0>, ... of <x0_0>, ... and normalizers <m0>, <d0>, ..."""
    return scores_ptx.exponentials_program(tile, score)


def route_rows(x, k, gate, bias, interpret=INTERPRET):
    """Returns the kernel's weights, indices and logsumexp for a gate of tests/support/routing.py."""
    steer = bias if gate.biased else np.zeros(x.shape[-1], F32) if gate.steered else None
    plan = plan_route(*x.shape, k, x.dtype, steered=gate.steered, groups=gate.groups)
    mask = None if steer is None else folding.fold_mask(jnp.asarray(steer)[None], x.shape, 1)
    with interpreted(interpret):
        weights, indices, logsumexp = route_kernel.route_rows(
            jnp.asarray(x),
            mask,
            k,
            plan if interpret is None else fewer_rows(plan),
            gate=Gate(gate.score, gate.renormalize, gate.scale),
            groups=gate.groups,
            top_groups=gate.top_groups or 1,
        )
    return weights, indices, logsumexp[:, 0]


def route_grad_rows(x, indices, gate, g, g_logsumexp, interpret=INTERPRET):
    """Returns the kernel's cotangents of the logits."""
    plan = tile_plan.plan_topk_grad(x.shape[-1], x.dtype)
    assert plan is not None
    plan = plan if interpret is None else fewer_rows(plan)
    gate = Gate(gate.score, gate.renormalize, gate.scale)
    arrays = (jnp.asarray(a) for a in (x, indices, g, g_logsumexp))
    with interpreted(interpret):
        return route_grad_kernel.route_grad_rows(*arrays, plan, gate=gate)


# --- sample -------------------------------------------------------------------------------------------


def plan_sample(rows, vocab, dtype, capability=HOPPER):
    """Returns the plan that the package chooses, or None."""
    return sample_plan.plan_sample(rows, vocab, dtype, capability)


def sample_plan_of(vocab, dtype, count, warpgroups):
    """Returns the plan of a row over `count` CTAs with `warpgroups` warpgroups each."""
    return sample_plan.plan_of(vocab, dtype, count, warpgroups)


def sample_ptx_of(plan, dtype):
    """Returns the text of the program for a part of a row."""
    return sample_ptx.draw_program(plan, dtype)


def sample_scale(temperature):
    """Returns the scale that the kernel passes to the program."""
    return sample_kernel.scale_of(jnp.asarray(temperature, F32))


def sample_rows(x, u, parameters, where=None, plan=None, interpret=INTERPRET):
    """Returns index, log probability and log of the kept share of a draw from each row.

    Args:
      x: (rows, V).
      u: (rows,).
      parameters: temperature, top_k, top_p and min_p, (rows,) or (1,).
      where: None, or (rows or 1, V or 1).
      plan: how a row lies over CTAs; by default the package's choice.
    """
    x, request = jnp.asarray(x), sample_kernel.Params(*map(jnp.asarray, (u, *parameters)))
    mask = None if where is None else folding.fold_mask(jnp.asarray(where), x.shape, 1)
    plan = plan or plan_sample(*x.shape, x.dtype)
    with interpreted(interpret):
        return sample_kernel.sample_rows(x, mask, request, plan)


# (V, dtype, warpgroups) of one CTA. Rows not aligned to 16 bytes, exact blocks; warpgroups with a whole step, a short
# step, or none.
SAMPLE_LAYOUTS = [
    (1003, BF16, 2),
    (1024, F32, 1),
    (129, F16, 4),
    (2, BF16, 1),
    (4099, F32, 2),
    (4104, F16, 2),
]
