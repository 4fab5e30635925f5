"""The Mosaic GPU kernels of sample and filter_logits: plans, in Pallas's interpreter, and lowered for CUDA."""

import functools

import jax
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.hardware import SMEM_BYTES
from pallas_softmax._src.sample.plan import plan_of, plan_sample
from tests.sample import kernels
from tests.support.cases import BF16, F16, F32
from tests.support.covering import pairs
from tests.support.draws import all_combinations, assert_cutoffs, assert_draws, masked_rows
from tests.support.lowering import array, kernel_names, lowered
from tests.support.plans import HOPPER

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(0)


def test_chosen():
    x = jax.ShapeDtypeStruct((64, 128256), F32)
    draw = functools.partial(ps.sample, jax.random.key(0))
    assert ps.explain(draw, x)[0].cuda == "mosaic_gpu"
    (choice,) = ps.explain(draw, jax.ShapeDtypeStruct((2, 2**20), F32))
    assert (choice.call.op, choice.cuda, choice.elsewhere) == ("sample", "xla", "xla")
    assert "does not fit into the shared memory of a cluster" in str(choice)
    with pytest.raises(NotImplementedError, match="'triton' cannot run sample.*no kernel for sample"):
        jax.eval_shape(functools.partial(draw, implementation="triton"), x)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_plans(dtype, capability):
    """Parts and the program's numbers fit into shared memory. Rows that no cluster can hold have no plan."""
    smem = SMEM_BYTES[capability[0]]
    for v in (1, 1003, 50257, 128256, 151936, 262144, 524288):
        plan = plan_sample(v, dtype, capability)
        assert plan is not None or capability[0] == 12
        if plan is not None:
            assert plan.smem_bytes <= smem
            assert plan.window.size <= 2**16  # 32 bits hold the sums of 16-bit numbers
            # each warpgroup has one step
            assert plan.window.full + bool(plan.window.rest) <= plan.warpgroups
    assert plan_sample(2**21, dtype, capability) is None


# By dtype, V: CTAs of a row, warpgroups
PLANS = {
    F32: {50257: (4, 2), 128256: (6, 3), 151936: (8, 3), 201088: (14, 2), 262144: (12, 3)},
    BF16: {128256: (5, 2), 151936: (6, 2), 262144: (6, 3)},
    F16: {50257: (2, 2), 128256: (5, 2)},
}


@pytest.mark.parametrize("dtype", PLANS, ids=str)
def test_three_ctas_of_two_warpgroups_share_a_multiprocessor(dtype):
    """A cluster of more than 8 CTAs leaves multiprocessors idle, so two larger CTAs share a multiprocessor instead."""
    for v, says in PLANS[dtype].items():
        plan = plan_sample(v, dtype, HOPPER)
        assert plan is not None and (v, plan.window.count, plan.warpgroups) == (v, *says)
        assert (5 - plan.warpgroups) * (plan.smem_bytes + 1024) <= SMEM_BYTES[9] + 1024


# (V, dtype, warpgroups) of one CTA. Rows not aligned to 16 bytes, exact blocks; warpgroups with a whole step, a short
# step, or none.
LAYOUTS = [(1003, BF16, 2), (1024, F32, 1), (129, F16, 4), (2, BF16, 1), (4099, F32, 2), (4104, F16, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "masked", "kernel"), pairs(LAYOUTS, [False, True], ["sample", "filter_cutoff"]), ids=str
)
def test_interpreted(layout, masked, kernel):
    """The kernel puts rows into shared memory, masks them, and uses the parameters of the right row."""
    v, dtype, warpgroups = layout
    rows, where = masked_rows(["normal", "nan_last", "peaked"], v, dtype, masked)
    x, where, words, parameters, names = all_combinations(rows, where)
    some = slice(None, None, 19)  # 19 is prime, so that each row gets other filters
    x, words, names, parameters = x[some], words[some], names[some], [a[some] for a in parameters]
    where, plan = None if where is None else where[some], plan_of(v, dtype, 1, warpgroups)
    if kernel == "sample":
        got = kernels.sample_rows(x, words, parameters, where, plan)
        assert_draws(got, x, words, names, parameters, where)
    else:
        assert_cutoffs(kernels.sample_rows(x, None, parameters, where, plan), x, names, parameters, where)


def kernels_of(rows, v, dtype, key=KEY, **arguments):
    draw = lambda x: ps.sample(key, x, implementation="mosaic_gpu", **arguments)  # noqa: E731
    return kernel_names(lowered(draw, array(rows, v, dtype=dtype)))


SHAPES = [(5, 50257, BF16), (1, 1, F32), (64, 128256, F16), (1024, 151936, F32), (300, 129, F16)]


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [True, False], ids=str)
@pytest.mark.parametrize(("rows", "v", "dtype"), SHAPES, ids=str)
def test_lowered(rows, v, dtype, filtered):
    """Any call is one kernel, with any mask and filters."""
    given = {"where": np.arange(v)[None] % 3 > 0, "top_k": 5, "top_p": 0.9} if filtered else {}
    assert kernels_of(rows, v, dtype, **given) == ["sample"]


@pytest.mark.slow
def test_lowered_noise():
    """With threefry keys the kernel makes the noise. Other noise is XLA's, and then a kernel finds the cutoff."""
    assert kernels_of(6, 1000, F32, jax.random.split(KEY, 6)) == ["sample"]
    assert kernels_of(6, 1000, F32, jax.random.key(0, impl="rbg")) == ["filter_cutoff"]
    assert kernels_of(6, 1000, BF16, mode="high", top_k=5) == ["filter_cutoff"]
    with jax.threefry_partitionable(False):
        assert kernels_of(6, 1000, F16) == ["filter_cutoff"]


def test_filter_logits_lowered():
    """The kernel finds the cutoff; what is left is elementwise."""
    f = lambda x: ps.filter_logits(x, top_p=0.9, min_p=0.1)  # noqa: E731
    assert kernel_names(lowered(f, array(64, 50257, dtype=BF16))) == ["filter_cutoff"]


@pytest.mark.slow
def test_lowered_plain_jax_sorts_no_rows():
    f = lambda x: ps.sample(KEY, x, top_k=50, top_p=0.9, implementation="xla")  # noqa: E731
    assert "stablehlo.sort" not in lowered(f, array(64, 50257), platform="cpu")
