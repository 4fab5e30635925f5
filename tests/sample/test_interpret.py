"""The Mosaic GPU kernel of sample in Pallas's interpreter, with a twin of its PTX in plain JAX."""

import numpy as np
import pytest

from tests.support import cases, kernels
from tests.support.covering import first, slow
from tests.support.draws import all_combinations, assert_draws

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("masked", [False, slow(True)], ids=str)
@pytest.mark.parametrize(("v", "dtype", "warpgroups"), first(1, kernels.SAMPLE_LAYOUTS), ids=str)
def test_interpreted(v, dtype, warpgroups, masked):
    """Where rows lie in shared memory, what is masked there, and which row has which parameters."""
    rows = cases.rows(["normal", "nan_last", "peaked"], v, dtype)
    where = np.random.default_rng(0).random(rows.shape) < 0.6 if masked else None
    rows = rows if where is None else cases.spoil_masked(rows, where)
    x, where, u, parameters, names = all_combinations(rows, where)
    some = slice(None, None, 29)  # a prime: other filters for each row
    x, u, names, parameters = x[some], u[some], names[some], [a[some] for a in parameters]
    where = None if where is None else where[some]
    layout = kernels.sample_layout(v, dtype, 1, warpgroups)
    assert_draws(kernels.sample_rows(x, u, parameters, where, layout), x, u, names, parameters, where)
