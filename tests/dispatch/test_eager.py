"""Calls outside of jit: each is one program, and checks its arguments like a call in jit."""

import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.dispatch import eager
from tests.support import calls, cases, lowering
from tests.support.calls import BATCH, CALLS, WITHOUT_GRADIENT, call, logits_of
from tests.support.cases import F32
from tests.support.covering import first_values, slow
from tests.support.trees import assert_equal, assert_near, floats_of

X = cases.rows(list(cases.FINITE)[:4], 20)


@pytest.fixture
def compiled(monkeypatch):
    """Returns the arguments of each call that ran as a single program."""
    calls = []
    whole = eager._program

    def counted(*key):
        def program(**arguments):
            calls.append(arguments)
            return whole(*key)(**arguments)

        return program

    monkeypatch.setattr(eager, "_program", counted)
    return calls


@pytest.mark.parametrize("name", first_values(2, dict.fromkeys(["softmax", "top_k", *CALLS])))
def test_a_call_is_one_program_with_the_result_and_the_name_of_the_function(name, compiled, quick_compilation):
    got = call(name)
    assert len(compiled) == 1
    whole = jax.jit(functools.partial(call, name))
    want = whole(**CALLS[name][2])
    assert_near(got, want, 1e-5, 1e-6)
    text = whole.lower(**CALLS[name][2]).as_text()
    inner = "_" if name.startswith("linear") else CALLS[name][0].__name__  # linear_* share their programs
    assert re.search(rf"func\.func private @{inner}", text)


def test_options_without_a_hash(compiled):
    np.testing.assert_array_equal(ps.softmax(X, [0, 1]), ps.softmax(X, (0, 1)))
    assert [arguments["axis"] for arguments in compiled] == [(0, 1)]


def test_weak_types_and_scalars_are_kept():
    assert ps.softmax(2.0, ()).weak_type == jax.nn.softmax(2.0, ()).weak_type
    assert ps.logsumexp(jnp.asarray(3, F32)).dtype == F32


def test_explain_lists_compiled_calls():
    x = jnp.ones((4, 20))
    ps.softmax(x)
    assert len(ps.explain(ps.softmax, x)) == 2


COMPILATIONS = []  # one element per program that XLA compiled in this process


def _count(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILATIONS.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


def first_result(name):
    def f(x):
        results = jax.tree.leaves(call(name, **{logits_of(name): x}))
        return next(a for a in results if a.dtype == F32)

    return f


ROWS = {name: first_result(name) for name in CALLS if name != "verify"} | {
    "sample, keys": lambda x: ps.sample(jax.random.split(jax.random.key(0), BATCH), x, min_p=F32.type(0.1)).log_probs,
    "sample, rbg": lambda x: ps.sample(jax.random.key(0, impl="rbg"), x).log_probs,
}


def summed(f):
    return lambda x: jnp.sum(f(x))


TRANSFORMS = {
    "value": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(summed(f))(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(summed(f)))(jnp.stack([x, x])),
    "grad of vmap": lambda f, x: jax.grad(summed(jax.vmap(f)))(jnp.stack([x, x])),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
}


def _has(name, transform):
    if name in WITHOUT_GRADIENT:
        return transform in ("value", "vmap")
    return transform != "jvp" or not name.startswith("linear")


def _each():
    """Returns each function with two transformations in turn. The fast set has some functions once."""
    for i, name in enumerate(ROWS):
        first, second = itertools.islice(itertools.cycle(t for t in TRANSFORMS if _has(name, t)), i, i + 2)
        fast = name in ("log_softmax", "logsumexp", "route", "linear_log_probs")
        yield from [(first, name) if fast else slow(first, name), slow(second, name)]


@pytest.mark.parametrize("transform, name", [*_each()])
def test_the_second_call_compiles_nothing(transform, name, quick_compilation):
    """Also with a fresh function around it, as in a loop that calls `jax.grad(lambda ...)`."""
    x = jnp.asarray(calls.X)

    def run():
        return jax.block_until_ready(TRANSFORMS[transform](lambda x: ROWS[name](x), x))

    want = run()
    before = len(COMPILATIONS)
    got = run()
    assert len(COMPILATIONS) == before
    assert_equal(got, want)


@pytest.mark.parametrize("name", [n if n in ("softmax", "top_k") else slow(n) for n in CALLS])
def test_a_call_of_device_arrays_transfers_nothing(name, quick_compilation):
    """Nor does its gradient."""
    given = jax.tree.map(jnp.asarray, CALLS[name][2]) | ({"scale": jnp.ones(())} if name == "route" else {})
    with jax.transfer_guard("disallow"):
        calls.plainly(name, **given)
        call(name, **given)
    if name in WITHOUT_GRADIENT:
        return
    given |= {of: given[of].astype("bfloat16") for of in (logits_of(name), "w") if of in given}

    def first(x):
        return floats_of(call(name, **given | {logits_of(name): x}))[0]

    x = given[logits_of(name)]
    cotangent = jnp.ones_like(first(x))
    with jax.transfer_guard("disallow"):
        jax.vjp(first, x)[1](cotangent)


@pytest.mark.slow
def test_calls_of_online_transfer_nothing():
    x = jnp.linspace(-1, 1, 64).reshape(8, 8)
    moments = ps.online.reduce(x, of=ps.online.Moments)
    winners = ps.online.Candidates(x, jnp.broadcast_to(jnp.arange(8), (8, 8)))
    given = {"x": x, "a": moments, "b": moments, "moments": moments}
    of_functions = [getattr(ps.online, name) for name in ps.online.__all__]
    for f in (f for f in of_functions if inspect.isfunction(f)):
        names = [of for of, p in inspect.signature(f).parameters.items() if p.default is p.empty]
        arguments = {of: given[of] for of in names} if f is not ps.online.merge else dict(a=winners, b=winners, k=2)
        with jax.transfer_guard("disallow"):
            f(**arguments)
    where = jnp.arange(8) < 7
    with jax.transfer_guard("disallow"):
        ps.online.reduce(x, where=where)


@pytest.mark.parametrize("name", first_values(2, [name for name in ROWS if name.startswith("linear")]))
def test_equal_calls_share_a_lowering(name):
    """Eight equal calls in one program: the text grows by the calls only."""

    def text(times):
        def program(x):
            f = ROWS[name] if name in WITHOUT_GRADIENT else jax.grad(summed(ROWS[name]))
            for _ in range(times):
                x = x + jnp.sum(f(x))
            return x

        return lowering.lowered(program, lowering.array(*calls.X.shape))

    assert len(text(8)) < 1.3 * len(text(1))


FOLDED = {
    "softmax": ps.softmax,
    "fused_topk": functools.partial(ps.fused_topk, k=2),
    "top_k": functools.partial(ps.top_k, k=2),
    "sample": functools.partial(ps.sample, jax.random.key(0), top_p=0.9),
    "gradient of top-k": lambda x, **kw: jax.grad(lambda x: ps.fused_topk(x, 2, **kw).values[0, 0])(x),
    "gradient of the loss": lambda x, **kw: jax.grad(
        lambda x: ps.linear_cross_entropy(x, x.T, jnp.arange(len(x)), **kw)
    )(x),
}


@pytest.mark.parametrize("name", first_values(0, FOLDED))
def test_compile_time_evaluation(name):
    """The results equal results outside of it, and a program for a GPU has the same kernels."""
    x = jax.random.normal(jax.random.key(1), (3, 50))
    program = functools.partial(FOLDED[name])
    want, kernels = program(x), lowering.kernel_names(lowering.lowered(program, x))
    with jax.ensure_compile_time_eval():
        for keywords in ({}, {"implementation": "xla"}):
            got = FOLDED[name](x, **keywords)
            assert_near(got, want, 1e-5, 1e-7)
        assert lowering.kernel_names(lowering.lowered(lambda x: program(x), x)) == kernels
