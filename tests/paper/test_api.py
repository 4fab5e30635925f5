"""The paper's seven algorithms in Pallas's interpreter and in plain JAX, against the oracle, and lowered for CUDA."""

import jax
import numpy as np
import pytest

from pallas_softmax import paper
from pallas_softmax._src.gpu import blocks
from tests.support.cases import F32
from tests.support.covering import first, pairs
from tests.support.lowering import array, kernel_names, lowered
from tests.support.paper_checks import ALGORITHMS, check, check_overflow
from tests.support.twins import interpreted

pytestmark = pytest.mark.usefixtures("quick_compilation")

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
    """A kernel reads and writes the row as often as the paper counts. test_gpu.py measures the bytes."""
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
