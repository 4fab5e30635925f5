"""The Mosaic GPU kernel of sample lowered for CUDA, without a GPU."""

import jax
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first
from tests.support.lowering import kernel_names

pytestmark = pytest.mark.usefixtures("quick_compilation")


def lowered(rows, v, dtype, where=None, **filters):
    def draw(x):
        return ps.sample(jax.random.key(0), x, where=where, implementation="mosaic_gpu", **filters)

    return jax.jit(draw).trace(jax.ShapeDtypeStruct((rows, v), dtype)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("rows", "v", "dtype"),
    first(1, [(5, 50257, BF16), (1, 1, F32), (64, 128256, F16), (1024, 151936, F32), (300, 129, F16)]),
    ids=str,
)
def test_lowered(rows, v, dtype):
    """Any call is one kernel, with any mask and filters."""
    assert kernel_names(lowered(rows, v, dtype).as_text()) == ["sample"]
    where = np.arange(v)[None] % 3 > 0
    assert kernel_names(lowered(rows, v, dtype, where, top_k=5, top_p=0.9).as_text()) == ["sample"]
