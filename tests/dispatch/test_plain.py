"""Plain JAX: XLA's fusion, and tools that look inside a program."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify, jet, roofline
from jax.experimental import pallas as pl

import pallas_softmax as ps
from tests.support.covering import first, first_values, pairs
from tests.support.lowering import array, lowered, square_sum

X = array(128, 128)
PLAIN = functools.partial(functools.partial, implementation="xla")
OURS = {
    "softmax": PLAIN(ps.softmax),
    "log_softmax": PLAIN(ps.log_softmax),
    "logsumexp": PLAIN(ps.logsumexp, axis=-1, keepdims=True),
}
THEIRS = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True),
}


def topk(x):
    return ps.fused_topk(x, 3, implementation="xla").values


def gradient(f):
    return jax.grad(square_sum(f))


STEPS = {
    "sinkhorn": lambda of, x: of["log_softmax"](of["log_softmax"](x, axis=-1), axis=-2),
    "gradients": lambda of, x: gradient(of["log_softmax"])(x),
    "softmaxes": lambda of, x: of["softmax"](x),
    "logsumexps": lambda of, x: x - of["logsumexp"](x),
}


@pytest.mark.parametrize("name", first_values(1, STEPS))
def test_xla_fuses_a_chain_like_jax_nn(name):
    def lines(of):
        def chain(x):
            for _ in range(15):
                x = STEPS[name](of, x)
            return x

        text = jax.jit(chain).lower(array(64, 64)).compile().as_text()
        return len(str(text).splitlines())

    assert lines(OURS) <= 1.3 * lines(THEIRS)


def stored_bytes(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 also stores the product p * dy")
def test_a_cpu_stores_no_more_for_the_gradient_of_softmax_than_for_that_of_jax_nn():
    def first(f):
        return jax.grad(lambda x: f(x)[0, 0])

    x = array(256, 1000)
    assert stored_bytes(first(OURS["softmax"]), x) <= stored_bytes(first(THEIRS["softmax"]), x)


def test_a_cpu_does_not_store_16_bit_logits_in_float32():
    assert stored_bytes(OURS["logsumexp"], array(256, 1000, dtype="bfloat16")) < 2**16


@pytest.mark.slow
def test_a_cpu_stores_no_keys_for_each_element_of_the_noise():
    def drawn(logits):
        return ps.sample(jax.random.key(0), logits, implementation="xla")

    assert stored_bytes(drawn, array(64, 4096)) < 8 * 4 * 64 * 4096


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4])
def test_a_cpu_sorts_no_experts(groups):
    """XLA for CPUs selects the largest floats, but sorts integers, which takes four times as long."""

    def gate(x, bias):
        return ps.route(x, 4, score="sigmoid", bias=bias, groups=groups, top_groups=2 if groups > 1 else None)

    assert " sort(" not in jax.jit(gate).lower(array(16, 64), array(64)).compile().as_text()


@pytest.mark.parametrize("name", OURS)
def test_estimate_cost_counts_what_jax_nn_computes(name):
    got, want = (pl.estimate_cost(f[name], X) for f in (OURS, THEIRS))
    assert got.transcendentals == want.transcendentals > 0
    assert got.flops == want.flops > 0


@pytest.mark.parametrize("name", OURS)
def test_estimate_cost_of_a_gradient(name):
    forward, both = (pl.estimate_cost(f, X) for f in (OURS[name], gradient(OURS[name])))
    assert both.flops > forward.flops + 2 * X.size


@pytest.mark.parametrize("name", OURS)
def test_roofline_knows_every_operation(name, caplog):
    with caplog.at_level(logging.WARNING):
        for f in (OURS[name], gradient(OURS[name])):
            assert roofline.roofline(f)(X)[1].unfused_flops > X.size
    assert not caplog.records


@pytest.mark.parametrize(("f", "value"), first(2, pairs([*OURS.values(), topk], [jnp.inf, jnp.nan])))
def test_checkify_finds_a_nan(f, value, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # otherwise fused_topk prepares for sharded logits
    x = jnp.zeros((2, 8)).at[1, 3].set(value)
    error, y = checkify.checkify(f, errors=checkify.float_checks)(x)
    assert (error.get() is not None) == bool(jnp.isnan(y).any())


def test_jet_of_a_jitted_function_has_no_silent_zeros():
    """jet ignores every custom_jvp, and therefore our derivatives."""
    with pytest.raises((AttributeError, NotImplementedError, jax.errors.UnexpectedTracerError)):
        jet.jet(jax.jit(OURS["softmax"]), (jnp.arange(4.0),), ((jnp.ones(4), jnp.zeros(4)),))


def test_vmap_of_topk_has_one_sort(monkeypatch):
    """On CUDA a condition selects the sort. If the condition were mapped, both sorts would run."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert lowered(topk, X).count("stablehlo.case") == lowered(jax.vmap(topk), X).count("stablehlo.case") > 0
