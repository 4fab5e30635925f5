"""Rows that lie across memory, on a GPU: every kind of plan, and what the public functions choose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import bounds, cases, kernels, oracle
from tests.support.cases import BF16, F16, F32
from tests.support.covering import pairs
from tests.support.kernels import ALL, Strips, Tile

pytestmark = pytest.mark.gpu
EVEN = [*ALL, "normal"]


@pytest.fixture(autouse=True)
def _needs_hopper():
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if not gpus or float(gpus[0].compute_capability) < 9:
        pytest.skip("needs a GPU of compute capability 9.0 or newer")


# (plan, V, dtype, rows). Tiles of every number of lanes; clusters of every size, whose steps all stay in shared memory
# or not, and that take one strip or several; the last CTA of a cluster with fewer lines, or none.
PLANS = [
    (Tile(24, 32, 1, 1), 21, F32, ALL),
    (Tile(128, 8, 4, 1), 127, BF16, EVEN),
    (Tile(8, 128, 4, 1), 8, F16, EVEN),
    (Tile(1024, 2, 4, 1), 1000, F32, EVEN),
    (Strips(1000, 8, 4, 1, 128, 3, 1), 1000, F32, EVEN),
    (Strips(1000, 16, 4, 2, 64, 8, 2), 1000, BF16, EVEN),
    (Strips(1024, 8, 4, 4, 256, 1, 2), 1024, F16, EVEN),
    (Strips(5000, 16, 4, 8, 32, 2, 1), 5000, F32, EVEN),
    (Strips(25000, 16, 4, 16, 224, 7, 1), 25000, F32, EVEN),
    (Strips(3000, 16, 4, 16, 224, 1, 2), 3000, BF16, EVEN),
]


@pytest.mark.parametrize(("name", "case"), pairs(oracle.OPERATIONS, PLANS), ids=str)
def test_plans(name, case):
    plan, v, dtype, names = case
    kernels.assert_columns(name, cases.rows(names, v, dtype), names, plan, interpret=None)


SHAPES = [
    ((1, 2, 40), 1),
    ((2, 21, 1040), 1),
    ((3, 127, 517), 1),
    ((2, 1000, 264), 1),
    ((4096, 128), 0),
    ((50257, 64), 0),
    ((25000, 255), 0),
]


@pytest.mark.parametrize(("op", "case", "dtype"), pairs(oracle.FORWARD, SHAPES, [F32, BF16]), ids=str)
def test_forward_and_gradient(op, case, dtype):
    """Of the public function, twice: the same bits."""
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
