"""What of the Triton kernels needs no Triton: launch plans, refusals, the choice, and versions.

test_compiled.py has the rest, which is slow.
"""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pallas_softmax as ps
from pallas_softmax._src.dispatch.choose import choose
from pallas_softmax._src.dispatch.operation import Call
from pallas_softmax._src.triton import checks
from pallas_softmax._src.triton import plan as triton_plan
from pallas_softmax._src.triton.plan import Block, Slabs
from tests.support import oracle
from tests.support.calls import DTYPES, FREE, OPERATIONS, device, lengths, named, refusal, topk

A100, L4, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"
X = jax.ShapeDtypeStruct((100, 16384), jnp.float32)


# --- Which implementation runs ------------------------------------------------------------------------


@pytest.fixture
def works(monkeypatch):
    monkeypatch.setattr(checks, "missing", lambda: None)


def call(op="softmax", dtype="float32", rows=100, vocab=16384, **kwargs):
    return Call(
        OPERATIONS[op], dtype, rows, vocab, function=op, **({"k": 5 if op == "topk" else None} | kwargs)
    )


@pytest.mark.parametrize(
    ("kind", "chosen"), [(A100, "triton"), (L4, "triton"), (H100, "mosaic_gpu"), (V100, "xla")]
)
def test_the_device_decides(kind, chosen, works):
    with device(kind):
        for op in (*oracle.OPERATIONS, "topk"):
            choice = choose(call(op), None)
            assert (choice.cuda, choice.elsewhere) == (chosen, "xla")
            assert ("compute capability 8.0" in str(choice)) == (chosen == "xla")


# name: (a call that is XLA's, why)
XLAS = {
    "short rows": (call(vocab=8192), "no faster than xla for aligned float32 rows of up to 8192"),
    "another axis": (call("log_softmax", inner=None), "transposed"),
    "masked backward": (call("softmax_grad", vocab=16385, masked=True), "masked backward of float32 rows"),
}
KERNELS = [
    call("log_softmax", vocab=8192),
    call(vocab=8192, masked=True),
    call("topk", vocab=8192),
    call(vocab=16385, masked=True),
    call("softmax_grad", vocab=16384, masked=True),
    call("softmax_grad", "bfloat16", vocab=16385, masked=True),
    call("softmax_grad", vocab=50257),
]


@pytest.mark.parametrize("case", XLAS)
def test_what_is_left_to_xla(case, works):
    """It is XLA's unless the kernel is named."""
    given, reason = XLAS[case]
    with device(A100):
        choice = choose(given, None)
        assert choice.cuda == "xla" and reason in str(choice)
        assert choose(given, "triton").cuda == "triton"


@pytest.mark.parametrize("given", KERNELS, ids=str)
def test_what_is_not_left_to_xla(given, works):
    with device(A100):
        assert choose(given, None).cuda == "triton"


def test_a_named_kernel_needs_a_gpu(works):
    with device(A100):
        choice = choose(call(), "triton")
    assert (choice.cuda, choice.elsewhere) == ("triton", None)
    assert "implementation='triton' cannot run" in choice.refusal


def test_unsupported(works):
    for changes, reason in (
        (dict(dtype="float64"), "no kernel for float64, only float32, bfloat16, float16"),
        (dict(rows=0), "empty"),
        (dict(vocab=0), "empty"),
        (dict(rows=2**31), str(2**31)),
        (dict(vocab=2**31 - 1), str(2**31 - 1)),
        (dict(op="topk", k=0), "k=0 is not from 1 to 256"),
        (dict(op="topk", k=257), "k=257 is not from 1 to 256"),
        (dict(op="topk", k=5, inner=None), "not contiguous"),
        (dict(op="topk", k=129, dtype="bfloat16", vocab=2**31 - 2**20), "more than 65535 parts"),
    ):
        given = call(**(dict(rows=100, vocab=1000, k=None) | changes))
        assert reason in refusal("triton", given, (8, 0))
    assert "not 7.5" in refusal("triton", call(), (7, 5))
    for dtype in DTYPES:
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
            assert refusal("triton", call(dtype=dtype, rows=2**24, vocab=2**24), capability) is None


# --- Without jax-triton, or with one that does not fit -----------------------------------------------

INSTALL = re.escape("pip install 'jax-triton>=0.3.1'")
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
    got, reason = checks.incompatible(*versions), VERSIONS[versions]
    assert got is None if reason is None else re.match(f".*{reason}", got)


@pytest.fixture
def without(monkeypatch):
    """Makes jax-triton look as if it were not installed."""
    version = importlib.metadata.version

    def lacking(name):
        if name == "jax-triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.6.0" if name == "triton" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", lacking)
    monkeypatch.setattr(checks, "missing", checks.missing.__wrapped__)


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


@pytest.mark.slow
def test_triton_is_imported_with_the_first_kernel():
    """Neither the package nor a choice needs it."""
    program = """
import sys
sys.modules["triton"] = sys.modules["jax_triton"] = None  # cannot be imported
import jax
from pallas_softmax._src.dispatch.operation import Call
from pallas_softmax._src.dispatch.choose import choose
from pallas_softmax._src.softmax.operation import SOFTMAX
from tests.support.calls import device
with device("NVIDIA A100-SXM4-80GB"):
    print(choose(Call(SOFTMAX, "float32", 100, 16384, function="softmax"), None))
import pallas_softmax._src.softmax.triton, pallas_softmax._src.topk.triton
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("softmax float32[100, 16384]: ")


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
    """Returns the number of lists before each merge, each program of which takes two or more, but few elements."""
    parts, counts = plan.parts, []
    while parts > 1:
        counts.append(parts)
        fan_in = triton_plan.merge_fan_in(parts, plan.slots)
        assert fan_in >= 2 and power_of_two(fan_in) and fan_in * plan.slots <= 4096
        assert power_of_two(triton_plan.merge_warps(fan_in, plan.slots))
        parts = -(-parts // fan_in)
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
    """Parts consist of whole steps, the last part is not empty, and every element is in one."""
    assert plan.length % step == 0
    assert (plan.parts - 1) * plan.length < vocab <= plan.parts * plan.length
    assert plan.parts < 65536  # the grid's second dimension


@settings(FREE, max_examples=120)
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
        assert plan.width // 2 < vocab <= plan.width
        assert power_of_two(plan.width) and power_of_two(plan.rows)
        assert plan.rows * plan.width * arrays <= 64 * threads
    else:
        assert_parts(plan, vocab, plan.depth * plan.width)
        assert power_of_two(plan.depth) and power_of_two(plan.width)
        assert plan.depth * plan.width * arrays <= 64 * threads
        assert plan.parts == 1 or rows * plan.parts <= 256


@settings(FREE, max_examples=120)
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
    """Levels lead from whole groups to single elements; each reads the winners of the one before again."""
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
