"""The arguments that all linear_* functions share: where, temperature and its limit 0; and return_logsumexp."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import oracle
from tests.support.covering import slow
from tests.support.linear import arrays, jit, logits, rounded_errors, workspace
from tests.support.oracle import wide

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def two(labels):
    return jnp.stack([labels, jnp.where(labels < 0, labels, labels // 2)], -1)


def soft(x, w, labels, **keywords):
    probs = np.broadcast_to(np.float32([0.7, 0.2]), (len(labels), 2))
    return ps.linear_cross_entropy(x, w, two(labels), label_probs=probs, reduction=None, **keywords)


loss = functools.partial(ps.linear_cross_entropy, reduction=None)
EACH = {  # of (x, w, labels): results, one per token or K per token
    "stats": ps.linear_token_stats,
    "soft": soft,
    "several": lambda x, w, labels, **keywords: ps.linear_log_probs(x, w, two(labels), **keywords),
    "logsumexp": lambda x, w, labels, **keywords: ps.linear_logsumexp(x, w, **keywords),
    "loss": loss,
    "loss with options": functools.partial(loss, z_loss=0.1, label_smoothing=0.2),
    "log_probs": ps.linear_log_probs,
    "stats without labels": lambda x, w, labels, **keywords: ps.linear_token_stats(x, w, **keywords)[1:],
}


def total(x, w, labels, name, **keywords):
    results = jax.tree.leaves(EACH[name](x, w, labels, **keywords))
    return sum(jnp.sum(jnp.sin(a.T)) for a in results if a.dtype != jnp.int32)


@pytest.mark.parametrize("name", ["log_probs", *(slow(name) for name in EACH if name != "log_probs")])
def test_where(name):
    """Tokens that are left out have results and gradients 0, whatever they hold; the others do not change."""
    x, w, labels, _ = arrays(21, 8, 100, "float32")
    where, small = np.arange(21) % 3 != 0, workspace(100, 8)
    bad_x, bad = jnp.where(where[:, None], x, jnp.nan), jnp.where(where, labels, -100)
    f = functools.partial(total, name=name, workspace_bytes=small, temperature=0.7)
    got = EACH[name](bad_x, w, bad, where=where, workspace_bytes=small)
    want = EACH[name](x[where], w, labels[where], workspace_bytes=small)
    jax.tree.map(lambda a, b: close(a[where], b), got, want)
    for a in jax.tree.leaves(got):
        assert not np.asarray(a)[~where].any()
    dx, dw = jax.grad(f, (0, 1))(bad_x, w, bad, where=where)
    want_dx, want_dw = jax.grad(f, (0, 1))(x[where], w, labels[where])
    assert not np.asarray(dx)[~where].any()
    close(dx[where], want_dx)
    close(dw, want_dw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "share"), [(d, s) for d in ("float32", "bfloat16") for s in (0.5, 0, 0.2, 0.7, 1)]
)
def test_many_left_out_tokens(dtype, share):
    """With many tokens, the products skip most of the tokens that are left out, in every function."""
    x, w, labels, _ = arrays(1100, 8, 100, dtype)
    where = np.random.default_rng(5).random(1100) < share
    bad_x, bad = jnp.where(where[:, None], x, jnp.nan), jnp.where(where, labels, -100)

    def total(x, labels, where=None):
        stats = ps.linear_token_stats(x, w, labels, where=where, temperature=0.8)
        lse = ps.linear_logsumexp(x, w, where=where)
        return jnp.sum(jnp.sin(jnp.stack([*stats[:3], lse]))), (stats.argmax, stats[:3])

    (_, (argmax, _)), dx = jit(jax.value_and_grad(total, has_aux=True))(bad_x, bad, where)
    (_, (want_argmax, _)), want = jit(jax.value_and_grad(total, has_aux=True))(x[where], labels[where])
    assert not argmax[~where].any() and not wide(dx)[~where].any()
    assert not want.size or rounded_errors(dx[where], wide(want)) <= (1e-5 if dtype == "float32" else 0.02)
    agree = np.asarray(argmax[where]) == np.asarray(want_argmax)
    assert agree.all() if dtype == "float32" else not agree.size or agree.mean() > 0.99
    topk = ps.linear_topk(bad_x, w, 3, where=where, log=True)
    np.testing.assert_array_equal(topk.indices[~where], 0)
    np.testing.assert_array_equal(topk.values[~where], 0)
    close(topk.values[where], ps.linear_topk(x[where], w, 3, log=True).values)


@pytest.mark.slow
def test_products_of_kept_tokens():
    """Half of the tokens left out: 33 of 64 parts are computed, in multiples of 128, forward and backward."""
    x, w, labels, _ = arrays(2048, 8, 100, "float32")

    def rows(f, where):
        text = str(jax.make_jaxpr(f)(x, w, labels, where))
        return {int(rows) for rows in re.findall(r":f32\[(\d+),100\] = dot_general", text)} - {
            8
        }  # without dw

    def stats(x, w, labels, where):
        return sum(map(jnp.sum, ps.linear_token_stats(x, w, labels, where=where)[:3]))

    for f in (
        jax.grad(stats),
        lambda x, w, y, where: ps.linear_logsumexp(x, w, where=where),
        lambda x, w, y, where: ps.linear_topk(x, w, 2, where=where),
    ):
        assert rows(f, jnp.arange(2048) % 2 == 0) == {640, 1152, 1664, 2048}


# --- Temperature --------------------------------------------------------------------------------------


def plain_z(x, w, temperature):
    return jnp.matmul(x, w, precision="highest") / jnp.reshape(temperature, (-1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("traced", [True, False])
def test_temperature_of_losses_and_logsumexp(traced):
    """One number, or one per token, divides the logits of cross entropy, with all options, and of logsumexp."""
    x, w, labels, _ = arrays(20, 8, 100, "float32")
    t = np.linspace(0.5, 2, 20, dtype="float32")

    def ours(x, w, t):
        loss = functools.partial(ps.linear_cross_entropy, x, w, labels, workspace_bytes=workspace(100, 8))
        options = {"temperature": t, "z_loss": 0.1, "label_smoothing": 0.2}
        return (
            loss(**options)
            + jnp.sum(loss(reduction=None, **options) ** 2)
            + ps.linear_logsumexp(x, w, temperature=t).sum()
        )

    def theirs(x, w, t):
        z = plain_z(x, w, t)
        lse = jax.nn.logsumexp(z, -1)
        losses = lse - 0.8 * z[jnp.arange(20), labels] - 0.2 * z.mean(-1) + 0.1 * lse**2
        return losses.mean() + jnp.sum(losses**2) + lse.sum()

    for value in (t, np.float32(0.7), t[:1]):
        f = functools.partial(ours, t=value)
        got = (
            jax.jit(jax.value_and_grad(ours, (0, 1)))(x, w, value)
            if traced
            else jax.value_and_grad(f, (0, 1))(x, w)
        )
        jax.tree.map(close, got, jax.value_and_grad(theirs, (0, 1))(x, w, value))
    assert jnp.isnan(jax.jit(lambda t: ps.linear_logsumexp(x, w, temperature=t))(-0.1)).all()


def ties(n=12, vocab=50):
    """Returns integers x, w, and the float64 logits: the largest logits of a row tie, and some are 0 or negative."""
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, (n, 6)).astype("float32")
    w = rng.integers(-1, 2, (6, vocab)).astype("float32")
    x[0], w[:, 7] = 0, w[:, 3]
    x[1] = -np.abs(x[1]) - 1
    bias = np.zeros(vocab, "float32")
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(bias)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16"), slow("float16")])
@pytest.mark.parametrize("offset", [0.0, slow(-40.0), slow(1000.0)])
def test_temperature_0_is_the_limit(dtype, offset):
    """Tied largest logits share the probability, also next to tokens of other temperatures. The gradients are 0."""
    x, w, bias = ties()
    x, w, bias = x.astype(dtype), w.astype(dtype), bias + offset
    z, _ = logits(x, w, bias=bias)
    m, count = z.max(1), (z == z.max(1, keepdims=True)).sum(1)
    labels = np.where(np.arange(12) % 2, z.argmax(1), z.argmin(1)).astype("int32")
    tied = z[np.arange(12), labels] == m
    cold = np.arange(12) % 4 != 2
    t = np.where(cold, 0, 0.7).astype("float32")
    labels_of = jnp.asarray(labels)
    run = jit(lambda t: {name: f(x, w, labels_of, bias=bias, temperature=t) for name, f in EACH.items()})
    found, warm = run(t), run(np.full(12, 0.7, "float32"))
    jax.tree.map(lambda a, b: close(a[~cold], b[~cold]), found, warm)
    entropy = np.log(count)
    lse = np.where(m > 0, np.inf, np.where(m < 0, -np.inf, entropy))
    loss = np.where(tied, entropy, np.inf)
    smoothed = np.where(count == 50, entropy, np.inf) + 0.1 * lse**2
    both = tied & (z[np.arange(12), labels // 2] == m)
    for name, got, want in (
        ("logsumexp", found["logsumexp"], lse),
        ("loss", found["loss"], loss),
        ("loss with options", found["loss with options"], smoothed),
        ("soft", found["soft"], np.where(both, 0.9 * entropy, np.inf)),
        ("log_probs", found["log_probs"], -loss),
        ("several", found["several"][:, 0], -loss),
        ("stats", found["stats"].log_probs, -loss),
        ("entropy", found["stats"].entropy, entropy),
        ("stats", found["stats"].logsumexp, lse),
        ("argmax", found["stats"].argmax, z.argmax(1)),
    ):
        np.testing.assert_allclose(np.asarray(got)[cold], want[cold], rtol=1e-6, atol=1e-6, err_msg=name)
    assert all(np.asarray(a)[cold].dtype == a.dtype for a in jax.tree.leaves(found))
    for log in (False, True):
        values, indices = ps.linear_topk(x, w, 5, bias=bias, temperature=t, log=log)
        want, best = oracle.fused_topk(z, 5)
        share = np.arange(5) < count[:, None]
        want = np.where(share, -entropy[:, None] if log else 1 / count[:, None], -np.inf if log else 0)
        np.testing.assert_allclose(np.asarray(values)[cold], want[cold], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(indices, best)


@pytest.mark.parametrize("name", ["loss", *(slow(name) for name in EACH if name != "loss")])
def test_gradients_at_temperature_0(name):
    x, w, bias = ties()
    labels = jnp.argmax(x @ w + bias, 1).astype("int32")
    t = jnp.where(jnp.arange(12) % 3 != 2, 0, 0.7)

    def f(x, w, t, labels):
        results = jax.tree.leaves(EACH[name](x, w, labels, temperature=t))
        return sum(jnp.sum(jnp.where(jnp.isfinite(a), a, 0)) for a in results if a.dtype != jnp.int32)

    dx, dw = jax.jit(jax.grad(f, (0, 1)))(x, w, t, labels)
    assert not np.asarray(dx)[np.asarray(t) == 0].any()
    warm = np.flatnonzero(t)
    want = jax.grad(f, 1)(x[warm], w, 0.7, labels[warm])
    close(dw, want)
    assert np.asarray(dw).any()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_at_temperature_0(reduction):
    """A greedy token adds the log of its ties to a mean, and nothing to the gradients."""
    x, w, bias = ties()
    z = np.asarray(x @ w)
    labels = z.argmax(1).astype("int32")
    t = np.where(np.arange(12) % 2, 0, 0.7).astype("float32")
    f = functools.partial(ps.linear_cross_entropy, reduction=reduction, workspace_bytes=workspace(50, 8))
    value, (dx, dw) = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w, labels, temperature=t)
    each = ps.linear_cross_entropy(x, w, labels, temperature=t, reduction=None)
    close(value, each.mean() if reduction == "mean" else each.sum())
    warm = t > 0
    want = jax.grad(f, (0, 1))(x, w, labels, temperature=0.7, where=warm)
    scale = 0.5 if reduction == "mean" else 1
    close(dx, scale * want[0])
    close(dw, scale * want[1])
    with jax.debug_nans(True):
        jax.grad(f, (0, 1))(x, w, labels, temperature=t, z_loss=np.zeros(12, "float32"))


# --- return_logsumexp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", slow("float16")])
@pytest.mark.parametrize("reduction", ["mean", slow("sum"), slow(None)])
def test_return_logsumexp(reduction, dtype):
    """The logsumexp equals linear_logsumexp, has no gradient, and is 0 for tokens that are left out."""
    x, w, labels, _ = arrays(20, 8, 100, dtype)
    weights = jnp.where(jnp.arange(20) % 5 == 1, 0, jnp.linspace(-1, 2, 20))
    where = np.arange(20) % 4 != 2
    kept = where & (np.asarray(weights) != 0)
    options = {"token_weights": weights, "where": where, "reduction": reduction, "temperature": 0.7}
    bad = jnp.where(kept, labels, -100)

    def both(x, w, factor=0.0):
        loss, lse = ps.linear_cross_entropy(x, w, bad, z_loss=0.1, return_logsumexp=True, **options)
        return jnp.sum(loss) + factor * jnp.sum(lse**2), lse

    def alone(x, w):
        return jnp.sum(ps.linear_cross_entropy(x, w, bad, z_loss=0.1, **options))

    want = jnp.where(kept, ps.linear_logsumexp(x, w, temperature=0.7), 0)
    (value, lse), gradients = jax.value_and_grad(both, (0, 1), has_aux=True)(x, w)
    close(lse, want)
    close(both(x, w)[1], want)
    close(value, alone(x, w))
    jax.tree.map(np.testing.assert_array_equal, gradients, jax.grad(alone, (0, 1))(x, w))
    others = jax.grad(lambda x: both(x, w, 3.0)[0])(x)
    np.testing.assert_array_equal(others, gradients[0])
    none = jax.grad(
        lambda x: jnp.sum(ps.linear_cross_entropy(x, w, bad, return_logsumexp=True, **options)[1])
    )(x)
    np.testing.assert_array_equal(none, 0)


def test_return_logsumexp_takes_no_product():
    x, w, labels, _ = arrays(20, 8, 100, "float32")
    f = functools.partial(ps.linear_cross_entropy, return_logsumexp=True)
    gradient = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)).lower(x, w, labels).compile()
    assert gradient.as_text().count(" dot(") == 3
    assert jax.jit(f).lower(x, w, labels).compile().as_text().count(" dot(") == 1


def test_a_cotangent_of_1_is_a_constant():
    """So XLA leaves out the product of dw with it: dw is read and written once."""
    x, w, labels, _ = arrays(64, 8, 4000, "bfloat16")
    text = jax.jit(jax.grad(ps.linear_cross_entropy, (0, 1))).lower(x, w, labels).compile().as_text()
    entry = text[text.index("ENTRY") :]
    writes = [line for line in entry.splitlines() if re.match(r"\s*(ROOT )?%\S+ = bf16\[8,4000\]", line)]
    made = [line for line in writes if not re.search(r"parameter|get-tuple-element", line)]
    assert len(made) == 1, made
