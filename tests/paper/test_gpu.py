"""The paper's algorithms on a GPU: results, and the bytes that they read and write."""

import csv
import math

import jax
import numpy as np
import pytest

from pallas_softmax import paper
from tests.programs import paper_traffic
from tests.support import cases, paper_checks
from tests.support.gpu import run_under

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


@pytest.mark.parametrize("name", paper_checks.ALGORITHMS)
@pytest.mark.parametrize("v", [1, 63, 1003, 32256])
def test_paper(name, v):
    static = {} if name in paper.SOFTMAX else {"static_argnums": 1}
    run = jax.jit(paper_checks.ALGORITHMS[name].kernel, **static)
    for k in (5, 30) if v == 32256 and static else (5,):
        paper_checks.check(name, run, v, k, ordered=[n for n in cases.FINITE if n != "signed_zeros"])


def test_paper_overflow():
    paper_checks.check_overflow(lambda name, x: jax.jit(paper.SOFTMAX[name].kernel)(x))


@pytest.mark.alone
def test_paper_accesses():
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
    counted = [algorithm.accesses for algorithm in paper_checks.ALGORITHMS.values()]
    np.testing.assert_allclose(np.delete(launches, 5), counted, atol=0.06)
