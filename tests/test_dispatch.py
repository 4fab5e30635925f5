"""Which implementation runs, what explain says of it, and the launch choices: pure functions of the call."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_softmax as ps
from pallas_softmax import dispatch
from pallas_softmax.dispatch import Call, Choice
from pallas_softmax.mosaic_gpu import launch, pieces

FREE = settings(max_examples=200, deadline=None, derandomize=True)
X = jax.ShapeDtypeStruct((128, 4096), jnp.float32)
HOPPER = (9, 0)
OPS = {"softmax": None, "softmax_grad": None, "topk": 5}


def call(op="softmax", dtype="float32", rows=128, vocab=4096, **kwargs):
    return Call(op, dtype, rows, vocab, **({"k": OPS.get(op)} | kwargs))


def named(f, name):
    return lambda *args, **kwargs: f(*args, implementation=name, **kwargs)


def topk(x, **kwargs):
    return ps.fused_topk(x, 5, **kwargs)


def device(kind):
    """Lowering for this kind of GPU, which need not exist."""
    gpu = AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


# --- What the kernels take ----------------------------------------------------------------------------

# (what is changed in a supported call, compute capability, the reason)
UNSUPPORTED = {
    "op": (dict(op="log_softmax"), HOPPER, "no kernel for log_softmax"),
    "A100": (dict(), (8, 0), "compute capability 9.0 or newer, not 8.0"),
    "L4": (dict(), (8, 9), "not 8.9"),
    "float64": (dict(dtype="float64"), HOPPER, "no kernel for float64, only float32, bfloat16, float16"),
    "int32": (dict(op="topk", dtype="int32"), HOPPER, "no kernel for int32"),
    "float8": (dict(dtype="float8_e4m3fn"), HOPPER, "no kernel for float8_e4m3fn"),
    "masked": (dict(masked=True), HOPPER, "where"),
    "no rows": (dict(rows=0), HOPPER, "empty"),
    "no columns": (dict(vocab=0), HOPPER, "empty"),
    "axis": (dict(trailing=False), HOPPER, "not contiguous"),
    "alignment": (dict(vocab=50257), HOPPER, "rows of 50257 float32 .* 16 bytes"),
    "alignment of 16 bits": (dict(vocab=4, dtype="bfloat16"), HOPPER, "rows of 4 bfloat16 .* 16 bytes"),
    "long row": (dict(vocab=128256), HOPPER, r"needs \d+ bytes of shared memory, a CTA has 232448"),
    "long row backward": (dict(op="softmax_grad", vocab=40000), HOPPER, "shared memory"),
    "small shared memory": (dict(vocab=30000), (12, 0), "a CTA has 101376"),
    "k=0": (dict(op="topk", k=0), HOPPER, "k=0 is not from 1 to 128"),
    "k=129": (dict(op="topk", k=129), HOPPER, "k=129 is not from 1 to 128"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_the_reason_names_what_is_unsupported(case):
    changes, capability, reason = UNSUPPORTED[case]
    given = call(**changes)
    assert launch.unsupported(call(op=given.op if given.op in OPS else "softmax"), HOPPER) is None
    got = launch.unsupported(given, capability)
    assert got is not None
    assert re.search(reason, got), got


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_supported(op, dtype, capability):
    for rows, vocab in [(1, 8), (128, 4096), (2**31, 1000)]:
        assert launch.unsupported(call(op, dtype, rows, vocab), capability) is None


def test_slower():
    """Supported, but left to XLA unless the kernel is named. Top-k is never slower."""
    assert launch.slower(call()) is None
    assert launch.slower(call(dtype="bfloat16")) is None
    assert "128 rows" in launch.slower(call(rows=127))
    assert "8 KB" in launch.slower(call(vocab=2044))
    assert "8 KB" in launch.slower(call(dtype="bfloat16", vocab=4088))
    assert launch.slower(call("topk", rows=1, vocab=128)) is None


# --- choose -------------------------------------------------------------------------------------------


def test_the_first_that_supports_the_call_is_chosen():
    choice = dispatch.choose(call(), None)
    assert choice == Choice(call(), "mosaic_gpu", "xla")
    assert str(choice) == "softmax float32[128, 4096]: mosaic_gpu on cuda, xla elsewhere"


@pytest.mark.parametrize("changes", [dict(rows=127), dict(vocab=2044)], ids=str)
def test_what_is_slower_must_be_named(changes):
    slow = call(**changes)
    choice = dispatch.choose(slow, None)
    assert (choice.cuda, choice.elsewhere) == ("xla", "xla")
    assert choice.reasons[0] == ("mosaic_gpu", launch.slower(slow))
    assert dispatch.choose(slow, "mosaic_gpu") == Choice(slow, "mosaic_gpu", None, requested="mosaic_gpu")


def test_all_reasons_are_kept_in_the_order_of_preference():
    choice = dispatch.choose(call(masked=True), None)
    assert [name for name, _ in choice.reasons] == ["mosaic_gpu", "triton"]
    assert str(choice).startswith("softmax float32[128, 4096]: xla (mosaic_gpu: ")
    assert "; triton: " in str(choice)


def test_str_of_a_named_choice():
    assert str(dispatch.choose(call("topk"), "mosaic_gpu")) == (
        "topk float32[128, 4096], k=5: mosaic_gpu on cuda only"
    )
    assert str(dispatch.choose(call(), "xla")) == "softmax float32[128, 4096]: xla"
    nothing = dispatch.choose(call(dtype="float64"), "mosaic_gpu")
    assert str(nothing).startswith("softmax float64[128, 4096]: nothing (mosaic_gpu: no kernel for float64")


@pytest.mark.parametrize("name", ["cuda", "", "XLA", "mosaic"])
def test_an_unknown_name_lists_the_valid_ones(name):
    with pytest.raises(ValueError) as error:
        dispatch.choose(call(), name)
    for word in (repr(name), *dispatch.IMPLEMENTATIONS):
        assert word in str(error.value)


def test_calls_and_choices_are_values():
    """They are static arguments of jax.jit: equal ones must hash alike, or every call would compile."""
    assert hash(dispatch.choose(call(), None)) == hash(dispatch.choose(call(), None))
    with pytest.raises(dataclasses.FrozenInstanceError):
        call().rows = 1


# --- A named implementation runs or raises ------------------------------------------------------------

REFUSED = {
    "dtype": (lambda f: f(jnp.ones((2, 8), "float8_e4m3fn")), "no kernel for float8_e4m3fn"),
    "where": (lambda f: f(jnp.ones((2, 8)), where=jnp.ones((2, 8), bool)), "where"),
    "axis": (lambda f: f(jnp.ones((8, 2)), axis=0), "not contiguous"),
    "alignment": (lambda f: f(jnp.ones((2, 7))), "rows of 7 float32"),
    "empty": (lambda f: f(jnp.ones((0, 8))), "empty"),
    "length": (lambda f: f(jax.ShapeDtypeStruct((2, 128256), "float32")), "shared memory"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", [ps.softmax, topk], ids=["softmax", "topk"])
def test_unsupported_raises_at_trace(function, case):
    run, reason = REFUSED[case]
    f = named(function, "mosaic_gpu")
    with pytest.raises(NotImplementedError, match=reason) as error:
        run(lambda x, **kwargs: jax.eval_shape(lambda x: f(x, **kwargs), x))
    assert "implementation='mosaic_gpu' cannot run" in str(error.value)


@pytest.mark.parametrize("k", [0, 129])
def test_unsupported_k_raises_at_trace(k):
    with pytest.raises(NotImplementedError, match=f"k={k} is not from 1 to 128"):
        jax.eval_shape(lambda x: ps.fused_topk(x, k, implementation="mosaic_gpu"), X)


@pytest.mark.parametrize("function", [ps.softmax, topk], ids=["softmax", "topk"])
def test_a_kernel_traces_but_does_not_lower_for_the_cpu(function):
    """The same trace may be lowered for CUDA."""
    traced = jax.jit(named(function, "mosaic_gpu")).trace(X)
    with pytest.raises(NotImplementedError, match="mosaic_gpu.*lowered for cpu"):
        traced.lower(lowering_platforms=("cpu",))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU.*lowered for cpu"):
        named(function, "mosaic_gpu")(jnp.ones((2, 8)))


def test_a_forward_that_fits_runs_though_its_backward_does_not():
    x = jax.ShapeDtypeStruct((128, 50000), "float32")
    f = named(ps.softmax, "mosaic_gpu")
    jax.eval_shape(f, x)
    with pytest.raises(NotImplementedError, match="softmax_grad.*shared memory"):
        jax.eval_shape(jax.grad(lambda x: f(x).sum()), x)


# --- The device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("NVIDIA H100 80GB HBM3", "mosaic_gpu"),
        ("NVIDIA H200", "mosaic_gpu"),
        ("NVIDIA B200", "mosaic_gpu"),
        ("NVIDIA A100-SXM4-80GB", "xla"),
        ("NVIDIA L4", "xla"),
        ("Tesla V100-SXM2-16GB", "xla"),
    ],
)
def test_the_abstract_device_decides(kind, chosen):
    def lowered(x):  # a new function: jit caches traces by function
        return ps.softmax(x + 0)

    with device(kind):
        choice = ps.explain(ps.softmax, X)[0]
        text = jax.jit(lowered).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert choice.cuda == chosen
    assert ("custom_call @mosaic_gpu" in text) == (chosen == "mosaic_gpu")
    if chosen == "xla":
        assert "compute capability 9.0" in str(choice)


def test_a_named_kernel_refuses_the_abstract_device():
    with device("NVIDIA A100-SXM4-80GB"), pytest.raises(NotImplementedError, match="not 8.0"):
        jax.eval_shape(named(ps.softmax, "mosaic_gpu"), X)


def test_hopper_where_no_gpu_is_visible():
    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("a GPU is visible")
    assert dispatch._capability() == HOPPER


# --- explain ------------------------------------------------------------------------------------------


def ops(choices):
    return [(choice.call.op, choice.cuda) for choice in choices]


def test_explain_of_a_call():
    assert ops(ps.explain(ps.softmax, X))[0] == ("softmax", "mosaic_gpu")
    (choice,) = ps.explain(ps.fused_topk, X, 5, log=True)
    assert choice == Choice(call("topk"), "mosaic_gpu", "xla")
    (choice,) = ps.explain(ps.fused_topk, X, k=200)
    assert "k=200 is not from 1 to 128" in str(choice)


def test_explain_of_a_gradient():
    got = ops(ps.explain(jax.grad(lambda x: ps.softmax(x).sum()), X))
    assert got == [("softmax", "mosaic_gpu"), ("softmax_grad", "mosaic_gpu")]
    long = jax.ShapeDtypeStruct((128, 50000), "float32")
    got = ops(ps.explain(jax.grad(lambda x: ps.softmax(x).sum()), long))
    assert got == [("softmax", "mosaic_gpu"), ("softmax_grad", "xla")]


def test_explain_of_a_function_of_ones_own():
    def f(x, weights):
        p = ps.softmax(x[:, :-1] @ weights["w"])
        return ps.fused_topk(p, 3), ps.logsumexp(x)

    weights = {"w": jax.ShapeDtypeStruct((4095, 2048), "float32")}
    got = [choice for choice in ps.explain(f, X, weights) if not choice.call.op.endswith("_grad")]
    assert ops(got) == [("softmax", "mosaic_gpu"), ("topk", "mosaic_gpu"), ("logsumexp", "xla")]
    assert got[0].call.vocab == 2048


def test_explain_of_what_cannot_run_gives_the_reason():
    choice = ps.explain(named(ps.softmax, "mosaic_gpu"), jax.ShapeDtypeStruct((2, 7), "float32"))[-1]
    assert choice.cuda is None
    assert "rows of 7 float32" in str(choice)


def test_explain_passes_other_errors_on():
    def fails(x):
        raise NotImplementedError("of the user")

    with pytest.raises(NotImplementedError, match="of the user"):
        ps.explain(fails, X)
    with pytest.raises(ValueError, match="axis"):
        ps.explain(ps.softmax, X, axis=7)
    assert dispatch._recorder.get() is None


def test_explain_computes_nothing():
    """Too large for any memory; and a function with an effect at run time has none."""
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(None))
        return ps.softmax(x)

    assert ps.explain(f, jax.ShapeDtypeStruct((2**40, 4096), "float32"))[0].cuda == "mosaic_gpu"
    ps.explain(f, jnp.ones((128, 4096)))
    jax.effects_barrier()
    assert ran == []


# --- launch.walk --------------------------------------------------------------------------------------

rows_of_16_bytes = st.integers(1, 16 * 1024)  # up to 256 KB: beyond shared memory


@FREE
@given(rows_of_16_bytes, st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from(list(OPS)))
@example(1, "float32", "softmax")
@example(216 * 64, "bfloat16", "topk")
def test_walk(accesses, dtype, op):
    """The steps hold each element once; what is supported fits the barriers and the shared memory."""
    itemsize = jnp.dtype(dtype).itemsize
    vocab = accesses * 16 // itemsize
    walk = launch.walk(vocab, dtype, op)
    sizes = [walk.step] * walk.full + [walk.left] * (walk.left > 0)
    assert len(sizes) == walk.steps >= 1
    assert sum(sizes) == vocab
    row, end = pieces.Row(walk, interpret=True), 0
    for i, size in enumerate(sizes):
        assert i * walk.step == end
        assert size * itemsize % 16 == 0  # a bulk copy
        for at, held in row.blocks(i, size):
            assert at.start == end
            assert 0 < held <= at.size == walk.block
            assert end + walk.block <= walk.padded
            end += held
    assert end == vocab
    assert walk.padded - vocab < walk.block
    if launch.unsupported(call(op, dtype, vocab=vocab), HOPPER) is None:
        assert walk.steps <= 32
        held = 2 if op == "softmax_grad" else 1
        assert held * walk.padded * itemsize < 227 * 1024


@FREE
@given(st.integers(1, 2**20), st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from(list(OPS)))
def test_a_longer_row_is_supported_only_if_a_shorter_one_is(vocab, dtype, op):
    vec = 16 // jnp.dtype(dtype).itemsize
    vocab = math.ceil(vocab / vec) * vec
    if launch.unsupported(call(op, dtype, vocab=vocab + vec), HOPPER) is None:
        assert launch.unsupported(call(op, dtype, vocab=vocab), HOPPER) is None
