"""Which implementation runs, what explain says of it, and the launch choices: pure functions of the call."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_softmax as ps
from pallas_softmax import target
from pallas_softmax.call import Call, Choice
from pallas_softmax.choice import IMPLEMENTATIONS, _better_by_xla, _recorder, choose
from pallas_softmax.implementations import folding
from pallas_softmax.implementations.mosaic_gpu import support
from pallas_softmax.implementations.mosaic_gpu.device import hardware, layout
from pallas_softmax.implementations.mosaic_gpu.device.layout import Tile
from pallas_softmax.implementations.mosaic_gpu.device.rows import StagedRow
from pallas_softmax.implementations.mosaic_gpu.softmax import plan as softmax_plan
from pallas_softmax.implementations.mosaic_gpu.topk import plan as topk_plan

FREE = settings(max_examples=200, deadline=None, derandomize=True)
X = jax.ShapeDtypeStruct((128, 16384), jnp.float32)
HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (10, 0), (10, 3), (12, 0))
OPS = (*oracle.OPERATIONS, "topk")
DTYPES = ("float32", "bfloat16", "float16")


def call(op="softmax", dtype="float32", rows=128, vocab=16384, **kwargs):
    return Call(op, dtype, rows, vocab, **({"k": 5 if op == "topk" else None} | kwargs))


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
    "A100": (dict(), (8, 0), "compute capability 9.0 or newer, not 8.0"),
    "L4": (dict(), (8, 9), "not 8.9"),
    "float64": (dict(dtype="float64"), HOPPER, "no kernel for float64, only float32, bfloat16, float16"),
    "int32": (dict(op="topk", dtype="int32"), HOPPER, "no kernel for int32"),
    "float8": (dict(dtype="float8_e4m3fn"), HOPPER, "no kernel for float8_e4m3fn"),
    "no rows": (dict(rows=0), HOPPER, "empty"),
    "no columns": (dict(vocab=0), HOPPER, "empty"),
    "2^31 elements": (
        dict(rows=50001, vocab=50257),
        HOPPER,
        "neither V nor number is a multiple of 4, 50001 x 50257",
    ),
    "k=0": (dict(op="topk", k=0), HOPPER, "k=0 is not from 1 to 2048"),
    "k=2049": (dict(op="topk", k=2049), HOPPER, "k=2049 is not from 1 to 2048"),
    "axis of top-k": (dict(op="topk", trailing=False), HOPPER, "not contiguous"),
    "top-k of 2^31 elements": (
        dict(op="topk", rows=50001, vocab=50257, dtype="bfloat16"),
        HOPPER,
        "neither V nor number is a multiple of 8, 50001 x 50257",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_the_reason_names_what_is_unsupported(case):
    changes, capability, reason = UNSUPPORTED[case]
    given = call(**changes)
    assert support.unsupported(call(op=given.op), HOPPER) is None
    got = support.unsupported(given, capability)
    assert got is not None
    assert re.search(reason, got), got


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_supported(op, dtype, capability):
    for rows, vocab in [(1, 8), (128, 4096), (2**31, 1000)]:
        assert support.unsupported(call(op, dtype, rows, vocab), capability) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_length_and_alignment_is_supported(op, dtype):
    for rows, vocab in [(1, 1), (7, 127), (1, 50257), (3, 1000003), (50000, 50257), (2**20, 262144)]:
        for more in (
            dict(),
            dict(masked=True),
            dict(k=min(vocab, 2048)) if op == "topk" else dict(trailing=False),
        ):
            assert support.unsupported(call(op, dtype, rows, vocab, **more), HOPPER) is None


def test_slower():
    """Supported, but left to XLA unless the kernel is named."""
    assert "transposed" in _better_by_xla(call(trailing=False))
    assert "float32 rows" in _better_by_xla(call(vocab=4096))
    assert "single row" in support.slower(call("softmax_grad", rows=1, vocab=128256))
    assert "single float32 row" in support.slower(call("topk", rows=1, vocab=128256, k=1025))
    for kernel in (
        call(),
        call("softmax_grad", rows=2, vocab=128256),
        call("softmax_grad", rows=1, vocab=65536),
        call(vocab=4095),
        call(vocab=4096, masked=True),
        call(vocab=4096, dtype="bfloat16"),
        call("log_softmax", vocab=4096),
        call("topk", rows=1, vocab=128),
        call("topk", rows=1, vocab=128256, k=1024),
        call("topk", "bfloat16", rows=1, vocab=128256, k=2048),
        call("topk", rows=2, vocab=128256, k=2048),
    ):
        assert support.slower(kernel) is None and _better_by_xla(kernel) is None


# --- choose -------------------------------------------------------------------------------------------


def test_the_first_that_supports_the_call_is_chosen():
    choice = choose(call(), None)
    assert choice == Choice(call(), "mosaic_gpu", "xla")
    assert str(choice) == "softmax float32[128, 16384]: mosaic_gpu on cuda, xla elsewhere"


@pytest.mark.parametrize("changes", [dict(trailing=False), dict(vocab=4096)], ids=str)
def test_what_is_slower_must_be_named(changes):
    slow = call(**changes)
    choice = choose(slow, None)
    assert (choice.cuda, choice.elsewhere) == ("xla", "xla")
    assert choice.reasons[0] == ("mosaic_gpu", _better_by_xla(slow))
    assert choose(slow, "mosaic_gpu") == Choice(slow, "mosaic_gpu", None, requested="mosaic_gpu")


def test_all_reasons_are_kept_in_the_order_of_preference():
    choice = choose(call(trailing=False), None)
    assert [name for name, _ in choice.reasons] == ["mosaic_gpu", "triton"]
    assert str(choice).startswith("softmax float32[128, 16384]: xla (mosaic_gpu: ")
    assert "; triton: " in str(choice)


def test_str_of_a_named_choice():
    assert str(choose(call("topk"), "mosaic_gpu")) == (
        "topk float32[128, 16384], k=5: mosaic_gpu on cuda only"
    )
    assert str(choose(call(), "xla")) == "softmax float32[128, 16384]: xla"
    nothing = choose(call(dtype="float64"), "mosaic_gpu")
    assert str(nothing).startswith("softmax float64[128, 16384]: nothing (mosaic_gpu: no kernel for float64")


@pytest.mark.parametrize("name", ["cuda", "", "XLA", "mosaic"])
def test_an_unknown_name_lists_the_valid_ones(name):
    with pytest.raises(ValueError) as error:
        choose(call(), name)
    for word in (repr(name), *IMPLEMENTATIONS):
        assert word in str(error.value)


def test_calls_and_choices_are_values():
    """They are static arguments of jax.jit: equal ones must hash alike, or every call would compile."""
    assert hash(choose(call(), None)) == hash(choose(call(), None))
    with pytest.raises(dataclasses.FrozenInstanceError):
        call().rows = 1


# --- A named implementation runs or raises ------------------------------------------------------------

both = pytest.mark.parametrize("function", [ps.softmax, topk], ids=["softmax", "topk"])
REFUSED = {  # (the call, the reason)
    "dtype": (lambda f: f(jnp.ones((2, 8), "float8_e4m3fn")), "no kernel for float8_e4m3fn"),
    "empty": (lambda f: f(jnp.ones((0, 8))), "empty"),
}


def traced(function):
    """Only traced, with the kernel named."""
    f = named(function, "mosaic_gpu")
    return lambda x, **kwargs: jax.eval_shape(lambda x: f(x, **kwargs), x)


@pytest.mark.parametrize("case", REFUSED)
@both
def test_unsupported_raises_at_trace(function, case):
    run, reason = REFUSED[case]
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu' cannot run.*{reason}"):
        run(traced(function))


def test_what_only_topk_refuses():
    traced(ps.softmax)(jnp.ones((8, 2)), axis=0)
    with pytest.raises(NotImplementedError, match="implementation='mosaic_gpu' cannot run.*not contiguous"):
        traced(topk)(jnp.ones((8, 2)), axis=0)


@pytest.mark.parametrize("k", [0, 2049])
def test_unsupported_k_raises_at_trace(k):
    with pytest.raises(NotImplementedError, match=f"k={k} is not from 1 to 2048"):
        jax.eval_shape(lambda x: ps.fused_topk(x, k, implementation="mosaic_gpu"), X)


@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize(("v", "k"), [(7, 7), (50257, 2048), (128256, 128), (1000003, 1)])
def test_topk_takes_any_row_and_mask(rows, v, k):
    """Traced, with the kernel named."""
    x, where = jax.ShapeDtypeStruct((rows, v), "float32"), jax.ShapeDtypeStruct((rows, v), "bool")

    def f(x, where=None):
        return ps.fused_topk(x, k, where=where, implementation="mosaic_gpu")

    for got in (jax.eval_shape(f, x), jax.eval_shape(f, x, where)):
        assert got.values.shape == got.indices.shape == (rows, k)


@both
def test_a_kernel_traces_but_does_not_lower_for_the_cpu(function):
    """The same trace may be lowered for CUDA."""
    traced = jax.jit(named(function, "mosaic_gpu")).trace(X)
    with pytest.raises(NotImplementedError, match="mosaic_gpu.*lowered for cpu"):
        traced.lower(lowering_platforms=("cpu",))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU.*lowered for cpu"):
        named(function, "mosaic_gpu")(jnp.ones((2, 8)))


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
    assert target.capability() == HOPPER


# --- explain ------------------------------------------------------------------------------------------


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


def test_explain_of_a_gradient():
    got = ops(ps.explain(jax.grad(lambda x: ps.softmax(x).sum()), X))
    assert got == [("softmax", "mosaic_gpu"), ("softmax_grad", "mosaic_gpu")]
    short = jax.ShapeDtypeStruct((128, 4096), "float32")
    got = ops(ps.explain(jax.grad(lambda x: ps.softmax(x).sum()), short))
    assert got == [("softmax", "xla"), ("softmax_grad", "mosaic_gpu")]


def test_explain_of_logsumexp_is_one_line():
    """Its backward is always plain, elementwise."""
    assert ops(ps.explain(jax.grad(lambda x: ps.logsumexp(x, -1).sum()), X)) == [("logsumexp", "mosaic_gpu")]


def test_explain_of_a_function_of_ones_own():
    def f(x, weights):
        p = ps.softmax(x[:, :-1] @ weights["w"])
        return ps.fused_topk(p, 3), ps.logsumexp(x)

    weights = {"w": jax.ShapeDtypeStruct((16383, 16000), "float32")}
    got = [choice for choice in ps.explain(f, X, weights) if not choice.call.op.endswith("_grad")]
    assert ops(got) == [("softmax", "mosaic_gpu"), ("topk", "mosaic_gpu"), ("logsumexp", "mosaic_gpu")]
    assert got[0].call.vocab == 16000


def test_explain_of_what_cannot_run_gives_the_reason():
    choice = ps.explain(named(ps.softmax, "mosaic_gpu"), jax.ShapeDtypeStruct((2, 0), "float32"))[-1]
    assert choice.cuda is None
    assert "empty" in str(choice)


def test_explain_passes_other_errors_on():
    def fails(x):
        raise NotImplementedError("of the user")

    with pytest.raises(NotImplementedError, match="of the user"):
        ps.explain(fails, X)
    with pytest.raises(ValueError, match="axis"):
        ps.explain(ps.softmax, X, axis=7)
    assert _recorder.get() is None


def test_explain_computes_nothing():
    """Too large for any memory; and a function with an effect at run time has none."""
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(None))
        return ps.softmax(x)

    assert ps.explain(f, jax.ShapeDtypeStruct((2**40, 16384), "float32"))[0].cuda == "mosaic_gpu"
    ps.explain(f, jnp.ones((128, 16384)))
    jax.effects_barrier()
    assert ran == []


# --- Launch choices -----------------------------------------------------------------------------------

# The documented shapes on Hopper: CTAs of a row ("tile": its rows in registers), one launch or two.
PLANS = {
    ("softmax", 1, 1, "float32"): "tile",
    ("softmax", 4000, 1000, "float32"): "tile",
    ("softmax_grad", 4000, 5000, "bfloat16"): "tile",
    ("softmax", 4096, 10000, "bfloat16"): "tile",
    ("softmax", 4000, 25000, "float32"): (1, 1),
    ("softmax", 4096, 50257, "bfloat16"): (4, 1),
    ("softmax", 1, 50257, "float32"): (8, 1),
    ("softmax", 512, 128256, "bfloat16"): (8, 1),
    ("log_softmax", 512, 151936, "bfloat16"): (8, 1),
    ("logsumexp", 4096, 262144, "bfloat16"): (16, 1),
    ("softmax_grad", 1024, 262144, "float32"): (16, 1),
    ("softmax", 1, 1000003, "float32"): (256, 2),
}


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_plan(shape):
    plan = softmax_plan.plan_softmax(*shape, HOPPER)
    got = "tile" if isinstance(plan, Tile) else (plan.count, 1 if plan.cluster else 2)
    assert got == PLANS[shape]


lengths = st.one_of(st.integers(1, 20_000), st.integers(1, 3_000_000))


@settings(FREE, max_examples=1000)
@given(
    st.sampled_from(oracle.OPERATIONS),
    st.integers(1, 5000),
    lengths,
    st.sampled_from(DTYPES),
    st.sampled_from(CAPABILITIES),
)
@example("softmax", 16, 5121, "bfloat16", HOPPER)  # the shortest parts
@example("log_softmax_grad", 1, 2561, "float32", HOPPER)
@example("softmax_grad", 3, 262143, "float32", (12, 0))
def test_plans_cover_every_row_once(op, rows, vocab, dtype, capability):
    plan = softmax_plan.plan_softmax(op, rows, vocab, dtype, capability)
    if isinstance(plan, Tile):
        check_tile(plan, vocab)
    else:
        check_parts(plan, rows, vocab, jnp.dtype(dtype).itemsize)
        arrays = 2 if op in oracle.BACKWARD else 1
        smem = {9: 227, 10: 227, 12: 99}[capability[0]] * 1024
        assert (
            arrays * plan.walk.padded_length * jnp.dtype(dtype).itemsize + 2048 <= smem
        )  # barriers, and what is sent


def check_tile(tile, vocab):
    """Vectors are whole; a thread holds no more than its registers do, and none only padding in every step."""
    columns = tile.lanes * tile.vec * tile.steps
    assert vocab % tile.vec == 0
    assert columns - tile.lanes * tile.vec < vocab <= columns
    assert tile.lanes in (2, 4, 8, 16, 32, hardware.WARPGROUP)
    assert tile.rows % (hardware.WARPGROUP // tile.lanes) == 0
    assert tile.rows * columns <= 12288


def check_parts(plan, rows, vocab, itemsize):
    """What the parts own is the row; what they hold lies in it; what is copied in bulk, on 16 bytes."""
    starts = np.asarray(plan.start(np.arange(plan.count + 1)))
    owned = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == vocab
    assert (0 < owned).all() and (owned <= plan.length).all() and (plan.length - owned <= plan.unit).all()
    assert (starts[:-1] + plan.length <= vocab).all()
    assert plan.count <= 16 or not plan.cluster
    assert plan.vec * itemsize == 16 and plan.body > 0 and plan.body % plan.vec == 0
    assert plan.walk.steps <= 32  # unrolled
    together = layout.aligned_view(rows, vocab, plan.vec)[-1] // vocab
    firsts = np.add.outer(np.arange(min(together, plan.vec)) * vocab, starts[:-1])
    if not plan.edges:
        assert (owned == plan.length).all() and plan.body == plan.length
        assert (firsts % plan.vec == 0).all()
        return
    inner = (
        softmax_plan.EDGE - firsts % plan.vec
    )  # where the body of a part starts: in reach of its first elements
    assert ((firsts + inner) % plan.vec == 0).all()
    assert (0 < inner).all() and (inner + plan.body <= plan.length).all()
    assert (inner + plan.body >= plan.length - softmax_plan.EDGE).all() and plan.length >= softmax_plan.EDGE


@FREE
@given(st.integers(1, 100), st.integers(1, 10**6), st.sampled_from([4, 8]))
def test_aligned_view(rows, vocab, vec):
    """All elements; every row of the view starts on 16 bytes and holds whole rows, as few as can be."""
    view = layout.aligned_view(rows, vocab, vec)
    assert math.prod(view) == rows * vocab
    assert view[-1] % vocab == 0
    if len(view) == 2:
        assert view[-1] % vec == 0
        assert view[-1] // vocab == min(n for n in (1, 2, 4, 8) if n * vocab % vec == 0)
    else:
        assert not any(rows % n == 0 and n * vocab % vec == 0 for n in (1, 2, 4, 8))


@FREE
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=5))
def test_mask_rows_are_those_of_broadcasting(dimensions):
    batch = tuple(n for n, _ in dimensions)
    mask = tuple(1 if broadcast else n for n, broadcast in dimensions)
    of_mask = np.arange(math.prod(mask)).reshape(mask)
    rows = np.arange(math.prod(batch))
    want = np.broadcast_to(of_mask, batch).ravel()
    np.testing.assert_array_equal(folding.mask_rows(mask, batch)(rows), want)


@FREE
@given(st.integers(1, 16 * 1024), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4, 8]))
@example(1, 4, 8)
@example(216 * 64, 8, 4)
def test_walk(accesses, vec, group):
    """The steps hold each element once."""
    walk = layout.Walk(accesses * vec, vec, group)
    sizes = [walk.step_size] * walk.full_steps + [walk.rest] * (walk.rest > 0)
    assert len(sizes) == walk.steps >= 1
    assert sum(sizes) == walk.length
    row, end = StagedRow(walk, interpret=True), 0
    for i, size in enumerate(sizes):
        assert i * walk.step_size == end
        assert size % vec == 0  # a bulk copy
        for at, held in row.blocks(i, size):
            assert at.start == end
            assert 0 < held <= at.size == walk.block_size
            assert end + walk.block_size <= walk.padded_length
            end += held
    assert end == walk.length
    assert walk.padded_length - walk.length < walk.block_size


# --- Launch choices of top-k --------------------------------------------------------------------------

# (rows, V, k, dtype): parts of a row; "tile": its rows in registers.
TOPK_PLANS = {
    (1, 1, 1, "float32"): "tile",
    (4096, 100, 5, "float32"): "tile",
    (4096, 512, 1, "float32"): "tile",
    (4096, 1024, 8, "bfloat16"): "tile",
    (4096, 512, 64, "float32"): 1,  # too many winners to take one by one
    (4096, 1024, 5, "float32"): "tile",
    (4096, 1024, 6, "float32"): 1,
    (10, 2048, 2, "bfloat16"): "tile",
    (10, 2048, 1, "float32"): "tile",
    (10, 2048, 2, "float32"): 1,
    (10, 2052, 1, "float32"): 1,
    (4096, 8000, 1, "float32"): 1,
    (4000, 25000, 5, "float32"): 1,
    (4000, 25000, 128, "bfloat16"): 1,
    (129, 25000, 5, "float32"): 1,
    (128, 25000, 5, "float32"): 4,
    (1, 20000, 5, "float32"): 1,
    (1, 50257, 5, "bfloat16"): 7,
    (1, 262144, 5, "float32"): 16,
    (4096, 50257, 64, "bfloat16"): 2,
    (4096, 50257, 64, "float32"): 3,
    (4096, 128256, 64, "float32"): 6,
}


@pytest.mark.parametrize("shape", TOPK_PLANS, ids=str)
def test_topk_plan(shape):
    """Few rows are split, and rows of which two would not lie in a multiprocessor."""
    plan = topk_plan.plan_topk(*shape, HOPPER)
    assert ("tile" if isinstance(plan, Tile) else plan.count) == TOPK_PLANS[shape]


@settings(FREE, max_examples=1000)
@given(
    st.one_of(st.integers(1, 200), st.integers(1, 5000)),
    lengths,
    st.one_of(st.integers(1, 128), st.integers(1, topk_plan.MAX_K)),
    st.sampled_from(DTYPES),
    st.sampled_from(CAPABILITIES),
)
@example(1, 24001, 2048, "float32", (12, 0))
@example(1, 2048, 2048, "bfloat16", HOPPER)
@example(5000, 65, 65, "float32", HOPPER)  # the shortest windows
@example(129, 3_000_000, 2048, "float32", (12, 0))
def test_topk_plans_cover_every_row_once(rows, vocab, k, dtype, capability):
    k = min(k, vocab)
    plan = topk_plan.plan_topk(rows, vocab, k, dtype, capability)
    if isinstance(plan, Tile):
        assert vocab * jnp.dtype(dtype).itemsize <= 8192 and plan.lanes <= 32  # a row is a warp's
        check_tile(plan, vocab)
        winners = topk_plan.winners_tile(plan, k)
        assert (winners.rows, winners.lanes) == (plan.rows, plan.lanes) and winners.shape[1] >= k
    else:
        check_window(plan, rows, k, jnp.dtype(dtype).itemsize)
        smem = {9: 227, 10: 227, 12: 99}[capability[0]] * 1024
        used = plan.size * jnp.dtype(dtype).itemsize + topk_plan.selection_bytes(plan, k)
        assert used + 2048 <= smem  # barriers, and scratch of the reductions
        assert topk_plan.candidate_slots(k) >= 2 * k


def check_window(plan, rows, k, itemsize):
    """The parts are the row, each with k elements at least; copies are of whole 16 bytes, inside each part."""
    starts = np.asarray(plan.cut.start(np.arange(plan.count + 1)))
    owned = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == plan.vocab
    assert owned.min() >= k and owned.max() == plan.cut.longest
    together = layout.aligned_view(rows, plan.vocab, plan.vec)[-1] // plan.vocab
    firsts = np.add.outer(np.arange(min(together, plan.vec)) * plan.vocab, starts[:-1])
    before = -firsts % plan.vec  # elements of a part before its body, which are filled in one by one
    assert (before <= plan.head).all()
    assert (before + plan.body <= owned).all()
    assert (owned - plan.body <= 2 * plan.vec + plan.cut.unit).all()
    assert (plan.head - before + owned <= plan.size).all()
    copies = plan.copies()
    assert plan.vec * itemsize == 16 and 1 <= len(copies) <= 32  # unrolled
    assert all(at % plan.vec == size % plan.vec == 0 < size for at, size in copies)
    ends = [at + size for at, size in copies]
    assert [plan.head, *ends] == [*(at for at, _ in copies), plan.head + plan.body]
    # steps: those before the last that its copy fills; groups: whole in a step, which is whole in the window
    assert plan.full in (len(copies), len(copies) - 1)
    assert all(end == (i + 1) * plan.step_blocks * plan.block for i, end in enumerate(ends[: plan.full]))
    assert 0 <= plan.rest <= plan.step_blocks + 1
    assert plan.step_blocks % plan.group_blocks == 0
    assert (
        plan.groups_per_thread * plan.group_blocks >= plan.blocks == plan.full * plan.step_blocks + plan.rest
    )


@FREE
@given(st.integers(1, topk_plan.MAX_K), st.integers(1, 1000))
def test_merges_come_to_an_end(k, count):
    """In a few launches, each of which has room for the lists that it merges."""
    group, launches = topk_plan.lists_per_merge(k), 0
    assert 2 <= group <= hardware.WARPGROUP
    slots = topk_plan.power_of_two(group * k, hardware.WARPGROUP)
    assert 8 * slots + 8 * topk_plan.padded_winners(k) <= 95 * 1024
    while count > 1:
        count, launches = -(-count // group), launches + 1
    assert launches <= 10
