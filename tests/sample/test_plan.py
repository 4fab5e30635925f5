"""The launch plans of sample: the limits of the GPU, and the calls that XLA runs."""

import functools

import jax
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.hardware import SMEM_BYTES
from pallas_softmax._src.sample.plan import plan_sample
from tests.support.cases import BF16, F16, F32
from tests.support.plans import HOPPER


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
    for rows in (1, 64, 256, 1024):
        for v in (1, 1003, 50257, 128256, 151936, 262144, 524288):
            plan = plan_sample(rows, v, dtype, capability)
            assert plan is not None or capability[0] == 12
            if plan is not None:
                assert plan.smem_bytes <= smem
                assert plan.window.size <= 2**16  # 32 bits hold the sums of 16-bit numbers
                # each warpgroup has one step
                assert plan.window.full + bool(plan.window.rest) <= plan.warpgroups
    assert plan_sample(4, 2**21, dtype, capability) is None


def _share_a_multiprocessor(plan, ctas):
    return ctas * (plan.smem_bytes + 1024) <= SMEM_BYTES[9] + 1024


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("v", [50257, 128256, 151936])
def test_three_ctas_share_a_multiprocessor(v, dtype):
    plan = plan_sample(64, v, dtype, HOPPER)
    assert plan is not None
    assert _share_a_multiprocessor(plan, 3) and plan.warpgroups == 2


@pytest.mark.parametrize(
    ("v", "dtype", "count", "warpgroups"),
    [
        (50257, F32, 4, 2),
        (128256, F32, 6, 3),
        (151936, F32, 8, 3),
        (151936, BF16, 6, 2),
        (201088, F32, 14, 2),
        (262144, F32, 12, 3),
        (262144, BF16, 6, 3),
    ],
    ids=str,
)
def test_many_rows_avoid_large_clusters(v, dtype, count, warpgroups):
    """A cluster of more than 8 CTAs leaves multiprocessors idle, so two larger CTAs share a multiprocessor instead."""
    plan = plan_sample(1024, v, dtype, HOPPER)
    assert plan is not None
    assert (plan.window.count, plan.warpgroups) == (count, warpgroups)
    assert _share_a_multiprocessor(plan, 5 - warpgroups)
