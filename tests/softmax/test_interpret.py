"""The Mosaic GPU kernels of softmax, log_softmax and logsumexp in Pallas's interpreter, against the oracle.

The interpreter replaces inline PTX by a twin in plain JAX; test_gpu.py runs the PTX itself.
"""

import numpy as np
import pytest

from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.plan import Parts
from tests.softmax import kernels
from tests.softmax.kernels import PARTS, READ_AGAIN
from tests.support import bounds, cases, oracle, plans
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.covering import first, pairs, parameter_id
from tests.support.twins import fewer_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

# (V, dtype, rows), with the package's plans. Rows over 2 to 128 lanes, several to a CTA; whole vectors and single
# elements; several vectors per lane.
TILES = [
    (129, F32, FEW[:1]),
    (7, F16, FEW),
    (1000, F32, ALL),
    (2, BF16, FEW),
    (127, F32, FEW),
    (128, BF16, FEW),
]
TILES += [(1003, F16, FEW), (5000, F32, FEW[:3]), (1, F32, FEW), (129, F16, FEW), (1000, BF16, ALL)]
CASES = first(1, pairs(oracle.OPERATIONS, TILES)) + first(1, pairs(oracle.OPERATIONS[::-1], PARTS))
CASES += first(0, pairs([*oracle.BACKWARD, "softmax"], READ_AGAIN))  # some steps are read twice


@pytest.mark.parametrize(("name", "rows"), CASES, ids=parameter_id)
def test_rows(name, rows):
    plan, dtype, names = rows
    if isinstance(plan, int):
        tile = kernels.plan_softmax(name, len(names), plan, dtype)
        assert isinstance(tile, Tile)
        if name == "logsumexp" and dtype != F32:  # XLA for CPUs loses the NaN in max(x.astype("float32"), 1)
            names = [n for n in names if n not in ("nan_and_inf", "everything")]
        kernels.assert_softmax(name, cases.rows(names, plan, dtype), names, plan=fewer_rows(tile))
        return
    assert bool(plan.again) == (rows in READ_AGAIN)
    kernels.assert_softmax(name, cases.rows(names, plan.vocab, dtype), names, plan=plan)


def test_parts_cover_every_kind():
    """Parts that are aligned to 16 bytes or not; views with one dimension and with two; parts that overlap."""
    found = {(*plans.views([(len(names), plan)]), plan.has_edges) for plan, _, names in PARTS}
    assert found == {(2, False), (2, True), (1, True)}
    assert any(plan.length * plan.count > plan.vocab for plan, *_ in PARTS)


# (plan, pattern). Every broadcast for short rows; for long rows mostly broadcasts that differ along the row.
MASKED = [
    (None, "bhqv"),
    (Parts(1003, 4, 2, 2, False), "b11v"),
    (Parts(1024, 4, 2, 1, True), "1hqv"),
    (None, "1h11"),
    (Parts(1003, 4, 2, 1, True), "bhqv"),
    (None, "b11v"),
    *((None, pattern) for pattern in ("111v", "bhq1", "b1q1", "1hqv", "1111")),
    (Parts(1003, 4, 2, 2, False), "bhq1"),
    (Parts(1024, 4, 2, 1, True), "1h11"),
    (Parts(1003, 4, 1, 1, True, teams=4, slots=3), "bhqv"),
]


@pytest.mark.parametrize(
    ("masked", "name"),
    first(1, pairs(MASKED, ["log_softmax", "logsumexp", "softmax", "log_softmax_grad"])),
    ids=str,
)
def test_where(masked, name):
    """Masked elements are NaN or infinite. The first row of the mask keeps nothing, and another row keeps only -inf."""
    plan, pattern = masked
    shape = (*cases.BATCH, plan.vocab if plan else 100)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], shape[-1]), shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    kernels.assert_softmax(name, x, names, cases.broadcast_mask(pattern, shape), plan)


AXES = [("logsumexp", (0,)), ("logsumexp", (0, 1)), ("logsumexp", (0, 2))]
# The inverse of the permutation that moves (0, 1) differs from it.
AXES += [("softmax_grad", axes) for axes in ((0, 1), (0, 2), (0,), (0, 1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), AXES, ids=str)
def test_axes(name, axes):
    """Any axes give the same bits as moved to the end, with a mask that may lack one of the axes."""
    rng = np.random.default_rng(4)
    arrays = rng.standard_normal((2 if name in oracle.BACKWARD else 1, 40, 3, 50)).astype(F32)
    where = rng.random((1, 3, 50)) < 0.7

    def folded(a):
        moved = np.moveaxis(a, axes, range(-len(axes), 0))
        return moved.reshape(*moved.shape[: -len(axes)], -1)

    plan = Parts(6000, 4, 4, 1, True) if len(axes) == 3 else None  # the interpreter has no clusters
    got = kernels.softmax_rows(name, arrays, where, axes, plan)
    rows = [folded(a) for a in arrays]
    want = kernels.softmax_rows(name, rows, folded(np.broadcast_to(where, arrays[0].shape)), plan=plan)
    np.testing.assert_array_equal(folded(got), want)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Parts(1003, 4, 2, 2, False), Parts(1003, 4, 2, 1, True), None], ids=str)
def test_normalizer_of_logsumexp(plan):
    """logsumexp returns the normalizer for its gradient; m is exact."""
    x = cases.rows(ALL, 1003)
    _, m, d = kernels.softmax_results("logsumexp", (x,), plan=plan)
    want_m, want_d = oracle.normalizer(x)
    bounds.assert_close(m, want_m, np.zeros_like(want_m), ALL)
    bounds.assert_close(d, want_d, bounds.normalizer_unit(x), ALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "name"), pairs([None, Parts(128 * 3, 4, 2, 1, True)], oracle.BACKWARD), ids=str
)
def test_special_cotangents(plan, name):
    v = plan.vocab if plan else 128
    names = [n for n in ALL if n != "huge"]  # its sum may overflow in float32
    y, _ = cases.operands(name, cases.rows(["normal"], v).repeat(len(names), 0))
    arrays = y, cases.rows(names, v)
    bounds.assert_operation(name, kernels.softmax_rows(name, arrays, plan=plan), arrays, names)
