"""Rows for token statistics, and checks of the statistics and their gradients against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_softmax as ps
from pallas_softmax._src.stats import mosaic_gpu
from tests.support import oracle
from tests.support.oracle import wide
from tests.support.routing import assert_near
from tests.support.twins import interpreted

N = 16  # the number of rows


def rows(v, dtype):
    """Returns (N, v): peaked, flat, -inf, tied and sorted rows, and rows with NaN, +inf or only -inf."""
    x = 3 * np.random.default_rng(v).standard_normal((N, v)).astype("float32")
    x[1] *= 40
    x[2] *= 1e-3
    x[3, ::2] = -np.inf
    x[4] = 1
    x[5] = np.round(x[5])
    x[6, v // 2 :] = x[6].max()
    x[7, v // 3] = np.nan
    x[8, v // 3] = np.inf
    x[9] = -np.inf
    x[10] = np.sort(x[10])
    x[11] = np.sort(x[11])[::-1]
    x[12] = -np.inf
    x[12, v - 1] = -3
    x[13, 0] = 30
    x[14, [v // 4, v - 1]] = np.nan
    x[15] = 0
    return jnp.asarray(x, dtype)


def operands(v):
    """Returns labels, the last one out of range, cotangents, a mask without the first row, and temperatures with 0."""
    rng = np.random.default_rng(v + 1)
    labels = rng.integers(0, v, N).astype("int32")
    labels[15] = -100
    g = tuple(rng.standard_normal((3, N)).astype("float32"))
    where = rng.random((N, v)) < 0.6
    where[0] = False
    temperature = np.linspace(0.5, 2, N, dtype="float32")
    temperature[[2, 4, 5, 6, 9, 12]] = 0
    return labels, g, where, temperature


def assert_stats(got, x, labels, where=None, temperature=1.0):
    """Asserts that statistics along the last axis are within bounds, and the argmax is exact."""
    log_probs, entropy, logsumexp, argmax = map(np.asarray, got[:4])
    if got[4:] and got[4] is not None:
        assert got[4].dtype == np.int32
        np.testing.assert_array_equal(got[4], oracle.rank(x, labels, where))
    assert argmax.dtype == np.int32
    assert {a.dtype for a in (log_probs, entropy, logsumexp)} == {np.result_type(x.dtype, "float32")}
    want_log_probs, want_entropy, want_logsumexp, want = oracle.token_stats(x, labels, where, temperature)
    np.testing.assert_array_equal(argmax, want)
    eps = np.finfo(entropy.dtype).eps
    assert_near(entropy, want_entropy, 4 * eps * (1 + np.log(x.shape[-1])))
    t = np.where(np.asarray(temperature) == 0, 1, temperature)
    z = np.where(oracle.unmasked(x, where), oracle.tempered(x, t), 0)
    size = 1 + np.max(np.abs(np.where(np.isfinite(z), z, 0)), -1)
    assert_near(logsumexp, want_logsumexp, 8 * eps * size)
    assert_near(log_probs, want_log_probs, 16 * eps * (1 + np.abs(want_log_probs)))


def assert_gradient(dx, x, labels, g, where=None, temperature=1.0):
    """Asserts that dx is right, in relation to the largest element of its row."""
    want, _ = oracle.token_stats_vjp(x, labels, g, where, temperature)
    got = wide(dx)
    dtype = jnp.finfo(dx.dtype)
    eps = float(dtype.eps) / 2 + 40 * 2.0**-23
    largest = np.abs(want).max(-1, keepdims=True, initial=1e-3)
    bound = float(dtype.smallest_subnormal) + eps * np.abs(want) + 1e-5 * largest
    assert (np.abs(got - want) <= bound).all(), np.max(np.abs(got - want) / bound)
    if where is not None:
        assert not wide(dx)[~np.broadcast_to(where, dx.shape)].any()


def check_of(f):
    """Returns a check of f, which is like `token_stats`: its results and its gradient."""

    @jax.jit
    def run(x, labels, where, temperature, g):
        def floats(x):
            stats = f(x, labels, where=where, temperature=temperature)
            return stats[:3], stats

        _, pull, stats = jax.vjp(floats, x, has_aux=True)
        return stats, pull(g)[0]

    def check(v, dtype, masked, scaled):
        x, (labels, g, where, temperature) = rows(v, dtype), operands(v)
        where, temperature = where if masked else None, temperature if scaled else 1.0
        got, dx = run(x, labels, where, temperature, g)
        assert_stats(got, x, labels, where, temperature)
        assert_gradient(dx, x, labels, g, where, temperature)

    return check


def kernel_stats(plan, x, labels, where=None, temperature=None, interpret=None, *, rank=False):
    """Returns what `token_stats` returns, from the kernel with this plan, for x (rows, V)."""
    scaled = temperature is not None
    t = jnp.asarray(temperature if scaled else np.ones(1, "float32"))[:, None]
    where = None if where is None else jnp.asarray(where)
    columns = jnp.asarray(labels)[:, None]
    with interpreted(interpret):
        run = mosaic_gpu.ranked_stats if rank else mosaic_gpu.token_stats
        found = run(plan, jnp.asarray(x), where, t, columns, scaled=scaled)
    log_probs = found.at_label - jnp.log(found.moments.d)
    results = (log_probs, found.entropy, found.logsumexp, found.argmax, *[found.rank] * rank)
    return ps.TokenStats(*(a[..., 0] for a in results))
