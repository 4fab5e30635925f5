"""The Mosaic GPU kernels of softmax, log_softmax and logsumexp: in Pallas's interpreter, lowered for CUDA, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.plan import Parts
from tests.softmax import kernels
from tests.softmax.kernels import IN_TURNS, PARTS, READ_AGAIN
from tests.support import bounds, cases, oracle
from tests.support.calls import DTYPES
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.covering import first, pairs, parameter_id
from tests.support.gpu import (
    LONG,
    VERY_LONG,
    assert_forward_and_grad,
    both,
    each,
    forward_and_grad,
    function,
    judge,
    much_memory,
    of_repeated_rows,
    on_a_gpu,
)
from tests.support.lowering import CALLS, MASKS, array, kernel_names, kernel_results, lowered, mask_of, square_sum
from tests.support.twins import fewer_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


# (V, dtype, rows), with the package's plans. Rows over 2 to 128 lanes, several to a CTA; whole vectors and single
# elements; several vectors per lane.
TILES = [
    (129, F32, FEW[:1]), (7, F16, FEW), (1000, F32, ALL), (2, BF16, FEW), (127, F32, FEW), (128, BF16, FEW),
    (1003, F16, FEW), (5000, F32, FEW[:3]), (1, F32, FEW), (129, F16, FEW), (1000, BF16, ALL),
]  # fmt: skip
CASES = first(1, pairs(oracle.OPERATIONS, TILES)) + first(1, pairs(oracle.OPERATIONS[::-1], PARTS))
ELEMENTWISE = [op for op in oracle.OPERATIONS if op != "logsumexp"]
CASES += first(0, pairs(ELEMENTWISE, IN_TURNS + READ_AGAIN))


@pytest.mark.parametrize(("name", "rows"), CASES, ids=parameter_id)
def test_rows_interpreted(name, rows):
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


# (plan, pattern). Every broadcast for short rows; for long rows mostly broadcasts that differ along the row.
MASKED_KINDS = [
    (None, "bhqv"), (Parts(1003, 4, 2, 2, False), "b11v"), (Parts(1024, 4, 2, 1, True), "1hqv"),
    (None, "1h11"), (Parts(1003, 4, 2, 1, True), "bhqv"), (None, "b11v"),
]  # fmt: skip
MASKED_KINDS += [(None, pattern) for pattern in ("111v", "bhq1", "b1q1", "1hqv", "1111")]
MASKED_KINDS += [(Parts(1003, 4, 2, 2, False), "bhq1"), (Parts(1024, 4, 2, 1, True), "1h11")]
WHERE = pairs(MASKED_KINDS, ["log_softmax", "logsumexp", "softmax", "log_softmax_grad"])
WHERE += [((Parts(1003, 4, 1, 1, True, teams=4, slots=3), "bhqv"), "softmax")]


@pytest.mark.parametrize(("masked", "name"), first(1, WHERE), ids=str)
def test_where_interpreted(masked, name):
    """Masked elements are NaN or infinite. The first row of the mask keeps nothing, and another row keeps only -inf."""
    plan, pattern = masked
    x, where, names = cases.broadcast_rows(pattern, plan.vocab if plan else 100)
    kernels.assert_softmax(name, x, names, where, plan)


AXES = [("logsumexp", (0,)), ("logsumexp", (0, 1)), ("logsumexp", (0, 2))]
# The inverse of the permutation that moves (0, 1) differs from it.
AXES += [("softmax_grad", axes) for axes in ((0, 1), (0, 2), (0,), (0, 1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), AXES, ids=str)
def test_axes_interpreted(name, axes):
    """Any axes give the same bits as moved to the end, with a mask that may lack one of the axes."""
    rng = np.random.default_rng(4)
    arrays = rng.standard_normal((2 if name in oracle.BACKWARD else 1, 40, 3, 50)).astype(F32)
    where = rng.random((1, 3, 50)) < 0.7

    plan = Parts(6000, 4, 4, 1, True) if len(axes) == 3 else None  # the interpreter has no clusters
    got = kernels.softmax_rows(name, arrays, where, axes, plan)
    *rows, kept = (cases.along_last(a, axes) for a in (*arrays, np.broadcast_to(where, arrays[0].shape)))
    want = kernels.softmax_rows(name, rows, kept, plan=plan)
    np.testing.assert_array_equal(cases.along_last(got, axes), want)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Parts(1003, 4, 2, 2, False), Parts(1003, 4, 2, 1, True), None], ids=str)
def test_normalizer_of_logsumexp_interpreted(plan):
    """logsumexp returns the normalizer for its gradient; m is exact."""
    x = cases.rows(ALL, 1003)
    _, m, d = kernels.softmax_results("logsumexp", (x,), plan=plan)
    want_m, want_d = oracle.normalizer(x)
    bounds.assert_close(m, want_m, np.zeros_like(want_m), ALL)
    bounds.assert_close(d, want_d, bounds.normalizer_unit(x), ALL)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "name"), pairs([None, Parts(128 * 3, 4, 2, 1, True)], oracle.BACKWARD), ids=str)
def test_special_cotangents_interpreted(plan, name):
    v = plan.vocab if plan else 128
    names = [n for n in ALL if n != "huge"]  # its sum may overflow in float32
    y, _ = cases.operands(name, cases.rows(["normal"], v).repeat(len(names), 0))
    arrays = y, cases.rows(names, v)
    bounds.assert_operation(name, kernels.softmax_rows(name, arrays, plan=plan), arrays, names)


PLACES = [Parts(1003, 4, 2, 1, True), Parts(1003, 4, 2, 2, False)]


@pytest.mark.parametrize(
    ("name", "plan", "masked"),
    first(2, pairs(["softmax", "log_softmax_grad", "logsumexp"], PLACES, [False, True])),
    ids=str,
)
def test_a_row_has_the_same_bits_at_any_place_interpreted(name, plan, masked):
    """Equal rows start at different elements of a line of device memory."""
    rng, rows, v = np.random.default_rng(0), 9, plan.vocab
    arrays = [rng.standard_normal((1, v)).astype(F32).repeat(rows, 0) for _ in range(1 + name.endswith("grad"))]
    where = rng.random((1, v)) < 0.7 if masked else None
    results = kernels.softmax_results(name, arrays, where, plan=plan)
    for result in results:
        np.testing.assert_array_equal(result, np.broadcast_to(result[:1], result.shape))


def test_masked_gradients_have_one_sign_interpreted():
    """A segment writes some elements twice, from its body and from its edges, in any order: a zero needs one sign."""
    where = np.random.default_rng(0).random((3, 1003)) < 0.7
    y = where / np.sum(where, -1, keepdims=True)
    arrays = y.astype(F32), np.full(y.shape, [[3], [-2], [1]], F32)
    dx = kernels.softmax_rows("softmax_grad", arrays, where, plan=Parts(1003, 4, 2, 1, True))
    for row, keep in zip(dx, where, strict=True):
        assert len({*np.signbit(row[~keep])}) == 1


# vectors of one element, and of eight; rows over a whole CTA
SHORT_ROWS = (15, 512, 1003, 1, 3, 7, 8, 31, 127, 5000)
# name: (V, CTAs of a row, whether they are a cluster)
KINDS_OF_LONG_ROWS = {
    "cluster, unaligned": (50257, 8, True),
    "one CTA": (8192, 1, True),
    "one CTA, unaligned": (10003, 1, True),
    "cluster": (65536, 4, True),
    "cluster of unequal parts": (20008, 2, True),
    "largest cluster": (151935, 16, True),
    "two launches": (1048576, 256, False),
    "two launches, unaligned": (1000003, 256, False),
}
# the same, and arguments of rows in turns. Slots for more than one row, and for less than one.
TURNS = {f"{slots} slots": (50257, 4, True, {"teams": 3, "slots": slots}) for slots in (9, 5)}
OPS_IN_TURNS = [
    ("softmax", 9, None), ("log_softmax_grad", 9, None), ("softmax", 9, "full"), ("softmax", 5, None),
    ("softmax_grad", 5, None),
]  # fmt: skip
LOWERED = pairs(oracle.OPERATIONS[::-1], [15, *KINDS_OF_LONG_ROWS, *SHORT_ROWS[1:]], DTYPES, [*MASKS, None])
LOWERED += [(op, f"{slots} slots", "float32", mask) for op, slots, mask in OPS_IN_TURNS]


def test_short_rows_cover_every_number_of_lanes():
    lanes = {kernels.plan_softmax("softmax", 5, v, "float32").lanes for v in SHORT_ROWS}
    assert lanes == {2, 4, 8, 16, 32, 128}


@pytest.mark.parametrize(("op", "kind", "dtype", "mask"), first(2, LOWERED))
def test_lowered_kernels(op, kind, dtype, mask):
    rows, v, plan = 8 if dtype == "bfloat16" else 5, kind, None
    if isinstance(kind, str):
        v, count, cluster, *turns = (KINDS_OF_LONG_ROWS | TURNS)[kind]
        plan = Parts(v, 16 // jnp.dtype(dtype).itemsize, 4, count, cluster, **dict(*turns))
    arrays = [array(rows, v, dtype=dtype)] * (2 if op in oracle.BACKWARD else 1)

    def f(arrays, where):
        return kernels.softmax_results(op, arrays, where, (1,), plan, interpret=None)

    kernel = op if op in oracle.BACKWARD else f"{op}_forward"
    names = [kernel]
    if plan is not None and not plan.cluster:
        names = [f"{kernel}_reduce"] if op == "logsumexp" else [f"{kernel}_reduce", kernel]
    assert kernel_names(lowered(f, arrays, mask_of(mask, rows, v))) == names


@pytest.mark.parametrize(("op", "call", "v"), first(1, pairs(oracle.FORWARD, {"grad": 0} | CALLS, [100, 20011])))
def test_lowered_public_functions(op, call, v):
    """Each function runs its kernel, and its gradient runs a kernel; logsumexp's gradient is plain JAX."""

    def f(x, axis=-1, where=None):
        return getattr(ps, op)(x, axis, where=where, implementation="mosaic_gpu")

    forward, backward = [f"{op}_forward"], [f"{op}_grad"]
    want = forward + backward if "grad" in call and op != "logsumexp" else forward
    text = lowered(CALLS[call](f), array(5, 3, v))
    assert [name for name in kernel_names(text) if not name.endswith("_reduce")] == want


@pytest.mark.slow
def test_lowered_integers_and_leading_axes_are_folded():
    def f(x, y, integers):
        return ps.softmax(x), ps.softmax(y, (1, 2)), ps.softmax(integers)

    text = lowered(f, array(16, 8, 16384), array(128, 2, 8192), array(64, 16384, dtype="int32"))
    assert kernel_results(text) == [["128x16384xf32"], ["128x16384xf32"], ["64x16384xf32"]]


@pytest.mark.parametrize(("shape", "implementation"), first(1, pairs([(1, 1000), (4, 1, 1000)], ["mosaic_gpu", None])))
def test_lowered_rows_of_one_element(implementation, shape):
    """Along an axis that is not the last one, XLA runs them by default, and a named kernel lowers."""
    f = jax.grad(square_sum(lambda x: ps.softmax(x, -2, implementation=implementation)))
    assert len(kernel_names(lowered(f, array(*shape)))) == (2 if implementation else 0)


@pytest.mark.slow
def test_lowered_grad_of_grad_of_softmax():
    """The second derivative is plain JAX, but the function and its gradient still run as kernels."""
    second = jax.grad(square_sum(jax.grad(square_sum(ps.softmax))))
    assert len(kernel_results(lowered(second, array(128, 16384)))) >= 2


# Rows in registers, in one CTA, in a cluster, in a cluster with unequal parts, in two launches; one row, or a prime
# number of rows.
SHAPES = [
    (1, F32, ALL), (2, BF16, ALL), (127, F16, ALL), (128, F32, ALL), (129, BF16, ALL),
    (1000, F32, ALL), (1000, F16, ALL), (1000, BF16, FEW[:1]), (20011, F32, ALL),
    (50257, F32, LONG[:1]), (100003, F32, LONG[:1]), (200000, BF16, LONG[:1]), (50257, BF16, LONG),
    (128256, F16, LONG), (151935, F32, VERY_LONG), (151935, BF16, LONG), (151936, BF16, VERY_LONG[:1]),
    (262144, F32, VERY_LONG), (262144, BF16, VERY_LONG), (1000003, F32, VERY_LONG[:2]),
]  # fmt: skip


@on_a_gpu
@pytest.mark.parametrize(("v", "dtype", "names"), SHAPES, ids=[f"{len(n)}x{v}-{d}" for v, d, n in SHAPES])
@each
@both
def test_forward_and_grad_on_a_gpu(implementation, op, v, dtype, names):
    assert_forward_and_grad(implementation, op, cases.rows(names, v, dtype), names)


MASKED = [("softmax", 1003, F32, pattern) for pattern in cases.BROADCASTS]
MASKED += [(op, 50257, BF16, p) for op in ("log_softmax", "logsumexp") for p in ("bhqv", "b11v", "1h11")]


@on_a_gpu
@pytest.mark.parametrize(("op", "v", "dtype", "pattern"), MASKED, ids=str)
@both
def test_where_on_a_gpu(implementation, op, v, dtype, pattern):
    x, where, names = cases.broadcast_rows(pattern, v, dtype)
    assert_forward_and_grad(implementation, op, x, names, where)


CLUSTERS = [
    (Parts(1003, 4, 2, 2, True), F32, ALL),
    (Parts(2003, 8, 4, 4, True), BF16, [*ALL, "normal"]),
    (Parts(2048, 4, 1, 8, True), F32, FEW),
    (Parts(16 * 400, 8, 1, 16, True), F16, FEW),
    (Parts(5000, 8, 1, 2, True, per_cta=2), BF16, ALL),
]
CLUSTERS_IN_TURNS = [
    (Parts(1003, 4, 1, 2, True, teams=11, slots=3), F32, ALL),
    (Parts(2048, 4, 1, 8, True, teams=1, slots=1), F32, ALL),
    (Parts(16 * 400, 8, 1, 16, True, teams=4, slots=5), F16, FEW),
]

LONGEST = [
    (Parts(16 * 4000, 4, 1, 16, True, teams=4, slots=3), F32, FEW),
    (Parts(16 * 8000 + 1, 8, 1, 16, True, teams=4, slots=5), BF16, FEW),
]  # fmt: skip


TURNS_ON_A_GPU = IN_TURNS + READ_AGAIN + CLUSTERS_IN_TURNS + LONGEST
EVERY_PLAN = [(op, *plan, False) for op in oracle.OPERATIONS for plan in PARTS + CLUSTERS]
EVERY_PLAN += [(op, *plan, True) for op in oracle.OPERATIONS for plan in CLUSTERS[:2]]
EVERY_PLAN += [(op, *plan, False) for op in ELEMENTWISE for plan in TURNS_ON_A_GPU]
EVERY_PLAN += [(op, *CLUSTERS_IN_TURNS[0], True) for op in ELEMENTWISE]


@on_a_gpu
@pytest.mark.parametrize(("name", "plan", "dtype", "names", "masked"), EVERY_PLAN, ids=str)
def test_every_plan_on_a_gpu(name, plan, dtype, names, masked):
    x = cases.rows(names, plan.vocab, dtype)
    kernels.assert_softmax(
        name, x, names, cases.broadcast_mask("bv", x.shape) if masked else None, plan, interpret=None
    )


@on_a_gpu
@pytest.mark.parametrize(
    ("name", "v", "dtype"),
    [*zip(ELEMENTWISE, (1_000_000, 950_001, 500_009, 1_000_000), (F32, F32, F32, BF16))],
    ids=str,
)
def test_rows_longer_than_a_cluster_on_a_gpu(name, v, dtype):
    names = FEW * 4
    plan = kernels.plan_softmax(name, len(names), v, dtype)
    assert plan.cluster and plan.again
    kernels.assert_softmax(name, cases.rows(names, v, dtype), names, interpret=None)


@on_a_gpu
@both
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("v", [1000, 25000, 50257])
def test_both_modes_on_a_gpu(implementation, v, dtype):
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


@on_a_gpu
@pytest.mark.parametrize("shape", [(1031, 1000), (1031, 50257), (3, 1000003)], ids=str)
@each
@both
def test_repeated_runs_give_the_same_bits_on_a_gpu(implementation, op, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(BF16)
    dy = x[:, :1] if op == "logsumexp" else x
    runs = [[np.asarray(a).tobytes() for a in forward_and_grad(implementation, op, x, dy)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


MANY = [(8200, 262144), (70000, 30720), (42744, 50257), (2_200_000, 1000)]  # 65535 is a grid's limit
MANY_ROWS = [("mosaic_gpu", "softmax", True, *shape) for shape in MANY]
MANY_ROWS += [("mosaic_gpu", "log_softmax", True, *MANY[0]), ("triton", "softmax", True, *MANY[0])]
MANY_ROWS += [("mosaic_gpu", "log_softmax", False, *MANY[1])]
MANY_ROWS += [("mosaic_gpu", "logsumexp", False, *shape) for shape in (MANY[0], MANY[3])]
MANY_ROWS += [("triton", "softmax", False, *shape) for shape in MANY[1:]]
MANY_ROWS += [("triton", "logsumexp", False, *MANY[-1])]
# Repeating this many rows keeps the place of each row within lines of 128 bytes, where parts of rows begin.
DIFFERENT = 64


@on_a_gpu
@much_memory
@pytest.mark.parametrize(("implementation", "op", "gradient", "rows", "v"), MANY_ROWS, ids=str)
def test_more_than_2_to_the_31_elements_on_a_gpu(implementation, op, gradient, rows, v):
    """A few rows are repeated: all copies have the same bits, and the first ones are right."""
    x, dy = (np.random.default_rng(seed).standard_normal((DIFFERENT, v)).astype(BF16) for seed in (2, 3))
    if gradient:
        of_both = functools.partial(forward_and_grad, implementation, op)
        judge(op, of_repeated_rows(of_both, rows, x, dy), x, dy)
    else:
        bounds.assert_operation(op, of_repeated_rows(function(implementation, op), rows, x), (x,))
