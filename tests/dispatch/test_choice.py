"""The choice of an implementation for a call and a device, and the output of explain."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src import target
from pallas_softmax._src.dispatch.choose import _recorder, choose
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.triton import checks
from tests.support import oracle
from tests.support.calls import DTYPES, WITH_KERNELS, device, named, refusal, slower, topk
from tests.support.calls import described as call
from tests.support.covering import slow
from tests.support.lowering import array, lowered
from tests.support.plans import CAPABILITIES, HOPPER

X = array(128, 16384)
OPS = (*oracle.OPERATIONS, "topk")


AMPERE = (8, 0)
# implementation: changes of a call that it supports, and the reason for the refusal
UNSUPPORTED = {
    "mosaic_gpu": [
        ({"dtype": "float64"}, "no kernel for float64, only float32, bfloat16, float16"),
        ({"op": "topk", "dtype": "int32"}, "no kernel for int32"),
        ({"dtype": "float8_e4m3fn"}, "no kernel for float8_e4m3fn"),
        ({"rows": 0}, "empty"),
        ({"vocab": 0}, "empty"),
        ({"rows": 50001, "vocab": 50257}, "not a multiple of 4, 50001 x 50257"),
        ({"op": "topk", "k": 0}, "k=0 is not from 1 to 2048"),
        ({"op": "topk", "k": 2049}, "k=2049 is not from 1 to 2048"),
        ({"op": "topk", "inner": None}, "not contiguous"),
        ({"op": "topk", "rows": 50001, "vocab": 50257, "dtype": "bfloat16"}, "not a multiple of 8, 50001 x 50257"),
        ({"capability": AMPERE}, "compute capability 9 or 10 or 12, not 8.0"),
        ({"capability": (8, 9)}, "not 8.9"),
    ],
    "triton": [
        ({"dtype": "float64"}, "no kernel for float64, only float32, bfloat16, float16"),
        ({"rows": 0}, "empty"),
        ({"vocab": 0}, "empty"),
        ({"rows": 2**31}, str(2**31)),
        ({"vocab": 2**31 - 1}, str(2**31 - 1)),
        ({"op": "topk", "k": 0}, "k=0 is not from 1 to 256"),
        ({"op": "topk", "k": 257}, "k=257 is not from 1 to 256"),
        ({"op": "topk", "inner": None}, "not contiguous"),
        ({"op": "topk", "k": 129, "dtype": "bfloat16", "vocab": 2**31 - 2**20}, "more than 65535 parts"),
        ({"capability": (7, 5)}, "not 7.5"),
    ],
}


@pytest.mark.parametrize("implementation", UNSUPPORTED)
def test_reasons_of_refusals(implementation, monkeypatch):
    monkeypatch.setattr(checks, "missing", lambda: None)
    supported = HOPPER if implementation == "mosaic_gpu" else AMPERE
    for changes, reason in UNSUPPORTED[implementation]:
        changes = {"capability": supported} | changes
        capability = changes.pop("capability")
        assert refusal(implementation, call(op=changes.get("op", "softmax")), supported) is None
        got = refusal(implementation, call(**changes), capability)
        assert got is not None and reason in got, got


@pytest.mark.parametrize("op", OPS)
def test_every_length_and_alignment_is_supported(op):
    shapes = (1, 8), (128, 4096), (2**31, 1000), (1, 1), (7, 127), (1, 50257), (3, 1000003), (50000, 50257)
    for dtype, (rows, vocab) in itertools.product(DTYPES, (*shapes, (2**20, 262144))):
        other = dict(k=min(vocab, 2048)) if op == "topk" else dict(inner=None)
        for capability, more in [*((c, {}) for c in CAPABILITIES), (HOPPER, dict(masked=True)), (HOPPER, other)]:
            assert refusal("mosaic_gpu", call(op, dtype, rows, vocab, **more), capability) is None


def test_slower():
    """The kernel supports these calls, but XLA runs them unless the kernel is named."""
    assert "transposed" in slower("mosaic_gpu", call(inner=None))
    assert "float32 rows" in slower("triton", call(vocab=4096))
    assert "single float32 row" in slower("mosaic_gpu", call("topk", rows=1, vocab=128256, k=1025))
    for kernel in (
        call(),
        call("softmax_grad", rows=1, vocab=1_000_000),
        call(vocab=4096),
        call(vocab=4096, dtype="bfloat16"),
        call("log_softmax", vocab=4096),
        call("topk", rows=1, vocab=128),
        call("topk", rows=1, vocab=128256, k=1024),
        call("topk", "bfloat16", rows=1, vocab=128256, k=2048),
        call("topk", rows=2, vocab=128256, k=2048),
    ):
        assert slower("mosaic_gpu", kernel) is None


def test_the_first_implementation_with_a_kernel_is_chosen():
    choice = choose(call(), None)
    assert choice == Choice(call(), "mosaic_gpu", "xla")
    assert str(choice) == "softmax float32[128, 16384]: mosaic_gpu on cuda, xla elsewhere"


def test_slower_kernels_run_only_if_named():
    slow = call(inner=None)
    choice = choose(slow, None)
    assert (choice.cuda, choice.elsewhere) == ("xla", "xla")
    assert choice.reasons[0] == ("mosaic_gpu", slower("mosaic_gpu", slow))
    assert [name for name, _ in choice.reasons] == ["mosaic_gpu", "triton"]  # in the order of preference
    assert re.search(r"^softmax float32\[.*\]: xla \(mosaic_gpu: .*; triton: ", str(choice))
    assert choose(slow, "mosaic_gpu") == Choice(slow, "mosaic_gpu", None, requested="mosaic_gpu")


def test_str_of_a_named_choice():
    assert str(choose(call("topk"), "mosaic_gpu")) == ("fused_topk float32[128, 16384], k=5: mosaic_gpu on cuda only")
    assert str(choose(call(), "xla")) == "softmax float32[128, 16384]: xla"
    nothing = choose(call(dtype="float64"), "mosaic_gpu")
    assert str(nothing).startswith("softmax float64[128, 16384]: nothing (mosaic_gpu: no kernel for float64")


def test_calls_and_choices_are_values():
    """Calls and choices are static arguments of jax.jit: equal ones need equal hashes, or every call would compile."""
    assert hash(choose(call(), None)) == hash(choose(call(), None))
    with pytest.raises(dataclasses.FrozenInstanceError):
        call().rows = 1


@pytest.mark.parametrize("function", [ps.softmax, topk], ids=["softmax", "topk"])
def test_a_kernel_traces_but_does_not_lower_for_the_cpu(function):
    """A kernel can be traced on a CPU, because the trace may be lowered for CUDA."""
    traced = jax.jit(named(function, "mosaic_gpu")).trace(X)
    for platforms in ("cpu",), ("cpu", "cuda"):  # jax.export may take several
        with pytest.raises(NotImplementedError, match="mosaic_gpu.*needs an NVIDIA GPU.*lowered for cpu"):
            traced.lower(lowering_platforms=platforms)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        slow("NVIDIA H100 80GB HBM3", "mosaic_gpu"),  # the GPU that other tests lower for
        slow("NVIDIA H200", "mosaic_gpu"),
        ("NVIDIA B200", "mosaic_gpu"),
        ("NVIDIA A100-SXM4-80GB", "xla"),
        ("NVIDIA L4", "xla"),
        ("Tesla V100-SXM2-16GB", "xla"),
    ],
)
def test_the_abstract_device_decides(kind, chosen):
    with device(kind):
        choice = ps.explain(ps.softmax, X)[0]
        text = lowered(lambda x: ps.softmax(x + 0), X)  # jit caches traces by function, so this is a new function
    assert choice.cuda == chosen
    assert ("custom_call @mosaic_gpu" in text) == (chosen == "mosaic_gpu")
    if chosen == "xla":
        assert "compute capability 9 or" in str(choice)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["NVIDIA B200", "NVIDIA GeForce RTX 5090"])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_each_function_is_lowered_for_blackwell(name, kind):
    with device(kind):
        text = lowered(named(WITH_KERNELS[name], "mosaic_gpu"), array(8, 512))
    assert "custom_call @mosaic_gpu" in text


def test_hopper_if_no_gpu_is_visible():
    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("a GPU is visible")
    assert target.capability() == HOPPER


def ops(choices):
    return [(choice.call.op, choice.cuda) for choice in choices]


def test_explain_of_a_call():
    assert ops(ps.explain(ps.softmax, X))[0] == ("softmax", "mosaic_gpu")
    (choice,) = ps.explain(ps.fused_topk, X, 5, log=True)
    assert choice == Choice(call("topk"), "mosaic_gpu", "xla")
    (choice,) = ps.explain(ps.fused_topk, X, k=2048, where=jnp.ones((128, 1), bool))
    assert (choice.cuda, choice.call.masked) == ("mosaic_gpu", True)
    (choice,) = ps.explain(ps.fused_topk, X, k=2049)
    assert "k=2049 is not from 1 to 2048" in str(choice)
    for k in (np.int64(5), np.array(5), jnp.array(5)):  # known, as in the call itself
        assert ps.explain(ps.fused_topk, X, k, dtype=np.float32)[0].call.k == 5
    choice = ps.explain(named(ps.softmax, "mosaic_gpu"), array(2, 0))[-1]
    assert choice.cuda is None and "empty" in str(choice)


def test_explain_of_a_gradient():
    got = ops(ps.explain(jax.grad(lambda x: ps.softmax(x).sum()), X))
    assert got == [("softmax", "mosaic_gpu"), ("softmax_grad", "mosaic_gpu")]
    router = array(4096, 64)
    got = ops(ps.explain(jax.grad(lambda x: ps.fused_topk(x, 4).values.sum()), router))
    assert got == [("topk", "mosaic_gpu"), ("topk_grad", "mosaic_gpu")]
    # the gradient of logsumexp is always plain elementwise JAX
    assert ops(ps.explain(jax.grad(lambda x: ps.logsumexp(x, -1).sum()), X)) == [("logsumexp", "mosaic_gpu")]


def test_explain_of_a_users_function():
    def f(x, weights):
        p = ps.softmax(x[:, :-1] @ weights["w"])
        return ps.fused_topk(p, 3), ps.logsumexp(x)

    weights = {"w": array(16383, 16000)}
    got = [choice for choice in ps.explain(f, X, weights) if not choice.call.op.endswith("_grad")]
    assert ops(got) == [("softmax", "mosaic_gpu"), ("topk", "mosaic_gpu"), ("logsumexp", "mosaic_gpu")]
    assert got[0].call.vocab == 16000


def test_a_choice_and_what_it_holds_are_shown_without_addresses():
    x, w = jnp.ones((8, 256), jnp.bfloat16), jnp.ones((256, 512), jnp.bfloat16)
    for choice in ps.explain(lambda: (ps.sample(jax.random.key(0), x), ps.route(x, 2), ps.linear_topk(x, w, 2))):
        assert repr(choice) == str(choice) and repr(choice.call) == str(choice.call)
        for each in choice, choice.call, choice.call.operation, choice.plan:
            assert "0x" not in repr(each) and "\n" not in repr(each)


def test_explain_raises_other_errors():
    def fails(x):
        raise NotImplementedError("of the user")

    with pytest.raises(NotImplementedError, match="of the user"):
        ps.explain(fails, X)
    with pytest.raises(ValueError, match="axis"):
        ps.explain(ps.softmax, X, axis=7)
    assert _recorder.get() is None


def test_explain_computes_nothing():
    """explain works for arrays beyond any memory, and effects at run time do not happen."""
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(None))
        return ps.softmax(x)

    assert ps.explain(f, array(2**40, 16384))[0].cuda == "mosaic_gpu"
    ps.explain(f, jnp.ones((128, 16384)))
    jax.effects_barrier()
    assert ran == []
