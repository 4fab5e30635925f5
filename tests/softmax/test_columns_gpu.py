"""Softmax along other axes than the last on a GPU: every kind of plan, and the public functions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.columns_plan import Strips
from tests.softmax import kernels
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.covering import pairs
from tests.support.gpu import much_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]
EVEN = [*ALL, "normal"]


# (plan, V, dtype, rows). Tiles with every number of lanes; clusters of every size. Strips end with the array, and
# beyond it; the last CTA of a cluster has few lines, or none.
PLANS = [
    (Tile(24, 32, 1, 1), 21, F32, ALL),
    (Tile(128, 8, 4, 1), 127, BF16, EVEN),
    (Tile(8, 128, 4, 1), 8, F16, EVEN),
    (Tile(1024, 2, 4, 1), 1000, F32, EVEN),
    (Strips(1000, 8, 4, 1, 128, 8), 1000, F32, EVEN),
    (Strips(1000, 8, 4, 2, 64, 8), 1000, BF16, EVEN),
    (Strips(1024, 8, 4, 4, 256, 1), 1024, F16, EVEN),
    (Strips(5000, 8, 4, 8, 64, 10), 5000, F32, EVEN),
    (Strips(25000, 8, 4, 16, 256, 7), 25000, F32, EVEN),
    (Strips(3000, 8, 4, 16, 256, 1), 3000, BF16, EVEN),
    (Strips(1000, 64, 4, 16, 64, 1), 1000, BF16, EVEN * 5),
    # strips in turns: slots for one strip, for more than one, and for all; the last cluster takes fewer strips
    (Strips(127, 8, 4, 1, 64, 2, turns=4), 127, F32, EVEN),
    (Strips(1000, 8, 4, 2, 64, 11, turns=3), 1000, BF16, EVEN),
    (Strips(3000, 8, 4, 16, 64, 9, turns=3), 3000, F32, EVEN),
    (Tile(24, 128, 1, 3), 21, F32, EVEN * 13),
]


@pytest.mark.parametrize(("name", "case"), pairs(oracle.OPERATIONS, PLANS), ids=str)
def test_plans(name, case):
    plan, v, dtype, names = case
    kernels.assert_columns(name, cases.rows(names, v, dtype), names, plan, interpret=None)


SHAPES = [((1, 2, 40), 1), ((2, 21, 1040), 1), ((3, 127, 517), 1), ((2, 1000, 264), 1), ((4096, 128), 0)]
SHAPES += [((25000, 96), 0), ((50257, 96), 0), ((25000, 255), 0)]


@pytest.mark.parametrize(("dtype", "width"), [(F32, 32), (BF16, 64)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("op", oracle.OPERATIONS)
def test_strips_in_turns(op, dtype, width):
    """The slots of the one or two arrays fill a multiprocessor."""
    vocab, slots = (12000, 7) if op in oracle.BACKWARD else (25000, 15)
    names, plan = EVEN * 5, Strips(vocab, width, 4, 16, 112, slots, turns=2)
    kernels.assert_columns(op, cases.rows(names, vocab, dtype), names, plan, interpret=None)


@pytest.mark.parametrize("plan", [Strips(5000, 8, 4, 8, 64, 3), Strips(3000, 8, 4, 1, 64, 1)], ids=str)
def test_reused_slots(plan):
    """Columns that are only read use the same slots again."""
    kernels.assert_columns("logsumexp", cases.rows(EVEN, plan.vocab), EVEN, plan, interpret=None)


def test_more_clusters_than_fit():
    """With more clusters than the GPU has room for, no CTA exits while its cluster reads its shared memory."""
    rng = np.random.default_rng(3)
    arrays = [jnp.asarray(rng.standard_normal((1, 4096, 4096)), F32) for _ in range(2)]
    chosen = kernels.plan_columns("softmax_grad", 1, 4096, 4096, F32)
    turned = Strips(4096, 32, 4, 8, 64, 8, turns=5)
    for plan in (Strips(4096, 16, 4, 8, 128, 4), Strips(4096, 32, 4, 8, 64, 8), turned, chosen):
        run = jax.jit(functools.partial(kernels.columns_results, "softmax_grad", plan=plan, interpret=None))
        for _ in range(20):
            (dx,) = jax.block_until_ready(run(arrays))
        y, dy = (np.asarray(a[0, :, :8], np.float64) for a in arrays)
        want = y * (dy - np.sum(y * dy, 0))
        np.testing.assert_allclose(dx[0, :, :8], want, rtol=1e-4, atol=1e-2)


@much_memory
@pytest.mark.parametrize("shape", [(1, 1000, 2_200_000), (30_000, 21, 4096), (2, 25_000, 48_000)], ids=str)
def test_more_than_2_to_the_31_elements(shape):
    """Eight columns are repeated: all copies have the same bits, and the first ones are right."""
    few, (_, v, inner) = 8, shape
    x, dy = (np.random.default_rng(seed).standard_normal((few, v)).astype(BF16) for seed in (2, 3))

    @jax.jit
    def run(x, dy):
        repeated = jnp.arange(inner) % few
        across = [jnp.broadcast_to(a.T[:, repeated], shape) for a in (x, dy)]
        y, pullback = jax.vjp(lambda x: ps.softmax(x, axis=1, implementation="mosaic_gpu"), across[0])
        found = y, *pullback(across[1])
        first = [a[0, :, :few] for a in found]
        return [a.T for a in first], [jnp.all(a == b[:, repeated]) for a, b in zip(found, first, strict=True)]

    assert math.prod(shape) > 2**31
    assert all(kernels.plan_columns(op, *shape, BF16) for op in ("softmax", "softmax_grad"))
    (y, dx), same = run(x, dy)
    names = [f"column {i}" for i in range(few)]
    bounds.assert_operation("softmax", y, (x,), names)
    bounds.assert_operation("softmax_grad", dx, (np.asarray(y), dy), names)
    assert all(same)


@pytest.mark.parametrize(("op", "case", "dtype"), pairs(oracle.FORWARD, SHAPES, [F32, BF16]), ids=str)
def test_forward_and_gradient(op, case, dtype):
    """The public function is right, and a second run gives the same bits."""
    shape, axis = case
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype) * dtype.type(4)
    f = functools.partial(getattr(ps, op), axis=axis)
    y, pullback = jax.vjp(f, jnp.asarray(x))
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(dtype)
    (dx,) = pullback(jnp.asarray(dy))

    def rows(a):
        return np.moveaxis(np.asarray(a), axis, -1).reshape(-1, shape[axis])

    names = [f"row {i}" for i in range(x.size // shape[axis])]
    if op != "logsumexp":
        bounds.assert_operation(op, rows(y), [rows(x)], names)
        bounds.assert_operation(f"{op}_grad", rows(dx), [rows(y), rows(dy)], names)
    else:
        bounds.assert_operation(op, np.asarray(y).reshape(-1, 1), [rows(x)], names)
    np.testing.assert_array_equal(f(jnp.asarray(x)), y)
