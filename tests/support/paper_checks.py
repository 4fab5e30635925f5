"""Checks of the paper's seven algorithms, in the interpreter and on a GPU."""

import numpy as np

from pallas_softmax import paper
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, F32, F64

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
