"""The oracle: its gradients agree with finite differences of its values, and its order with Python's sort."""

import numpy as np
import pytest

from tests.support import bounds, oracle

X = np.random.default_rng(0).standard_normal((3, 6)) * 2
G = np.random.default_rng(1).standard_normal((3, 6))
WHERE = np.random.default_rng(2).random((3, 6)) < 0.7
WHERE[1] = False


def finite_differences(f, x, h=1e-6):
    grad = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = h
        grad[at] = (f(x + step) - f(x - step)) / (2 * h)
    return grad


def dot(g, y):
    return float(np.sum(g * np.where(np.isfinite(y), y, 0)))


@pytest.mark.parametrize("where", [None, WHERE], ids=["all", "where"])
@pytest.mark.parametrize("axis", [-1, 0, None])
def test_gradients_are_finite_differences(axis, where):
    for f, vjp in [(oracle.softmax, oracle.softmax_vjp), (oracle.log_softmax, oracle.log_softmax_vjp)]:
        want = finite_differences(lambda x, f=f: dot(G, f(x, axis, where)), X)
        np.testing.assert_allclose(vjp(X, G, axis, where).astype(float), want, atol=1e-8)
    g = np.ones_like(oracle.logsumexp(X, axis, where, keepdims=True))
    want = finite_differences(lambda x: dot(g, oracle.logsumexp(x, axis, where, keepdims=True)), X)
    np.testing.assert_allclose(oracle.logsumexp_vjp(X, g, axis, where).astype(float), want, atol=1e-8)


@pytest.mark.parametrize("log", [False, True])
def test_topk_gradients_are_finite_differences(log):
    t, g = np.array([0.5, 1.0, 2.0]), G[:, :3]

    def value(x, t):
        return dot(g, oracle.fused_topk(x, 3, WHERE, t, log)[0])

    dx, dt = oracle.fused_topk_vjp(X, g, 3, WHERE, t, log)
    np.testing.assert_allclose(dx.astype(float), finite_differences(lambda x: value(x, t), X), atol=1e-8)
    np.testing.assert_allclose(dt.astype(float), finite_differences(lambda t: value(X, t), t), atol=1e-8)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_gradients_of_divergences_are_finite_differences(beta):
    want = finite_differences(lambda z: float(oracle.divergence(z, G, beta)[0].sum()), X)
    np.testing.assert_allclose(oracle.divergence(X, G, beta)[1].astype(float), want, atol=1e-8)


def test_total_order():
    neg_nan = np.copysign(np.nan, -1)
    descending = [np.nan, np.inf, 1.0, 1e-45, 0.0, -0.0, -1e-45, -1.0, -np.inf, neg_nan]
    for dtype in (np.float32, np.float64):
        x = np.array(descending, dtype)
        np.testing.assert_array_equal(oracle.topk_indices(x, 10), range(10))
        np.testing.assert_array_equal(oracle.topk_indices(x[::-1], 10), range(10)[::-1])


def test_error_units_of_wrong_results():
    want = np.array([1.0, np.nan, np.inf])
    good = want.astype(np.float32)
    assert bounds.error_units(good, want, 1.0) == 0
    for at, wrong in [(0, np.nan), (1, 1.0), (2, -np.inf), (2, 3.0), (0, np.inf)]:
        bad = good.copy()
        bad[at] = wrong
        assert bounds.error_units(bad, want, 1.0) == np.inf
    two_ulp = np.array([1 + 2.0**-22, np.nan, np.inf], np.float32)
    assert bounds.error_units(two_ulp, want, 1.0) == pytest.approx(2)
