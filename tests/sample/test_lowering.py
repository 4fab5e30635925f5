"""The Mosaic GPU kernels of sample and filter_logits lowered for CUDA, without a GPU."""

import jax
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.cases import BF16, F16, F32
from tests.support.lowering import array, kernel_names, lowered

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def kernels(rows, v, dtype, key=KEY, **arguments):
    """Returns the names of the kernels of a call of `sample`."""
    draw = lambda x: ps.sample(key, x, implementation="mosaic_gpu", **arguments)  # noqa: E731
    return kernel_names(lowered(draw, array(rows, v, dtype=dtype)))


SHAPES = [(5, 50257, BF16), (1, 1, F32), (64, 128256, F16), (1024, 151936, F32), (300, 129, F16)]


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [True, False], ids=str)
@pytest.mark.parametrize(("rows", "v", "dtype"), SHAPES, ids=str)
def test_lowered(rows, v, dtype, filtered):
    """Any call is one kernel, with any mask and filters."""
    given = {"where": np.arange(v)[None] % 3 > 0, "top_k": 5, "top_p": 0.9} if filtered else {}
    assert kernels(rows, v, dtype, **given) == ["sample"]


@pytest.mark.slow
def test_noise_of_the_kernel():
    """With threefry keys the kernel makes the noise. Other noise is XLA's, and then a kernel filters."""
    assert kernels(6, 1000, F32, jax.random.split(KEY, 6)) == ["sample"]
    assert kernels(6, 1000, F32, jax.random.key(0, impl="rbg")) == ["filter_cutoff"]
    assert kernels(6, 1000, BF16, mode="high", top_k=5) == ["filter_cutoff"]
    with jax.threefry_partitionable(False):
        assert kernels(6, 1000, F16) == ["filter_cutoff"]


def test_filter_logits():
    """The kernel finds the cutoff; what is left is elementwise."""
    f = lambda x: ps.filter_logits(x, top_p=0.9, min_p=0.1)  # noqa: E731
    assert kernel_names(lowered(f, array(64, 50257, dtype=BF16))) == ["filter_cutoff"]


@pytest.mark.slow
def test_plain_jax_sorts_no_rows():
    f = lambda x: ps.sample(KEY, x, top_k=50, top_p=0.9, implementation="xla")  # noqa: E731
    assert "stablehlo.sort" not in lowered(f, array(64, 50257), platform="cpu")
