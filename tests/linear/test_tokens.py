"""Arguments of linear_* functions: where, options per token, temperature 0, return_logsumexp and label_probs."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pallas_softmax as ps
from tests.support import linear, oracle
from tests.support.covering import first, first_values
from tests.support.divergence import BETAS
from tests.support.trees import floats_of

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
pytestmark = pytest.mark.usefixtures("quick_compilation")


FEW = {
    "n": 21,
    "depth": 8,
    "vocab": 100,
    "offset": 90,
    "workspace_bytes": linear.workspace(100, 8),
}  # exp(90) overflows
MANY = [["loss", "several", "topk"], ["mean", "stats", "divergence", "sample"]]
SHARES = [(0.5, "float32"), (0.2, "bfloat16"), (0.0, "float32"), (0.95, "float16"), (1.0, "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "share", "dtype", "sizes"),
    [
        *(([name], 0.6, "float32", FEW) for name in linear.EACH | linear.MEANS),
        *((names, *share, {}) for names in MANY for share in SHARES),
    ],
    ids=str,
)
def test_where(names, share, dtype, sizes):
    """With many tokens, the products skip most of the tokens that are left out."""
    linear.assert_left_out_tokens_do_not_matter(names, dtype, share, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("loss with options", {}), ("mean", {"z_loss": 0.1}), *(("mean of divergences", {"beta": b}) for b in BETAS)],
)
def test_no_intermediate_nan(name, options):
    """`jax_debug_nans` and checkify see intermediate values. -100 is the usual label of padding."""
    x, w, labels, _ = linear.arrays(10, 8, 100, "float32")
    where = np.arange(10) % 3 != 0
    if name == "mean of divergences":  # a column that the bias masks
        where, options = None, options | {"bias": np.where(np.arange(100) == 3, -np.inf, 0).astype("float32")}
        options |= {"teacher_bias": options["bias"]}
    padded = labels if where is None else np.where(where, labels, -100)

    def total(x):
        return (linear.EACH | linear.MEANS)[name](x, w, padded, where=where, **options).sum()

    error, _ = checkify.checkify(jax.jit(jax.value_and_grad(total)), errors=checkify.float_checks)(x)
    assert error.get() is None
    with jax.debug_nans(True):
        jax.grad(total)(x)


@pytest.mark.parametrize(("reduction", "per_token"), first(1, [(None, False), ("mean", True), (None, True)]))
def test_traced_options(reduction, per_token):
    """Temperature, z-loss and label smoothing may be traced, per call or per token. Values do not recompile."""
    x, w, labels, bias = linear.arrays(20, 8, 300, "float32", bias=True)
    traces, spread = [], np.linspace(0.5, 1, 20, dtype="float32") if per_token else np.float32(1)
    names = "temperature", "z_loss", "label_smoothing"

    @linear.jit
    def f(x, w, *numbers):
        traces.append(1)
        loss = functools.partial(ps.linear_cross_entropy, workspace_bytes=linear.workspace(300, 7), reduction=reduction)
        options = dict(zip(names, numbers), bias=bias)
        return jax.value_and_grad(lambda x, w: loss(x, w, labels, **options).sum(), (0, 1))(x, w)

    weights = np.full(20, 1 / 20 if reduction == "mean" else 1)
    for numbers in ((0.7, 0.01, 0.2), (1.0, 0.0, 0.0), (2.0, 0.3, 1.0)):
        numbers = [number * spread for number in numbers]
        losses, _, *want = linear.losses_and_gradients(x, w, labels, weights, bias=bias, **dict(zip(names, numbers)))
        value, gradients = f(x, w, *numbers)
        close(value, np.sum(weights * losses))
        jax.tree.map(close, gradients, tuple(want[:2]))
    assert len(traces) == 1


def test_traced_options_out_of_range_give_nan():
    x, w, labels, _ = linear.arrays(3, 4, 5, "float32")

    @linear.jit
    def losses(temperature, z_loss, label_smoothing):
        options = {"z_loss": z_loss, "label_smoothing": label_smoothing}
        return (
            ps.linear_cross_entropy(x, w, labels, temperature=temperature, **options),
            ps.linear_logsumexp(x, w, temperature=temperature),
        )

    assert np.isfinite(losses(1.0, 0.1, 0.1)[0])
    for numbers in ((-0.1, 0.1, 0.1), (1.0, -0.1, 0.1), (1.0, 0.1, -0.1)):
        loss, lse = losses(*numbers)
        assert np.isnan(loss) and np.isnan(lse).all() == (numbers[0] < 0)


def ties(n=12, vocab=50):
    """Returns integers x and w: the largest logits of a row tie, and some are 0 or negative."""
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, (n, 6)).astype("float32")
    w = rng.integers(-1, 2, (6, vocab)).astype("float32")
    x[0], w[:, 7] = 0, w[:, 3]
    x[1] = -np.abs(x[1]) - 1
    return x, w


AT_0 = [name for name in linear.EACH if name not in ("divergence", "topk", "sample")]


@pytest.mark.parametrize(
    ("dtype", "offset"), first(1, [("float32", 0), ("float32", -40), ("float16", 1000), ("bfloat16", 0)])
)
def test_temperature_0_is_the_limit(dtype, offset):
    """Tied largest logits share the probability, also next to tokens of other temperatures."""
    x, w = (a.astype(jnp.dtype(dtype)) for a in ties())
    bias = np.full(50, offset, "float32")
    z, _ = linear.logits(x, w, bias=bias)
    labels = np.where(np.arange(12) % 2, z.argmax(1), z.argmin(1)).astype("int32")
    cold = np.arange(12) % 4 != 2

    @linear.jit
    def run(t):
        topk = functools.partial(ps.linear_topk, x, w, 5, bias=bias, temperature=t)
        options = {"bias": bias, "temperature": t}
        return {name: linear.EACH[name](x, w, jnp.asarray(labels), **options) for name in AT_0} | {
            "topk": (topk(), topk(log=True))
        }

    found, warm = (jax.tree.map(np.asarray, run(np.where(cold, t, 0.7).astype("float32"))) for t in (0, 0.7))
    jax.tree.map(lambda a, b: close(a[~cold], b[~cold]), found, warm)
    log_p, entropy, lse, argmax = oracle.token_stats(z, labels, temperature=0.0)
    all_tie = (z == z.max(1, keepdims=True)).all(1)
    (shares, best), (logs, _) = (oracle.fused_topk(z, 5, temperature=0.0, log=log) for log in (False, True))
    for name, got, want in (
        ("logsumexp", found["logsumexp"], lse),
        ("loss", found["loss"], -log_p),
        ("loss with options", found["loss with options"], np.where(all_tie, entropy, np.inf) + 0.1 * lse**2),
        ("soft", found["soft"], -0.7 * log_p - 0.2 * oracle.token_stats(z, labels // 2, temperature=0.0)[0]),
        ("log_probs", found["log_probs"], log_p),
        ("several", found["several"][:, 0], log_p),
        ("stats", found["stats"].log_probs, log_p),
        ("entropy", found["stats"].entropy, entropy),
        ("stats", found["stats"].logsumexp, lse),
        ("argmax", found["stats"].argmax, argmax),
        ("stats without labels", found["stats without labels"][0], entropy),
        ("topk", found["topk"][0].values, shares),
        ("topk, log", found["topk"][1].values, logs),
        *(("winners", topk.indices, best) for topk in found["topk"]),
    ):
        np.testing.assert_allclose(np.asarray(got)[cold], want[cold], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", first_values(1, [*AT_0, "mean", "sum"]))
def test_gradients_at_temperature_0(name):
    """A token at temperature 0 adds nothing to the gradients. A mean counts its token, and the log of its ties."""
    x, w = ties()
    labels = np.argmax(x @ w, 1).astype("int32")
    t = np.where(np.arange(12) % 3 != 2, 0, 0.7).astype("float32")
    f = linear.EACH.get(name, functools.partial(ps.linear_cross_entropy, reduction=name))

    @linear.jit
    def gradients(x, w, t, labels):
        def total(x, w):
            results = f(x, w, labels, temperature=t, workspace_bytes=linear.workspace(50, 8))
            return sum(jnp.sum(jnp.where(jnp.isfinite(a), a, 0)) for a in floats_of(results)), results

        return jax.grad(total, (0, 1), has_aux=True)(x, w)

    (dx, dw), results = jax.tree.map(np.asarray, gradients(x, w, t, labels))
    warm = np.flatnonzero(t)
    (want_dx, want_dw), _ = gradients(x[warm], w, t[warm], labels[warm])
    share = 1 / 3 if name == "mean" else 1
    assert not np.any(dx[t == 0]) and np.any(dw)
    close(dx[warm], share * want_dx)
    close(dw, share * want_dw)
    if name in ("mean", "sum"):
        each = ps.linear_cross_entropy(x, w, labels, temperature=t, reduction=None)
        close(results, each.mean() if name == "mean" else each.sum())
        with jax.debug_nans(True):
            jax.grad(f, (0, 1))(x, w, labels, temperature=t, z_loss=np.zeros(12, "float32"))


@pytest.mark.parametrize(("reduction", "dtype"), first(1, [("mean", "float32"), ("sum", "float16"), (None, "float32")]))
def test_return_logsumexp(reduction, dtype):
    """The logsumexp equals linear_logsumexp, has no gradient, and is 0 for tokens that are left out."""
    x, w, labels, _ = linear.arrays(20, 8, 100, dtype)
    weights = np.where(np.arange(20) % 5 == 1, 0, np.linspace(-1, 2, 20, dtype="float32"))
    where = np.arange(20) % 4 != 2
    kept = where & (weights != 0)
    bad = np.where(kept, labels, -100)
    options = {"token_weights": weights, "where": where, "reduction": reduction, "temperature": 0.7}
    f = functools.partial(ps.linear_cross_entropy, labels=bad, z_loss=0.1, **options)

    @linear.jit
    def both(x, w, factor):
        def total(x, w):
            loss, lse = f(x, w, return_logsumexp=True)
            return jnp.sum(loss) + factor * jnp.sum(lse**2), (loss, lse)

        return jax.grad(total, (0, 1), has_aux=True)(x, w)

    @linear.jit
    def alone(x, w):
        (value, gradients) = jax.value_and_grad(lambda x, w: jnp.sum(f(x, w)), (0, 1))(x, w)
        forward = f(x, w, return_logsumexp=True)[1]  # not by the kernel of the gradient
        return value, gradients, jnp.where(kept, ps.linear_logsumexp(x, w, temperature=0.7), 0), forward

    value, want, lse, forward = alone(x, w)
    close(forward, lse)
    for factor in (0.0, 3.0):
        gradients, (loss, got) = both(x, w, factor)
        close(got, lse)
        close(np.sum(loss), value)
        jax.tree.map(np.testing.assert_array_equal, gradients, want)
