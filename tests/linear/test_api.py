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


@pytest.mark.parametrize("reduction", ["mean", slow("sum"), slow(None)])
def test_token_weights_that_broadcast(reduction):
    x, w, labels, _ = arrays(12, 8, 100, "float32")
    f = functools.partial(
        ps.linear_cross_entropy, x.reshape(3, 4, 8), w, labels.reshape(3, 4), reduction=reduction
    )
    weights = np.array([1, 0, -2, 4])
    got = f(token_weights=weights)
    np.testing.assert_array_equal(got, f(token_weights=np.float32([weights] * 3)))
    assert got.shape == (() if reduction else (3, 4))


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
@pytest.mark.parametrize("reduction", ["mean", None])
def test_transformations_of_token_weights(reduction):
    """Under vmap, checkpoint and export, a weighted loss has the gradients that it has without them."""
    ours, _, args = weighted(reduction)
    want = value_and_grads(ours, *args)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, value_and_grads(jax.checkpoint(ours), *args), want)
    exported = jax.export.export(jax.jit(jax.value_and_grad(ours, (0, 1, 2, 3))))(*args)
    jax.tree.map(close, jax.export.deserialize(exported.serialize()).call(*args), want)
    doubled = jax.vmap(jax.value_and_grad(ours, (0, 1, 2, 3)), (None, None, None, 0))
    value, gradients = doubled(*args[:3], np.stack([2 * WEIGHTS, WEIGHTS]))
    jax.tree.map(lambda a, b: close(a[1], b), (value, gradients), want)
    close(value[0], want[0] * (1 if reduction == "mean" else 2))


@pytest.mark.usefixtures("quick_compilation")
def test_labels_out_of_range_are_nan():
    x, w, labels, _ = arrays(6, 8, 100, "float32")
    bad = np.asarray(labels, "int8")
    bad[[1, 2, 3]] = 100, -1, -100

    mean, each = ps.linear_cross_entropy(x, w, bad), ps.linear_log_probs(x, w, bad)
    assert jnp.isnan(mean)
    np.testing.assert_array_equal(jnp.isnan(each), [False, True, True, True, False, False])


def each_result(x, w, bias, labels, token_weights, temperature):
    """Returns the float results of all functions that have a label, with one number for each token."""
    several = ps.linear_log_probs(
        x, w, jnp.stack([labels, labels[::-1]], 1), bias=bias, temperature=temperature
    )
    losses = {"bias": bias, "z_loss": 0.1, "reduction": None}
    finite_x = jnp.where(jnp.isinf(x), 0, x)  # the softcap makes finite results of infinite x
    return (
        *ps.linear_token_stats(finite_x, w, labels, bias=bias, softcap=4.0, temperature=temperature)[:3],
        *ps.linear_token_stats(x, w, bias=bias)[1:3],
        ps.linear_log_probs(x, w, labels, bias=bias, temperature=temperature),
        *(several[:, i] for i in range(2)),
        ps.linear_cross_entropy(x, w, labels, token_weights=token_weights, **losses),
        ps.linear_logsumexp(x, w, bias=bias),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float16")])
def test_results_that_are_not_finite_have_derivatives_of_0(dtype):
    """Their NaN passes through exp before they are dropped."""
    x, w, labels, _ = arrays(12, 8, 100, dtype)
    bias = np.zeros(100, "float32")
    bias[7] = -np.inf
    bad = np.array(labels)
    bad[[1, 2, 3]] = -100, 100, 7
    x = x.at[4].set(jnp.nan).at[5, 0].set(jnp.inf)
    temperature = jnp.ones(12).at[6].set(-1)
    token_weights = jnp.ones(12).at[7].set(jnp.nan)
    good = np.arange(12) >= 8

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3))
    def gradient(x, w, bias, token_weights, temperature, kept):
        def total(results):
            return sum(jnp.sum(jnp.where(jnp.isfinite(a) & kept, jnp.exp(a / 9), 0)) for a in results)

        return total(each_result(x, w, bias, bad, token_weights, temperature))

    for d in gradient(x, w, bias, token_weights, temperature, True):
        assert np.isfinite(wide(d)).all()
    dx, *others = gradient(x, w, bias, token_weights, temperature, good)
    np.testing.assert_array_equal(wide(dx).any(1), good)
    for d in others:
        assert np.isfinite(wide(d)).all() and wide(d).any()


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
def test_token_stats_and_labels():
    """A label out of range makes its log-probability NaN, with derivatives of 0."""
    x, w, labels, _ = arrays(12, 8, 100, "float32")
    bad = labels.at[jnp.arange(3)].set(jnp.array([-1, 100, 2**31 - 1]))
    got, without, want = (ps.linear_token_stats(x, w, *given) for given in ((bad,), (), (labels,)))
    assert without.log_probs is None
    np.testing.assert_array_equal(got.log_probs, want.log_probs.at[:3].set(jnp.nan))
    for stats in (got, without):
        jax.tree.map(np.testing.assert_array_equal, stats[1:], want[1:])

    def total(x, labels):
        stats = ps.linear_token_stats(x, w, labels)
        return jnp.mean(jnp.exp(stats.log_probs), where=np.arange(12) > 2) + jnp.sum(stats.entropy)

    dx, want = (jax.grad(total)(x, of) for of in (bad, labels))
    np.testing.assert_allclose(dx, want, rtol=1e-6, atol=1e-8)


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


@pytest.mark.slow
def test_transformations_of_token_stats():
    x, w, labels, _ = arrays(24, 8, 100, "float32")

    def total(x, w, labels):
        log_probs, entropy, logsumexp, *_ = ps.linear_token_stats(
            x, w, labels, workspace_bytes=workspace(100, 8)
        )
        return jnp.sum(log_probs * logsumexp + entropy**2)

    def in_slices(x, w, labels):
        return jnp.sum(jax.vmap(total, (0, None, 0))(x.reshape(3, 8, 8), w, labels.reshape(3, 8)))

    def reference(x, w, labels):
        z = jnp.matmul(x, w, precision="highest")
        log_p = jax.nn.log_softmax(z)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return jnp.sum(log_p[jnp.arange(24), labels] * jax.nn.logsumexp(z, -1) + entropy**2)

    want = jax.jit(jax.value_and_grad(reference, (0, 1)))(x, w, labels)
    for f in (total, jax.checkpoint(total), in_slices):
        got = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w, labels)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: total(x, w, labels), (x,), (x,))
    with pytest.raises(NotImplementedError, match="no gradient in temperature"):
        jax.grad(lambda t: ps.linear_token_stats(x, w, temperature=t).entropy.sum())(1.0)


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
    each = jax.vmap(lambda w: ps.linear_topk(x[0], w, 4))(np.stack([w, -w]))
    np.testing.assert_array_equal(each.indices[1], ps.fused_topk(-x[0] @ w, 4).indices)
    shared = jax.vmap(lambda x, t: ps.linear_topk(x, w, 4, temperature=t))(
        x, np.arange(1.0, 4, dtype="float32")
    )
    jax.tree.map(
        close, shared, ps.fused_topk(x @ w, 4, temperature=np.arange(1.0, 4, dtype="float32")[:, None])
    )
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(functools.partial(ps.linear_topk, k=4, workspace_bytes=1))
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((n, 8), "float32"), w)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(x[0], w).indices, f(x[0], w).indices)


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


def test_topk_and_bad_input():
    for error, match, keywords in (
        (ValueError, "k must be from 0 to the row's length 5, got 6", {"k": 6}),
        (TypeError, "k must be an integer, got 1.0", {"k": 1.0}),
        (TypeError, "log must be True or False, got 1", {"log": 1}),
        (ValueError, "temperature must be 0, or from 1e-37 to 1e37, got -1.0", {"temperature": -1.0}),
        (ValueError, r"temperature must be .* broadcast .*\(3,\), got \(2,\)", {"temperature": np.ones(2)}),
        (ValueError, "workspace_bytes must be positive, got 0", {"workspace_bytes": 0}),
        (ValueError, r"w \(V, D\) for transpose_w=True", {"transpose_w": True}),
        (ValueError, "softcap must be", {"softcap": -1}),
        (NotImplementedError, "cannot run topk", {"implementation": "mosaic_gpu"}),
    ):
        with pytest.raises(error, match=f"linear_topk: .*{match}"):
            ps.linear_topk(X, W, **{"k": 2, **keywords})


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


def losses_in_steps(x, w, labels):
    """Accumulates gradients, with each step under jax.checkpoint."""

    @jax.checkpoint
    def step(total, slices):
        return total + mean_loss(slices[0], w, slices[1]) / 3, None

    return jax.lax.scan(step, 0.0, (x.reshape(3, 8, 8), labels.reshape(3, 8)))[0]


def tied(x, w, labels):
    """w is also the embedding, so the gradients of both uses are added."""
    return mean_loss(x + w.T[labels], w, labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["checkpoint", "scan", "vmap", "vmap of grad", "donate", "tied", "remat none"]
)
def test_transformations(name):
    x, w, labels, _ = arrays(24, 8, 100, "float32")

    def plain_mean(x, w, labels=labels):
        return jnp.mean(plain(x, w, labels))

    f, want = {
        "checkpoint": (jax.checkpoint(mean_loss), plain_mean),
        "scan": (losses_in_steps, plain_mean),
        "vmap": (
            lambda x, w, labels: jnp.mean(
                jax.vmap(mean_loss, (0, None, 0))(x.reshape(3, 8, 8), w, labels.reshape(3, 8))
            ),
            plain_mean,
        ),
        "tied": (tied, lambda x, w: plain_mean(x + w.T[labels], w)),
        "remat none": (
            jax.checkpoint(lambda *args: jnp.mean(ps.linear_cross_entropy(*args, reduction=None))),
            plain_mean,
        ),
    }.get(name, (mean_loss, plain_mean))
    want_grads = jax.grad(want, (0, 1))(x, w)
    if name == "vmap of grad":
        per_slice = jax.vmap(jax.grad(f, (0, 1)), (0, None, 0))(x.reshape(3, 8, 8), w, labels.reshape(3, 8))
        got = per_slice[0].reshape(24, 8) / 3, jnp.mean(per_slice[1], 0)
    else:
        donate = (0, 1) if name == "donate" else ()
        got = jax.jit(jax.grad(f, (0, 1)), donate_argnums=donate)(x + 0, w + 0, labels)
    for a, b in zip(got, want_grads):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_transformations_of_several_labels():
    """Under vmap over x, labels or both, checkpoint and export."""
    x, w, _, _ = arrays(24, 8, 100, "float32")
    x = x.reshape(3, 8, 8)
    labels = np.random.default_rng(4).integers(0, 100, (3, 8, 5)).astype("int32")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)

    def f(x, w, labels):
        return ps.linear_log_probs(x, w, labels, workspace_bytes=workspace(100, 5))

    def squares(x, w, labels, f=f):
        return jnp.sum(f(x, w, labels) ** 2)

    each = jnp.take_along_axis(jax.nn.log_softmax(jnp.matmul(x, w, precision="highest")), labels, -1)
    close(jax.vmap(f, (0, None, 0))(x, w, labels), each)
    close(jax.vmap(f, (None, None, 0))(x[0], w, labels)[0], each[0])
    close(jax.vmap(f, (0, None, None), 1)(x, w, labels[0])[:, 0], each[0])
    close(jax.vmap(f, (0, 0, 0))(x, jnp.stack([w] * 3), labels), each)
    want = jax.grad(squares, (0, 1))(x, w, labels)
    assert products(jax.grad(squares, (0, 1)), x, w, labels)[0] == 1 + 2 * 3  # as with one label
    for g in (
        jax.grad(jax.checkpoint(squares), (0, 1)),
        jax.grad(functools.partial(squares, f=jax.vmap(f, (0, None, 0))), (0, 1)),
    ):
        jax.tree.map(close, g(x, w, labels), want)
    n, k = jax.export.symbolic_shape("n, k")
    shapes = ((3, n, 8), "float32"), ((8, 100), "float32"), ((3, n, k), "int32")
    exported = jax.export.export(jax.jit(jax.grad(squares, (0, 1))), platforms=["cpu", "cuda"])(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )
    jax.tree.map(close, jax.export.deserialize(exported.serialize()).call(x, w, labels), want)


@pytest.mark.slow
def test_export_of_any_number_of_tokens():
    (n,) = jax.export.symbolic_shape("n")
    shapes = [
        jax.ShapeDtypeStruct(s, t) for s, t in (((n, 8), "float32"), ((8, 100), "float32"), ((n,), "int32"))
    ]
    exported = jax.export.export(jax.jit(jax.value_and_grad(mean_loss, (0, 1))), platforms=["cpu", "cuda"])(
        *shapes
    )
    again = jax.export.deserialize(exported.serialize())
    for n in (3, 24):
        x, w, labels, _ = arrays(n, 8, 100, "float32")
        got, want = again.call(x, w, labels), jax.value_and_grad(mean_loss, (0, 1))(x, w, labels)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


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
    assert str(forward) == "projection bfloat16[16, 8] @ [8, 100]: xla"
    assert gradient.call.op == "projection_with_grad"
    _, gradient = ps.explain(ps.linear_logsumexp, *shapes[:2])
    assert gradient.call.op == "projection_grad"
    with pytest.raises(
        NotImplementedError, match=r"'triton' cannot run projection .*no kernel for projection"
    ):
        jax.eval_shape(functools.partial(ps.linear_cross_entropy, implementation="triton"), *shapes)


X, W, L = jnp.zeros((3, 4)), jnp.zeros((4, 5)), jnp.zeros(3, jnp.int32)
BAD = [
    (TypeError, "x must be of float16", {"x": X.astype(int)}),
    (TypeError, "one dtype, got float32 and bfloat16", {"w": W.astype("bfloat16")}),
    (TypeError, "labels must be integers, got float32", {"labels": L.astype("float32")}),
    (TypeError, "labels must be an array or a scalar, got", {"labels": [0, 1, 2]}),
    (TypeError, "labels must be an array or a scalar, got None", {"labels": None, "reduction": None}),
    (ValueError, r"w \(D, V\) for transpose_w=False, got \(3, 4\) and \(5, 4\)", {"w": W.T}),
    (ValueError, r"w \(V, D\) for transpose_w=True", {"transpose_w": True}),
    (ValueError, r"w must have at least one column, got \(D, V\) = \(4, 0\)", {"w": W[:, :0]}),
    (ValueError, r"labels must have the shape .*\(3,\), got \(2,\)", {"labels": L[:2]}),
    (ValueError, r"bias must have the shape \(5,\), got \(4,\)", {"bias": jnp.zeros(4)}),
    (TypeError, "bias must be of", {"bias": jnp.zeros(5, int)}),
    (ValueError, "where must be None or boolean", {"where": jnp.ones(3)}),
    (ValueError, "where of shape", {"where": jnp.ones(2, bool)}),
    (TypeError, "token_weights must be None or of .*, got dtype bool", {"token_weights": L > 0}),
    (TypeError, "token_weights must be None or of .*, got dtype complex64", {"token_weights": L * 1j}),
    (TypeError, "token_weights must be an array", {"token_weights": [1, 2, 3]}),
    (ValueError, r"token_weights must be a scalar or .*\(3,\), got \(2,\)", {"token_weights": jnp.ones(2)}),
    (ValueError, "softcap must be None or from 1e-37 to 1e37, got -1", {"softcap": -1}),
    (ValueError, r"softcap must be None or from 1e-37 to 1e37, got 1e\+38", {"softcap": 1e38}),
    (ValueError, "softcap must be None or from 1e-37 to 1e37, got 1e-40", {"softcap": 1e-40}),
    (ValueError, "softcap must be within the range of floats", {"softcap": 10**400}),
    (ValueError, r"softcap must be None or from .*, got shape \(3,\)", {"softcap": np.ones(3)}),
    (TypeError, "softcap must be an array or a scalar, got '3'", {"softcap": "3"}),
    (ValueError, r"z_loss must be a scalar or broadcast .*\(3,\), got \(2,\)", {"z_loss": np.ones(2)}),
    (ValueError, "z_loss must be a finite number of 0 or more, got -0.1", {"z_loss": -0.1}),
    (ValueError, "label_smoothing must be from 0 to 1, got 1.5", {"label_smoothing": 1.5}),
    (ValueError, "reduction must be 'mean', 'sum' or None, got 'none'", {"reduction": "none"}),
    (ValueError, "workspace_bytes must be positive, got 0", {"workspace_bytes": 0}),
    (ValueError, "axis_name must name mesh axes", {"axis_name": "v"}),
]


@pytest.mark.parametrize(("error", "match", "changes"), BAD, ids=[bad[1] for bad in BAD])
def test_bad_input(error, match, changes):
    with pytest.raises(error, match=f"linear_cross_entropy: .*{match}"):
        ps.linear_cross_entropy(**{"x": X, "w": W, "labels": L} | changes)


def test_softcap_must_not_be_traced():
    with pytest.raises(TypeError, match="softcap must be None or from 1e-37 to 1e37, got a traced value"):
        jax.eval_shape(lambda c: ps.linear_logsumexp(X, W, softcap=c), 1.0)


def test_a_temperature_below_0_is_refused():
    with pytest.raises(ValueError, match="temperature must be 0, or from 1e-37 to 1e37, got -0.5"):
        ps.linear_log_probs(X, W, L, temperature=-0.5)


@pytest.mark.parametrize("shape", [(2, 4), (3, 4, 1), (4, 3)])
def test_labels_of_another_shape(shape):
    labels = jnp.zeros(shape, "int32")
    with pytest.raises(ValueError, match=r"labels must have .*, \(3,\) or \(3, K\), got \("):
        ps.linear_log_probs(X, W, labels)
    with pytest.raises(ValueError, match=r"labels must have .*, \(3,\), got \("):
        ps.linear_cross_entropy(X, W, labels)


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
    each = jax.vmap(lambda x, label, t: ps.linear_log_probs(x, w, label, temperature=t))(x, labels, t)
    np.testing.assert_allclose(each, -plain(x, w, labels, temperature=t[:, None]), rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("temperature", lambda a: ps.linear_log_probs(X, W, L, temperature=a).sum()),
        ("z_loss", lambda a: ps.linear_cross_entropy(X, W, L, z_loss=a)),
        (
            "label_smoothing",
            lambda a: ps.linear_cross_entropy(X, W, L, label_smoothing=a, reduction=None).sum(),
        ),
    ],
)
def test_options_have_no_gradient(name, function):
    with pytest.raises(NotImplementedError, match=f"linear_.*: there is no gradient in {name}"):
        jax.grad(function)(0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_log_probs_with_where():
    x, w, labels, _ = arrays(10, 8, 100, "float32")
    where = np.arange(10) % 3 != 0

    def f(x, **keywords):
        return ps.linear_log_probs(x, w, labels, **keywords)

    np.testing.assert_array_equal(f(x, where=where), jnp.where(where, f(x), 0))
    dx = jax.grad(lambda x: f(x, where=where).sum())(jnp.where(where[:, None], x, jnp.nan))
    np.testing.assert_array_equal(dx, jax.grad(lambda x: jnp.where(where, f(x), 0).sum())(x))


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
