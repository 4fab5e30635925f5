"""Calls outside of jit: each is one program, and checks its arguments like a call in jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.dispatch import eager
from tests.support import cases
from tests.support.cases import F32
from tests.support.covering import first_values

X = cases.rows(list(cases.FINITE)[:4], 20)
MASK = np.arange(20) % 3 > 0


@pytest.fixture
def compiled(monkeypatch):
    """Returns the options of each call that ran as a single program."""
    calls = []
    whole = eager._compiled

    def counted(function, options, types, arrays):
        calls.append(options)
        return whole(function, options, types, arrays)

    monkeypatch.setattr(eager, "_compiled", counted)
    return calls


CALLS = {
    "softmax": lambda x: ps.softmax(x, 0, MASK),
    "log_softmax": lambda x: ps.log_softmax(x, (0, 1)),
    "logsumexp": lambda x: ps.logsumexp(x, -1, b=2.0, return_sign=True),
    "fused_topk": lambda x: ps.fused_topk(x, 3, where=MASK, temperature=0.5, log=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_program_with_the_result_of_jit(name, compiled):
    got = CALLS[name](X)
    assert len(compiled) == 1
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(CALLS[name])(X))
    assert len(compiled) == 1


def test_equal_calls_compile_once():
    ps.softmax(X)
    with jax.no_tracing():
        ps.softmax(X + 1)


def test_an_equal_option_of_another_type_is_refused_after_a_good_one():
    ps.fused_topk(X, 1)
    for k in (True, 1.0):
        with pytest.raises(TypeError, match="k must be an integer"):
            ps.fused_topk(X, k)


def test_options_without_a_hash(compiled):
    np.testing.assert_array_equal(ps.softmax(X, [0, 1]), ps.softmax(X, (0, 1)))
    assert compiled == [((0, 1), None, None)]


def test_weak_types_and_scalars_are_kept():
    assert ps.softmax(2.0, ()).weak_type == jax.nn.softmax(2.0, ()).weak_type
    assert ps.logsumexp(jnp.asarray(3, F32)).dtype == F32


def test_explain_lists_compiled_calls():
    x = jnp.ones((4, 20))
    ps.softmax(x)
    assert len(ps.explain(ps.softmax, x)) == 2


FOLDED = {
    "softmax": lambda x, **kw: ps.softmax(x, **kw),
    "fused_topk": lambda x, **kw: ps.fused_topk(x, 2, **kw),
    "sample": lambda x, **kw: ps.sample(jax.random.key(0), x, top_p=0.9, **kw),
    "gradient of top-k": lambda x, **kw: jax.grad(lambda x: ps.fused_topk(x, 2, **kw).values[0, 0])(x),
    "gradient of the loss": lambda x, **kw: jax.grad(
        lambda x: ps.linear_cross_entropy(x, x.T, jnp.arange(len(x)), **kw)
    )(x),
}


@pytest.mark.parametrize("name", first_values(2, FOLDED))
def test_compile_time_evaluation(name):
    """In `jax.ensure_compile_time_eval`, plain JAX runs. A named kernel raises, because it cannot be traced there."""
    x = jax.random.normal(jax.random.key(1), (3, 50))
    want = FOLDED[name](x)
    with jax.ensure_compile_time_eval():
        for keywords in ({}, {"implementation": "xla"}):
            got = FOLDED[name](x, **keywords)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)
        with pytest.raises(NotImplementedError, match="jax.ensure_compile_time_eval"):
            FOLDED[name](x, implementation="mosaic_gpu")
