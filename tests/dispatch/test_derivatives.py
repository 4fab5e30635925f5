"""Derivatives in every mix of modes, to third order, against jax.nn, and the kernels that they run."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_softmax as ps
from tests.support import cases
from tests.support.covering import first, pairs, values
from tests.support.lowering import array, kernel_names, lowered
from tests.support.oracle import wide
from tests.support.trees import assert_near

pytestmark = pytest.mark.usefixtures("quick_compilation")

K = 4
X = cases.rows(["normal", "peaked", "normal"], 23)
DX = np.random.default_rng(1).standard_normal(X.shape).astype("float32")
MASK = np.random.default_rng(0).random(X.shape) < 0.7
MASK[:, :K] = True  # every row has at least k unmasked positions


SCORES = {"softmax": jnp.exp, "sigmoid": lax.logistic, "sqrtsoftplus": lambda z: jnp.sqrt(jnp.log1p(jnp.exp(z)))}


def divided(x, t):
    """Returns x / t. Logits that are not finite have no derivative."""
    return jnp.where(jnp.isfinite(x), jnp.where(jnp.isfinite(x), x, 0) / t[..., None], x)


def log_sum(z, indices=None):
    """Subtracts no maximum, so the formula has no special points."""
    return jnp.log(jnp.sum(jnp.exp(z), -1, keepdims=True))


def softmax(z, indices=None):
    return jnp.exp(z - log_sum(z))


def log_softmax(z, indices=None):
    return z - log_sum(z)


def of_divided(f, **options):
    return lambda x, t, where: (f(divided(x, t), where=where, **options), None)


def columns(x, where):
    return ps.softmax(x.T, 0, where=None if where is None else where.T).T


def winners(**options):
    return lambda x, t, where: ps.fused_topk(x, min(K, x.shape[1]), temperature=t, where=where, **options)


def at_winners(of_row):
    return lambda z, indices: jnp.take_along_axis(of_row(z), indices, -1)


def statistic(name):
    def ours(x, t, where):
        labels = jnp.zeros(len(x), int)
        return getattr(ps.token_stats(x, labels, where=where, temperature=t), name)[:, None], None

    return ours


def routing(score, renormalize):
    def ours(x, t, where):
        z = divided(x if where is None else jnp.where(where, x, -jnp.inf), t)
        return ps.route(z, min(2, x.shape[1]), score=score, renormalize=renormalize)[:2]

    def definition(z, indices):
        won = SCORES[score](jnp.take_along_axis(z, indices, -1))
        if renormalize:
            return won / jnp.sum(won, -1, keepdims=True)
        return won * jnp.exp(-log_sum(z)) if score == "softmax" else won

    return ours, definition


def drawn(x, t, where):
    got = ps.sample(jax.random.key(0), x, temperature=t, where=where, top_p=0.9)
    return got.log_probs[:, None], got.indices[:, None]


# name: (our function (x, temperature, where) -> (values, indices or None), its definition (x / t, indices) -> values)
FUNCTIONS = {
    "softmax": (of_divided(ps.softmax), softmax),
    "softmax of columns": (of_divided(columns), softmax),
    "log_softmax": (of_divided(ps.log_softmax), log_softmax),
    "logsumexp": (of_divided(ps.logsumexp, axis=-1, keepdims=True), log_sum),
    "fused_topk": (winners(), at_winners(softmax)),
    "fused_topk, log": (winners(log=True), at_winners(log_softmax)),
    "top_k": (lambda x, t, where: ps.top_k(divided(x, t), min(K, x.shape[1]), where=where), at_winners(lambda z: z)),
    "sample": (drawn, at_winners(log_softmax)),
    "filter_logits": (
        lambda x, t, where: (ps.filter_logits(x, temperature=t, where=where, top_k=2), None),
        lambda z, _: z,
    ),
    "token_stats: log_probs": (statistic("log_probs"), lambda z, _: log_softmax(z)[:, :1]),
    "token_stats: logsumexp": (statistic("logsumexp"), log_sum),
    "token_stats: entropy": (
        statistic("entropy"),
        lambda z, _: log_sum(z) - jnp.sum(softmax(z) * jnp.maximum(z, -999), -1, keepdims=True),
    ),
    **{
        f"route: {score}{', renormalized' * renormalize}": routing(score, renormalize)
        for score in SCORES
        for renormalize in (False, True)
    },
}


def scalar(f):
    return lambda x: jnp.sum(jnp.sin(3 * f(x)))


def along(f):
    """Returns the derivative of f along DX, as a function."""
    return lambda x: jax.jvp(f, (x,), (DX,))[1]


def squared_gradient(f):
    return lambda x: jnp.sum(jax.grad(scalar(f))(x) ** 2)


def scanned(f):
    return lambda x: lax.scan(lambda c, _: (c + jnp.sum(f(x * c)), None), jnp.float32(1), None, length=2)[0]


MODES = {
    "jvp": lambda f: along(f)(X),
    "grad": lambda f: jax.grad(scalar(f))(X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "jacrev": lambda f: jax.jacrev(f)(X),
    "linearize": lambda f: jax.linearize(f, X)[1](DX),
    "linear_transpose": lambda f: jax.linear_transpose(lambda dy: jax.vjp(f, X)[1](dy)[0], f(X))(X)[0],
    "hessian": lambda f: jax.hessian(scalar(f))(X),
    "jvp of grad": lambda f: along(jax.grad(scalar(f)))(X),
    "grad of jvp": lambda f: jax.grad(lambda x: jnp.sum(along(f)(x) ** 2))(X),
    "grad of grad": lambda f: jax.grad(squared_gradient(f))(X),
    "jvp of jvp": lambda f: along(along(f))(X),
    "jvp of grad of grad": lambda f: along(jax.grad(squared_gradient(f)))(X),
    "grad of grad of jvp": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(scalar(along(f)))(x) ** 2))(X),
    "jvp of jvp of jvp": lambda f: along(along(along(f)))(X),
    "vmap of jvp": lambda f: jax.vmap(lambda dx: jax.jvp(f, (X,), (dx,))[1])(np.stack([DX, 2 * DX])),
    "vmap of grad": lambda f: jax.vmap(jax.grad(scalar(f)))(np.stack([X, DX])),
    "jvp of grad of checkpoint": lambda f: along(jax.grad(scalar(jax.checkpoint(f))))(X),
    "jvp of scan": lambda f: along(scanned(f))(X),
    "grad of scan": lambda f: jax.grad(scanned(f))(X),
}
EAGER = ("linearize", "vmap of grad")  # the other modes run in one compilation


# The fast set has the highest orders, which include the lower ones.
HIGHEST_FIRST = sorted(MODES, key=lambda mode: -mode.count(" of "))


def ours_and_definition(name, masked, one_temperature):
    """Returns our function of x and its definition, with temperatures that depend on x. -inf results become 0."""
    ours, definition = FUNCTIONS[name]
    where = MASK if masked else None

    def call(x):
        t = 1 + (x[0, 0] if one_temperature else x[:, 0]) ** 2
        return t, *ours(x, t, where)

    def finite(x):
        _, values, _ = call(x)
        return jnp.where(jnp.isfinite(values), values, 0)

    def defined(x):
        t, values, indices = lax.stop_gradient(call(x))
        t, *_ = call(x)
        z = x / t[..., None]
        z = jnp.where(MASK, z, -jnp.inf) if masked else z
        return jnp.where(jnp.isfinite(values), definition(z, indices), 0)

    return finite, defined


WAYS = itertools.cycle(pairs([True, False], [False, True]))
CASES = [(*case, *way) for case, way in zip(pairs([*FUNCTIONS], HIGHEST_FIRST)[:38], WAYS)]


@pytest.mark.parametrize(("name", "mode", "masked", "one_temperature"), first(2, CASES))
def test_derivatives_agree_with_definitions(name, mode, masked, one_temperature):
    """Errors are relative to the largest entry: orders differ in size. float32 loses up to a digit per order."""
    ours, like = ours_and_definition(name, masked, one_temperature)
    derivative = MODES[mode]
    got = np.asarray(derivative(ours) if mode in EAGER else jax.jit(lambda: derivative(ours))())
    want = np.asarray(jax.jit(lambda: derivative(like))())
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * max(1, np.abs(want).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logsumexp", "fused_topk", "softmax", "log_softmax"])
def test_without_jit(name):
    """Under jax.disable_jit, each operation runs by itself."""
    ours, like = ours_and_definition(name, masked=True, one_temperature=False)
    with jax.disable_jit():
        got = jax.jvp(ours, (X,), (DX,)), jax.vjp(ours, X)[1](ours(X))
    want = jax.jvp(like, (X,), (DX,)), jax.vjp(like, X)[1](like(X))
    assert_near(got, want, 1e-4, 1e-5)


def test_indices_have_no_tangent():
    """A jvp ignores integer results; their tangents have the dtype float0."""
    got, tangent = jax.jvp(lambda x: ps.fused_topk(x, K), (X,), (DX,))
    assert tangent.indices.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(got.indices, ps.fused_topk(X, K).indices)
    assert jax.jvp(lambda x: ps.fused_topk(x, K).indices * 2, (X,), (DX,))[0].shape == (len(X), K)


@pytest.mark.slow
def test_integer_logits_have_a_derivative_of_the_temperature():
    logits = np.arange(12, dtype="int32").reshape(2, 6) % 5

    def f(logits, temperature):
        return ps.fused_topk(logits, 2, temperature=temperature).values

    def both(logits):
        forward = jax.jvp(lambda t: f(logits, t), (2.0,), (1.0,))[1]
        return forward, jax.jacrev(lambda t: f(logits, t))(2.0)

    for got, want in zip(both(logits), both(logits.astype("float32"))):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.abs(got).max() > 1e-3


# name: (a function, its kernels for a large call lowered for CUDA, forward and backward)
REVERSE = {
    "softmax": (ps.softmax, ["softmax_forward", "softmax_grad"]),
    "log_softmax": (ps.log_softmax, ["log_softmax_forward", "log_softmax_grad"]),
    "logsumexp": (functools.partial(ps.logsumexp, axis=-1), ["logsumexp_forward"]),
    "topk": (lambda x, **named: ps.fused_topk(x, 5, **named).values, ["softmax_topk"]),
}
LARGE = array(64, 25000, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", REVERSE)
def test_kernels_of_derivatives(name):
    """Reverse mode costs what a custom vjp costs: it saves one array of the size and the dtype of the logits.

    In forward mode, softmax's tangent runs the gradient's kernel. The other tangents are plain JAX.
    """
    f, kernels = REVERSE[name]
    tangent = lowered(lambda x, dx: jax.jvp(f, (x,), (dx,)), LARGE, LARGE)
    assert kernel_names(tangent) == kernels[: 2 if name == "softmax" else 1]

    def gradient(x):
        y, pullback = jax.vjp(f, x)
        return pullback(y)

    assert kernel_names(lowered(gradient, LARGE)) == kernels
    for implementation in (None, "xla"):
        one = functools.partial(f, implementation=implementation)
        saved = jax.tree.leaves(jax.eval_shape(lambda x, f=one: jax.vjp(f, x)[1], LARGE))
        assert [a.dtype for a in saved if a.size == LARGE.size] == [LARGE.dtype]


def test_one_operation_for_every_derivative():
    """The jaxpr of a gradient has our linear operation, so JAX may transpose and batch it like any other."""
    text = str(jax.make_jaxpr(lambda x: jax.jvp(ps.softmax, (x,), (DX,))[1])(X))
    assert len(re.findall(r"pallas_softmax_linear\[", text)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "log"), [("bfloat16", False), ("float16", True)])
def test_16_bit_dtypes_under_strict_promotion(dtype, log):
    x, dx = jnp.asarray(X, dtype), jnp.asarray(DX, dtype)
    with jax.numpy_dtype_promotion("strict"):
        f = lambda x: ps.fused_topk(x, K, log=log).values  # noqa: E731
        y, pullback = jax.vjp(f, x)
        dy = jax.jvp(f, (x,), (dx,))[1]
    assert dy.dtype == y.dtype == dtype
    np.testing.assert_allclose(np.vdot(wide(dy), wide(y)), np.vdot(wide(dx), wide(pullback(y)[0])), rtol=0.05)


OF_ONE_ROW = {
    "fused_topk": lambda x: ps.fused_topk(x, 2).values[0],
    "token_stats": lambda x: ps.token_stats(x, jnp.int32(1)).log_probs,
    "sample": lambda x: ps.sample(jax.random.key(0), x).log_probs,
    "filter_logits": lambda x: ps.filter_logits(x)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE_ROW)
def test_gradients_of_weak_types_are_weak(name):
    """As of the same functions made of jax.nn."""
    gradient = jax.grad(OF_ONE_ROW[name])
    assert gradient(jnp.full(3, 2.0)).weak_type and not gradient(jnp.ones(3, "float32")).weak_type


# --- Special points, in float64: logits of 0, ties, -inf, masked logits, rows of one

POINTS = np.array(
    [
        [0, 0, 0, 0, 0],
        [0, 1, -0.0, 0.5, -1],
        [-1, -2, 0, -0.5, 0],
        [3, 1, 3, 1, 1],
        [30, 0, 29, -30, 15],
        [-30, -31, -30, -15, -40],
        [1, 0, -np.inf, 0, -np.inf],
    ]
)


def third_derivatives(f, v):
    """Returns the third derivative of each result of f, and of their weighted sum, along random directions."""
    directions = np.random.default_rng(0).standard_normal((3, *v.shape))
    forward, backward = f, lambda v: jnp.sum(f(v) * jnp.cos(jnp.arange(f(v).shape[-1])))
    for d in directions:
        forward = lambda v, g=forward, d=d: jax.jvp(g, (v,), (d,))[1]  # noqa: E731
        gradient = jax.grad(backward)
        backward = lambda v, g=gradient, d=d: jnp.vdot(g(v), d)  # noqa: E731
    return forward(v), gradient(v)


# every function once, and top-k, with its own rule for rows of -inf and for masked rows, in two ways
SPECIAL = [*values(list(FUNCTIONS)[::-1], ["whole", "masked", "of one logit"])]
SPECIAL += itertools.product(("fused_topk", "fused_topk, log"), ("whole", "masked"))


@pytest.mark.parametrize(("name", "rows"), first(0, [*dict.fromkeys(SPECIAL)]))
def test_third_derivatives_at_special_points(name, rows, x64):
    """In the logits and the temperature, and in both modes. A row may be fully masked."""
    ours, definition = FUNCTIONS[name]
    x, where = POINTS[:, :1] if rows == "of one logit" else POINTS.copy(), None
    if rows == "masked":
        x = np.append(x, x[:1], 0)
        x[:, 1], x[-1] = np.nan, np.nan
        where = ~np.isnan(x)
    with_t = np.append(x, np.full((len(x), 1), 0.7), 1)
    values, indices = jax.jit(lambda v: ours(v[:, :-1], v[:, -1], where))(with_t)
    finite_x = np.isfinite(x)
    kept = finite_x | ~finite_x.any(-1, keepdims=True)  # a row without logits gets zeros, which do not count

    def finite(f):
        return lambda v: jnp.where(np.isfinite(values), f(v[:, :-1], v[:, -1]), 0)

    def defined(x, t):
        return definition(jnp.where(kept, jnp.where(finite_x, x, 0) / t[:, None], -jnp.inf), indices)

    got, want = (
        jax.jit(functools.partial(third_derivatives, finite(f)))(with_t)
        for f in (lambda x, t: ours(x, t, where)[0], defined)
    )
    for a, b in zip(got, want):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * max(1, np.abs(b).max()))
