"""The kernels of token_stats: in Pallas's interpreter, lowered for CUDA, and on a GPU, which runs their inline PTX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.plan import Parts
from tests.softmax.kernels import PARTS, plan_softmax
from tests.support import oracle, stats
from tests.support.calls import DTYPES
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first, pairs
from tests.support.gpu import on_a_gpu
from tests.support.lowering import MASKS, array, kernel_names, lowered, mask_of
from tests.support.twins import INTERPRET, fewer_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

TILES = [(1000, F32), (129, BF16), (7, F16), (1, F32), (2, BF16), (128, F16), (1003, BF16)]
LOST_NAN = pytest.mark.xfail(
    reason="the interpreter loses a NaN, as XLA's maximum for CPUs does; the GPU has the same rows"
)
STEPS = pytest.param(5000, F32, marks=LOST_NAN)
PLANS = [(plan, dtype) for plan, dtype, _ in PARTS]


def assert_interpreted(plan, v, dtype, masked, scaled):
    x = np.asarray(stats.rows(v, dtype))
    labels, _, where, t = stats.operands(v)
    where = where if masked else None
    got = stats.kernel_stats(plan, x, labels, where, t if scaled else None, INTERPRET, rank=scaled or masked)
    stats.assert_stats(got, x, labels, where, t if scaled else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(False, False), (True, True)], ids=str)
@pytest.mark.parametrize(("v", "dtype"), [*TILES, STEPS])
def test_short_rows_interpreted(v, dtype, options):
    plan = plan_softmax("token_stats", stats.N, v, dtype)
    assert isinstance(plan, Tile)
    assert_interpreted(fewer_rows(plan), v, dtype, *options)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(PLANS)))
def test_long_rows_interpreted(case):
    plan, dtype = PLANS[case]
    assert_interpreted(plan, plan.vocab, dtype, case % 2 == 0, case % 3 == 0)


def test_an_infinite_logit_at_temperature_0():
    x, labels, zero = np.array([[0, np.inf], [3, 1]], F32), np.zeros(2, "int32"), np.zeros(2, "float32")
    got = stats.kernel_stats(Tile(64, 2, 2, 1), x, labels, None, zero, INTERPRET)
    np.testing.assert_array_equal(got.logsumexp, [np.inf, np.inf])


# (V, CTAs of a row, whether they are a cluster)
LONG = [(8192, 1, True), (50257, 8, True), (20008, 2, True), (151935, 16, True), (1000003, 256, False)]
SHORT = [(v, None, None) for v in (1, 7, 8, 127, 1000, 5000)]


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "scaled"),
    first(1, pairs([*LONG, *SHORT], DTYPES, [None, *MASKS], [False, True])),
    ids=str,
)
def test_lowered(shape, dtype, mask, scaled):
    """A row is read by one launch, or by two if many CTAs share it."""
    v, count, cluster = shape
    plan = plan_softmax("token_stats", 5, v, dtype)
    if count is not None:
        plan = Parts(v, 16 // jnp.dtype(dtype).itemsize, 4, count, cluster)
    text = lowered(
        lambda x, labels, where, t: stats.kernel_stats(plan, x, labels, where, t, rank=scaled),
        array(5, v, dtype=dtype),
        array(5, dtype="int32"),
        mask_of(mask, 5, v),
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
def test_one_lowered_kernel_per_call(name, x64):
    """Labels and the temperature may be traced. The gradient is plain JAX."""
    args = array(3, 128, 16384, dtype="bfloat16"), array(3, 128, dtype="int32"), array(3, 128)
    with jax.enable_x64(x64):
        assert kernel_names(lowered(TRANSFORMS[name], *args)) == ["token_stats_forward"]


check = stats.check_of(functools.partial(ps.token_stats, implementation="mosaic_gpu", rank=True))

# Rows in registers, in one CTA, in clusters, in two launches.
ON_A_GPU = [
    (1, "float32", False), (127, "float16", True), (1000, "bfloat16", False), (1003, "float16", True),
    (5000, "float32", False), (25000, "bfloat16", True), (50257, "float32", True), (128256, "bfloat16", False),
    (262144, "float32", False), (3000001, "float32", False),
]  # fmt: skip


@on_a_gpu
@pytest.mark.parametrize(("v", "dtype", "options"), ON_A_GPU)
def test_numbers_and_gradients_on_a_gpu(v, dtype, options):
    """With options, there are a mask and temperatures."""
    check(v, dtype, masked=options, scaled=options)


@on_a_gpu
@pytest.mark.parametrize("v", [25000, 50257, 128256, 262144])
def test_plans_of_many_rows_on_a_gpu(v):
    x, labels = stats.rows(v, "bfloat16"), stats.operands(v)[0]
    plan = plan_softmax("token_stats", 4000, v, "bfloat16")
    stats.assert_stats(stats.kernel_stats(plan, x, labels), x, labels)


@on_a_gpu
@pytest.mark.parametrize("v", [127, 1000, 25000, 262144])
def test_argmax_of_subnormal_numbers_on_a_gpu(v):
    x = np.full((4, v), -1, "float32")
    x[0, [0, v // 2, v - 1]] = 0, 2.0**-130, 2.0**-129
    x[1, [0, v // 3, v - 1]] = -(2.0**-130), -0.0, 0
    x[2, [0, v // 3, v - 1]] = -(2.0**-129), -(2.0**-130), -(2.0**-130)
    x[3, [1, v // 2]] = 2.0**-130
    got = ps.token_stats(x, implementation="mosaic_gpu").argmax
    np.testing.assert_array_equal(got, [v - 1, v // 3, v // 3, 1])


@on_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("v", [127, 1000, 25000, 50257, 262144, 3000001])
def test_ranks_on_a_gpu(v, dtype):
    """Ties, zeros, NaNs and -inf before and after the label, in every place of a vector and of a row."""
    rng = np.random.default_rng(v)
    x = np.round(2 * rng.standard_normal((24, v))).astype("float32")
    x[:4, ::2] = -0.0
    x[4:7, ::3], x[7:10, ::3], x[10:13, ::3] = np.nan, -np.nan, -np.inf
    labels = rng.integers(0, v, 24)
    labels[13:21], labels[21:] = np.arange(8) * (v // 8), (v - 1, -1, v)
    x, where = np.asarray(jnp.asarray(x, dtype)), rng.random((24, v)) < 0.7
    for mask in (None, where):
        got = ps.token_stats(x, labels, where=mask, rank=True, implementation="mosaic_gpu")
        np.testing.assert_array_equal(got.rank, oracle.rank(x, labels, mask))


@on_a_gpu
@pytest.mark.parametrize("v", [127, 1000, 25000, 50257, 262144, 3000001])
def test_differences_of_subnormal_numbers_at_temperature_0_on_a_gpu(v):
    """They count: only equal values tie."""
    x = np.full((3, v), -1, "float32")
    x[0, [0, v // 2, v - 1]] = 2.0**-130, 2.0**-149 + 2.0**-130, 2.0**-130
    x[1, [0, v // 3, v - 1]] = -(2.0**-149), 0, -0.0
    x[2, [1, v // 2]] = 1
    labels = np.array([0, v - 1, v // 2])
    got = ps.token_stats(x, labels, temperature=np.zeros(3, "float32"), implementation="mosaic_gpu")
    log_2 = np.log(2)
    np.testing.assert_allclose(got.entropy, [0, log_2, log_2], rtol=1e-6)
    np.testing.assert_allclose(got.log_probs, [-np.inf, -log_2, -log_2], rtol=1e-6)
    np.testing.assert_allclose(got.logsumexp, [np.inf, log_2, np.inf], rtol=1e-6)
