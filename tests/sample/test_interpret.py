"""The Mosaic GPU kernels of sample and filter_logits in Pallas's interpreter, with a plain JAX twin of its PTX."""

import pytest

from pallas_softmax._src.sample.plan import plan_of
from tests.sample import kernels
from tests.support.cases import BF16, F16, F32
from tests.support.covering import pairs
from tests.support.draws import all_combinations, assert_cutoffs, assert_draws, masked_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


# (V, dtype, warpgroups) of one CTA. Rows not aligned to 16 bytes, exact blocks; warpgroups with a whole step, a short
# step, or none.
LAYOUTS = [
    (1003, BF16, 2),
    (1024, F32, 1),
    (129, F16, 4),
    (2, BF16, 1),
    (4099, F32, 2),
    (4104, F16, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "masked", "kernel"), pairs(LAYOUTS, [False, True], ["sample", "filter_cutoff"]), ids=str
)
def test_interpreted(layout, masked, kernel):
    """The kernel puts rows into shared memory, masks them, and uses the parameters of the right row."""
    v, dtype, warpgroups = layout
    rows, where = masked_rows(["normal", "nan_last", "peaked"], v, dtype, masked)
    x, where, words, parameters, names = all_combinations(rows, where)
    some = slice(None, None, 19)  # 19 is prime, so that each row gets other filters
    x, words, names, parameters = x[some], words[some], names[some], [a[some] for a in parameters]
    where, plan = None if where is None else where[some], plan_of(v, dtype, 1, warpgroups)
    if kernel == "sample":
        got = kernels.sample_rows(x, words, parameters, where, plan)
        assert_draws(got, x, words, names, parameters, where)
    else:
        assert_cutoffs(kernels.sample_rows(x, None, parameters, where, plan), x, names, parameters, where)
