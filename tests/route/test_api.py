"""route in plain JAX: experts, weights, derivatives and transformations, against the oracle; errors and explain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import cases, oracle, routing
from tests.support.cases import BF16, F16, F32, F64
from tests.support.covering import first, pairs
from tests.support.routing import GATES

pytestmark = pytest.mark.usefixtures("quick_compilation")

BEST = "sigmoid, bias, groups"  # the gate with all options
LINE = np.linspace(-2, 2, 16, dtype=F32)  # logits of one row that are far apart


def bias_of(experts):
    return (0.1 * np.random.default_rng(experts).standard_normal(experts)).astype(F32)


def route(x, k, gate, bias=None, **kwargs):
    return ps.route(x, k, **gate.keywords(bias), **kwargs)


def each_gate(test):
    return pytest.mark.slow(pytest.mark.parametrize("name", GATES)(test))


# (E, k): every expert, groups of one expert, one group's experts, and the sizes of models.
SIZES = [(64, 6), (8, 2), (8, 3), (256, 8), (1024, 64), (24, 9), (1040, 5)]


@pytest.mark.parametrize(
    ("name", "size", "dtype"), first(1, pairs([BEST, *list(GATES)[:-1]], SIZES, [F32, BF16, F16])), ids=str
)
def test_against_the_oracle(name, size, dtype):
    (experts, k), gate = size, GATES[name]
    x, bias = routing.rows(experts, dtype, 20)
    got, dx = routing.check(jax.jit(routing.results_and_gradient(k, gate, None)), x, k, gate, bias)
    assert got.weights.dtype == got.logsumexp.dtype == F32
    if name == "softmax":  # weights and gradients of a row with NaN or +inf, or of -inf only, are NaN
        bad = np.isnan(got.weights).all(-1)
        assert bad.sum() == 4 and np.isnan(dx[bad]).all()


@each_gate
def test_float64(name, x64):
    gate, rng = GATES[name], np.random.default_rng(0)
    x, bias = rng.standard_normal((9, 64)), rng.standard_normal(64)
    got = jax.jit(lambda x, bias: route(x, 6, gate, bias))(x, bias)
    assert got.weights.dtype == got.logsumexp.dtype == F64
    want, _ = routing.indices(x, 6, gate, bias)
    np.testing.assert_array_equal(got.indices, want)
    np.testing.assert_allclose(got.weights, routing.weights(x, want, gate), rtol=1e-13)
    np.testing.assert_allclose(got.logsumexp, oracle.logsumexp(x, -1), rtol=1e-13)


@each_gate
def test_integers_that_float32_cannot_hold(name):
    """They are ordered as integers, and their distances have the same softmax."""
    gate, k = GATES[name], 4
    offsets = np.random.default_rng(0).permutation(16)
    x = np.int32(2**31 - 16) + offsets.astype("int32")
    got = route(x, k, gate, np.zeros(16, F32))
    if not gate.steered:
        np.testing.assert_array_equal(got.indices, np.argsort(-offsets)[:k])
    if gate.score == "softmax":
        want = routing.weights(offsets[None], got.indices[None], gate)[0]
        np.testing.assert_allclose(got.weights, want, rtol=1e-6)
    np.testing.assert_allclose(got.logsumexp, x.max(), rtol=1e-7)
    zeros, ones = np.zeros(16, F32), np.ones(16, F32)
    _, tangents = jax.jvp(lambda bias: route(x, k, gate, bias).weights, (zeros,), (ones,))
    np.testing.assert_array_equal(tangents, 0)


@each_gate
def test_no_winners_and_all_winners(name):
    gate, x, bias = GATES[name], cases.rows(["normal", "integers"], 16), bias_of(16)
    none = route(x, 0, gate, bias)
    assert none.weights.shape == none.indices.shape == (2, 0)
    dx = jax.jit(jax.grad(lambda x: route(x, 0, gate, bias).logsumexp.sum()))(x)
    np.testing.assert_allclose(dx, oracle.softmax(x), rtol=1e-5)
    most = 16 * (gate.top_groups or 1) // gate.groups
    routing.judge(route(x, most, gate, bias), x, most, gate, bias)


@each_gate
def test_equal_experts_are_in_order(name):
    """The first of several equal experts, or equal groups, are chosen."""
    got = route(np.zeros((2, 32), F32), 8, GATES[name], np.zeros(32, F32))
    np.testing.assert_array_equal(got.indices, [np.arange(8)] * 2)


@pytest.mark.parametrize(("group_best", "expert"), first(2, [(1, 2), (3, 4), (2, 8), (None, 8)]))
def test_group_best(group_best, expert):
    """One good expert, or three, or two: each counts another number of a group's best experts."""
    x = np.array([[0, 0, 3, -9, 1.5, 1.5, 1.5, -9, 2, 2, -9, -9]], F32)
    got = ps.route(x, 1, score="sigmoid", groups=3, top_groups=1, group_best=group_best)
    assert got.indices.item() == expert


SHARES = functools.partial(ps.route, k=3, score="sigmoid", renormalize=True)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [jnp.float32(1.5), jnp.asarray(1.5, BF16)])
def test_a_traced_scale(scale):
    """It multiplies the weights, and logits get its gradient. (tests/dispatch/test_errors.py: it gets none.)"""
    x = cases.rows(["normal", "integers"], 16)
    total = lambda x, scale: jnp.sum(SHARES(x, scale=scale).weights ** 2)  # noqa: E731
    got = jax.jit(jax.value_and_grad(total))(x, scale)
    want = jax.value_and_grad(lambda x: total(x, 1.5))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, want)


@pytest.mark.slow
def test_a_mapped_or_absent_scale():
    x = cases.rows(["normal", "integers"], 16)
    one = SHARES(x, scale=1.0).weights
    np.testing.assert_array_equal(SHARES(x, scale=None).weights, one)
    mapped = jax.vmap(lambda s: SHARES(x, scale=s).weights)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(mapped, [one, 2 * one], rtol=1e-6)


@each_gate
def test_scale_zero(name):
    """The weights and their derivatives are 0."""
    f = jax.jit(lambda x: route(x, 2, GATES[name]._replace(scale=0.0), bias_of(16)).weights)
    np.testing.assert_array_equal(jax.jvp(f, (LINE,), (LINE,)), np.zeros((2, 2)))
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(LINE), np.zeros(16))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_bias_of_nan_or_inf(bad):
    """A NaN or +inf comes first, and -inf last; the weights do not change."""
    bias = np.where(np.arange(16) == 7, bad, 0).astype(F32)
    got = ps.route(LINE, 16, score="sigmoid", bias=bias)
    assert got.indices[15 if bad == -np.inf else 0] == 7
    np.testing.assert_allclose(got.weights, routing.sigmoid(LINE)[np.asarray(got.indices)], rtol=1e-6)


@each_gate
def test_tangents(name):
    """They are the transpose of the gradient: g . (J dx) = (J^T g) . dx, in each row."""
    gate, bias = GATES[name], bias_of(16)
    rng = np.random.default_rng(0)
    x, dx = rng.standard_normal((2, 5, 16)).astype(F32)
    g, g_logsumexp = rng.standard_normal((5, 4)), rng.standard_normal(5)
    f = lambda x: route(x, 4, gate, bias)  # noqa: E731
    got, tangents = jax.tree.map(np.asarray, jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,)))(x, dx))
    gradient, unit = routing.vjp(x, got.indices, gate, g, g_logsumexp)
    of_tangents = np.sum(g * tangents.weights, -1) + g_logsumexp * tangents.logsumexp
    error = np.abs(of_tangents - np.sum(gradient * dx, -1))
    assert (error <= 2e-6 + 2e-6 * np.sum(unit * np.abs(dx), -1)).all()


@pytest.mark.slow
def test_the_choice_and_the_bias_have_no_gradient():
    bias = bias_of(16)
    g = jax.grad(lambda bias: route(LINE, 4, GATES[BEST], bias).weights.sum())(bias)
    np.testing.assert_array_equal(g, np.zeros(16))
    _, tangents = jax.jvp(lambda bias: route(LINE, 4, GATES[BEST], bias), (bias,), (bias,))
    np.testing.assert_array_equal(tangents.weights, np.zeros(4))
    assert tangents.indices.dtype == jax.dtypes.float0


REFUSED = [
    (1025, 2, {}, "float32", "1025 experts are more than 1024"),
    (64, 0, {}, "float32", "k is 0"),
    (60, 2, dict(groups=3, top_groups=2), "float32", "no kernel for 60 experts in 3 groups"),
    (256, 2, dict(groups=8, top_groups=2, group_best=5), "float32", "group_best=5 is more than 4"),
    (1000, 2, dict(groups=8, top_groups=2), "float32", "no kernel for 1000 experts in 8 groups"),
    (64, 2, {}, "float8_e5m2", "no kernel for float8_e5m2"),
]


@pytest.mark.parametrize(("experts", "k", "options", "dtype", "reason"), REFUSED, ids=str)
def test_calls_without_a_kernel(experts, k, options, dtype, reason):
    """`explain` says why. So does the error of a named implementation."""
    x = jax.ShapeDtypeStruct((4096, experts), dtype)
    f = functools.partial(ps.route, k=k, **options)
    choice = ps.explain(f, x)[0]
    assert choice.cuda == choice.elsewhere == "xla" and reason in str(choice)
    with pytest.raises(NotImplementedError, match=f"^route: implementation='mosaic_gpu' cannot run .*{reason}"):
        jax.eval_shape(functools.partial(f, implementation="mosaic_gpu"), x)


@pytest.mark.parametrize(("name", "k"), first(2, pairs([BEST, *list(GATES)[:-1]], [1, 8, 64, 256])))
def test_calls_with_a_kernel(name, k):
    """Any k has a kernel, and so has the gradient."""
    gate, x = GATES[name], jax.ShapeDtypeStruct((4096, 256), "bfloat16")
    k = min(k, 256 * (gate.top_groups or 1) // gate.groups)
    choices = ps.explain(jax.grad(lambda x: jnp.sum(route(x, k, gate, jnp.zeros(256)).weights)), x)
    assert [(c.call.op, c.cuda, c.elsewhere) for c in choices] == [
        ("route", "mosaic_gpu", "xla"),
        ("route_grad", "mosaic_gpu", "xla"),
    ]
    assert (choices[0].call.k, choices[0].call.groups) == (k, gate.groups)


@pytest.mark.slow
def test_options_that_name_the_default():
    """All groups take part, so the choice is the choice without groups."""
    got, want = ps.route(LINE, 9, groups=4, top_groups=4), ps.route(LINE, 9)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    choices = ps.explain(functools.partial(ps.route, k=9, groups=4, top_groups=4), LINE)
    assert choices[0].call.groups == 1
