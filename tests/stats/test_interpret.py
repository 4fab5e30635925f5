"""The kernels of token_stats in Pallas's interpreter, against the oracle; test_gpu.py runs their inline PTX."""

import numpy as np
import pytest

from pallas_softmax._src.gpu.layout import Tile
from tests.softmax.kernels import PARTS, plan_softmax
from tests.support import stats
from tests.support.cases import BF16, F16, F32
from tests.support.twins import INTERPRET, fewer_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")
TILES = [(1000, F32), (129, BF16), (7, F16), (1, F32), (2, BF16), (128, F16), (1003, BF16)]
LOST_NAN = pytest.mark.xfail(
    reason="the interpreter loses a NaN, as XLA's maximum for CPUs does; test_gpu.py has the same rows"
)
STEPS = pytest.param(5000, F32, marks=LOST_NAN)
WITHOUT_TURNS = [(plan, dtype) for plan, dtype, _ in PARTS if plan.slots is None]  # no plan has turns


def assert_kernel(plan, v, dtype, masked, scaled):
    x = np.asarray(stats.rows(v, dtype))
    labels, _, where, t = stats.operands(v)
    where = where if masked else None
    got = stats.kernel_stats(plan, x, labels, where, t if scaled else None, INTERPRET, rank=scaled or masked)
    stats.assert_stats(got, x, labels, where, t if scaled else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(False, False), (True, True)], ids=str)
@pytest.mark.parametrize(("v", "dtype"), [*TILES, STEPS])
def test_short_rows(v, dtype, options):
    plan = plan_softmax("token_stats", stats.N, v, dtype)
    assert isinstance(plan, Tile)
    assert_kernel(fewer_rows(plan), v, dtype, *options)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(WITHOUT_TURNS)))
def test_long_rows(case):
    plan, dtype = WITHOUT_TURNS[case]
    assert_kernel(plan, plan.vocab, dtype, case % 2 == 0, case % 3 == 0)
