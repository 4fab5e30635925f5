"""Every temperature from 0 to the largest float32: results of all functions, known and traced."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import oracle
from tests.support.covering import first, first_values, pairs

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


FUNCTIONS = {
    "fused_topk": lambda x, t: ps.fused_topk(x, 5, temperature=t, log=True),
    "token_stats": lambda x, t: ps.token_stats(x, LABELS, temperature=t),
    "filter_logits": lambda x, t: ps.filter_logits(x, temperature=t),
    "sample": lambda x, t: ps.sample(jax.random.split(KEY, 2), x, temperature=t),
}


def checked(name, got, x, below, t):
    """Returns pairs of results and what they should be."""
    got, log_p, best = jax.tree.map(np.asarray, got), oracle.log_softmax(below), x.argmax(-1)
    if name == "fused_topk":
        return [(got.values, np.take_along_axis(log_p, got.indices, -1))]
    if name == "token_stats":
        log_probs, entropy, *_ = oracle.token_stats(below, LABELS)
        return [(got.log_probs, log_probs), (got.entropy, entropy), (got.argmax, best)]
    if name == "filter_logits":
        kept = np.where(np.arange(5) == best[:, None], 0, -np.inf) if t == 0 else below
        return [(oracle.softmax(got), oracle.softmax(kept))]
    log_mass = log_p[[0, 1], best] if t == 0 else np.zeros(2)
    return [(got.log_probs, log_p[[0, 1], got.indices]), (got.log_mass, log_mass)]


CASES = dict.fromkeys([("token_stats", 1e-40), *itertools.product(FUNCTIONS, TEMPERATURES)])


@pytest.mark.parametrize(("name", "temperature"), first(1, [*CASES]))
def test_any_temperature(name, temperature):
    """Float32 quotients are off by 2^-23 of |x / T|. A traced temperature gives the same bits."""
    for spread in 1, 8:
        if not np.isfinite(spread * temperature) or spread * temperature > 3e38:
            continue
        function, (x, below) = FUNCTIONS[name], logits(temperature, spread)
        for got, want in checked(name, function(x, temperature), x, below, temperature):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
        known, traced = function(x, temperature), jax.jit(function)(x, np.float32(temperature))
        for a, b in zip(jax.tree.leaves(known), jax.tree.leaves(traced)):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-40, 1e-60])
def test_ties_are_drawn_though_quotients_overflow(temperature):
    """A known tiny temperature is not 0, though float32 rounds 1e-60 to 0: `sample` draws from the ties."""
    x = jnp.tile(jnp.array([1.0, 2.0, 2.0, 0.0]), (64, 1))
    got = ps.sample(KEY, x, temperature=temperature)
    assert set(np.asarray(got.indices)) == {1, 2}
    np.testing.assert_array_equal(got.log_mass, 0)
    want = jax.random.categorical(KEY, ps.filter_logits(x, temperature=temperature))
    np.testing.assert_array_equal(got.indices, want)
    assert set(np.asarray(ps.sample(KEY, x, temperature=0.0).indices)) == {1}


@pytest.mark.parametrize(("name", "temperature"), first(1, pairs(["fused_topk", "token_stats"], [4e-39, 3.4e38])))
def test_gradients_at_any_temperature(name, temperature):
    """Gradients are the exact ones divided by the temperature; on a CPU, subnormal ones are 0."""
    x, below = logits(temperature, 1)
    if name == "fused_topk":
        total = lambda x, t: jnp.sum(ps.fused_topk(x, 1, temperature=t).values)  # noqa: E731
        dz, _ = oracle.fused_topk_vjp(below, np.ones((2, 1)), 1)
    else:
        total = lambda x, t: jnp.sum(ps.token_stats(x, LABELS, temperature=t).log_probs)  # noqa: E731
        dz, _ = oracle.token_stats_vjp(below, LABELS, np.array([1, 0, 0])[:, None] * np.ones(2))
    want = dz / np.float64(np.float32(temperature))
    want = np.where(np.abs(want) < np.finfo(np.float32).tiny, 0, want)
    got = np.asarray(jax.jit(jax.grad(total))(x, np.float32(temperature)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-38)


@pytest.mark.parametrize("name", first_values(1, FUNCTIONS))
def test_a_subnormal_temperature_of_float64_logits(name, x64):
    """It is not 0, though a CPU would convert it to 0."""
    t = np.float32(1e-42)
    results = [jax.jit(FUNCTIONS[name])(np.array([[0, 1e-42, 2e-42, 0, 0]] * 2), of) for of in (t, np.float64(t))]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(("name", "temperature"), first(1, pairs(FUNCTIONS, [-1e-40, -1.0, np.nan])))
def test_a_traced_negative_temperature_gives_nan(name, temperature):
    x, _ = logits(1.0, 1)
    results = jax.tree.leaves(jax.jit(FUNCTIONS[name])(x, np.float32(temperature)))
    assert np.isnan(results[0] if results[0].dtype == np.float32 else results[1]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_temperatures_beyond_float32_are_the_largest_float32(name):
    x, function = np.float32([[0, 1, 3e38, -1, -3e38]]), FUNCTIONS[name]
    x = np.concatenate([x, x[:, ::-1]])
    want = function(x, np.finfo(np.float32).max)
    for t in (np.inf, 1e300, np.float64(1e39), np.array([1e300, np.inf])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), function(x, t), want)


@pytest.mark.parametrize("limit", [1e-37, 1e37])
def test_the_limits_of_a_projection_in_float32(limit):
    """In float64, the float32 number next to 1e-37 is below it. Known and traced ones are both accepted."""
    x, f = np.eye(2, dtype=np.float32), ps.linear_logsumexp
    want = jax.jit(lambda t: f(x, x, temperature=t))(np.float32(limit))
    assert np.isfinite(want).all()
    for t in (np.float32(limit), jnp.float32(limit), limit):
        np.testing.assert_array_equal(f(x, x, temperature=t), want)
    assert np.isfinite(f(x, x, softcap=np.float32(limit))).all()
