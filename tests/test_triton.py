"""The Triton kernels without a GPU: compiled, lowered by jax-triton, and their numbers in Triton's interpreter."""

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import export
from test_dispatch import DTYPES, FREE, device, lengths, named, topk

import pallas_softmax as ps
from pallas_softmax.call import Call
from pallas_softmax.implementations.triton import implementation
from pallas_softmax.implementations.triton import plan as triton_plan
from pallas_softmax.implementations.triton import support as triton_support
from pallas_softmax.implementations.triton.plan import Block, Slabs

A100, L4, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"
X = jax.ShapeDtypeStruct((100, 16384), jnp.float32)


def installed(name):
    return importlib.util.find_spec(name) is not None  # jax-triton 0.3.1 cannot be imported without CUDA


needs_triton = pytest.mark.skipif(not installed("triton"), reason="needs triton")
needs_jax_triton = pytest.mark.skipif(
    not (installed("triton") and installed("jax_triton")), reason="needs jax-triton"
)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- Compiled, by Triton and ptxas --------------------------------------------------------------------


def launches(f, *args):
    """The parameters of every launch in a function, with the types of its arrays."""
    from pallas_softmax.implementations.triton.launch import launch_p

    eqns = [eqn for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns if eqn.primitive is launch_p]
    return [(eqn.params, [v.aval for v in (*eqn.invars, *eqn.outvars)]) for eqn in eqns]


def launches_of(op, rows, v, dtype="float32", mask=None, plan=None):
    """Of an operation of softmax; `mask` is the shape of `where`."""
    x, where = array(rows, v, dtype=dtype), None if mask is None else array(*mask, dtype="bool")
    arrays = [x] * (2 if op in oracle.BACKWARD else 1)
    return launches(
        lambda where, *arrays: implementation.softmax_rows(op, arrays, where, (1,), plan), where, *arrays
    )


def launches_of_topk(rows, v, k, dtype="float32", mask=None, log=False, plan=None):
    x, where = array(rows, v, dtype=dtype), None if mask is None else array(*mask, dtype="bool")

    def f(x, where, t):
        return implementation.topk(x, where, t, k=k, log=log, dtype=jnp.float32, plan=plan)

    return launches(f, x, where, array(1, 1))


def compiled(params, avals, arch):
    """What Triton makes of a launch, as jax-triton calls it, and what ptxas says of it.

    ptxas is that which Triton takes itself: of several in its wheel, by its version and the architecture.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i1", "int32": "i32"}
    kernel, constants = params["kernel"], dict(params["constants"])
    names = kernel.arg_names
    assert len(names) == len(avals) + len(constants)
    signature = {name: f"*{types[aval.dtype.name]}" for name, aval in zip(names, avals)}
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in range(len(avals))},
    )
    options = {"num_warps": params["warps"], "enable_fp_fusion": True}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        out = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return out, log.getvalue()


ARCHS = (80, 89, 90)
SHARED = 99 * 1024  # bytes that a block of an RTX GPU, of compute capability 8.6 or 8.9, may have
_LAYOUT = re.compile(r"^#(\w+) = #ttg\.linear<\{.*warp = (\[.*\]), block = ", re.M)
_REDUCE = re.compile(
    r'"tt\.reduce"\((?:.*\n)*?\s*\}\) : \(tensor<([0-9x]+)x\w+, (?:#ttg\.slice<\{dim = \d+, parent = )*#(\w+)'
)


def reductions(ttgir):
    """Shape and layout of each reduction, and the dimensions that its warp bits are in, if the layout is linear.

    Unused bits are None; those above all used ones are left out.
    """
    linear = {name: ast.literal_eval(bases) for name, bases in _LAYOUT.findall(ttgir)}
    found = []
    for shape, layout in _REDUCE.findall(ttgir):
        bits = [next((i for i, at in enumerate(basis) if at), None) for basis in linear.get(layout, ())]
        while bits and bits[-1] is None:
            bits.pop()
        found.append((shape, layout, bits))
    return found


def miscompiled(ttgir):
    """The reductions that Triton may compile wrongly, as it may where warp bits of dimensions alternate, or are
    unused below a used one.

    Triton 3.6 does: the reduction over such a linear layout goes through shared memory, and its warps read what is of
    others. On an H100 top-k with groups=2048 and vec=1 had other winners; of all plans that were measured there
    those were wrong for which this names reductions, and no others. Nothing says so when it compiles.
    """
    return [
        (shape, layout, bits)
        for shape, layout, bits in reductions(ttgir)
        if None in bits or len({*bits}) < sum(a != b for a, b in zip(bits, [-1, *bits]))
    ]


TTGIR = """#blocked = #ttg.blocked<{threadsPerWarp = [1, 32], warpsPerCTA = [1, 8], order = [1, 0]}>
#linear = #ttg.linear<{register = [[2, 0]], lane = [[8, 0], [16, 0]], warp = [[256, 0], [512, 0], [0, 1]], block = []}>
#linear1 = #ttg.linear<{register = [], lane = [[0, 1, 0]], warp = [[1, 0, 0], [0, 0, 0], [0, 0, 1]], block = []}>
#linear2 = #ttg.linear<{register = [[2, 0]], lane = [[8, 0], [16, 0]], warp = [[256, 0], [0, 1], [1, 0]], block = []}>
#linear3 = #ttg.linear<{register = [[2]], lane = [[8], [16]], warp = [[1], [0], [0]], block = []}>
    %a = "tt.reduce"(%x) <{axis = 1 : i32}> ({
    ^bb0(%l: i64, %r: i64):
      %m = arith.maxsi %l, %r : i64 loc(#loc336)
      tt.reduce.return %m : i64 loc(#loc317)
    }) : (tensor<512x2xi64, LAYOUT>) -> tensor<512xi64, #ttg.slice<{dim = 1, parent = #blocked}>> loc(#loc317)
"""


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [("#blocked", False), ("#linear", False), ("#linear1", True), ("#linear2", True), ("#linear3", False)],
)
def test_miscompiled_layouts_are_seen(layout, wrong):
    """Of what Triton 3.6 made of the plan with groups=2048, and of plans that worked, also sliced."""
    for text in (layout, f"#ttg.slice<{{dim = 1, parent = #ttg.slice<{{dim = 2, parent = {layout}}}>}}>"):
        ttgir = TTGIR.replace("LAYOUT", text)
        assert [layout for _, layout, _ in reductions(ttgir)] == [layout[1:]]
        assert [layout for _, layout, _ in miscompiled(ttgir)] == [layout[1:]] * wrong


ROWS = 4000
# name: (launches, their kernels)
COMPILED = {
    "short rows, masked": (lambda: launches_of("softmax", ROWS, 1000, mask=(ROWS, 1000)), ["rows"]),
    "short rows": (lambda: launches_of("softmax_grad", ROWS, 1000, "bfloat16"), ["rows"]),
    "rows of all warps, mask per row": (
        lambda: launches_of("log_softmax", ROWS, 16000, "bfloat16", (ROWS, 1)),
        ["rows"],
    ),
    "all registers": (lambda: launches_of("softmax", ROWS, 32768, "bfloat16"), ["rows"]),
    "backward of all warps": (lambda: launches_of("log_softmax_grad", ROWS, 28672), ["rows"]),
    "long rows": (lambda: launches_of("softmax", ROWS, 50257, "bfloat16"), ["long"]),
    "long rows, backward": (lambda: launches_of("softmax_grad", ROWS, 50257), ["long"]),
    "long rows, backward, masked": (
        lambda: launches_of("softmax_grad", ROWS, 50257, "float16", (ROWS, 50257)),
        ["long"],
    ),
    "backward of all warps, masked": (
        lambda: launches_of("log_softmax_grad", ROWS, 16001, mask=(ROWS, 16001)),
        ["rows"],
    ),
    "long rows, masked": (lambda: launches_of("softmax", ROWS, 50257, mask=(ROWS, 50257)), ["long"]),
    "few rows": (lambda: launches_of("logsumexp", 4, 128256, "bfloat16"), ["long"] * 2),
    "few rows, masked": (lambda: launches_of("log_softmax", 4, 128256, mask=(1, 128256)), ["long"] * 2),
    "few very long rows": (lambda: launches_of("softmax_grad", 10, 1_000_000), ["long"] * 2),
    "one winner": (lambda: launches_of_topk(ROWS, 25000, 1), ["topk"]),
    "5, masked": (lambda: launches_of_topk(ROWS, 12000, 5, "bfloat16", (ROWS, 12000)), ["topk"]),
    "5 of odd rows": (lambda: launches_of_topk(ROWS, 50257, 5), ["topk"]),
    "64 of parts": (lambda: launches_of_topk(1, 128256, 64, "bfloat16", log=True), ["topk", "merge"]),
    "64 of odd rows": (lambda: launches_of_topk(ROWS, 50257, 64), ["topk"]),
    "256 of many parts": (lambda: launches_of_topk(2, 3_000_000, 256), ["topk", "merge", "merge"]),
}
SPILLED = {("long rows", 89): 4}  # one register, by the ptxas of triton 3.9, which gives it 64; of 3.6 none
SLOW = ("64 of odd rows", "256 of many parts")  # to compile: for the least GPU only


@needs_triton
@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case, monkeypatch, tmp_path):
    """No register is spilled, a block fits every GPU, and no reduction has a layout that Triton miscompiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    make, kernels = COMPILED[case]
    found = make()
    assert [params["kernel"].__name__ for params, _ in found] == [f"{name}_kernel" for name in kernels]
    for params, avals in found:
        for arch in ARCHS[:1] if case in SLOW else ARCHS:
            out, log = compiled(params, avals, arch)
            assert f".target sm_{arch}" in out.asm["ptx"]
            at = f"{params['kernel'].__name__} for sm_{arch}:\n{log}"
            (registers,) = re.findall(r"Used (\d+) registers", log)
            assert int(registers) <= 255, at
            spilled = max(map(int, re.findall(r"(\d+) bytes spill", log)))
            assert spilled <= SPILLED.get((case, arch), 0), at
            assert out.metadata.shared <= SHARED, at
            assert reductions(out.asm["ttgir"]) or params["kernel"].__name__ == "rows_kernel"
            assert miscompiled(out.asm["ttgir"]) == [], at


# --- Lowered, by jax-triton ---------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The kernels that jax-triton calls, in place of JAX's CUDA plugin: which the machine need not have."""
    import jax._src.lib

    made = []

    def kernel(name, warps, ctas, shared, ptx, ttir, capability, *scratch):
        return types.SimpleNamespace(name=name, warps=warps, ptx=ptx, capability=capability)

    class Call:
        def __init__(self, kernel, x, y, z, parameters):
            self.kernel, self.grid, self.parameters = kernel, (x, y, z), parameters

        def to_proto(self, name, metadata):
            assert name == self.kernel.name
            made.append(self)
            return name.encode()

    def asked(*_):
        raise RuntimeError("there is no GPU")

    plugin = types.SimpleNamespace(
        TritonKernel=kernel,
        TritonKernelCall=Call,
        create_array_parameter=lambda zeroed, divisible: (zeroed, divisible),
        get_compute_capability=asked,
        get_serialized_metadata=asked,
    )

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "jax_triton"]:
            del sys.modules[name]

    monkeypatch.setattr(jax._src.lib, "gpu_triton", plugin, raising=False)
    monkeypatch.setattr(triton_support, "missing", lambda: None)
    forget()
    yield made
    forget()


def lowered(f, *args, kind=A100, platform="cuda"):
    with device(kind):  # a new function: jit caches traces by function
        return jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def called(calls, text):
    """The names of the kernels in the text; a function that is called twice is lowered once."""
    names = [call.kernel.name for call in calls]
    found = len(re.findall(r"custom_call @triton_kernel_call", text))
    assert found >= len(names) and bool(found) == bool(names)
    return names


def square_sum(f):
    return lambda x: jnp.sum(f(x).astype("float32") ** 2)


# name: (function, its kernels, the grid of the first)
LOWERED = {
    "softmax": (ps.softmax, ["rows_kernel"], (100, 1, 1)),
    "log_softmax": (ps.log_softmax, ["rows_kernel"], (100, 1, 1)),
    "logsumexp": (lambda x, **kw: ps.logsumexp(x, -1, **kw), ["rows_kernel"], (100, 1, 1)),
    "topk": (topk, ["topk_kernel", "merge_kernel"], (100, 2, 1)),
    "where": (lambda x, **kw: ps.softmax(x, where=x > 0, **kw), ["rows_kernel"], (100, 1, 1)),
    "another axis": (lambda x, **kw: ps.softmax(x, 0, **kw), ["rows_kernel"], (2048, 1, 1)),
}


@needs_jax_triton
@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name, calls):
    f, kernels, grid = LOWERED[name]
    text = lowered(named(f, "triton"), X)
    assert called(calls, text) == kernels
    assert calls[0].grid == grid
    for call in calls:
        assert call.kernel.capability == 80 and ".target sm_80" in call.kernel.ptx
        assert f".entry {call.kernel.name}" in call.kernel.ptx
        assert set(call.parameters) == {(0, 16)}  # arrays, not cleared, on 16 bytes


@needs_jax_triton
def test_lowered_for_the_device(calls):
    """With the warps of the plan, for its compute capability."""
    called(calls, lowered(named(ps.softmax, "triton"), X, kind=L4))
    (call,) = calls
    assert call.kernel.capability == 89 and ".target sm_89" in call.kernel.ptx
    assert call.kernel.warps == triton_plan.plan_softmax("softmax", *X.shape, X.dtype).warps
    assert len(call.parameters) == 4  # a backward's second array and the mask are always there


@needs_jax_triton
def test_lowered_under_vmap(calls):
    """One kernel for all rows of the batch; so with a mask that is not mapped."""
    batch, where = array(3, *X.shape), array(*X.shape, dtype="bool")
    f = jax.vmap(lambda x, where: named(ps.softmax, "triton")(x, where=where), in_axes=(0, None))
    assert called(calls, lowered(f, batch, where)) == ["rows_kernel"]
    assert calls[0].grid == (300, 1, 1)


@needs_jax_triton
def test_lowered_under_grad_and_scan(calls):
    f = square_sum(jax.checkpoint(named(ps.softmax, "triton")))

    def steps(x):
        return jax.lax.scan(lambda x, _: (jax.grad(f)(x), None), x, length=3)[0]

    assert called(calls, lowered(steps, X)) == ["rows_kernel"] * 2
    assert len({call.kernel.ptx for call in calls}) == 2


@needs_jax_triton
@pytest.mark.parametrize(
    ("f", "kernels"),
    [
        (lambda x: topk(x, implementation="triton").indices, 2),
        (lambda x: (topk(x, implementation="triton"), x + 1)[1], 0),
        (lambda x: (jax.jit(named(ps.softmax, "triton"))(x), x + 1)[1], 0),
        (jax.grad(lambda x: topk(x, implementation="triton").values.sum()), 2),
    ],
    ids=["a result", "all of top-k", "all in a jit", "its values"],
)
def test_lowered_with_unused_results(f, kernels, calls):
    """Dead code: jax 0.12 fails to remove the operation of jax-triton 0.4.1, for which launch.py has its own."""
    assert len(called(calls, lowered(f, X))) == kernels


@needs_jax_triton
def test_exported(calls):
    """JAX wants to be told that the custom call is known."""
    f = jax.jit(lambda x: ps.log_softmax(x))
    known = [
        export.DisabledSafetyCheck.custom_call(f"triton_kernel_call{version}") for version in ("", "_ffi")
    ]
    with device(A100):
        with pytest.raises(ValueError, match="triton_kernel_call"):
            export.export(f, platforms=("cuda",))(X)
        module = export.export(f, platforms=("cuda",), disabled_checks=known)(X).mlir_module()
    assert "triton_kernel_call" in module


@needs_jax_triton
def test_topk_values_of_8_bits(calls):
    """The kernel's are of float32, rounded afterwards."""
    with device(A100):
        f = jax.jit(lambda x: ps.fused_topk(x, 5, dtype="float8_e4m3fn", implementation="triton"))
        assert "triton_kernel_call" in f.trace(X).lower(lowering_platforms=("cuda",)).as_text()


@needs_jax_triton
def test_lowered_automatically(calls):
    """Nothing is named, and for the CPU the same trace is plain."""
    assert called(calls, lowered(lambda x: (ps.log_softmax(x), topk(x)), X)) == [
        "rows_kernel",
        "topk_kernel",
        "merge_kernel",
    ]
    calls.clear()
    assert called(calls, lowered(ps.log_softmax, X, platform="cpu")) == []


@needs_jax_triton
@pytest.mark.parametrize("before", [None, "somewhere"])
def test_the_cache_directory_of_triton_stays(before, calls, monkeypatch):
    """jax-triton changes it for the whole process when it is imported."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    environment = dict(os.environ)
    called(calls, lowered(named(ps.softmax, "triton"), array(8, 100)))
    assert "jax_triton" in sys.modules
    assert os.environ == environment


# --- Which implementation runs ------------------------------------------------------------------------


@pytest.fixture
def works(monkeypatch):
    monkeypatch.setattr(triton_support, "missing", lambda: None)


@needs_triton  # which the chosen kernel is traced with
@pytest.mark.parametrize(
    ("kind", "chosen"), [(A100, "triton"), (L4, "triton"), (H100, "mosaic_gpu"), (V100, "xla")]
)
def test_the_device_decides(kind, chosen, works):
    with device(kind):
        choices = [ps.explain(f, X)[0] for f in (ps.softmax, ps.log_softmax, topk)]
    for choice in choices:
        assert (choice.cuda, choice.elsewhere) == (chosen, "xla")
        assert ("compute capability 8.0" in str(choice)) == (chosen == "xla")


@needs_triton
def test_what_is_left_to_xla(works):
    """Unless it is named."""
    few = array(100, 8192)
    with device(A100):
        for f, x, reason in (
            (ps.softmax, few, "no faster than xla for aligned float32 rows of up to 8192"),
            (lambda x, **kw: ps.log_softmax(x, 0, **kw), X, "transposed"),
        ):
            (choice, *_) = ps.explain(f, x)
            assert choice.cuda == "xla" and reason in str(choice)
            assert ps.explain(named(f, "triton"), x)[0].cuda == "triton"
        for f in (ps.log_softmax, lambda x: ps.softmax(x, where=x > 0), topk):
            assert ps.explain(f, few)[0].cuda == "triton"
        masked = lambda x: ps.softmax(x, where=x > 0)  # noqa: E731
        forward, backward = ps.explain(masked, array(100, 16385))
        assert (forward.cuda, backward.cuda) == ("triton", "xla")
        assert "masked backward of float32 rows" in str(backward)
        assert ps.explain(masked, array(100, 16384))[1].cuda == "triton"
        assert ps.explain(ps.softmax, array(100, 50257))[1].cuda == "triton"


def test_unsupported(works):
    for changes, reason in (
        (dict(dtype="float64"), "no kernel for float64, only float32, bfloat16, float16"),
        (dict(rows=0), "empty"),
        (dict(vocab=0), "empty"),
        (dict(rows=2**31), str(2**31)),
        (dict(vocab=2**31 - 1), str(2**31 - 1)),
        (dict(op="topk", k=0), "k=0 is not from 1 to 256"),
        (dict(op="topk", k=257), "k=257 is not from 1 to 256"),
        (dict(op="topk", k=5, trailing=False), "not contiguous"),
        (dict(op="topk", k=129, dtype="bfloat16", vocab=2**31 - 2**20), "more than 65535 parts"),
    ):
        call = Call(**(dict(op="softmax", dtype="float32", rows=100, vocab=1000) | changes))
        assert reason in triton_support.unsupported(call, (8, 0))
    assert "not 7.5" in triton_support.unsupported(Call("softmax", "float32", 100, 1000), (7, 5))
    for dtype in DTYPES:
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
            assert triton_support.unsupported(Call("softmax", dtype, 2**24, 2**24), capability) is None


@needs_triton
def test_for_the_cpu_it_is_refused(works):
    with device(A100):
        with pytest.raises(NotImplementedError, match="implementation='triton'.*lowered for cpu"):
            lowered(named(ps.softmax, "triton"), X, platform="cpu")


# --- Without jax-triton, or with one that does not fit -----------------------------------------------

INSTALL = re.escape("pip install 'pallas-softmax[triton]'")
# (jax-triton, triton, Python, CUDA): the reason
VERSIONS = {
    (None, "3.6.0", (3, 11), True): f"jax-triton is not installed: {INSTALL}",
    ("0.3.1", None, (3, 11), True): f"triton is not installed: {INSTALL}",
    ("0.3.0", "3.6.0", (3, 11), True): f"needs jax-triton 0.3.1 or newer, not 0.3.0: {INSTALL}",
    ("0.3.1", "3.5.1", (3, 11), True): f"needs triton 3.6 or newer, not 3.5.1: {INSTALL}",
    ("0.4.1", "3.9.0", (3, 11), True): "jax-triton 0.4.1 needs Python 3.12 or newer, not 3.11: take 0.3.1",
    ("0.4.1", "3.6.0", (3, 12), True): "jax-triton 0.4.1 needs triton 3.7 or newer, not 3.6.0",
    ("0.3.1", "3.6.0", (3, 11), False): re.escape("pip install 'jax[cuda13]'"),
    ("0.3.1", "3.6.0", (3, 11), True): None,
    ("0.3.1", "3.9.0", (3, 11), True): None,
    ("0.3.1", "3.6.0", (3, 12), True): None,
    ("0.4.1", "3.7.0", (3, 12), True): None,
    ("0.4.1", "3.9.0+git1a2b3c4d", (3, 12), True): None,
    ("0.10.0", "3.10.0", (3, 14), True): None,
}


@pytest.mark.parametrize("versions", VERSIONS, ids=str)
def test_incompatible_versions(versions):
    got, reason = triton_support.incompatible(*versions), VERSIONS[versions]
    assert got is None if reason is None else re.match(f".*{reason}", got)


@pytest.fixture
def without(monkeypatch):
    """As where jax-triton is not installed."""
    version = importlib.metadata.version

    def lacking(name):
        if name == "jax-triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.6.0" if name == "triton" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", lacking)
    monkeypatch.setattr(triton_support, "missing", triton_support.missing.__wrapped__)


def test_without_jax_triton(without):
    """The reason says how to install it, and the choice is the next."""
    reason = f"jax-triton is not installed: {INSTALL}"
    with device(A100):
        for f in (ps.softmax, topk):
            with pytest.raises(NotImplementedError, match=f"implementation='triton' cannot run.*{reason}"):
                jax.eval_shape(named(f, "triton"), X)
            choice = ps.explain(f, X)[0]
            assert (choice.cuda, choice.elsewhere) == ("xla", "xla")
            assert re.search(f"triton: {reason}", str(choice))


def test_triton_is_imported_with_the_first_kernel():
    """Neither the package nor a choice needs it."""
    program = """
import sys
sys.modules["triton"] = sys.modules["jax_triton"] = None  # cannot be imported
import jax, pallas_softmax as ps
from test_triton import A100, X, device
with device(A100):
    print(*ps.explain(ps.softmax, X))
print(ps.softmax(jax.numpy.zeros(4)))
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "[0.25 0.25 0.25 0.25]" in done.stdout


# --- Launch choices -----------------------------------------------------------------------------------

# (op, rows, V, dtype): rows of a program, or (parts, launches)
PLANS = {
    ("softmax", 4000, 1, "float32"): 1024,
    ("softmax", 4000, 500, "float32"): 2,
    ("softmax", 4000, 1000, "float32"): 1,
    ("softmax_grad", 4000, 1000, "bfloat16"): 1,
    ("softmax", 1, 32768, "float32"): 1,
    ("log_softmax", 4000, 28673, "float32"): (1, 1),
    ("softmax_grad", 4000, 25000, "bfloat16"): (1, 1),
    ("softmax", 4000, 32769, "float32"): (1, 1),
    ("softmax", 65, 128256, "bfloat16"): (1, 1),
    ("softmax", 64, 128256, "bfloat16"): (4, 2),
    ("logsumexp", 1, 50257, "float32"): (13, 2),
    ("softmax_grad", 1, 1000003, "float32"): (245, 2),
    ("softmax_grad", 10, 1000000, "float32"): (21, 2),
}
# (rows, V, k, dtype): launches that merge the parts of a row; 0: it has one
TOPK_PLANS = {
    (4000, 1, 1, "float32"): 0,
    (4000, 25000, 5, "float32"): 0,
    (4000, 25000, 256, "float32"): 0,
    (4000, 50257, 64, "float32"): 0,
    (4000, 128256, 64, "float32"): 0,
    (4000, 128256, 256, "float32"): 1,
    (1, 128256, 5, "float32"): 1,
    (1, 128256, 64, "bfloat16"): 1,
    (1, 3_000_000, 256, "float32"): 2,
}


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def merges(plan):
    """The number of lists before each merge; a program has at least two, and not many elements."""
    parts, counts = plan.parts, []
    while parts > 1:
        counts.append(parts)
        fan = min(triton_plan.lists_per_merge(plan.slots), triton_plan.power_of_two(parts))
        assert fan >= 2 and power_of_two(fan) and fan * plan.slots <= 4096
        parts = -(-parts // fan)
    return counts


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_plan(shape):
    plan = triton_plan.plan_softmax(*shape)
    got = plan.rows if isinstance(plan, Block) else (plan.parts, 1 + (plan.parts > 1))
    assert got == PLANS[shape]


@pytest.mark.parametrize("shape", TOPK_PLANS, ids=str)
def test_topk_plan(shape):
    assert len(merges(triton_plan.plan_topk(*shape))) == TOPK_PLANS[shape]


def assert_parts(plan, vocab, step):
    """Of whole steps, the last of them not empty: every element is of one."""
    assert plan.length % step == 0
    assert (plan.parts - 1) * plan.length < vocab <= plan.parts * plan.length
    assert plan.parts < 65536  # the grid's second dimension


@settings(FREE, max_examples=1000)
@given(
    st.sampled_from(oracle.OPERATIONS), st.integers(1, 5000), lengths, st.sampled_from(DTYPES), st.booleans()
)
@example("softmax_grad", 64, 32769, "float32", False)
@example("softmax", 128, 32769, "float32", True)
@example("softmax", 1, triton_plan.MAX_INDEX, "bfloat16", False)
def test_plans_cover_every_row_once(op, rows, vocab, dtype, masked):
    plan = triton_plan.plan_softmax(op, rows, vocab, dtype, masked)
    arrays = 2 if op in oracle.BACKWARD else 1
    threads = 32 * plan.warps
    assert power_of_two(plan.warps) and threads <= 1024
    if isinstance(plan, Block):
        assert plan.lanes // 2 < vocab <= plan.lanes
        assert power_of_two(plan.lanes) and power_of_two(plan.rows)
        assert plan.rows * plan.lanes * arrays <= 64 * threads
    else:
        assert_parts(plan, vocab, plan.depth * plan.width)
        assert power_of_two(plan.depth) and power_of_two(plan.width)
        assert plan.depth * plan.width * arrays <= 64 * threads
        assert plan.parts == 1 or rows * plan.parts <= 256


@settings(FREE, max_examples=1000)
@given(
    st.one_of(st.integers(1, 200), st.integers(1, 5000)),
    lengths,
    st.one_of(st.integers(1, 16), st.integers(1, triton_plan.MAX_K)),
    st.sampled_from(DTYPES),
)
@example(1, 3_000_000, 256, "float32")
@example(5000, 1, 1, "bfloat16")
def test_topk_plans_cover_every_row_once(rows, vocab, k, dtype):
    k = min(k, vocab)
    plan = triton_plan.plan_topk(rows, vocab, k, dtype)
    assert_parts(plan, vocab, plan.groups * plan.vec)
    assert plan.slots // 2 < max(k, 2) <= plan.slots
    assert all(map(power_of_two, (plan.slots, plan.groups, plan.vec, plan.warps)))
    assert plan.slots <= plan.groups and plan.warps <= 32
    assert plan.groups * plan.vec <= 64 * 32 * plan.warps
    assert_levels(plan)
    merges(plan)


def assert_levels(plan):
    """From groups of all slabs to single elements; each level reads those of the winners of the one before."""
    slabs_of_part = plan.length // (plan.groups * plan.vec)
    elements = plan.vec * triton_plan.power_of_two(slabs_of_part)
    for slabs, chosen in plan.levels:
        assert slabs * plan.vec == elements  # all of a winning group
        assert plan.slots * elements <= 8192
        assert chosen < elements and elements % chosen == 0
        assert chosen == 1 or chosen % plan.vec == 0  # whole slabs, as _members has them
        assert plan.slots <= plan.slots * elements // chosen
        elements = chosen
    assert elements == 1


@FREE
@given(st.integers(1, 32), st.integers(0, 8), st.integers(0, 11), st.integers(0, 3))
def test_levels_of_any_plan(slabs, slots, groups, vec):
    plan = Slabs(1, slabs << groups << vec, 2 << min(slots, groups), 1 << groups, 1 << vec, 1)
    elements = triton_plan.power_of_two(slabs) << vec
    for _, chosen in plan.levels:
        assert chosen < elements and elements % chosen == 0 and (chosen == 1 or chosen % plan.vec == 0)
        elements = chosen
    assert elements == 1 and len(plan.levels) <= 4


# --- In Triton's interpreter --------------------------------------------------------------------------


def run_python(*args, **env):
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | env,
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )


@needs_triton
@pytest.mark.parametrize("which", ["topk", "not topk"])
def test_numbers(which):
    """Those of triton_interpreter.py, in a process whose Triton interprets."""
    options = ("-n", "0", "-p", "no:cacheprovider", "-q", "--tb=short", "-k", which)
    program = Path(__file__).with_name("triton_interpreter.py")
    done = run_python("-m", "pytest", program, *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout)
