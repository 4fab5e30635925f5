"""The Triton kernels without a GPU: compiled by Triton, lowered by jax-triton, and interpreted by Triton.

All tests here are slow and need Triton. Without Triton they are skipped, except on CI (CI=true), where they fail: the
complete set of tests installs Triton.
"""

import ast
import contextlib
import functools
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
import pytest
from jax import export

import pallas_softmax as ps
from pallas_softmax._src.triton import checks
from pallas_softmax._src.triton import plan as triton_plan
from pallas_softmax._src.triton.launch import launch_p
from tests.support import oracle, triton_kernels
from tests.support.calls import device, named, topk
from tests.support.lowering import array, square_sum

A100, L4 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4"
X = jax.ShapeDtypeStruct((100, 16384), jnp.float32)

# jax-triton 0.3.1 cannot be imported without CUDA, so find_spec looks for it.
LACKING = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING) and os.environ.get("CI") != "true", reason=f"{', '.join(LACKING)}: not installed"),
]


@pytest.fixture(autouse=True)
def installed():
    assert not LACKING, f"the complete set of tests needs {', '.join(LACKING)}"


def launches_of(op, rows, v, dtype="float32", mask=None):
    """Returns parameters and types of every launch of an operation, or of top-k with k = `op`; `mask` is a shape."""
    x, where = array(rows, v, dtype=dtype), None if mask is None else array(*mask, dtype="bool")

    def f(x, where, t):
        if isinstance(op, int):
            log = op == 32  # one of the cases
            return triton_kernels.topk(x, where, t, k=op, log=log, dtype=jnp.float32)
        return triton_kernels.softmax_rows(op, [x] * (2 if op in oracle.BACKWARD else 1), where, (1,))

    eqns = jax.make_jaxpr(f)(x, where, array(1, 1)).jaxpr.eqns
    eqns = [eqn for eqn in eqns if eqn.primitive is launch_p]
    return [(eqn.params, [v.aval for v in (*eqn.invars, *eqn.outvars)]) for eqn in eqns]


def compiled(params, avals, arch):
    """Compiles a launch like jax-triton; returns Triton's result and the report of ptxas.

    Triton chooses ptxas itself: its wheel has several, for different versions and architectures.
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
SHARED = 99 * 1024  # bytes per block on RTX GPUs, of compute capability 8.6 and 8.9
_LAYOUT = re.compile(r"^#(\w+) = #ttg\.linear<\{.*warp = (\[.*\]), block = ", re.M)
_REDUCE = re.compile(
    r'"tt\.reduce"\((?:.*\n)*?\s*\}\) : \(tensor<([0-9x]+)x\w+, (?:#ttg\.slice<\{dim = \d+, parent = )*#(\w+)'
)


def reductions(ttgir):
    """Returns shape and layout of each reduction, and the dimensions of its warp bits if the layout is linear.

    Unused bits are None; unused bits above all used bits are left out.
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
    """Returns the reductions that Triton may miscompile: warp bits of dimensions alternate, or a used bit follows an
    unused one.

    Triton 3.6 miscompiles them: the reduction over such a linear layout goes through shared memory, and warps read what
    other warps wrote. On an H100, top-k with groups=2048 and vec=1 had wrong winners. Among all plans measured there,
    exactly the plans with reductions named here were wrong. Triton gives no warning.
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
def test_miscompiled_layouts_are_detected(layout, wrong):
    """The layouts are Triton 3.6's for the plan with groups=2048, and for plans that work, also sliced."""
    for text in (layout, f"#ttg.slice<{{dim = 1, parent = #ttg.slice<{{dim = 2, parent = {layout}}}>}}>"):
        ttgir = TTGIR.replace("LAYOUT", text)
        assert [layout for _, layout, _ in reductions(ttgir)] == [layout[1:]]
        assert [layout for _, layout, _ in miscompiled(ttgir)] == [layout[1:]] * wrong


ROWS = 4000
# name: (operation, or k of top-k), rows, V, dtype, and the shape of a mask; the kernels of the launches. Launches that
# fill the registers are compiled for every GPU. The others are compiled for the oldest GPU only: they leave registers
# unused, and top-k takes long to compile.
FILLED = {
    "all registers": (("softmax", ROWS, 32768, "bfloat16"), ["rows"]),
    "backward of all warps": (("log_softmax_grad", ROWS, 28672), ["rows"]),
    "backward of all warps, masked": (("log_softmax_grad", ROWS, 16001, "float32", (ROWS, 16001)), ["rows"]),
    "long rows": (("softmax", ROWS, 50257, "bfloat16"), ["long"]),
    "long rows, backward": (("softmax_grad", ROWS, 50257), ["long"]),
    "long rows, backward, masked": (("softmax_grad", ROWS, 50257, "float16", (ROWS, 50257)), ["long"]),
    "few very long rows": (("softmax_grad", 10, 1_000_000), ["long"] * 2),
}
COMPILED = FILLED | {
    "short rows, masked": (("softmax", ROWS, 1000, "float32", (ROWS, 1000)), ["rows"]),
    "short rows": (("softmax_grad", ROWS, 1000, "bfloat16"), ["rows"]),
    "rows of all warps, mask per row": (("log_softmax", ROWS, 16000, "bfloat16", (ROWS, 1)), ["rows"]),
    "long rows, masked": (("softmax", ROWS, 50257, "float32", (ROWS, 50257)), ["long"]),
    "few rows": (("logsumexp", 4, 128256, "bfloat16"), ["long"] * 2),
    "few rows, masked": (("log_softmax", 4, 128256, "float32", (1, 128256)), ["long"] * 2),
    "5, masked": ((5, ROWS, 12000, "bfloat16", (ROWS, 12000)), ["topk"]),
    "1 of odd rows in very many parts": ((1, 2, 999_999_999), ["topk", "merge", "merge"]),
    "32 of odd rows in parts": ((32, 1, 128255, "bfloat16"), ["topk", "merge"]),
    "256 of parts": ((256, 1, 32768), ["topk", "merge"]),
}
# triton 3.9's ptxas spills one register, with a limit of 64; triton 3.6's spills none
SPILLED = {("long rows", 89): 4}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case, monkeypatch, tmp_path):
    """No register spills, a block fits every GPU, and no reduction has a layout that Triton miscompiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    operation, kernels = COMPILED[case]
    found = launches_of(*operation)
    assert [params["kernel"].__name__ for params, _ in found] == [f"{name}_kernel" for name in kernels]
    for params, avals in found:
        for arch in ARCHS if case in FILLED else ARCHS[:1]:
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


# --- Lowered by jax-triton ----------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Records the kernels that jax-triton calls. It replaces JAX's CUDA plugin, which the machine need not have."""
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
    monkeypatch.setattr(checks, "missing", lambda: None)
    forget()
    yield made
    forget()


def lowered(f, *args, kind=A100, platform="cuda"):
    with device(kind):  # jit caches traces by function, so this is a new function
        return jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def called(calls, text):
    """Returns the names of the kernels in the text. A function that is called twice is lowered once."""
    names = [call.kernel.name for call in calls]
    found = len(re.findall(r"custom_call @triton_kernel_call", text))
    assert found >= len(names) and bool(found) == bool(names)
    return names


# name: (function, its kernels, the grid of the first)
LOWERED = {
    "softmax": (ps.softmax, ["rows_kernel"], (100, 1, 1)),
    "log_softmax": (ps.log_softmax, ["rows_kernel"], (100, 1, 1)),
    "logsumexp": (lambda x, **kw: ps.logsumexp(x, -1, **kw), ["rows_kernel"], (100, 1, 1)),
    "topk": (topk, ["topk_kernel", "merge_kernel"], (100, 2, 1)),
    "top_k": (functools.partial(ps.top_k, k=5), ["topk_kernel", "merge_kernel"], (100, 2, 1)),
    "integers": (lambda x, **kw: ps.top_k(x.astype(int), 5, **kw), ["topk_kernel", "merge_kernel"], (100, 2, 1)),
    # the kernel writes float32 values, which are rounded afterwards
    "values of 8 bits": (functools.partial(topk, dtype="float8_e4m3fn"), ["topk_kernel", "merge_kernel"], (100, 2, 1)),
    "where": (lambda x, **kw: ps.softmax(x, where=x > 0, **kw), ["rows_kernel"], (100, 1, 1)),
    "another axis": (lambda x, **kw: ps.softmax(x, 0, **kw), ["rows_kernel"], (2048, 1, 1)),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name, calls):
    f, kernels, grid = LOWERED[name]
    text = lowered(named(f, "triton"), X)
    assert called(calls, text) == kernels
    assert calls[0].grid == grid
    for call in calls:
        assert call.kernel.capability == 80 and ".target sm_80" in call.kernel.ptx
        assert f".entry {call.kernel.name}" in call.kernel.ptx
        assert set(call.parameters) == {(0, 16)}  # arrays that are not cleared and are aligned to 16 bytes


def test_lowered_for_the_device(calls):
    called(calls, lowered(named(ps.softmax, "triton"), X, kind=L4))
    (call,) = calls
    assert call.kernel.capability == 89 and ".target sm_89" in call.kernel.ptx
    assert call.kernel.warps == triton_plan.plan_softmax("softmax", *X.shape, X.dtype).warps
    assert len(call.parameters) == 4  # a gradient's second array and the mask are always passed


def test_lowered_under_vmap(calls):
    """One kernel takes all rows of the batch, also with an unmapped mask."""
    batch, where = array(3, *X.shape), array(*X.shape, dtype="bool")
    f = jax.vmap(lambda x, where: named(ps.softmax, "triton")(x, where=where), in_axes=(0, None))
    assert called(calls, lowered(f, batch, where)) == ["rows_kernel"]
    assert calls[0].grid == (300, 1, 1)


def test_lowered_under_grad_and_scan(calls):
    f = square_sum(jax.checkpoint(named(ps.softmax, "triton")))

    def steps(x):
        return jax.lax.scan(lambda x, _: (jax.grad(f)(x), None), x, length=3)[0]

    assert called(calls, lowered(steps, X)) == ["rows_kernel"] * 2
    assert len({call.kernel.ptx for call in calls}) == 2


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
    """Dead code is removed. jax 0.12 cannot remove jax-triton 0.4.1's primitive, so launch.py has its own."""
    assert len(called(calls, lowered(f, X))) == kernels


def test_exported(calls):
    """An export must allow the custom call."""
    f = jax.jit(lambda x: ps.log_softmax(x))
    names = ("triton_kernel_call", "triton_kernel_call_ffi")
    known = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    with device(A100):
        with pytest.raises(ValueError, match="triton_kernel_call"):
            export.export(f, platforms=("cuda",))(X)
        module = export.export(f, platforms=("cuda",), disabled_checks=known)(X).mlir_module()
    assert "triton_kernel_call" in module


def test_lowered_automatically(calls):
    """Without a named implementation, kernels run on the GPU, and the same trace is plain JAX on the CPU."""
    names = called(calls, lowered(lambda x: (ps.log_softmax(x), topk(x)), X))
    assert names == ["rows_kernel", "topk_kernel", "merge_kernel"]
    calls.clear()
    assert called(calls, lowered(ps.log_softmax, X, platform="cpu")) == []


@pytest.mark.parametrize("before", [None, "somewhere"])
def test_tritons_cache_directory_does_not_change(before, calls, monkeypatch):
    """The import of jax-triton changes the directory for the whole process; the package restores it."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    environment = dict(os.environ)
    called(calls, lowered(named(ps.softmax, "triton"), array(8, 100)))
    assert "jax_triton" in sys.modules
    assert os.environ == environment


def test_refused_for_the_cpu(monkeypatch):
    monkeypatch.setattr(checks, "missing", lambda: None)
    with device(A100):
        with pytest.raises(NotImplementedError, match="implementation='triton'.*lowered for cpu"):
            lowered(named(ps.softmax, "triton"), X, platform="cpu")


@pytest.mark.parametrize("which", ["topk", "not topk"])
def test_numbers(which):
    """The tests of triton_interpreter.py pass in a process that interprets Triton."""
    options = ("-m", "", "-n", "0", "-p", "no:cacheprovider", "-q", "--tb=short", "-k", which)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/programs/triton_interpreter.py", *options],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout)
