"""The inline PTX of routers, run in numpy (tests/support/ptx.py), against numpy."""

import functools

import numpy as np
import pytest

from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.route.formulas import Groups
from pallas_softmax._src.route.scores_ptx import exponentials_program, groups_program
from tests.route import kernels
from tests.support import oracle, ptx
from tests.support.cases import F32
from tests.support.covering import first
from tests.topk.kernels import assert_merged, near_keys

# (experts, groups): lanes that hold two groups; one group; half a group; a quarter. A group of one expert.
GROUPED = [(64, 8), (256, 8), (384, 8), (160, 8), (1024, 4), (8, 8)]
GROUP_BEST = [
    (64, 8, 2), (256, 8, 1), (1024, 4, 3), (8, 8, 1), (256, 8, 2), (384, 8, 2), (160, 8, 4),
    (1024, 4, 2),
]  # fmt: skip
LOWEST = -(2**31)


def rows_of_groups(rng, shape, kind):
    if kind == "ties":
        return rng.integers(0, 3, shape).astype(F32)
    x = rng.standard_normal(shape).astype(F32)
    if kind == "special":
        x[rng.random(shape) < 0.1] = np.inf
        x[rng.random(shape) < 0.1] = -np.inf
        x[rng.random(shape) < 0.02] = np.nan
    return x


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize(("experts", "groups", "group_best"), first(4, GROUP_BEST))
def test_groups(experts, groups, group_best, kind):
    """Experts of the best groups keep their keys; of groups that tie, the lowest take part."""
    tile = kernels.plan_route(experts, 4, F32, biased=True, groups=groups)
    x = rows_of_groups(np.random.default_rng(experts), (tile.rows, experts), kind)
    keys = oracle.order_key(x).astype("int64")
    code = groups_program(tile, Groups(groups, 3, group_best))
    machine = ptx.run_on_tile(code, ptx.held_by_threads(tile, keys))
    of_groups = keys.reshape(tile.rows, groups, -1)
    best = np.sort(of_groups, -1)[..., ::-1][..., :group_best]
    bits = np.where(best < 0, best ^ 0x7FFFFFFF, best).astype("int32")
    with np.errstate(all="ignore"):
        rank = functools.reduce(np.add, np.moveaxis(bits.view(F32), -1, 0))
    rank = np.where(np.isnan(rank), np.float32(np.nan), rank)
    order = np.argsort(-oracle.order_key(rank).astype("int64"), -1, kind="stable")[:, :3]
    takes_part = (order[..., None] == np.arange(groups)).any(1)
    want = np.where(takes_part[..., None], of_groups, LOWEST).reshape(keys.shape)
    np.testing.assert_array_equal(ptx.tile_of(machine, tile, "kept"), want)


@pytest.mark.parametrize("kind", ["normal", "few", "many", "ties"])
@pytest.mark.parametrize(("experts", "groups"), first(1, GROUPED))
def test_merges_of_pieces(experts, groups, kind):
    """The k best of rows that are cut into pieces, with lower columns first among ties, in few lanes only."""
    k = min(8, experts // 2)
    tile = kernels.plan_route(experts, k, F32, biased=True, groups=groups)
    keys = near_keys(np.random.default_rng(k), tile.shape, kind)
    of_groups = keys.reshape(tile.rows, groups, -1)
    of_groups[:, groups // 2 :] = LOWEST
    assert_merged(tile, experts, k, keys, tile.lanes / 2)


def exponentials(tile, score, x):
    """Returns e, and m and d of each row, (rows, 1)."""
    machine = ptx.run_on_tile(exponentials_program(tile, score), ptx.held_by_threads(tile, x.view("i4")))
    per_row = []
    for name in "md":
        found = [machine.registers[f"%{name}{row}"] for row in range(tile.rows // (128 // tile.lanes))]
        found = np.array(found).astype("uint32").view(F32).reshape(-1, 128 // tile.lanes, tile.lanes)
        found = found.reshape(tile.rows, tile.lanes)
        np.testing.assert_array_equal(found, np.broadcast_to(found[:, :1], found.shape))
        per_row.append(found[:, :1])
    return ptx.tile_of(machine, tile, "e", "float32"), *per_row


@pytest.mark.parametrize("tile", [Tile(16, 8, 4, 8), Tile(128, 2, 4, 1), Tile(4, 32, 1, 5)], ids=str)
@pytest.mark.parametrize("other", [20, np.nan])
def test_exponentials_of_a_row_do_not_depend_on_other_rows(tile, other):
    x = np.random.default_rng(0).standard_normal(tile.shape).astype(F32)
    beside = x.copy()
    beside[:2] += other
    for score in ("softmax", "sigmoid"):
        for a, b in zip(exponentials(tile, score, x), exponentials(tile, score, beside)):
            np.testing.assert_array_equal(a[2:], b[2:])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tile", [Tile(16, 8, 4, 8), Tile(128, 2, 4, 1), Tile(4, 32, 1, 5)], ids=str)
@pytest.mark.parametrize("is_exact", [True, False])
def test_exponentials(tile, score, is_exact):
    """Rows with a sum that is neither large nor small; and some near both ends, beyond them, and with special numbers.

    The largest logit of a row is subtracted if its sum is out of range.
    """
    rng = np.random.default_rng(tile.lanes)
    x = rng.standard_normal(tile.shape).astype(F32)
    if not is_exact:
        far = np.array([-1000, -87, -30, -10, 0, 10, 16, 30, 87, 300], F32)
        x[::2] += rng.choice(far, (len(x[::2]), 1))
        x[1, 0], x[2, 1], x[3] = np.inf, np.nan, -np.inf
    x[0, 2] = -np.inf
    e, m, d = exponentials(tile, score, x)
    m, d = m.astype("f8"), d.astype("f8")
    assert not is_exact or not m.any()
    with np.errstate(all="ignore"):
        lse = np.where(m == np.inf, m, m + np.log(d))
        np.testing.assert_allclose(lse[:, 0], oracle.logsumexp(x, -1), rtol=3e-7, atol=2e-6)
        if score == "softmax":
            got, want = e / d, oracle.softmax(x)
        else:
            got, want = e.astype("f8") / (1 + e.astype("f8")), 1 / (1 + np.exp(-x.astype("f8")))
        np.testing.assert_allclose(got, want, rtol=4e-5, atol=1e-30)
