"""The functions linear_*: losses, statistics, winners, gradients, labels, masks and memory."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AbstractMesh, AxisType

import pallas_softmax as ps
from pallas_softmax._src.linear import xla as xla_projection
from pallas_softmax._src.linear.chunks import chunk_rows
from pallas_softmax._src.linear.gradients import _scale, gradient_rows
from pallas_softmax._src.linear.losses import Head, Tokens
from tests.support import oracle
from tests.support.covering import first, pairs, slow
from tests.support.linear import (
    FEATURES,
    MEMORY,
    arrays,
    assert_argmax_of_zeros,
    assert_left_out_tokens_do_not_matter,
    assert_losses_and_gradients,
    assert_several_labels,
    assert_stats,
    assert_topk,
    gradient_bound,
    losses_and_gradients,
    of_size,
    plain,
    rounded_errors,
    run_log_probs,
    value_and_grads,
    workspace,
)
from tests.support.oracle import wide

# --- Numbers: neither V nor n is a multiple of a chunk ------------------------------------------------

NUMBERS = [
    ("bfloat16", "all", "mean", 4),
    ("float16", "all", None, 4),
    ("float32", "softcap", "sum", 1),
    *pairs(("float32", "bfloat16", "float16"), FEATURES, ("mean", None), (1, 40)),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("dtype", "features", "reduction", "peak"), first(1, NUMBERS))
def test_losses_and_gradients(dtype, features, reduction, peak):
    assert_losses_and_gradients(dtype, features, reduction, peak)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "features", "reduction"),
    first(
        1,
        [
            ("float32", "bias", "mean"),
            *pairs(("bfloat16", "float16", "float32"), ("", "all"), ("mean", "sum", None)),
        ],
    ),
)
def test_losses_and_gradients_with_token_weights(dtype, features, reduction):
    assert_losses_and_gradients(dtype, features, reduction, peak=4, weighted=True)


@pytest.mark.usefixtures("quick_compilation")
def test_logsumexp_and_log_probs():
    x, w, labels, bias = arrays(30, 16, 517, "float32", bias=True)
    x, labels = x.reshape(5, 6, 16), labels.reshape(5, 6)
    g = np.random.default_rng(1).standard_normal((5, 6)).astype("float32")
    small = workspace(517, 7)

    def ours(x, w, b):
        lse = ps.linear_logsumexp(x, w, bias=b, softcap=4.0, workspace_bytes=small)
        log_p = ps.linear_log_probs(x, w, labels, bias=b, softcap=4.0, temperature=0.7, workspace_bytes=small)
        return jnp.sum(g * lse) + jnp.sum(g**2 * log_p), (lse, log_p)

    def reference(x, w, b):
        z = 4 * jnp.tanh((jnp.matmul(x, w, precision="highest") + b) / 4)
        log_p = jax.nn.log_softmax(z / 0.7)
        log_p = jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
        lse = jax.nn.logsumexp(z, -1)
        return jnp.sum(g * lse) + jnp.sum(g**2 * log_p), (lse, log_p)

    (_, values), grads = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(x, w, bias)
    (_, want), want_grads = jax.jit(jax.value_and_grad(reference, (0, 1, 2), has_aux=True))(x, w, bias)
    for a, b in zip((*values, *grads), (*want, *want_grads)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "features", "peak"),
    first(
        1,
        [
            ("float32", "softcap", 1),
            ("bfloat16", "", 40),
            *pairs(("float32", "bfloat16", "float16"), ("", "bias", "softcap", "transposed"), (1, 40)),
        ],
    ),
)
def test_several_labels(dtype, features, peak):
    assert_several_labels(run_log_probs, dtype, features, peak, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000, 50257])
@pytest.mark.parametrize("n", [1, 7, 130])
def test_shapes(n, vocab):
    x, w, labels, _ = arrays(n, 8, vocab, "bfloat16")
    losses, size, dx, dw, _ = losses_and_gradients(x, w, labels, np.full(n, 1 / n))
    f = functools.partial(ps.linear_cross_entropy, workspace_bytes=workspace(vocab, 3))
    total, grads = value_and_grads(lambda x, w: f(x, w, labels), x, w)
    assert abs(float(total) - losses.mean()) <= 4 * np.spacing(np.float32(size.max() + losses.max()))
    for got, want in zip(grads, (dx, dw)):
        # dz and the result are rounded to 8 bits once each; at V = 1 the gradient is 0
        assert np.linalg.norm(wide(got) - want) <= 2**-8 * np.linalg.norm(want) + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"), [("float64", "float64"), ("float64", "float32"), ("float32", "float64")]
)
def test_x64(dtype, bias_dtype, x64):
    x, w, labels, bias = arrays(20, 8, 300, dtype, bias=True)
    bias = bias.astype(bias_dtype)
    losses, _, *want = losses_and_gradients(x, w, labels, np.full(20, 1 / 20), bias=bias)
    with jax.numpy_dtype_promotion("strict"):
        total, grads = value_and_grads(
            lambda x, w, b: ps.linear_cross_entropy(x, w, labels.astype("int64"), bias=b), x, w, bias
        )
    assert total.dtype == dtype
    exact = dtype == "float64"
    np.testing.assert_allclose(total, losses.mean(), rtol=1e-14 if exact else 1e-6)
    for got, expected, held in zip(grads, want, (x, w, bias)):
        assert got.dtype == held.dtype
        rtol, atol = (1e-11, 1e-16) if exact and got.dtype == dtype else (1e-5, 1e-7)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


# --- Labels and masks ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", slow(None)])
def test_masked_tokens_do_not_matter(reduction):
    """A token that `where` masks has no effect, even with a NaN in x or an invalid label."""
    x, w, labels, bias = arrays(10, 8, 100, "float32", bias=True)
    where = np.arange(10) % 3 != 0
    masked_x = jnp.where(where[:, None], x, jnp.nan)
    masked_labels = jnp.where(where, labels, jnp.asarray([100, -1, 2**31 - 1, -(2**31), 7] * 2))
    f_of = functools.partial(
        ps.linear_cross_entropy,
        where=where,
        bias=bias + 200,  # exp(bias) overflows
        reduction=reduction,
        workspace_bytes=workspace(100, 3),
    )
    f = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(f_of(*args)), (0, 1)))
    jax.tree.map(np.testing.assert_array_equal, f(x, w, labels), f(masked_x, w, masked_labels))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "share", "reduction"),
    pairs(["float32", "bfloat16", "float16"], [0.5, 0.0, 0.2, 0.7, 0.95, 1.0], ["mean", None]),
)
def test_many_left_out_tokens(dtype, share, reduction):
    """With many tokens, only the kept ones are multiplied, and some more."""
    assert_left_out_tokens_do_not_matter(dtype, share, reduction)


def test_products_of_kept_tokens():
    """A program has four sizes of its products: 17, 33, 49 and 64 of 64 parts of the tokens, in
    multiples of 128. A call runs one of them."""
    x, w, labels, _ = arrays(2048, 8, 100, "float32")

    def rows(where):
        f = functools.partial(ps.linear_cross_entropy, where=where)
        text = str(jax.make_jaxpr(f)(x, w, labels))
        return {int(rows) for rows in re.findall(r":f32\[(\d+),100\] = dot_general", text)}

    assert rows(jnp.arange(2048) % 2 == 0) == {640, 1152, 1664, 2048}
    assert rows(None) == {2048}


WEIGHTS = np.float32([0.5, -2, 0, 1e-3, 3, 0, -0.25, 1, 7, 0])  # of the tokens of `weighted`


def weighted(reduction):
    """Returns losses with a gradient in the weights, ours and plain. The second has no NaN in tokens of weight 0."""
    x, w, labels, bias = arrays(10, 8, 100, "float32", bias=True)
    out = WEIGHTS == 0
    bad_x, bad_labels = jnp.where(out[:, None], jnp.nan, x), jnp.where(out, -100, labels)
    g = jnp.linspace(-1, 2, 10)

    def ours(x, w, bias, weights):
        x = jnp.where(out[:, None], bad_x, x)
        small = workspace(100, 3)
        loss = ps.linear_cross_entropy(
            x, w, bad_labels, bias=bias, token_weights=weights, reduction=reduction, workspace_bytes=small
        )
        return jnp.sum(loss * g) if reduction is None else loss

    def theirs(x, w, bias, weights):
        weights = jnp.where(out, 0, weights)
        losses = weights * plain(x, w, labels, bias=bias)
        return jnp.sum(losses * g if reduction is None else losses) / (
            jnp.sum(weights) if reduction == "mean" else 1
        )

    return ours, theirs, (x, w, bias, WEIGHTS)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", slow("sum"), slow(None)])
def test_gradient_in_token_weights(reduction):
    """A weight of 0 leaves the token out, with a NaN in x and an invalid label; the gradient in this weight is 0."""
    ours, theirs, args = weighted(reduction)
    got, want = (value_and_grads(f, *args) for f in (ours, theirs))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), got, want)
    np.testing.assert_array_equal(got[1][3][WEIGHTS == 0], 0)


@pytest.mark.slow
def test_token_weights_that_sum_to_0():
    x, w, labels, _ = arrays(4, 8, 100, "float32")
    for weights in ([1.0, -1.0, 2.0, -2.0], [0.0] * 4):
        f = functools.partial(ps.linear_cross_entropy, x, w, labels)
        with jax.debug_nans(True):
            loss, gradient = jax.value_and_grad(lambda t, f=f: f(token_weights=t))(jnp.array(weights))
        assert loss == 0 and not gradient.any()


@pytest.mark.slow
def test_a_weighted_mean_takes_three_products():
    x, w, labels = of_size(64, 8, 100)
    weights = jax.ShapeDtypeStruct((64,), "float32")

    def loss(x, w, labels, weights):
        return ps.linear_cross_entropy(x, w, labels, token_weights=weights)

    assert products(jax.value_and_grad(loss, (0, 1, 3)), x, w, labels, weights)[0] == 3


@pytest.mark.slow
def test_several_labels_take_the_products_of_one_label():
    x, w, labels, _ = arrays(24, 8, 100, "float32")

    def squares(x, w):
        several = jnp.stack([labels] * 5, 1)
        return jnp.sum(ps.linear_log_probs(x, w, several, workspace_bytes=workspace(100, 5)) ** 2)

    assert products(jax.grad(squares, (0, 1)), x, w)[0] == 1 + 2 * 3


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "token_weights",
    [
        [3e38] * 6,
        [1e-39] * 6,
        slow([-3e38, 3e38, 3e38, 0, 0, 3e38]),
        slow([1e-39, 0, 3e-39, -1e-39, 2e-38, 1e-45]),
        slow([1, 2, 1e-39, 3, 0, 1]),
        slow([1e-39, -1e-39, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_mean_with_extreme_weights(token_weights):
    """The sum of the weights overflows or is subnormal. The mean is right, and so are its gradients."""
    x, w, labels, _ = arrays(6, 8, 100, "float32")
    token_weights = np.array(token_weights, "float32")

    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def mean(x, w, weights):
        return ps.linear_cross_entropy(x, w, labels, token_weights=weights)

    total = wide(token_weights).sum()
    shares = wide(token_weights) / (total or 1)
    losses, *_ = losses_and_gradients(x, w, labels, shares)
    value, gradients = mean(x, w, token_weights)
    np.testing.assert_allclose(value, (losses * shares).sum() if total else 0, rtol=1e-5)
    _, want = mean(x, w, shares.astype("float32") if total else np.zeros(6, "float32"))
    for got, of_shares in zip(gradients, want):
        np.testing.assert_allclose(got, of_shares, rtol=1e-4, atol=1e-6)

    of_weights = jax.grad(lambda t: ps.linear_cross_entropy(x, w, labels, token_weights=t, reduction="mean"))(
        token_weights
    )
    exact = (losses - (losses * shares).sum()) / (total or np.inf) * (token_weights != 0)
    fine = np.isfinite(of_weights)
    np.testing.assert_allclose(wide(of_weights)[fine], exact[fine], rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("dtype", ["float32", slow("float16")])
@pytest.mark.parametrize("reduction", ["mean", slow("sum")])
def test_a_total_that_is_not_finite_has_derivatives_of_0(reduction, dtype):
    x, w, labels, _ = arrays(6, 8, 100, dtype)

    def f(x, w, bias, token_weights, labels):
        loss = ps.linear_cross_entropy(
            x, w, labels, bias=bias, token_weights=token_weights, reduction=reduction
        )
        return jnp.where(jnp.isfinite(loss), jnp.exp(loss), 0)

    operands = x, w, jnp.zeros(100), jnp.ones(6), labels
    bad = (labels.at[1].set(-100), 4), (x.at[1].set(jnp.nan), 0), (jnp.ones(6).at[1].set(jnp.inf), 3)
    gradient = jax.jit(jax.grad(f, (0, 1, 2, 3)))
    assert all(wide(d).any() for d in gradient(*operands)[:3])
    for value, of in bad:
        for d in gradient(*operands[:of], value, *operands[of + 1 :]):
            assert not wide(d).any(), of


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_labels_out_of_range(dtype):
    """A bad label is NaN in its own place, and has no effect if its cotangent is 0."""
    x, w, labels, _ = arrays(6, 8, 100, dtype)
    labels = np.stack([labels, labels + 100, -1 - labels, labels], 1)
    where = np.arange(6) != 2

    def f(x, w, labels):
        x = jnp.where(where[:, None], x, jnp.nan)
        return ps.linear_log_probs(x, w, labels, where=where, workspace_bytes=workspace(100, 3))

    def total(x, w, labels):
        return jnp.sum(jnp.where((labels >= 0) & (labels < 100), f(x, w, labels), 0))

    got, want = f(x, w, labels), f(x, w, labels[:, 0])
    np.testing.assert_array_equal(got[:, 0], want)
    np.testing.assert_array_equal(got[:, 3], want)
    np.testing.assert_array_equal(np.isnan(got[:, 1:3]), np.stack([where] * 2, 1))
    np.testing.assert_array_equal(got[2], 0)
    got, want = (jax.grad(total, (0, 1))(x, w, of) for of in (labels, labels[:, ::3]))
    for a, b in zip(got, want):
        assert np.isfinite(wide(a)).all()
        np.testing.assert_allclose(wide(a), wide(b), rtol=1e-5, atol=1e-6)
    dx = jax.grad(lambda x: jnp.sum(f(x, w, labels)[:, 1]))(x)
    assert not wide(dx).any()


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1])
def test_no_label_and_one_label(k):
    x, w, labels, _ = arrays(12, 8, 100, "float32")
    x, labels = x.reshape(3, 4, 8), labels.reshape(3, 4, 1)[..., :k]
    values, gradients = jax.value_and_grad(lambda x, w: ps.linear_log_probs(x, w, labels).sum(), (0, 1))(x, w)
    want = (
        jax.value_and_grad(lambda x, w: ps.linear_log_probs(x, w, labels[..., 0]).sum(), (0, 1))(x, w)
        if k
        else (0.0, (0 * x, 0 * w))
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (values, gradients), want)
    assert ps.linear_log_probs(x, w, labels).shape == (3, 4, k)


@pytest.mark.parametrize(
    ("vocab", "dtype"), first(1, [(300, "uint8"), (256, "uint8"), (300, "int8"), (70000, "int16")])
)
def test_labels_of_small_dtypes(vocab, dtype):
    """Labels are right even if their dtype cannot hold V."""
    x, w, _, _ = arrays(3, 8, vocab, "float32")
    labels = np.asarray([3, 100, np.iinfo(dtype).max], dtype)
    got, want = (ps.linear_cross_entropy(x, w, labels) for labels in (labels, labels.astype("int32")))
    np.testing.assert_allclose(got, want, rtol=1e-6)


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


@pytest.mark.parametrize("reduction", ["mean", slow(None)])
def test_float16_gradient_of_a_large_z_loss(reduction):
    """The factor 1 + 2 z_loss logsumexp is 65 here."""
    x, w = jnp.array([[4, 0]], "float16"), jnp.array([[10, 0], [0, 0]], "float16")
    dx = jax.grad(
        lambda x: ps.linear_cross_entropy(x, w, jnp.array([0]), z_loss=0.8, reduction=reduction).sum()
    )(x)
    np.testing.assert_array_equal(dx, [[640, 0]])


def test_float16_gradient_of_a_tiny_cotangent():
    w = jnp.ones((4, 5), "float16")
    _, pullback = jax.vjp(lambda x: ps.linear_logsumexp(x, w), jnp.ones((3, 4), "float16"))
    np.testing.assert_array_equal(pullback(jnp.full(3, 1e-35))[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("transpose_w", [False, True])
def test_dw_in_blocks_of_columns(transpose_w, monkeypatch):
    """The CPU takes the path for large V. The last block of columns overlaps the block before."""
    monkeypatch.setattr(xla_projection, "_PRODUCT_BYTES", 8 * 4 * 30)
    jax.clear_caches()
    x, w, labels, _ = arrays(40, 8, 103, "float32", transpose_w=transpose_w)
    dw = jax.grad(
        lambda w: ps.linear_cross_entropy(
            x, w, labels, transpose_w=transpose_w, workspace_bytes=workspace(103, 8)
        )
    )(w)
    p = np.exp(wide(x) @ wide(w.T if transpose_w else w))
    dz = (p / p.sum(1, keepdims=True) - np.eye(103)[labels]) / 40
    want = wide(x).T @ dz
    np.testing.assert_allclose(dw, want.T if transpose_w else want, rtol=1e-4, atol=1e-6)
    jax.clear_caches()


@pytest.mark.slow
def test_all_tokens_masked():
    x, w, labels, _ = arrays(6, 8, 100, "float32")
    for n in (6, 0):
        f = functools.partial(ps.linear_cross_entropy, where=jnp.zeros(n, bool))
        loss, grads = jax.value_and_grad(f, (0, 1))(x[:n], w, labels[:n])
        assert loss == 0 and not any(map(jnp.any, grads))


@pytest.mark.slow
def test_columns_that_the_bias_masks():
    """A bias of -inf masks a column, for example padding of w."""
    x, w, labels, _ = arrays(12, 8, 100, "bfloat16")
    f = jax.value_and_grad(ps.linear_cross_entropy, (0, 1))
    loss, (dx, dw) = f(x, w[:, :90], labels % 90)
    mask = jnp.where(jnp.arange(100) < 90, 0, -jnp.inf)
    wide_loss, (wide_dx, wide_dw) = f(x, w.at[:, 90:].set(9), labels % 90, bias=mask)
    np.testing.assert_array_equal(wide_dw[:, 90:], 0)
    np.testing.assert_allclose(wide_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(wide(wide_dx), wide(dx), rtol=2**-6, atol=2**-12)
    np.testing.assert_allclose(wide(wide_dw[:, :90]), wide(dw), rtol=2**-6, atol=2**-12)


# --- Statistics of tokens, and winners ----------------------------------------------------------------


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "features", "peak"),
    first(
        1,
        [
            ("bfloat16", "softcap", 1),
            *pairs(["float32", "bfloat16", "float16"], ["", "bias", "softcap", "transposed"], [1, 40]),
        ],
    ),
)
def test_token_stats(dtype, features, peak):
    assert_stats(dtype, features, peak)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 50257])
@pytest.mark.parametrize("n", [1, 130])
def test_token_stats_of_shapes(n, vocab):
    assert_stats("bfloat16", "", 1, n=n, depth=8, vocab=vocab, temperature=False)


@pytest.mark.slow
@pytest.mark.parametrize("of_bias", [np.nan, np.inf, -np.inf])
def test_token_stats_of_logits_that_are_not_finite(of_bias):
    x, w, labels, _ = arrays(12, 8, 100, "float32")
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


def test_argmax_of_zeros():
    assert_argmax_of_zeros("xla")


@pytest.mark.parametrize("several", [False, True])
def test_infinite_logit(several):
    """Log-probs are NaN, as in jax.nn.log_softmax. The loss is infinite, except at the infinite logit."""
    x, w = jnp.ones((2, 1)), jnp.array([[jnp.inf, 0.0, 1.0]])
    labels = jnp.array([[0, 1], [2, 1]]) if several else jnp.array([0, 1])
    assert jnp.isnan(ps.linear_log_probs(x, w, labels)).all()
    if not several:
        loss = ps.linear_cross_entropy(x, w, labels, reduction=None)
        np.testing.assert_array_equal(loss, [np.nan, np.inf])


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "features", "k", "log"),
    first(
        1,
        [
            ("bfloat16", "softcap", 5, True),
            *pairs(
                ["float32", "bfloat16", "float16"],
                ["", "bias", "softcap", "transposed"],
                [1, 5, 40],
                [False, True],
            ),
        ],
    ),
)
def test_topk(dtype, features, k, log):
    assert_topk(dtype, features, k, log=log)


@pytest.mark.slow
def test_topk_equals_fused_topk():
    """With integers, no sum is rounded: ties go to the lowest column. One token, one batch, no token, k of 0 and V."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (3, 7, 8)).astype("float32")
    w = rng.integers(-2, 3, (8, 50)).astype("float32")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    for rows, k in ((x, 5), (x, 0), (x, 50), (x[0, 0], 3), (x[:0], 3)):
        got = ps.linear_topk(rows, w, k, workspace_bytes=1)
        want = ps.fused_topk(rows @ w, k)
        np.testing.assert_array_equal(got.indices, want.indices)
        close(got.values, want.values)


@pytest.mark.slow
def test_topk_in_float64(x64):
    x, w, _, _ = arrays(20, 8, 100, "float64")
    got = ps.linear_topk(x, w, 5)
    want, indices = oracle.fused_topk(np.asarray(x) @ np.asarray(w), 5)
    assert got.values.dtype == "float64" and got.indices.dtype == "int32"
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_allclose(got.values, want.astype("float64"), rtol=1e-12)


@pytest.mark.parametrize("transform", [jax.grad, slow(jax.jacfwd)])
def test_topk_has_no_gradient(transform):
    with pytest.raises(NotImplementedError, match="linear_topk: there is no gradient.*linear_log_probs"):
        jax.jit(transform(lambda w: jnp.sum(ps.linear_topk(X, w, 2).values))).lower(W)
    jax.jit(
        jax.grad(lambda w: jnp.sum(ps.linear_topk(X, jax.lax.stop_gradient(w), 2).values) * w[0, 0])
    ).lower(W)


# --- Memory and number of products --------------------------------------------------------------------


def products(f, *shapes):
    """Returns the number of matrix products of the compiled program, and the bytes of its temporaries."""
    compiled = jax.jit(f).lower(*shapes).compile()
    return compiled.as_text().count(" dot("), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "n"),
    first(1, [(name, n) for name in MEMORY for n in (8192, 65536)]),
)
def test_memory_in_addition_to_dw(name, n):
    """Memory does not grow with n, each chunk has each product once, and unused results are not computed."""
    f, count, dw = MEMORY[name]
    assert (count, True) == (lambda dots, bytes: (dots, bytes - dw <= 0.6 * 2**30))(*products(f, *of_size(n)))


def test_rows_of_a_chunk():
    gpt2, llama = 50257, 128256
    default = 512 * 2**20
    assert chunk_rows(8192, llama, 2, default) == 2048  # kernels that store 16 bits
    assert chunk_rows(8192, llama, 6, default) == 640  # plain JAX: float32 and 16 bits
    assert chunk_rows(16384, gpt2, 2, default) == 4096  # 5248 fit: four even chunks
    assert chunk_rows(100, llama, 6, default) == 100
    assert chunk_rows(101, 1000, 4, 4 * 1000 * 40) == 40  # fewer than a kernel's tile: a multiple of 8
    assert chunk_rows(50, 10**9, 4, default) == 8  # the minimum
    for n in (1, 127, 129, 8191, 10**6):
        for vocab in (1, 1000, llama):
            rows = chunk_rows(n, vocab, 6, default)
            assert 1 <= rows <= n and (rows == 1 or rows * vocab * 6 <= default)


def test_exact_scales_are_powers_of_two():
    for largest in (0.0, 1e-40, 1e-38, 1 / 206, 1 / 8192, 0.7, 1.0, 3e5):
        weights = jnp.array([0.3 * largest, -largest, jnp.nan, jnp.inf])
        scale = float(_scale(weights, jnp.bfloat16, exact=True))
        assert np.frexp(scale)[0] == 0.5
        assert largest < 1e-37 or 3 / 4 <= largest / scale <= 3 / 2


def test_rows_of_a_gradient():
    """All rows at once if their logits take no more memory than a float32 dw: n <= 2 D in 16-bit dtypes."""
    dw = 4 * 4096 * 128256
    assert gradient_rows(8192, 128256, 2, 512 * 2**20, dw) == 8192
    assert gradient_rows(8193, 128256, 2, 512 * 2**20, dw) == 2816  # three even chunks of up to 4096, D
    assert gradient_rows(16384, 50304, 2, 512 * 2**20, 4 * 768 * 50304) == 4096  # more than D
    assert gradient_rows(8192, 128256, 2, 512 * 2**20, 0) == 2048  # without dw


# --- Transformations ----------------------------------------------------------------------------------


def mean_loss(x, w, labels):
    return ps.linear_cross_entropy(x, w, labels, workspace_bytes=workspace(100, 5))


@pytest.mark.slow
def test_vmap():
    """Tokens with a shared w become one array, so there is one product, as without vmap."""
    x, w, labels, _ = arrays(24, 8, 100, "float32")
    xs, ls = x.reshape(3, 8, 8), labels.reshape(3, 8)
    per_token = functools.partial(ps.linear_cross_entropy, reduction=None)
    f = jax.vmap(per_token, (0, None, 0))
    np.testing.assert_allclose(f(xs, w, ls).ravel(), per_token(x, w, labels), rtol=1e-6)
    assert products(f, xs, w, ls)[0] == 1
    (choice,) = ps.explain(f, xs, w, ls)[:1]
    assert (choice.call.op, choice.call.rows, choice.elsewhere) == ("projection", 8, "xla")


def tied(x, w, labels):
    """w is also the embedding, so the gradients of both uses are added."""
    return mean_loss(x + w.T[labels], w, labels)


@pytest.mark.slow
def test_export_of_any_depth():
    """The depth may be symbolic. The number of columns may not: a chunk takes some of the columns."""
    n, d, v = jax.export.symbolic_shape("n, d, v")
    x, labels = jax.ShapeDtypeStruct((n, d), "float32"), jax.ShapeDtypeStruct((n,), "int32")
    loss = functools.partial(ps.linear_cross_entropy, workspace_bytes=1)
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))))(
        x, jax.ShapeDtypeStruct((d, 100), "float32"), labels
    )
    x_at, w_at, labels_at, _ = arrays(24, 8, 100, "float32")
    got, want = exported.call(x_at, w_at, labels_at), jax.grad(loss, (0, 1))(x_at, w_at, labels_at)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    with pytest.raises(NotImplementedError, match="V=v is symbolic"):
        jax.export.export(jax.jit(loss))(x, jax.ShapeDtypeStruct((d, v), "float32"), labels)


def test_second_derivatives_raise():
    for reduction in ("mean", None):
        f = jax.grad(lambda x, of=reduction: jnp.sum(ps.linear_cross_entropy(x, W, L, reduction=of)))
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))).lower(X)


def test_the_caller_chooses_the_precision_of_float32():
    """All products of a call, forward and backward, use the same precision: TF32 only if the caller asks for it."""
    shapes = of_size(16, 8, 100, "float32")

    def precisions():
        text = jax.jit(jax.grad(ps.linear_cross_entropy, (0, 1))).lower(*shapes).as_text()
        return [
            line.split("precision = ")[1].split("]")[0] for line in text.splitlines() if "dot_general" in line
        ]

    assert set(precisions()) == {"[HIGHEST, HIGHEST"} and len(precisions()) >= 3
    with jax.default_matmul_precision("high"):
        assert set(precisions()) == {"[HIGH, HIGH"}


@pytest.mark.slow
def test_the_forward_may_round_float32_logits_differently():
    """On a GPU, XLA may pick another matrix product for the backward. Here, the forward sums D in another order.

    With the forward's m and d, the backward of peaked rows would have ten times the error of plain JAX.
    """
    n, depth, vocab = 101, 1000, 1003
    x, w, labels, _ = arrays(n, depth, vocab, "float32", peak=40)
    weights = np.random.default_rng(1).standard_normal(n).astype("float32")
    static = {"head": Head(precision="highest"), "workspace_bytes": workspace(vocab)}
    operations, tokens, order = (
        xla_projection.OPERATIONS,
        Tokens(labels),
        np.random.default_rng(2).permutation(depth),
    )
    known = jax.jit(functools.partial(operations["projection"], **static))(
        x[:, order], w[order], None, tokens
    )
    dx, *_ = jax.jit(functools.partial(operations["projection_grad"], **static))(
        x, w, None, tokens, weights, known
    )
    theirs = jax.jit(jax.grad(lambda x: jnp.sum(weights * plain(x, w, labels))))(x)
    _, size, want, *_ = losses_and_gradients(x, w, labels, weights)
    assert rounded_errors(dx, want) <= gradient_bound(
        "x", "float32", rounded_errors(theirs, want), size.max()
    )


# --- Choice, and bad input ----------------------------------------------------------------------------


def test_explain_and_named_implementations():
    shapes = of_size(16, 8, 100)
    forward, gradient = ps.explain(ps.linear_cross_entropy, *shapes, implementation="xla")
    assert str(forward) == "linear_cross_entropy bfloat16[16, 8] @ [8, 100]: xla"
    assert gradient.call.op == "projection_with_grad"
    _, gradient = ps.explain(ps.linear_logsumexp, *shapes[:2])
    assert gradient.call.op == "projection_grad"
    with pytest.raises(
        NotImplementedError, match=r"'triton' cannot run linear_cross_entropy .*no kernel for projection"
    ):
        jax.eval_shape(functools.partial(ps.linear_cross_entropy, implementation="triton"), *shapes)


X, W, L = jnp.zeros((3, 4)), jnp.zeros((4, 5)), jnp.zeros(3, jnp.int32)


def test_log_probs_need_labels():
    """A call without labels once returned -logsumexp."""
    with pytest.raises(TypeError, match="linear_log_probs: labels must be an array"):
        ps.linear_log_probs(X, W, None)


# --- Options as arrays, traced or one per token -------------------------------------------------------


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", [slow("mean"), None])
def test_traced_options_do_not_recompile(reduction):
    x, w, labels, bias = arrays(20, 8, 300, "float32", bias=True)
    traces = []

    @jax.jit
    def f(x, w, z_loss, label_smoothing):
        traces.append(1)
        loss = functools.partial(
            ps.linear_cross_entropy, workspace_bytes=workspace(300, 7), reduction=reduction
        )
        return jax.value_and_grad(
            lambda x, w: loss(x, w, labels, bias=bias, z_loss=z_loss, label_smoothing=label_smoothing).sum(),
            (0, 1),
        )(x, w)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def reference(x, w, z_loss, label_smoothing):
        losses = plain(x, w, labels, bias=bias, z_loss=z_loss, label_smoothing=label_smoothing)
        return losses.mean() if reduction == "mean" else losses.sum()

    for numbers in ((0.01, 0.2), (0.0, 0.0), (0.3, 1.0)):
        got = f(x, w, *map(jnp.float32, numbers))
        want = reference(x, w, *numbers)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), got, want)
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["z_loss", "label_smoothing"])
def test_traced_options_out_of_range_give_nan(name):
    assert jnp.isnan(jax.jit(lambda value: ps.linear_cross_entropy(X, W, L, **{name: value}))(-0.1))


@pytest.mark.slow
def test_options_per_token():
    """A temperature, z-loss and label smoothing per token, in chunks, and a temperature under vmap."""
    x, w, labels, bias = arrays(20, 8, 300, "float32", bias=True)
    t, share = jnp.linspace(0.5, 2, 20), jnp.linspace(0, 0.5, 20)
    small = workspace(300, 7)

    def ours(x, w):
        log_p = ps.linear_log_probs(
            x, w, labels, bias=bias, softcap=4.0, temperature=t, workspace_bytes=small
        )
        loss = ps.linear_cross_entropy(
            x, w, labels, z_loss=share, label_smoothing=share, reduction=None, workspace_bytes=small
        )
        return jnp.sum(log_p * t) + jnp.sum(loss * t)

    def reference(x, w):
        log_p = -plain(x, w, labels, bias=bias, softcap=4.0, temperature=t[:, None])
        return jnp.sum(log_p * t) + jnp.sum(plain(x, w, labels, z_loss=share, label_smoothing=share) * t)

    got, want = (value_and_grads(f, x, w) for f in (ours, reference))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", slow(None)])
def test_a_masked_label_makes_no_intermediate_nan(reduction):
    """`jax_debug_nans` and checkify see intermediate values. -100 is the usual label of padding."""
    x, w, labels, _ = arrays(10, 8, 100, "float32")
    where = np.arange(10) % 3 != 0
    padded = jnp.where(where, labels, -100)

    def loss(x):
        return ps.linear_cross_entropy(x, w, padded, where=where, z_loss=0.1, reduction=reduction).sum()

    error, _ = checkify.checkify(jax.jit(jax.value_and_grad(loss)), errors=checkify.float_checks)(x)
    assert error.get() is None
    with jax.debug_nans(True):
        jax.grad(loss)(x)


def test_x_must_not_differ_along_axis_name():
    mesh = AbstractMesh((2,), ("v",), axis_types=(AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(
        lambda x, w: ps.linear_logsumexp(x, w, axis_name="v"),
        mesh=mesh,
        in_specs=(spec("v"), spec(None, "v")),
        out_specs=spec("v"),
    )
    with pytest.raises(ValueError, match="x must be the same on all devices of axis_name='v'"):
        jax.eval_shape(f, jnp.zeros((4, 8)), jnp.zeros((8, 10)))
