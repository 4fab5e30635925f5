"""Transformations: jit, grad, vmap, scan, checkpoint, export, donation. test_sharded.py has sharding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import pallas_softmax as ps
from tests.support import cases
from tests.support.calls import BATCH, CALLS, FUNCTIONS, WITH_KERNELS, call, pullback, with_gradient
from tests.support.cases import F32
from tests.support.covering import first, first_values, in_turn, pairs
from tests.support.trees import assert_near, types_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 20
X = cases.rows(["normal", "peaked", "integers", "ascending", "one_winner", "constant"], V)
PROGRAMS = {"results": lambda name, given: call(name, **given), "gradients": pullback}


def arrays_of(name):
    """Returns the arrays of a call in two parts: one with an element for each row, and one that all rows share."""
    arrays = dict(CALLS[name][2])
    if "key" in arrays:  # one for each draw
        arrays["key"] = jax.random.split(jax.random.key(1), BATCH if name in ("sample", "linear_sample") else BATCH[:1])
        arrays |= {"top_k": None, "min_p": None}  # filter_logits has all filters, and compiles faster
    of_rows = {of: a for of, a in arrays.items() if np.shape(a)[:1] == BATCH[:1]}
    return of_rows, {of: a for of, a in arrays.items() if of not in of_rows}


def close(got, want):
    """Asserts that two compilations agree: integers exactly, numbers up to a few roundings."""
    assert types_of(got) == types_of(want)
    assert_near(got, want)


def at(arrays, i, axes=0):
    """Returns slice i of the arrays along an axis, or along an axis for each; None takes the whole array."""
    axes = axes if isinstance(axes, dict) else dict.fromkeys(arrays, axes)
    return {
        of: a if axes[of] is None else lax.index_in_dim(jnp.asarray(a), i, axes[of], keepdims=False)
        for of, a in arrays.items()
    }


def looped(f, arrays, n, axes=0):
    """Returns what jax.vmap returns, by a loop."""
    return jax.tree.map(lambda *a: jnp.stack(a), *(f(at(arrays, i, axes)) for i in range(n)))


def rebuilt(f, arrays):
    """Returns the results of an export with a symbolic number of rows, written to bytes and read back."""
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialise")
    key = {of: a for of, a in arrays.items() if of == "key"}  # serialization refuses typed keys
    others = {of: jnp.asarray(a) for of, a in arrays.items() if of != "key"}
    (rows,) = export.symbolic_shape("rows")
    like = {of: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for of, a in others.items()}
    like = others if key else like  # the keys have a known number
    stored = export.export(jax.jit(lambda given: f(given | key)), platforms=["cpu", "cuda"])(like)
    return export.deserialize(stored.serialize()).call(others)


def chosen(f, arrays):
    """Donates the arrays to a program that runs f in a branch."""
    of_branch = lambda p, a: lax.cond(p, f, lambda a: jax.tree.map(jnp.zeros_like, f(a)), a)  # noqa: E731
    return jax.jit(of_branch, donate_argnums=1)(True, jax.tree.map(jnp.array, arrays))


def scanned(policy):
    def run(f, arrays):
        f = jax.checkpoint(f, policy=policy and getattr(jax.checkpoint_policies, policy))
        return jax.jit(lambda arrays: lax.scan(lambda c, a: (c, f(a)), 0, arrays)[1])(arrays)

    return run


def last(f, arrays):
    """Maps along the last axis of the arrays, to the last axis of the results."""
    return jax.vmap(jax.jit(f), -1, -1)({of: jnp.moveaxis(jnp.asarray(a), 0, -1) for of, a in arrays.items()})


# name: (transformations, the same results without them, for f that is compiled)
WAYS = {
    "vmap of vmap": (
        lambda f, a: jax.jit(jax.vmap(jax.vmap(f)))(a),
        lambda f, a: looped(lambda a: looped(f, a, BATCH[1]), a, BATCH[0]),
    ),
    "vmap of the last axis": (
        last,
        lambda f, a: jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), looped(f, a, BATCH[0])),
    ),
    "scan of checkpoint": (scanned(None), lambda f, a: looped(f, a, BATCH[0])),
    "scan of checkpoint, all saved": (scanned("everything_saveable"), lambda f, a: looped(f, a, BATCH[0])),
    "export": (rebuilt, lambda f, a: f(a)),
    "donation to a branch": (chosen, lambda f, a: f(a)),
}


@functools.cache
def compiled(name, kind):
    """Returns the call as a function of the arrays with an element for each row, and these arrays."""
    of_rows, shared = arrays_of(name)
    return jax.jit(lambda given: program_of(name, kind, given | shared)), of_rows


def program_of(name, kind, given):
    return PROGRAMS[kind if CALLS[name][3] else "results"](name, given)


def covered():
    """Returns each function with half of the ways. Its neighbour in the table, a similar function, has the others."""
    for i, (name, way) in enumerate(in_turn(CALLS, WAYS, 3)):
        # what a checkpoint saves matters to the gradients only
        gradients = CALLS[name][3] and (way.endswith("saved") or i // 6 % 2 != i % 2)
        if name != "verify" or way != "vmap of vmap":  # it has one dimension of sequences
            yield name, "gradients" if gradients else "results", way


@pytest.mark.parametrize(("name", "kind", "way"), first(len(WAYS), [*covered()]))
def test_transformed(name, kind, way):
    f, arrays = compiled(name, kind)
    transform, otherwise = WAYS[way]
    close(transform(f, arrays), otherwise(f, arrays))


@pytest.mark.parametrize(("name", "mapped", "kind"), first(1, pairs(FUNCTIONS, ["even", "odd"], PROGRAMS)))
def test_vmap_of_some_arguments(name, mapped, kind):
    """Every second argument is mapped. A key that slices share gives all of them the same noise."""
    of_rows, shared = arrays_of(name)
    arrays, axes = {}, {}
    for i, of in enumerate(of_rows | shared):
        taken = i % 2 == ["even", "odd"].index(mapped) or len(of_rows | shared) == 1
        axes[of] = 0 if taken and (of_rows | shared)[of] is not None else None
        if of in of_rows:
            arrays[of] = of_rows[of] if axes[of] == 0 else at(of_rows, 0)[of]
        else:
            arrays[of] = jnp.stack([shared[of], shared[of] / 2]) if axes[of] == 0 else shared[of]
    f = functools.partial(program_of, name, kind)
    close(jax.vmap(f, (axes,))(arrays), looped(jax.jit(f), arrays, BATCH[0], axes))


OF_ROWS = [name for name in FUNCTIONS if CALLS[name][3] and not re.match("linear|route|logsumexp", name)]


@pytest.mark.parametrize(
    "name", first_values(1, [*OF_ROWS, "logsumexp, rows", "linear_log_probs, several", "linear_cross_entropy"])
)
def test_gradient_of_what_slices_share(name):
    of_rows, shared = arrays_of(name)
    first_of_all = at(of_rows, 0) | shared
    held = {of: first_of_all[of] for of in CALLS[name][3].split()}
    others = {of: a for of, a in of_rows.items() if of not in held}
    rest = {of: a for of, a in shared.items() if of not in held}

    def total(held, given):
        floats = with_gradient(call(name, **held | rest | given))
        return sum(jnp.sum(jnp.where(jnp.isfinite(a), a, 0) ** 2) for a in floats)

    got = jax.jit(jax.grad(lambda held: jnp.sum(jax.vmap(lambda given: total(held, given))(others))))(held)
    one = jax.jit(jax.grad(total))
    want = jax.tree.map(lambda *a: sum(a), *(one(held, at(others, i)) for i in range(BATCH[0])))
    assert_near(got, want)


# name: a function of rows along the last axis, of any length
ROWS = {
    **{name: f for name, f in WITH_KERNELS.items() if name != "route"},
    "sample": functools.partial(ps.sample, jax.random.PRNGKey(0), top_k=50, top_p=0.9),
    "filter_logits": functools.partial(ps.filter_logits, top_k=5),
    "labels": lambda x: ps.linear_log_probs(x[:, :2], X[:2], jnp.where(x > 0, 1, 2)),  # K is symbolic
    "label_probs": lambda x: ps.linear_cross_entropy(
        x[:, :2], X[:2], jnp.where(x > 0, 1, 2), label_probs=x, reduction=None
    ),
    "normalizer": ps.online.reduce,
    "rank": lambda x: ps.token_stats(x, jnp.zeros(x.shape[:1], "int32"), rank=True),
    "draw of a projection": lambda x: ps.linear_sample(jax.random.key(0), x[:, :2], X[:2]),
}


def exported(f, shape):
    return export.export(jax.jit(f), platforms=["cpu"])(jax.ShapeDtypeStruct(shape, F32))


@pytest.mark.parametrize("name", first_values(1, ["fused_topk", *(name for name in ROWS if name != "fused_topk")]))
def test_export_with_a_symbolic_shape(name):
    """The results of a program that was written to bytes keep their type, for example TopK or Normalizer."""
    order = 1 if name in ("log_softmax", "softmax", "logsumexp", "fused_topk", "top_k") else 0
    stored = exported(ROWS[name], export.symbolic_shape("n, v", constraints=["v >= 5"]))
    again = export.deserialize(stored.serialize(vjp_order=order))
    for x in (X, X[:2, :7]):
        close(again.call(x), ROWS[name](x))
        if order:
            close(*(pullback_of_first(f, x) for f in (again.call, ROWS[name])))


def pullback_of_first(f, x):
    """Returns the gradient in x of the first result."""
    y, pullback = jax.vjp(lambda x: jax.tree.leaves(f(x))[0], x)
    return pullback(cases.cotangent(y.shape))


OF_WINNERS = {
    "fused_topk": ps.fused_topk,
    "fused_topk, where": lambda x, k: ps.fused_topk(x, k, where=x > -1),
    "fused_topk, log": functools.partial(ps.fused_topk, log=True, dtype="bfloat16"),
    "top_k": lambda x, k: ps.top_k(x, k, lengths=jnp.sum(x > 0, -1)),
    "top_k of integers": lambda x, k: ps.top_k(x.astype("int8"), k, lengths=jnp.sum(x > 0, -1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_WINNERS)
def test_export_with_a_symbolic_number_of_winners(name):
    """k is the size of another argument, with a constraint that it fits. The rows and the row are symbolic as well."""
    n, v, k = export.symbolic_shape("n, v, k", constraints=["k <= v"])
    largest = jax.jit(lambda x, like: OF_WINNERS[name](x, like.shape[0]))
    shapes = jax.ShapeDtypeStruct((n, v), F32), jax.ShapeDtypeStruct((k,), F32)
    again = export.deserialize(export.export(largest, platforms=["cpu"])(*shapes).serialize())
    for k in (1, 5, V):
        got = again.call(X, np.zeros(k, F32))
        assert isinstance(got, ps.TopK)
        close(got, OF_WINNERS[name](X, k))


def test_export_of_a_router_with_a_symbolic_number_of_experts():
    again = exported(lambda x: ps.route(x, 1), export.symbolic_shape("n, v", constraints=["v >= 1"]))
    for x in (X, X[:2, :1]):
        close(again.call(x), ps.route(x, 1))


def test_a_symbolic_number_of_winners_must_be_known_to_fit():
    (k,) = export.symbolic_shape("k")
    with pytest.raises(ValueError, match="row's length 20, got k, which is not known to be; say so in the constr"):
        ps.fused_topk(np.ones(20, F32), k)


@pytest.mark.parametrize("f", [ps.softmax, ps.log_softmax])
def test_donated_logits_are_deleted(f):
    x = jnp.array(X)
    jax.jit(f, donate_argnums=0)(x)
    assert x.is_deleted()
