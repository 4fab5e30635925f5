"""Every temperature from 0 to the largest float32: results of all functions, known and traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.covering import first, pairs

KEY = jax.random.key(0)
LABELS = np.array([1, 0], np.int32)
TEMPERATURES = [0.0, 1e-45, 1e-40, 1e-38, 1e-33, 1e-5, 1e37, 9e37, 3.4e38]


def logits(temperature, spread):
    """Returns float32 logits that are about `spread` times the temperature, and their exact quotients in float64."""
    z = np.array([[-0.4, 0.1, 0.5, 0.5, -0.9], [0.3, -0.2, -0.9, 0.9, 0.2]]) * spread
    x = (z * (temperature or 1e-44)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x, np.where(below == 0, 0, below / np.float64(np.float32(temperature)))


def log_softmax(below):
    return below - np.log(np.sum(np.exp(below), -1, keepdims=True))


def fused_topk(x, t):
    return ps.fused_topk(x, 5, temperature=t, log=True)


def token_stats(x, t):
    return ps.token_stats(x, LABELS, temperature=t)


def filtered(x, t):
    return ps.filter_logits(x, temperature=t)


def drawn(x, t):
    return ps.sample(jax.random.split(KEY, 2), x, temperature=t)


def checked(function, got, x, below, t):
    """Returns pairs of results and what they should be."""
    got, log_p = jax.tree.map(np.asarray, got), log_softmax(below)
    rows = np.arange(len(x))
    if function is fused_topk:
        return [(got.values, np.take_along_axis(log_p, got.indices, -1))]
    if function is token_stats:
        with np.errstate(invalid="ignore"):
            entropy = -np.sum(np.where(np.exp(log_p) > 0, np.exp(log_p) * log_p, 0), -1)
        return [(got.log_probs, log_p[rows, LABELS]), (got.entropy, entropy), (got.argmax, x.argmax(-1))]
    if function is filtered:
        greedy = np.where(np.arange(5) == x.argmax(-1)[:, None], 0, -np.inf)
        return [
            (np.exp(log_softmax(got.astype(np.float64))), np.exp(log_softmax(greedy if t == 0 else below)))
        ]
    log_mass = log_p[rows, x.argmax(-1)] if t == 0 else np.zeros(len(x))
    return [(got.log_probs, log_p[rows, got.indices]), (got.log_mass, log_mass)]


FUNCTIONS = [fused_topk, token_stats, filtered, drawn]
CASES = [(function, t) for t in TEMPERATURES for function in FUNCTIONS]


@pytest.mark.parametrize(
    ("function", "temperature"), first(1, CASES[9:11] + CASES[32:34] + CASES[:9] + CASES[11:32] + CASES[34:])
)
def test_any_temperature(function, temperature):
    """Float32 quotients are off by 2^-23 of |x / T|. A traced temperature gives the same bits."""
    for spread in 1, 8:
        if not np.isfinite(spread * temperature) or spread * temperature > 3e38:
            continue
        x, below = logits(temperature, spread)
        for got, want in checked(function, function(x, temperature), x, below, temperature):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
        known, traced = function(x, temperature), jax.jit(function)(x, np.float32(temperature))
        for a, b in zip(jax.tree.leaves(known), jax.tree.leaves(traced)):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_ties_are_drawn_though_quotients_overflow():
    """A tiny temperature is not 0: `sample` draws from the ties, as from `filter_logits`."""
    temperature = 1e-40
    x = jnp.tile(jnp.array([1.0, 2.0, 2.0, 0.0]), (64, 1))
    got = ps.sample(KEY, x, temperature=temperature)
    assert set(np.asarray(got.indices)) == {1, 2}
    np.testing.assert_array_equal(got.log_mass, 0)
    want = jax.random.categorical(KEY, ps.filter_logits(x, temperature=temperature))
    np.testing.assert_array_equal(got.indices, want)


@pytest.mark.parametrize(
    ("function", "temperature"), first(1, pairs(["fused_topk", "token_stats"], [4e-39, 3.4e38]))
)
def test_gradients_at_any_temperature(function, temperature):
    """Gradients are the exact ones divided by the temperature; on a CPU, subnormal ones are 0."""
    x, below = logits(temperature, 1)
    p = np.exp(log_softmax(below))
    if function == "fused_topk":
        total, g = lambda x, t: jnp.sum(ps.fused_topk(x, 1, temperature=t).values), p.max(-1)
        dz = g[:, None] * ((np.arange(5) == x.argmax(-1)[:, None]) - p)
    else:
        total = lambda x, t: jnp.sum(ps.token_stats(x, LABELS, temperature=t).log_probs)  # noqa: E731
        dz = (np.arange(5) == LABELS[:, None]) - p
    want = dz / np.float64(np.float32(temperature))
    want = np.where(np.abs(want) < np.finfo(np.float32).tiny, 0, want)
    got = np.asarray(jax.jit(jax.grad(total))(x, np.float32(temperature)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-38)


@pytest.mark.parametrize(("function", "temperature"), first(1, pairs(FUNCTIONS, [-1e-40, -1.0, np.nan])))
def test_a_traced_negative_temperature_gives_nan(function, temperature):
    x, _ = logits(1.0, 1)
    results = jax.tree.leaves(jax.jit(function)(x, np.float32(temperature)))
    assert np.isnan(results[0] if results[0].dtype == np.float32 else results[1]).all()


@pytest.mark.slow
def test_a_known_positive_temperature_is_never_0():
    x = jnp.array([2.0, 2.0, 0.0])
    draws = functools.partial(ps.sample, jax.random.key(1), jnp.tile(x, (64, 1)))
    assert set(np.asarray(draws(temperature=1e-60).indices)) == {0, 1}
    assert set(np.asarray(draws(temperature=0.0).indices)) == {0}
