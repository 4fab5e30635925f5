"""On a Hopper or newer GPU: the kernels through the public functions. Run with `pytest -m gpu -n 0`."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, F16, F32
from oracle import UNITS
from test_mosaic_interpret import ALL, FEW, PARTS, check, crowded
from test_mosaic_lowering import largest

import pallas_softmax as ps
from pallas_softmax.mosaic_gpu.launch import Parts

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_hopper():
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if not gpus:
        pytest.skip("no GPU is visible to JAX")
    if float(gpus[0].compute_capability) < 9:
        pytest.skip(f"compute capability {gpus[0].compute_capability}, the kernels need 9.0")


IMPLEMENTATION = "mosaic_gpu"


def function(op, where=None):
    """The public function over the last axis, with the kernel named; rows keep their dimension."""
    kept = {"keepdims": True} if op == "logsumexp" else {}
    return lambda x: getattr(ps, op)(x, -1, where=where, implementation=IMPLEMENTATION, **kept)


@functools.partial(jax.jit, static_argnames="op")
def forward_and_grad(op, x, dy, where=None):
    y, pullback = jax.vjp(function(op, where), x)
    return y, pullback(dy)[0]


def operands(op, x, where=None):
    """x and dy, with what must not be seen where they are masked."""
    dy = np.resize(cases.rows(["peaked", "normal", "integers"], x.shape[-1], x.dtype), x.shape)
    dy = dy[..., :1] if op == "logsumexp" else dy
    if where is None:
        return x, dy
    return cases.spoilt(x, where), dy if op == "logsumexp" else cases.spoilt(dy, where)


def assert_forward_and_grad(op, x, names, where=None, dy=None):
    """The backward is judged on the y of the forward, which is judged itself."""
    x, given = operands(op, x, where)
    dy = given if dy is None else dy
    y, dx = map(np.asarray, forward_and_grad(op, x, dy, where))
    oracle.assert_operation(op, y, (x,), names, where)
    if op == "logsumexp":
        want, unit = oracle.logsumexp_vjp(x, dy, -1, where), oracle.logsumexp_vjp_unit(x, dy, -1, where)
        oracle.assert_close(dx, want, unit, names, 1 + np.abs(dy.astype(F32)))
    else:
        oracle.assert_operation(f"{op}_grad", dx, (y, dy), names, where)


@functools.partial(jax.jit, static_argnames=("k", "log"))
def topk(x, k, temperature=1.0, log=False):
    return ps.fused_topk(x, k, temperature=temperature, log=log, implementation="mosaic_gpu")


def assert_topk(got, x, k, names, temperature=1.0):
    """Indices exactly. The exponential is approximate: x - m costs eps |x - m| in each term of d."""
    want, indices = oracle.fused_topk(x, k, temperature=temperature)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(got.indices[i], indices[i], err_msg=name)
    t = np.reshape(np.asarray(temperature, F32), (-1, 1))
    with np.errstate(all="ignore"):
        terms = np.nansum(oracle.softmax_unit(x.astype(F32) / t), -1, keepdims=True)
        unit = oracle.fused_topk_unit(x, k, temperature=temperature) + want * terms
    assert got.values.dtype == x.dtype
    oracle.assert_close(got.values, want, unit, names)


def on_the_cpu(f, *args):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, f(*args))


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
def test_forward_and_grad(op, v, dtype, names):
    assert_forward_and_grad(op, cases.rows(names, v, dtype), names)


MASKED = [("softmax", 1003, F32, pattern) for pattern in cases.BROADCASTS]
MASKED += [(op, 50257, BF16, p) for op in ("log_softmax", "logsumexp") for p in ("bhqv", "b11v", "1h11")]


@pytest.mark.parametrize(("op", "v", "dtype", "pattern"), MASKED, ids=str)
def test_where(op, v, dtype, pattern):
    shape = (*cases.BATCH, v)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], v, dtype), shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    assert_forward_and_grad(op, x, names, cases.broadcast_mask(pattern, shape))


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
    check(name, x, names, cases.broadcast_mask("bv", x.shape) if masked else None, plan, interpret=None)


@pytest.mark.parametrize(
    ("v", "dtype", "k"),
    [
        (4, F32, 4),
        (1000, F32, 5),
        (1000, F32, 128),
        (25000, F32, 5),
        (25000, F32, 64),
        ("largest", F32, 128),
        (8, BF16, 1),
        (10000, BF16, 5),
        (107520, BF16, 64),
        ("largest", BF16, 128),
        (4096 + 8, F16, 64),
    ],
)
def test_topk(v, dtype, k):
    v = largest(dtype.name, k) if v == "largest" else v
    x = cases.rows(some(v), v, dtype)
    got = topk(x, k)
    assert_topk(got, x, k, some(v))
    want = on_the_cpu(jax.lax.top_k, x, k)[1]
    np.testing.assert_array_equal(got.indices, want)


@pytest.mark.parametrize(("dtype", "k"), [(F32, 5), (F32, 128), (BF16, 5), (F16, 64)], ids=str)
def test_more_candidates_than_slots(dtype, k):
    """The exact path: bisection over the keys, then over the positions."""
    rows = {name: row for group in crowded(4096 + 8, k, dtype) for name, row in group.items()}
    x = np.stack([*rows.values()]).astype(dtype)
    assert_topk(topk(x, k), x, k, list(rows))


def test_topk_grad():
    x = cases.rows(["normal", "peaked", "integers", "one_winner"], 1000)
    t, g = np.array([0.5, 1, 2, 3], F32), cases.cotangent((4, 5))
    dx, dt = jax.jit(lambda x, t, g: jax.vjp(lambda x, t: topk(x, 5, t).values, x, t)[1](g))(x, t, g)
    want_dx, want_dt = oracle.fused_topk_vjp(x, g, 5, temperature=t)
    unit_dx, unit_dt = oracle.fused_topk_vjp_unit(x, g, 5, temperature=t)
    # p is formed again from x, m and d: the units of the forward twice
    assert oracle.error_units(dx, want_dx, unit_dx) <= 4 * UNITS
    assert oracle.error_units(dt, want_dt, unit_dt) <= 4 * UNITS


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
TOPK = [
    (1000, F32, 5),
    (4096 + 8, F32, 64),
    (25000, F32, 128),
    (1000, BF16, 5),
    (10000, BF16, 64),
    (1000, F16, 128),
]


def test_random_topk():
    for case in range(300):
        rng = np.random.default_rng([SEED, case])
        v, dtype, k = TOPK[case % len(TOPK)]
        x = random_logits(rng, 7, v, dtype)
        t = rng.choice([0.5, 1, 2], 7).astype(F32)
        names = [f"case {case}, seed {SEED}, {v} {dtype} k={k}, row {i}" for i in range(7)]
        assert_topk(topk(x, k, t), x, k, names, t)


def test_random_rows(capsys):
    """5,000 of them, forward and backward: 40 shapes of log-uniform V, each with 125 rows of random values."""
    shapes, rows_each = 40, 125
    with capsys.disabled():
        print(f"\n{shapes * rows_each} random rows, seed {SEED}")
    for shape in range(shapes):
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
            assert_forward_and_grad(op, x, names, where, dy)


@pytest.mark.parametrize("shape", [(1031, 1000), (1031, 50257), (3, 1000003)], ids=str)
@each
def test_repeated_runs_give_the_same_bits(op, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(BF16)
    dy = x[:, :1] if op == "logsumexp" else x
    runs = [[np.asarray(a).tobytes() for a in forward_and_grad(op, x, dy)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_repeated_topk_gives_the_same_bits():
    x = np.random.default_rng(1).standard_normal((1031, 25000)).astype(F32)
    x[::7] = np.round(x[::7])
    runs = [[np.asarray(a).tobytes() for a in topk(x, 64)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("rows", "v"),
    [
        (8200, 262144),
        (70000, 30720),
        (42744, 50257),
        (2_200_000, 1000),
    ],  # the second: 65535 is a grid's limit
    ids=str,
)
@pytest.mark.parametrize("op", oracle.FORWARD)
def test_more_elements_than_32_bits_count(op, rows, v):
    """Eight rows again and again, so each at one alignment: all alike, bit for bit, the first ones right."""
    few = 8
    x = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)

    @jax.jit
    def run(x):
        repeated = jnp.arange(rows) % few
        y = function(op)(x[repeated])
        return y[:few], jnp.all(y == y[:few][repeated])

    assert rows * v > 2**31
    y, alike = run(x)
    oracle.assert_operation(op, y, (x,), [f"row {i}" for i in range(few)])
    assert alike


def test_more_elements_of_topk_than_32_bits_count():
    """2^31 elements and a few rows: the last ones are right, so offsets have 64 bits."""
    v, few = 16384, 8
    last = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)
    x = jnp.concatenate([jnp.zeros((2**31 // v, v), BF16), last])
    assert x.size > 2**31
    got, want = topk(x, 5), topk(last, 5)
    np.testing.assert_array_equal(got.indices[-few:], want.indices)
    np.testing.assert_array_equal(got.values[-few:].astype(F32), want.values.astype(F32))


# --- Which path ran -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("chosen", [ps.softmax, lambda x: ps.fused_topk(x, 5)], ids=["softmax", "topk"])
def test_the_automatic_choice_runs_the_kernel(chosen, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((256, 25000)).astype(dtype))
    assert ps.explain(chosen, x)[0].cuda == "mosaic_gpu"
    compiled = jax.jit(chosen).lower(x).compile()
    assert "mosaic_gpu" in compiled.as_text()
    named = jax.jit(function("softmax")) if chosen is ps.softmax else functools.partial(topk, k=5)
    for a, b in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(named(x)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_computation_on_the_cpu_runs_the_plain_implementation():
    x = jax.device_put(np.ones((256, 4096), F32), jax.devices("cpu")[0])
    assert "mosaic_gpu" not in jax.jit(ps.softmax).lower(x).compile().as_text()
    np.testing.assert_allclose(jax.jit(ps.softmax)(x), 1 / 4096, rtol=1e-6)


# --- Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    here = Path(__file__).parent
    # The driver's errors that JAX handles itself, as when it asks for what the device lacks, are not ours.
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += ["--racecheck-report", "hazard", "--print-limit", "100000"] if tool == "racecheck" else []
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process holds most of the memory
    }
    command += [sys.executable, str(here / "sanitizer_sweep.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    report = f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    if tool == "initcheck":  # blind to what bulk copies write, it minds the copy of results to the host
        assert "Uninitialized __global__ memory read" not in done.stdout, report
    elif tool == "racecheck":
        assert not hazards(done.stdout), report
    else:
        assert done.returncode == 0, report
    assert "swept" in done.stdout


def hazards(report):
    """The hazards that racecheck reports, but two kinds that are Mosaic's.

    Its reduction across warps has all lanes of a warp write the warp's result to one slot, by one instruction.
    Its cluster barrier is an mbarrier, which racecheck does not follow from CTA to CTA: what a CTA reads of its
    peers' normalizers is reported. With barrier.cluster in its place nothing was, and the kernels were slower.
    """
    found = []
    for hazard in re.findall(r"Error: Potential (.*?)Current Value", report, re.DOTALL):
        threads = re.findall(
            r"(Write|Read) Thread \((\d+),0,0\)(?: \(block rank (\d+)\))? at (\S+) in", hazard
        )
        (_, a, rank_a, at_a), (access, b, rank_b, at_b) = threads
        one_slot = hazard.startswith("WAW") and at_a == at_b and int(a) // 32 == int(b) // 32
        peers = hazard.startswith("RAW") and rank_a != rank_b and access == "Read"
        if not (one_slot or peers):
            found.append(hazard)
    return found


def test_hazards_are_found_in_a_report():
    line = "=========     {} Thread ({},0,0) at kernel+0x{} in kernel.py:1\n"
    report = "========= Error: Potential {} hazard detected at __shared__ 0xc in block (0,0,0) :\n"
    end = "=========     Current Value : 1, Incoming Value : 2\n"
    benign = report.format("WAW") + line.format("Write", 96, 1) + line.format("Write", 97, 1) + end
    warps = report.format("WAW") + line.format("Write", 31, 1) + line.format("Write", 32, 1) + end
    read = report.format("RAW") + line.format("Write", 3, 1) + line.format("Read", 4, 2) + end
    assert not hazards(benign)
    assert len(hazards(benign + warps + read)) == 2
