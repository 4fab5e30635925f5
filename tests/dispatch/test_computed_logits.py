"""Logits that are computed in the program of the call give the same results as stored logits.

XLA may compute fused logits anew for each reading, with other roundings. So a plain form must not compare two readings
of its input. At small temperatures, a difference of one rounding decides everything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.covering import first, first_values, pairs
from tests.support.trees import assert_near

KEY = jax.random.key(0)
ROWS, V = 40, 100
RNG = np.random.RandomState(0)
X = jnp.asarray(RNG.randint(-150, 150, (ROWS, V)) / 16, jnp.float32)
W = jnp.asarray(RNG.standard_normal((V, V)), jnp.float32)
LABELS = jnp.asarray(RNG.randint(0, V, ROWS))

LOGITS = {
    "scale": lambda x: x / 1.7,
    "softcap": lambda x: 6 * jnp.tanh(x / 6),
    "bias": lambda x: 0.37 * x + 1.1 * W[0],
    "cast": lambda x: (1.3 * x).astype(jnp.bfloat16).astype(jnp.float32) * 0.7,
    "product": lambda x: x[:, :8] @ W[:8],
    "log_softmax": jax.nn.log_softmax,
}
PARAMETERS = {
    "none": {},
    "temperature 0": {"temperature": 0.0},
    "small temperature": {"temperature": 1e-6},
    "temperature 1": {"temperature": 1.0},
    "both": {"temperature": jnp.where(jnp.arange(ROWS) % 2, 0.0, 1e-5)},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 9, "top_p": 0.7, "min_p": 0.01, "temperature": 0.7},
}
TEMPERATURES = ["temperature 0", "small temperature", "temperature 1"]
FILTERS = [name for name in PARAMETERS if name not in ("none", "temperature 1")]


def sample(x, **parameters):
    return ps.sample(KEY, x, **parameters)


def verify(x, **parameters):
    return ps.verify(KEY, LABELS[:, None], jnp.stack([x, x], 1), **parameters)


def gradient(function):
    return lambda x, temperature: jax.grad(lambda x: jnp.sum(jnp.nan_to_num(function(x, temperature))))(x)


AT_TEMPERATURE = {
    "fused_topk": lambda x, temperature: ps.fused_topk(x, 5, temperature=temperature),
    "token_stats": lambda x, temperature: ps.token_stats(x, LABELS, temperature=temperature, rank=True),
    "gradient of fused_topk": gradient(lambda x, t: ps.fused_topk(x, 3, temperature=t).values[:, 0]),
    "gradient of sample": gradient(lambda x, t: sample(x, temperature=t).log_probs),
    "gradient of token_stats": gradient(lambda x, t: ps.token_stats(x, LABELS, temperature=t).entropy),
    "linear_token_stats": lambda x, **t: ps.linear_token_stats(x[:, :8], W[:8, :16], LABELS % 16, softcap=5.0, **t),
    "linear_sample": lambda x, **t: ps.linear_sample(KEY, x[:, :8], W[:8, :16], softcap=5.0, **t),
    "linear_topk": lambda x, **t: ps.linear_topk(x[:, :8], W[:8, :16], 3, softcap=5.0, **t),
}
FILTERED = {"filter_logits": ps.filter_logits, "sample": sample, "verify": verify}
SELECTIONS = {"top_k": lambda x: ps.top_k(x, 5), "route": lambda x: ps.route(x, 3, bias=W[0], groups=4, top_groups=2)}
CASES = [
    *pairs(AT_TEMPERATURE, TEMPERATURES, LOGITS)[:15],
    *pairs(FILTERED, FILTERS, LOGITS)[:15],
    *pairs(SELECTIONS, ["none"], LOGITS),
]


@pytest.mark.parametrize(("function", "parameters", "way"), first(1, CASES))
def test_results_equal_those_of_stored_logits(function, parameters, way):
    f = functools.partial((AT_TEMPERATURE | FILTERED | SELECTIONS)[function], **PARAMETERS[parameters])
    stored = jax.jit(LOGITS[way])(X)
    assert_near(jax.jit(lambda x: f(LOGITS[way](x)))(X), f(stored), 1e-4, 1e-5)


@pytest.mark.parametrize("columns", first_values(0, [16, 1, 300]))
def test_projections_at_temperature_0_with_a_softcap(columns):
    """The largest logit has the probability 1. XLA stored the logits of wide projections only."""
    x, w = X[:, :8] / 8, jnp.asarray(RNG.standard_normal((8, columns)), jnp.float32)
    labels = jnp.argmax(jax.jit(lambda x: 5 * jnp.tanh(x @ w / 5))(x), -1)
    options = {"temperature": 0.0, "softcap": 5.0}
    stats = ps.linear_token_stats(x, w, labels, **options)
    np.testing.assert_array_equal(stats.entropy, 0)
    np.testing.assert_array_equal(stats.log_probs, 0)
    assert ps.linear_cross_entropy(x, w, labels, **options) == 0
    for log in False, True:
        np.testing.assert_array_equal(ps.linear_topk(x, w, 1, log=log, **options).values, 0 if log else 1)
    drawn = ps.linear_sample(jax.random.key(0), x, w, **options)
    np.testing.assert_array_equal(drawn.indices, labels)
    np.testing.assert_array_equal(drawn.log_probs, 0)
