"""The functions linear_*: losses, statistics, winners, gradients and labels."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from pallas_softmax._src.linear import xla as xla_projection
from pallas_softmax._src.linear.gradients import _scale
from pallas_softmax._src.linear.losses import Columns, Head, Tokens
from tests.support import linear, oracle
from tests.support.covering import first, in_turn, pairs, slow
from tests.support.oracle import wide

DTYPES = ("float32", "bfloat16", "float16")
HEADS = ("", "bias", "softcap", "transposed")
X, W, L = jnp.zeros((3, 4)), jnp.zeros((4, 5)), jnp.zeros(3, jnp.int32)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)

# --- Numbers: neither V nor n is a multiple of a chunk --------------------------------------------------

WITHOUT_SMOOTHING = [name for name, options in linear.FEATURES.items() if "label_smoothing" not in options]
NUMBERS = [  # the last one: labels per token with label_probs, None for one label
    ("bfloat16", "all", "mean", 4, True, None),
    ("float32", "softcap", None, 1, True, 5),
    ("float32", "bias", "mean", 40, True, None),
    ("bfloat16", "z_loss", None, 40, True, 5),
    *pairs(DTYPES, linear.FEATURES, ("mean", None, "sum"), (1, 40), (False, True), (None,)),
    *pairs(DTYPES, WITHOUT_SMOOTHING, ("mean", "sum", None), (1, 40), (True,), (5,)),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("dtype", "features", "reduction", "peak", "weighted", "k"), first(2, NUMBERS))
def test_losses_and_gradients(dtype, features, reduction, peak, weighted, k):
    linear.assert_losses_and_gradients(dtype, features, reduction, peak, weighted=weighted, k=k)


CHECKS = [
    (linear.assert_log_probs, "float32", "softcap", 1),
    (linear.assert_stats, "bfloat16", "softcap", 1),
    *pairs((linear.assert_log_probs, linear.assert_stats), DTYPES, HEADS, (40, 1)),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("check", "dtype", "features", "peak"), first(2, CHECKS))
def test_log_probs_and_token_stats(check, dtype, features, peak):
    check(dtype, features, peak)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "features", "k", "log"),
    first(1, [("bfloat16", "softcap", 5, True), *pairs(DTYPES, HEADS, (1, 5, 40), (False, True))]),
)
def test_topk(dtype, features, k, log):
    linear.assert_topk(dtype, features, k, log=log)


@pytest.mark.usefixtures("quick_compilation")
def test_logsumexp():
    """Tokens may have any number of dimensions."""
    x, w, _, bias = linear.arrays(30, 16, 517, "float32", bias=True)
    g = np.random.default_rng(1).standard_normal(30).astype("float32")
    head = {"softcap": 4.0, "temperature": 0.7}

    @linear.jit
    def run(x, w, bias):
        f = functools.partial(ps.linear_logsumexp, workspace_bytes=linear.workspace(517, 7), **head)
        values, pullback = jax.vjp(lambda x, w, bias: f(x.reshape(5, 6, 16), w, bias=bias), x, w, bias)
        return values, pullback(g.reshape(5, 6))

    values, gradients = run(x, w, bias)
    z, slope = linear.logits(x, w, bias=bias, **head)
    close(values, oracle.logsumexp(z, -1).reshape(5, 6))
    for got, want in zip(gradients, linear.gradients_of(g[:, None] * oracle.softmax(z) * slope, x, w, False)):
        assert linear.rounded_errors(got, want) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "n"), in_turn([1, 2, 127, 128, 129, 1000, 50257], [1, 130, 7]))
def test_shapes(vocab, n):
    linear.assert_losses_and_gradients("bfloat16", "", "mean", 1, n=n, depth=8, vocab=vocab, rows=3)
    linear.assert_stats("bfloat16", "", 1, n=n, depth=8, vocab=vocab, warm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"), [("float64", "float64"), ("float64", "float32"), ("float32", "float64")]
)
def test_x64(dtype, bias_dtype, x64):
    x, w, labels, bias = linear.arrays(20, 8, 300, dtype, bias=True)
    bias = bias.astype(bias_dtype)
    losses, _, *want = linear.losses_and_gradients(x, w, labels, np.full(20, 1 / 20), bias=bias)
    with jax.numpy_dtype_promotion("strict"):
        total, grads = linear.value_and_grads(
            lambda x, w, b: ps.linear_cross_entropy(x, w, labels.astype("int64"), bias=b), x, w, bias
        )
    assert total.dtype == dtype
    exact = dtype == "float64"
    np.testing.assert_allclose(total, losses.mean(), rtol=1e-14 if exact else 1e-6)
    for got, expected, held in zip(grads, want, (x, w, bias)):
        assert got.dtype == held.dtype
        rtol, atol = (1e-11, 1e-16) if exact and got.dtype == dtype else (1e-5, 1e-7)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_topk_equals_fused_topk():
    """With integers, no sum is rounded: ties go to the lowest column. One token, one batch, no token, k of 0 and V."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (3, 7, 8)).astype("float32")
    w = rng.integers(-2, 3, (8, 50)).astype("float32")
    for rows, k in ((x, 5), (x, 0), (x, 50), (x[0, 0], 3), (x[:0], 3)):
        got = ps.linear_topk(rows, w, k, workspace_bytes=1)
        want = ps.fused_topk(rows @ w, k)
        np.testing.assert_array_equal(got.indices, want.indices)
        np.testing.assert_allclose(got.values, want.values, rtol=1e-6)


SAMPLES = [  # the shape of x without D, how many keys, the generator, options
    ((7,), "one", None, {}),
    ((3, 7), "each", None, {"top_p": 0.8, "temperature": 0.5}),
    ((3, 7), "one", None, {"top_k": jnp.arange(7), "min_p": 0.01, "temperature": jnp.linspace(0, 2, 7)}),
    ((3, 7), "one", "rbg", {"top_k": 4, "softcap": 2.0}),
    ((21,), "each", "rbg", {"mode": "high"}),
    ((), "one", None, {"mode": "high", "top_p": 0.9}),
    ((0,), "one", None, {"top_p": 0.9}),
]


@pytest.mark.parametrize(("batch", "keys", "generator", "options"), first(1, SAMPLES))
def test_sample_equals_categorical(batch, keys, generator, options):
    """With integers, no logit is rounded: JAX draws the same tokens. One chunk, and chunks of eight tokens."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (*batch, 8)).astype("float32")
    w = rng.integers(-2, 3, (8, 50)).astype("float32") / 2
    key = jax.random.key(3, impl=generator)
    key = key if keys == "one" else jax.random.split(key, batch)
    softcap, t = options.get("softcap"), options.get("temperature", 1.0)
    filters = {name: value for name, value in options.items() if name not in ("softcap", "mode")}
    z = 2 * jnp.tanh(x @ w / 2) if softcap else x @ w
    z = jax.lax.optimization_barrier(z)
    draw = functools.partial(jax.random.categorical, mode=options.get("mode"))
    for _ in key.shape:
        draw = jax.vmap(draw)
    want, other = draw(key, ps.filter_logits(z, **filters)), ps.sample(key, z, **filters)
    for bytes_ in (2**29, 1):
        got = ps.linear_sample(key, x, w, workspace_bytes=bytes_, **options)
        np.testing.assert_array_equal(got.indices, want)
        np.testing.assert_allclose(got.log_mass, other.log_mass, atol=1e-5)
        log_probs = ps.linear_log_probs(x, w, got.indices, softcap=softcap, temperature=t)
        np.testing.assert_allclose(got.log_probs, log_probs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_sample_at_edges():
    """Rows without a draw, temperatures that `linear_log_probs` does not take, and a masked column."""
    w, bias = jnp.eye(4), jnp.array([0, 0, -jnp.inf, 0])
    x = jnp.array([[1.0, 2, 9, 0], [jnp.nan] * 4, [jnp.inf, 0, 0, 0], [0, 0, 0, 0], [3, 1e-3, 0, 0]])
    key = jax.random.key(0)
    sample = functools.partial(ps.linear_sample, key, bias=bias)
    drawn = sample(x, w, temperature=0.0)
    np.testing.assert_array_equal(drawn.indices, [1, -1, -1, 0, 0])
    np.testing.assert_allclose(drawn.log_probs, [0, np.nan, np.nan, -np.log(3), 0], rtol=1e-6)
    z, rows = x + bias, np.array([0, 3, 4])
    for t, mode in ((1e-40, "low"), (3e38, "low"), (1e-40, "high")):
        got, want = (
            f(temperature=t, mode=mode) for f in (functools.partial(sample, x, w), functools.partial(ps.sample, key, z))
        )
        np.testing.assert_array_equal(got.indices, want.indices)
        np.testing.assert_allclose(got.log_probs[rows], want.log_probs[rows], atol=1e-6)
    out_of_range = jax.jit(lambda p: sample(x, w, top_p=p))(jnp.array([0.5, 0.5, 0.5, 2, -1]))
    np.testing.assert_array_equal(out_of_range.indices[3:], -1)
    assert np.isnan(out_of_range.log_probs[3:]).all()
    only_masked = ps.linear_sample(key, x[:1], w, bias=jnp.full(4, -jnp.inf))
    assert only_masked.indices[0] == -1 and np.isnan(only_masked.log_mass[0])


@pytest.mark.slow
def test_draws_and_winners_in_float64(x64):
    x, w, _, _ = linear.arrays(20, 8, 100, "float64")
    z, key = np.asarray(x) @ np.asarray(w), jax.random.key(0)
    drawn, winners = ps.linear_sample(key, x, w, top_p=0.9), ps.linear_topk(x, w, 5)
    of_oracle, best = oracle.fused_topk(z, 5)
    want = ps.sample(key, z, top_p=0.9)
    for indices, numbers, *of in ((*drawn[:2], *want[:2]), (*winners[::-1], best, of_oracle.astype("float64"))):
        assert numbers.dtype == "float64" and indices.dtype == "int32"
        np.testing.assert_array_equal(indices, of[0])
        np.testing.assert_allclose(numbers, of[1], rtol=1e-12)


def test_argmax_of_zeros():
    linear.assert_argmax_of_zeros("xla")


@pytest.mark.slow
def test_the_forward_may_round_float32_logits_differently():
    """On a GPU, XLA may pick another matrix product for the backward. Here, the forward sums D in another order.

    With the forward's m and d, the backward of peaked rows would have ten times the error of plain JAX.
    """
    n, depth, vocab = 101, 1000, 1003
    x, w, labels, _ = linear.arrays(n, depth, vocab, "float32", peak=40)
    weights = np.random.default_rng(1).standard_normal(n).astype("float32")
    static = {"head": Head(precision="highest"), "workspace_bytes": linear.workspace(vocab)}
    forward, gradient = (
        jax.jit(functools.partial(xla_projection.OPERATIONS[name], **static))
        for name in ("projection", "projection_grad")
    )
    order, tokens = np.random.default_rng(2).permutation(depth), Tokens(labels)
    _, dx, *_ = gradient(x, w, Columns(), tokens, weights, forward(x[:, order], w[order], Columns(), tokens))
    theirs = jax.jit(jax.grad(lambda x: jnp.sum(weights * linear.plain(x, w, labels))))(x)
    _, size, want, *_ = linear.losses_and_gradients(x, w, labels, weights)
    of_plain = linear.rounded_errors(theirs, want)
    assert linear.rounded_errors(dx, want) <= linear.gradient_bound("x", "float32", of_plain, size.max())


@pytest.mark.slow
def test_float16_gradients_are_scaled_before_rounding():
    """Gradients are rounded once, after the cotangent multiplies them, so large sums and small means have gradients."""
    n, labels = 65536, np.zeros(65536, "int32")
    x, w = jnp.full((n, 1), 4, "float16"), jnp.zeros((1, 2), "float16")
    dw = jax.grad(lambda w: ps.linear_cross_entropy(x, w, labels, reduction="sum") / n)(w)
    np.testing.assert_array_equal(dw, [[-2, 2]])
    w = jnp.array([[1e-4, -1e-4]], "float16")
    dx = jax.grad(lambda x: n * ps.linear_cross_entropy(x, w, labels))(x)
    np.testing.assert_allclose(dx[0], -1e-4, rtol=2e-3)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", None])
def test_float16_gradient_of_a_large_z_loss(reduction):
    """The factor 1 + 2 z_loss logsumexp is 65 here."""
    x, w = jnp.array([[4, 0]], "float16"), jnp.array([[10, 0], [0, 0]], "float16")
    loss = functools.partial(ps.linear_cross_entropy, labels=L[:1], z_loss=0.8, reduction=reduction)
    dx = linear.jit(jax.grad(lambda x: loss(x, w).sum()))(x)
    np.testing.assert_array_equal(dx, [[640, 0]])


@pytest.mark.usefixtures("quick_compilation")
def test_float16_gradient_of_a_tiny_cotangent():
    w = jnp.ones((4, 5), "float16")
    gradient = linear.jit(lambda x, g: jax.vjp(lambda x: ps.linear_logsumexp(x, w), x)[1](g)[0])
    np.testing.assert_array_equal(gradient(jnp.ones((3, 4), "float16"), jnp.full(3, 1e-35)), 0)


def test_exact_scales_are_powers_of_two():
    for largest in (0.0, 1e-40, 1e-38, 1 / 206, 1 / 8192, 0.7, 1.0, 3e5):
        weights = jnp.array([0.3 * largest, -largest, jnp.nan, jnp.inf])
        scale = float(_scale(weights, jnp.bfloat16, exact=True))
        assert np.frexp(scale)[0] == 0.5
        assert largest < 1e-37 or 3 / 4 <= largest / scale <= 3 / 2


# --- Labels, columns and weights ------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("vocab", "dtype"), first(1, [(300, "uint8"), (256, "uint8"), (300, "int8"), (70000, "int16")])
)
def test_labels_of_small_dtypes(vocab, dtype):
    """Labels are right even if their dtype cannot hold V."""
    x, w, _, _ = linear.arrays(3, 8, vocab, "float32")
    labels = np.asarray([3, 100, np.iinfo(dtype).max], dtype)
    both = linear.jit(lambda *labels: [ps.linear_log_probs(x, w, of) for of in labels])
    close(*both(labels, labels.astype("int32")))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_several_labels_out_of_range():
    """A bad label is NaN in its own place, and has no effect if its cotangent is 0."""
    x, w, good, _ = linear.arrays(6, 8, 100, "float32")
    labels = np.stack([good, good + 100, -1 - good, good], 1)

    @linear.jit
    def run(labels, g):
        f = functools.partial(ps.linear_log_probs, labels=labels, workspace_bytes=linear.workspace(100, 3))
        values, pullback = jax.vjp(f, x, w)
        return values, pullback(g)

    values, gradients = run(labels, np.float32([[1, 0, 0, 2]] * 6))
    np.testing.assert_array_equal(np.isnan(values), [[False, True, True, False]] * 6)
    want, of_good = run(labels[:, ::3], np.float32([[1, 2]] * 6))
    np.testing.assert_array_equal(values[:, ::3], want)
    jax.tree.map(close, gradients, of_good)
    _, (dx, _) = run(labels, np.float32([[0, 1, 0, 0]] * 6))
    assert not dx.any()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_no_label_and_one_label():
    """One label of K labels is a label; with label_probs, its probability is 1."""
    x, w, labels, _ = linear.arrays(12, 8, 100, "float32")
    x, labels = x.reshape(3, 4, 8), labels.reshape(3, 4)
    one, none = labels[..., None], labels[..., None][..., :0]

    def several(x, w):
        return ps.linear_log_probs(x, w, one).mean()

    def soft(x, w, labels=one):
        return -ps.linear_cross_entropy(x, w, labels, label_probs=1.0 * (labels == labels))

    want = linear.value_and_grads(lambda x, w: ps.linear_log_probs(x, w, labels).mean(), x, w)
    for f in (several, soft):
        jax.tree.map(close, linear.value_and_grads(f, x, w), want)
    assert ps.linear_log_probs(x, w, none).shape == (3, 4, 0)
    gradients = linear.value_and_grads(lambda x, w: ps.linear_log_probs(x, w, none).sum(), x, w)
    for a in jax.tree.leaves((gradients, linear.value_and_grads(functools.partial(soft, labels=none), x, w))):
        np.testing.assert_array_equal(a, 0)


@pytest.mark.parametrize("x", [np.nan, slow(np.inf)])
def test_a_token_without_label_probs_and_with_infinite_logits(x):
    """Its loss is NaN, so its derivative is 0, and the other tokens keep theirs."""
    x, w, labels = jnp.array([[1, 0], [x, 1]]), jnp.eye(2), jnp.array([[1], [0]])
    loss = functools.partial(ps.linear_cross_entropy, x, labels=labels, label_probs=jnp.eye(2)[:, :1], reduction=None)
    values, pullback = jax.vjp(loss, w)
    np.testing.assert_array_equal(np.isnan(values), [False, True])
    (dw,), other = pullback(jnp.ones(2)), jax.grad(lambda w: -ps.linear_log_probs(x[:1], w, labels[0]).sum())(w)
    np.testing.assert_allclose(dw, other, rtol=1e-6)


@pytest.mark.parametrize(("t", "is_accepted"), [(-1e-40, False), slow(1e-40, False), slow(0, True), slow(1, True)])
def test_a_traced_temperature_that_is_subnormal(t, is_accepted):
    for f in (
        lambda x, t: ps.linear_logsumexp(x, x, temperature=t),
        lambda x, t: ps.linear_topk(x, x, 1, temperature=t),
    ):
        first, *_ = jax.tree.leaves(jax.jit(f)(jnp.eye(2), np.float32(t)))
        np.testing.assert_array_equal(np.isnan(first), not is_accepted)


@pytest.mark.usefixtures("quick_compilation")
def test_infinite_logit():
    """Log-probs are NaN, as in jax.nn.log_softmax. The loss is infinite, except at the infinite logit."""
    x, w, labels = jnp.ones((2, 1)), jnp.array([[jnp.inf, 0.0, 1.0]]), jnp.array([0, 1])

    @linear.jit
    def results(x, w):
        several = ps.linear_log_probs(x, w, jnp.array([[0, 1], [2, 1]]))
        loss = ps.linear_cross_entropy(x, w, labels, reduction=None)
        return (ps.linear_log_probs(x, w, labels), several), loss

    log_probs, loss = results(x, w)
    assert all(np.isnan(of).all() for of in log_probs)
    np.testing.assert_array_equal(loss, [np.nan, np.inf])


@pytest.mark.slow
@pytest.mark.parametrize("of_bias", [np.nan, np.inf, -np.inf])
def test_token_stats_of_logits_that_are_not_finite(of_bias):
    x, w, labels, _ = linear.arrays(12, 8, 100, "float32")
    bias = np.zeros(100, "float32")
    bias[70:] = of_bias
    got = ps.linear_token_stats(x.at[3].set(jnp.nan), w, labels % 70, bias=bias)
    if np.isneginf(of_bias):  # these columns do not count
        assert np.isfinite(np.delete(got.entropy, 3)).all() and (got.argmax < 70).all()
    else:
        assert np.isnan(got.entropy).all() and np.isnan(got.log_probs).all()
        np.testing.assert_array_equal(got.argmax, [70] * 3 + [0] + [70] * 8)
    none = ps.linear_token_stats(x, w, labels, bias=np.full(100, -np.inf, "float32"))
    assert np.isnan(none.entropy).all() and np.isneginf(none.logsumexp).all() and not none.argmax.any()


@pytest.mark.slow
def test_columns_that_the_bias_masks():
    """A bias of -inf masks a column, for example padding of w."""
    x, w, labels, _ = linear.arrays(12, 8, 100, "bfloat16")
    f = jax.value_and_grad(ps.linear_cross_entropy, (0, 1))
    loss, (dx, dw) = f(x, w[:, :90], labels % 90)
    mask = jnp.where(jnp.arange(100) < 90, 0, -jnp.inf)
    wide_loss, (wide_dx, wide_dw) = f(x, w.at[:, 90:].set(9), labels % 90, bias=mask)
    np.testing.assert_array_equal(wide_dw[:, 90:], 0)
    np.testing.assert_allclose(wide_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(wide(wide_dx), wide(dx), rtol=2**-6, atol=2**-12)
    np.testing.assert_allclose(wide(wide_dw[:, :90]), wide(dw), rtol=2**-6, atol=2**-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "name", "values"),
    [
        (6, "where", np.zeros(6, bool)),
        (0, "where", np.zeros(0, bool)),
        (6, "token_weights", np.float32([1, -1, 2, -2, 3, -3])),
        (6, "token_weights", np.zeros(6, "float32")),
    ],
)
def test_a_mean_without_weight_is_0(n, name, values):
    x, w, labels, _ = linear.arrays(6, 8, 100, "float32")
    f = lambda x, w, given: ps.linear_cross_entropy(x, w, labels[:n], **{name: given})  # noqa: E731
    with jax.debug_nans(True):
        loss, gradients = jax.value_and_grad(f, (0, 1) if name == "where" else (0, 1, 2))(x[:n], w, values)
    assert loss == 0 and not any(map(jnp.any, gradients))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "token_weights",
    [
        [3e38] * 6,
        [1e-39] * 6,
        [-3e38, 3e38, 3e38, 0, 0, 3e38],
        [1e-39, 0, 3e-39, -1e-39, 2e-38, 1e-45],
        [1, 2, 1e-39, 3, 0, 1],
        [1e-39, -1e-39, 0, 0, 0, 0],
    ],
    ids=str,
)
def test_a_mean_with_extreme_weights(token_weights):
    """The sum of the weights overflows or is subnormal. The mean is right, and so are its gradients."""
    x, w, labels, _ = linear.arrays(6, 8, 100, "float32")
    token_weights = np.array(token_weights, "float32")

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def mean(x, w, weights):
        return ps.linear_cross_entropy(x, w, labels, token_weights=weights)

    total = wide(token_weights).sum()
    shares = wide(token_weights) / (total or 1)
    losses, *_ = linear.losses_and_gradients(x, w, labels, shares)
    value, (*gradients, of_weights) = mean(x, w, token_weights)
    np.testing.assert_allclose(value, (losses * shares).sum() if total else 0, rtol=1e-5)
    _, (*want, _) = mean(x, w, shares.astype("float32") if total else np.zeros(6, "float32"))
    for got, of_shares in zip(gradients, want):
        np.testing.assert_allclose(got, of_shares, rtol=1e-4, atol=1e-6)
    exact = (losses - (losses * shares).sum()) / (total or np.inf) * (token_weights != 0)
    fine = np.isfinite(of_weights)
    np.testing.assert_allclose(wide(of_weights)[fine], exact[fine], rtol=1e-3, atol=1e-6)


# --- Transformations, choice, and bad input -------------------------------------------------------------


@pytest.mark.slow
def test_export_of_any_depth():
    """The depth may be symbolic. The number of columns may not."""
    n, d, v = jax.export.symbolic_shape("n, d, v")
    x, labels = jax.ShapeDtypeStruct((n, d), "float32"), jax.ShapeDtypeStruct((n,), "int32")
    loss = functools.partial(ps.linear_cross_entropy, workspace_bytes=1)
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))))(x, jax.ShapeDtypeStruct((d, 100), "float32"), labels)
    x_at, w_at, labels_at, _ = linear.arrays(24, 8, 100, "float32")
    got, want = exported.call(x_at, w_at, labels_at), jax.grad(loss, (0, 1))(x_at, w_at, labels_at)
    jax.tree.map(close, got, want)
    with pytest.raises(NotImplementedError, match="V=v is symbolic"):
        jax.export.export(jax.jit(loss))(x, jax.ShapeDtypeStruct((d, v), "float32"), labels)


def test_second_derivatives_raise():
    for reduction in ("mean", None):
        f = jax.grad(lambda x, of=reduction: jnp.sum(ps.linear_cross_entropy(x, W, L, reduction=of)))
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))).lower(X)


@pytest.mark.parametrize("transform", [jax.grad, slow(jax.jacfwd)])
def test_winners_and_draws_have_no_gradient(transform):
    with pytest.raises(NotImplementedError, match="linear_topk: there is no gradient.*linear_log_probs"):
        jax.eval_shape(transform(lambda w: jnp.sum(ps.linear_topk(X, w, 2).values)), W)
    with pytest.raises(NotImplementedError, match="linear_sample: there is no gradient.*linear_log_probs"):
        jax.eval_shape(transform(lambda w: jnp.sum(ps.linear_sample(jax.random.key(0), X, w).log_probs)), W)
    values = lambda w: ps.linear_topk(X, jax.lax.stop_gradient(w), 2).values  # noqa: E731
    jax.eval_shape(jax.grad(lambda w: jnp.sum(values(w)) * w[0, 0]), W)


def test_explain_and_named_implementations():
    shapes = linear.of_size(16, 8, 100)
    for f, *others in (
        [ps.linear_cross_entropy, shapes[2]],
        [ps.linear_kl_divergence, *linear.of_size(16, 24, 100)[:2]],
    ):
        forward, gradient = ps.explain(f, *shapes[:2], *others, implementation="xla")
        assert str(forward).startswith(f"{f.__name__} bfloat16[16, 8] @ [8, 100]: xla")
        assert (forward.call.op, gradient.call.op) == ("projection", "projection_grad")


def test_x_must_not_differ_along_axis_name():
    mesh = AbstractMesh((2,), ("v",), axis_types=(AxisType.Auto,))
    logsumexp = functools.partial(ps.linear_logsumexp, axis_name="v")
    f = jax.shard_map(logsumexp, mesh=mesh, in_specs=(P("v"), P(None, "v")), out_specs=P("v"))
    with pytest.raises(ValueError, match="x must be the same on all devices of axis_name='v'"):
        jax.eval_shape(f, jnp.zeros((4, 8)), jnp.zeros((8, 10)))
