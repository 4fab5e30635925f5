"""Calls of the public functions on a GPU with a named implementation, and checks of their results."""

import functools
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.topk import plan as topk_plan
from pallas_softmax._src.triton import checks
from pallas_softmax._src.triton import plan as triton_plan
from tests.support import bounds, cases, children, oracle
from tests.support.cases import ALL, F32

THREADS = 14  # threads that compile
CAPABILITY = {"mosaic_gpu": 9.0, "triton": 8.0}
MAX_K = {"mosaic_gpu": topk_plan.MAX_K, "triton": triton_plan.MAX_K}
both = pytest.mark.parametrize("implementation", [*CAPABILITY])
only_triton = pytest.mark.parametrize("implementation", ["triton"])


def one_process(name):
    """Gives all tests of this name to one process, one after the other (with `--dist loadgroup`)."""
    return pytest.mark.xdist_group(name)


# Beside such a test, the GPU's memory has room for the other tests, but not for another such test.
much_memory = one_process("much memory")


def on_a_gpu(test):
    """Runs a test on a GPU only; `conftest.needs_a_gpu` skips it without one."""
    return pytest.mark.gpu(pytest.mark.usefixtures("needs_a_gpu")(test))


def unavailable(implementation):
    """Returns why the implementation's kernels cannot run on this machine; None if they can."""
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if not gpus:
        return "no GPU is visible to JAX"
    found, least = gpus[0].compute_capability, CAPABILITY[implementation]
    if float(found) < least:
        return f"compute capability {found}, {implementation} needs {least}"
    return checks.missing() if implementation == "triton" else None


def function(implementation, op, where=None):
    """Returns the public function over the last axis, with the implementation named; rows keep their dimension."""
    kept = {"keepdims": True} if op == "logsumexp" else {}
    return lambda x: getattr(ps, op)(x, -1, where=where, implementation=implementation, **kept)


def of_repeated_rows(f, rows, *few):
    """Returns the results of f for the first rows of arrays with more than 2^31 elements, which repeat a few rows.

    Asserts that all copies of a row have the same bits. None stands for an array that is not there.
    """
    n, v = few[0].shape
    assert rows * v > 2**31

    @jax.jit
    def run(*few):
        at = jnp.arange(rows) % n
        results = f(*(None if a is None else a[at] for a in few))
        first = jax.tree.map(lambda a: a[:n], results)
        return first, jax.tree.map(lambda a, b: jnp.all(a == b[at]), results, first)

    first, alike = run(*few)
    assert all(jax.tree.leaves(alike))
    return first


@functools.partial(jax.jit, static_argnames=("implementation", "op"))
def forward_and_grad(implementation, op, x, dy, where=None):
    y, pullback = jax.vjp(function(implementation, op, where), x)
    return y, pullback(dy)[0]


def operands(op, x, where=None):
    """Returns x and dy, with NaN, infinities and huge numbers where they are masked."""
    dy = np.resize(cases.rows(["peaked", "normal", "integers"], x.shape[-1], x.dtype), x.shape)
    dy = dy[..., :1] if op == "logsumexp" else dy
    if where is None:
        return x, dy
    return cases.spoil_masked(x, where), dy if op == "logsumexp" else cases.spoil_masked(dy, where)


def assert_forward_and_grad(implementation, op, x, names, where=None, dy=None):
    x, given = operands(op, x, where)
    dy = given if dy is None else dy
    judge(op, forward_and_grad(implementation, op, x, dy, where), x, dy, names, where)


def judge(op, got, x, dy, names=None, where=None):
    """Asserts that y and dx are right. dx is compared with the gradient for the kernel's own y."""
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


@functools.partial(jax.jit, static_argnames=("implementation", "k", "sorted"))
def top_k(implementation, x, k, where=None, lengths=None, sorted=True):
    return ps.top_k(x, k, where=where, lengths=lengths, sorted=sorted, implementation=implementation)


def assert_top_k(got, x, k, names, where=None, ordered=True):
    """Asserts that values and indices are exact, except for a NaN's payload. `got` may have the rows of x repeated."""
    values, indices = map(np.asarray, got)
    assert (values.dtype, indices.dtype) == (x.dtype, np.int32)
    if not ordered:
        masked = ~np.take_along_axis(np.resize(oracle.unmasked(x, where), (len(values), x.shape[1])), indices, -1)
        keys = np.where(masked, 0, -oracle.order_key(values))
        order = np.lexsort((indices, keys, masked))
        values, indices = (np.take_along_axis(a, order, -1) for a in (values, indices))
    want, best = oracle.top_k(x, k, where)
    for i, name in enumerate(names):
        for a, b in ((indices, best), (oracle.order_key(values), oracle.order_key(want))):
            rows = a[i :: len(x)]
            np.testing.assert_array_equal(rows, np.broadcast_to(b[i], rows.shape), err_msg=name)


def with_kernels(names, cases, **options):
    """Runs a test for each implementation and each case with a k that the implementation's kernels have."""
    at = names.index("k")
    chosen = [(name, *case) for name, most in MAX_K.items() for case in cases if case[at] <= most]
    return pytest.mark.parametrize(("implementation", *names), chosen, **options)


def assert_topk_gradient(dx, x, g, k, where=None, temperature=1.0, log=False):
    """Asserts that the gradient of `fused_topk` is right.

    p is recomputed from x, m and d, so the units of the forward count twice. A denormal p may be flushed.
    """
    want, unit = (f(x, g, k, where, temperature, log)[0] for f in (oracle.fused_topk_vjp, bounds.fused_topk_vjp_unit))
    flushed = 1 + np.sum(np.abs(oracle.wide(g)), -1, keepdims=True) / np.reshape(temperature, (-1, 1))
    limit = 4 * bounds.UNITS if x.dtype == F32 else 2
    assert bounds.error_units(dx, want, unit, slack_times=flushed) <= limit


def assert_topk(got, x, k, names, temperature=1.0, where=None, log=False, *, exact_exp=False):
    """Asserts that the indices are exact and the values within bounds.

    Without `exact_exp`, the exponential is approximate: each term of d has the relative error eps |x - m|. `got` may
    have the rows of x several times.
    """
    values, indices = map(np.asarray, got)
    want, best = oracle.fused_topk(x, k, where, temperature, log)
    for i, name in enumerate(names):
        alike = np.broadcast_to(best[i], indices[i :: len(x)].shape)
        np.testing.assert_array_equal(indices[i :: len(x)], alike, err_msg=name)
    t = np.reshape(np.asarray(temperature, F32), (-1, 1))
    with np.errstate(all="ignore"):
        terms = np.nansum(bounds.softmax_unit(x.astype(F32) / t, where=where), -1, keepdims=True)
        unit = bounds.fused_topk_unit(x, k, where, temperature, log)
        # 1 / temperature is rounded once, and multiplied: one more unit each way
        unit = 1.5 * unit if exact_exp else unit + terms * (1 if log else want)
    repeats = len(values) // len(x)
    bounds.assert_close(values, np.tile(want, (repeats, 1)), np.tile(unit, (repeats, 1)), [*names] * repeats)


def rows_to_test(v):
    """Returns the names of the rows to test. The float64 oracle is slow, so long rows are fewer, but of every class."""
    return ALL if v <= 10000 else [*list(cases.FINITE)[:6], "huge", "everything", "neg_inf_last", "nan_last"]


LONG = [*list(cases.FINITE)[:5], "everything", "nan_last"]
VERY_LONG = ["peaked", "integers", "neg_inf_last"]
each = pytest.mark.parametrize("op", oracle.FORWARD)


def sanitize(tool, sweep):
    """Runs a sweep of sanitizer_sweep.py under a tool of compute-sanitizer. Its findings make the exit code 9."""
    # By default compute-sanitizer also attaches to the compilers that XLA starts. Then it crashes in one run of five,
    # and the program waits for it forever.
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    # JAX handles some errors of the driver itself, for example when it asks for features that the device lacks.
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    options += ["--racecheck-report", "hazard", "--print-limit", "100000"] if tool == "racecheck" else []
    return run_under("compute-sanitizer", *options, script="sanitizer_sweep.py", arguments=[sweep])


def run_under(tool, *options, script, arguments=()):
    """Runs a program of tests/programs under one of the CUDA toolkit's tools; skips the test if the tool is missing."""
    path = shutil.which(tool, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if path is None:
        pytest.skip(f"{tool} is neither on the PATH nor in /usr/local/cuda/bin")
    env = children.environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")  # this process holds most of the memory
    command = [path, *options, sys.executable, str(children.PROGRAMS / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
