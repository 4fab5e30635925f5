"""The kernels of top-k with a given plan, the PTX of merges, and rows and keys that are hard for them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import folding
from pallas_softmax._src.gpu.layout import Tile, Window, merged_tile
from pallas_softmax._src.gpu.ptx import merging
from pallas_softmax._src.topk import merge_kernel, tile_kernel, window_kernel
from pallas_softmax._src.topk import plan as topk_plan
from tests.support import bounds, cases, gpu, oracle, ptx
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.plans import HOPPER
from tests.support.twins import INTERPRET, fewer_rows, interpreted

plan_topk = functools.partial(topk_plan.plan_topk, capability=HOPPER)
ONE = np.ones(1, F32)


def launches_that_merge(plan, k):
    """Returns how many launches merge the winners of the parts of a row."""
    lists, launches = plan.count if isinstance(plan, Window) else 1, 0
    while lists > 1:
        lists, launches = -(-lists // topk_plan.lists_per_merge(k)), launches + 1
    return launches


def topk_rows(x, k, plan, where=None, temperature=ONE, log=False, dtype=F32, interpret=INTERPRET):
    """Returns the winners and normalizers of the rows of x; without a temperature, the winners as they are and None."""
    *batch, v = x.shape
    mask = None
    if where is not None:
        rows = folding.mask_rows(where.shape[:-1], tuple(batch))
        mask = folding.Mask(jnp.asarray(where.reshape(-1, where.shape[-1])), rows)
    kernel = tile_kernel if isinstance(plan, Tile) else window_kernel
    x, t = jnp.asarray(x.reshape(-1, v)), None if temperature is None else jnp.asarray(temperature)
    if interpret is not None and isinstance(plan, Window):
        plan = dataclasses.replace(plan, compact=False)  # the interpreter never lists positions
    with interpreted(interpret):
        request = merge_kernel.Request(k, x.dtype, mask is not None, log, dtype, temperature is not ONE, t is not None)
        return kernel.topk_rows(x, mask, t, plan, request)


def topk_grad_rows(x, t, indices, m, d, g, g_d, *, log, interpret=INTERPRET):
    """Returns the cotangents of the logits and of each row's temperature. The interpreter gets a tile of few rows."""
    plan = topk_plan.plan_topk_grad(x.shape[-1], x.dtype)
    assert plan is not None
    x, indices, g = (jnp.asarray(a) for a in (x, indices, g))
    t, m, d, g_d = (jnp.asarray(a).reshape(-1, 1) for a in (t, m, d, g_d))
    plan = plan if interpret is None else fewer_rows(plan)
    with interpreted(interpret):
        return tile_kernel.topk_grad_rows(plan, (x, t, m, d, indices), None, g, g_d, log=log)


def topk_merge(won, kept, indices, normalizers, temperature, k, log):
    t, parts = None if temperature is None else jnp.asarray(temperature).reshape(-1, 1), normalizers or ()
    with interpreted():
        return merge_kernel.merge_rows(None, won, kept, indices, parts, t, k=k, log=log, dtype=F32, scaled=False)


def assert_top_k(x, k, names, plan, where=None):
    """Asserts that the kernel's winners as they are equal the oracle's, bit by bit except for a NaN's payload."""
    got, normalizer = topk_rows(x, k, plan, where, None, dtype=x.dtype)
    assert normalizer is None
    where = None if where is None else np.broadcast_to(where, x.shape).reshape(-1, x.shape[-1])
    gpu.assert_top_k(got, x.reshape(-1, x.shape[-1]), k, names, where)


def assert_topk(x, k, names, plan, where=None, temperature=ONE, log=False, dtype=F32):
    got = topk_rows(x, k, plan, where, temperature, log, dtype)
    judge_topk(got, x, k, names, where, temperature, log, dtype)


def temperatures(dtype):
    """Returns a temperature for each of FEW rows, or one for all if the values have another dtype than float32."""
    if dtype != F32:
        return np.full(1, 0.7, F32)
    return (np.geomspace(0.1, 10, len(FEW)) * (np.arange(len(FEW)) % 3 > 0)).astype(F32)


def judge_topk(got, x, k, names, where, temperature, log, dtype, exact_exp=True):
    """Asserts that indices and m are exact, and values and d within the units of float32."""
    winners, (m, d) = got
    if where is not None:
        where = np.broadcast_to(where, x.shape).reshape(-1, x.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    t = temperature[0] if len(temperature) == 1 else temperature
    assert winners.indices.dtype == jnp.int32 and winners.values.dtype == dtype
    assert winners.indices.shape == winners.values.shape == (len(x), k)
    gpu.assert_topk(winners, x, k, names, t, where, log, exact_exp=exact_exp)
    assert m.shape == d.shape == (len(x), 1)
    with np.errstate(all="ignore"):
        want_m, tempered = oracle.normalizer(x, where)[0], oracle.tempered(*oracle.at_limit(x, where, t))
        want_d = oracle.normalizer(tempered, where)[1]
    ordinary = np.isfinite(want_m[:, 0])  # otherwise p is NaN for any m and d
    np.testing.assert_allclose(np.asarray(m)[ordinary], want_m[ordinary], rtol=0, atol=bounds.slack(F32))
    np.testing.assert_allclose(np.asarray(d)[ordinary], want_d[ordinary], rtol=2e-5)


# (V, dtype, k, rows)
TOPK_SHORT = [
    (2, F16, 2, FEW), (8, BF16, 5, ALL), (100, F32, 64, FEW), (129, F16, 33, FEW),
    (512, BF16, 8, FEW), (1003, F32, 5, FEW), (1003, BF16, 30, FEW), (1, F32, 1, FEW),
    (2, BF16, 1, FEW), (7, F32, 7, ALL), (8, F16, 8, FEW), (128, F32, 5, ALL),
    (128, BF16, 64, FEW), (512, F32, 1, FEW), (1024, F32, 2, FEW), (64, F32, 64, ALL),
    (512, F32, 100, FEW), (1000, BF16, 200, FEW),
]  # fmt: skip


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
    (Window(1004, 8, 4, 2), F16, 33, [*FEW, "constant"]), (Window(2007, 8, 2, 1), BF16, 300, FEW),
    (Window(1003, 4, 1, 1, 2), F32, 5, FEW), (Window(4203, 4, 8, 4, 3), F32, 1400, ["integers"]),
    (Window(1024, 4, 2, 2), F32, 64, FEW), (Window(2007, 4, 1, 1), F32, 5, FEW),
    (Window(1021, 4, 2, 1), F32, 128, ALL), (Window(1003, 8, 4, 4, 3), BF16, 128, FEW),
    (Window(2048, 8, 2, 2, 5), F16, 1, [*FEW, "constant"]),
    (Window(100, 4, 8, 1), F32, 100, FEW),  # fewer groups than winners
]  # fmt: skip


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
        # distinct, but the best are in few groups: no bound is the usual one
        "sorted by lane": -lane * 64.0 - at // 512,
        "sorted by lane, rising": lane * 64.0 + at // 512,
        "ascending": at - v / 2,
        "descending": v / 2 - at,
    }


CROWDED = [(Window(1003, 8, 4, 4), BF16, 5), (Window(2007, 4, 8, 4, 2), F32, 64), (Window(1203, 4, 8, 8), F32, 128)]


def best_of(keys, k):
    """Returns the places of the k best keys of each row, the lower place first among ties."""
    keys = np.asarray(keys, "int64")
    return np.lexsort((np.broadcast_to(np.arange(keys.shape[-1]), keys.shape), -keys), -1)[..., :k]


def assert_merged(tile, vocab, k, keys, lanes=None):
    """Asserts that the program of merges finds the columns of the k best in rows of 32-bit keys."""
    program = merging.search_program(tile, vocab, k, lanes)
    columns = ptx.tile_of(ptx.run_on_tile(program, ptx.held_by_threads(tile, keys)), merged_tile(tile, k), "winner")
    np.testing.assert_array_equal(columns[:, :k], best_of(keys[:, :vocab], k))


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
