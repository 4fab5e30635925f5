"""Softmax, log_softmax, logsumexp and their gradients on a GPU: shapes, dtypes, special rows, masks, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.softmax.plan import Parts
from tests.softmax import kernels
from tests.softmax.kernels import PARTS, READ_AGAIN
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.gpu import (
    LONG,
    VERY_LONG,
    assert_forward_and_grad,
    both,
    each,
    forward_and_grad,
    function,
    much_memory,
    of_repeated_rows,
    side_by_side,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


# Rows in registers, in one CTA, in a cluster, in a cluster with unequal parts, in two launches; one row, or a prime
# number of rows.
SHAPES = [(1, F32, ALL), (2, BF16, ALL), (127, F16, ALL), (128, F32, ALL), (129, BF16, ALL)]
SHAPES += [(1000, F32, ALL), (1000, F16, ALL), (1000, BF16, FEW[:1]), (20011, F32, ALL)]
SHAPES += [(50257, F32, LONG[:1]), (100003, F32, LONG[:1]), (200000, BF16, LONG[:1]), (50257, BF16, LONG)]
SHAPES += [(128256, F16, LONG), (151935, F32, VERY_LONG), (151935, BF16, LONG), (151936, BF16, VERY_LONG[:1])]
SHAPES += [(262144, F32, VERY_LONG), (262144, BF16, VERY_LONG), (1000003, F32, VERY_LONG[:2])]


@pytest.mark.parametrize(("v", "dtype", "names"), SHAPES, ids=[f"{len(n)}x{v}-{d}" for v, d, n in SHAPES])
@each
@both
@side_by_side
def test_forward_and_grad(implementation, op, v, dtype, names):
    assert_forward_and_grad(implementation, op, cases.rows(names, v, dtype), names)


MASKED = [("softmax", 1003, F32, pattern) for pattern in cases.BROADCASTS]
MASKED += [(op, 50257, BF16, p) for op in ("log_softmax", "logsumexp") for p in ("bhqv", "b11v", "1h11")]


@pytest.mark.parametrize(("op", "v", "dtype", "pattern"), MASKED, ids=str)
@both
@side_by_side
def test_where(implementation, op, v, dtype, pattern):
    shape = (*cases.BATCH, v)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], v, dtype), shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    assert_forward_and_grad(implementation, op, x, names, cases.broadcast_mask(pattern, shape))


CLUSTERS = [
    (Parts(1003, 4, 2, 2, True), F32, ALL),
    (Parts(2003, 8, 4, 4, True), BF16, [*ALL, "normal"]),
    (Parts(2048, 4, 1, 8, True), F32, FEW),
    (Parts(16 * 400, 8, 1, 16, True), F16, FEW),
    # rows in turns
    (Parts(1003, 4, 1, 2, True, teams=11, slots=3), F32, ALL),
    (Parts(2048, 4, 1, 8, True, teams=1, slots=1), F32, ALL),
    (Parts(16 * 400, 8, 1, 16, True, teams=4, slots=5), F16, FEW),
]

PLANS = [(*plan, False) for plan in PARTS + CLUSTERS] + [
    (*plan, True) for plan in [*CLUSTERS[:2], CLUSTERS[4]]
]


@pytest.mark.parametrize(("plan", "dtype", "names", "masked"), PLANS, ids=str)
@pytest.mark.parametrize("name", oracle.OPERATIONS)
def test_every_plan(name, plan, dtype, names, masked):
    x = cases.rows(names, plan.vocab, dtype)
    kernels.assert_softmax(
        name, x, names, cases.broadcast_mask("bv", x.shape) if masked else None, plan, interpret=None
    )


LONGEST = [(Parts(16 * 4000, 4, 1, 16, True, teams=4, slots=3), F32, FEW)]
LONGEST += [(Parts(16 * 8000 + 1, 8, 1, 16, True, teams=4, slots=5), BF16, FEW)]


@pytest.mark.parametrize(("plan", "dtype", "names"), READ_AGAIN + LONGEST, ids=str)
@pytest.mark.parametrize("name", [*oracle.BACKWARD, "softmax"])
def test_steps_that_are_read_twice(name, plan, dtype, names):
    kernels.assert_softmax(name, cases.rows(names, plan.vocab, dtype), names, plan=plan, interpret=None)


@pytest.mark.parametrize(
    ("name", "v", "dtype"),
    [
        ("softmax", 1_000_000, F32),
        ("log_softmax", 950_001, F32),
        ("softmax_grad", 500_009, F32),
        ("log_softmax_grad", 1_000_000, BF16),
    ],
    ids=str,
)
def test_rows_longer_than_a_cluster(name, v, dtype):
    names = FEW * 4
    plan = kernels.plan_softmax(name, len(names), v, dtype)
    assert plan.cluster and plan.again
    kernels.assert_softmax(name, cases.rows(names, v, dtype), names, interpret=None)


@both
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("v", [1000, 25000, 50257])
def test_both_modes(implementation, v, dtype):
    """softmax's tangent has the same bits as its gradient's kernel; the other tangents agree with plain JAX.

    Terms as large as dx's terms may cancel in a tangent, so the error is relative to these terms.
    """
    x, dx = (cases.rows(names, v, dtype) for names in (["normal", "peaked"], ["integers", "normal"]))

    def tangent(f):
        return jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(x, dx)

    got = tangent(function(implementation, "softmax"))
    want = jax.jit(lambda x, dx: jax.vjp(function(implementation, "softmax"), x)[1](dx)[0])(x, dx)
    np.testing.assert_array_equal(got, want)
    for f in (
        lambda x, name: function(name, "log_softmax")(x),
        lambda x, name: function(name, "logsumexp")(x),
        lambda x, name: ps.fused_topk(x, 5, log=True, implementation=name).values,
    ):
        got, want = (tangent(functools.partial(f, name=name)) for name in (implementation, "xla"))
        atol = 8 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(dx, "float64")).max()
        np.testing.assert_allclose(np.asarray(got, "float64"), np.asarray(want, "float64"), rtol=0, atol=atol)
        assert np.abs(np.asarray(got, "float64")).max() > 100 * atol or dtype == BF16


@pytest.mark.parametrize("shape", [(1031, 1000), (1031, 50257), (3, 1000003)], ids=str)
@each
@both
@side_by_side
def test_repeated_runs_give_the_same_bits(implementation, op, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(BF16)
    dy = x[:, :1] if op == "logsumexp" else x
    runs = [[np.asarray(a).tobytes() for a in forward_and_grad(implementation, op, x, dy)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


MANY = [(8200, 262144), (70000, 30720), (42744, 50257), (2_200_000, 1000)]  # 65535 is a grid's limit
MANY_ROWS = [("mosaic_gpu", "softmax", *shape) for shape in MANY]
MANY_ROWS += [("mosaic_gpu", "log_softmax", *MANY[1])]
MANY_ROWS += [("mosaic_gpu", "logsumexp", *shape) for shape in (MANY[0], MANY[3])]
MANY_ROWS += [("triton", "softmax", *shape) for shape in MANY] + [("triton", "logsumexp", *MANY[-1])]


# Repeating this many rows keeps the place of each row within lines of 128 bytes, where parts of rows begin.
DIFFERENT = 64


@much_memory
@pytest.mark.parametrize(("implementation", "op", "rows", "v"), MANY_ROWS, ids=str)
def test_more_than_2_to_the_31_elements(implementation, op, rows, v):
    """A few rows are repeated: all copies have the same bits, and the first ones are right."""
    x = np.random.default_rng(2).standard_normal((DIFFERENT, v)).astype(BF16)
    y = of_repeated_rows(function(implementation, op), rows, x)
    bounds.assert_operation(op, y, (x,), [f"row {i}" for i in range(DIFFERENT)])


MANY_GRADIENTS = [("mosaic_gpu", "softmax", *shape) for shape in MANY]
MANY_GRADIENTS += [("mosaic_gpu", "log_softmax", *MANY[0]), ("triton", "softmax", *MANY[0])]


@much_memory
@pytest.mark.parametrize(("implementation", "op", "rows", "v"), MANY_GRADIENTS, ids=str)
def test_more_than_2_to_the_31_elements_of_a_gradient(implementation, op, rows, v):
    x, dy = (np.random.default_rng(seed).standard_normal((DIFFERENT, v)).astype(BF16) for seed in (2, 3))
    y, dx = of_repeated_rows(functools.partial(forward_and_grad, implementation, op), rows, x, dy)
    bounds.assert_operation(f"{op}_grad", dx, (np.asarray(y), dy), [f"row {i}" for i in range(DIFFERENT)])
