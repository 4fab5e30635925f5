"""Every Mosaic GPU kernel in Pallas's interpreter on the CPU, against the oracle.

What the kernels do by inline PTX has a plain twin here; the GPU runs the PTX itself (test_gpu.py).
"""

import cases
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, F16, F32

from pallas_softmax.mosaic_gpu import candidates, softmax_kernel, topk_kernel

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams()
ALL = [*cases.FINITE, *cases.SPECIAL]  # 31 rows, a prime
FEW = ["normal", "peaked", "integers", "ascending", "everything", "neg_inf_last", "nan_last"]

# In float32, in units of eps (see oracle.py). Half a unit each for x - m, its product with log2(e), the sum's
# reciprocal and the product with it, one or two for exp; the sum's chains are short (a lane adds V / 512) and
# its terms positive, so a relative error there stays of the order of a unit.
UNITS = 4.0


def assert_close(got, want, unit, names, slack=1.0):
    """Within UNITS in float32; a 16-bit result is that, rounded once. `slack` scales what flushing may cost."""
    got = np.asarray(got)
    limit = UNITS
    if got.dtype in (BF16, F16):
        unit, limit = oracle.stored_unit(want, unit, got.dtype), 1.0
    slack = np.broadcast_to(slack, got.shape)
    for i, name in enumerate(names):
        error = oracle.error_units(got[i], want[i], unit[i], slack_times=slack[i])
        assert error <= limit, f"{name}: {error} units"


def assert_softmax(got, x, names):
    assert got.dtype == x.dtype
    assert_close(got, oracle.softmax(x), oracle.softmax_unit(x), names)


def assert_softmax_grad(got, y, dy, names):
    """Against the formula on y itself, as the kernel gets it: already rounded."""
    assert got.dtype == y.dtype
    y, dy = y.astype(np.float64), dy.astype(np.float64)
    with np.errstate(all="ignore"):
        want = y * (dy - np.sum(y * dy, -1, keepdims=True))
        scale = np.abs(dy) + np.sum(np.abs(y * dy), -1, keepdims=True)
    # a denormal y may be flushed before it is scaled; those of float16 are no denormals in float32
    assert_close(got, want, np.abs(y) * scale, names, slack=1 if got.dtype == F16 else 1 + scale)


def probabilities(names, v, dtype):
    with np.errstate(all="ignore"):
        return oracle.softmax(cases.rows(names, v, dtype)).astype(dtype)


def assert_topk(x, temperature, k, names):
    """Indices exactly, logits bit for bit, and by the normalizer the probabilities of the winners."""
    winners, (m, d) = topk_kernel.topk_rows(x, jnp.asarray(temperature), k, interpret=INTERPRET)
    want, indices = oracle.fused_topk(x, k, temperature=_scalar(temperature))
    assert winners.indices.dtype == jnp.int32
    for i, name in enumerate(names):
        np.testing.assert_array_equal(winners.indices[i], indices[i], err_msg=name)
    logits = np.take_along_axis(x, indices, -1).astype(F32)
    np.testing.assert_array_equal(np.asarray(winners.values).view(np.int32), logits.view(np.int32))
    assert m.shape == d.shape == (len(x), 1)
    t = np.reshape(temperature, (-1, 1))
    with np.errstate(all="ignore"):
        p = np.exp((logits - np.asarray(m)) / t) / np.asarray(d)
    # 1 / temperature is rounded once, and multiplied: one more unit each way
    unit = 1.5 * oracle.fused_topk_unit(x, k, temperature=_scalar(temperature))
    assert_close(p.astype(F32), want, unit, names)


def _scalar(temperature):
    return temperature[0] if temperature.size == 1 else temperature


ONE = np.ones(1, F32)


# --- softmax ------------------------------------------------------------------------------------------

# From less than one access of every thread over exact blocks to several steps; all aligned to 16 bytes only.
SOFTMAX = [
    (4, F32, ALL),
    (128, F32, FEW),
    (1000, F32, ALL),
    (4096 + 8, F32, FEW[:4]),
    (10000, F32, FEW[:4]),
    (8, BF16, FEW),
    (1000, BF16, ALL),
    (10000, BF16, FEW[:4]),
    (8, F16, FEW),
    (4096 + 8, F16, FEW),
]
softmax_cases = pytest.mark.parametrize(
    ("v", "dtype", "names"), SOFTMAX, ids=[f"{v}-{d}" for v, d, _ in SOFTMAX]
)


@softmax_cases
def test_softmax(v, dtype, names):
    x = cases.rows(names, v, dtype)
    assert_softmax(softmax_kernel.softmax_rows(x, interpret=INTERPRET), x, names)


@softmax_cases
def test_softmax_grad(v, dtype, names):
    """dy has outliers; the rows of y that are NaN make the gradient NaN."""
    y = probabilities(names, v, dtype)
    dy = np.resize(cases.rows(["peaked", "normal", "integers"], v, dtype), y.shape)
    assert_softmax_grad(softmax_kernel.softmax_grad_rows(y, dy, interpret=INTERPRET), y, dy, names)


def test_softmax_grad_of_special_cotangents():
    dy = cases.rows(ALL, 128)
    y = probabilities(["normal"], 128, F32).repeat(len(ALL), 0)
    finite = [i for i, name in enumerate(ALL) if name != "huge"]  # its sum may overflow in float32
    got = np.asarray(softmax_kernel.softmax_grad_rows(y, dy, interpret=INTERPRET))
    assert_softmax_grad(got[finite], y[finite], dy[finite], [ALL[i] for i in finite])


# --- top-k --------------------------------------------------------------------------------------------

TOPK = [
    (4, F32, 1, FEW),
    (4, F32, 4, ALL),
    (128, F32, 5, ALL),
    (128, F32, 128, FEW),
    (1000, F32, 64, ALL),
    (4096 + 8, F32, 5, FEW),
    (10000, F32, 128, FEW),
    (8, BF16, 5, ALL),
    (1000, BF16, 1, FEW),
    (1000, BF16, 128, ALL),
    (10000, BF16, 5, FEW),
    (8, F16, 8, FEW),
    (1000, F16, 5, FEW),
    (4096 + 8, F16, 64, FEW),
]


@pytest.mark.parametrize(("v", "dtype", "k", "names"), TOPK, ids=[f"{v}-{d}-{k}" for v, d, k, _ in TOPK])
def test_topk(v, dtype, k, names):
    assert_topk(cases.rows(names, v, dtype), ONE, k, names)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_topk_with_a_temperature_per_row(dtype):
    names = list(cases.FINITE)
    assert_topk(cases.rows(names, 1000, dtype), np.geomspace(0.1, 10, len(names)).astype(F32), 5, names)


def test_topk_with_a_temperature_for_all_rows():
    assert_topk(cases.rows(FEW, 128), np.full(1, 0.7, F32), 5, FEW)


@pytest.mark.parametrize("k", [1, 5])
def test_one_row(k):
    x = cases.rows(["peaked"], 128)
    assert_topk(x, ONE, k, ["peaked"])
    if k == 1:
        assert_softmax(softmax_kernel.softmax_rows(x, interpret=INTERPRET), x, ["peaked"])


def crowded(v, k, dtype):
    """Rows, by name, where more keys reach any bound near the k-th best than the list has slots for."""
    at = np.arange(v)
    middle = (at > v // 3) & (at < v - 8)
    few = np.where(middle, 1.0, 0.0)
    few[-(k - 1) :] = 2 + np.arange(k - 1)  # k - 1 winners at the very end, the last among the ties
    late = np.where(at >= v - candidates.CAPACITY - 1, 3.0, 0.0)
    nans = np.where(at % 2, cases.NEG_NAN, np.nan)
    return {
        "constant": np.full(v, 1.5),  # bisection over positions only
        "all_neg_nan": np.full(v, cases.NEG_NAN),  # the lowest key: nothing is below the bound
        "k-1 winners after the ties": few,
        "one tie more than slots, at the end": late,
        "two values": np.where(at % 2, 1.0, -1.0),
        "half NaN, half -NaN": nans,
        "+0 and -0": np.where(at % 3, -0.0, 0.0),
        "-inf after one number": np.where(at == v - 1, 0.0, -np.inf),
        "k - 1 numbers, the rest -NaN": np.where(at < k - 1, 1.0, cases.NEG_NAN),
    }, {
        # distinct, but the best of them are in few lanes: bisection over keys
        "sorted by lane": -(at % 512) * 64.0 - at // 512,
        "sorted by lane, rising": (at % 512) * 64.0 + at // 512,
        "ascending": at - v / 2,
        "descending": v / 2 - at,
    }


@pytest.mark.parametrize(("dtype", "k"), [(F32, 5), (F32, 128), (BF16, 5), (F16, 64)], ids=str)
def test_more_candidates_than_slots(dtype, k):
    v = 4096 + 8
    tied, distinct = crowded(v, k, dtype)
    x = np.stack([*tied.values(), *distinct.values()]).astype(dtype)
    keys = oracle.order_key(x[: len(tied)])
    bound = np.take_along_axis(keys, oracle.topk_indices(x[: len(tied)], k)[:, -1:], -1)
    assert (np.sum(keys >= bound, -1) > candidates.CAPACITY).all()
    assert_topk(x, ONE, k, [*tied, *distinct])


def test_normal_logits_in_16_bits_tie():
    """As language models give them: hundreds of equal values, at a length that a user has."""
    x = np.random.default_rng(0).standard_normal((2, 25000)).astype(BF16)
    assert_topk(x, ONE, 5, ["0", "1"])
