"""route on the CPU: weights, indices, logsumexp and gradients against the oracle, transformations, and bad input."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import pallas_softmax as ps
from tests.support import cases, routing
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first, pairs, slow
from tests.support.routing import GATES

pytestmark = pytest.mark.usefixtures("quick_compilation")
DEEPSEEK = GATES["sigmoid, bias, groups"]


def arrays(experts, dtype=F32, rows=("normal", "peaked", "integers", "constant", "neg_inf_last")):
    bias = (0.1 * np.random.default_rng(experts).standard_normal(experts)).astype(F32)
    return cases.rows(list(rows), experts, dtype), bias


@functools.partial(jax.jit, static_argnames=("k", "gate", "implementation"))
def routed_and_pulled(x, bias, g, g_logsumexp, *, k, gate, implementation=None):
    """Returns the routing and the cotangent of the logits."""

    def weights(x):
        found = ps.route(x, k, implementation=implementation, **gate.keywords(bias))
        return (found.weights, found.logsumexp), found.indices

    (w, logsumexp), pull, indices = jax.vjp(weights, x, has_aux=True)
    return (w, indices, logsumexp), *pull((g, g_logsumexp))


def assert_routing_and_gradient(name, experts, k, dtype, implementation=None):
    gate, (x, bias) = GATES[name], arrays(experts, dtype)
    g, g_logsumexp = cases.cotangent((len(x), k)), cases.cotangent((len(x),))
    got, dx = routed_and_pulled(x, bias, g, g_logsumexp, k=k, gate=gate, implementation=implementation)
    routing.judge(got, x, k, gate, bias)
    routing.judge_vjp(dx, x, np.asarray(got[1]), gate, g, g_logsumexp)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    first(2, pairs(list(GATES), [(64, 6), (8, 2), (256, 8), (1000, 3), (2048, 8)], [F32, BF16, F16])),
    ids=str,
)
def test_routing_and_gradient(name, shape, dtype):
    assert_routing_and_gradient(name, *shape, dtype)


@pytest.mark.parametrize("name", ["softmax", slow("sigmoid, bias")])
def test_rows_with_nan_and_infinity(name):
    """A NaN or +inf comes first. Softmax weights of its row are NaN; sigmoid weights are of each expert alone."""
    gate, (x, bias) = GATES[name], arrays(16, rows=("normal",) * 3)
    x = np.asarray(x).copy()
    x[0, 5], x[1, 7] = np.nan, np.inf
    found = jax.tree.map(np.asarray, ps.route(x, 4, **gate.keywords(bias)))
    assert found.indices[0, 0] == 5 and (name != "softmax" or found.indices[1, 0] == 7)
    bad = np.isnan(found.weights).all(1) if gate.score == "softmax" else np.isnan(found.weights[:, 0])
    assert list(bad[:1]) == [True] and not bad[2]
    assert np.isnan(found.logsumexp[0]) and found.logsumexp[1] == np.inf


def test_renormalized_weights_of_tiny_scores():
    """A sum of scores would be 0 in float32."""
    x = np.float32([[-300, -301, -400, -500], [0, -200, -200, -200]])
    found = ps.route(x, 2, score="sigmoid", renormalize=True)
    np.testing.assert_allclose(found.weights[0], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-5)
    assert np.isfinite(
        jax.grad(lambda x: ps.route(x, 2, score="sigmoid", renormalize=True).weights[0, 0])(x)
    ).all()


def test_no_expert_and_all_experts():
    x, _ = arrays(8)
    none = ps.route(x, 0)
    assert none.weights.shape == none.indices.shape == (len(x), 0) and none.logsumexp.shape == (len(x),)
    every = ps.route(x, 8, scale=2)
    np.testing.assert_allclose(np.sum(every.weights, 1), 2, rtol=1e-6)
    np.testing.assert_array_equal(np.sort(every.indices, 1), np.tile(np.arange(8), (len(x), 1)))


def test_the_choice_and_the_bias_have_no_derivative():
    x, bias = arrays(64)
    of_bias = jax.grad(lambda b: ps.route(x, 6, **DEEPSEEK.keywords(b)).weights.sum())(jnp.asarray(bias))
    np.testing.assert_array_equal(of_bias, 0)
    _, tangents = jax.jvp(lambda x: ps.route(x, 6), (x,), (x,))
    assert tangents.indices.dtype == jax.dtypes.float0


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_derivatives_of_any_order(name):
    rng, gate = np.random.default_rng(1), GATES[name]
    # so far apart that a small step changes no choice
    x = np.stack([0.2 * rng.permutation(16) - 1 for _ in range(3)]).astype(F32)
    bias = 0.5 * rng.permutation(16).astype(F32)

    def f(x):
        found = ps.route(x, 4, **gate.keywords(jnp.asarray(bias)))
        return found.weights, found.logsumexp

    check_grads(f, (x,), order=2, modes=("fwd", "rev"), rtol=0.02, atol=0.02, eps=1e-2)


def test_transformations():
    """vmap over tokens or biases, calls outside of jit, a batch of any rank, and an exported module agree."""
    x, bias = arrays(64)
    f = functools.partial(ps.route, k=6, score="sigmoid", renormalize=True)
    want = f(x, bias=bias)
    biases = np.stack([bias, -bias])
    exported = jax.export.deserialize(
        jax.export.export(jax.jit(f), platforms=("cpu", "cuda"))(x, bias=bias).serialize()
    )
    two = jax.vmap(lambda b: f(x, bias=b))(biases)
    others = (
        jax.jit(f)(x, bias=bias),
        jax.vmap(lambda x: f(x, bias=bias))(x),
        jax.tree.map(lambda a: a[0], two),
        jax.tree.map(lambda a: a[:, 0], f(x[:, None], bias=bias)),
        exported.call(x, bias=bias),
    )
    for other in others:
        np.testing.assert_array_equal(other.indices, want.indices)
        np.testing.assert_allclose(other.weights, want.weights, rtol=1e-6)
    np.testing.assert_array_equal(two.indices[1], f(x, bias=-bias).indices)


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_sharded_batch(kind):
    """On a mesh of one device the program is the sharded one; tests/programs has more devices."""
    mesh = jax.make_mesh((1,), ("b",), axis_types=(kind,))
    x, bias = arrays(64)
    f = jax.jit(lambda x: ps.route(x, 6, **DEEPSEEK.keywords(bias)))
    with jax.set_mesh(mesh):
        got = f(jax.device_put(x, NamedSharding(mesh, P("b", None))))
    jax.tree.map(np.testing.assert_array_equal, got, f(x))


def test_explain():
    def reasons(experts, k, **keywords):
        choice, *_ = ps.explain(functools.partial(ps.route, k=k, **keywords), jnp.zeros((4, experts)))
        return choice.cuda, dict(choice.reasons).get("mosaic_gpu", "")

    assert reasons(256, 8)[0] == reasons(256, 8, groups=8, top_groups=4)[0] == "mosaic_gpu"
    assert reasons(2048, 8) == ("xla", "2048 experts are more than 1024")
    assert "6 groups" in reasons(384, 8, groups=6, top_groups=2)[1]
    with pytest.raises(NotImplementedError, match="2048 experts are more than 1024"):
        ps.route(jnp.zeros((4, 2048)), 8, implementation="mosaic_gpu")


BAD = [
    (ValueError, "k", {"k": 9}),
    (ValueError, "k", {"k": -1}),
    (TypeError, "k", {"k": 2.0}),
    (ValueError, "k must be at most the 2 experts", {"k": 3, "groups": 4, "top_groups": 1}),
    (ValueError, "groups must be at least 1 and divide the 8 experts", {"groups": 3, "top_groups": 1}),
    (ValueError, "groups must be at least 1", {"groups": 0}),
    (ValueError, "top_groups must be from 1 to groups=4", {"groups": 4}),
    (ValueError, "top_groups must be from 1 to groups=4", {"groups": 4, "top_groups": 5}),
    (ValueError, "top_groups must be from 1 to groups=1", {"top_groups": 2}),
    (ValueError, "score must be one of", {"score": "tanh"}),
    (ValueError, r"bias must have the shape \(8,\)", {"bias": np.zeros(7)}),
    (TypeError, "bias must be a float or integer array", {"bias": np.zeros(8, complex)}),
    (TypeError, "scale must be a static real number", {"scale": np.ones(2)}),
    (TypeError, "renormalize", {"renormalize": 1}),
    (ValueError, "implementation", {"implementation": "cuda"}),
]


@pytest.mark.parametrize(("error", "match", "keywords"), BAD, ids=str)
def test_bad_input(error, match, keywords):
    with pytest.raises(error, match=match):
        ps.route(jnp.zeros((3, 8)), **({"k": 2} | keywords))


def test_a_traced_number_of_experts_is_refused():
    with pytest.raises(TypeError, match="k must be"):
        jax.jit(lambda k: ps.route(jnp.zeros((3, 8)), k))(2)
