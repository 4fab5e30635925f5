"""The Mosaic GPU kernels of sample and filter_logits in Pallas's interpreter, with a plain JAX twin of its PTX."""

import pytest

from pallas_softmax._src.sample.plan import plan_of
from tests.sample import kernels
from tests.support.covering import first, slow
from tests.support.draws import all_combinations, assert_cutoffs, assert_draws, masked_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("masked", [False, slow(True)], ids=str)
@pytest.mark.parametrize(("v", "dtype", "warpgroups"), first(1, kernels.SAMPLE_LAYOUTS), ids=str)
def test_interpreted(v, dtype, warpgroups, masked):
    """The kernel puts rows into shared memory, masks them, and uses the parameters of the right row."""
    rows, where = masked_rows(["normal", "nan_last", "peaked"], v, dtype, masked)
    x, where, words, parameters, names = all_combinations(rows, where)
    some = slice(None, None, 19)  # 19 is prime, so that each row gets other filters
    x, words, names, parameters = x[some], words[some], names[some], [a[some] for a in parameters]
    where = None if where is None else where[some]
    plan = plan_of(v, dtype, 1, warpgroups)
    assert_draws(kernels.sample_rows(x, words, parameters, where, plan), x, words, names, parameters, where)
    assert_cutoffs(kernels.sample_rows(x, None, parameters, where, plan), x, names, parameters, where)
