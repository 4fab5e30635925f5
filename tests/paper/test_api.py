"""The paper's seven algorithms in Pallas's interpreter, in plain JAX, lowered for CUDA, and on a GPU."""

import csv
import math

import jax
import numpy as np
import pytest

from pallas_softmax import paper
from pallas_softmax._src.gpu import blocks
from tests.programs import paper_traffic
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, F32, F64
from tests.support.covering import first, pairs
from tests.support.gpu import on_a_gpu, run_under
from tests.support.lowering import array, kernel_names, lowered
from tests.support.twins import interpreted

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALGORITHMS = paper.SOFTMAX | paper.TOPK
MILD = ["normal", "integers", "constant", "zero", "ascending", "descending"]  # exp(x) and its sum are finite
# The paper's algorithms compare floats, so -0 and +0 are equal. XLA for CPUs flushes denormals.
ORDERED = [name for name in cases.FINITE if name not in ("signed_zeros", "denormals")]


def check(name, run, v, k=5, ordered=ORDERED):
    """Asserts that `run`, called with (x) or (x, k), is right on the rows that the algorithm supports."""
    if name in paper.SOFTMAX:
        rows = MILD if name == "naive" else ALL
        x = cases.rows(rows, v)
        want, unit = oracle.softmax(x), bounds.softmax_unit(x)
        if name == "naive":  # the argument of exp is x, not x - m
            size = np.abs(x.astype(F64))
            unit = unit + want * (size + np.sum(want * size, -1, keepdims=True))
        bounds.assert_close(run(x), want, unit, rows)
        return
    k = min(k, v)
    x = cases.rows(ordered, v)
    values, indices = map(np.asarray, run(x, k))
    best = oracle.topk_indices(x, k)
    if name == "topk":
        np.testing.assert_array_equal(values, np.take_along_axis(x, best, -1))
    else:
        bounds.assert_close(values, oracle.fused_topk(x, k)[0], bounds.fused_topk_unit(x, k), ordered)
    if name != "safe_unfused":
        np.testing.assert_array_equal(indices, best)
        return
    # probabilities that round to the same number tie, so any indices with these values are right
    assert all(len(set(row)) == k for row in indices)
    bounds.assert_close(
        np.take_along_axis(oracle.softmax(x), indices, -1).astype(F32),
        values,
        2 * bounds.fused_topk_unit(x, k),
        ordered,
    )


def check_overflow(run):
    """Asserts that exp(x) overflows above 88.7 in the naive algorithm only; `run` takes the algorithm's name and x."""
    x = np.array([[80, 0, 0], [89, 0, 0], [-1000, -1001, -1002]], F32)
    naive = np.asarray(run("naive", x))
    np.testing.assert_allclose(naive[0], [1, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(naive[1], [np.nan, 0, 0])  # inf / inf, 1 / inf
    assert np.isnan(naive[2]).all()  # 0 / 0
    for name in ("safe", "online"):
        bounds.assert_operation("softmax", run(name, x), (x,), "abc")


# V: less than a block, about a block, and several steps with a short one at the end.
VOCABS = (1, 63, 128, 1100)


@pytest.mark.parametrize(("name", "v"), first(1, pairs(ALGORITHMS, VOCABS)))
def test_kernels_in_the_interpreter(name, v):
    with interpreted():
        check(name, ALGORITHMS[name].kernel, v)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_plain(name):
    static = {} if name in paper.SOFTMAX else {"static_argnums": 1}
    check(name, jax.jit(ALGORITHMS[name].plain, **static), 1003)


def test_loads():
    """Few rows get more loads in flight, as many as the registers allow."""
    assert [paper._loads(10, k) for k in (1, 5, 10, 30, 128)] == [16, 16, 8, 2, 1]
    assert [paper._loads(4000, k) for k in (1, 5, 10, 30, 128)] == [8, 8, 8, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False])
def test_naive_softmax_overflows(kernel):
    def run(name, x):
        algorithm = paper.SOFTMAX[name]
        with interpreted():
            return algorithm.kernel(x) if kernel else algorithm.plain(x)

    check_overflow(run)


@pytest.mark.slow
def test_elements_that_cannot_win():
    """As in the paper, an element that is not above -inf gets no index."""
    x = np.full((2, 6), -np.inf, F32)
    x[0, 4], x[1, 1], x[1, 2] = 1, np.nan, 3
    with interpreted():
        values, indices = paper.TOPK["topk"].kernel(x, 3)
        fused, _ = paper.TOPK["online_fused"].kernel(x[:1], 3)
    np.testing.assert_array_equal(indices, [[4, -1, -1], [2, -1, -1]])
    np.testing.assert_array_equal(values, [[1, -np.inf, -np.inf], [3, -np.inf, -np.inf]])
    np.testing.assert_array_equal(fused, [[1, 0, 0]])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_accesses(name, monkeypatch):
    """A kernel reads and writes the row as often as the paper counts. test_bytes_on_a_gpu measures the bytes."""
    accesses = []
    for function in (blocks.load_from_row, blocks.store_to_row):

        def counted(*args, function=function, **kwargs):
            accesses.append(function.__name__)
            return function(*args, **kwargs)

        monkeypatch.setattr(blocks, function.__name__, counted)
    arguments = () if name in paper.SOFTMAX else (5,)
    lowered(lambda x: ALGORITHMS[name].kernel(x, *arguments), array(3, 128))  # the row is one block
    assert len(accesses) == ALGORITHMS[name].accesses
    assert accesses.count("store_to_row") == (name in paper.SOFTMAX or name == "safe_unfused")


SHAPES = pairs(ALGORITHMS, [(7, 7), (63, 5), (8257536, 5)]) + [("online_fused", (25000, paper.MAX_K))]


@pytest.mark.parametrize(("name", "shape"), first(1, SHAPES), ids=str)
def test_lowering(name, shape):
    v, k = shape
    arguments = () if name in paper.SOFTMAX else (k,)
    kernels = ["paper_safe", "paper_topk"] if name == "safe_unfused" else [f"paper_{name}"]
    assert kernel_names(lowered(lambda x: ALGORITHMS[name].kernel(x, *arguments), array(10, v))) == kernels


def test_errors():
    x = np.zeros((3, 200), F32)
    for wrong in (x[0], x[:, :0], x.astype("float16")):
        with pytest.raises(ValueError, match=r"x must be float32 of shape \(rows, V\)"):
            paper.SOFTMAX["online"].kernel(wrong)
    for k in (0, 129):
        with pytest.raises(ValueError, match=f"k must be from 1 to 128, and at most V=200; got {k}"):
            paper.TOPK["topk"].kernel(x, k)
    with pytest.raises(TypeError, match="k must be an integer"):
        paper.TOPK["topk"].kernel(x, 2.5)


@on_a_gpu
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("v", [1, 63, 1003, 32256])
def test_on_a_gpu(name, v):
    static = {} if name in paper.SOFTMAX else {"static_argnums": 1}
    run = jax.jit(ALGORITHMS[name].kernel, **static)
    for k in (5, 30) if v == 32256 and static else (5,):
        check(name, run, v, k, ordered=[n for n in cases.FINITE if n != "signed_zeros"])


@on_a_gpu
def test_overflow_on_a_gpu():
    check_overflow(lambda name, x: jax.jit(paper.SOFTMAX[name].kernel)(x))


@on_a_gpu
@pytest.mark.alone
def test_bytes_on_a_gpu():
    """The GPU's counters of device memory agree with the bytes that the paper counts."""
    counters = ["dram__bytes_read.sum", "dram__bytes_write.sum"]
    options = ["--clock-control", "none", "--kernel-name", "regex:paper", "--metrics", ",".join(counters)]
    done = run_under("ncu", *options, "--csv", "--print-units", "base", script="paper_traffic.py")
    if "ERR_NVGPUCTRPERM" in done.stdout:
        pytest.skip("this user may not read the GPU's performance counters")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    array_bytes = 4 * math.prod(paper_traffic.SHAPE)
    accesses = {counter: [] for counter in counters}
    for line in csv.DictReader(lines):
        value = float(line["Metric Value"].replace(",", ""))
        accesses[line["Metric Name"]].append(value / array_bytes)
    reads, writes = accesses.values()
    # naive, safe, online; top-k; safe and then top-k; safe fused, online fused
    np.testing.assert_allclose(reads, [2, 3, 2, 1, 3, 1, 2, 1], atol=0.03)
    # The last bytes stay in the L2 cache.
    np.testing.assert_allclose(writes, [1, 1, 1, 0, 1, 0, 0, 0], atol=0.06)
    launches = np.add(reads, writes)
    launches[4:6] = launches[4:6].sum()
    counted = [algorithm.accesses for algorithm in ALGORITHMS.values()]
    np.testing.assert_allclose(np.delete(launches, 5), counted, atol=0.06)
