"""The kernels of token_stats lowered for CUDA, without a GPU."""

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax._src.softmax.plan import Parts
from tests.softmax.kernels import plan_softmax
from tests.support import stats
from tests.support.calls import DTYPES
from tests.support.covering import first, pairs
from tests.support.lowering import MASKS, array, kernel_names, lowered

# (V, CTAs of a row, whether they are a cluster)
LONG = [(8192, 1, True), (50257, 8, True), (20008, 2, True), (151935, 16, True), (1000003, 256, False)]
SHORT = [(v, None, None) for v in (1, 7, 8, 127, 1000, 5000)]


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "scaled"),
    first(1, pairs([*LONG, *SHORT], DTYPES, [None, *MASKS], [False, True])),
    ids=str,
)
def test_every_kernel(shape, dtype, mask, scaled):
    """A row is read by one launch, or by two if many CTAs share it."""
    v, count, cluster = shape
    plan = plan_softmax("token_stats", 5, v, dtype)
    if count is not None:
        plan = Parts(v, 16 // jnp.dtype(dtype).itemsize, 4, count, cluster)
    where = array(*MASKS[mask](v), dtype="bool") if mask else None
    text = lowered(
        lambda x, labels, where, t: stats.kernel_stats(plan, x, labels, where, t, rank=scaled),
        array(5, v, dtype=dtype),
        array(5, dtype="int32"),
        where,
        array(5) if scaled else None,
    )
    assert kernel_names(text) == ["token_stats_forward" + "_reduce" * (cluster is False)]


def total(x, labels, t):
    log_probs, entropy, logsumexp, *_ = ps.token_stats(x, labels, temperature=t)
    return jnp.sum(log_probs + entropy * logsumexp)


TRANSFORMS = {
    "call": total,
    "grad": jax.grad(total),
    "vmap": jax.vmap(total),
    "vmap of grad": jax.vmap(jax.grad(total)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("x64", [False, True])
def test_one_kernel_per_call(name, x64):
    """Labels and the temperature may be traced. The gradient is plain JAX."""
    args = array(3, 128, 16384, dtype="bfloat16"), array(3, 128, dtype="int32"), array(3, 128)
    with jax.enable_x64(x64):
        assert kernel_names(lowered(TRANSFORMS[name], *args)) == ["token_stats_forward"]
