"""linear_cross_entropy with label_probs: transformations and bad input. test_api.py has the numbers."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import linear
from tests.support.linear import arrays, value_and_grads, workspace

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def small(n=24, k=3):
    x, w, _, _ = arrays(n, 8, 100, "float32")
    rng = np.random.default_rng(4)
    return x, w, rng.integers(0, 100, (n, k)).astype("int32"), rng.random((n, k)).astype("float32")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_transformations():
    """Under vmap, tokens are mapped, and the gradients of w are summed. The number of labels may be symbolic."""
    x, w, labels, q = small()
    batch = x.reshape(3, 8, 8), labels.reshape(3, 8, 3), q.reshape(3, 8, 3)

    def total(x, w, q, labels=labels):
        f = functools.partial(ps.linear_cross_entropy, reduction="sum", workspace_bytes=workspace(100, 5))
        return f(x, w, labels, label_probs=q)

    def in_slices(x, w, q):
        f = jax.vmap(lambda x, labels, q: total(x, w, q, labels), (0, 0, 0))
        return jnp.sum(f(x.reshape(3, 8, 8), batch[1], q.reshape(3, 8, 3)))

    def plain(x, w, q):
        return jnp.sum(linear.plain(x, w, labels, label_probs=q))

    want = value_and_grads(plain, x, w, q)
    for f in (jax.checkpoint(total), in_slices):
        jax.tree.map(close, value_and_grads(f, x, w, q), want)
    each = jax.vmap(
        lambda x, y, q: ps.linear_cross_entropy(x, w, y, label_probs=q, reduction=None), (0, 0, 0)
    )
    close(each(*batch).ravel(), linear.plain(x, w, labels, label_probs=q))
    n, k = jax.export.symbolic_shape("n, k")
    shapes = ((n, 8), "float32"), ((8, 100), "float32"), ((n, k), "float32"), ((n, k), "int32")
    exported = jax.export.export(jax.jit(jax.value_and_grad(total, (0, 1, 2))), platforms=["cpu", "cuda"])(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )
    jax.tree.map(close, jax.export.deserialize(exported.serialize()).call(x, w, q, labels), want)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: total(x, w, q), (q,), (q,))


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
