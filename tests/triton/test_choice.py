"""The choice of Triton kernels, and missing or incompatible versions of Triton. No test here needs Triton."""

import importlib.metadata
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax._src.dispatch.choose import choose
from pallas_softmax._src.triton import checks
from tests.support import oracle
from tests.support.calls import DTYPES, device, named, refusal, topk
from tests.support.calls import described as call
from tests.support.children import output_of

A100, L4, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"
X = jax.ShapeDtypeStruct((100, 16384), jnp.float32)


@pytest.fixture
def works(monkeypatch):
    monkeypatch.setattr(checks, "missing", lambda: None)


@pytest.mark.parametrize(("kind", "chosen"), [(A100, "triton"), (L4, "triton"), (H100, "mosaic_gpu"), (V100, "xla")])
def test_the_device_decides(kind, chosen, works):
    with device(kind):
        choices = [choose(call(op), None) for op in (*oracle.OPERATIONS, "topk")]
    for choice in choices:
        assert (choice.cuda, choice.elsewhere) == (chosen, "xla")
        assert ("compute capability 8.0" in str(choice)) == (chosen == "xla")


# the reason why XLA runs the call, unless the kernel is named; None if a kernel runs it
CHOSEN = {
    call(vocab=8192): "no faster than xla for aligned float32 rows of up to 8192",
    call("log_softmax", inner=None): "transposed",
    call("softmax_grad", vocab=16385, masked=True): "masked backward of float32 rows",
    call("log_softmax", vocab=8192): None,
    call(vocab=8192, masked=True): None,
    call("topk", vocab=8192): None,
    call(vocab=16385, masked=True): None,
    call("softmax_grad", vocab=16384, masked=True): None,
    call("softmax_grad", "bfloat16", vocab=16385, masked=True): None,
    call("softmax_grad", vocab=50257): None,
}


@pytest.mark.parametrize("given", CHOSEN, ids=str)
def test_slower_kernels_run_only_if_named(given, works):
    reason = CHOSEN[given]
    with device(A100):
        choice = choose(given, None)
        assert choice.cuda == "triton" if reason is None else choice.cuda == "xla" and reason in str(choice)
        named = choose(given, "triton")
    assert (named.cuda, named.elsewhere) == ("triton", None)
    assert "implementation='triton' cannot run" in named.refusal


def test_large_calls_are_supported(works):
    for dtype in DTYPES:
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
            assert refusal("triton", call(dtype=dtype, rows=2**24, vocab=2**24), capability) is None


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
    """The reason says how to install jax-triton, and the next implementation is chosen."""
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
    """Neither the package nor a choice imports Triton."""
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
    assert output_of("-c", program).startswith("softmax float32[100, 16384]: ")
