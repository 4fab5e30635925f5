"""The Mosaic GPU kernel of sample in Pallas's interpreter, with a plain JAX twin of its PTX."""

import numpy as np
import pytest

from pallas_softmax._src.sample.plan import plan_of
from tests.sample import kernels
from tests.support import cases
from tests.support.covering import first, slow
from tests.support.draws import all_combinations, assert_draws

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("masked", [False, slow(True)], ids=str)
@pytest.mark.parametrize(("v", "dtype", "warpgroups"), first(1, kernels.SAMPLE_LAYOUTS), ids=str)
def test_interpreted(v, dtype, warpgroups, masked):
    """The kernel puts rows into shared memory, masks them, and uses the parameters of the right row."""
    rows = cases.rows(["normal", "nan_last", "peaked"], v, dtype)
    where = np.random.default_rng(0).random(rows.shape) < 0.6 if masked else None
    rows = rows if where is None else cases.spoil_masked(rows, where)
    x, where, u, parameters, names = all_combinations(rows, where)
    some = slice(None, None, 29)  # 29 is prime, so that each row gets other filters
    x, u, names, parameters = x[some], u[some], names[some], [a[some] for a in parameters]
    where = None if where is None else where[some]
    plan = plan_of(v, dtype, 1, warpgroups)
    assert_draws(kernels.sample_rows(x, u, parameters, where, plan), x, u, names, parameters, where)
