"""linear_cross_entropy with label_probs: a loss of K labels per token."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.covering import first, pairs, slow
from tests.support.linear import FEATURES, arrays, assert_soft_labels, of_size, value_and_grads, workspace
from tests.support.oracle import wide

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
WITHOUT_SMOOTHING = [name for name, options in FEATURES.items() if "label_smoothing" not in options]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("dtype", "features", "reduction", "peak"),
    first(
        1,
        [
            ("float32", "softcap", "mean", 1),
            ("bfloat16", "z_loss", None, 40),
            *pairs(["float32", "bfloat16", "float16"], WITHOUT_SMOOTHING, ["mean", "sum", None], [1, 40]),
        ],
    ),
)
def test_losses_and_gradients(dtype, features, reduction, peak):
    assert_soft_labels(dtype, features, reduction, peak)


def small(n=24, k=3):
    x, w, _, _ = arrays(n, 8, 100, "float32")
    rng = np.random.default_rng(4)
    return x, w, rng.integers(0, 100, (n, k)).astype("int32"), rng.random((n, k)).astype("float32")


def plain(x, w, labels, q):
    z = jnp.matmul(x, w, precision="highest")
    return jnp.sum(q * (jax.nn.logsumexp(z, -1, keepdims=True) - jnp.take_along_axis(z, labels, -1)), -1)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", slow(None)])
def test_a_bad_label_needs_probability_0(reduction):
    """With another one, the loss is NaN and its gradients are 0. The gradient at probability 0 is no silent zero."""
    x, w, labels, q = small()
    q[:, 1] = 0
    bad = labels.copy()
    bad[3, 1], bad[5, 1] = -1, 100

    def loss(x, w, q, labels=labels):
        each = ps.linear_cross_entropy(x, w, labels, label_probs=q, reduction=reduction)
        return jnp.sum(jnp.where(jnp.isfinite(each), jnp.exp(each / 9), 0))

    value, (dx, dw, dq) = jax.value_and_grad(loss, (0, 1, 2))(x, w, q)
    got = jax.value_and_grad(functools.partial(loss, labels=bad), (0, 1, 2))(x, w, q)
    assert dq[:, 1].all()
    jax.tree.map(close, got, (value, (dx, dw, dq.at[np.array([3, 5]), 1].set(0))))
    q[4, 1], bad[4, 1] = 0.5, -1
    each = ps.linear_cross_entropy(x, w, bad, label_probs=q, reduction=None)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(each)), [4])
    for d in jax.grad(functools.partial(loss, labels=bad), (0, 1, 2))(x, w, q):
        assert np.isfinite(d).all() and (d.any() if reduction is None else not d.any())


@pytest.mark.usefixtures("quick_compilation")
def test_the_mean_divides_by_tokens():
    """It never divides by the sum of the probabilities."""
    x, w, labels, q = small()
    where = np.arange(24) % 3 != 0
    each = plain(x, w, labels, q)
    f = functools.partial(ps.linear_cross_entropy, x, w, labels, label_probs=q)
    close(f(where=where), each[where].mean())
    close(f(token_weights=np.arange(24)), (np.arange(24) * each).sum() / np.arange(24).sum())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_one_label_of_probability_1():
    x, w, labels, _ = small(k=1)
    f = functools.partial(ps.linear_cross_entropy, x, w)
    close(f(labels, label_probs=np.ones((24, 1))), f(labels[:, 0]))
    none = ps.linear_cross_entropy(x, w, labels[:, :0], label_probs=labels[:, :0] * 1.0, reduction=None)
    np.testing.assert_array_equal(none, np.zeros(24))


@pytest.mark.parametrize("reduction", ["mean", slow("sum")])
def test_a_mean_takes_three_products(reduction):
    shapes = [jax.ShapeDtypeStruct(*s) for s in (((64, 8), "float32"), ((8, 100), "float32"))]
    labels, q = jax.ShapeDtypeStruct((64, 5), "int32"), jax.ShapeDtypeStruct((64, 5), "float32")

    def loss(x, w, q, labels):
        return ps.linear_cross_entropy(x, w, labels, label_probs=q, reduction=reduction)

    text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*shapes, q, labels).compile().as_text()
    assert text.count(" dot(") == 3


@pytest.mark.slow
def test_memory():
    """64 labels per token take a few numbers per label more than one."""
    x, w, labels = of_size(8192)
    many = jax.ShapeDtypeStruct((8192, 64), "int32"), jax.ShapeDtypeStruct((8192, 64), "float32")

    def temporaries(*labels):
        f = lambda x, w, y, q=None: ps.linear_cross_entropy(x, w, y, label_probs=q)  # noqa: E731
        compiled = jax.jit(jax.grad(f, (0, 1))).lower(x, w, *labels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(*many) <= temporaries(labels) + 16 * 4 * 8192 * 64


@pytest.mark.slow
def test_transformations():
    x, w, labels, q = small()
    batch = x.reshape(3, 8, 8), labels.reshape(3, 8, 3), q.reshape(3, 8, 3)

    def total(x, w, q, labels=labels, reduction="sum"):
        f = functools.partial(ps.linear_cross_entropy, reduction=reduction, workspace_bytes=workspace(100, 5))
        return jnp.sum(f(x, w, labels, label_probs=q))

    def in_slices(x, w, q):
        f = jax.vmap(lambda x, labels, q: total(x, w, q, labels), (0, 0, 0))
        return jnp.sum(f(x.reshape(3, 8, 8), labels.reshape(3, 8, 3), q.reshape(3, 8, 3)))

    want = value_and_grads(lambda x, w, q: jnp.sum(plain(x, w, labels, q)), x, w, q)
    for f in (total, jax.checkpoint(total), in_slices, functools.partial(total, reduction=None)):
        jax.tree.map(functools.partial(close, rtol=1e-4, atol=1e-5), value_and_grads(f, x, w, q), want)
    each = jax.vmap(
        lambda x, y, q: ps.linear_cross_entropy(x, w, y, label_probs=q, reduction=None), (0, 0, 0)
    )
    close(each(*batch).ravel(), plain(x, w, labels, q))
    n, k = jax.export.symbolic_shape("n, k")
    shapes = ((n, 8), "float32"), ((8, 100), "float32"), ((n, k), "float32"), ((n, k), "int32")
    exported = jax.export.export(jax.jit(jax.value_and_grad(total, (0, 1, 2))), platforms=["cpu", "cuda"])(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )
    got = jax.export.deserialize(exported.serialize()).call(x, w, q, labels)
    jax.tree.map(functools.partial(close, rtol=1e-4, atol=1e-5), got, want)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: total(x, w, q), (q,), (q,))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("reduction", ["mean", slow(None)])
def test_a_teacher_of_another_model(reduction):
    """A loss in label_probs is differentiable through the teacher's own softmax."""
    x, w, labels, q = small()

    def total(logits, f):
        return jnp.mean(f(x, w, labels, jax.nn.softmax(logits)))

    ours = lambda *a: ps.linear_cross_entropy(*a[:3], label_probs=a[3], reduction=reduction)  # noqa: E731
    got, want = (jax.grad(functools.partial(total, f=f))(q) for f in (ours, plain))
    close(got, want)
    assert wide(got).any()


def test_bad_input():
    x, w, labels, q = small()
    for error, match, keywords in (
        (
            ValueError,
            r"label_probs must have the shape of labels, \(24, 3\), got \(24, 2\)",
            {"label_probs": q[:, :2]},
        ),
        (TypeError, "label_probs must be None or of real numbers, got dtype bool", {"label_probs": q > 0}),
        (TypeError, "label_probs must be an array", {"label_probs": [[1, 2, 3]]}),
        (ValueError, "label_smoothing must be 0 with label_probs, got 0.1", {"label_smoothing": 0.1}),
        (ValueError, r"labels must have .*, \(24, K\), got \(24,\)", {"labels": labels[:, 0]}),
        (ValueError, r"labels must have .*, \(24,\), got \(24, 3\)", {"label_probs": None}),
        (TypeError, "return_logsumexp must be True or False, got 1", {"return_logsumexp": 1}),
    ):
        with pytest.raises(error, match=f"linear_cross_entropy: {match}"):
            ps.linear_cross_entropy(x, w, **{"labels": labels, "label_probs": q, **keywords})
    loss = functools.partial(ps.linear_cross_entropy, x, w, labels, label_probs=q)
    with pytest.raises(ValueError, match="label_smoothing must be 0 with label_probs"):
        jax.eval_shape(lambda s: loss(label_smoothing=s), 0.0)
