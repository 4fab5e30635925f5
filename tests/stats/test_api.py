"""token_stats: numbers against float64, special rows, labels, derivatives, transformations, bad input."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.stats import xla
from pallas_softmax._src.stats.mesh import combine_shards
from tests.support import cases, oracle, stats
from tests.support.calls import DTYPES
from tests.support.covering import first, pairs, slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
run = stats.stats_and_gradient(ps.token_stats)
OPTIONS = ("", "where", "temperature", "both")
CASES = [
    (1000, "float32", "both"),
    (129, "bfloat16", ""),
    *pairs((1, 2, 127, 128, 129, 1000, cases.GPT2, 262144), DTYPES, OPTIONS),
]


@pytest.mark.parametrize(("v", "dtype", "options"), first(1, CASES))
def test_numbers_and_gradients(v, dtype, options):
    x = stats.rows(v, dtype)
    labels, g, where, temperature = stats.operands(v)
    where = where if options in ("where", "both") else None
    temperature = temperature if options in ("temperature", "both") else 1.0
    got, dx = run(x, labels, where, temperature, g)
    stats.assert_stats(got, x, labels, where, temperature)
    stats.assert_gradient(dx, x, labels, g, where, temperature)


@pytest.mark.slow
def test_float64(x64):
    x = np.asarray(stats.rows(1000, "float32"), "float64")
    labels, *_ = stats.operands(1000)
    stats.assert_stats(ps.token_stats(x, labels), x, labels)


X = cases.rows(["normal", "peaked", "integers", "constant"], 50)
LABELS = np.array([3, 49, 0, 7])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_integers(dtype):
    x = np.round(3 * X).clip(-100, 100).astype(dtype)
    stats.assert_stats(ps.token_stats(x, LABELS), x.astype("float32"), LABELS)


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
def test_without_labels():
    got, want = ps.token_stats(X), ps.token_stats(X, LABELS)
    assert got.log_probs is None
    jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])


TINY = 2.0**-130
SUBNORMAL = np.array(
    [
        [0, -1, TINY, 2 * TINY, 0, TINY],
        [-TINY, -2 * TINY, -1, -0.0, 0, 0],
        [-3 * TINY, -TINY, -2 * TINY, -1, -TINY, -5],
        [1, TINY, np.nan, 2, np.nan, 3],
    ],
    "float32",
)
ARGMAX_OF_SUBNORMAL = [3, 3, 1, 2]


def test_labels_out_of_range():
    """The log-probability is NaN, and its derivative is 0."""
    labels = np.array([-1, 50, 2**31 - 1, 7], "int32")

    def f(x, labels):
        s = ps.token_stats(x, labels)
        inside = (labels >= 0) & (labels < 50)
        return jnp.mean(2 * jnp.exp(s.log_probs), where=inside) + jnp.sum(s.entropy), s.log_probs

    dx, log_probs = jax.jit(jax.grad(f, has_aux=True))(X, labels)
    np.testing.assert_array_equal(np.isnan(log_probs), [True, True, True, False])
    of_entropies = jax.grad(lambda x: jnp.sum(ps.token_stats(x).entropy))(X)
    np.testing.assert_allclose(dx[:3], of_entropies[:3], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(dx[3], jax.grad(lambda x: f(x, LABELS[3:])[0])(X[3:])[0], rtol=1e-6)


BAD_ROWS = np.concatenate([X, X, X], dtype="float32")
BAD_ROWS[4:7, 3] = np.nan, np.inf, -np.inf  # the label of row 6 has the logit -inf
BAD_ROWS[7] = -np.inf
BAD_LABELS = np.array([3, -100, 49, 50, 0, 0, 3, 7, 5, 5, 5, 5])
BAD_WHERE = np.ones(BAD_ROWS.shape, bool)
BAD_WHERE[2, 49], BAD_WHERE[8] = False, False
BAD_T = np.array([1.0] * 9 + [0.0, -1.0, np.nan], "float32")


def of_finite(x, t):
    """Returns a sum over the finite results. Results that are not finite pass through exp first."""
    s = ps.token_stats(x, BAD_LABELS, where=BAD_WHERE, temperature=t)
    return sum(jnp.sum(jnp.where(jnp.isfinite(a), jnp.exp(a / 9), 0)) for a in s[:3])


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        slow(jax.jacfwd),
        slow(lambda f, argnums: jax.jacfwd(jax.grad(f, argnums), argnums)),
        slow(lambda f, argnums: jax.jacrev(jax.grad(f, argnums), argnums)),
        slow(lambda f, argnums: jax.jacrev(jax.jacfwd(f, argnums), argnums)),
    ],
)
def test_results_that_are_not_finite_have_derivatives_of_0(transform):
    derivatives = jax.jit(transform(of_finite, (0, 1)))(BAD_ROWS, BAD_T)
    for d in jax.tree.leaves(derivatives):
        assert np.isfinite(d).all()
    d = np.asarray(jax.tree.leaves(derivatives)[0])
    assert not d[[4, 5, 7, 8, 9, 10, 11]].any() and d[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "uint32"])
def test_dtypes_of_labels(dtype):
    with jax.enable_x64(dtype == "int64"):
        got = ps.token_stats(X, LABELS.astype(dtype)).log_probs
    np.testing.assert_array_equal(got, ps.token_stats(X, LABELS.astype("int32")).log_probs)


@pytest.mark.slow
def test_a_masked_label():
    where = np.arange(50) != 49
    got = ps.token_stats(X, LABELS, where=where)
    np.testing.assert_array_equal(np.isneginf(got.log_probs), [False, True, False, False])
    assert got.argmax[1] < 49
    dx = jax.grad(lambda x: jnp.sum(ps.token_stats(x, LABELS, where=where).log_probs))(X)
    np.testing.assert_array_equal(dx.any(1), [True, False, True, True])


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_argmax_of_subnormal_numbers(dtype):
    """It is by value: 0 and -0 tie, and subnormal numbers are no zeros."""
    x = jnp.asarray(SUBNORMAL, dtype)
    np.testing.assert_array_equal(ps.token_stats(x).argmax, ARGMAX_OF_SUBNORMAL)
    where = np.arange(6) > 0
    got = ps.token_stats(x, where=where, temperature=np.float32(0.5)).argmax
    np.testing.assert_array_equal(got, np.where(where, np.asarray(x, "float64"), -np.inf).argmax(1))


def test_argmax_of_subnormal_numbers_on_a_mesh():
    def of_shard(x):
        stats = xla.token_stats(x, None, jnp.ones((1, 1)), jnp.zeros((4, 1), jnp.int32), scaled=False)
        return combine_shards(
            stats.moments, stats.at_label, stats.argmax + 2 * jax.lax.axis_index("v"), ("v",)
        )[2]

    got = jax.jit(jax.vmap(of_shard, axis_name="v"))(SUBNORMAL.reshape(4, 3, 2).swapaxes(0, 1))
    np.testing.assert_array_equal(got[..., 0], [ARGMAX_OF_SUBNORMAL] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_axis_and_temperature_per_row(axis):
    x = np.random.default_rng(0).standard_normal((5, 7, 9)).astype("float32")
    rows = np.moveaxis(x, axis, -1)
    temperature = np.linspace(0.3, 3, rows[..., 0].size, dtype="float32").reshape(rows.shape[:-1])
    labels = np.zeros(rows.shape[:-1], "int32")
    f = functools.partial(ps.token_stats, axis=axis)
    got = jax.jit(lambda x, t: f(x, labels, temperature=t))(x, temperature)
    stats.assert_stats(got, rows, labels, temperature=temperature)
    assert f(x).entropy.shape == rows.shape[:-1]


@pytest.mark.slow
def test_a_traced_temperature_out_of_range_is_nan():
    got = jax.jit(lambda t: ps.token_stats(X, LABELS, temperature=t))(
        np.array([1.0, 0, -1, np.nan], "float32")
    )
    for a in got[:3]:
        np.testing.assert_array_equal(np.isnan(a), [False, False, True, True])


SIGNS = np.array([[3, 1, 3], [0, -0.0, -1], [-2, -1, -3], [TINY, 0, TINY], [-TINY, -2 * TINY, -1]], "float32")


@pytest.mark.parametrize("how", ["static", "traced", "one"])
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


@pytest.mark.parametrize(
    "transform",
    [jax.grad, slow(jax.jacfwd), slow(lambda f, argnums: jax.jacfwd(jax.grad(f, argnums), argnums))],
)
def test_gradients_at_temperature_0_are_0(transform):
    def total(x, t):
        s = ps.token_stats(x, LABELS, temperature=t)
        return sum(jnp.sum(jnp.where(jnp.isfinite(a), a * a, 0)) for a in s[:3])

    t = np.array([0, 0, 0, 0.7], "float32")
    for d in jax.tree.leaves(jax.jit(transform(total, (0, 1)))(X, t)):
        assert np.isfinite(d).all() and not np.asarray(d)[:3].any() and np.asarray(d)[3].any()


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float16"), slow("float64")])
@pytest.mark.parametrize("masked", [slow(False), True])
def test_ranks(dtype, masked):
    """The place in the order of lax.top_k: ties by the index, +0 above -0, NaNs by their sign."""
    rng = np.random.default_rng(3)
    x = np.round(2 * rng.standard_normal((200, 9))).astype("float32")
    x[:40, ::2] = -0.0
    for rows, value in ((slice(40, 60), np.nan), (slice(60, 80), -np.nan), (slice(80, 100), -np.inf)):
        x[rows] = np.where(rng.random((20, 9)) < 0.4, value, x[rows])
    labels, where = rng.integers(-1, 10, 200), rng.random((200, 9)) < 0.7 if masked else None
    with jax.enable_x64(dtype == "float64"):
        x = np.asarray(jnp.asarray(x, dtype))
        got = jax.jit(lambda x: ps.token_stats(x, labels, where=where, rank=True))(x)
        assert got.rank.dtype == np.int32
        np.testing.assert_array_equal(got.rank, oracle.rank(x, labels, where))
        mapped = jax.vmap(lambda x, label: ps.token_stats(x, label, rank=True).rank)(x, labels)
        np.testing.assert_array_equal(mapped, oracle.rank(x, labels))
    if masked:
        assert (np.asarray(got.rank) == 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn"])
def test_ranks_of_narrow_floats(dtype):
    x = jnp.asarray(X, dtype)
    got = jax.jit(lambda x: ps.token_stats(x, LABELS, rank=True))(x)
    np.testing.assert_array_equal(got.rank, oracle.rank(np.asarray(x.astype("float32")), LABELS))


@pytest.mark.slow
def test_other_results_do_not_change_with_a_rank():
    with_rank, without = (ps.token_stats(X, LABELS, temperature=0.7, rank=rank) for rank in (True, False))
    assert without.rank is None
    jax.tree.map(np.testing.assert_array_equal, with_rank[:4], without[:4])
    grads = [
        jax.grad(lambda x, rank=rank: jnp.sum(ps.token_stats(x, LABELS, rank=rank).entropy))(X)
        for rank in (True, False)
    ]
    np.testing.assert_array_equal(*grads)


@pytest.mark.slow
def test_gradient_of_the_temperature():
    _, (g, _, _), _, t = stats.operands(50)
    g, t = (g[:4], g[4:8], g[8:12]), t[:4]
    of_t = jax.vjp(lambda t: ps.token_stats(X, LABELS, temperature=t)[:3], t)[1](g)[0]
    _, want = oracle.token_stats_vjp(X, LABELS, g, None, t)
    np.testing.assert_allclose(of_t, want, rtol=1e-5, atol=1e-5)


def reference(x, t):
    """Returns the first three statistics in plain JAX."""
    log_p = jax.nn.log_softmax(x / t)
    at_label = jnp.take_along_axis(log_p, LABELS[: len(x), None], -1)[:, 0]
    return at_label, -jnp.sum(jnp.exp(log_p) * log_p, -1), jax.nn.logsumexp(x / t, -1)


def ours(x, t):
    return ps.token_stats(x, LABELS[: len(x)], temperature=t)[:3]


@pytest.mark.slow
def test_forward_mode():
    dx = np.random.default_rng(1).standard_normal(X.shape).astype("float32")
    got, want = (jax.jit(lambda x, f=f: jax.jvp(f, (x, 0.7), (dx, 0.3)))(X) for f in (ours, reference))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rev of rev", "fwd of rev", "rev of fwd"])
def test_second_derivatives(mode):
    outer, inner = ({"rev": jax.jacrev, "fwd": jax.jacfwd}[m] for m in mode.split(" of "))

    def second(f):
        return jax.jit(outer(inner(lambda x, t: jnp.stack(f(x, t)), (0, 1)), (0, 1)))(X[:1], 0.7)

    got, want = second(ours), second(reference)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), got, want)


@pytest.mark.slow
def test_vmap():
    want = ps.token_stats(X, LABELS)
    jax.tree.map(np.testing.assert_array_equal, jax.vmap(ps.token_stats)(X, LABELS), want)
    across = jax.vmap(lambda x, t: ps.token_stats(x, temperature=t), (None, 0))(
        X, np.array([1.0, 2.0], "float32")
    )
    np.testing.assert_array_equal(across.argmax, np.stack([want.argmax] * 2))


@pytest.mark.slow
def test_the_gradient_under_vmap_and_checkpoint():
    def total(x, label):
        s = ps.token_stats(x, label)
        return s.log_probs + s.entropy * s.logsumexp

    want = jax.grad(lambda x: jnp.sum(total(x, LABELS)))(X)
    for f in (total, jax.checkpoint(total)):
        np.testing.assert_allclose(jax.vmap(jax.grad(f))(X, LABELS), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_export():
    (n,) = jax.export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, 50), "float32"), jax.ShapeDtypeStruct((n,), "int32")
    for rank in (False, True):
        f = jax.jit(functools.partial(ps.token_stats, rank=rank))
        exported = jax.export.export(f, platforms=["cpu", "cuda"])(*shapes)
        got = jax.export.deserialize(exported.serialize()).call(X, LABELS.astype("int32"))
        assert isinstance(got, ps.TokenStats) and (got.rank is not None) == rank
        stats.assert_stats(got, X, LABELS)


@pytest.mark.slow
def test_no_rows_and_no_columns():
    assert ps.token_stats(X[:0], LABELS[:0]).entropy.shape == (0,)
    got = ps.token_stats(X[:, :0])
    assert np.isnan(got.entropy).all() and np.isneginf(got.logsumexp).all()


@pytest.mark.slow
def test_masked_garbage_does_not_matter():
    """Values and gradients ignore NaN and infinities at masked positions."""
    where = np.arange(50) % 3 > 0
    x = np.where(where, X, np.array([np.nan, np.inf, -np.inf, np.nan])[:, None]).astype("float32")

    def total(x):
        s = ps.token_stats(x, LABELS // 3 * 3 + 1, where=where)
        return jnp.sum(s.log_probs + s.entropy + s.logsumexp)

    got, want = (jax.value_and_grad(total)(a) for a in (x, X))
    jax.tree.map(np.testing.assert_array_equal, got, want)


BAD = [
    (TypeError, "labels must be integers, got float32", (X, LABELS.astype("float32")), {}),
    (
        ValueError,
        r"labels must have the shape of logits without axis 1, \(4,\), got \(3,\)",
        (X, LABELS[:3]),
        {},
    ),
    (TypeError, "labels must be an array", (X, [0, 1, 2, 3]), {}),
    (TypeError, "logits must be a float or integer array, got complex64", (X.astype("complex64"),), {}),
    (ValueError, "axis 2 is out of bounds", (X,), {"axis": 2}),
    (ValueError, "temperature must be at least 0, got -1.0", (X,), {"temperature": -1.0}),
    (ValueError, "rank=True needs labels, got labels=None", (X,), {"rank": True}),
    (TypeError, "rank must be True or False, got 1", (X, LABELS), {"rank": 1}),
    (ValueError, r"temperature must be a scalar or broadcast", (X,), {"temperature": np.ones(3)}),
    (ValueError, "where must be None or boolean", (X,), {"where": np.ones(50)}),
    (NotImplementedError, "no kernel for token_stats", (X,), {"implementation": "triton"}),
    (ValueError, "axis_name must name mesh axes", (X,), {"axis_name": "v"}),
]


@pytest.mark.parametrize(("error", "match", "args", "keywords"), BAD, ids=[bad[1] for bad in BAD])
def test_bad_input(error, match, args, keywords):
    with pytest.raises(error, match=match):
        ps.token_stats(*args, **keywords)


def test_explain():
    (forward,) = ps.explain(ps.token_stats, jax.ShapeDtypeStruct((128, 16384), "bfloat16"))
    assert (forward.call.op, forward.cuda, forward.elsewhere) == ("token_stats", "mosaic_gpu", "xla")
