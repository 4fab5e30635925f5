"""The selection of many winners on a GPU: every kind of plan and row, and the same order in each run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gpu import side_by_side
from tests.topk import select
from tests.topk.select import PLANS, assert_rows, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


@pytest.mark.parametrize("kind", ["whole", "length", "mask", "both"])
@pytest.mark.parametrize(("plan", "dtype"), PLANS, ids=str)
@side_by_side
def test_plans(plan, dtype, kind):
    """A thousand rows, so that CTAs start while others run; the same bits in each run."""
    if plan.in_registers and kind in ("mask", "both"):
        pytest.skip("masked rows are not held in registers")
    v, k, rng = plan.vocab, plan.k, np.random.default_rng(0)
    x = np.stack([*rows_of(v, k, jnp.dtype(dtype)).values()])
    lengths = rng.integers(-1, v + 3, len(x)) if kind in ("length", "both") else None
    where = (
        rng.random(x.shape) < rng.choice([0.02, 0.5, 0.9], (len(x), 1)) if kind in ("mask", "both") else None
    )
    repeated = functools.partial(np.resize, new_shape=(1020, v))
    select_rows = jax.jit(functools.partial(select.select_rows, k=k, plan=plan, interpret=None))
    of_rows = {
        "where": None if where is None else repeated(where),
        "lengths": None if lengths is None else np.resize(lengths, 1020),
    }
    runs = [jax.tree.map(np.asarray, select_rows(repeated(x), **of_rows)) for _ in range(2)]
    assert_rows(runs[0], x, k, where, lengths)
    for a, b in zip(*runs):
        np.testing.assert_array_equal(a.view("u1"), b.view("u1"))
    # Rows with other addresses have other samples, so the same winners may come in another order.
    order = np.argsort(runs[0].indices, -1)
    for a in runs[0]:
        a = np.take_along_axis(a, order, -1)
        first = a[: len(x)].view("u1")
        np.testing.assert_array_equal(a.view("u1"), np.resize(first, (1020, *first.shape[1:])))
