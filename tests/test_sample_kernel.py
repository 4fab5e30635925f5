"""The Mosaic GPU kernel of sample: in the interpreter, which runs a twin of its PTX; lowered; and its plan."""

import functools

import jax
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax.implementations.mosaic_gpu.device.hardware import RESERVED_SMEM_BYTES, SMEM_BYTES
from pallas_softmax.implementations.mosaic_gpu.sample import plan as sample_plan
from tests.support import cases, kernels
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first, slow
from tests.support.draws import crossed, judged
from tests.support.lowering import kernel_names

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("masked", [False, slow(True)], ids=str)
@pytest.mark.parametrize(("v", "dtype"), first(1, kernels.SAMPLE_PLANS), ids=str)
def test_interpreted(v, dtype, masked):
    """Where rows lie in shared memory, what is masked there, and which row has which parameters."""
    rows = cases.rows(["normal", "nan_last", "peaked"], v, dtype)
    where = np.random.default_rng(0).random(rows.shape) < 0.6 if masked else None
    x, where, u, parameters, names = crossed(rows if where is None else cases.spoilt(rows, where), where)
    some = slice(None, None, 17)  # a prime: all filters, and rows
    x, u, names, parameters = x[some], u[some], names[some], [a[some] for a in parameters]
    where = None if where is None else where[some]
    plan = sample_plan.window_of(v, dtype.itemsize, 1)
    judged(kernels.sample_rows(x, u, parameters, where, plan), x, u, names, parameters, where)


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
    """One kernel, whatever is filtered."""
    assert kernel_names(lowered(rows, v, dtype).as_text()) == ["sample"]
    where = np.arange(v)[None] % 3 > 0
    assert kernel_names(lowered(rows, v, dtype, where, top_k=5, top_p=0.9).as_text()) == ["sample"]


def test_chosen():
    x = jax.ShapeDtypeStruct((64, 128256), F32)
    draw = functools.partial(ps.sample, jax.random.key(0), top_p=0.9)
    assert ps.explain(draw, x)[0].cuda == "mosaic_gpu"
    (choice,) = ps.explain(draw, jax.ShapeDtypeStruct((2, 2**20), F32))
    assert choice.cuda == "xla"
    assert "does not fit into the shared memory of a cluster" in str(choice)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_plans(dtype, capability):
    """Every part fits; a row of 262,144 does on Hopper; rows that are longer than a cluster holds are refused."""
    smem = SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES
    for rows in (1, 64, 256, 1024):
        for v in (1, 1003, 50257, 128256, 151936, 262144):
            plan = sample_plan.plan_sample(rows, v, dtype, capability)
            assert (plan is not None) or capability[0] == 12
            if plan is not None:
                used = plan.size * dtype.itemsize + 4 * sample_plan.Scratch(plan).words
                assert used <= smem
                assert plan.size <= sample_plan.MAX_POSITIONS
    assert sample_plan.plan_sample(4, 2**20, dtype, capability) is None
