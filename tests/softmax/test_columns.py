"""Softmax along other axes than the last: the kernel of columns, its plans, and the calls that it runs.

test_columns_gpu.py tests clusters and inline PTX on a GPU.
"""

import dataclasses

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
from tests.softmax.kernels import COLUMN_STRIPS, COLUMN_TILES, READ_STRIPS
from tests.support import bounds, cases, oracle
from tests.support.cases import BF16, F32
from tests.support.covering import first, pairs
from tests.support.lowering import array, kernel_names, kernel_results, lowered

pytestmark = pytest.mark.usefixtures("quick_compilation")


# --- Numbers in the interpreter -----------------------------------------------------------------------


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

    def rows(a):
        moved = np.moveaxis(a, axes, range(-len(axes), 0))
        return moved.reshape(-1, np.prod(moved.shape[-len(axes) :]))

    vocab, inner = np.prod([arrays[0].shape[a] for a in axes]), np.prod(arrays[0].shape[axes[-1] + 1 :])
    plan = kernels.plan_columns(name, arrays[0].size // (vocab * inner), int(vocab), int(inner), F32)
    assert isinstance(plan, Tile)
    got = kernels.softmax_rows(name, arrays, axes=axes)
    kept = tuple(1 if a in axes and name == "logsumexp" else n for a, n in enumerate(arrays[0].shape))
    assert got.shape == kept
    folded = [rows(a) for a in arrays]
    bounds.assert_operation(name, rows(got), folded, [f"row {i}" for i in range(len(folded[0]))])


# --- Plans --------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 8), (1, 2, 3), (8, 21, 262144), (8, 21, 262143), (64, 128, 4096), (1, 1000, 100000)]
SHAPES += [(1, 4096, 4096), (1, 25000, 4000), (2, 50257, 768), (5, 1000003, 16), (3, 300, 4)]


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
    ("softmax_grad", (1, 4096, 4096), F32, Strips(4096, 32, 4, 16, 96, 3)),
    ("softmax_grad", (1, 4096, 4096), BF16, Strips(4096, 64, 4, 16, 88, 3)),
    ("softmax_grad", (1, 1000, 100000), F32, Strips(1000, 32, 4, 4, 96, 3)),
    ("softmax_grad", (1, 12000, 8000), F32, Strips(12000, 32, 4, 16, 112, 7, turns=36)),
    ("softmax_grad", (1, 12000, 8000), BF16, Strips(12000, 64, 4, 16, 112, 7, turns=18)),
    ("softmax_grad", (1, 12000, 2000), F32, Strips(12000, 16, 4, 16, 192, 4)),
    ("softmax_grad", (1, 25000, 4000), F32, Strips(25000, 16, 4, 16, 224, 7)),
    ("softmax_grad", (1, 25000, 4000), BF16, Strips(25000, 32, 4, 16, 224, 7)),
    ("softmax_grad", (1, 27000, 4000), F32, None),
    # Tall columns take turns if a cluster has ten strips or more and its shared memory holds their parts.
    ("softmax", (1, 25000, 4000), F32, Strips(25000, 32, 4, 16, 112, 15, turns=18)),
    ("log_softmax", (1, 13312, 2048), F32, Strips(13312, 32, 4, 16, 112, 15, turns=10)),
    ("softmax", (1, 12544, 4000), F32, Strips(12544, 32, 4, 16, 112, 7)),
    ("softmax", (1, 25000, 2016), F32, Strips(25000, 16, 4, 16, 224, 7)),
    ("softmax", (1, 25000, 4000), BF16, Strips(25000, 32, 4, 16, 224, 7)),
    ("softmax", (1, 25000, 8000), BF16, Strips(25000, 64, 4, 16, 112, 15, turns=18)),
    ("softmax", (1, 14000, 8000), BF16, Strips(14000, 32, 4, 16, 224, 4)),
    ("softmax", (2, 50257, 768), F32, Strips(50257, 16, 4, 16, 224, 15)),
    ("logsumexp", (1, 25000, 4000), F32, Strips(25000, 32, 4, 16, 112, 3)),
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


CTAS = [
    ((8, 21, 262143), F32, 2),
    ((8, 21, 262143), BF16, 4),
    ((8, 7, 500001), F32, 4),
    ((8, 21, 262142), F32, 0),
]


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


# --- Calls of the kernel ------------------------------------------------------------------------------

LOWERED = {
    "registers": ((8, 21, 4096), 1),
    "registers, unaligned": ((8, 21, 4095), 1),
    "shared memory": ((1000, 8192), 0),
    "cluster": ((8192, 512), 0),
}


@pytest.mark.parametrize(
    ("op", "case", "dtype"), first(1, pairs(oracle.FORWARD, LOWERED, ["float32", "bfloat16"])), ids=str
)
def test_columns_lower_without_a_transpose(op, case, dtype):
    """Forward and gradient are kernels only."""
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


@pytest.mark.parametrize(
    ("shape", "axes", "masked"),
    [
        ((8, 21, 4096), (0, 2), False),
        ((8, 21, 4096), (1,), True),
        ((25000, 255), (0,), False),
        ((131072, 21, 8), (1,), False),
        ((100000, 4096), (0,), False),
    ],
    ids=str,
)
def test_calls_that_xla_runs(shape, axes, masked):
    """Axes that are not adjacent; masks; lines not of a multiple of 16 bytes; few columns, long columns."""
    where = np.ones((1,) * len(shape), bool) if masked else None
    (forward, backward) = ps.explain(lambda x: ps.softmax(x, axes, where), array(*shape))
    for choice in (forward, backward):
        assert choice.cuda == "xla"
        assert "transposed" in dict(choice.reasons)["mosaic_gpu"]


@pytest.mark.slow
def test_tall_columns_lower():
    """Strips in turns, and the gradient."""
    text = lowered(jax.grad(lambda x: jnp.sum(ps.softmax(x, 0) ** 2)), array(25000, 4000))
    assert kernel_names(text) == ["softmax_forward", "softmax_grad"]


def test_columns_under_vmap_and_in_shards():
    """A batch becomes an outer axis; each device chooses for its own shard."""
    batch = lowered(jax.vmap(lambda x: ps.softmax(x, 0)), array(4, 21, 4096))
    assert kernel_results(batch) == [["4x21x4096xf32"]]
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        x = array(21, 4096, sharding=NamedSharding(mesh, P(None, "i")))
        assert kernel_results(lowered(lambda x: ps.softmax(x, 0), x)) == [["1x21x2048xf32"]]
