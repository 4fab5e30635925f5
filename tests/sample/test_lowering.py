"""The Mosaic GPU kernels of sample and filter_logits lowered for CUDA, without a GPU."""

import jax
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first
from tests.support.lowering import kernel_names

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def lowered(rows, v, dtype, key=KEY, where=None, **arguments):
    def draw(x):
        return ps.sample(key, x, where=where, implementation="mosaic_gpu", **arguments)

    return lowered_on(draw, jax.ShapeDtypeStruct((rows, v), dtype))


def lowered_on(function, *avals):
    """Returns the names of the kernels of a function."""
    return kernel_names(jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(
    ("rows", "v", "dtype"),
    first(1, [(5, 50257, BF16), (1, 1, F32), (64, 128256, F16), (1024, 151936, F32), (300, 129, F16)]),
    ids=str,
)
def test_lowered(rows, v, dtype):
    """Any call is one kernel, with any mask and filters."""
    assert lowered(rows, v, dtype) == ["sample"]
    where = np.arange(v)[None] % 3 > 0
    assert lowered(rows, v, dtype, where=where, top_k=5, top_p=0.9) == ["sample"]


@pytest.mark.slow
def test_noise_of_the_kernel():
    """With threefry keys the kernel makes the noise. Other noise is XLA's, and then a kernel filters."""
    assert lowered(6, 1000, F32, jax.random.split(KEY, 6)) == ["sample"]
    assert lowered(6, 1000, F32, jax.random.key(0, impl="rbg")) == ["filter_cutoff"]
    assert lowered(6, 1000, BF16, mode="high", top_k=5) == ["filter_cutoff"]
    with jax.threefry_partitionable(False):
        assert lowered(6, 1000, F16) == ["filter_cutoff"]


def test_filter_logits():
    """The kernel finds the cutoff; what is left is elementwise."""
    x = jax.ShapeDtypeStruct((64, 50257), BF16)
    assert lowered_on(lambda x: ps.filter_logits(x, top_p=0.9, min_p=0.1), x) == ["filter_cutoff"]
