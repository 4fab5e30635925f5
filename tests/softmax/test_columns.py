"""Softmax along other axes than the last: the kernel of columns, its plans, and the calls that it runs."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from pallas_softmax._src.gpu.hardware import RESERVED_SMEM_BYTES, smem_of_each
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax.columns_plan import Strips
from tests.softmax import kernels
from tests.softmax.kernels import COLUMN_STRIPS, COLUMN_TILES, EVEN, READ_STRIPS
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.covering import first, pairs, parameter_id
from tests.support.gpu import much_memory, on_a_gpu
from tests.support.lowering import array, kernel_names, kernel_results, lowered

pytestmark = pytest.mark.usefixtures("quick_compilation")

STRIPS = [(plan, plan.vocab, dtype, names) for plan, dtype, names in COLUMN_STRIPS]
READ = [(plan, plan.vocab, dtype, names) for plan, dtype, names in READ_STRIPS]
CASES = first(0, pairs(oracle.OPERATIONS, COLUMN_TILES)) + first(1, pairs(oracle.OPERATIONS[::-1], STRIPS))
CASES += first(0, pairs(["logsumexp"], READ))


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_columns(name, case):
    plan, v, dtype, names = case
    beyond = isinstance(plan, Strips) and (plan.lines_beyond or len(names) // 2 % plan.width)
    if jax.__version_info__ < (0, 11) and beyond:
        pytest.skip("the interpreter of jax 0.10 has no copies that reach beyond an array")
    if name == "logsumexp":  # XLA's maximum on the CPU loses the NaN of these rows and gives +inf
        names = [n if n not in ("nan_and_inf", "everything") else "normal" for n in names]
    kernels.assert_columns(name, cases.rows(names, v, dtype), names, plan)


AXES = [("softmax", (1,)), ("log_softmax_grad", (0,)), ("logsumexp", (1, 2)), ("softmax_grad", (0, 1))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), AXES, ids=str)
def test_adjacent_axes(name, axes):
    """One or several axes; the result has the shape of the public function's result."""
    rng = np.random.default_rng(4)
    arrays = rng.standard_normal((2 if name in oracle.BACKWARD else 1, 2, 20, 2, 16)).astype(F32)

    vocab, inner = np.prod([arrays[0].shape[a] for a in axes]), np.prod(arrays[0].shape[axes[-1] + 1 :])
    plan = kernels.plan_columns(name, arrays[0].size // (vocab * inner), int(vocab), int(inner), F32)
    assert isinstance(plan, Tile)
    got = kernels.softmax_rows(name, arrays, axes=axes)
    kept = tuple(1 if a in axes and name == "logsumexp" else n for a, n in enumerate(arrays[0].shape))
    assert got.shape == kept
    got, *folded = (cases.along_last(a, axes) for a in (got, *arrays))
    bounds.assert_operation(name, got, folded)


SHAPES = [
    (1, 1, 8), (1, 2, 3), (8, 21, 262144), (8, 21, 262143), (64, 128, 4096), (1, 1000, 100000),
    (1, 4096, 4096), (1, 25000, 4000), (2, 50257, 768), (5, 1000003, 16), (3, 300, 4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", oracle.OPERATIONS)
def test_plans_fit_the_gpu(op, dtype):
    arrays, itemsize = (2 if op in oracle.BACKWARD else 1), jnp.dtype(dtype).itemsize
    for outer, vocab, inner in SHAPES:
        plan = kernels.plan_columns(op, outer, vocab, inner, dtype)
        if isinstance(plan, Tile):
            rows, width = plan.shape
            assert rows >= vocab and inner % plan.vec == 0
            assert rows * width * arrays <= 12_288  # registers
        elif plan is not None:
            assert plan.vocab == vocab and inner * itemsize % 16 == 0
            # limits of a bulk copy and of barriers
            assert plan.step_rows <= 256 and plan.width <= 256 and plan.slots <= 32
            assert plan.step_rows % plan.block_tile.rows == 0 and plan.width * itemsize % 16 == 0
            assert plan.width < inner  # otherwise copies would not end with lines
            assert plan.slots * plan.step_rows * plan.width * itemsize * arrays <= 217 * 1024
            assert plan.count * plan.steps * plan.step_rows >= vocab
            assert plan.slots == plan.steps or plan.turns > 1 or op == "logsumexp"
            assert plan.count in (1, 2, 4, 8, 16)


PLANS = [
    # A gradient reads two arrays; the shared memory of a cluster must hold the columns of both.
    ("softmax_grad", (1, 4096, 4096), F32, Strips(4096, 32, 16, 96, 3)),
    ("softmax_grad", (1, 4096, 4096), BF16, Strips(4096, 64, 16, 88, 3)),
    ("softmax_grad", (1, 1000, 100000), F32, Strips(1000, 32, 4, 96, 3)),
    ("softmax_grad", (1, 12000, 8000), F32, Strips(12000, 32, 16, 112, 7, turns=36)),
    ("softmax_grad", (1, 12000, 8000), BF16, Strips(12000, 64, 16, 112, 7, turns=18)),
    ("softmax_grad", (1, 12000, 2000), F32, Strips(12000, 16, 16, 192, 4)),
    ("softmax_grad", (1, 25000, 4000), F32, Strips(25000, 16, 16, 224, 7)),
    ("softmax_grad", (1, 25000, 4000), BF16, Strips(25000, 32, 16, 224, 7)),
    ("softmax_grad", (1, 27000, 4000), F32, None),
    # Tall columns take turns if a cluster has ten strips or more and its shared memory holds their parts.
    ("softmax", (1, 25000, 4000), F32, Strips(25000, 32, 16, 112, 15, turns=18)),
    ("log_softmax", (1, 13312, 2048), F32, Strips(13312, 32, 16, 112, 15, turns=10)),
    ("softmax", (1, 12544, 4000), F32, Strips(12544, 32, 16, 112, 7)),
    ("softmax", (1, 25000, 2016), F32, Strips(25000, 16, 16, 224, 7)),
    ("softmax", (1, 25000, 4000), BF16, Strips(25000, 32, 16, 224, 7)),
    ("softmax", (1, 25000, 8000), BF16, Strips(25000, 64, 16, 112, 15, turns=18)),
    ("softmax", (1, 14000, 8000), BF16, Strips(14000, 32, 16, 224, 4)),
    ("softmax", (2, 50257, 768), F32, Strips(50257, 16, 16, 224, 15)),
    ("logsumexp", (1, 25000, 4000), F32, Strips(25000, 32, 16, 112, 3)),
    # With lines of odd length, a thread takes several lines if registers suffice and all multiprocessors work.
    ("softmax", (8, 21, 262143), F32, Tile(21, 128, 1, 3)),
    ("softmax_grad", (8, 21, 262143), F32, Tile(21, 128, 1, 2)),
    ("softmax", (8, 21, 9001), F32, Tile(21, 128, 1, 2)),
    ("softmax", (8, 32, 262143), F32, Tile(32, 128, 1, 2)),
    ("softmax", (8, 21, 262142), F32, Tile(21, 128, 2, 1)),
    ("softmax", (64, 128, 4095), F32, Tile(128, 32, 1, 1)),
]


@pytest.mark.parametrize(("op", "shape", "dtype", "want"), PLANS, ids=str)
def test_plan(op, shape, dtype, want):
    plan = kernels.plan_columns(op, *shape, dtype)
    assert (dataclasses.replace(plan, reserved_bytes=0) if isinstance(plan, Tile) else plan) == want


CTAS = [((8, 21, 262143), F32, 2), ((8, 21, 262143), BF16, 4), ((8, 7, 500001), F32, 4), ((8, 21, 262142), F32, 0)]


@pytest.mark.parametrize(("shape", "dtype", "ctas"), CTAS, ids=str)
def test_few_ctas_at_once(shape, dtype, ctas):
    """With lines of odd length, a tile reserves so much shared memory that a multiprocessor holds few CTAs; 0: any."""
    tile = kernels.plan_columns("softmax", *shape, dtype)
    assert isinstance(tile, Tile)
    of_each = tile.reserved_bytes + RESERVED_SMEM_BYTES
    if ctas == 0:
        assert tile.reserved_bytes == 0
    else:
        assert smem_of_each((9, 0), ctas + 1) < of_each <= smem_of_each((9, 0), ctas)


LOWERED = {
    "registers": ((8, 21, 4096), 1),
    "registers, unaligned": ((8, 21, 4095), 1),
    "shared memory": ((1000, 8192), 0),
    "cluster": ((8192, 512), 0),
    "tall": ((25000, 4000), 0),
}


CALLS = [*pairs(oracle.FORWARD, [*LOWERED][:-1], ["float32", "bfloat16"]), ("softmax", "tall", "float32")]


@pytest.mark.parametrize(("op", "case", "dtype"), first(1, CALLS), ids=str)
def test_columns_lower_without_a_transpose(op, case, dtype):
    shape, axis = LOWERED[case]
    x = array(*shape, dtype=dtype)
    assert [choice.cuda for choice in ps.explain(lambda x: getattr(ps, op)(x, axis), x)][0] == "mosaic_gpu"
    text = lowered(lambda x: getattr(ps, op)(x, axis), x)
    assert kernel_names(text) == [f"{op}_forward"]
    assert "stablehlo.transpose" not in text
    if op != "logsumexp":
        text = lowered(jax.grad(lambda x: jnp.sum(getattr(ps, op)(x, axis).astype(F32) ** 2)), x)
        assert kernel_names(text) == [f"{op}_forward", f"{op}_grad"]
        assert "stablehlo.transpose" not in text


WITHOUT_A_KERNEL = [
    ((8, 21, 4096), (0, 2), False), ((8, 21, 4096), (1,), True), ((25000, 255), (0,), False),
    ((131072, 21, 8), (1,), False), ((100000, 4096), (0,), False),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "axes", "masked"), WITHOUT_A_KERNEL, ids=str)
def test_calls_that_xla_runs(shape, axes, masked):
    """Axes that are not adjacent; masks; lines not of a multiple of 16 bytes; few columns, long columns."""
    where = np.ones((1,) * len(shape), bool) if masked else None
    (forward, backward) = ps.explain(lambda x: ps.softmax(x, axes, where), array(*shape))
    for choice in (forward, backward):
        assert choice.cuda == "xla"
        assert "transposed" in dict(choice.reasons)["mosaic_gpu"]


def test_columns_under_vmap_and_in_shards():
    """A batch becomes an outer axis; each device chooses for its own shard."""
    batch = lowered(jax.vmap(lambda x: ps.softmax(x, 0)), array(4, 21, 4096))
    assert kernel_results(batch) == [["4x21x4096xf32"]]
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        x = array(21, 4096, sharding=NamedSharding(mesh, P(None, "i")))
        assert kernel_results(lowered(lambda x: ps.softmax(x, 0), x)) == [["1x21x2048xf32"]]


# (plan, V, dtype, rows). Tiles with every number of lanes; clusters of every size. Strips end with the array, and
# beyond it; the last CTA of a cluster has few lines, or none.
ON_A_GPU = [
    (Tile(24, 32, 1, 1), 21, F32, ALL),
    (Tile(128, 8, 4, 1), 127, BF16, EVEN),
    (Tile(8, 128, 4, 1), 8, F16, EVEN),
    (Tile(1024, 2, 4, 1), 1000, F32, EVEN),
    (Strips(1000, 8, 1, 128, 8), 1000, F32, EVEN),
    (Strips(1000, 8, 2, 64, 8), 1000, BF16, EVEN),
    (Strips(1024, 8, 4, 256, 1), 1024, F16, EVEN),
    (Strips(5000, 8, 8, 64, 10), 5000, F32, EVEN),
    (Strips(25000, 8, 16, 256, 7), 25000, F32, EVEN),
    (Strips(3000, 8, 16, 256, 1), 3000, BF16, EVEN),
    (Strips(1000, 64, 16, 64, 1), 1000, BF16, EVEN * 5),
    # strips in turns: slots for one strip, for more than one, and for all; the last cluster takes fewer strips
    (Strips(127, 8, 1, 64, 2, turns=4), 127, F32, EVEN),
    (Strips(1000, 8, 2, 64, 11, turns=3), 1000, BF16, EVEN),
    (Strips(3000, 8, 16, 64, 9, turns=3), 3000, F32, EVEN),
    (Tile(24, 128, 1, 3), 21, F32, EVEN * 13),
]


GPU_CASES = [(name, *case) for name, case in pairs(oracle.OPERATIONS, ON_A_GPU)]
# the slots of the one or two arrays fill a multiprocessor
GPU_CASES += [
    (op, Strips(v, width, 16, 112, slots, turns=2), v, dtype, EVEN * 5)
    for op in oracle.OPERATIONS
    for v, slots in [(12000, 7) if op in oracle.BACKWARD else (25000, 15)]
    for dtype, width in [(F32, 32), (BF16, 64)]
]
# columns that are only read use the same slots again
GPU_CASES += [("logsumexp", Strips(5000, 8, 8, 64, 3), 5000, F32, EVEN)]
GPU_CASES += [("logsumexp", Strips(3000, 8, 1, 64, 1), 3000, F32, EVEN)]


@on_a_gpu
@pytest.mark.parametrize(("name", "plan", "v", "dtype", "names"), GPU_CASES, ids=parameter_id)
def test_every_plan_on_a_gpu(name, plan, v, dtype, names):
    kernels.assert_columns(name, cases.rows(names, v, dtype), names, plan, interpret=None)


PUBLIC = [
    ((1, 2, 40), 1), ((2, 21, 1040), 1), ((3, 127, 517), 1), ((2, 1000, 264), 1), ((4096, 128), 0),
    ((25000, 96), 0), ((50257, 96), 0), ((25000, 255), 0),
]  # fmt: skip


@on_a_gpu
def test_more_clusters_than_fit_on_a_gpu():
    """With more clusters than the GPU has room for, no CTA exits while its cluster reads its shared memory."""
    rng = np.random.default_rng(3)
    arrays = [jnp.asarray(rng.standard_normal((1, 4096, 4096)), F32) for _ in range(2)]
    chosen = kernels.plan_columns("softmax_grad", 1, 4096, 4096, F32)
    turned = Strips(4096, 32, 8, 64, 8, turns=5)
    for plan in (Strips(4096, 16, 8, 128, 4), Strips(4096, 32, 8, 64, 8), turned, chosen):
        run = jax.jit(functools.partial(kernels.columns_results, "softmax_grad", plan=plan, interpret=None))
        for _ in range(20):
            (dx,) = jax.block_until_ready(run(arrays))
        y, dy = (np.asarray(a[0, :, :8], np.float64) for a in arrays)
        want = y * (dy - np.sum(y * dy, 0))
        np.testing.assert_allclose(dx[0, :, :8], want, rtol=1e-4, atol=1e-2)


@on_a_gpu
@much_memory
@pytest.mark.parametrize("shape", [(1, 1000, 2_200_000), (30_000, 21, 4096), (2, 25_000, 48_000)], ids=str)
def test_more_than_2_to_the_31_elements_on_a_gpu(shape):
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
    bounds.assert_operation("softmax", y, (x,))
    bounds.assert_operation("softmax_grad", dx, (np.asarray(y), dy))
    assert all(same)


@on_a_gpu
@pytest.mark.parametrize(("op", "case", "dtype"), pairs(oracle.FORWARD, PUBLIC, [F32, BF16]), ids=str)
def test_forward_and_gradient_on_a_gpu(op, case, dtype):
    """The public function is right, and a second run gives the same bits."""
    shape, axis = case
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype) * dtype.type(4)
    f = functools.partial(getattr(ps, op), axis=axis)
    y, pullback = jax.vjp(f, jnp.asarray(x))
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(dtype)
    (dx,) = pullback(jnp.asarray(dy))

    def rows(a):
        return np.moveaxis(np.asarray(a), axis, -1).reshape(-1, shape[axis])

    if op != "logsumexp":
        bounds.assert_operation(op, rows(y), [rows(x)])
        bounds.assert_operation(f"{op}_grad", rows(dx), [rows(y), rows(dy)])
    else:
        bounds.assert_operation(op, np.asarray(y).reshape(-1, 1), [rows(x)])
    np.testing.assert_array_equal(f(jnp.asarray(x)), y)
