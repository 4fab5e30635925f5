"""Transformations: jit, grad, vmap, scan, checkpoint, export, donation. test_sharded.py has sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import pallas_softmax as ps
from tests.support import cases
from tests.support.cases import F32
from tests.support.covering import first, first_values, pairs, slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 20
X = cases.rows(["normal", "peaked", "integers", "ascending", "one_winner", "constant"], V)
X3 = np.stack([X, X[::-1], X * 2, X - 3])
WHERE = np.random.default_rng(0).random(X3.shape) < 0.6
TEMPERATURE = np.linspace(0.5, 2, X3.shape[0] * X3.shape[1]).reshape(X3.shape[:2]).astype(F32)

# Functions from one array to one array. Rows are along the last axis.
FUNCTIONS = {
    "softmax": ps.softmax,
    "log_softmax": ps.log_softmax,
    "logsumexp": lambda x, **kwargs: ps.logsumexp(x, -1, **kwargs),
    "topk": lambda x, **kwargs: ps.fused_topk(x, 3, **kwargs).values,
    "topk_log": lambda x, **kwargs: ps.fused_topk(x, 3, log=True, **kwargs).values,
    "indices": lambda x, **kwargs: ps.fused_topk(x, 3, **kwargs).indices,
    "top_k": lambda x, **kwargs: ps.top_k(x, 3, **kwargs).values,
}
DIFFERENTIABLE = [name for name in FUNCTIONS if name != "indices"]
FAST = "topk_log"  # the other functions run the same code


def of_each(names):
    """Parametrizes a test by function names; the fast set has one function."""
    return pytest.mark.parametrize("name", [name if name == FAST else slow(name) for name in names])


each, each_differentiable = of_each(FUNCTIONS), of_each(DIFFERENTIABLE)


def close(got, want):
    """Asserts that two compilations of a computation agree: indices exactly, numbers up to a few roundings."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=5e-6, atol=1e-6)


def loss(f):
    """Returns a scalar function with a different gradient in every entry."""

    def scalar(x, **kwargs):
        y = f(x, **kwargs)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return scalar


@each
def test_jit(name):
    f = FUNCTIONS[name]
    close(jax.jit(f)(X), f(X))
    close(jax.jit(f)(X, where=WHERE[0]), f(X, where=WHERE[0]))


@pytest.mark.slow
@each_differentiable
def test_grad_inside_and_outside_of_jit(name):
    f = loss(FUNCTIONS[name])
    want = jax.grad(f)(X)
    assert np.abs(want).max() > 1e-3
    close(jax.jit(jax.grad(f))(X), want)
    close(jax.grad(jax.jit(f))(X), want)


@pytest.mark.slow
@each_differentiable
def test_jacrev_agrees_with_vjp(name):
    f, x = FUNCTIONS[name], X[1]
    jacobian = jax.jacrev(f)(x)
    g = cases.cotangent(jacobian.shape[:-1])
    close(np.asarray(np.tensordot(g, jacobian, g.ndim), F32), jax.vjp(f, x)[1](g)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_hessian(name):
    """The gradient is differentiable in both modes."""
    f, like = (loss(lambda x, m=m: getattr(m, name)(x, -1)) for m in (ps, jax.nn))
    got = jax.jit(jax.jacrev(jax.grad(f)))(X[3])
    np.testing.assert_allclose(got, jax.jit(jax.hessian(like))(X[3]), rtol=1e-4, atol=1e-5)


# --- vmap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "in_axis"), first(2, pairs(list(FUNCTIONS), [0, 1, -1, 2])))
def test_vmap(name, in_axis):
    f = FUNCTIONS[name]
    x = np.moveaxis(X3, 0, in_axis) if in_axis in (0, 1) else np.moveaxis(X3, 0, -1)
    close(jax.vmap(f, in_axis)(x), f(X3))


@each
def test_nested_vmap(name):
    f = FUNCTIONS[name]
    close(jax.jit(jax.vmap(jax.vmap(f)))(X3), f(X3))


@each
def test_vmap_with_out_axes(name):
    f = FUNCTIONS[name]
    close(jax.vmap(f, out_axes=1)(X3), jnp.moveaxis(f(X3), 0, 1))


@pytest.mark.parametrize(("name", "batched"), first(2, pairs(list(FUNCTIONS), ["both", "x", "where"])))
def test_vmap_of_where(name, batched):
    f = FUNCTIONS[name]
    x = X3 if batched != "where" else X
    where = WHERE if batched != "x" else WHERE[0]
    axes = (0 if batched != "where" else None, 0 if batched != "x" else None)
    got = jax.vmap(lambda x, where: f(x, where=where), axes)(x, where)
    close(got, f(np.broadcast_to(x, X3.shape), where=np.broadcast_to(where, X3.shape)))


@pytest.mark.slow
@each_differentiable
def test_vmap_of_grad(name):
    f = FUNCTIONS[name]
    g = cases.cotangent(np.shape(f(X3)))

    def pullback(x, g):
        return jax.vjp(f, x)[1](g)[0]

    want = jax.jit(pullback)(X3, g)
    close(jax.jit(jax.vmap(pullback))(X3, g), want)
    close(jax.jit(jax.vmap(jax.vmap(pullback)))(X3, g), want)


@pytest.mark.slow
@each_differentiable
def test_grad_of_vmap_with_a_shared_argument(name):
    """A row that a batch of masks shares has the sum over the batch as its gradient."""
    f = FUNCTIONS[name]

    def total(x, where):
        y = jax.vmap(lambda where: f(x, where=where))(where)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) * jnp.arange(1, 5).reshape(4, *[1] * (y.ndim - 1)))

    def one(x, where, weight):
        y = f(x, where=where)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0)) * weight

    gradient = jax.jit(jax.grad(one))
    want = sum(gradient(X, WHERE[i], i + 1.0) for i in range(4))
    np.testing.assert_allclose(jax.jit(jax.grad(total))(X, WHERE), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", first_values(0, [(0, 0), (0, None), (None, 0)]), ids=str)
def test_vmap_of_temperature(axes):
    """A temperature may be mapped alone, with the logits, or shared; it is a scalar or one number per row."""
    f = lambda x, t: ps.fused_topk(x, 3, temperature=t).values  # noqa: E731
    x = X3 if axes[0] == 0 else X
    t = TEMPERATURE if axes[1] == 0 else TEMPERATURE[0]
    want = f(np.broadcast_to(x, X3.shape), np.broadcast_to(t, TEMPERATURE.shape))
    close(jax.vmap(f, axes)(x, t), want)
    scalar = TEMPERATURE[:, 0] if axes[1] == 0 else TEMPERATURE[0, 0]
    want = f(
        np.broadcast_to(x, X3.shape),
        np.broadcast_to(np.reshape(scalar, (-1, 1)), TEMPERATURE.shape),
    )
    close(jax.vmap(f, axes)(x, scalar), want)


@pytest.mark.slow
def test_vmap_of_the_gradient_of_temperature():
    f = lambda x, t: ps.fused_topk(x, 3, temperature=t).values.sum()  # noqa: E731
    got = jax.jit(jax.vmap(jax.vmap(jax.grad(f, 1))))(X3, TEMPERATURE)
    close(got, jax.jit(jax.grad(lambda t: f(X3, t)))(TEMPERATURE))


def test_gradient_of_a_temperature_that_all_rows_share():
    f = lambda x, t: ps.fused_topk(x, 3, temperature=t).values.sum()  # noqa: E731
    t = jnp.float32(1.3)
    got = jax.jit(jax.grad(lambda t: jax.vmap(f, (0, None))(X3, t).sum()))(t)
    want = jax.jit(jax.grad(lambda t: f(X3, jnp.full(TEMPERATURE.shape, t))))(t)
    np.testing.assert_allclose(got, want, rtol=1e-5)


# --- Control flow, checkpoint, export, donation -------------------------------------------------------


@each
def test_scan(name):
    f = FUNCTIONS[name]
    close(jax.lax.scan(lambda c, x: (c, f(x)), 0, X3)[1], f(X3))


@each_differentiable
def test_grad_through_scan(name):
    f = FUNCTIONS[name]

    def total(x):
        step = lambda c, x: (c + jnp.sum(f(x) ** 2), None)  # noqa: E731
        return jax.lax.scan(step, jnp.float32(0), x)[0]

    want = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(X3)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(X3), want, rtol=1e-5, atol=1e-5)


@each
def test_cond(name):
    f = FUNCTIONS[name]
    got = jax.jit(lambda p, x: jax.lax.cond(p, f, lambda x: f(x[::-1]), x))(True, X)
    close(got, f(X))


@pytest.mark.parametrize(
    ("name", "policy"), first(2, pairs(DIFFERENTIABLE, [None, "nothing_saveable", "everything_saveable"]))
)
def test_checkpoint(name, policy):
    f = loss(FUNCTIONS[name])
    policy = policy and getattr(jax.checkpoint_policies, policy)
    close(jax.jit(jax.grad(jax.checkpoint(f, policy=policy)))(X), jax.jit(jax.grad(f))(X))


def exported(f, shape):
    return export.export(jax.jit(f), platforms=["cpu"])(jax.ShapeDtypeStruct(shape, F32))


@pytest.mark.slow
@each
def test_export(name):
    """An export for the CPU can be called and differentiated without the function."""
    f = FUNCTIONS[name]
    again = exported(f, X.shape)
    close(again.call(X), f(X))
    if name in DIFFERENTIABLE:
        g = cases.cotangent(np.shape(f(X)))
        close(again.vjp().call(X, g)[0], jax.vjp(f, X)[1](g)[0])


@each
def test_export_round_trip(name):
    """An export can be written to bytes and read back."""
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialise")
    f = FUNCTIONS[name]
    order = int(name in DIFFERENTIABLE)
    again = export.deserialize(exported(f, X.shape).serialize(vjp_order=order))
    close(again.call(X), f(X))
    if order:
        g = cases.cotangent(np.shape(f(X)))
        close(jax.vjp(again.call, X)[1](g)[0], jax.vjp(f, X)[1](g)[0])


def test_export_of_a_normalizer():
    """A serialized program may have the type Normalizer."""
    program = export.export(jax.jit(ps.online.reduce))(jax.ShapeDtypeStruct(X.shape, F32))
    jax.tree.map(close, export.deserialize(program.serialize()).call(X), ps.online.reduce(X))


@each
def test_export_with_a_symbolic_vocab(name):
    again = exported(FUNCTIONS[name], (len(X), *export.symbolic_shape("v", constraints=["v >= 3"])))
    for x in (X, X[:, :7]):
        close(again.call(x), FUNCTIONS[name](x))


def test_export_of_a_topk():
    """The result keeps its type through serialization."""
    again = export.deserialize(exported(lambda x: ps.fused_topk(x, 3), X.shape).serialize())
    got = again.call(X)
    assert isinstance(got, ps.TopK)
    jax.tree.map(close, got, ps.fused_topk(X, 3))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"where": WHERE[0]}, {}, {"log": True, "dtype": "bfloat16"}], ids=list)
def test_export_with_a_symbolic_number_of_winners(options):
    """k is the size of another argument, with a constraint that it fits."""

    def largest(x, like):
        return ps.fused_topk(x, like.shape[0], **options)

    k = export.symbolic_shape("k", constraints=[f"k <= {V}"])
    shapes = [jax.ShapeDtypeStruct(X.shape, F32), jax.ShapeDtypeStruct(k, F32)]
    again = export.export(jax.jit(largest), platforms=["cpu"])(*shapes)
    for k in (1, 5, V):
        jax.tree.map(close, again.call(X, np.zeros(k, F32)), ps.fused_topk(X, k, **options))


def test_a_symbolic_number_of_winners_must_be_known_to_fit():
    (k,) = export.symbolic_shape("k")
    with pytest.raises(
        ValueError, match="row's length 20, got k, which is not known to be; say so in the constr"
    ):
        ps.fused_topk(np.ones(20, F32), k)


@each
def test_export_with_a_symbolic_batch(name):
    f = FUNCTIONS[name]
    again = exported(f, (*export.symbolic_shape("rows"), V))
    for n in (1, 6):
        close(again.call(X[:n]), f(X[:n]))


@each
def test_donated_buffers(name):
    f = FUNCTIONS[name]
    want = f(X)
    x = jnp.array(X)
    got = jax.jit(f, donate_argnums=0)(x)
    close(got, want)
    if got.shape == X.shape and got.dtype == X.dtype:
        assert x.is_deleted()


@pytest.mark.slow
def test_the_input_is_not_changed():
    x = X.copy()
    on_device = jnp.array(x)
    for f in FUNCTIONS.values():
        f(on_device)
        jax.jit(f)(on_device)
    np.testing.assert_array_equal(on_device, x)
