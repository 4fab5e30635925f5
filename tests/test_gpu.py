"""On a GPU: the kernels through the public functions, `mosaic_gpu` and `triton`. Run with `pytest -m gpu -n 0`.

`-k triton` is all of triton's tests; `-k "not triton"` is the others, which need a Hopper or newer.
"""

import csv
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax import paper
from pallas_softmax.implementations.triton import implementation as triton
from pallas_softmax.implementations.triton import plan as triton_plan
from pallas_softmax.implementations.triton import support as triton_support
from tests.programs import paper_traffic
from tests.support import bounds, cases, kernels, oracle, paper_checks
from tests.support.bounds import UNITS
from tests.support.cases import BF16, F16, F32
from tests.support.kernels import ALL, CROWDED, FEW, PARTS, TOPK_SHORT, WINDOWS, Parts, Window

pytestmark = pytest.mark.gpu


THREADS = 14  # that compile
CAPABILITY = {"mosaic_gpu": 9.0, "triton": 8.0}
MAX_K = {"mosaic_gpu": kernels.MAX_K, "triton": triton_plan.MAX_K}
both = pytest.mark.parametrize("implementation", [*CAPABILITY])
only_triton = pytest.mark.parametrize("implementation", ["triton"])


def unavailable(implementation):
    """Why its kernels cannot run on this machine; None if they can."""
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if not gpus:
        return "no GPU is visible to JAX"
    found, least = gpus[0].compute_capability, CAPABILITY[implementation]
    if float(found) < least:
        return f"compute capability {found}, {implementation} needs {least}"
    return triton_support.missing() if implementation == "triton" else None


@pytest.fixture(autouse=True)
def _needs_a_gpu(request, monkeypatch):
    """One for the parameter `implementation` of the test; without one, the test is of mosaic_gpu."""
    implementation = "mosaic_gpu"
    if "implementation" in request.fixturenames:
        implementation = request.getfixturevalue("implementation")
    reason = unavailable(implementation)
    if reason is not None:
        pytest.skip(reason)
    if implementation == "triton" and request.function in SIDE_BY_SIDE:
        result = request.getfixturevalue("triton_results")[request.node.nodeid]
        monkeypatch.setattr(request.node, "obj", lambda **_: result.result())


SIDE_BY_SIDE = set()


def side_by_side(test):
    """Has the triton cases of the test run in threads: Triton takes 1 to 10 seconds to compile a kernel."""
    SIDE_BY_SIDE.add(test)
    return test


@pytest.fixture(scope="module")
def triton_results(request):
    """By node id, the results of all selected cases that run side by side."""
    with ThreadPoolExecutor(THREADS) as pool:
        return {
            item.nodeid: pool.submit(item.function, **item.callspec.params)
            for item in request.session.items
            if item.function in SIDE_BY_SIDE and item.callspec.params["implementation"] == "triton"
        }


def function(implementation, op, where=None):
    """The public function over the last axis, with the kernel named; rows keep their dimension."""
    kept = {"keepdims": True} if op == "logsumexp" else {}
    return lambda x: getattr(ps, op)(x, -1, where=where, implementation=implementation, **kept)


@functools.partial(jax.jit, static_argnames=("implementation", "op"))
def forward_and_grad(implementation, op, x, dy, where=None):
    y, pullback = jax.vjp(function(implementation, op, where), x)
    return y, pullback(dy)[0]


def operands(op, x, where=None):
    """x and dy, with what must not be seen where they are masked."""
    dy = np.resize(cases.rows(["peaked", "normal", "integers"], x.shape[-1], x.dtype), x.shape)
    dy = dy[..., :1] if op == "logsumexp" else dy
    if where is None:
        return x, dy
    return cases.spoilt(x, where), dy if op == "logsumexp" else cases.spoilt(dy, where)


def assert_forward_and_grad(implementation, op, x, names, where=None, dy=None):
    x, given = operands(op, x, where)
    dy = given if dy is None else dy
    judge(op, forward_and_grad(implementation, op, x, dy, where), x, dy, names, where)


def judge(op, got, x, dy, names, where):
    """The backward is judged on the y of the forward, which is judged itself."""
    y, dx = map(np.asarray, got)
    bounds.assert_operation(op, y, (x,), names, where)
    if op == "logsumexp":
        want, unit = oracle.logsumexp_vjp(x, dy, -1, where), bounds.logsumexp_vjp_unit(x, dy, -1, where)
        bounds.assert_close(dx, want, unit, names, 1 + np.abs(dy.astype(F32)))
    else:
        bounds.assert_operation(f"{op}_grad", dx, (y, dy), names, where)


@functools.partial(jax.jit, static_argnames=("implementation", "k", "log", "dtype"))
def topk(implementation, x, k, temperature=1.0, where=None, log=False, dtype=None):
    return ps.fused_topk(
        x, k, where=where, temperature=temperature, log=log, dtype=dtype, implementation=implementation
    )


def refused(implementation, v, k):
    """Whether the implementation has no kernel for so many winners; asserts that it then says so."""
    limit = MAX_K[implementation]
    if k <= limit:
        return False
    with pytest.raises(NotImplementedError, match=f"k={k} is not from 1 to {limit}"):
        topk.eval_shape(implementation, jax.ShapeDtypeStruct((3, v), F32), k)
    return True


def assert_topk(got, x, k, names, temperature=1.0, where=None, log=False):
    """Indices exactly. The exponential is approximate: x - m costs eps |x - m| in each term of d.

    `got` may be of the rows of x again and again.
    """
    values, indices = map(np.asarray, got)
    want, best = oracle.fused_topk(x, k, where, temperature, log)
    for i, name in enumerate(names):
        alike = np.broadcast_to(best[i], indices[i :: len(x)].shape)
        np.testing.assert_array_equal(indices[i :: len(x)], alike, err_msg=name)
    t = np.reshape(np.asarray(temperature, F32), (-1, 1))
    with np.errstate(all="ignore"):
        terms = np.nansum(bounds.softmax_unit(x.astype(F32) / t, where=where), -1, keepdims=True)
        unit = bounds.fused_topk_unit(x, k, where, temperature, log) + terms * (1 if log else want)
    repeats = len(values) // len(x)
    bounds.assert_close(values, np.tile(want, (repeats, 1)), np.tile(unit, (repeats, 1)), [*names] * repeats)


# --- Shapes, dtypes, special rows ---------------------------------------------------------------------


def some(v):
    """The oracle in float64 takes its time: all rows where they are short, and every class where long."""
    return ALL if v <= 10000 else [*list(cases.FINITE)[:6], "huge", "everything", "neg_inf_last", "nan_last"]


LONG = [*list(cases.FINITE)[:5], "everything", "nan_last"]
VERY_LONG = ["peaked", "integers", "neg_inf_last"]
# Rows in registers, in one CTA, a cluster, a cluster of unequal parts, two launches; one row, or a prime of them.
SHAPES = [
    (1, F32, ALL),
    (2, BF16, ALL),
    (127, F16, ALL),
    (128, F32, ALL),
    (129, BF16, ALL),
    (1000, F32, ALL),
    (1000, F16, ALL),
    (1000, BF16, FEW[:1]),
    (20011, F32, ALL),
    (50257, F32, LONG[:1]),
    (50257, BF16, LONG),
    (128256, F16, LONG),
    (151935, F32, VERY_LONG),
    (151935, BF16, LONG),
    (151936, BF16, VERY_LONG[:1]),
    (262144, F32, VERY_LONG),
    (262144, BF16, VERY_LONG),
    (1000003, F32, VERY_LONG[:2]),
]
each = pytest.mark.parametrize("op", oracle.FORWARD)


@pytest.mark.parametrize(("v", "dtype", "names"), SHAPES, ids=[f"{len(n)}x{v}-{d}" for v, d, n in SHAPES])
@each
@both
@side_by_side
def test_forward_and_grad(implementation, op, v, dtype, names):
    assert_forward_and_grad(implementation, op, cases.rows(names, v, dtype), names)


MASKED = [("softmax", 1003, F32, pattern) for pattern in cases.BROADCASTS]
MASKED += [(op, 50257, BF16, p) for op in ("log_softmax", "logsumexp") for p in ("bhqv", "b11v", "1h11")]


@pytest.mark.parametrize(("op", "v", "dtype", "pattern"), MASKED, ids=str)
@both
@side_by_side
def test_where(implementation, op, v, dtype, pattern):
    shape = (*cases.BATCH, v)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], v, dtype), shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    assert_forward_and_grad(implementation, op, x, names, cases.broadcast_mask(pattern, shape))


CLUSTERS = [
    (Parts(1003, 4, 2, 2, True), F32, ALL),
    (Parts(2003, 8, 4, 4, True), BF16, [*ALL, "normal"]),
    (Parts(2048, 4, 1, 8, True), F32, FEW),
    (Parts(16 * 400, 8, 1, 16, True), F16, FEW),
]


PLANS = [(*plan, False) for plan in PARTS + CLUSTERS] + [(*plan, True) for plan in CLUSTERS[:2]]


@pytest.mark.parametrize(("plan", "dtype", "names", "masked"), PLANS, ids=str)
@pytest.mark.parametrize("name", oracle.OPERATIONS)
def test_every_plan(name, plan, dtype, names, masked):
    x = cases.rows(names, plan.vocab, dtype)
    kernels.assert_softmax(
        name, x, names, cases.broadcast_mask("bv", x.shape) if masked else None, plan, interpret=None
    )


# --- Top-k --------------------------------------------------------------------------------------------

TOPK = [
    (1, F32, 1),
    (8, BF16, 2),
    (127, F16, 16),
    (128, BF16, 64),
    (512, F32, 5),
    (1000, F32, 128),
    (1000, F32, 1000),
    (4096 + 8, F16, 64),
    (10000, BF16, 5),
    (25000, F32, 1),
    (25000, F32, 5),
    (25000, F32, 64),
    (25000, F32, 128),
    (25000, F32, 300),
    (25000, F32, 1024),
    (50257, F32, 5),
    (50257, BF16, 64),
    (50257, F16, 2048),
    (128256, F32, 5),
    (151936, BF16, 64),
    (262144, F32, 2048),
    (1000003, F32, 5),
]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("v", "dtype", "k"), TOPK, ids=str)
@both
@side_by_side
def test_topk(implementation, v, dtype, k, many):
    """Few rows, which are split where they are long; and so many that they are not, or less."""
    if refused(implementation, v, k):
        return
    names = VERY_LONG[:2] if v > 300_000 else some(v)
    x = cases.rows(names, v, dtype)
    got = topk(implementation, jnp.tile(x, (1 + 128 // len(names) if many else 1, 1)), k)
    assert (len(got.values) > 128) == many
    assert got.values.dtype == dtype and got.indices.dtype == jnp.int32
    assert_topk(got, x, k, names)


TOPK_MASKED = [(100, F32, 5, pattern) for pattern in cases.BROADCASTS]
TOPK_MASKED += [(20011, F32, 300, pattern) for pattern in ("bhqv", "1hqv", "b1q1")]
TOPK_MASKED += [(50257, BF16, 64, pattern) for pattern in ("bhqv", "b11v", "1h11")]
TOPK_MASKED += [(129, F16, 129, "bhqv"), (131072, F32, 2048, "bhqv")]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("v", "dtype", "k", "pattern"), TOPK_MASKED, ids=str)
@both
@side_by_side
def test_topk_where(implementation, v, dtype, k, pattern, log):
    """NaN and infinities where it masks; the first row of the mask keeps nothing; a temperature per row."""
    if refused(implementation, v, k):
        return
    shape = (*cases.BATCH, v)
    where = cases.broadcast_mask(pattern, shape)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], v, dtype), shape)
    x = cases.spoilt(x, where)
    t = np.resize(np.array([0.5, 1, 3], F32), shape[:-1])
    got = jax.tree.map(lambda a: np.asarray(a).reshape(-1, k), topk(implementation, x, k, t, where, log))
    np.testing.assert_array_equal(got.indices[0], np.arange(k))
    np.testing.assert_array_equal(got.values[0].astype(F32), -np.inf if log else 0)
    rows, where = x.reshape(-1, v), np.broadcast_to(where, shape).reshape(-1, v)
    assert_topk(got, rows, k, [f"row {at}" for at in np.ndindex(cases.BATCH)], t.ravel(), where, log)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(("v", "k"), [(100, 5), (20011, 5), (50257, 300)], ids=str)
@pytest.mark.parametrize("log", [False, True])
@both
@side_by_side
def test_topk_values_of_another_dtype(implementation, v, k, log, dtype):
    """And one temperature for all rows."""
    if refused(implementation, v, k):
        return
    x = cases.rows(some(v), v, BF16)
    got = topk(implementation, x, k, 0.7, log=log, dtype=dtype.name)
    assert got.values.dtype == dtype
    assert_topk(got, x, k, some(v), np.float32(0.7), log=log)


WINDOW_PLANS = [*WINDOWS, *((plan, dtype, k, None) for plan, dtype, k in CROWDED)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("plan", "dtype", "k", "names"), WINDOW_PLANS, ids=str)
def test_every_window_of_topk(plan, dtype, k, names, masked):
    if names is None:
        rows = {name: row for group in kernels.crowded(plan.vocab, k, dtype) for name, row in group.items()}
        names, x = [*rows], np.stack([*rows.values()]).astype(dtype)
    else:
        x = cases.rows(names, plan.vocab, dtype)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoilt(x, where) if masked else x
    assert_topk(kernels.topk_rows(x, k, plan, where, interpret=None)[0], x, k, names, where=where)


@pytest.mark.parametrize(("v", "dtype", "k", "names"), TOPK_SHORT, ids=str)
@both
@side_by_side
def test_every_tile_of_topk(implementation, v, dtype, k, names):
    """The last one of them is not full, too."""
    x = cases.rows(names, v, dtype)
    for repeats in (1, 37):
        got = topk(implementation, np.tile(x, (repeats, 1)), k, dtype="float32")
        assert_topk(got, x, k, names)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("v", "k"),
    [(2, 2), (8, 3), (64, 6), (64, 40), (128, 8), (128, 128), (257, 33), (512, 16), (512, 100), (1000, 5)],
)
def test_tiles_of_keys_that_differ_in_their_lowest_bits(v, k, masked):
    """They are not in the order of their packed keys; a warp has other rows besides."""
    rows = kernels.neighbours(v)
    x = np.stack([*rows.values()] * 19)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoilt(x, where) if masked else x
    got = ps.fused_topk(x, k, where=where, dtype="float32", implementation="mosaic_gpu")
    assert_topk(got, x, k, [*rows] * 19, where=where)


@both
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("v", [1000, 25000, 50257])
def test_both_modes(implementation, v, dtype):
    """softmax's tangent is the kernel of its gradient, bit for bit; the others agree with those of plain JAX.

    A tangent is a sum in which terms as large as those of dx may cancel, so the error is relative to these.
    """
    x, dx = (cases.rows(names, v, dtype) for names in (["normal", "peaked"], ["integers", "normal"]))

    def tangent(f):
        return jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(x, dx)

    got = tangent(function(implementation, "softmax"))
    want = jax.jit(lambda x, dx: jax.vjp(function(implementation, "softmax"), x)[1](dx)[0])(x, dx)
    np.testing.assert_array_equal(got, want)
    for f in (
        lambda x, name: function(name, "log_softmax")(x),
        lambda x, name: function(name, "logsumexp")(x),
        lambda x, name: ps.fused_topk(x, 5, log=True, implementation=name).values,
    ):
        got, want = (tangent(functools.partial(f, name=name)) for name in (implementation, "xla"))
        atol = 8 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(dx, "float64")).max()
        np.testing.assert_allclose(np.asarray(got, "float64"), np.asarray(want, "float64"), rtol=0, atol=atol)
        assert np.abs(np.asarray(got, "float64")).max() > 100 * atol or dtype == BF16


def test_topk_merges_of_merges(monkeypatch):
    """Two lists at a time: three launches after the first."""
    kernels.merge_so_many_lists(monkeypatch, 2)
    x = cases.rows(FEW, 2007)
    assert_topk(kernels.topk_rows(x, 5, Window(2007, 4, 1, 1, 5), interpret=None)[0], x, 5, FEW)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("v", "dtype", "k"),
    [
        (4096 + 8, F32, 5),
        (4096 + 8, F32, 128),
        (4096 + 8, BF16, 5),
        (4096 + 8, F16, 64),
        (25000, F32, 300),
        (50257, BF16, 5),
        (50257, F32, 1024),
    ],
    ids=str,
)
@both
@side_by_side
def test_topk_of_more_candidates_than_slots(implementation, v, dtype, k, many):
    """Of Mosaic the exact path: bisection over the keys, and ties in order of their indices."""
    if refused(implementation, v, k):
        return
    rows = {name: row for group in kernels.crowded(v, k, dtype) for name, row in group.items()}
    x = np.stack([*rows.values()]).astype(dtype)
    assert_topk(topk(implementation, jnp.tile(x, (10 if many else 1, 1)), k), x, k, list(rows))


@pytest.mark.parametrize(("v", "k"), [(4104, 100), (4104, 128), (4104, 300), (25000, 2048)], ids=str)
def test_topk_of_winners_in_one_bucket(v, k):
    """They are counted, or sorted where there is room for more than 256 candidates."""
    rows = kernels.bunched(v)
    assert_topk(topk("mosaic_gpu", np.stack([*rows.values()]), k), np.stack([*rows.values()]), k, [*rows])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("v", [100, 1000, 50257])
@both
@side_by_side
def test_topk_grad(implementation, v, masked, log):
    x = cases.rows(["normal", "peaked", "integers", "one_winner"], v)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoilt(x, where) if masked else x
    t, g = np.array([0.5, 1, 2, 3], F32), cases.cotangent((4, 5))

    @jax.jit
    def grad(x, t, g, where):
        return jax.vjp(lambda x, t: topk(implementation, x, 5, t, where, log).values, x, t)[1](g)

    dx, dt = grad(x, t, g, where)
    want_dx, want_dt = oracle.fused_topk_vjp(x, g, 5, where, t, log)
    unit_dx, unit_dt = bounds.fused_topk_vjp_unit(x, g, 5, where, t, log)
    # p is formed again from x, m and d: the units of the forward twice
    flushed = 1 + np.sum(np.abs(g), -1, keepdims=True) / t[:, None]  # a denormal p, times this
    assert bounds.error_units(dx, want_dx, unit_dx, slack_times=flushed) <= 4 * UNITS
    assert bounds.error_units(dt, want_dt, unit_dt) <= 4 * UNITS
    if masked:
        assert not np.asarray(dx)[~where].any()


# --- Random rows --------------------------------------------------------------------------------------


def random_logits(rng, rows, v, dtype):
    """Of every scale, with ties, infinities and NaNs of both signs."""
    x = rng.standard_normal((rows, v)) * rng.choice([0.01, 1, 10, 1000], (rows, 1))
    x = np.where(rng.random((rows, 1)) < 0.3, np.round(x * rng.choice([0.2, 1])), x)  # ties
    for special in (-np.inf, np.inf, np.nan, cases.NEG_NAN, -0.0):
        share = rng.choice([0, 0, 0, 0.001, 0.5], (rows, 1))
        if share.any():
            x = np.where(rng.random(x.shape) < share, special, x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


SEED = 20261121


def adversarial_logits(rng, rows, v, dtype):
    """What is hard for top-k: ties, order, the best in few places, and what is not a number."""
    at = np.arange(v)
    start, size = rng.integers(v), rng.integers(1, 2 + v // 4)
    vec = 16 // dtype.itemsize
    normal = rng.standard_normal(v)
    kinds = [
        np.full(v, rng.choice([0.0, -0.0, 1.5, -7.0])),
        np.linspace(-20, 20, v),
        np.linspace(20, -20, v),
        rng.choice([1.0, -1.0], v),
        np.where((at >= start) & (at < start + size), normal + 30, normal),  # the best side by side
        np.where(at // vec % 128 == rng.integers(128), normal + 30, normal),  # and of one thread
        np.where(at % 3 == 0, np.nan, normal),
        np.where(at % 3 == rng.integers(3), cases.NEG_NAN, normal),
        rng.choice([np.nan, cases.NEG_NAN, np.inf, -np.inf], v),
        np.full(v, cases.NEG_NAN),
        np.full(v, -np.inf),
        np.where(at == start, 1.0, -np.inf),
        np.where(at == start, 1.0, cases.NEG_NAN),
        np.where(at < start, -np.inf, cases.NEG_NAN),
    ]
    return np.stack([kinds[i] for i in rng.integers(len(kinds), size=rows)]).astype(dtype)


def random_shapes(count, max_k):
    """Of top-k: V and k (up to max_k) log-uniform; the rows of a call, and the calls; the mask's pattern, and log."""
    for shape in range(count):
        rng = np.random.default_rng([SEED, shape])
        v = int(np.exp(rng.uniform(0, np.log(300_000))))
        v += (-v) % int(rng.choice([1, 8]))
        k = int(np.exp(rng.uniform(0, np.log(min(v, max_k) + 1))))
        dtype, pattern, log = (
            rng.choice([F32, BF16, F16]),
            rng.choice([None, None, "bv", "1v", "b1"]),
            rng.choice(2),
        )
        some_calls = [(1, 30), (30, 1), (150, 1)] if v > 30_000 else [(1, 40), (5, 24), (25, 6), (150, 1)]
        rows, calls = some_calls[rng.integers(len(some_calls))]
        yield rng, v, k, dtype, pattern, bool(log), rows, calls


@both
def test_random_topk(implementation, capsys):
    """More than 5,000 rows, random and adversarial, of 60 shapes; of triton 2,500, of 30."""
    count, least = (30, 2500) if implementation == "triton" else (60, 5000)
    total = 0

    def check_row(i, values, indices, x, k, name, t, where, log):
        one = None if where is None else where[i : i + 1]
        got = ps.TopK(values[i : i + 1], indices[i : i + 1])
        assert_topk(got, x[i : i + 1], k, [f"{name} row {i}"], t[i : i + 1], one, log)

    def compile_it(shape):
        _, v, k, dtype, pattern, log, rows, _ = shape
        where = None if pattern is None else cases.broadcast_mask(pattern, (rows, v))
        topk(implementation, np.zeros((rows, v), dtype), k, np.ones(rows, F32), where, log)

    shapes = list(random_shapes(count, MAX_K[implementation]))
    if implementation == "triton":
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(compile_it, shapes))
    with ThreadPoolExecutor() as pool:  # the oracle's time is NumPy's
        for shape, (rng, v, k, dtype, pattern, log, rows, calls) in enumerate(shapes):
            for call in range(calls):
                make = adversarial_logits if call % 2 or rng.random() < 0.5 else random_logits
                x, t = make(rng, rows, v, dtype), rng.choice([0.5, 1, 2], rows).astype(F32)
                where = None if pattern is None else cases.broadcast_mask(pattern, x.shape, seed=call)
                x = x if where is None else cases.spoilt(x, where)
                values, indices = map(np.asarray, topk(implementation, x, k, t, where, log))
                name = f"seed {SEED}, {shape}.{call}: {rows}x{v} {dtype} k={k} {pattern} log={log}"
                full = None if where is None else np.broadcast_to(where, x.shape)
                tasks = [
                    pool.submit(check_row, i, values, indices, x, k, name, t, full, log) for i in range(rows)
                ]
                for task in tasks:
                    task.result()
                total += rows
    with capsys.disabled():
        print(f"\n{total} random rows of top-k by {implementation}, seed {SEED}")
    assert total >= least


def random_softmax(shape, rows_each):
    """A shape's calls: op, x, dy, where and the rows' names."""
    rng = np.random.default_rng([SEED, shape])
    op = oracle.FORWARD[shape % 3]
    v = int(np.exp(rng.uniform(0, np.log(300_000))))
    v, dtype = v + (-v) % rng.choice([1, 8]), rng.choice([F32, BF16, F16])
    rows, pattern = int(rng.choice([1, 5, 25, 125])), rng.choice([None, None, "bv", "1v", "b1"])
    for draw in range(rows_each // rows):
        x = random_logits(rng, rows, v, dtype)
        names = [
            f"seed {SEED}, {shape}.{draw}: {op} {rows}x{v} {dtype} {pattern} row {i}" for i in range(rows)
        ]
        where = None if pattern is None else cases.broadcast_mask(pattern, x.shape, seed=draw)
        dy_shape = (rows, 1 if op == "logsumexp" else v)
        dy = (rng.standard_normal(dy_shape) * rng.choice([0.01, 1, 10], (rows, 1))).astype(dtype)
        yield op, x, dy, where, names


@both
def test_random_rows(implementation, capsys):
    """5,000 of them, forward and backward: 40 shapes of log-uniform V, each with 125 rows of random values."""
    shapes, rows_each = 40, 125
    with capsys.disabled():
        print(f"\n{shapes * rows_each} random rows by {implementation}, seed {SEED}")

    def check_shape(shape):
        for op, x, dy, where, names in random_softmax(shape, rows_each):
            assert_forward_and_grad(implementation, op, x, names, where, dy)

    # in threads Triton's compilation takes little time; Mosaic's does anyway
    with ThreadPoolExecutor(THREADS if implementation == "triton" else 1) as pool:
        list(pool.map(check_shape, range(shapes)))


@pytest.mark.parametrize("shape", [(1031, 1000), (1031, 50257), (3, 1000003)], ids=str)
@each
@both
@side_by_side
def test_repeated_runs_give_the_same_bits(implementation, op, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(BF16)
    dy = x[:, :1] if op == "logsumexp" else x
    runs = [[np.asarray(a).tobytes() for a in forward_and_grad(implementation, op, x, dy)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("rows", "v", "k"), [(1031, 100, 5), (1031, 25000, 64), (1031, 50257, 5), (3, 262144, 300)], ids=str
)
@both
@side_by_side
def test_repeated_topk_gives_the_same_bits(implementation, rows, v, k, masked):
    if refused(implementation, v, k):
        return
    x = np.random.default_rng(1).standard_normal((rows, v)).astype(F32)
    x[::7] = np.round(x[::7])
    where = x[:1] < 2 if masked else None
    runs = [[np.asarray(a).tobytes() for a in topk(implementation, x, k, where=where)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


MANY = [(8200, 262144), (70000, 30720), (42744, 50257), (2_200_000, 1000)]  # 65535 is a grid's limit
MANY_ROWS = [("mosaic_gpu", op, *shape) for op in oracle.FORWARD for shape in MANY]
MANY_ROWS += [("triton", "softmax", *shape) for shape in MANY] + [("triton", "logsumexp", *MANY[-1])]


@pytest.mark.parametrize(("implementation", "op", "rows", "v"), MANY_ROWS, ids=str)
def test_more_elements_than_32_bits_count(implementation, op, rows, v):
    """Eight rows again and again, so each at one alignment: all alike, bit for bit, the first ones right."""
    few = 8
    x = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)

    @jax.jit
    def run(x):
        repeated = jnp.arange(rows) % few
        y = function(implementation, op)(x[repeated])
        return y[:few], jnp.all(y == y[:few][repeated])

    assert rows * v > 2**31
    y, alike = run(x)
    bounds.assert_operation(op, y, (x,), [f"row {i}" for i in range(few)])
    assert alike


MANY_OF_TOPK = [(4_194_312, 512), (70000, 30720), (42744, 50257), (8200, 262144)]


@pytest.mark.parametrize(
    ("implementation", "masked"), [("mosaic_gpu", False), ("mosaic_gpu", True), ("triton", True)]
)
@pytest.mark.parametrize(("rows", "v"), MANY_OF_TOPK, ids=str)
def test_more_elements_of_topk_than_32_bits_count(implementation, rows, v, masked):
    """As above: rows in registers, of one CTA, of two parts and of more."""
    few, k = 8, 5
    x = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)
    where = np.random.default_rng(3).random((few, v)) < 0.7 if masked else None

    @jax.jit
    def run(x, where):
        repeated = jnp.arange(rows) % few
        got = topk(implementation, x[repeated], k, where=None if where is None else where[repeated])
        alike = [jnp.all(a == a[:few][repeated]) for a in got]
        return ps.TopK(*(a[:few] for a in got)), alike

    assert rows * v > 2**31
    got, alike = run(x, where)
    assert_topk(got, x, k, [f"row {i}" for i in range(few)], where=where)
    assert all(alike)


# --- One implementation as the others ----------------------------------------------------------------


def others(implementation):
    """The implementations to compare with: mosaic_gpu may not run here."""
    return ["xla", *(name for name in CAPABILITY if name != implementation and not unavailable(name))]


SAME = [  # (V, dtype, k, how often the rows are repeated, whether there is a mask)
    (7, F32, 7, 1, False),
    (129, F16, 33, 5, True),
    (1000, BF16, 64, 1, False),
    (1003, F32, 5, 20, True),
    (20011, F32, 256, 1, False),
    (50257, F32, 5, 1, True),
    (50257, BF16, 64, 20, False),
    (128256, BF16, 128, 1, False),
]


@only_triton
@pytest.mark.parametrize(("v", "dtype", "k", "repeats", "masked"), SAME, ids=str)
@side_by_side
def test_every_implementation_gives_the_same_indices(implementation, v, dtype, k, repeats, masked):
    """The same call of triton, of mosaic_gpu, where that can run, and of xla, all on the GPU."""
    x = np.tile(cases.rows(ALL if v <= 20011 else LONG, v, dtype), (repeats, 1))
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoilt(x, where) if masked else x
    values, indices = map(np.asarray, topk(implementation, x, k, where=where))
    tolerance = {"rtol": max(1e-4, 2 * bounds.eps(dtype)), "atol": 2 * bounds.slack(dtype)}
    for other in others(implementation):
        got = topk(other, x, k, where=where)
        np.testing.assert_array_equal(got.indices, indices, err_msg=other)
        got = np.asarray(got.values).astype(F32)
        np.testing.assert_allclose(got, values.astype(F32), **tolerance, err_msg=other)


@only_triton
@pytest.mark.parametrize("masked", [False, True])
@each
@side_by_side
def test_every_implementation_gives_the_same_gradient(implementation, op, masked):
    v = 1003
    x = cases.rows(ALL, v)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x, dy = operands(op, x, where)
    y, dx = map(np.asarray, forward_and_grad(implementation, op, x, dy, where))
    unit, unit_dx = (getattr(bounds, f"{op}{name}_unit") for name in ("", "_vjp"))
    seen = dy if where is None or op == "logsumexp" else np.where(where, dy, 0)
    units = unit(x, -1, where), unit_dx(x, seen, -1, where)
    slacks = 1, 1 + np.sum(np.abs(seen), -1, keepdims=True)  # a denormal p may be flushed
    for other in others(implementation):
        for got, want, unit, slack in zip(forward_and_grad(other, op, x, dy, where), (y, dx), units, slacks):
            unit = unit if unit.ndim == 2 else unit[:, None]
            assert bounds.error_units(got, want, unit, slack_times=slack) <= 4 * UNITS, other


# --- Every plan of triton -----------------------------------------------------------------------------


def failures(check, plans):
    """What check(plan) raises, of all plans, in threads."""

    def run(plan):
        try:
            check(*plan)
        except Exception as e:
            return f"{plan}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"

    with ThreadPoolExecutor(THREADS) as pool:
        return [failure for failure in pool.map(run, plans) if failure]


def triton_topk_plans():
    """(V, dtype, k, plan): few that hold every program, levels, sort and merge that `topk_plan` can choose.

    Each sort is of another layout, of which Triton may miscompile some: 3.6 does so with 2048 groups of one.
    """
    lengths = (1, 2, 17, 127, 400, 1000, 1500, 3000, 5000, 10000, 20000, 40000, 70000, 128256, 300000)
    lengths += (1003, 3001, 10002, 20011, 50257, 100002, 151935, 300001)  # off 16 bytes
    every = {}
    for k, v, rows, dtype in itertools.product(
        (1, 2, 5, 9, 16, 17, 33, 64, 65, 128, 256), lengths, (2, 64, 500), (F32, BF16)
    ):
        if k <= v:
            plan = triton_plan.plan_topk(rows, v, k, dtype)
            fan = triton_plan.merge_fan_in(plan.parts, plan.slots)
            every.setdefault((plan, dtype), (v, dtype, k, plan, fan))

    def has(plan, fan):
        """What there is of it to compile."""
        found = {(plan.slots, plan.groups, plan.vec, plan.warps), plan.levels}
        found |= {("sort", plan.slots, plan.warps, slabs * plan.vec, size) for slabs, size in plan.levels}
        return found | ({("merge", plan.slots, fan)} if fan > 1 else set())

    chosen, missing = [], set().union(*(has(*case[3:]) for case in every.values()))
    while missing:
        best = max(every.values(), key=lambda case: len(has(*case[3:]) & missing))
        missing -= has(*best[3:])
        chosen.append(best[:4])
    return chosen


@only_triton
def test_every_triton_plan_of_topk(implementation):
    def check(v, dtype, k, plan):
        x = cases.rows(["normal", "integers"] * 4, v, dtype)  # none twice
        run = functools.partial(triton.topk, k=k, log=False, dtype=jnp.dtype(F32), plan=plan)
        winners, _ = jax.jit(run)(x, None, np.ones((1, 1), F32))
        np.testing.assert_array_equal(winners[1], oracle.topk_indices(x, k))

    plans = triton_topk_plans()
    failed = failures(check, plans)
    assert not failed, f"{len(failed)} of {len(plans)} plans\n" + "\n".join(failed)


def triton_softmax_plans():
    """(operation, V, dtype, plan), a few of each program that `plan` can choose."""
    lengths = (
        1,
        2,
        3,
        5,
        9,
        17,
        33,
        65,
        129,
        400,
        1000,
        1500,
        3000,
        5000,
        10000,
        20000,
        40000,
        50257,
        128256,
    )
    every = {}
    for op, v, rows, dtype in itertools.product(oracle.OPERATIONS, lengths, (2, 64, 500), (F32, BF16)):
        plan = triton_plan.plan_softmax(op, rows, v, dtype)
        if isinstance(plan, triton_plan.Block):
            program = plan.rows, plan.lanes, plan.warps
        else:
            program = plan.depth, plan.width, plan.warps, plan.parts > 1, v % 8 == 0
        every.setdefault((program, op in oracle.BACKWARD), []).append((op, v, dtype, plan))
    return [options[i % len(options)] for i, options in enumerate(every.values())]


@only_triton
def test_every_triton_plan_of_softmax(implementation):
    names = ["normal", "peaked", "integers"]

    def check(op, v, dtype, plan):
        arrays = cases.operands(op, cases.rows(names, v, dtype))
        out = jax.jit(lambda arrays: triton.softmax_rows(op, arrays, None, (1,), plan))(arrays)
        got = np.asarray(out[0] if op == "logsumexp" else out).astype(dtype)
        bounds.assert_operation(op, got, arrays, names)

    plans = triton_softmax_plans()
    failed = failures(check, plans)
    assert not failed, f"{len(failed)} of {len(plans)} plans\n" + "\n".join(failed)


# --- Which path ran -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("v", [1000, 50257])
@pytest.mark.parametrize("name", [*oracle.FORWARD, "topk"])
@side_by_side
def test_the_named_implementation_runs(implementation, name, v):
    """And no other, forward and backward."""
    x, sums = jax.ShapeDtypeStruct((64, v), BF16), jax.ShapeDtypeStruct((64, 1), BF16)
    if name == "topk":
        lowered = topk.lower(implementation, x, 5)
    else:
        lowered = forward_and_grad.lower(implementation, name, x, sums if name == "logsumexp" else x)
    program = lowered.compile().as_text()
    for other, call in {"mosaic_gpu": "mosaic_gpu", "triton": "triton_kernel_call"}.items():
        assert (call in program) == (other == implementation), program[:2000]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("v", [25000, 50257])
@pytest.mark.parametrize("chosen", [ps.softmax, lambda x: ps.fused_topk(x, 5)], ids=["softmax", "topk"])
def test_the_automatic_choice_runs_the_kernel(chosen, v, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((256, v)).astype(dtype))
    assert ps.explain(chosen, x)[0].cuda == "mosaic_gpu"
    compiled = jax.jit(chosen).lower(x).compile()
    assert "mosaic_gpu" in compiled.as_text()
    name = "mosaic_gpu"
    named = jax.jit(function(name, "softmax")) if chosen is ps.softmax else functools.partial(topk, name, k=5)
    for a, b in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(named(x)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_computation_on_the_cpu_runs_the_plain_implementation():
    x = jax.device_put(np.ones((256, 4096), F32), jax.devices("cpu")[0])
    assert "mosaic_gpu" not in jax.jit(ps.softmax).lower(x).compile().as_text()
    np.testing.assert_allclose(jax.jit(ps.softmax)(x), 1 / 4096, rtol=1e-6)


# --- Memory -------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("masked", [False, True])
@side_by_side
def test_topk_needs_little_memory(implementation, masked):
    """Beside the logits and the mask: a hundred times less than the 2 GB of a softmax."""
    x = jax.ShapeDtypeStruct((4096, 128256), "float32")
    where = jax.ShapeDtypeStruct((1, 128256), "bool") if masked else None
    memory = topk.lower(implementation, x, 64, where=where).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 64 * 2**20


def run_under(tool, *options, script, arguments=()):
    """Runs a program of tests/programs under one of the CUDA toolkit's tools; skips where it is not there."""
    path = shutil.which(tool, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if path is None:
        pytest.skip(f"{tool} is neither on the PATH nor in /usr/local/cuda/bin")
    here = Path(__file__).parent
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process holds most of the memory
    }
    command = [path, *options, sys.executable, str(here / "programs" / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
@both
def test_compute_sanitizer(implementation, tool):
    options = ["--tool", tool, "--error-exitcode", "9"]
    # The driver's errors that JAX handles itself, as when it asks for what the device lacks, are not ours.
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    options += ["--racecheck-report", "hazard", "--print-limit", "100000"] if tool == "racecheck" else []
    done = run_under("compute-sanitizer", *options, script="sanitizer_sweep.py", arguments=[implementation])
    report = f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    if tool == "initcheck":  # blind to what bulk copies write, it minds the copy of results to the host
        assert "Uninitialized __global__ memory read" not in done.stdout, report
    elif tool == "racecheck":
        assert not hazards(done.stdout, implementation), report
    else:
        assert done.returncode == 0, report
    assert f"swept {implementation}" in done.stdout


@pytest.mark.parametrize("name", paper_checks.ALGORITHMS)
@pytest.mark.parametrize("v", [1, 63, 1003, 32256])
def test_paper(name, v):
    static = {} if name in paper.SOFTMAX else {"static_argnums": 1}
    run = jax.jit(paper_checks.ALGORITHMS[name].kernel, **static)
    for k in (5, 30) if v == 32256 and static else (5,):
        paper_checks.check(name, run, v, k, ordered=[n for n in cases.FINITE if n != "signed_zeros"])


def test_paper_overflow():
    paper_checks.check_overflow(lambda name, x: jax.jit(paper.SOFTMAX[name].kernel)(x))


def test_paper_accesses():
    """The bytes that pass between the kernels and the device memory, by its own counters, are those of the paper."""
    counters = ["dram__bytes_read.sum", "dram__bytes_write.sum"]
    options = ["--clock-control", "none", "--kernel-name", "regex:paper", "--metrics", ",".join(counters)]
    done = run_under("ncu", *options, "--csv", "--print-units", "base", script="paper_traffic.py")
    if "ERR_NVGPUCTRPERM" in done.stdout:
        pytest.skip("this user may not read the GPU's performance counters")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    array_bytes = 4 * math.prod(paper_traffic.SHAPE)
    accesses = {counter: [] for counter in counters}
    for line in csv.DictReader(lines):
        value = float(line["Metric Value"].replace(",", ""))
        accesses[line["Metric Name"]].append(value / array_bytes)
    reads, writes = accesses.values()
    # naive, safe, online; top-k; safe and then top-k; safe fused, online fused
    np.testing.assert_allclose(reads, [2, 3, 2, 1, 3, 1, 2, 1], atol=0.03)
    np.testing.assert_allclose(
        writes, [1, 1, 1, 0, 1, 0, 0, 0], atol=0.06
    )  # the last of it stays in the L2 cache
    launches = np.add(reads, writes)
    launches[4:6] = launches[4:6].sum()
    counted = [algorithm.accesses for algorithm in paper_checks.ALGORITHMS.values()]
    np.testing.assert_allclose(np.delete(launches, 5), counted, atol=0.06)


def hazards(report, implementation):
    """The hazards that racecheck reports, but those of Mosaic's cluster barrier and of Triton's reductions.

    Triton's reductions across warps have all lanes of a warp write the warp's result to one slot, by one
    instruction, or several warps write the same value: of a byte, which is what racecheck compares, so that of other
    values another byte is reported. Mosaic's cluster barrier is an mbarrier: what a CTA reads of its peers'
    normalizers is reported. With barrier.cluster in its place nothing was, and the kernels were slower.
    """
    triton = implementation == "triton"
    found = []
    for hazard in re.findall(r"Error: [^\n]*?Potential (.*?Current Value[^\n]*)", report, re.DOTALL):
        threads = re.findall(
            r"(Write|Read) Thread \((\d+),0,0\)(?: \(block rank (\d+)\))? at (\S+) in", hazard
        )
        (_, a, rank_a, at_a), (access, b, rank_b, at_b) = threads
        values = re.search(r"Current Value : (\S+), Incoming Value : (\S+)", hazard)
        one_slot = hazard.startswith("WAW") and at_a == at_b and int(a) // 32 == int(b) // 32
        one_value = hazard.startswith("WAW") and values is not None and values[1] == values[2]
        peers = hazard.startswith("RAW") and rank_a != rank_b and access == "Read"
        if not (triton and (one_slot or one_value) or not triton and peers):
            found.append(hazard)
    return found


def test_hazards_are_found_in_a_report():
    line = "=========     {} Thread ({},0,0){} at kernel+0x{} in kernel.py:1\n"
    report = "========= Error: Potential {} hazard detected at __shared__ 0xc in block (0,0,0) :\n"
    end = "=========     Current Value : {}, Incoming Value : {}\n"

    def hazard(kind, first, second, values=(1, 2)):
        return report.format(kind) + line.format(*first) + line.format(*second) + end.format(*values)

    one_slot = hazard("WAW", ("Write", 96, "", 1), ("Write", 97, "", 1))
    one_value = hazard("WAW", ("Write", 31, "", 1), ("Write", 32, "", 2), (7, 7))
    ranks = " (block rank 0)", " (block rank 1)"
    peers = hazard("RAW", ("Write", 3, ranks[0], 1), ("Read", 4, ranks[1], 2))
    assert not hazards(one_slot + one_value, "triton") and not hazards(peers, "mosaic_gpu")
    assert len(hazards(one_slot + one_value, "mosaic_gpu")) == 2 and len(hazards(peers, "triton")) == 1
    warps = hazard("WAW", ("Write", 31, "", 1), ("Write", 32, "", 1))
    digits = hazard("WAW", ("Write", 31, "", 1), ("Write", 32, "", 1), (1, 12))
    read = hazard("RAW", ("Write", 3, "", 1), ("Read", 4, "", 2), (7, 7))
    overwritten = hazard("WAR", ("Read", 3, "", 1), ("Write", 40, "", 2), (7, 7))
    own = hazard("RAW", ("Write", 3, ranks[0], 1), ("Read", 4, ranks[0], 2))
    shown_alone = read.replace(", Incoming Value : 7", "")
    real = [warps, digits, read, overwritten, own, shown_alone]
    assert len(hazards(one_slot.join(real) + one_value, "triton")) == len(real)
    assert len(hazards("".join(real), "mosaic_gpu")) == len(real)
    assert "Incoming Value : 12" in hazards(digits, "triton")[0]
