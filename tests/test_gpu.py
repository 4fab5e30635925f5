"""On a Hopper or newer GPU: the kernels through the public functions. Run with `pytest -m gpu -n 0`."""

import functools
import os
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
from test_mosaic_interpret import ALL, UNITS, assert_close, assert_softmax, assert_softmax_grad, crowded
from test_mosaic_lowering import largest

import pallas_softmax as ps

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_hopper():
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if not gpus:
        pytest.skip("no GPU is visible to JAX")
    if float(gpus[0].compute_capability) < 9:
        pytest.skip(f"compute capability {gpus[0].compute_capability}, the kernels need 9.0")


@jax.jit
def softmax(x):
    return ps.softmax(x, implementation="mosaic_gpu")


@jax.jit
def softmax_and_grad(x, dy):
    y, pullback = jax.vjp(softmax, x)
    return y, pullback(dy)[0]


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
    assert_close(got.values, want, unit, names)


def on_the_cpu(f, *args):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, f(*args))


# --- Shapes, dtypes, special rows ---------------------------------------------------------------------

SHAPES = [
    (4, F32),
    (1000, F32),
    (25000, F32),
    (50000, F32),
    ("largest", F32),
    (8, BF16),
    (10000, BF16),
    (107520, BF16),
    ("largest", BF16),
    (4096 + 8, F16),
]


def some(v):
    """The oracle in float64 takes its time: all rows where they are short, and every class where long."""
    return ALL if v <= 10000 else [*list(cases.FINITE)[:6], "huge", "everything", "neg_inf_last", "nan_last"]


@pytest.mark.parametrize(("v", "dtype"), SHAPES, ids=str)
def test_softmax(v, dtype):
    v = largest("softmax", dtype.name) if v == "largest" else v
    x = cases.rows(some(v), v, dtype)
    assert_softmax(np.asarray(softmax(x)), x, some(v))


@pytest.mark.parametrize(
    ("v", "dtype"),
    [(4, F32), (1000, F32), ("largest", F32), (10000, BF16), ("largest", BF16), (4096 + 8, F16)],
    ids=str,
)
def test_softmax_grad(v, dtype):
    v = largest("softmax_grad", dtype.name) if v == "largest" else v
    names = ["normal", "peaked", "integers", "constant", "one_winner", "everything"]
    x, dy = cases.rows(names, v, dtype), cases.rows(["peaked", "normal"] * 3, v, dtype)
    y, dx = map(np.asarray, softmax_and_grad(x, dy))
    assert_softmax(y, x, names)
    assert_softmax_grad(dx, y, dy, names)
    if dtype == F32:
        want, unit = oracle.softmax_vjp(x, dy), oracle.softmax_vjp_unit(x, dy)
        slack = 1 + np.abs(dy) + np.max(np.abs(dy), -1, keepdims=True)  # for what is flushed in y
        assert_close(dx, want, UNITS * unit, names, slack)  # the roundings of y add to those of the backward


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
    v = largest("topk", dtype.name, k) if v == "largest" else v
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


SEED, CASES = 20261121, 300
RANDOM = [
    (1000, F32, 5),
    (4096 + 8, F32, 64),
    (25000, F32, 128),
    (1000, BF16, 5),
    (10000, BF16, 64),
    (1000, F16, 128),
]


def test_random_cases(capsys):
    """Logits of every scale, with ties, infinities and NaNs of both signs: few shapes, many values."""
    with capsys.disabled():
        print(f"\n{CASES} random cases, seed {SEED}")
    for case in range(CASES):
        rng = np.random.default_rng([SEED, case])
        v, dtype, k = RANDOM[case % len(RANDOM)]
        x = rng.standard_normal((7, v)) * rng.choice([0.01, 1, 10, 1000], (7, 1))
        x = np.where(rng.random((7, 1)) < 0.3, np.round(x * rng.choice([0.2, 1])), x)  # ties
        for special in (-np.inf, np.inf, np.nan, cases.NEG_NAN, -0.0):
            share = rng.choice([0, 0, 0, 0.001, 0.5], (7, 1))
            x = np.where(rng.random(x.shape) < share, special, x)
        x = x.astype(dtype)
        t = rng.choice([0.5, 1, 2], 7).astype(F32)
        names = [f"case {case}, seed {SEED}, {v} {dtype} k={k}, row {i}" for i in range(7)]
        assert_topk(topk(x, k, t), x, k, names, t)
        assert_softmax(np.asarray(softmax(x)), x, names)


def test_repeated_runs_give_the_same_bits():
    x = np.random.default_rng(1).standard_normal((1031, 25000)).astype(F32)
    x[::7] = np.round(x[::7])
    runs = [jax.tree.map(np.asarray, (softmax_and_grad(x, x), topk(x, 64))) for _ in range(3)]
    for run in runs[1:]:
        for a, b in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(run), strict=True):
            assert a.tobytes() == b.tobytes()


def test_more_elements_than_32_bits_count():
    """2^31 elements and a few rows: the last ones are right, so offsets have 64 bits."""
    v, few = 16384, 8
    last = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)
    x = jnp.concatenate([jnp.zeros((2**31 // v, v), BF16), last])
    assert x.size > 2**31
    np.testing.assert_array_equal(softmax(x)[-few:].astype(F32), softmax(last).astype(F32))
    got, want = topk(x, 5), topk(last, 5)
    np.testing.assert_array_equal(got.indices[-few:], want.indices)
    np.testing.assert_array_equal(got.values[-few:].astype(F32), want.values.astype(F32))


# --- Which path ran -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("function", [ps.softmax, lambda x: ps.fused_topk(x, 5)], ids=["softmax", "topk"])
def test_the_automatic_choice_runs_the_kernel(function, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((256, 25000)).astype(dtype))
    assert ps.explain(function, x)[0].cuda == "mosaic_gpu"
    compiled = jax.jit(function).lower(x).compile()
    assert "mosaic_gpu" in compiled.as_text()
    named = softmax if function is ps.softmax else functools.partial(topk, k=5)
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
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process holds most of the memory
    }
    command += [sys.executable, str(here / "sanitizer_sweep.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    report = f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    if (
        tool == "initcheck"
    ):  # it does not see what bulk copies write, and minds the copy of results to the host
        assert "Uninitialized __global__ memory read" not in done.stdout, report
    else:
        assert done.returncode == 0, report
    assert "swept" in done.stdout
