"""token_stats: numbers against float64, special rows, labels, derivatives, transformations, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.softmax.mesh import combine_shards
from pallas_softmax._src.stats import xla
from tests.support import cases, oracle, stats
from tests.support.calls import DTYPES
from tests.support.cases import TINY
from tests.support.covering import first, pairs, slow
from tests.support.trees import assert_equal

pytestmark = pytest.mark.usefixtures("quick_compilation")
check = stats.check_of(ps.token_stats)
CASES = [
    (1000, "float32", True, True),
    (129, "bfloat16", False, False),
    (262144, "bfloat16", True, True),
    *pairs((1, 2, 127, 128, 129, 1000, cases.GPT2), DTYPES, [False, True], [False, True]),
]


@pytest.mark.parametrize(("v", "dtype", "masked", "scaled"), first(1, CASES))
def test_numbers_and_gradients(v, dtype, masked, scaled):
    check(v, dtype, masked, scaled)


X = cases.rows(["normal", "peaked", "integers", "constant"], 50)
LABELS = np.array([3, 49, 0, 7])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, [2.0, 0, 0.5]], ids=str)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_integers_that_floats_cannot_hold(dtype, temperature):
    """Neighbours are equal as floats of the same width."""
    with jax.enable_x64(dtype.endswith("64")):
        largest, step = np.iinfo(dtype).max, np.array([1, 0, 3, 1, 2, 2**20], dtype)
        x = np.stack([largest - step, largest // 2 - step, np.flip(step)])
        where, labels, t = np.arange(6) != 1, np.array([2, 3, 4]), np.array(temperature, "float32")
        got = jax.jit(lambda x: ps.token_stats(x, labels, where=where, temperature=t, rank=True))(x)
        top = x.max(-1, where=where, initial=0, keepdims=True)
        below = (x.astype(object) - top.astype(object)).astype("int64")
        log_probs, entropy, _, argmax = oracle.token_stats(below.astype("float64"), labels, where, t)
        np.testing.assert_allclose(got.log_probs, log_probs, rtol=1e-6)
        np.testing.assert_allclose(got.entropy, entropy, rtol=1e-6)
        np.testing.assert_array_equal(got.argmax, argmax)
        np.testing.assert_array_equal(got.rank, oracle.rank(below, labels, where))
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(got.logsumexp, top[:, 0] / np.float64(t), rtol=1e-6)


@pytest.mark.slow
def test_other_results_do_not_change_with_labels_or_ranks():
    options = {"labels": LABELS, "rank": True}, {"labels": LABELS}, {}
    ranked, labeled, plain = (ps.token_stats(X, temperature=0.7, **given) for given in options)
    assert labeled.rank is plain.rank is plain.log_probs is None
    assert_equal((ranked[:4], labeled[1:]), (labeled[:4], plain[1:]))
    of_ranked, of_labeled, of_plain = (
        jax.grad(lambda x, given=given: jnp.sum(ps.token_stats(x, **given).entropy))(X) for given in options
    )
    assert_equal((of_ranked, of_labeled), (of_labeled, of_plain))


SUBNORMAL = np.array(
    [
        [0, -1, TINY, 2 * TINY, 0, TINY],
        [-TINY, -2 * TINY, -1, -0.0, 0, 0],
        [-3 * TINY, -TINY, -2 * TINY, -1, -TINY, -5],
        [1, TINY, np.nan, 2, np.nan, 3],
    ],
    "float32",
)


@pytest.mark.parametrize("masked", [True, slow(False)])
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_argmax_of_subnormal_numbers(dtype, masked):
    """It is by value: 0 and -0 tie, and subnormal numbers are no zeros."""
    x, where = jnp.asarray(SUBNORMAL, dtype), np.arange(6) > 0
    given = {"where": where, "temperature": np.float32(0.5)} if masked else {}
    want = np.where(where | (not masked), np.asarray(x, "float64"), -np.inf).argmax(1)
    np.testing.assert_array_equal(ps.token_stats(x, **given).argmax, want)


@pytest.mark.slow
def test_argmax_of_subnormal_numbers_on_a_mesh():
    def of_shard(x):
        stats = xla.token_stats(x, None, jnp.ones((1, 1)), jnp.zeros((4, 1), jnp.int32), scaled=False)
        argmax = stats.argmax + 2 * jax.lax.axis_index("v")
        return combine_shards(stats.moments, ("v",), position=argmax)[1]

    got = jax.jit(jax.vmap(of_shard, axis_name="v"))(SUBNORMAL.reshape(4, 3, 2).swapaxes(0, 1))
    np.testing.assert_array_equal(got[..., 0], [SUBNORMAL.argmax(1)] * 3)


SIGNS = np.array([[3, 1, 3], [0, -0.0, -1], [-2, -1, -3], [TINY, 0, TINY], [-TINY, -2 * TINY, -1]], "float32")


@pytest.mark.parametrize("how", ["traced", slow("static"), slow("one")])
def test_temperature_0_is_the_limit(how):
    """logsumexp is infinite, or the log of the number of ties, by the sign of the largest logit."""
    labels, f = np.array([2, 1, 0, 1, -1]), functools.partial(ps.token_stats, SIGNS)
    if how == "static":
        got = f(labels, temperature=0)
    else:
        got = jax.jit(lambda t: f(labels, temperature=t))(np.zeros(5 if how == "traced" else (), "float32"))
    log_2 = np.log(2)
    np.testing.assert_allclose(got.log_probs, [-log_2, -log_2, -np.inf, -np.inf, np.nan], rtol=1e-6)
    np.testing.assert_allclose(got.entropy, [log_2, log_2, 0, log_2, 0], rtol=1e-6)
    np.testing.assert_allclose(got.logsumexp, [np.inf, log_2, -np.inf, np.inf, -np.inf], rtol=1e-6)
    np.testing.assert_array_equal(got.argmax, [0, 0, 1, 0, 0])
    stats.assert_stats(got, SIGNS, labels, temperature=np.zeros(5))


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float16"), slow("float64")])
@pytest.mark.parametrize("way", ["masked", slow("vmap")])
def test_ranks(way, dtype):
    """The place in the order of lax.top_k: ties by the index, +0 above -0, NaNs by their sign."""
    rng = np.random.default_rng(3)
    x = np.round(2 * rng.standard_normal((200, 9))).astype("float32")
    x[:40, ::2] = -0.0
    for rows, value in ((slice(40, 60), np.nan), (slice(60, 80), -np.nan), (slice(80, 100), -np.inf)):
        x[rows] = np.where(rng.random((20, 9)) < 0.4, value, x[rows])
    labels, where = rng.integers(-1, 10, 200), rng.random((200, 9)) < 0.7 if way == "masked" else None
    f = lambda x, labels: ps.token_stats(x, labels, where=where, rank=True).rank  # noqa: E731
    with jax.enable_x64(dtype == "float64"):
        x = np.asarray(jnp.asarray(x, dtype))
        got = jax.jit(jax.vmap(f) if way == "vmap" else f)(x, labels)
    assert got.dtype == np.int32 and (np.asarray(got) == 0).any()
    np.testing.assert_array_equal(got, oracle.rank(x, labels, where))


@pytest.mark.parametrize(("gap", "t"), [slow(30_000.0, 1.0), (200.0, 0.01)])
def test_a_label_far_below_the_largest_logit(gap, t):
    """Its log-probability is -gap / T, with the derivatives of that."""
    f = lambda t: ps.token_stats(jnp.array([0, gap]), 0, temperature=t).log_probs  # noqa: E731
    found = f(t), jax.grad(f)(t), jax.jvp(f, (t,), (1.0,))[1], jax.grad(jax.grad(f))(t)
    np.testing.assert_allclose(found, [-gap / t, gap / t**2, gap / t**2, -2 * gap / t**3], rtol=1e-5)


def test_a_label_whose_distance_overflows():
    """Its log-probability is -inf. The derivative of the entropy in the temperature is 0 all the same."""
    x = jnp.array([-3e38, 3e38])
    assert jax.grad(lambda t: ps.token_stats(x, 0, temperature=t).entropy)(1.0) == 0


def test_no_columns():
    got = ps.token_stats(X[:, :0])
    assert np.isnan(got.entropy).all() and np.isneginf(got.logsumexp).all()
