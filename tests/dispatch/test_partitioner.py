"""Programs with Auto mesh axes: caches, executables, exports, and the text that describes a call."""

import dataclasses
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from pallas_softmax._src import jax_internals
from pallas_softmax._src.dispatch import partitioner, text
from pallas_softmax._src.dispatch.operation import OPERATIONS, Call
from pallas_softmax._src.linear.losses import Head, Tokens
from pallas_softmax._src.topk.operation import TOPK
from tests.programs import portable_checks
from tests.programs.portable_checks import CASES, CHECKS, LOGITS, Case
from tests.programs.sharded_checks import by_lists
from tests.support import calls
from tests.support.calls import device
from tests.support.children import assert_no_error, once, reports, selected_names
from tests.support.covering import slow
from tests.support.lowering import array, divided_calls, kernel_names, lowered

CASE = {label: name for checks in CHECKS.values() for label, (_, name) in checks.items()}


@pytest.fixture(scope="session")
def report(request, tmp_path_factory):
    """Returns the reports of all checks. The first pytest worker that asks runs them in two processes."""
    asked = selected_names(request, test_on_eight_cpu_devices)
    asked |= {f"write-{CASE[name]}" for name in asked}

    def run(folder):
        folder = folder / "portable"
        folder.mkdir()
        return {process: reports("portable_checks.py", process, str(folder), *asked) for process in ("first", "second")}

    return once(tmp_path_factory, "portable", run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASE)
def test_on_eight_cpu_devices(report, name):
    assert_no_error(report["first" if name in CHECKS["first"] else "second"], name)


@pytest.mark.gpu
@pytest.mark.xdist_group("several GPUs")
def test_on_gpus(tmp_path):
    """The same in processes that share the machine's GPUs."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    for process, checks in CHECKS.items():
        found = reports("portable_checks.py", process, str(tmp_path), cpu_devices=None)
        assert {*checks} <= {*found}, found[""]
        assert not any(found[name] for name in checks), [*filter(None, map(found.get, checks))]


# --- Static arguments ---------------------------------------------------------------------------------

MESH = AbstractMesh((8,), ("v",), axis_types=(AxisType.Auto,))
X = array(16, 1024, dtype="bfloat16", sharding=NamedSharding(MESH, P(None, "v")))

# Arguments that are arrays, or numbers that become arrays; their shapes and dtypes are in every lowered program. A
# mesh axis named by axis_name is one of shard_map, where XLA divides nothing.
ARRAYS = {argument for _, argument in calls.ARRAYS} | {"axis_name", "label_probs", "scale"}
# The other arguments, with some values; the first is the default.
SWITCHES = ("log", "keepdims", "return_sign", "rank", "renormalize", "transpose_w", "return_logsumexp")
STATIC = dict.fromkeys(SWITCHES, (False, True)) | {
    "axis": (-1, 0),
    "implementation": (None, "xla"),
    "k": (2, 1),
    "dtype": (None, "bfloat16"),
    "sorted": (True, False),
    "is_stable": (True,),  # it changes nothing
    "mode": (None, "high"),
    "score": ("softmax", "sigmoid", "sqrtsoftplus"),
    "groups": (4, 5),
    "top_groups": (2, 4),
    "group_best": (None, 1),
    "softcap": (None, 30.0, 30.5),
    "teacher_softcap": (None, 30.0),
    "workspace_bytes": (2**29, 2**20),
    "reduction": ("mean", "sum", None),
    "beta": (0, 0.5, 1),
}
SOFTMAX = {"axis": (-1, 1, (1, 2)), "implementation": (None, "mosaic_gpu")}
# name: values of static arguments in place of those above
OTHERS_OF = dict.fromkeys(("softmax", "log_softmax", "logsumexp"), SOFTMAX)
OTHERS_OF |= dict.fromkeys(("fused_topk", "top_k"), {"implementation": (None, "mosaic_gpu", "xla")})


def arguments(name):
    return {*inspect.signature(getattr(ps, name)).parameters}


def test_all_functions_and_static_arguments_are_listed():
    functions = {name for name in ps.__all__ if inspect.isfunction(getattr(ps, name))} - {"explain"}
    assert {*calls.FUNCTIONS} == functions
    for name in calls.FUNCTIONS:
        assert arguments(name) - ARRAYS <= {*STATIC}, name
    assert not ARRAYS & {*STATIC}


def text_of(name, static):
    """Returns the lowered text of a call of logits on a mesh."""
    case, batch = "logsumexp, rows" if name == "logsumexp" else name, calls.X.shape
    if name == "token_stats":
        static = static | {"labels": np.zeros(np.delete(batch, static["axis"]), int)}
    x, square = array(*batch, sharding=NamedSharding(MESH, P())), np.ones((calls.V, calls.V), np.float32)
    given = {"w": square, "teacher_x": calls.X, "teacher_w": square}
    given = {of: a for of, a in given.items() if of in arguments(name)}
    return lowered(lambda x: calls.plainly(case, **{calls.logits_of(case): x}, **given, **static), x)


@pytest.mark.parametrize(
    "name", [name if name in ("softmax", "fused_topk") else slow(name) for name in calls.FUNCTIONS]
)
def test_static_arguments_have_programs_of_their_own(name):
    """Calls that differ in one static argument lower to different texts, so no cache can take one for the other."""
    static = {argument: STATIC[argument] for argument in STATIC if argument in arguments(name)}
    static |= OTHERS_OF.get(name, {})
    base = {argument: values[0] for argument, values in static.items()}
    variants = [base] + [base | {argument: v} for argument in static for v in static[argument][1:]]
    texts = [text_of(name, v) for v in variants]
    same = [(a, b) for (a, x), (b, y) in itertools.combinations(zip(variants, texts), 2) if x == y]
    assert not same
    assert divided_calls(texts[0])


# --- The text of a call -------------------------------------------------------------------------------

CALL = Call(TOPK, "float32", 16, 1024, k=4, mesh_axes=("v",), function="fused_topk")
VALUES = [
    None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, 0.1, math.inf, "", "None", "é\"\\\n", (), (1,), (1.0,), ((1,),),
    (True, None), np.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("int32"), Head(),
    Head(True, 30.0, "highest", 5), Head(softcap=1.0), Tokens((1,)), Tokens((1,), 2), CALL,
    dataclasses.replace(CALL, k=5),
]  # fmt: skip


def test_values_have_texts_of_their_own():
    """Different values have different texts, also where Python says they are equal, as 1, 1.0 and True."""
    texts = [text.dumps(value) for value in VALUES]
    assert len({*texts}) == len(texts)
    for value, written in zip(VALUES, texts):
        read = text.loads(written.encode())
        assert type(read) is type(value) and read == value
        assert text.dumps(read) == written
    assert math.isnan(text.loads(text.dumps(math.nan)))
    assert math.copysign(1, text.loads(text.dumps(-0.0))) == -1
    for operation in OPERATIONS.values():  # it is read by its name
        assert text.loads(text.dumps(operation)) is operation


OTHERS = [
    [1], {"a": 1}, {1}, np.float32(1), np.float64(1), np.int32(1), jnp.float32, np.ones(2), 1j, object(), len, (1, [2]),
    lambda: 1, jax.ShapeDtypeStruct((1,), "float32"), AxisType.Auto, dataclasses.replace(TOPK),
    Head(softcap=np.float32(1)),  # pyright: ignore[reportArgumentType]
]  # fmt: skip


def test_other_values_have_no_text():
    for value in OTHERS:
        with pytest.raises(TypeError, match="no text for a static argument"):
            text.dumps(value)


@pytest.mark.parametrize("written", ['{"os:system":{"x":1}}', '{"pallas_softmax._src.target:capability":{}}'])
def test_other_classes_are_not_read(written):
    with pytest.raises(ValueError, match="has no class"):
        text.loads(written)


def test_text_of_the_surroundings():
    def call():
        ((_, found),) = divided_calls(lowered(lambda x: ps.fused_topk(x, 4), X))
        return found

    plain = call()
    with device("NVIDIA H100 80GB HBM3"):
        hopper = call()
    with device("NVIDIA B200"):
        blackwell = call()
    with jax.enable_x64(True):
        wide = call()
    with jax.default_matmul_precision("bfloat16"):
        coarse = call()
    assert len({plain, hopper, blackwell, wide, coarse}) == 5


def test_settings_are_those_of_the_lowering():
    """XLA may ask for a device's program where JAX has other settings: here, after the context of the lowering."""
    x = array(8, 64, dtype="float64", sharding=NamedSharding(MESH, P("v", None)))
    with jax.enable_x64(True):
        ((shapes, call),) = divided_calls(lowered(lambda x: ps.linear_logsumexp(x, jnp.ones((64, 8))), x))
    module, *_ = partitioner._partition(tuple(shapes), (None,) * len(shapes), call.encode())
    with mlir.make_ir_context():
        assert "tensor<8x8xf64>" in str(mlir.ir.Module.parse(module))


def test_other_sources_have_other_texts(tmp_path):
    """A compilation cache outlives a change of the source."""
    (tmp_path / "a").mkdir()
    found = [partitioner.digest(tmp_path)]
    for name, content in [("a/b.py", ""), ("a/b.py", "x"), ("a/c.py", ""), ("d.py", "")]:
        (tmp_path / name).write_text(content)
        found.append(partitioner.digest(tmp_path))
    assert len({*found}) == len(found)
    assert partitioner._versions()[1] in divided_calls(lowered(lambda x: ps.fused_topk(x, 4), X))[0][1]


# name: a function, and its kernels for a shard
KERNELS = {
    "softmax": (CASES["softmax"], {"logsumexp_forward"}),
    "log_softmax": (Case(ps.log_softmax, LOGITS), {"logsumexp_forward"}),
    "logsumexp": (Case(lambda x: ps.logsumexp(x, -1), LOGITS), {"logsumexp_forward"}),
    "fused_topk": (CASES["fused_topk"], {"softmax_topk", "topk_merge"}),
    "top_k": (CASES["top_k"], {"top_k", "topk_merge"}),
    # the best entries; draws from shards and from whole rows
    "sample": (CASES["sample"], {"sample", "softmax_topk", "topk_merge"}),
    # the best entries; whole rows that keep more
    "filter_logits": (CASES["filter_logits"], {"softmax_topk", "topk_merge", "filter_cutoff"}),
    "token_stats": (CASES["token_stats"], {"token_stats_forward"}),
    "route": (CASES["route"], {"route", "route_grad"}),
    "linear_cross_entropy": (CASES["linear_cross_entropy"], {"linear_exponentials", "linear_merge"}),
}
EXCHANGED = {"sample": {"sample"}, "filter_logits": {"filter_cutoff"}}  # of small shards


@pytest.mark.parametrize("name", [name if name == "fused_topk" else slow(name) for name in KERNELS])
def test_program_of_a_gpu(name):
    """One of 16 GPUs runs kernels on its shard. The machine needs no GPU, and not as many devices."""
    case, kernels = KERNELS[name]
    assert_kernels_of_a_gpu(case, EXCHANGED.get(name, kernels))
    if name in EXCHANGED:
        with by_lists():
            assert_kernels_of_a_gpu(case, kernels)


def assert_kernels_of_a_gpu(case, kernels):
    mesh = AbstractMesh((2, 8), ("b", "v"), axis_types=(AxisType.Auto,) * 2)
    program = lowered(portable_checks.with_gradient(case), *portable_checks.shapes_of(case, mesh, "bfloat16"))
    modules = []
    for shapes, call in divided_calls(program):
        specs = [P(*({16: "b", 4096: "v", 16384: "v"}.get(n) for n in shape)) for shape, _ in shapes]
        tiles = tuple(
            jax_internals.tiles(jax_internals.hlo_sharding(NamedSharding(mesh, spec), len(spec))) for spec in specs
        )
        module, *_ = partitioner._partition(tuple(shapes), tiles, call.encode())
        with mlir.make_ir_context():
            modules.append(str(mlir.ir.Module.parse(module)))
    assert modules
    assert not any(f"tensor<16x{n}x" in module for module in modules for n in (16384, 4096, 64)), "a whole array"
    assert {kernel for module in modules for kernel in kernel_names(module)} == kernels
